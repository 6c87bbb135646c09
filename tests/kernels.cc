// Prints digests of what the kernels compute, to compare builds of them.
//
// Values come from a generator of integers, so all builds compute of the same
// ones. The program fails if rows that are multiplied together have other bits
// than those that are multiplied in smaller numbers.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include "blocks_of_128.cc"
#include "blocks_of_256.cc"
#include "layers.cc"
#include "states.cc"

using specdec::Blocks;

constexpr int64_t kMost = 33;  // Rows at once: one more than a tile has.

uint64_t state = 1;

uint32_t Draw() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 32;
}

// Above -1 and below 1.
float DrawFloat() { return static_cast<int32_t>(Draw()) * 0x1p-31f; }

std::vector<float> Floats(int64_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = DrawFloat();
  return values;
}

template <typename Value>
void Print(const std::string& name, const std::vector<Value>& values) {
  uint64_t digest = 14695981039346656037u;
  const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(Value); ++i) {
    digest = (digest ^ bytes[i]) * 1099511628211u;
  }
  std::printf("%s %016llx\n", name.c_str(),
              static_cast<unsigned long long>(digest));
}

struct OneThread {
  int64_t num_threads() const { return 1; }
  template <typename Task>
  void Schedule(Task) {}
};

// Words of weights; integers may all be the largest ones.
template <typename Format>
std::vector<uint32_t> Weights(int64_t count, int kind, bool largest) {
  std::vector<uint32_t> words(count);
  for (uint32_t& word : words) {
    word = specdec::BitCast<uint32_t>(DrawFloat());
    if (Format::kPerWord == 2) word = word >> 16 | (word & 0xffff0000);
    if (Format::kPerWord == 4 || kind > 0) {
      word = !largest ? Draw() : kind == 39 ? 0x77777777 : 0xffffffff;
    }
  }
  if (kind == 0) return words;
  // Lines of factors: float16 but for MXFP4, which has exponents.
  const int first = kind == 14 ? 52 : 0;
  const int lines = kind == 3 || kind == 7 ? 4 : kind <= 8 ? 2 : 1;
  const int64_t size = Blocks::NumWords(kind, 1) * specdec::kBlock;
  for (int64_t block = first * specdec::kBlock; block < count; block += size) {
    for (int64_t i = 0; i < lines * specdec::kBlock; ++i) {
      const uint32_t any = Draw();
      words[block + i] =
          kind == 39 ? (any & 0x0f0f0f0f) + 0x6e6e6e6e : any & 0x9fff9fff;
    }
  }
  return words;
}

// The products of rows of any values, or of rows of `value` if it is not 0, whose
// integers are all the largest or the smallest ones.
template <typename Format>
void Multiply(const std::string& name, int kind, int64_t width, float value,
              bool largest) {
  constexpr int64_t kOutputs = 45;  // A group and a part of one.
  const int64_t num_words = specdec::NumWords<Format>(kind, width);
  const auto words =
      Weights<Format>(2 * specdec::kGroup * num_words, kind, largest);
  std::vector<float> x = Floats(kMost * width), scale = Floats(kOutputs);
  const std::vector<float> bias = Floats(kOutputs);
  if (value != 0) x.assign(x.size(), value);
  OneThread pool;
  std::vector<float> together;
  for (int64_t rows = kMost; rows > 0; --rows) {
    std::vector<float> out(rows * kOutputs);
    specdec::Products products{x.data(), rows, width};
    products.matrices.push_back({words.data(), num_words, kind, kOutputs,
                                 scale.data(), {bias.data(), true}});
    products.activation = specdec::Activation::kNone;
    products.gated = false;
    products.residual = nullptr;
    products.out = out.data();
    products.outputs = kOutputs;
    specdec::Compute<Format>(pool, products);
    if (together.empty()) together = out;
    if (std::memcmp(out.data(), together.data(), 4 * out.size()) == 0) continue;
    std::printf("%s: %d rows differ\n", name.c_str(), static_cast<int>(rows));
    std::exit(1);
  }
  Print(name, together);
}

template <typename Format>
void MultiplyAll(const std::string& name, int kind = 0) {
  for (const int width : {37, 700}) {
    for (const int value : {0, 1, -1}) {
      for (const bool largest : {false, true}) {
        Multiply<Format>(name + " width " + std::to_string(width) + " values " +
                             std::to_string(value) + (largest ? " largest" : ""),
                         kind, width, value, largest);
      }
    }
  }
}

