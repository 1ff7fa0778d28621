// AVX2: 8 elements in a register.
#include "scan.h"

#if defined(__AVX2__)
#include <immintrin.h>

namespace {

// `below` is key - 1 in every lane, because AVX2 compares signed integers only by "greater than"
inline uint64_t reaching8(__m256 x, __m256i below) {
  const __m256i bits = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
  const __m256 over = _mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, below));
  return static_cast<uint32_t>(_mm256_movemask_ps(over));
}

inline __m256i broadcast_below(uint32_t key) {
  return _mm256_set1_epi32(static_cast<int>(key - 1));
}

inline uint64_t reaching(const float *x, uint32_t key) {
  const __m256i below = broadcast_below(key);
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) word |= reaching8(_mm256_loadu_ps(x + 8 * i), below) << (8 * i);
  return word;
}

inline __m256 add8(float *r, float *g) {
  const __m256 old = _mm256_loadu_ps(r);
  const __m256 sum = _mm256_add_ps(old, _mm256_loadu_ps(g));
  _mm256_storeu_ps(r, sum);
  _mm256_storeu_ps(g, old);
  return sum;
}

inline void add_only(float *r, float *g) {
  for (int i = 0; i < 64; i += 8) add8(r + i, g + i);
}

inline uint64_t add_reaching(float *r, float *g, uint32_t key) {
  const __m256i below = broadcast_below(key);
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) word |= reaching8(add8(r + 8 * i, g + 8 * i), below) << (8 * i);
  return word;
}

}  // namespace

#include "scan_body.h"

const sparsync::Scan *sparsync::scan_avx2() {
  const bool usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  return usable ? &passes : nullptr;
}
#else
const sparsync::Scan *sparsync::scan_avx2() { return nullptr; }
#endif
