// Products of rows with matrices, as XLA programs call them.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "blocks.h"
#include "formats.h"
#include "handlers.h"
#include "products.h"
#include "tiles.h"

namespace specdec {

// Compiled at the same time, in block_products.cc.
void ComputeBlocks(ffi::ThreadPool& pool, const Products& products);

namespace {

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
    {"blocks", NumWords<Blocks>, ComputeBlocks}};

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
