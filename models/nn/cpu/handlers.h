// What the functions that XLA programs call have in common.
//
// Every sum is added up in an order that depends on nothing but its own terms:
// not on the number of rows, their places, the threads or masked slots. So a
// position has the same bits alone, in a batch and in a token tree.
//
// `ops.py` is the only caller. It has checked all shapes and types but the
// words of matrices.

#ifndef SPECDEC_HANDLERS_H_
#define SPECDEC_HANDLERS_H_

#include <string>

#include "xla/ffi/api/ffi.h"

namespace specdec {

namespace ffi = xla::ffi;

using FloatBuffer = ffi::Buffer<ffi::F32>;
using FloatResult = ffi::ResultBuffer<ffi::F32>;

inline ffi::Error InvalidArgument(const std::string& message) {
  return ffi::Error::InvalidArgument(message);
}

// Null for an argument that is not there, which has no elements.
inline const float* OrNull(const FloatBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

}  // namespace specdec

#endif  // SPECDEC_HANDLERS_H_
