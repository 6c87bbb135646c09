// Products with matrices in blocks of 128 values.

#include "blocks.h"

namespace specdec {

template SPECDEC_MULTIPLY_KIND(Q4_0);
template SPECDEC_MULTIPLY_KIND(Q4_1);
template SPECDEC_MULTIPLY_KIND(Q5_0);
template SPECDEC_MULTIPLY_KIND(Q5_1);
template SPECDEC_MULTIPLY_KIND(Q8_0);
template SPECDEC_MULTIPLY_KIND(MXFP4);

}  // namespace specdec
