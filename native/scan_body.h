// The passes themselves, included by one file per instruction set.  Each file defines, in an unnamed
// namespace, how to handle 64 elements:
//   uint64_t reaching(const float *x, uint32_t key)            bit i: key_of(x[i]) >= key
//   uint64_t add_reaching(float *r, float *g, uint32_t key)    swap-add, then the same of r
//   void add_only(float *r, float *g)                          swap-add
//
// All functions here have internal linkage: the linker must never merge code compiled for different
// instruction sets.

#include "dealing.h"
#include "levels_body.h"
#include "moments_body.h"
#include "packed.h"

namespace {

using sparsync::Bounds;
using sparsync::Found;
using sparsync::key_of;

constexpr int64_t lane = 64;      // elements per mask word
constexpr int ahead = 4;          // positions written at once, whether or not there are that many
constexpr uint64_t guard = uint64_t{1} << 63;  // ctz of zero is undefined; ctz(0 | guard) is not

// Appends `base` + the position of every set bit.  Writes up to `ahead` useless entries beyond the count.
inline int64_t emit(uint64_t word, uint16_t base, uint16_t *positions, int64_t count) {
  const int bits = __builtin_popcountll(word);
  uint16_t *out = positions + count;
  for (int done = 0;;) {
    // at 1 % density, a word has 0 to 3 set bits; always writing four positions costs less than a branch
    // that the processor cannot predict
    for (int i = 0; i < ahead; ++i) {
      out[done + i] = static_cast<uint16_t>(base + __builtin_ctzll(word | guard));
      word &= word - 1;
    }
    done += ahead;
    if (done >= bits) return count + bits;
  }
}

// Returns the mask of a part shorter than 64.
inline uint64_t reaching_part(const float *x, int64_t n, uint32_t key) {
  uint64_t word = 0;
  for (int64_t i = 0; i < n; ++i) word |= uint64_t{key_of(x[i]) >= key} << i;
  return word;
}

inline void swap_part(float *r, float *g, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float old = r[i];
    r[i] = old + g[i];
    g[i] = old;
  }
}

// Moves the entries found in a step to the caller's memory, if they fit.
inline void keep(const float *x, int64_t start, const uint16_t *positions, int64_t count,
                 Found &found) {
  if (found.count + count > found.capacity) {
    found.count = found.capacity + 1;
    return;
  }
  const int64_t at = found.downwards ? found.capacity - found.count - count : found.count;
  int64_t *indices = found.indices + at;
  float *values = found.values + at;
  for (int64_t i = 0; i < count; ++i) {
    indices[i] = start + positions[i];
    values[i] = x[start + positions[i]];
  }
  found.count += count;
}

void swap_add(float *r, float *g, int64_t start, int64_t stop) {
  int64_t at = start;
  for (; at + lane <= stop; at += lane) add_only(r + at, g + at);
  swap_part(r + at, g + at, stop - at);
}

void accumulate(float *r, float *g, int64_t start, int64_t stop, uint32_t key, Found &found) {
  if (found.count > found.capacity) return swap_add(r, g, start, stop);
  uint16_t positions[sparsync::scan_step + ahead];
  int64_t count = 0, at = start;
  for (; at + lane <= stop; at += lane) {
    const uint64_t word = add_reaching(r + at, g + at, key);
    count = emit(word, static_cast<uint16_t>(at - start), positions, count);
  }
  if (at < stop) {
    swap_part(r + at, g + at, stop - at);
    const uint64_t word = reaching_part(r + at, stop - at, key);
    count = emit(word, static_cast<uint16_t>(at - start), positions, count);
  }
  keep(r, start, positions, count, found);
}

void find(const float *x, int64_t start, int64_t stop, uint32_t key, Found &found) {
  if (found.count > found.capacity) return;
  uint16_t positions[sparsync::scan_step + ahead];
  int64_t count = 0, at = start;
  for (; at + lane <= stop; at += lane)
    count = emit(reaching(x + at, key), static_cast<uint16_t>(at - start), positions, count);
  if (at < stop) {
    const uint64_t word = reaching_part(x + at, stop - at, key);
    count = emit(word, static_cast<uint16_t>(at - start), positions, count);
  }
  keep(x, start, positions, count, found);
}

int64_t count(const float *x, int64_t start, int64_t stop, uint32_t key) {
  int64_t total = 0, at = start;
  for (; at + lane <= stop; at += lane) total += __builtin_popcountll(reaching(x + at, key));
  return total + __builtin_popcountll(reaching_part(x + at, stop - at, key));
}

Bounds bounds(const float *x, int64_t n) {
  Bounds found{sparsync::largest_key, 0};
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = key_of(x[i]);
    const uint32_t low = key == 0 ? sparsync::largest_key : key;
    found.lowest = low < found.lowest ? low : found.lowest;
    found.highest = key > found.highest ? key : found.highest;
  }
  return found;
}

// Clears the highest `surplus` bits.
inline uint64_t without_last(uint64_t word, int surplus) {
  for (; surplus > 0; --surplus) word ^= guard >> __builtin_clzll(word);
  return word;
}

