// The fused exchange of packed messages.  It replaces the dealing, packing and merging in wire/packed.py,
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

// The parameters of messages: their first 16 bytes except for the count (bytes 4 to 7), and the parameters
// of the body.
struct Style {
  uint64_t start[2];
  int form;
  uint64_t block;
  uint64_t width;  // elements of one owner
};

// The output of deal_and_pack.  Message r has `lengths[r]` bytes at `messages + r * stride`.
struct Parcels {
  uint8_t *messages;
  uint64_t stride;
  int64_t *lengths;
  float *arriving;      // in the order of the entries: the values that a receiver sees
  int64_t *own_indices;  // the share that stays; indices within its owner
  float *own_values;
};

// Memory for entries and its capacity; more entries are refused before they are written.
struct Room {
  int64_t *indices;
  float *values;
  int64_t capacity;
};

// Deals entries to `world_size` owners and packs a message for each of them except `own`.  Returns the
// number of own entries, or -1 if a share has more than `limit` entries; the output is then useless.
int64_t deal_and_pack(const Entries &entries, int64_t world_size, int64_t own, int64_t limit,
                      const Style &style, const Scan &scan, const Parcels &out);

// Sums messages and the own entries as a left fold in their order, and keeps the `k` largest sums,
// without zeros.  The own entries take the place of message `own`, which is ignored.  Returns the count,
// or -1 - i if message i is malformed or of another style.  `out` needs room for min(k, width) entries.
int64_t unpack_and_sum(const std::vector<Message> &messages, int64_t own, const Entries &mine,
                       const Style &style, int64_t k, const Scan &scan, const Room &out);

// The sums of one owner, in the order of its message, which has the same entries after rounding.
struct Sums {
  int64_t owner;
  const float *values;
  int64_t count;
};

// Joins the messages of all owners to one ascending vector of `size` elements.  Writes its `k` largest
// entries (ties go to the lower index), without zeros, to `total`, which needs room for min(k, entries
// received).  Also writes the part of the total that this rank delivered, without zeros: the entries that
// it `sent` plus the errors from rounding its `own` sums.  This needs no more room.  Returns both counts;
// the first is -1 - i if message i is malformed, of another style or names an element beyond `size`.
std::pair<int64_t, int64_t> unpack_and_undeal(const std::vector<Message> &messages,
                                              const Style &style, uint64_t size, int64_t k,
                                              const Sums &own, const Entries &sent,
                                              const Scan &scan, const Room &total,
                                              const Room &delivered);

}  // namespace sparsync
