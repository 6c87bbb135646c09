// Products with matrices in blocks of few bits.

#include "blocks.h"
#include "handlers.h"
#include "products.h"

namespace specdec {

// Compiled at the same time, in blocks_of_256.cc.
extern template void Blocks::MultiplyKind<Q4_K>(const Rows&, int64_t, int64_t,
                                                const Group&, float*);
extern template void Blocks::MultiplyKind<Q5_K>(const Rows&, int64_t, int64_t,
                                                const Group&, float*);
extern template void Blocks::MultiplyKind<Q6_K>(const Rows&, int64_t, int64_t,
                                                const Group&, float*);

void ComputeBlocks(ffi::ThreadPool& pool, const Products& products) {
  Compute<Blocks>(pool, products);
}

}  // namespace specdec