int64_t take(const float *x, int64_t n, uint32_t key, int64_t ties, int64_t *positions,
             int64_t capacity) {
  uint16_t inside[lane + ahead];
  int64_t taken = 0;
  for (int64_t at = 0; at < n; at += lane) {
    const int64_t size = n - at < lane ? n - at : lane;
    const auto mask = [&](uint32_t low) {
      return size == lane ? reaching(x + at, low) : reaching_part(x + at, size, low);
    };
    uint64_t word = mask(key + (ties == 0));
    if (ties > 0 && word != 0) {
      const uint64_t equal = word & ~mask(key + 1);
      const int count = __builtin_popcountll(equal);
      const int surplus = count > ties ? count - static_cast<int>(ties) : 0;
      word = (word ^ equal) | without_last(equal, surplus);
      ties -= count - surplus;
    }
    const int64_t count = emit(word, 0, inside, 0);
    if (taken + count > capacity) break;
    for (int64_t i = 0; i < count; ++i) positions[taken + i] = at + inside[i];
    taken += count;
  }
  return taken;
}

int64_t between(const float *x, int64_t n, uint32_t low, uint32_t high, uint32_t *keys,
                int64_t capacity) {
  uint16_t inside[lane + ahead];
  int64_t count = 0;
  for (int64_t at = 0; at < n; at += lane) {
    const int64_t size = n - at < lane ? n - at : lane;
    const auto mask = [&](uint32_t key) {
      return size == lane ? reaching(x + at, key) : reaching_part(x + at, size, key);
    };
    const int64_t found = emit(mask(low) & ~mask(high + 1), 0, inside, 0);
    if (count + found > capacity) return capacity + 1;
    for (int64_t i = 0; i < found; ++i) keys[count + i] = key_of(x[at + inside[i]]);
    count += found;
  }
  return count;
}

// Computes one mask per key and 64 elements; the elements of a step stay in the L1 cache.
void count_from(const float *x, int64_t n, const int64_t *keys, int64_t bins, int64_t *counts) {
  for (int64_t b = 0; b < bins; ++b) counts[b] = 0;
  for (int64_t start = 0; start < n; start += sparsync::scan_step) {
    const int64_t stop = start + sparsync::scan_step < n ? start + sparsync::scan_step : n;
    for (int64_t b = 0; b < bins; ++b) {
      if (keys[b] > int64_t{sparsync::largest_key}) break;
      counts[b] += count(x, start, stop, static_cast<uint32_t>(keys[b] < 0 ? 0 : keys[b]));
    }
  }
}

void place(const int64_t *indices, int64_t n, uint32_t ranks, uint32_t *groups, uint32_t *owners) {
  // compute quotients of 31-bit numbers by a product and a shift (Granlund and Montgomery, 1994)
  const int shift = 31 + (ranks > 1 ? 32 - __builtin_clz(ranks - 1) : 0);
  const auto inverse = static_cast<uint32_t>((uint64_t{1} << shift) / ranks + 1);
  for (int64_t i = 0; i < n; ++i)
    groups[i] = static_cast<uint32_t>(
        (uint64_t{static_cast<uint32_t>(indices[i])} * uint64_t{inverse}) >> shift);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t offset = static_cast<uint32_t>(indices[i]) - groups[i] * ranks;
    const uint32_t owner = offset + static_cast<uint32_t>(sparsync::turn(groups[i], ranks));
    owners[i] = owner < ranks ? owner : owner - ranks;
  }
}

void undeal(const uint32_t *groups, int64_t n, uint64_t first, uint32_t owner, uint32_t ranks,
            uint16_t *slots) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t offset = owner + ranks - static_cast<uint32_t>(sparsync::turn(groups[i], ranks));
    const uint32_t in_group = offset < ranks ? offset : offset - ranks;
    slots[i] = static_cast<uint16_t>((groups[i] - static_cast<uint32_t>(first)) * ranks + in_group);
  }
}

int64_t sum(const uint16_t *slots, const float *values, int64_t n, int64_t base, uint64_t *bits,
            int64_t *indices, float *sums) {
  constexpr uint64_t words = sparsync::words_per_tile;
  __builtin_memset(bits, 0, words * sizeof *bits);
  uint16_t before[words];  // entries in lower words: all but the last place fit 16 bits
  for (int64_t i = 0; i < n; ++i) bits[slots[i] / lane] |= uint64_t{1} << (slots[i] % lane);
  uint32_t total = 0;
  for (uint64_t w = 0; w < words; ++w) {
    before[w] = static_cast<uint16_t>(total);
    total += static_cast<uint32_t>(__builtin_popcountll(bits[w]));
  }
  for (uint32_t i = 0; i < total; ++i) sums[i] = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t lower = bits[slots[i] / lane] & ((uint64_t{1} << (slots[i] % lane)) - 1);
    const int64_t place = before[slots[i] / lane] + __builtin_popcountll(lower);
    indices[place] = base + slots[i];
    sums[place] += values[i];
  }
  return total;
}

bool pack(const uint32_t *indices, const float *values, uint64_t nnz, uint64_t size, int form,
          uint64_t block, uint8_t *body, uint64_t nbytes, float *decoded) {
  return sparsync::packed::pack(indices, values, nnz, size, form, block, body, nbytes, decoded);
}

int64_t unpack(const uint8_t *body, uint64_t nbytes, uint64_t nnz, uint64_t size, int form,
               uint64_t block, uint32_t *indices, float *values) {
  return sparsync::packed::unpack(body, nbytes, nnz, size, form, block, indices, values);
}

constexpr sparsync::Scan passes{swap_add, accumulate, find,   count, bounds, take,
                                between,  count_from, place,  undeal, sum,   pack,
                                unpack,   quantise,   decode_levels,  lengthen};

}  // namespace
