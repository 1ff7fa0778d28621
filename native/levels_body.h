// Lloyd-Max levels, included by scan_body.h.  kernels/normal_levels.py is the specification; sums have the
// same order.

#include <cstddef>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using sparsync::Levels;

constexpr int32_t infinite = 0x7f800000;
constexpr int64_t together = 8;  // with any number of bits, this many codes fill whole bytes

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

// Sets the sign without a branch, because the processor cannot predict signs.
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

// Returns <a, b> of vectors with an even number of elements, as a sum of halves.
inline float inner(const float *a, const float *b, int64_t n, float *scratch) {
  const int64_t half = n / 2;
  for (int64_t i = 0; i < half; ++i) scratch[i] = a[i] * b[i] + a[half + i] * b[half + i];
  return sum_of_halves(scratch, half);
}

template <int bits>
constexpr int last_level = bits == 8 ? 0 : (1 << (bits - 1)) - 1;  // in the table

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

// Writes the magnitudes relative to `unit`, and the number and the value of each one's level.  Returns
// <levels, magnitudes> / <levels, levels>, relative to `unit`.
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
    const float squares = last > 0 ? inner(scaled, scaled, block, products) : 0.0f;
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

#if defined(__AVX2__)
inline __m256 load(const float *from) { return _mm256_loadu_ps(from); }

// Computes a[0]^T b[0] + a[2]^T b[2] + (a[1]^T b[1] + a[3]^T b[3]) for the quarters of a block: the first
// two steps of `inner`.
inline __m256 two_halvings(const __m256 *a, const __m256 *b) {
  const __m256 even = _mm256_add_ps(_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[2], b[2]));
  return _mm256_add_ps(even, _mm256_add_ps(_mm256_mul_ps(a[1], b[1]), _mm256_mul_ps(a[3], b[3])));
}

// Adds `registers` times eight elements, in the order of `sum_of_halves`.
template <int registers>
float folded(const float *row) {
  __m256 part[registers];
  for (int i = 0; i < registers; ++i) part[i] = load(row + together * i);
  for (int half = registers / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) part[i] = _mm256_add_ps(part[i], part[half + i]);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(part[0]), _mm256_extractf128_ps(part[0], 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Returns the sum of 2^j >= 8 elements.  A block waits for it, and a halving in memory waits for the stores
// of the one before, so the last ones are made in registers.
inline float sum_of_eights(float *row, int64_t n) {
  for (; n > 8 * together; n /= 2)
    for (int64_t i = 0; i < n / 2; i += together)
      _mm256_storeu_ps(row + i, _mm256_add_ps(load(row + i), load(row + n / 2 + i)));
  switch (n / together) {
    case 8: return folded<8>(row);
    case 4: return folded<4>(row);
    case 2: return folded<2>(row);
    default: return folded<1>(row);
  }
}

// Does the work of `choose` and writes the codes, for a whole block of 2^j >= 32 elements.
template <int bits>
float choose_eights(const float *x, float inverse, const Levels &given, float *scratch,
                    uint8_t *codes) {
  constexpr int last = last_level<bits>;
  constexpr uint32_t every = bits == 1 ? 0xff : bits == 2 ? 0x5555 : bits == 3 ? 0x249249 : 0x11111111;
  const int64_t block = given.block, quarter = block / 4;
  float *scaled = scratch, *products = scratch + block, *squares = products + quarter;
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const __m256 factor = _mm256_set1_ps(inverse);
  for (int64_t i = 0; i < quarter; i += together) {
    __m256 part[4];
    for (int q = 0; q < 4; ++q) {
      part[q] = _mm256_mul_ps(_mm256_and_ps(load(x + q * quarter + i), magnitude), factor);
      _mm256_storeu_ps(scaled + q * quarter + i, part[q]);
    }
    if (last > 0) _mm256_storeu_ps(squares + i, two_halvings(part, part));
  }
  __m256 thresholds[last + 1];
  if (last > 0) {
    const float mean = sum_of_eights(squares, quarter) / static_cast<float>(block);
    for (int j = 0; j < last; ++j)
      thresholds[j] = _mm256_set1_ps(given.thresholds[j] * __builtin_sqrtf(mean));
  }
  float all[8] = {};
  for (int j = 0; j <= last; ++j) all[j] = given.levels[j];
  const __m256 table = load(all);
  for (int64_t i = 0; i < quarter; i += together) {
    __m256 part[4], level[4];
    for (int q = 0; q < 4; ++q) {
      const int64_t at = q * quarter + i;
      part[q] = load(scaled + at);
      __m256i number = _mm256_setzero_si256();
      for (int j = 0; j < last; ++j)
        number = _mm256_sub_epi32(
            number, _mm256_castps_si256(_mm256_cmp_ps(part[q], thresholds[j], _CMP_GT_OQ)));
      level[q] = last == 0   ? _mm256_set1_ps(all[0])
                 : last == 1 ? _mm256_blendv_ps(_mm256_set1_ps(all[0]), _mm256_set1_ps(all[1]),
                                                _mm256_castsi256_ps(_mm256_slli_epi32(number, 31)))
                             : _mm256_permutevar8x32_ps(table, number);
      const __m256 negative = _mm256_cmp_ps(load(x + at), _mm256_setzero_ps(), _CMP_LT_OQ);
      uint32_t word = _pdep_u32(static_cast<uint32_t>(_mm256_movemask_ps(negative)),
                                every << (bits - 1));
      for (int k = 0; k < bits - 1; ++k)  // bit k of the numbers
        word |= _pdep_u32(static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(
                              _mm256_slli_epi32(number, 31 - k)))),
                          every << k);
      __builtin_memcpy(codes + at * bits / 8, &word, bits);
    }
    _mm256_storeu_ps(products + i, two_halvings(level, part));
    if (last > 0) _mm256_storeu_ps(squares + i, two_halvings(level, level));
  }
  const float projected = sum_of_eights(products, quarter);
  return projected / (last > 0 ? sum_of_eights(squares, quarter) : static_cast<float>(block));
}
#endif

