// Products, attention and norms of few rows on CPU, called from XLA programs.
//
// Every sum is added up in an order that depends on nothing but its own terms:
// not on the number of rows, their places, the threads or masked slots. So a
// position has the same bits alone, in a batch and in a token tree.
//
// Vectors are GCC's vector extension, which Clang has, too, and which compiles
// to whatever the processor has (AVX-512, AVX2, NEON, none). Only the dot
// products of bfloat16 and int8 have instructions of their own below.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

namespace ffi = xla::ffi;

// Values of 32 bits in a register.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));

template <typename To, typename From>
To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename Vector>
Vector Load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

// The first `count` values; the other lanes are zero.
template <typename Vector, typename Value>
Vector LoadFirst(const Value* from, int64_t count) {
  if (count >= kLanes) return Load<Vector>(from);
  Vector vector = {};
  std::memcpy(&vector, from, count * sizeof(Value));
  return vector;
}

void StoreFirst(float* to, const Floats& vector, int64_t count) {
  std::memcpy(to, &vector, std::min<int64_t>(count, kLanes) * sizeof(float));
}

// Values of a cache as float32.
Floats LoadFloats(const float* from, int64_t count) {
  return LoadFirst<Floats>(from, count);
}

Floats LoadFloats(const uint16_t* from, int64_t count) {
  const Halves halves = LoadFirst<Halves>(from, count);
  return BitCast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

// The sum of the lanes, halves first.
float Sum(const Floats& vector) {
  float lanes[kLanes];
  std::memcpy(lanes, &vector, sizeof(lanes));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

constexpr int64_t kMinBytes = 1 << 18;  // A thread takes longer to wake up.

// Calls `body(i)` for all i below `count`, on this thread and, if `bytes` are
// many, on the pool's.
//
// This thread works, too, and waits only for indices that another thread has
// begun, so a pool that is busy or blocked delays nothing.
template <typename Body>
void ParallelFor(ffi::ThreadPool& pool, int64_t count, int64_t bytes,
                 const Body& body) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto state = std::make_shared<State>();
  auto work = [state, count, &body] {
    // A task that starts late gets no index, and does not touch `body`.
    for (int64_t i; (i = state->next.fetch_add(1)) < count;) {
      body(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t tasks =
      bytes < kMinBytes ? 0 : std::min(pool.num_threads(), count) - 1;
  for (int64_t task = 0; task < tasks; ++task) {
    pool.Schedule(decltype(work)(work));
  }
  work();
  while (state->done.load(std::memory_order_acquire) < count) {
    std::this_thread::yield();
  }
}

// Products.
//
// A packed matrix [out, in] has blocks of 16 outputs, in multiples of three:
//
//   words [out / 16, in / g, 16] of 32 bits, each with g consecutive weights of
//   one output: 1 float32, 2 bfloat16 or 4 int8 (plus 128, so unsigned)
//
// The sums of a few rows and blocks are kept in registers while going over the
// inputs in order. Rows are packed, too, so that what is multiplied with a word
// of weights is read from one place.

constexpr int kBlock = 16;
constexpr int kParts = kBlock / kLanes;  // Registers of a block.

// How each dtype is multiplied. `Pack` writes kFactors words of a row for each
// kPerWord weights, every `stride` words; `Step` adds the products of a register
// of weights with those words to sums that start at `*start`; in the end the
// sums are multiplied by the row's scale, which `Pack` returns.

struct Float32 {
  using Sums = Floats;
  static constexpr int kPerWord = 1;
  static constexpr int kFactors = 1;

  static float Pack(const float* row, int64_t width, uint32_t* words,
                    int64_t stride, int32_t*) {
    for (int64_t i = 0; i < width; ++i) {
      words[i * stride] = BitCast<uint32_t>(row[i]);
    }
    return 1.0f;
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    return sums + BitCast<Floats>(weights) * BitCast<float>(*x);
  }
};

// The bits of the nearest bfloat16, ties to even.
inline uint32_t RoundToBFloat16(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return is_nan ? (bits >> 16) | 0x40 : rounded;
}

// AMD multiplies pairs of bfloat16 twice as fast as float32, Intel (Sapphire
// Rapids) half as fast.
#if defined(__AVX512BF16__) && (defined(__znver4__) || defined(__znver5__))
struct BFloat16 {
  using Sums = Floats;
  static constexpr int kPerWord = 2;
  static constexpr int kFactors = 1;

  static float Pack(const float* row, int64_t width, uint32_t* words,
                    int64_t stride, int32_t*) {
    for (int64_t i = 0; i < width; ++i) {
      words[i / 2 * stride] |= RoundToBFloat16(row[i]) << 16 * (i % 2);
    }
    return 1.0f;
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    return (Sums)_mm512_dpbf16_ps((__m512)sums, BitCast<__m512bh>(weights),
                                  (__m512bh)_mm512_set1_epi32(*x));
  }
};
#else
struct BFloat16 {
  using Sums = Floats;
  static constexpr int kPerWord = 2;
  static constexpr int kFactors = 2;

  static float Pack(const float* row, int64_t width, uint32_t* words,
                    int64_t stride, int32_t*) {
    for (int64_t i = 0; i < width; ++i) {
      words[i / 2 * stride + i % 2] = RoundToBFloat16(row[i]) << 16;
    }
    return 1.0f;
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    const Floats even = BitCast<Floats>(weights << 16);
    const Floats odd = BitCast<Floats>(weights & 0xffff0000u);
    const Floats first = sums + even * BitCast<float>(x[0]);
    return first + odd * BitCast<float>(x[1]);
  }
};
#endif

struct Int8 {
  using Sums = Ints;
  static constexpr int kPerWord = 4;

#if defined(__AVX512VNNI__)
  static constexpr int kFactors = 1;

  static void Put(uint32_t* words, int place, int32_t value) {
    words[0] |= static_cast<uint32_t>(value & 0xff) << 8 * place;
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights,
                                     _mm512_set1_epi32(*x));
  }
#elif defined(__AVX2__)
  // Pairs of 16 bits: the weights at even places, then those at odd ones.
  static constexpr int kFactors = 2;

  static void Put(uint32_t* words, int place, int32_t value) {
    words[place % 2] |= static_cast<uint32_t>(value & 0xffff)
                        << 16 * (place / 2);
  }

  static Ints MultiplyPairs(const Words& weights, uint32_t x) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(x));
#else
    return (Ints)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(x));
#endif
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    return sums + MultiplyPairs(weights & 0x00ff00ffu, x[0]) +
           MultiplyPairs(weights >> 8 & 0x00ff00ffu, x[1]);
  }
#else
  static constexpr int kFactors = 4;

  static void Put(uint32_t* words, int place, int32_t value) {
    words[place] = value;
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    Sums result = sums;
    for (int place = 0; place < 4; ++place) {
      const Words bytes = weights >> 8 * place & 0xffu;
      result += BitCast<Ints>(bytes) * static_cast<int32_t>(x[place]);
    }
    return result;
  }
#endif

  // Rounds a row to integers times a scale. Since the weights are 128 too large,
  // the sums start at minus 128 times the sum of the row.
  static float Pack(const float* row, int64_t width, uint32_t* words,
                    int64_t stride, int32_t* start) {
    uint32_t bits = 0;  // Of the largest; in the order of non-negative floats.
    for (int64_t i = 0; i < width; ++i) {
      bits = std::max(bits, BitCast<uint32_t>(row[i]) & 0x7fffffff);
    }
    // The products of a row that is not finite are not finite either.
    if (bits >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
    const float peak = BitCast<float>(bits);
    const float scale = peak == 0.0f ? 1.0f : peak / 127.0f;
    int32_t sum = 0;
    for (int64_t i = 0; i < width; ++i) {
      const auto value = static_cast<int32_t>(std::nearbyint(row[i] / scale));
      sum += value;
      Put(words + i / 4 * stride, i % 4, value);
    }
    *start = -128 * sum;
    return scale;
  }
};

// Rows and blocks that are multiplied at once, as many as registers hold.
#if defined(__AVX512F__)
constexpr int kRows = 8, kBlocks = 3;  // 24 sums of 32 registers.
#elif defined(__AVX__)
constexpr int kRows = 6, kBlocks = 1;  // 12 of 16.
#else
constexpr int kRows = 4, kBlocks = 1;  // 16 of 32 (Arm).
#endif
constexpr int64_t kPrefetch = 2048;  // Bytes ahead.

// Packed rows: tiles of kRows rows (the last of fewer), each
// [words of weights, rows, kFactors].
struct Rows {
  int64_t count;
  int64_t words;  // Of the weights of an output.
  std::vector<uint32_t> packed;
  std::vector<float> scale;
  std::vector<int32_t> start;
};

template <typename Kind>
Rows PackRows(const float* x, int64_t count, int64_t width) {
  const int64_t words = (width + Kind::kPerWord - 1) / Kind::kPerWord;
  Rows rows{count, words,
            std::vector<uint32_t>(count * words * Kind::kFactors),
            std::vector<float>(count), std::vector<int32_t>(count)};
  for (int64_t row = 0; row < count; ++row) {
    const int64_t first = row / kRows * kRows;
    const int64_t in_tile = std::min<int64_t>(kRows, count - first);
    uint32_t* const to = rows.packed.data() +
                         (first * words + row - first) * Kind::kFactors;
    rows.scale[row] = Kind::Pack(x + row * width, width, to,
                                 in_tile * Kind::kFactors, &rows.start[row]);
  }
  return rows;
}

struct Columns {  // Outputs that are multiplied at once.
  const uint32_t* blocks;
  const float* scale;  // Of int8.
  int64_t count;  // Of outputs from here to the end.
  float* out;
  int64_t stride;  // Of `out`, from row to row.
};

// Multiplies R rows from `first` on with the outputs of kBlocks blocks.
template <typename Kind, int R>
void Tile(const Rows& rows, int64_t first, const Columns& columns) {
  constexpr int kRegisters = kBlocks * kParts;
  typename Kind::Sums sums[R][kRegisters] = {};
  for (int r = 0; r < R; ++r) {
    for (auto& sum : sums[r]) {
      if constexpr (Kind::kPerWord == 4) sum += rows.start[first + r];
    }
  }
  const uint32_t* x = rows.packed.data() + first * rows.words * Kind::kFactors;
  for (int64_t word = 0; word < rows.words; ++word, x += R * Kind::kFactors) {
    Words weights[kRegisters];
    for (int c = 0; c < kBlocks; ++c) {
      const uint32_t* from = columns.blocks + (c * rows.words + word) * kBlock;
      for (int part = 0; part < kParts; ++part) {
        weights[c * kParts + part] = Load<Words>(from + part * kLanes);
      }
      __builtin_prefetch(reinterpret_cast<const char*>(from) + kPrefetch);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        sums[r][i] = Kind::Step(sums[r][i], weights[i], x + r * Kind::kFactors);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < kRegisters && i * kLanes < columns.count; ++i) {
      const int64_t left = columns.count - i * kLanes;
      float* const to =
          columns.out + (first + r) * columns.stride + i * kLanes;
      if constexpr (Kind::kPerWord == 4) {
        const Floats scale = LoadFloats(columns.scale + i * kLanes, left);
        const Floats product = __builtin_convertvector(sums[r][i], Floats);
        StoreFirst(to, product * (scale * rows.scale[first + r]), left);
      } else {
        StoreFirst(to, sums[r][i], left);
      }
    }
  }
}

// Multiplies `count` rows, of which a tile may have fewer than kRows.
template <typename Kind, int R = kRows>
void TileOf(int64_t count, const Rows& rows, int64_t first,
            const Columns& columns) {
  if (count >= R) {
    Tile<Kind, R>(rows, first, columns);
  } else if constexpr (R > 1) {
    TileOf<Kind, R - 1>(count, rows, first, columns);
  }
}

// x [rows, in] times a packed matrix; scale [out] of int8, [0] of floats.
template <typename Kind>
ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                    ffi::Buffer<ffi::U32> packed, ffi::Buffer<ffi::F32> scale,
                    ffi::ResultBuffer<ffi::F32> out) {
  const auto dims = packed.dimensions();
  const int64_t num_blocks = dims[0], words = dims[1];
  const int64_t width = x.dimensions()[1], outputs = out->dimensions()[1];
  const Rows rows =
      PackRows<Kind>(x.typed_data(), x.dimensions()[0], width);
  if (rows.words != words || outputs > num_blocks * kBlock) {
    return ffi::Error::InvalidArgument("shapes of a packed product differ");
  }
  const int64_t tiles = (rows.count + kRows - 1) / kRows;
  const int64_t bytes = tiles * packed.size_bytes();
  ParallelFor(pool, num_blocks / kBlocks, bytes, [&](int64_t index) {
    const int64_t block = index * kBlocks, start = block * kBlock;
    const Columns columns{packed.typed_data() + block * words * kBlock,
                          scale.typed_data() + start, outputs - start,
                          out->typed_data() + start, outputs};
    // The blocks stay in the processor's cache.
    for (int64_t row = 0; row < rows.count; row += kRows) {
      TileOf<Kind>(rows.count - row, rows, row, columns);
    }
  });
  return ffi::Error::Success();
}

