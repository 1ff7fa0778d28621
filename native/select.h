// Exact selection of the k largest magnitudes, without sorting.
#pragma once

#include "scan.h"

namespace sparsync {

struct Threshold {
  uint32_t key;  // all above it are taken
  int64_t ties;  // and this many of those that equal it
};

// Where the `wanted`-th largest of the keys lies.  There are at least that many non-zero ones.
Threshold threshold(const float *x, int64_t n, int64_t wanted, const Scan &scan);

// Writes the ascending positions of the min(k, non-zeros) largest magnitudes, ties to the lower
// position; returns how many.  `positions` has room for k.  Extra memory: O(1).
int64_t top(const float *x, int64_t n, int64_t k, int64_t *positions, const Scan &scan);

// A key that probably somewhat more than k of the elements reach, from one element in `stride`.
uint32_t guess(const float *x, int64_t n, int64_t k, int64_t stride);

// counts[i] = how many of the values have a key >= keys[i]; keys ascend.
void count_from(const float *values, int64_t n, const int64_t *keys, int64_t bins, int64_t *counts);

}  // namespace sparsync
