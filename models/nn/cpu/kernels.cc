// The functions that XLA programs call on CPU: products, attention, norms and
// mixtures of experts.
//
// Every sum is added up in an order that depends on nothing but its own terms:
// not on the number of rows, their places, the threads or masked slots. So a
// position has the same bits alone, in a batch and in a token tree.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "blocks.h"
#include "formats.h"
#include "heads.h"
#include "products.h"
#include "rows.h"
#include "threads.h"
#include "tiles.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace specdec {
namespace {

namespace ffi = xla::ffi;

using FloatBuffer = ffi::Buffer<ffi::F32>;
using FloatResult = ffi::ResultBuffer<ffi::F32>;

ffi::Error InvalidArgument(const char* message) {
  return ffi::Error::InvalidArgument(message);
}

// Null for an argument that is not there, which has no elements.
const float* OrNull(const FloatBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

Activation ActivationOf(std::string_view name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "quick_gelu") return Activation::kQuickGelu;
  if (name == "relu") return Activation::kRelu;
  return Activation::kNone;
}

// Products.

// Products of x [rows, in] with matrices of `outputs` outputs each, see
// `Products`. After the named arguments each matrix has three: words
// (formats.h, blocks.h), scale [out] of int8 or [0], bias [out] or [0]. `kinds`
// are those of Blocks.
//
// `Tiles` is the format for the processor's matrix unit, if it has one, and more
// than its `kFewRows` rows.
template <typename Format, typename Tiles>
ffi::Error Multiply(ffi::ThreadPool pool, FloatBuffer x, FloatBuffer norm_scale,
                    FloatBuffer norm_bias, FloatBuffer residual,
                    ffi::RemainingArgs args, FloatResult out, float epsilon,
                    bool center, std::string_view activation, bool gated,
                    ffi::Span<const int64_t> outputs,
                    ffi::Span<const int64_t> kinds) {
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
  int64_t width = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto packed = args.get<ffi::Buffer<ffi::U32>>(3 * i);
    const auto scale = args.get<FloatBuffer>(3 * i + 1);
    const auto bias = args.get<ffi::AnyBuffer>(3 * i + 2);
    if (!packed || !scale || !bias) return InvalidArgument("a matrix is missing");
    const int kind = kinds[i];
    const Matrix matrix{
        packed->typed_data(), NumWords<Format>(kind, products.width), kind,
        outputs[i], OrNull(*scale),
        {bias->element_count() == 0 ? nullptr : bias->untyped_data(),
         bias->element_type() == ffi::F32}};
    if (static_cast<int64_t>(packed->element_count()) !=
        matrix.groups() * kGroup * matrix.num_words) {
      return InvalidArgument("a matrix has another shape");
    }
    products.matrices.push_back(matrix);
    width = gated ? outputs[i] : width + outputs[i];
  }
  if (width != products.outputs) return InvalidArgument("outputs are missing");
  if (products.rows > Tiles::kFewRows && CanUseTiles()) {
    Compute<Tiles>(pool, products);
  } else {
    Compute<Format>(pool, products);
  }
  return ffi::Error::Success();
}

// Attention.

// See `Attention`; norms and rotations may have no elements.
ffi::Error Attend(ffi::ThreadPool pool, FloatBuffer projections,
                  FloatBuffer query_norm, FloatBuffer key_norm, FloatBuffer cos,
                  FloatBuffer sin, ffi::Buffer<ffi::PRED> mask,
                  ffi::Buffer<ffi::S32> start, ffi::AnyBuffer keys,
                  ffi::AnyBuffer values, FloatResult out,
                  ffi::Result<ffi::AnyBuffer> new_keys,
                  ffi::Result<ffi::AnyBuffer> new_values, float epsilon,
                  float scale) {
  const auto dims = keys.dimensions();
  Attention attention;
  attention.projections = projections.typed_data();
  attention.batch = dims[0];
  attention.heads = dims[1];
  attention.slots = dims[2];
  attention.width = dims[3];
  attention.length = projections.dimensions()[1];
  attention.query_heads = out->dimensions()[2] / attention.width;
  if (attention.length > attention.slots) {
    return InvalidArgument("more entries than slots");
  }
  attention.query_norm = {OrNull(query_norm), nullptr, epsilon, false};
  attention.key_norm = {OrNull(key_norm), nullptr, epsilon, false};
  attention.cos = OrNull(cos);
  attention.sin = OrNull(sin);
  attention.pairs = attention.cos == nullptr ? 0 : cos.dimensions()[3];
  attention.mask = mask.typed_data();
  attention.start = start.typed_data();
  attention.keys = new_keys->untyped_data();
  attention.values = new_values->untyped_data();
  attention.scale = scale;
  attention.out = out->typed_data();
  // XLA copies the caches where it cannot give the same memory.
  if (attention.keys != keys.untyped_data()) {
    std::memcpy(attention.keys, keys.untyped_data(), keys.size_bytes());
  }
  if (attention.values != values.untyped_data()) {
    std::memcpy(attention.values, values.untyped_data(), values.size_bytes());
  }
  if (keys.element_type() == ffi::F32) {
    AttendAll<float>(pool, attention);
  } else {
    AttendAll<uint16_t>(pool, attention);
  }
  return ffi::Error::Success();
}