#if defined(__AVX512F__)
inline __m512 two_halvings(const __m512 *a, const __m512 *b) {
  const __m512 even = _mm512_add_ps(_mm512_mul_ps(a[0], b[0]), _mm512_mul_ps(a[2], b[2]));
  return _mm512_add_ps(even, _mm512_add_ps(_mm512_mul_ps(a[1], b[1]), _mm512_mul_ps(a[3], b[3])));
}

// Does the work of `choose` and writes the codes, for a whole block of 2^j >= 64 elements.
template <int bits>
float choose_sixteens(const float *x, float inverse, const Levels &given, float *scratch,
                      uint8_t *codes) {
  constexpr int last = last_level<bits>;
  // one bit of each of sixteen codes
  constexpr uint64_t every = bits == 1   ? 0xffff
                             : bits == 2 ? 0x55555555
                             : bits == 3 ? 0x249249249249
                                         : 0x1111111111111111;
  const int64_t block = given.block, quarter = block / 4;
  float *products = scratch + block, *squares = products + quarter;
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512 factor = _mm512_set1_ps(inverse);
  const auto scaled = [&](__m512 value) {
    const __m512i bare = _mm512_and_si512(_mm512_castps_si512(value), magnitude);
    return _mm512_mul_ps(_mm512_castsi512_ps(bare), factor);
  };
  __m512 thresholds[last + 1], table[last + 1];
  if constexpr (last > 0) {
    for (int64_t i = 0; i < quarter; i += 16) {
      __m512 part[4];
      for (int q = 0; q < 4; ++q) part[q] = scaled(_mm512_loadu_ps(x + q * quarter + i));
      _mm512_storeu_ps(squares + i, two_halvings(part, part));
    }
    const float spread = __builtin_sqrtf(sum_of_eights(squares, quarter) / static_cast<float>(block));
    for (int j = 0; j < last; ++j) thresholds[j] = _mm512_set1_ps(given.thresholds[j] * spread);
  }
  for (int j = 0; j <= last; ++j) table[j] = _mm512_set1_ps(given.levels[j]);
  for (int64_t i = 0; i < quarter; i += 16) {
    __m512 part[4], level[4];
    for (int q = 0; q < 4; ++q) {
      const int64_t at = q * quarter + i;
      const __m512 value = _mm512_loadu_ps(x + at);
      part[q] = scaled(value), level[q] = table[0];
      __mmask16 number[bits] = {};  // number[k] has bit k of the sixteen levels' numbers
      for (int j = 0; j < last; ++j) {
        const __mmask16 above = _mm512_cmp_ps_mask(part[q], thresholds[j], _CMP_GT_OQ);
        level[q] = _mm512_mask_mov_ps(level[q], above, table[j + 1]);
        // counting from j to j + 1 changes those bits k for which 2^k divides j + 1
        for (int k = 0; k < bits - 1; ++k)
          if ((j + 1) % (1 << k) == 0) number[k] = _kxor_mask16(number[k], above);
      }
      number[bits - 1] = _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_LT_OQ);
      uint64_t word = 0;
      for (int k = 0; k < bits; ++k) word |= _pdep_u64(_cvtmask16_u32(number[k]), every << k);
      __builtin_memcpy(codes + at * bits / 8, &word, 2 * bits);
    }
    if constexpr (last > 0) {
      _mm512_storeu_ps(products + i, two_halvings(level, part));
      _mm512_storeu_ps(squares + i, two_halvings(level, level));
    } else {  // the only level is 1, so the products are the magnitudes
      const __m512 even = _mm512_add_ps(part[0], part[2]), odd = _mm512_add_ps(part[1], part[3]);
      _mm512_storeu_ps(products + i, _mm512_add_ps(even, odd));
    }
  }
  const float projected = sum_of_eights(products, quarter);
  return projected / (last > 0 ? sum_of_eights(squares, quarter) : static_cast<float>(block));
}
#endif

