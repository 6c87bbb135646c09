// Products, attention, norms and mixtures of experts.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "blocks.h"
#include "formats.h"
#include "handlers.h"
#include "heads.h"
#include "products.h"
#include "rows.h"
#include "threads.h"
#include "tiles.h"
#include "vectors.h"

namespace specdec {
namespace {

// Products.

// `Tiles` is the format for the processor's matrix unit, if it has one, and more
// than its `kFewRows` rows.
template <typename Format, typename Tiles>
void ComputeAny(ffi::ThreadPool& pool, const Products& products) {
  if (products.rows > Tiles::kFewRows && CanUseTiles()) {
    Compute<Tiles>(pool, products);
  } else {
    Compute<Format>(pool, products);
  }
}

// How matrices of a dtype are multiplied.
struct Kernel {
  std::string_view dtype;
  int64_t (*num_words)(int kind, int64_t width);
  void (*compute)(ffi::ThreadPool& pool, const Products& products);
};

const Kernel kKernels[] = {
    {"float32", NumWords<Float32>, Compute<Float32, ffi::ThreadPool>},
    {"bfloat16", NumWords<BFloat16>, ComputeAny<BFloat16, BFloat16Tiles>},
    {"int8", NumWords<Int8>, ComputeAny<Int8, Int8Tiles>},
    {"blocks", NumWords<Blocks>, Compute<Blocks, ffi::ThreadPool>}};

Activation ActivationOf(std::string_view name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "quick_gelu") return Activation::kQuickGelu;
  if (name == "relu") return Activation::kRelu;
  if (name == "clamped_swiglu") return Activation::kClampedSwiglu;
  return Activation::kNone;
}

// Products of x [rows, in] with matrices of `outputs` outputs each, see
// `Products`. After the named arguments each matrix has three: words
// (formats.h, blocks.h), scale [out] of int8 or [0], bias [out] or [0]. `kinds`
// are kinds of Blocks.
ffi::Error Multiply(ffi::ThreadPool pool, FloatBuffer x, FloatBuffer norm_scale,
                    FloatBuffer norm_bias, FloatBuffer residual,
                    ffi::RemainingArgs args, FloatResult out,
                    std::string_view dtype, float epsilon, bool center,
                    std::string_view activation, bool gated,
                    ffi::Span<const int64_t> outputs,
                    ffi::Span<const int64_t> kinds) {
  const Kernel* const kernel =
      std::find_if(std::begin(kKernels), std::end(kKernels),
                   [&](const Kernel& kernel) { return kernel.dtype == dtype; });
  if (kernel == std::end(kKernels)) {
    return InvalidArgument("dtype is not known");
  }
  Products products;
  products.x = x.typed_data();
  products.rows = x.dimensions()[0];
  products.width = x.dimensions()[1];
  products.norm = {OrNull(norm_scale), OrNull(norm_bias), epsilon, center};
  products.activation = ActivationOf(activation);
  products.gated = gated;
  products.residual = OrNull(residual);
  products.out = out->typed_data();
  products.outputs = out->dimensions()[1];
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto packed = args.get<ffi::Buffer<ffi::U32>>(3 * i);
    const auto scale = args.get<FloatBuffer>(3 * i + 1);
    const auto bias = args.get<ffi::AnyBuffer>(3 * i + 2);
    if (!packed || !scale || !bias) {
      return InvalidArgument("words must be uint32, and scales float32");
    }
    const bool is_float32 = bias->element_type() == ffi::F32;
    if (!is_float32 && bias->element_type() != ffi::BF16) {
      return InvalidArgument("a bias must be float32 or bfloat16");
    }
    const int kind = kinds[i];
    const Matrix matrix{
        packed->typed_data(),
        kernel->num_words(kind, products.width),
        kind,
        outputs[i],
        OrNull(*scale),
        {bias->element_count() == 0 ? nullptr : bias->untyped_data(),
         is_float32}};
    const int64_t wanted = matrix.groups() * kGroup * matrix.num_words;
    const int64_t found = packed->element_count();
    if (found != wanted || wanted == 0) {  // 0 of an unknown kind.
      return InvalidArgument("matrix " + std::to_string(i) + " must have " +
                             std::to_string(wanted) + " words, not " +
                             std::to_string(found));
    }
    products.matrices.push_back(matrix);
  }
  kernel->compute(pool, products);
  return ffi::Error::Success();
}

