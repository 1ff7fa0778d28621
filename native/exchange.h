// The exchange of packed messages, fused: what wire/base.py composes of dealing, packing and merging,
// without the intermediate tensors.  A rank's entries pass through its caches once.
#pragma once

#include <cstdint>
#include <vector>

#include "scan.h"

namespace sparsync {

// One message's body; the header was read by the caller.
struct Body {
  const uint8_t *bytes;
  uint64_t nbytes, nnz;
  int form;
  uint64_t block;
};

struct Entries {
  const int64_t *indices;
  const float *values;
  int64_t count;
};

// How messages are written: `header` (16 bytes, its count at byte 4) and the body's parameters.
struct Style {
  const uint8_t *header;
  int form;
  uint64_t block;
  uint64_t width;  // elements of one owner
};

// What deal_and_pack writes.  Message r lies at `messages + r * stride`, `lengths[r]` bytes.
struct Parcels {
  uint8_t *messages;
  uint64_t stride;
  int64_t *lengths;
  float *arriving;      // in the order of the entries: the values that a receiver sees
  int64_t *own_indices;  // the share that stays, within its owner
  float *own_values;
};

// Deals entries to `world_size` owners and packs a message for each but `own`.  Returns how many are
// its own; -1, and nothing useful, if a share has more than `limit` entries.
int64_t deal_and_pack(const Entries &entries, int64_t world_size, int64_t own, int64_t limit,
                      const Style &style, const Parcels &out);

// Sums messages and the own entries (at place `own`; that body is ignored), a left fold in their order.
// Returns the count of non-zero sums; -1 - i if message i is malformed.
int64_t unpack_and_sum(const std::vector<Body> &bodies, int64_t own, const Entries &mine,
                       uint64_t width, int64_t *indices, float *values);

// Joins what every owner sent to one vector of `size` elements, ascending, and of that the `k` largest
// (ties to the lower index), without zeros.  Returns the count; -1 - i if message i is malformed or
// names an element beyond `size`.
int64_t unpack_and_undeal(const std::vector<Body> &bodies, uint64_t width, uint64_t size, int64_t k,
                          const Scan &scan, int64_t *indices, float *values);

}  // namespace sparsync
