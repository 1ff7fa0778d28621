#include "dealing.h"

#include <cstddef>
#include <vector>

namespace sparsync {
namespace {

// Divides by a number that is known at run time only, without a division where 32 bits suffice.
class Divisor {
 public:
  explicit Divisor(int64_t by) : by_(static_cast<uint64_t>(by)), inverse_(~uint64_t{0} / by_ + 1) {}

  uint64_t quotient(uint64_t x) const {
    // exact below 2^32 (Lemire et al., 2019); for by = 1 the inverse has wrapped to 0
    if (x >> 32 != 0 || inverse_ == 0) return x / by_;
    return static_cast<uint64_t>((static_cast<unsigned __int128>(inverse_) * x) >> 64);
  }

 private:
  uint64_t by_, inverse_;
};

// MurmurHash3's 32-bit finaliser, then reduced to [0, world_size).
uint64_t turn(uint64_t group, uint64_t world_size) {
  auto x = static_cast<uint32_t>(group ^ (group >> 32));
  x = (x ^ (x >> 16)) * 0x85EBCA6BU;
  x = (x ^ (x >> 13)) * 0xC2B2AE35U;
  x ^= x >> 16;
  return (uint64_t{x} * world_size) >> 32;
}

}  // namespace

void deal(const int64_t *indices, int64_t n, int64_t world_size, int64_t *order, int64_t *local,
          int64_t *counts) {
  const auto ranks = static_cast<uint64_t>(world_size);
  const Divisor divisor(world_size);
  std::vector<uint32_t> owners(static_cast<std::size_t>(n));
  std::vector<int64_t> next(ranks + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    const auto index = static_cast<uint64_t>(indices[i]);
    const uint64_t group = divisor.quotient(index);
    uint64_t owner = index - group * ranks + turn(group, ranks);
    if (owner >= ranks) owner -= ranks;
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
    uint64_t offset = static_cast<uint64_t>(owner) + ranks - turn(group, ranks);
    if (offset >= ranks) offset -= ranks;
    indices[i] = static_cast<int64_t>(group * ranks + offset);
  }
}

}  // namespace sparsync
