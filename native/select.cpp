#include "select.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "scratch.h"

namespace sparsync {
namespace {

constexpr int bin_bits = 11;                  // 2048 bins: three rounds determine all 31 bits of a key
constexpr int tables = 4;                     // with one, equal neighbours would wait for each other's count
constexpr int64_t block = int64_t{1} << 30;   // elements before a 32-bit count could overflow
constexpr int64_t few = 4096;                 // fewer keys are cheaper to partition than to count
constexpr int64_t many = 1 << 15;               // from here on, it is cheaper to sample the keys first
constexpr int64_t least_sample = 2048, most_sample = int64_t{1} << 16;
constexpr int64_t stretches_per_key = 4;      // in the table in which `count_from` looks keys up
using Histogram = std::array<int64_t, size_t{1} << bin_bits>;

// Counts the keys of x in each bin of 2^shift keys in [low, high].  No key above `high` belongs to the
// bin of `high`.
void histogram(const float *x, int64_t n, uint32_t low, uint32_t high, int shift, Histogram &bins) {
  bins.fill(0);
  const uint32_t outside = ((high - low) >> shift) + 1;
  for (int64_t first = 0; first < n; first += block) {
    std::array<std::array<uint32_t, (size_t{1} << bin_bits) + 1>, tables> counts{};
    const auto bin = [&](int64_t i) {  // keys below `low` wrap around to the top
      return std::min((key_of(x[i]) - low) >> shift, outside);
    };
    const int64_t stop = std::min(n, first + block);
    int64_t i = first;
    for (; i + tables <= stop; i += tables)
      for (int t = 0; t < tables; ++t) ++counts[static_cast<size_t>(t)][bin(i + t)];
    for (; i < stop; ++i) ++counts[0][bin(i)];
    for (size_t b = 0; b < bins.size(); ++b)
      for (const auto &table : counts) bins[b] += table[b];
  }
}

// Finds the `wanted`-th largest of the keys in [low, high], of which there are fewer than `few`.
Threshold among_few(const float *x, int64_t n, uint32_t low, uint32_t high, int64_t wanted) {
  std::array<uint32_t, few> keys;
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = key_of(x[i]);
    keys[static_cast<size_t>(count)] = key;  // the next key overwrites it unless the count grows
    count += key - low <= high - low;
  }
  const auto kth = keys.begin() + (wanted - 1);
  std::nth_element(keys.begin(), kth, keys.begin() + count, std::greater<>());
  return {*kth, std::count(keys.begin(), kth + 1, *kth)};
}

// Collects the key of one element per stretch of `stride` elements.  The element's position varies, because
// periodic data would otherwise mislead the sample.
std::vector<uint32_t> sample(const float *x, int64_t n, int64_t stride) {
  std::vector<uint32_t> keys;
  keys.reserve(static_cast<size_t>(n / stride));
  uint32_t state = 1;
  for (int64_t first = 0; first + stride <= n; first += stride) {
    state = state * 1664525u + 1013904223u;  // Numerical Recipes' generator
    const int64_t offset = static_cast<int64_t>((uint64_t{state} * static_cast<uint64_t>(stride)) >> 32);
    keys.push_back(key_of(x[first + offset]));
  }
  return keys;
}

// Returns the key at this position, counted from the largest key; if there is none, returns a limit.
uint32_t ranked(std::vector<uint32_t> &keys, double rank) {
  if (rank < 0) return largest_key;
  if (rank >= static_cast<double>(keys.size())) return 0;
  const auto at = keys.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(keys.begin(), at, keys.end(), std::greater<>());
  return *at;
}

// Searches between two keys of a sample; returns false if the threshold is elsewhere, or too many keys are.
bool among_sampled(const float *x, int64_t n, int64_t wanted, const Scan &scan, Threshold &found) {
  const int64_t stride = n / std::clamp(n / 64, least_sample, most_sample);
  std::vector<uint32_t> keys = sample(x, n, stride);
  const double part = static_cast<double>(wanted) / static_cast<double>(n);
  const double mean = part * static_cast<double>(keys.size());
  const double margin = 4 * std::sqrt(mean * (1 - part)) + 2;  // standard deviations
  const uint32_t high = std::min(ranked(keys, mean - margin), largest_key - 1);  // high + 1 is a key
  const uint32_t low = std::min(ranked(keys, mean + margin), high);
  const int64_t above = scan.count(x, 0, n, high + 1), left = wanted - above;
  if (left <= 0) return false;
  Scratch scratch;
  const int64_t room = n / 4;
  auto *inside = scratch.take<uint32_t>(static_cast<uint64_t>(room) + 1);
  const int64_t count = scan.between(x, n, low, high, inside, room);
  if (count < left || count > room) return false;
  uint32_t *const kth = inside + (left - 1);
  std::nth_element(inside, kth, inside + count, std::greater<>());
  found = {*kth, std::count(inside, kth + 1, *kth)};
  return true;
}

}  // namespace

