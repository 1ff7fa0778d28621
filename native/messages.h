// Writes, sums and joins the messages of a vector's regions without intermediate vectors.  The
// specification is wire/messages.py, which uses codecs and kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "scan.h"

namespace sparsync::messages {

// The parameters for writing messages.
struct Layout {
  uint64_t start;  // the first 8 bytes, with a count of 0
  int form;        // of the values, see packed.h; 0: the message is coo
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

// Memory for entries and its capacity; more entries are refused before they are written.
struct Output {
  int64_t *indices;
  float *values;
  int64_t capacity;
};

// Cuts ascending entries at the boundaries and writes one message per region except `own`, one after the
// other; returns their lengths.  The format is coo or has float32 values.
std::vector<int64_t> cut(const int64_t *indices, const float *values, int64_t count,
                         const std::vector<int64_t> &boundaries, int64_t own, const Layout &layout,
                         const Scan &scan, uint8_t *out, uint64_t capacity);

// Sums the shares of a region of `width` elements as a left fold in their order, and drops zero sums.
// Returns the count, or -1 - i if message i is malformed.  The output needs room for all entries.
int64_t fold(const std::vector<Share> &shares, const Layout &layout, int64_t width, const Scan &scan,
             const Output &out);

// Joins one message per ascending region.  Returns the count, or -1 - i if message i is malformed.
int64_t join(const std::vector<Share> &shares, const Layout &layout,
             const std::vector<Region> &regions, const Scan &scan, const Output &out);

}  // namespace sparsync::messages
