// What the functions that XLA programs call have in common.
//
// Every sum is added up in an order that depends on nothing but its own terms:
// not on the number of rows, their places, the threads or masked slots. So a
// position has the same bits alone, in a batch and in a token tree.
//
// `ops.py` is the only caller. It has checked all shapes and types but the
// words of matrices.

#pragma once

#include <string>

#include "xla/ffi/api/ffi.h"

namespace specdec {

namespace ffi = xla::ffi;

using FloatBuffer = ffi::Buffer<ffi::F32>;
using FloatResult = ffi::ResultBuffer<ffi::F32>;
using IntBuffer = ffi::Buffer<ffi::S32>;

// Attributes; their names are part of their types.
namespace attr {
inline constexpr char kEpsilon[] = "epsilon", kScale[] = "scale",
                      kWrites[] = "writes", kCenter[] = "center",
                      kRenormalize[] = "renormalize", kTiled[] = "tiled";
using Epsilon = ffi::Attr<float, kEpsilon>;
using Scale = ffi::Attr<float, kScale>;
using Writes = ffi::Attr<bool, kWrites>;
using Center = ffi::Attr<bool, kCenter>;
using Renormalize = ffi::Attr<bool, kRenormalize>;
using Tiled = ffi::Attr<bool, kTiled>;
}  // namespace attr

inline ffi::Error InvalidArgument(const std::string& message) {
  return ffi::Error::InvalidArgument(message);
}

// Null for an argument that is not there, which has no elements.
inline const float* OrNull(const FloatBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

}  // namespace specdec

// A handler that takes the threads is bound by its parameters, as others are.
template <>
struct xla::ffi::CtxBinding<xla::ffi::ThreadPool> {
  using Ctx = xla::ffi::ThreadPool;
};
