// The passes over whole vectors, one implementation per instruction set, selected at run time.
//
// Magnitudes are compared as the bits of |x| ("keys"): finite floats in the order of |x|, then Inf,
// then NaN.  This vectorises without -ffast-math, and a NaN is selected and noticed, never lost.
#pragma once

#include <cstdint>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels are written for little-endian machines"
#endif

namespace sparsync {

constexpr uint32_t largest_key = 0x7fffffffu;

// `static`, because a copy compiled for one instruction set must not be merged with another
static inline uint32_t key_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits & largest_key;
}

// Elements per step of a collecting pass; so few that parts of two vectors stay in the L1 cache.
constexpr int64_t scan_step = 4096;

// Number of slots that `sum` distinguishes; their bits fill 8 KiB.
constexpr uint64_t slots_per_tile = uint64_t{1} << 16;
constexpr uint64_t words_per_tile = slots_per_tile / 64;

// Room for the entries that a worker finds, filled upwards, or downwards from its end.
// `count` is `capacity + 1` once more entries have been found than fit.
struct Found {
  int64_t *indices;
  float *values;
  int64_t capacity;
  bool downwards;
  int64_t count;
};

// The non-zero keys of a vector.
struct Bounds {
  uint32_t lowest;   // largest_key if there is none
  uint32_t highest;  // 0 if there is none
};

// The parameters with which a vector is quantised; see kernels/normal_levels.py.
struct Levels {
  int bits;          // 1, 2, 3, 4 or 8
  int64_t block;     // elements that share a scale, a multiple of 8
  float limit;       // the largest scale
  const float *thresholds, *levels;  // for a root mean square of 1
};
constexpr int64_t levels_scratch = 4;  // floats of scratch memory per element of a block, for passes below

// The factors by which Adam's steps become longer; see updates/gradient_noise.py.
struct Moments {
  float lengthened, own;  // factors of v, in the desired step and in the step that was made
  float eps, rate;
};

struct Scan {
  // residual, gradient = residual + gradient, residual; in [start, stop)
  void (*swap_add)(float *residual, float *gradient, int64_t start, int64_t stop);
  // does the same for at most scan_step elements, and collects the sums with a key >= `key`
  void (*accumulate)(float *residual, float *gradient, int64_t start, int64_t stop, uint32_t key,
                     Found &found);
  // collects the elements with a key >= `key` among at most scan_step elements
  void (*find)(const float *x, int64_t start, int64_t stop, uint32_t key, Found &found);
  // counts the elements with a key >= `key`
  int64_t (*count)(const float *x, int64_t start, int64_t stop, uint32_t key);
  Bounds (*bounds)(const float *x, int64_t n);
  // writes the positions of keys > `key`, and of the first `ties` keys that equal it
  int64_t (*take)(const float *x, int64_t n, uint32_t key, int64_t ties, int64_t *positions,
                  int64_t capacity);
  // writes the keys in [low, high], in order; returns their count, or `capacity + 1` if they do not fit
  int64_t (*between)(const float *x, int64_t n, uint32_t low, uint32_t high, uint32_t *keys,
                     int64_t capacity);
  // counts the elements that reach each of `bins` ascending keys
  void (*count_from)(const float *x, int64_t n, const int64_t *keys, int64_t bins, int64_t *counts);
  // deals indices below 2^31 to fewer than 2^31 ranks; see dealing.h
  void (*place)(const int64_t *indices, int64_t n, uint32_t ranks, uint32_t *groups,
                uint32_t *owners);
  // writes the slots of an owner's elements in a tile that starts with the group `first`
  void (*undeal)(const uint32_t *groups, int64_t n, uint64_t first, uint32_t owner, uint32_t ranks,
                 uint16_t *slots);
  // Adds n entries by slot, in their order; writes `base` + slot and the sums, in ascending order, and
  // returns their number.  There is room for n.  `bits`, one per slot, marks the slots that occur.
  int64_t (*sum)(const uint16_t *slots, const float *values, int64_t n, int64_t base, uint64_t *bits,
                 int64_t *indices, float *sums);
  // packs and unpacks a message's body; see packed.h
  bool (*pack)(const uint32_t *indices, const float *values, uint64_t nnz, uint64_t size, int form,
               uint64_t block, uint8_t *body, uint64_t nbytes, float *decoded);
  int64_t (*unpack)(const uint8_t *body, uint64_t nbytes, uint64_t nnz, uint64_t size, int form,
                    uint64_t block, uint32_t *indices, float *values);
  // writes a bf16 scale per block and a code per element
  void (*quantise)(const float *x, int64_t n, const Levels &given, uint8_t *scales, uint8_t *codes,
                   float *scratch);
  // into = the decoded codes / divisor; with `keep`, they are added to into
  void (*decode_levels)(const uint8_t *scales, const uint8_t *codes, int64_t n, const Levels &given,
                        float divisor, bool keep, float *into, float *scratch);
  // weights += (1 / lengthened root - 1 / root) rate first
  void (*lengthen)(const float *first, const float *second, float *weights, int64_t n,
                   const Moments &given);
};

// returns nullptr if this build or this machine lacks the instruction set
const Scan *scan_plain();
const Scan *scan_neon();
const Scan *scan_avx2();
const Scan *scan_avx512();

}  // namespace sparsync