// Attention.

// e to the power of x <= 0, to 2 ulp (a polynomial after Cephes' expf).
Floats Exp(Floats x) {
  const Floats lowest = Floats{} - 87.0f;
  const Ints is_low = x < lowest;
  x = is_low ? lowest : x;
  const Floats magic = Floats{} + 12582912.0f;  // 1.5 * 2^23 rounds to integers.
  const Floats n = (x * 1.44269504f + magic) - magic;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Floats result = p * BitCast<Floats>(exponent);
  return is_low ? Floats{} : result;
}

struct Run {  // Slots from `start` to before `end` that a query sees.
  int64_t start, end;
};

std::vector<Run> VisibleRuns(const bool* mask, int64_t num_slots) {
  std::vector<Run> runs;
  const bool* const end = mask + num_slots;
  for (const bool* from = mask; from < end;) {
    from = static_cast<const bool*>(std::memchr(from, 1, end - from));
    if (from == nullptr) break;
    const void* found = std::memchr(from, 0, end - from);
    const bool* to = found ? static_cast<const bool*>(found) : end;
    runs.push_back({from - mask, to - mask});
    from = to;
  }
  return runs;
}

// Attention of one query to the slots of one head.
//
// Slots are numbered by how many visible ones come before, so the same tokens
// give the same bits wherever their slots are.
template <typename Value>
void AttendOne(const Value* query, const Value* keys, const Value* values,
               const std::vector<Run>& runs, int64_t width, float scale,
               std::vector<float>& scores, float* out) {
  constexpr int kChunks = 4;  // Registers of a query or of an output.
  scores.clear();
  float peak = -std::numeric_limits<float>::infinity();
  for (const Run& run : runs) {
    for (int64_t slot = run.start; slot < run.end; ++slot) {
      Floats sum = {};
      for (int64_t d = 0; d < width; d += kLanes) {
        sum += LoadFloats(query + d, width - d) *
               LoadFloats(keys + slot * width + d, width - d);
      }
      const float score = scale * Sum(sum);
      // A NaN stays: it is not smaller than anything.
      if (!(score <= peak)) peak = score;
      scores.push_back(score);
    }
  }
  const int64_t count = scores.size();
  Floats total = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats lanes = LoadFloats(scores.data() + i, count - i) - peak;
    lanes = Exp(lanes);
    StoreFirst(scores.data() + i, lanes, count - i);
    total += LoadFloats(scores.data() + i, count - i);
  }
  const float inverse = count ? 1.0f / Sum(total) : 0.0f;
  for (int64_t first = 0; first < width; first += kChunks * kLanes) {
    Floats sums[kChunks] = {};
    const float* weight = scores.data();
    for (const Run& run : runs) {
      for (int64_t slot = run.start; slot < run.end; ++slot, ++weight) {
        const Value* from = values + slot * width + first;
        for (int c = 0; c < kChunks && first + c * kLanes < width; ++c) {
          const int64_t left = width - first - c * kLanes;
          sums[c] += LoadFloats(from + c * kLanes, left) * *weight;
        }
      }
    }
    for (int c = 0; c < kChunks && first + c * kLanes < width; ++c) {
      StoreFirst(out + first + c * kLanes, sums[c] * inverse,
                 width - first - c * kLanes);
    }
  }
}