// Attention.

// See `Attention`; norms and rotations may have no elements.
ffi::Error Attend(ffi::ThreadPool pool, FloatBuffer projections,
                  FloatBuffer query_norm, FloatBuffer key_norm,
                  FloatBuffer value_norm, FloatBuffer cos, FloatBuffer sin,
                  ffi::Buffer<ffi::PRED> mask, IntBuffer start,
                  ffi::AnyBuffer keys, ffi::AnyBuffer values, FloatResult out,
                  ffi::Result<ffi::AnyBuffer> new_keys,
                  ffi::Result<ffi::AnyBuffer> new_values, attr::Epsilon epsilon,
                  attr::Scale scale, attr::Writes writes) {
  const auto dims = keys.dimensions();
  Attention attention;
  attention.projections = projections.typed_data();
  attention.batch = dims[0];
  attention.heads = dims[1];
  attention.slots = dims[2];
  attention.width = dims[3];
  attention.length = projections.dimensions()[1];
  attention.query_heads = out->dimensions()[2] / attention.width;
  attention.query_norm = {OrNull(query_norm), nullptr, *epsilon, false};
  attention.key_norm = {OrNull(key_norm), nullptr, *epsilon, false};
  attention.value_norm = {OrNull(value_norm), nullptr, *epsilon, false};
  attention.writes = *writes;
  attention.cos = OrNull(cos);
  attention.sin = OrNull(sin);
  attention.pairs = attention.cos == nullptr ? 0 : cos.dimensions()[3];
  attention.mask = mask.typed_data();
  attention.start = start.typed_data();
  attention.keys = new_keys->untyped_data();
  attention.values = new_values->untyped_data();
  attention.scale = *scale;
  attention.out = out->typed_data();
  // XLA copies the caches where it cannot give the same memory.
  if (attention.keys != keys.untyped_data()) {
    std::memcpy(attention.keys, keys.untyped_data(), keys.size_bytes());
  }
  if (attention.values != values.untyped_data()) {
    std::memcpy(attention.values, values.untyped_data(), values.size_bytes());
  }
  switch (keys.element_type()) {
    case ffi::F32:
      AttendAll<float>(pool, attention);
      return ffi::Error::Success();
    case ffi::BF16:
      AttendAll<uint16_t>(pool, attention);
      return ffi::Error::Success();
    default:
      return InvalidArgument("keys must be float32 or bfloat16");
  }
}

// Writes new entries [B, H, L, Dh] to the slots of a cache [B, H, S, Dh] from
// start [B] on. The result is the cache itself.
ffi::Error WriteSlots(ffi::AnyBuffer slots, ffi::AnyBuffer entries,
                      IntBuffer start, ffi::Result<ffi::AnyBuffer> out) {
  const auto dims = slots.dimensions();
  const int64_t count = entries.dimensions()[2];
  const int64_t bytes = dims[3] * ffi::ByteWidth(slots.element_type());
  const char* from = static_cast<const char*>(entries.untyped_data());
  char* const to = static_cast<char*>(out->untyped_data());
  if (to != slots.untyped_data()) {
    std::memcpy(to, slots.untyped_data(), slots.size_bytes());
  }
  for (int64_t head = 0; head < dims[0] * dims[1]; ++head) {
    const int64_t wanted = start.typed_data()[head / dims[1]];
    const int64_t first =
        std::clamp<int64_t>(wanted, 0, dims[2] - count) + head * dims[2];
    std::memcpy(to + first * bytes, from, count * bytes);
    from += count * bytes;
  }
  return ffi::Error::Success();
}

// Norms.

// See `Norm`, of each row of x [rows, width].
ffi::Error NormalizeRows(FloatBuffer x, FloatBuffer scale, FloatBuffer bias,
                         FloatResult out, attr::Epsilon epsilon,
                         attr::Center center) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const Norm norm{scale.typed_data(), OrNull(bias), *epsilon, *center};
  for (int64_t row = 0; row < rows; ++row) {
    Normalize(norm, x.typed_data() + row * width, width,
              out->typed_data() + row * width);
  }
  return ffi::Error::Success();
}

