// Kernels on sorted (indices, values) streams.  Each kernel checks its indices; it throws
// std::invalid_argument rather than access memory outside its arguments.
#pragma once

#include <cstdint>
#include <vector>

#include "scan.h"

namespace sparsync {

template <typename Index>
struct Stream {
  const Index *indices;
  const float *values;
  int64_t count;
};

// Sums the streams as a left fold in their order and drops zero sums; returns the number of sums left.
// The output has room for all entries of all streams.  Index is int64_t, uint32_t or uint16_t.
template <typename Index>
int64_t merge(const std::vector<Stream<Index>> &streams, int64_t size, const Scan &scan,
              int64_t *indices, float *values);

// Does the same for the entries whose index occurs among `m` ascending indices.  It skips the others, so it
// checks only the first and the last index of a stream.
int64_t merge_within(const std::vector<Stream<int64_t>> &streams, int64_t size, const int64_t *among,
                     int64_t m, const Scan &scan, int64_t *indices, float *values);

// Drops zero entries; returns the number of entries left.
int64_t without_zeros(int64_t count, int64_t *indices, float *values);

// Writes the positions of the `indices` that occur in `among`, and returns their number; both ascend.
int64_t restrict_to(const int64_t *indices, int64_t n, const int64_t *among, int64_t m,
                    int64_t *positions);

// dense[indices[i]] -= values[i]
void subtract(float *dense, int64_t size, const int64_t *indices, const float *values, int64_t n);

// dense = 0; dense[indices[i]] = values[i]; the indices ascend.
void scatter(float *dense, int64_t size, const int64_t *indices, const float *values, int64_t n,
             int threads);

}  // namespace sparsync