// Several texts, whose heads have norms and rotations.
template <typename Value>
void AttendSome(const std::string& name) {
  constexpr int64_t kHeads = 2, kQueries = 6, kSlots = 77;
  OneThread pool;
  for (const int64_t length : {1, 2, 3, 7, 16}) {
    for (const int64_t width : {18, 64}) {
      const int64_t entries = 2 * length, pairs = width / 2;
      const std::vector<float> rows =
          Floats(entries * (kQueries + 2 * kHeads) * width);
      const std::vector<float> norm = Floats(width);
      const std::vector<float> cos = Floats(entries * pairs);
      const std::vector<float> sin = Floats(entries * pairs);
      std::vector<Value> keys(2 * kHeads * kSlots * width), values(keys.size());
      for (auto* const cache : {&keys, &values}) {
        for (Value& value : *cache) {
          specdec::CopyFinite(Floats(1).data(), 1, &value);
        }
      }
      std::vector<uint8_t> mask(entries * kSlots);
      for (uint8_t& seen : mask) seen = Draw() >> 31;
      const int32_t start[] = {50, 9};
      std::vector<float> out(entries * kQueries * width);
      specdec::AttendAll<Value>(
          pool, {rows.data(), 2, length, kQueries, kHeads, width, kSlots, true,
                 {norm.data(), nullptr, 1e-5f, false},
                 {norm.data(), norm.data(), 1e-5f, true}, {}, cos.data(),
                 sin.data(), pairs, reinterpret_cast<const bool*>(mask.data()),
                 start, keys.data(), values.data(), 0.2f, out.data()});
      const std::string size =
          " " + std::to_string(length) + " " + std::to_string(width);
      Print(name + size, out);
      Print(name + " keys" + size, keys);
      Print(name + " values" + size, values);
    }
  }
}

// An array that XLA gives to a kernel.
struct Array {
  std::vector<int64_t> dims;
  std::vector<float> values;
  XLA_FFI_Buffer buffer;

  Array(std::initializer_list<int64_t> dims) : dims(dims), buffer() {
    int64_t size = 1;
    for (const int64_t dim : dims) size *= dim;
    values = Floats(size);
    buffer.data = values.data();
    buffer.dims = this->dims.data();
    buffer.rank = this->dims.size();
  }
  Array(std::initializer_list<int64_t> dims, const std::vector<int32_t>& integers)
      : Array(dims) {
    std::memcpy(values.data(), integers.data(), 4 * integers.size());
  }
  Array(const Array&) = delete;

  template <xla::ffi::DataType kType>
  operator xla::ffi::Buffer<kType>() {
    return xla::ffi::Buffer<kType>(&buffer);
  }
  template <xla::ffi::DataType kType>
  operator xla::ffi::Result<xla::ffi::Buffer<kType>>() {
    return xla::ffi::Buffer<kType>(&buffer);
  }
};

// Layers with a state, of one text and a tree of five nodes, or a path of them.
void Mix(const std::string& name, const std::vector<int32_t>& tree, bool tiled) {
  const XLA_FFI_Api api = [] {
    XLA_FFI_Api api = {};
    api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args*) {
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    return api;
  }();
  xla::ffi::DiagnosticEngine diagnostic;
  const auto pool = *xla::ffi::CtxDecoding<xla::ffi::ThreadPool>::Decode(
      &api, nullptr, diagnostic);
  constexpr int64_t kKey = 10, kValue = 37, kHeads = 4, kKeyHeads = 2;
  constexpr int64_t kKeys = kKeyHeads * kKey, kValues = kHeads * kValue;
  constexpr int64_t kWidth = 2 * kKeys + kValues, kBefore = 3, kSlots = 8;
  const int64_t length = 5;
  Array parents({1, kSlots}, tree), first({1}, {2}), none({0});
  Array conv_state{1, kBefore, kWidth}, weights{kBefore + 1, kWidth};
  Array inputs{1, 1, kSlots, kWidth};

  Array thirds{1, length, 3 * kWidth}, mixed{1, length, kWidth};
  specdec::MixConvolution(pool, thirds, conv_state, inputs, parents, first,
                          weights, none, mixed, inputs);
  Print(name + " convolution", mixed.values);
  Print(name + " inputs", inputs.values);

  Array projected{1, length, kWidth + kValues + 2 * kHeads};
  Array states{1, kHeads, kKey, kValue}, keys{1, 1, kSlots, kKeys};
  Array deltas{1, 1, kSlots, kValues}, decays{1, 1, kSlots, kHeads};
  Array rate{kHeads}, bias{kHeads}, norm{kValue}, out{1, length, kValues};
  specdec::MixDelta(pool, projected, conv_state, states, inputs, keys, deltas,
                    decays, parents, first, weights, rate, bias, norm, out,
                    inputs, keys, deltas, decays, 1e-5f, tiled);
  Print(name + " delta", out.values);
  Print(name + " keys", keys.values);
  Print(name + " deltas", deltas.values);
  Print(name + " decays", decays.values);

  Array slots({1, 4}, {0, 2, 3, 6}), count({1}, {3});
  specdec::FoldDelta(pool, states, keys, deltas, decays, slots, count, states,
                     tiled);
  Print(name + " states", states.values);
}

int main() {
  MultiplyAll<specdec::Float32>("float32");
  MultiplyAll<specdec::BFloat16>("bfloat16");
  MultiplyAll<specdec::Int8>("int8");
  for (const int kind : {2, 3, 6, 7, 8, 12, 13, 14, 39}) {
    MultiplyAll<Blocks>("blocks " + std::to_string(kind), kind);
  }
  AttendSome<float>("attention float32");
  AttendSome<uint16_t>("attention bfloat16");
  Mix("tree", {-1, 0, -1, 2, 2, 3, 4, 0}, false);
  Mix("path", {-1, 0, 1, 2, 3, 4, 5, 6}, true);
}