#if defined(__AVX2__)
// Reads eight codes by shifts: a copy of three bytes into a register goes through memory, and stalls.
template <int bits>
int eight_codes(const uint8_t *from) {
  uint32_t word = 0;
  for (int i = 0; i < bits; ++i) word |= uint32_t{from[i]} << (8 * i);
  return static_cast<int>(word);
}
#endif

// into = the decoded codes / divisor; with `keep`, they are added to into.
template <int bits>
void decode_as(const uint8_t *scales, const uint8_t *codes, int64_t n, const Levels &given,
               float divisor, bool keep, float *into, float *scratch) {
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
      for (int64_t i = 0; i < size; ++i) {
        const float value = with_sign(static_cast<float>(numbers[i] & 127) * scale, numbers[i] >> 7);
        into[i] = (keep ? into[i] : 0.0f) + value / divisor;
      }
    } else {
      float meanings[16] = {};
      for (int j = 0; j <= last; ++j) {
        meanings[j] = given.levels[j] * scale / divisor;
        meanings[last + 1 + j] = -meanings[j];
      }
      int64_t at = 0;
#if defined(__AVX512F__)
      if constexpr (bits == 1) {  // select sixteen values by their bits
        const __m512 plus = _mm512_set1_ps(meanings[0]), minus = _mm512_set1_ps(meanings[1]);
        for (; at + 16 <= size; at += 16) {
          uint16_t word;
          __builtin_memcpy(&word, codes + at / 8, sizeof word);
          const __m512 before = keep ? _mm512_loadu_ps(into + at) : _mm512_setzero_ps();
          const __m512 value = _mm512_mask_blend_ps(_cvtu32_mask16(word), plus, minus);
          _mm512_storeu_ps(into + at, _mm512_add_ps(before, value));
        }
      } else {  // look up sixteen values in a register, by the lowest four bits of its lanes
        float repeated[16];  // the bits above a code's own are the next code's
        for (int i = 0; i < 16; ++i) repeated[i] = meanings[i % (1 << bits)];
        const __m512 sixteen = _mm512_loadu_ps(repeated);
        const __m512i places = _mm512_mullo_epi32(
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7),
            _mm512_set1_epi32(bits));
        for (; at + 16 <= size; at += 16) {
          const uint8_t *from = codes + at * bits / 8;
          const __m512i halves = _mm512_mask_set1_epi32(
              _mm512_set1_epi32(eight_codes<bits>(from)), 0xff00, eight_codes<bits>(from + bits));
          const __m512 value =
              _mm512_permutexvar_ps(_mm512_srlv_epi32(halves, places), sixteen);
          const __m512 before = keep ? _mm512_loadu_ps(into + at) : _mm512_setzero_ps();
          _mm512_storeu_ps(into + at, _mm512_add_ps(before, value));
        }
      }
