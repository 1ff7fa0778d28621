// Lloyd-Max levels, included by scan_body.h; kernels/levels.py is the specification.  The order of
// every sum is its order.

#include <cstddef>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using sparsync::Levels;

constexpr int32_t infinite = 0x7f800000;
constexpr int64_t together = 8;  // codes that fill whole bytes, of any number of bits

inline float float_of(int32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline int32_t bits_of(float value) {
  int32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Branches on signs are never predicted.
inline float with_sign(float magnitude, int32_t negative) {
  return float_of(bits_of(magnitude) ^ static_cast<int32_t>(static_cast<uint32_t>(negative) << 31));
}

inline float sum_of_halves(float *row, int64_t n) {
  while (n > 1) {
    const int64_t half = (n + 1) / 2;
    for (int64_t i = 0; i < n - half; ++i) row[i] += row[half + i];
    n = half;
  }
  return row[0];
}

// <a, b> of an even number of elements, by a sum of halves.
inline float inner(const float *a, const float *b, int64_t n, float *scratch) {
  const int64_t half = n / 2;
  for (int64_t i = 0; i < half; ++i) scratch[i] = a[i] * b[i] + a[half + i] * b[half + i];
  return sum_of_halves(scratch, half);
}

template <int bits>
constexpr int last_level = bits == 8 ? 0 : (1 << (bits - 1)) - 1;  // of those in the table

template <int bits>
void pack_codes(const int32_t *codes, int64_t count, uint8_t *out) {
  for (int64_t at = 0; at < count; at += together) {
    uint64_t word = 0;
    for (int i = 0; i < together; ++i)
      word |= static_cast<uint64_t>(static_cast<uint32_t>(codes[at + i])) << (bits * i);
    const int64_t left = count - at;
    const int64_t nbytes = left < together ? (left * bits + 7) / 8 : bits;
    __builtin_memcpy(out, &word, static_cast<std::size_t>(nbytes));
    out += nbytes;
  }
}

template <int bits>
void unpack_codes(const uint8_t *in, int64_t count, int32_t *codes) {
  for (int64_t at = 0; at < count; at += together) {
    uint64_t word = 0;
    const int64_t left = count - at;
    const int64_t nbytes = left < together ? (left * bits + 7) / 8 : bits;
    __builtin_memcpy(&word, in, static_cast<std::size_t>(nbytes));
    in += nbytes;
    for (int i = 0; i < together; ++i)
      codes[at + i] = static_cast<int32_t>(word >> (bits * i)) & ((1 << bits) - 1);
  }
}

// Writes the magnitudes relative to `unit`, the number of each one's level, and the level.  Returns
// <levels, magnitudes> / <levels, levels>, in units.
template <int bits>
float choose(const float *x, int64_t n, int32_t peak, float inverse, const Levels &given,
             float *scaled, float *levels, int32_t *numbers) {
  const int64_t block = given.block;
  float *products = levels + block;
  for (int64_t i = 0; i < n; ++i) scaled[i] = __builtin_fabsf(x[i]) * inverse;
  for (int64_t i = n; i < block; ++i) scaled[i] = 0.0f;
  if constexpr (bits == 8) {
    const float factor = 127.0f / (float_of(peak) * inverse);
    constexpr float whole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to nearest, ties to even
    for (int64_t i = 0; i < block; ++i) {
      levels[i] = (scaled[i] * factor + whole) - whole;
      numbers[i] = static_cast<int32_t>(levels[i]);
    }
  } else {
    constexpr int last = last_level<bits>;
    const float squares = inner(scaled, scaled, block, products);
    const float spread = __builtin_sqrtf(squares / static_cast<float>(n));
    float thresholds[last + 1], table[last + 1];
    for (int j = 0; j <= last; ++j) table[j] = given.levels[j];
    for (int j = 0; j < last; ++j) thresholds[j] = given.thresholds[j] * spread;
    for (int64_t i = 0; i < block; ++i) {
      float level = table[0];
      int32_t number = 0;
      for (int j = 0; j < last; ++j) {
        level = scaled[i] > thresholds[j] ? table[j + 1] : level;
        number += scaled[i] > thresholds[j];
      }
      levels[i] = level;
      numbers[i] = number;
    }
    for (int64_t i = n; i < block; ++i) levels[i] = 0.0f;
  }
  const float projected = inner(levels, scaled, block, products);
  return projected / inner(levels, levels, block, products);
}

template <int bits>
void quantise_as(const float *x, int64_t n, const Levels &given, uint8_t *scales, uint8_t *codes,
                 float *decoded, float *scratch) {
  const int64_t block = given.block;
  float *scaled = scratch, *levels = scratch + block;
  auto *numbers = reinterpret_cast<int32_t *>(scratch + 3 * block);
  for (int64_t start = 0; start < n; start += block) {
    const int64_t size = n - start < block ? n - start : block;
    int32_t peak = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int32_t magnitude = bits_of(x[i]) & 0x7fffffff;
      peak = magnitude > peak ? magnitude : peak;
    }
    int32_t scale = peak < infinite ? 0 : 0x7fc00000;
    if (peak > 0 && peak < infinite) {
      int32_t exponent = peak & infinite;
      exponent = exponent < 0x00800000 ? 0x00800000 : exponent > 0x7e800000 ? 0x7e800000 : exponent;
      const float inverse = float_of(0x7f000000 - exponent);
      float exact = choose<bits>(x, size, peak, inverse, given, scaled, levels, numbers);
      exact *= float_of(exponent);
      scale = bits_of(exact < given.limit ? exact : given.limit);
      scale = (scale + 0x7fff + (scale >> 16 & 1)) & ~0xffff;  // a bf16: to nearest, ties to even
    }
    const auto stored = static_cast<uint16_t>(scale >> 16);
    __builtin_memcpy(scales, &stored, sizeof stored);
    const float factor = float_of(scale);
    if (factor > 0.0f) {
      for (int64_t i = 0; i < size; ++i) {
        const int32_t negative = (x[i] < 0.0f) & (levels[i] > 0.0f);
        decoded[i] = with_sign(levels[i] * factor, negative);
        numbers[i] |= negative << (bits - 1);
      }
    } else {
      for (int64_t i = 0; i < size; ++i) decoded[i] = factor;
      for (int64_t i = 0; i < size; ++i) numbers[i] = 0;
    }
    for (int64_t i = size; i < block; ++i) numbers[i] = 0;
    pack_codes<bits>(numbers, size, codes);
    x += block, decoded += block, scales += sizeof stored, codes += block * bits / 8;
  }
}

template <int bits>
void add_as(const uint8_t *scales, const uint8_t *codes, int64_t n, const Levels &given,
            float *into, float *scratch) {
  constexpr int last = last_level<bits>;
  const int64_t block = given.block;
  auto *numbers = reinterpret_cast<int32_t *>(scratch);
  for (int64_t start = 0; start < n; start += block) {
    const int64_t size = n - start < block ? n - start : block;
    uint16_t stored;
    __builtin_memcpy(&stored, scales, sizeof stored);
    const float scale = float_of(static_cast<int32_t>(uint32_t{stored} << 16));
    if constexpr (bits == 8) {
      unpack_codes<bits>(codes, size, numbers);
      for (int64_t i = 0; i < size; ++i)
        into[i] += with_sign(static_cast<float>(numbers[i] & 127) * scale, numbers[i] >> 7);
    } else {
      float meanings[16] = {};
      for (int j = 0; j <= last; ++j) {
        meanings[j] = given.levels[j] * scale;
        meanings[last + 1 + j] = -meanings[j];
      }
      int64_t at = 0;
#if defined(__AVX2__)  // a lookup of eight in a register
      const __m256 table = _mm256_loadu_ps(meanings);
      const __m256i shifts = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                                _mm256_set1_epi32(bits));
      for (; at + together <= size; at += together) {
        uint32_t word = 0;
        for (int i = 0; i < bits; ++i) word |= uint32_t{codes[at * bits / 8 + i]} << (8 * i);
        const __m256i eight = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word)), shifts);
        const __m256i code = _mm256_and_si256(eight, _mm256_set1_epi32((1 << bits) - 1));
        const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 3), 31);  // of 4 bits
        const __m256 value = _mm256_xor_ps(_mm256_permutevar8x32_ps(table, code),
                                           _mm256_castsi256_ps(sign));
        _mm256_storeu_ps(into + at, _mm256_add_ps(_mm256_loadu_ps(into + at), value));
      }
#endif
      unpack_codes<bits>(codes + at * bits / 8, size - at, numbers);
      for (int64_t i = at; i < size; ++i) into[i] += meanings[numbers[i - at]];
    }
    into += block, scales += sizeof stored, codes += block * bits / 8;
  }
}

void quantise(const float *x, int64_t n, const Levels &given, uint8_t *scales, uint8_t *codes,
              float *decoded, float *scratch) {
  const auto run = given.bits == 1   ? quantise_as<1>
                   : given.bits == 2 ? quantise_as<2>
                   : given.bits == 3 ? quantise_as<3>
                   : given.bits == 4 ? quantise_as<4>
                                     : quantise_as<8>;
  run(x, n, given, scales, codes, decoded, scratch);
}

void add_levels(const uint8_t *scales, const uint8_t *codes, int64_t n, const Levels &given,
                float *into, float *scratch) {
  const auto run = given.bits == 1   ? add_as<1>
                   : given.bits == 2 ? add_as<2>
                   : given.bits == 3 ? add_as<3>
                   : given.bits == 4 ? add_as<4>
                                     : add_as<8>;
  run(scales, codes, n, given, into, scratch);
}

}  // namespace
