// Messages of a vector's regions are written, summed and joined without intermediate vectors, as
// wire/messages.py composes it of codecs and kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "scan.h"

namespace sparsync::messages {

// The parameters with which messages are written.
struct Layout {
  uint64_t start;  // their first 8 bytes, with a count of 0
  int form;        // of the values in packed.h; 0: the message is coo
  uint64_t block;
};

// An addend: a message, or entries with 64-bit indices.
struct Share {
  bool is_message;
  const uint8_t *message;
  uint64_t nbytes;
  const int64_t *indices;
  const float *values;
  int64_t count;
};

struct Region {
  int64_t start, stop;
};

// The memory for entries, and their largest number; more are refused before they are written.
struct Output {
  int64_t *indices;
  float *values;
  int64_t capacity;
};

// Cuts ascending entries at the boundaries and writes a message per region but `own`, one after the
// other; returns their lengths.  This is for coo and float32 values.
std::vector<int64_t> cut(const int64_t *indices, const float *values, int64_t count,
                         const std::vector<int64_t> &boundaries, int64_t own, const Layout &layout,
                         const Scan &scan, uint8_t *out, uint64_t capacity);

// Sums the shares of a region of `width` elements as a left fold in their order and drops zero sums.
// Returns the count, or -1 - i if message i is malformed.  The output needs room for all entries.
int64_t fold(const std::vector<Share> &shares, const Layout &layout, int64_t width, const Scan &scan,
             const Output &out);

// Places one message per ascending region.  Returns the count, or -1 - i if message i is malformed.
int64_t join(const std::vector<Share> &shares, const Layout &layout,
             const std::vector<Region> &regions, const Scan &scan, const Output &out);

}  // namespace sparsync::messages
