#include "sparse.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "parallel.h"

namespace sparsync {
namespace {

[[noreturn]] void refuse_order(const char *what) {
  throw std::invalid_argument(std::string(what) +
                              " must be ascending, unique and within the vector; sort, coalesce "
                              "and check them first");
}

constexpr int64_t tile = int64_t{1} << 16;        // floats; their sums stay in the L2 cache
constexpr int64_t bit_tile = int64_t{1} << 17;    // 16 KiB of bits stay in the L1 cache
constexpr int64_t word_bits = 64;

constexpr int64_t line = 16;                      // floats of a cache line
constexpr int64_t past_caches = int64_t{1} << 20;  // floats from which lines go straight to memory

// Writes an aligned line without reading it first: that halves the traffic of zeroing a vector.
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

// The sums of one tile, and which of its places were written.
struct Tile {
  std::array<float, tile> sums{};
  std::array<uint64_t, tile / word_bits> written{};
};

// Adds what the stream has below `stop`; `at` moves on.
template <typename Index>
void add_until(int64_t start, int64_t stop, const Stream<Index> &stream, int64_t &at, Tile &t) {
  const auto room = static_cast<uint64_t>(stop - start);
  int64_t i = at;
  for (; i < stream.count; ++i) {
    const uint64_t place = static_cast<uint64_t>(stream.indices[i]) - static_cast<uint64_t>(start);
    if (place >= room) break;
    t.sums[place] += stream.values[i];
    t.written[place / word_bits] |= uint64_t{1} << (place % word_bits);
  }
  at = i;
}

// Writes the tile's non-zero sums, leaves it clean, returns how many.
int64_t drain(int64_t start, Tile &t, int64_t *indices, float *values) {
  int64_t count = 0;
  for (size_t w = 0; w < t.written.size(); ++w) {
    uint64_t word = t.written[w];
    if (word == 0) continue;
    t.written[w] = 0;
    do {
      const size_t place = w * word_bits + static_cast<size_t>(__builtin_ctzll(word));
      word &= word - 1;
      indices[count] = start + static_cast<int64_t>(place);
      values[count] = t.sums[place];
      count += t.sums[place] != 0;
      t.sums[place] = 0;
    } while (word != 0);
  }
  return count;
}

// Two streams need no tile.
template <typename Index>
int64_t merge_two(const Stream<Index> &a, const Stream<Index> &b, int64_t size, int64_t *indices,
                  float *values) {
  constexpr int64_t end = std::numeric_limits<int64_t>::max();
  int64_t i = 0, j = 0, count = 0, last = -1;
  for (;;) {
    const int64_t next_a = i < a.count ? static_cast<int64_t>(a.indices[i]) : end;
    const int64_t next_b = j < b.count ? static_cast<int64_t>(b.indices[j]) : end;
    const int64_t next = std::min(next_a, next_b);
    if (next == end) return count;
    if (next <= last || next >= size) refuse_order("merge: indices of a stream");
    last = next;
    float sum = 0;
    if (next_a == next) sum += a.values[i++];
    if (next_b == next) sum += b.values[j++];
    indices[count] = next;
    values[count] = sum;
    count += sum != 0;
  }
}

}  // namespace

template <typename Index>
int64_t merge(const std::vector<Stream<Index>> &streams, int64_t size, int64_t *indices,
              float *values) {
  if (streams.size() == 2) return merge_two(streams[0], streams[1], size, indices, values);
  const auto t = std::make_unique<Tile>();
  std::vector<int64_t> at(streams.size(), 0);
  int64_t count = 0, done = 0;  // all below `done` is written
  for (;;) {
    int64_t next = std::numeric_limits<int64_t>::max();
    for (size_t s = 0; s < streams.size(); ++s)
      if (at[s] < streams[s].count) next = std::min(next, static_cast<int64_t>(streams[s].indices[at[s]]));
    if (next == std::numeric_limits<int64_t>::max()) return count;
    if (next < done || next >= size) refuse_order("merge: indices of a stream");
    const int64_t start = next / tile * tile;  // tiles without entries are skipped
    done = std::min(start + tile, size);
    for (size_t s = 0; s < streams.size(); ++s) add_until(start, done, streams[s], at[s], *t);
    count += drain(start, *t, indices + count, values + count);
  }
}

template int64_t merge(const std::vector<Stream<int64_t>> &, int64_t, int64_t *, float *);
template int64_t merge(const std::vector<Stream<uint32_t>> &, int64_t, int64_t *, float *);

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
    // what lies before the tile is in one of the two only
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
  // all are checked before the first is subtracted: an error leaves the vector as it was
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
    // up to the first whole cache line, the lines, the rest
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
