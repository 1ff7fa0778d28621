// Exact selection of the k largest magnitudes, without sorting.
#pragma once

#include "scan.h"

namespace sparsync {

struct Threshold {
  uint32_t key;  // all keys above it are selected,
  int64_t ties;  // and this many of those that equal it
};

// Finds the `wanted`-th largest key, for at least `wanted` non-zero keys.
Threshold threshold(const float *x, int64_t n, int64_t wanted, const Scan &scan);

// Writes the ascending positions of the min(k, non-zeros) largest magnitudes, where ties go to the lower
// position; returns their number.  `positions` has room for k.  Needs O(1) extra memory.
int64_t top(const float *x, int64_t n, int64_t k, int64_t *positions, const Scan &scan);

// Returns a key that probably slightly more than k elements reach, judging by one element in `stride`.
uint32_t guess(const float *x, int64_t n, int64_t k, int64_t stride);

// Sets counts[i] to the number of values with a key >= keys[i]; keys ascend.
void count_from(const float *values, int64_t n, const int64_t *keys, int64_t bins, int64_t *counts);

}  // namespace sparsync
