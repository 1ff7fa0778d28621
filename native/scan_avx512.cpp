// AVX-512 (F, BW, VL): 16 elements in a register; comparisons return mask bits directly.
#include "scan.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>

namespace {

inline uint64_t reaching16(__m512 x, __m512i key) {
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
  return _cvtmask16_u32(_mm512_cmpge_epu32_mask(bits, key));
}

inline __m512i broadcast(uint32_t key) {
  return _mm512_set1_epi32(static_cast<int>(key));
}

inline uint64_t reaching(const float *x, uint32_t key) {
  const __m512i low = broadcast(key);
  uint64_t word = 0;
  for (int i = 0; i < 4; ++i) word |= reaching16(_mm512_loadu_ps(x + 16 * i), low) << (16 * i);
  return word;
}

inline __m512 add16(float *r, float *g) {
  const __m512 old = _mm512_loadu_ps(r);
  const __m512 sum = _mm512_add_ps(old, _mm512_loadu_ps(g));
  _mm512_storeu_ps(r, sum);
  _mm512_storeu_ps(g, old);
  return sum;
}

inline void add_only(float *r, float *g) {
  for (int i = 0; i < 64; i += 16) add16(r + i, g + i);
}

inline uint64_t add_reaching(float *r, float *g, uint32_t key) {
  const __m512i low = broadcast(key);
  uint64_t word = 0;
  for (int i = 0; i < 4; ++i) word |= reaching16(add16(r + 16 * i, g + 16 * i), low) << (16 * i);
  return word;
}

}  // namespace

#include "scan_body.h"

const sparsync::Scan *sparsync::scan_avx512() {
  const bool usable = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  return usable ? &passes : nullptr;
}
#else
const sparsync::Scan *sparsync::scan_avx512() { return nullptr; }
#endif