// Writes new entries [B, H, L, Dh] to the slots of a cache [B, H, S, Dh] from
// start [B] on. The result is the cache itself.
ffi::Error WriteSlots(ffi::AnyBuffer slots, ffi::AnyBuffer entries,
                      ffi::Buffer<ffi::S32> start,
                      ffi::Result<ffi::AnyBuffer> out) {
  const auto dims = slots.dimensions();
  const int64_t count = entries.dimensions()[2];
  if (count > dims[2]) {
    return ffi::Error::InvalidArgument("more entries than slots");
  }
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
                         FloatResult out, float epsilon, bool center) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const Norm norm{scale.typed_data(), OrNull(bias), epsilon, center};
  for (int64_t row = 0; row < rows; ++row) {
    Normalize(norm, x.typed_data() + row * width, width,
              out->typed_data() + row * width);
  }
  return ffi::Error::Success();
}

// Mixtures of experts.

// The router: of each row of logits [rows, E] the probabilities of all experts,
// and the k most probable ones (of equal ones the first) with their weights,
// which are their probabilities, over the sum of these if `renormalize`.
ffi::Error Route(FloatBuffer logits, bool renormalize,
                 ffi::ResultBuffer<ffi::S32> experts,
                 FloatResult weights,
                 FloatResult probs) {
  const int64_t rows = logits.dimensions()[0], width = logits.dimensions()[1];
  const int64_t count = experts->dimensions()[1];
  std::vector<bool> is_taken(width);
  for (int64_t row = 0; row < rows; ++row) {
    const float* const from = logits.typed_data() + row * width;
    float* const prob = probs->typed_data() + row * width;
    int32_t* const expert = experts->typed_data() + row * count;
    float* const weight = weights->typed_data() + row * count;
    const float peak = *std::max_element(from, from + width);
    Floats sum = {};
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t left = width - i;
      StoreFirst(prob + i, Exp(LoadFloats(from + i, left) - peak), left);
      sum += LoadFloats(prob + i, left);
    }
    const float total = Sum(sum);
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
    if (!renormalize) continue;
    for (int64_t i = 0; i < count; ++i) weight[i] /= kept;
  }
  return ffi::Error::Success();
}

// Each row t of the result [T, width] is the sum of k rows index [T, k] of
// `rows`, times weights [T, k], added in this order.
ffi::Error SumRows(ffi::ThreadPool pool, FloatBuffer rows,
                   ffi::Buffer<ffi::S32> index, FloatBuffer weights,
                   FloatResult out) {
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

auto BindMultiply() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<FloatBuffer>()
      .Arg<FloatBuffer>()
      .Arg<FloatBuffer>()
      .Arg<FloatBuffer>()
      .RemainingArgs()
      .Ret<FloatBuffer>()
      .Attr<float>("epsilon")
      .Attr<bool>("center")
      .Attr<std::string_view>("activation")
      .Attr<bool>("gated")
      .Attr<ffi::Span<const int64_t>>("outputs")
      .Attr<ffi::Span<const int64_t>>("kinds");
}

}  // namespace
}  // namespace specdec

namespace ffi = xla::ffi;
using specdec::FloatBuffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    specdec_multiply_float32,
    (specdec::Multiply<specdec::Float32, specdec::Float32>),
    specdec::BindMultiply());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    specdec_multiply_bfloat16,
    (specdec::Multiply<specdec::BFloat16, specdec::BFloat16Tiles>),
    specdec::BindMultiply());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    specdec_multiply_int8, (specdec::Multiply<specdec::Int8, specdec::Int8Tiles>),
    specdec::BindMultiply());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    specdec_multiply_blocks,
    (specdec::Multiply<specdec::Blocks, specdec::Blocks>),
    specdec::BindMultiply());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_attend, specdec::Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<FloatBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("epsilon")
                                  .Attr<float>("scale"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_write_slots, specdec::WriteSlots,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_normalize, specdec::NormalizeRows,
                              ffi::Ffi::Bind()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Ret<FloatBuffer>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("center"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_route, specdec::Route,
                              ffi::Ffi::Bind()
                                  .Arg<FloatBuffer>()
                                  .Attr<bool>("renormalize")
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<FloatBuffer>()
                                  .Ret<FloatBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_sum_rows, specdec::SumRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<FloatBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<FloatBuffer>()
                                  .Ret<FloatBuffer>());