#endif
#if defined(__AVX2__)  // look up eight values in a register
      const __m256 table = load(meanings);
      const __m256i shifts = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                                _mm256_set1_epi32(bits));
      for (; at + together <= size; at += together) {
        const __m256i word = _mm256_set1_epi32(eight_codes<bits>(codes + at * bits / 8));
        const __m256i eight = _mm256_srlv_epi32(word, shifts);
        const __m256i code = _mm256_and_si256(eight, _mm256_set1_epi32((1 << bits) - 1));
        const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 3), 31);  // of 4 bits
        const __m256 value = _mm256_xor_ps(_mm256_permutevar8x32_ps(table, code),
                                           _mm256_castsi256_ps(sign));
        const __m256 before = keep ? load(into + at) : _mm256_setzero_ps();
        _mm256_storeu_ps(into + at, _mm256_add_ps(before, value));
      }
#endif
      unpack_codes<bits>(codes + at * bits / 8, size - at, numbers);
      for (int64_t i = at; i < size; ++i)
        into[i] = (keep ? into[i] : 0.0f) + meanings[numbers[i - at]];
    }
    into += block, scales += sizeof stored, codes += block * bits / 8;
  }
}

template <int bits>
void quantise_as(const float *x, int64_t n, const Levels &given, uint8_t *scales, uint8_t *codes,
                 float *scratch) {
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
    bool packed = false;
    if (peak > 0 && peak < infinite) {
      int32_t exponent = peak & infinite;
      exponent = exponent < 0x00800000 ? 0x00800000 : exponent > 0x7e800000 ? 0x7e800000 : exponent;
      const float inverse = float_of(0x7f000000 - exponent);
      float exact = 0.0f;
#if defined(__AVX2__)
      if constexpr (bits < 8) {
        packed = size == block && block >= 32 && (block & (block - 1)) == 0;
#if defined(__AVX512F__)
        if (packed && block >= 64)
          exact = choose_sixteens<bits>(x, inverse, given, scratch, codes);
        else
#endif
            if (packed)
          exact = choose_eights<bits>(x, inverse, given, scratch, codes);
      }
#endif
      if (!packed) exact = choose<bits>(x, size, peak, inverse, given, scaled, levels, numbers);
      exact *= float_of(exponent);
      scale = bits_of(exact < given.limit ? exact : given.limit);
      scale = (scale + 0x7fff + (scale >> 16 & 1)) & ~0xffff;  // round to bf16: nearest, ties to even
    }
    const auto stored = static_cast<uint16_t>(scale >> 16);
    __builtin_memcpy(scales, &stored, sizeof stored);
    if (!(float_of(scale) > 0.0f)) {  // one encoding each for zeros and NaN
      __builtin_memset(codes, 0, static_cast<std::size_t>((size * bits + 7) / 8));
    } else if (!packed) {
      for (int64_t i = 0; i < size; ++i)
        numbers[i] |= ((x[i] < 0.0f) & (levels[i] > 0.0f)) << (bits - 1);
      for (int64_t i = size; i < block; ++i) numbers[i] = 0;
      pack_codes<bits>(numbers, size, codes);
    }
    x += block, scales += sizeof stored, codes += block * bits / 8;
  }
}

void quantise(const float *x, int64_t n, const Levels &given, uint8_t *scales, uint8_t *codes,
              float *scratch) {
  const auto run = given.bits == 1   ? quantise_as<1>
                   : given.bits == 2 ? quantise_as<2>
                   : given.bits == 3 ? quantise_as<3>
                   : given.bits == 4 ? quantise_as<4>
                                     : quantise_as<8>;
  run(x, n, given, scales, codes, scratch);
}

void decode_levels(const uint8_t *scales, const uint8_t *codes, int64_t n, const Levels &given,
                   float divisor, bool keep, float *into, float *scratch) {
  const auto run = given.bits == 1   ? decode_as<1>
                   : given.bits == 2 ? decode_as<2>
                   : given.bits == 3 ? decode_as<3>
                   : given.bits == 4 ? decode_as<4>
                                     : decode_as<8>;
  run(scales, codes, n, given, divisor, keep, into, scratch);
}

}  // namespace
