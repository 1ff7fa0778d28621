// Dealing elements to ranks by a hash; kernels/reference.py is the specification.
#pragma once

#include <cstdint>

namespace sparsync {

// Divides by a number known only at run time; below 2^32, this takes no division instruction.
class Divisor {
 public:
  explicit Divisor(int64_t by)
      : by_(static_cast<uint64_t>(by)), inverse_(~uint64_t{0} / by_ + 1) {}

  uint64_t quotient(uint64_t x) const {
    // exact below 2^32 (Lemire et al., 2019); for by = 1, the inverse has wrapped to 0
    if (inverse_ == 0) return x;
    if (x >> 32 != 0) return x / by_;
    return static_cast<uint64_t>((static_cast<unsigned __int128>(inverse_) * x) >> 64);
  }

 private:
  uint64_t by_, inverse_;
};

// The functions below are `static`, because a copy compiled for one instruction set must not be merged
// with another.

// MurmurHash3's 32-bit finaliser, reduced to [0, world_size).
static inline uint64_t turn(uint64_t group, uint64_t world_size) {
  auto x = static_cast<uint32_t>(group ^ (group >> 32));
  x = (x ^ (x >> 16)) * 0x85EBCA6BU;
  x = (x ^ (x >> 13)) * 0xC2B2AE35U;
  x ^= x >> 16;
  return (uint64_t{x} * world_size) >> 32;
}

struct Place {
  uint64_t group, owner;
};

static inline Place place_of(uint64_t index, uint64_t ranks, const Divisor &divisor) {
  const uint64_t group = divisor.quotient(index);
  const uint64_t owner = index - group * ranks + turn(group, ranks);
  return {group, owner >= ranks ? owner - ranks : owner};
}

// Returns which of the `ranks` elements of a group belongs to an owner.
static inline uint64_t offset_of(uint64_t group, uint64_t owner, uint64_t ranks) {
  const uint64_t offset = owner + ranks - turn(group, ranks);
  return offset >= ranks ? offset - ranks : offset;
}

// Groups n ascending indices by owner, each group ascending.  Writes their positions to `order`, their
// indices within their owners to `local`, and `world_size` numbers to `counts`.
void deal(const int64_t *indices, int64_t n, int64_t world_size, int64_t *order, int64_t *local,
          int64_t *counts);

// Writes the indices of an owner's elements.
void undeal(const int64_t *local, int64_t n, int64_t owner, int64_t world_size, int64_t *indices);

}  // namespace sparsync
