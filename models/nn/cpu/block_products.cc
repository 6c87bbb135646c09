// Products with matrices in blocks of few bits.

#include "blocks.h"
#include "multiply.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    specdec_multiply_blocks,
    (specdec::Multiply<specdec::Blocks, specdec::Blocks>),
    specdec::BindMultiply());