Threshold threshold(const float *x, int64_t n, int64_t wanted, const Scan &scan) {
  Threshold found;
  if (n >= many && among_sampled(x, n, wanted, scan, found)) return found;
  const Bounds bounds = scan.bounds(x, n);
  uint32_t low = bounds.lowest, high = bounds.highest;
  Histogram bins;
  while (low < high) {
    const int width = 32 - __builtin_clz(high - low);
    const int shift = std::max(0, width - bin_bits);
    histogram(x, n, low, high, shift, bins);
    size_t bin = (high - low) >> shift;
    for (; bins[bin] < wanted; --bin) wanted -= bins[bin];
    low += static_cast<uint32_t>(bin) << shift;
    high = std::min(high, low + (1u << shift) - 1);
    if (bins[bin] == wanted) return {low - 1, 0};  // the whole bin
    if (low < high && bins[bin] < few) return among_few(x, n, low, high, wanted);
  }
  return {low, wanted};
}

int64_t top(const float *x, int64_t n, int64_t k, int64_t *positions, const Scan &scan) {
  if (k <= 0) return 0;
  const int64_t non_zero = scan.count(x, 0, n, 1);
  if (non_zero <= k) return scan.take(x, n, 0, 0, positions, k);
  const Threshold found = threshold(x, n, k, scan);
  return scan.take(x, n, found.key, found.ties, positions, k);
}

uint32_t guess(const float *x, int64_t n, int64_t k, int64_t stride) {
  std::vector<uint32_t> keys = sample(x, n, stride);
  // four standard deviations of the sampled count above its mean
  const double mean = static_cast<double>(k) / static_cast<double>(stride);
  const auto rank = static_cast<size_t>(mean + 4 * std::sqrt(mean) + 4);
  if (rank >= keys.size()) return 1;
  std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(rank), keys.end(),
                   std::greater<>());
  return std::max<uint32_t>(keys[rank], 1);
}

void count_from(const float *values, int64_t n, const int64_t *keys, int64_t bins,
                int64_t *counts) {
  if (bins == 0) return;
  std::vector<int64_t> at_least(static_cast<size_t>(bins) + 1, 0);
  // The table has, for each stretch of keys by their leading bits, the number of keys below the stretch.
  // Most stretches have at most one key; otherwise, the search continues among the keys in the stretch.
  const auto clamped = [](int64_t key) { return std::clamp(key, int64_t{0}, largest_key + int64_t{1}); };
  const int64_t low = clamped(keys[0]), span = clamped(keys[bins - 1]) - low;
  int shift = 0;
  while ((span >> shift) >= stretches_per_key * bins) ++shift;
  std::vector<int64_t> sentinel(keys, keys + bins), first(static_cast<size_t>(span >> shift) + 4);
  sentinel.push_back(std::numeric_limits<int64_t>::max());
  bool one_each = true;
  for (size_t s = 1; s < first.size(); ++s) {
    const int64_t start = low + (static_cast<int64_t>(s - 1) << shift);
    int64_t b = first[s - 1];
    while (b < bins && keys[b] < start) ++b;
    one_each &= b - first[s - 1] <= 1;
    first[s] = b;
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t key = key_of(values[i]), past = std::clamp(key - low, int64_t{-1}, span + 1);
    const auto stretch = static_cast<size_t>((past >> shift) + 1);
    int64_t reached = first[stretch], stop = one_each ? reached : first[stretch + 1];
    while (stop - reached > 1) {
      const int64_t middle = (reached + stop) / 2;
      (keys[middle - 1] <= key ? reached : stop) = middle;
    }
    ++at_least[static_cast<size_t>(reached + (sentinel[static_cast<size_t>(reached)] <= key))];
  }
  for (int64_t i = bins; i > 0; --i) {
    counts[i - 1] = at_least[static_cast<size_t>(i)];
    at_least[static_cast<size_t>(i - 1)] += counts[i - 1];
  }
}

}  // namespace sparsync
