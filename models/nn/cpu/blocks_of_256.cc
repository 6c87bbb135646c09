// Products with matrices in blocks of 256 values; see block_products.cc.

#include "blocks.h"

namespace specdec {

template void Blocks::MultiplyKind<Q4_K>(const Rows&, int64_t, int64_t,
                                         const Group&, float*);
template void Blocks::MultiplyKind<Q5_K>(const Rows&, int64_t, int64_t,
                                         const Group&, float*);
template void Blocks::MultiplyKind<Q6_K>(const Rows&, int64_t, int64_t,
                                         const Group&, float*);

}  // namespace specdec
