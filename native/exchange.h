// The exchange of packed messages, fused: what wire/packed.py composes of dealing, packing and merging,
// without the intermediate tensors.  A rank's entries pass through its caches once.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "scan.h"

namespace sparsync {

struct Message {
  const uint8_t *bytes;
  uint64_t nbytes;
};

struct Entries {
  const int64_t *indices;
  const float *values;
  int64_t count;
};

// How messages are written: their first 16 bytes, but for the count (bytes 4 to 7), and the body's
// parameters.
struct Style {
  uint64_t start[2];
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

// Where entries are written, and how many fit; more are refused before they are written.
struct Room {
  int64_t *indices;
  float *values;
  int64_t capacity;
};

// Deals entries to `world_size` owners and packs a message for each but `own`.  Returns how many are
// its own; -1, and nothing useful, if a share has more than `limit` entries.
int64_t deal_and_pack(const Entries &entries, int64_t world_size, int64_t own, int64_t limit,
                      const Style &style, const Scan &scan, const Parcels &out);

// Sums messages and the own entries (at place `own`; that message is ignored), a left fold in their order,
// and keeps the `k` largest sums, without zeros.  Returns the count; -1 - i if message i is
// malformed or of another style.  `out` needs room for min(k, width) entries.
int64_t unpack_and_sum(const std::vector<Message> &messages, int64_t own, const Entries &mine,
                       const Style &style, int64_t k, const Scan &scan, const Room &out);

// What one owner summed, in the order of its message, which has the same entries, rounded.
struct Sums {
  int64_t owner;
  const float *values;
  int64_t count;
};

// Joins what every owner sent to one vector of `size` elements, ascending, and of that the `k` largest
// (ties to the lower index), without zeros: `total`, which needs room for min(k, entries received).  And
// what this rank delivered of it: what it `sent`, and what rounding added to its `own` sums, added, without
// zeros, which needs room for no more.  Returns both counts; -1 - i as the first if message i is
// malformed, of another style or names an element beyond `size`.
std::pair<int64_t, int64_t> unpack_and_undeal(const std::vector<Message> &messages,
                                              const Style &style, uint64_t size, int64_t k,
                                              const Sums &own, const Entries &sent,
                                              const Scan &scan, const Room &total,
                                              const Room &delivered);

}  // namespace sparsync
