// Products with matrices in float32, bfloat16 and int8.

#include "formats.h"
#include "multiply.h"
#include "tiles.h"

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
