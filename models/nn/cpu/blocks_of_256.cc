// Products with matrices in blocks of 256 values.

#include "blocks.h"

namespace specdec {

template SPECDEC_MULTIPLY_KIND(Q4_K);
template SPECDEC_MULTIPLY_KIND(Q5_K);
template SPECDEC_MULTIPLY_KIND(Q6_K);

}  // namespace specdec
