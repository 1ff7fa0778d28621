#include "dealing.h"

#include <cstddef>
#include <vector>

namespace sparsync {

void deal(const int64_t *indices, int64_t n, int64_t world_size, int64_t *order, int64_t *local,
          int64_t *counts) {
  const auto ranks = static_cast<uint64_t>(world_size);
  const Divisor divisor(world_size);
  std::vector<uint32_t> owners(static_cast<std::size_t>(n));
  std::vector<int64_t> next(ranks + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t owner = place_of(static_cast<uint64_t>(indices[i]), ranks, divisor).owner;
    owners[static_cast<std::size_t>(i)] = static_cast<uint32_t>(owner);
    ++next[owner + 1];
  }
  for (uint64_t r = 0; r < ranks; ++r) {
    counts[r] = next[r + 1];
    next[r + 1] += next[r];
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t place = next[owners[static_cast<std::size_t>(i)]]++;
    order[place] = i;
    local[place] = static_cast<int64_t>(divisor.quotient(static_cast<uint64_t>(indices[i])));
  }
}

void undeal(const int64_t *local, int64_t n, int64_t owner, int64_t world_size, int64_t *indices) {
  const auto ranks = static_cast<uint64_t>(world_size);
  for (int64_t i = 0; i < n; ++i) {
    const auto group = static_cast<uint64_t>(local[i]);
    indices[i] = static_cast<int64_t>(
        group * ranks + offset_of(group, static_cast<uint64_t>(owner), ranks));
  }
}

}  // namespace sparsync
