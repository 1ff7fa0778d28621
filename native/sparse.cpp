#include "sparse.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "parallel.h"
#include "scratch.h"

namespace sparsync {
namespace {

[[noreturn]] void refuse_order(const char *what) {
  throw std::invalid_argument(std::string(what) +
                              " must be ascending, unique and within the vector; sort, coalesce "
                              "and check them first");
}

constexpr int64_t tile = static_cast<int64_t>(slots_per_tile);
constexpr int64_t bit_tile = int64_t{1} << 17;    // 16 KiB of bits stay in the L1 cache
constexpr int64_t word_bits = 64;

constexpr int64_t line = 16;                      // floats of a cache line
constexpr int64_t past_caches = int64_t{1} << 20;  // from this many floats on, lines bypass the caches

// Writes an aligned line without reading it first, which halves the traffic of zeroing a vector.
inline void write_line(float *to, const float *from) {
#if defined(__SSE2__)
  for (int64_t i = 0; i < line; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
#else
  std::copy_n(from, line, to);
#endif
}

inline void finish_lines() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

inline float masked(float value, bool there) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits &= -static_cast<uint32_t>(there);
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

// The memory for the entries of one tile.
struct Tile {
  template <typename Index>
  Tile(const std::vector<Stream<Index>> &streams, Scratch &scratch) {
    uint64_t room = 0;
    for (const auto &stream : streams) room += static_cast<uint64_t>(stream.count);
    slots = scratch.take<uint16_t>(room + 1);
    values = scratch.take<float>(room + 1);
    bits = scratch.take<uint64_t>(words_per_tile);
  }

  uint16_t *slots;
  float *values;
  uint64_t *bits;
  int64_t count = 0;
};

// Collects the stream's entries below `stop`, and advances `at`; returns whether they ascend.
template <typename Index>
bool collect(int64_t start, int64_t stop, const Stream<Index> &stream, int64_t &at, Tile &t) {
  const auto room = static_cast<uint64_t>(stop - start);
  const Index *indices = stream.indices + at;
  const int64_t left = stream.count - at;
  uint16_t *slots = t.slots + t.count;
  int64_t found = 0;
  for (; found < left; ++found) {
    const uint64_t place = static_cast<uint64_t>(indices[found]) - static_cast<uint64_t>(start);
    if (place >= room) break;
    slots[found] = static_cast<uint16_t>(place);
  }
  std::copy_n(stream.values + at, found, t.values + t.count);
  t.count += found;
  at += found;
  uint16_t disorder = 0;  // a pass over slots, eight at a time, is faster than a check in the loop above
  for (int64_t i = 1; i < found; ++i) disorder |= static_cast<uint16_t>(slots[i] <= slots[i - 1]);
  return disorder == 0;
}

// Two streams need no tile.  No branch depends on which stream's entry comes next, because the processor
// could not predict that.
template <typename Index>
int64_t merge_two(const Stream<Index> &a, const Stream<Index> &b, int64_t size, int64_t *indices,
                  float *values) {
  int64_t i = 0, j = 0, count = 0, last = -1;
  bool ascending = true;
  const auto put = [&](int64_t index, float sum) {
    ascending &= index > last;
    last = index;
    indices[count] = index;
    values[count] = sum;
    count += sum != 0;
  };
  while (i < a.count && j < b.count) {
    const auto next_a = static_cast<int64_t>(a.indices[i]), next_b = static_cast<int64_t>(b.indices[j]);
    const bool from_a = next_a <= next_b, from_b = next_b <= next_a;
    put(from_a ? next_a : next_b, masked(a.values[i], from_a) + masked(b.values[j], from_b));
    i += from_a;
    j += from_b;
  }
  for (; i < a.count; ++i) put(static_cast<int64_t>(a.indices[i]), a.values[i]);
  for (; j < b.count; ++j) put(static_cast<int64_t>(b.indices[j]), b.values[j]);
  if (!ascending || last >= size) refuse_order("merge: indices of a stream");
  return count;
}

}  // namespace

int64_t without_zeros(int64_t count, int64_t *indices, float *values) {
  int64_t zeros = 0;
  for (int64_t i = 0; i < count; ++i) zeros += values[i] == 0;
  if (zeros == 0) return count;
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    indices[kept] = indices[i];
    values[kept] = values[i];
    kept += values[i] != 0;
  }
  return kept;
}

template <typename Index>
int64_t merge(const std::vector<Stream<Index>> &streams, int64_t size, const Scan &scan,
              int64_t *indices, float *values) {
  if (streams.size() == 2) return merge_two(streams[0], streams[1], size, indices, values);
  Scratch scratch;
  Tile t(streams, scratch);
  std::vector<int64_t> at(streams.size(), 0);
  int64_t count = 0, done = 0;  // everything below `done` is written
  for (;;) {
    int64_t next = std::numeric_limits<int64_t>::max();
    for (size_t s = 0; s < streams.size(); ++s)
      if (at[s] < streams[s].count) next = std::min(next, static_cast<int64_t>(streams[s].indices[at[s]]));
    if (next == std::numeric_limits<int64_t>::max()) return count;
    if (next < done || next >= size) refuse_order("merge: indices of a stream");
    const int64_t start = next / tile * tile;  // skip tiles without entries
    done = std::min(start + tile, size);
    t.count = 0;
    bool ascending = true;
    for (size_t s = 0; s < streams.size(); ++s) ascending &= collect(start, done, streams[s], at[s], t);
    if (!ascending) refuse_order("merge: indices of a stream");
    const int64_t found = scan.sum(t.slots, t.values, t.count, start, t.bits, indices + count, values + count);
    count += without_zeros(found, indices + count, values + count);
  }
}

template int64_t merge(const std::vector<Stream<int64_t>> &, int64_t, const Scan &, int64_t *, float *);
template int64_t merge(const std::vector<Stream<uint16_t>> &, int64_t, const Scan &, int64_t *, float *);
template int64_t merge(const std::vector<Stream<uint32_t>> &, int64_t, const Scan &, int64_t *, float *);

int64_t merge_within(const std::vector<Stream<int64_t>> &streams, int64_t size, const int64_t *among,
                     int64_t m, const Scan &scan, int64_t *indices, float *values) {
  // a pass over all indices would take an eighth longer, so only the ends of a stream are checked
  for (const auto &stream : streams)
    if (stream.count && (stream.indices[0] < 0 || stream.indices[stream.count - 1] >= size))
      refuse_order("merge: indices of a stream");
  Scratch scratch;
  Tile t(streams, scratch);
  std::array<uint8_t, tile> wanted{};  // bytes are faster to set and to look up than bits
  std::vector<int64_t> at(streams.size(), 0);
  int64_t count = 0, done = 0;
  for (int64_t j = 0; j < m;) {
    if (among[j] < done || among[j] >= size) refuse_order("merge: indices of within");
    const int64_t start = among[j] / tile * tile;
    const auto place_of = [&](int64_t index) {
      return static_cast<uint64_t>(index) - static_cast<uint64_t>(start);
    };
    const auto room = static_cast<uint64_t>(std::min(tile, size - start));
    const int64_t first = j;
    for (; j < m && place_of(among[j]) < room; ++j) wanted[place_of(among[j])] = 1;
    t.count = 0;
    for (size_t s = 0; s < streams.size(); ++s) {
      const Stream<int64_t> stream = streams[s];  // a copy, so the compiler knows that nothing changes it
      int64_t i = std::lower_bound(stream.indices + at[s], stream.indices + stream.count, start) -
                  stream.indices;
      int64_t collected = t.count;
      for (; i < stream.count; ++i) {
        const uint64_t place = place_of(stream.indices[i]);
        if (place >= room) break;
        t.slots[collected] = static_cast<uint16_t>(place);
        t.values[collected] = stream.values[i];
        collected += wanted[place];
      }
      t.count = collected;
      at[s] = i;
    }
    const int64_t found = scan.sum(t.slots, t.values, t.count, start, t.bits, indices + count, values + count);
    count += without_zeros(found, indices + count, values + count);
    for (int64_t i = first; i < j; ++i) wanted[place_of(among[i])] = 0;
    done = start + tile;
  }
  return count;
}

int64_t restrict_to(const int64_t *indices, int64_t n, const int64_t *among, int64_t m,
                    int64_t *positions) {
  std::array<uint64_t, bit_tile / word_bits> bits;
  int64_t i = 0, j = 0, count = 0, start = 0;
  while (i < n && j < m) {
    const int64_t next = std::max(indices[i], among[j]);
    if (indices[i] < start || among[j] < start) refuse_order("restrict: indices");
    start = next / bit_tile * bit_tile;
    const int64_t stop = start + bit_tile;
    bits.fill(0);
    // before the tile, the two streams have no index in common
    i = std::lower_bound(indices + i, indices + n, start) - indices;
    j = std::lower_bound(among + j, among + m, start) - among;
    for (; j < m && among[j] < stop; ++j) {
      const auto place = static_cast<uint64_t>(among[j] - start) % bit_tile;
      bits[place / word_bits] |= uint64_t{1} << (place % word_bits);
    }
    for (; i < n && indices[i] < stop; ++i) {
      const auto place = static_cast<uint64_t>(indices[i] - start) % bit_tile;
      positions[count] = i;
      count += static_cast<int64_t>(bits[place / word_bits] >> (place % word_bits) & 1);
    }
    start = stop;
  }
  return count;
}

void subtract(float *dense, int64_t size, const int64_t *indices, const float *values, int64_t n) {
  const auto room = static_cast<uint64_t>(size);
  // check all indices before subtracting the first value, so that an error leaves the vector unchanged
  bool inside = true;
  for (int64_t i = 0; i < n; ++i) inside &= static_cast<uint64_t>(indices[i]) < room;
  if (!inside) refuse_order("subtract_: indices");
  for (int64_t i = 0; i < n; ++i) dense[indices[i]] -= values[i];
}

void scatter(float *dense, int64_t size, const int64_t *indices, const float *values, int64_t n,
             int threads) {
  bool ascending = n == 0 || (indices[0] >= 0 && indices[n - 1] < size);
  for (int64_t i = 1; i < n; ++i) ascending &= indices[i - 1] < indices[i];
  if (!ascending) refuse_order("scatter_: indices");
  share(size, threads, tile, [&](int, int64_t start, int64_t stop) {
    int64_t i = std::lower_bound(indices, indices + n, start) - indices;
    if (size < past_caches) {
      std::fill(dense + start, dense + stop, 0.0f);
      for (; i < n && indices[i] < stop; ++i) dense[indices[i]] = values[i];
      return;
    }
    // first the part before the first whole cache line, then the lines, then the rest
    const auto misplaced = static_cast<int64_t>(reinterpret_cast<uintptr_t>(dense + start) / 4 % line);
    const int64_t head = std::min(stop, start + (line - misplaced) % line);
    const int64_t tail = head + (stop - head) / line * line;
    const auto plainly = [&](int64_t from, int64_t to) {
      std::fill(dense + from, dense + to, 0.0f);
      for (; i < n && indices[i] < to; ++i) dense[indices[i]] = values[i];
    };
    plainly(start, head);
    for (int64_t at = head; at < tail; at += line) {
      alignas(64) float whole[line] = {};
      for (; i < n && indices[i] < at + line; ++i) whole[indices[i] - at] = values[i];
      write_line(dense + at, whole);
    }
    plainly(tail, stop);
    finish_lines();
  });
}

}  // namespace sparsync