struct Heads {  // Queries [B, Hq, L, Dh] to keys and values [B, H, S, Dh].
  int64_t batch, query_heads, length, width, heads, slots;
};

template <typename Value>
void AttendAll(ffi::ThreadPool& pool, const Heads& heads, const void* query,
               const void* keys, const void* values,
               const std::vector<std::vector<Run>>& runs, float scale,
               float* out) {
  const int64_t size = heads.slots * heads.width;
  const int64_t queries = heads.query_heads / heads.heads * heads.length;
  // The queries of a head of keys one after another: its keys stay in the
  // processor's cache.
  const int64_t count = heads.batch * heads.heads;
  ParallelFor(pool, count, count * queries * size, [&](int64_t head) {
    const auto* const visible = runs.data() + head / heads.heads * heads.length;
    std::vector<float> scores;
    scores.reserve(heads.slots);
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t at = (head * queries + i) * heads.width;
      AttendOne(static_cast<const Value*>(query) + at,
                static_cast<const Value*>(keys) + head * size,
                static_cast<const Value*>(values) + head * size,
                visible[i % heads.length], heads.width, scale, scores,
                out + at);
    }
  });
}

// Caches of float32 or bfloat16, and a mask [B, L, S].
ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer query,
                  ffi::AnyBuffer keys, ffi::AnyBuffer values,
                  ffi::Buffer<ffi::PRED> mask, float scale,
                  ffi::ResultBuffer<ffi::F32> out) {
  const auto dims = query.dimensions(), of_keys = keys.dimensions();
  const Heads heads{dims[0], dims[1], dims[2], dims[3], of_keys[1], of_keys[2]};
  std::vector<std::vector<Run>> runs(heads.batch * heads.length);
  for (size_t i = 0; i < runs.size(); ++i) {
    runs[i] = VisibleRuns(mask.typed_data() + i * heads.slots, heads.slots);
  }
  const auto attend = keys.element_type() == ffi::F32 ? AttendAll<float>
                                                      : AttendAll<uint16_t>;
  attend(pool, heads, query.untyped_data(), keys.untyped_data(),
         values.untyped_data(), runs, scale, out->typed_data());
  return ffi::Error::Success();
}

