// Dealing elements to ranks by a hash: see kernels/dealing.py, the specification.
#pragma once

#include <cstdint>

namespace sparsync {

// Groups n ascending indices by owner, each group ascending.  order: their positions; local: their
// indices within their owners; counts: `world_size` numbers.
void deal(const int64_t *indices, int64_t n, int64_t world_size, int64_t *order, int64_t *local,
          int64_t *counts);

// Writes the indices of an owner's elements.
void undeal(const int64_t *local, int64_t n, int64_t owner, int64_t world_size, int64_t *indices);

}  // namespace sparsync