// Mixtures of experts.

// The router: of each row of logits [rows, E] the k most probable experts (of
// equal ones the first) and their weights, which are their probabilities, over
// the sum of these if `renormalize`.
ffi::Error Route(FloatBuffer logits, attr::Renormalize renormalize,
                 ffi::ResultBuffer<ffi::S32> experts, FloatResult weights) {
  const int64_t rows = logits.dimensions()[0], width = logits.dimensions()[1];
  const int64_t count = experts->dimensions()[1];
  std::vector<bool> is_taken(width);
  std::vector<float> prob(width);
  for (int64_t row = 0; row < rows; ++row) {
    const float* const from = logits.typed_data() + row * width;
    int32_t* const expert = experts->typed_data() + row * count;
    float* const weight = weights->typed_data() + row * count;
    const float peak = *std::max_element(from, from + width);
    LaneSums sum;
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t left = width - i;
      StoreFirst(&prob[i], Exp(LoadFloats(from + i, left) - peak), left);
      sum.At(i) += LoadFloats(&prob[i], left);
    }
    const float total = sum.Total();
    for (int64_t i = 0; i < width; ++i) prob[i] /= total;
    std::fill(is_taken.begin(), is_taken.end(), false);
    float kept = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      // Not a sort, which must not meet NaN.
      int64_t best = -1;
      for (int64_t e = 0; e < width; ++e) {
        if (is_taken[e]) continue;
        if (best < 0 || prob[e] > prob[best]) best = e;
      }
      is_taken[best] = true;
      expert[i] = best;
      weight[i] = prob[best];
      kept += weight[i];
    }
    if (!*renormalize) continue;
    for (int64_t i = 0; i < count; ++i) weight[i] /= kept;
  }
  return ffi::Error::Success();
}

// Each row t of the result [T, width] is the sum of k rows index [T, k] of
// `rows`, times weights [T, k], added in this order.
ffi::Error SumRows(ffi::ThreadPool pool, FloatBuffer rows, IntBuffer index,
                   FloatBuffer weights, FloatResult out) {
  const int64_t count = index.dimensions()[0], terms = index.dimensions()[1];
  const int64_t width = out->dimensions()[1];
  const int64_t bytes = count * terms * width * sizeof(float);
  Team(pool, count, bytes).For(count, [&](int64_t t) {
    const int32_t* const at = index.typed_data() + t * terms;
    const float* const weight = weights.typed_data() + t * terms;
    for (int64_t d = 0; d < width; d += kLanes) {
      Floats sum = {};
      for (int64_t i = 0; i < terms; ++i) {
        const float* const row = rows.typed_data() + at[i] * width;
        sum += LoadFloats(row + d, width - d) * weight[i];
      }
      StoreFirst(out->typed_data() + t * width + d, sum, width - d);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specdec

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    specdec_multiply, specdec::Multiply,
    xla::ffi::Ffi::Bind()
        .Ctx<xla::ffi::ThreadPool>()
        .Arg<specdec::FloatBuffer>()
        .Arg<specdec::FloatBuffer>()
        .Arg<specdec::FloatBuffer>()
        .Arg<specdec::FloatBuffer>()
        .RemainingArgs()
        .Ret<specdec::FloatBuffer>()
        .Attr<std::string_view>("dtype")
        .Attr<float>("epsilon")
        .Attr<bool>("center")
        .Attr<std::string_view>("activation")
        .Attr<bool>("gated")
        .Attr<xla::ffi::Span<const int64_t>>("outputs")
        .Attr<xla::ffi::Span<const int64_t>>("kinds"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_attend, specdec::Attend);
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_write_slots, specdec::WriteSlots);
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_normalize, specdec::NormalizeRows);
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_route, specdec::Route);
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_sum_rows, specdec::SumRows);

// The time of a further row, in thousandths of the first: from the times of
// eight rows, as stored, in docs/cpu.md. ARM was never timed.
extern "C" int specdec_row_cost() {
#if defined(__AVX512F__)
  return 35;
#elif defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
  return 120;
#else
  return 155;
#endif
}