// Norms.

// Each row of x [rows, width], less its mean if `center`, over the root of its
// mean square plus epsilon, times scale [width].
ffi::Error Normalize(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> scale,
                     float epsilon, bool center,
                     ffi::ResultBuffer<ffi::F32> out) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const float* const scales = scale.typed_data();
  for (int64_t row = 0; row < rows; ++row) {
    const float* const from = x.typed_data() + row * width;
    float* const to = out->typed_data() + row * width;
    float mean = 0.0f;
    if (center) {
      Floats sum = {};
      for (int64_t i = 0; i < width; i += kLanes) {
        sum += LoadFloats(from + i, width - i);
      }
      mean = Sum(sum) / width;
    }
    Floats squares = {};
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats shifted = LoadFloats(from + i, width - i) - mean;
      StoreFirst(to + i, shifted, width - i);
      const Floats kept = LoadFloats(to + i, width - i);
      squares += kept * kept;
    }
    const float factor = 1.0f / std::sqrt(Sum(squares) / width + epsilon);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats scaled = LoadFloats(to + i, width - i) * factor *
                            LoadFloats(scales + i, width - i);
      StoreFirst(to + i, scaled, width - i);
    }
  }
  return ffi::Error::Success();
}

auto BindMultiply() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::U32>>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Ret<ffi::Buffer<ffi::F32>>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_multiply_float32, Multiply<Float32>,
                              BindMultiply());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_multiply_bfloat16, Multiply<BFloat16>,
                              BindMultiply());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_multiply_int8, Multiply<Int8>,
                              BindMultiply());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_attend, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Attr<float>("scale")
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_normalize, Normalize,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("center")
                                  .Ret<ffi::Buffer<ffi::F32>>());
