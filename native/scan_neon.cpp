// NEON, which every 64-bit ARM processor has: 4 elements in a register.
#include "scan.h"

#if defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>

namespace {

// 0xff or 0 for each of 16 elements
inline uint8x16_t reaching16(const float *x, uint32x4_t key) {
  uint16x4_t narrow[4];
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t bits = vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + 4 * i)),
                                      vdupq_n_u32(sparsync::largest_key));
    narrow[i] = vmovn_u32(vcgeq_u32(bits, key));
  }
  return vcombine_u8(vmovn_u16(vcombine_u16(narrow[0], narrow[1])),
                     vmovn_u16(vcombine_u16(narrow[2], narrow[3])));
}

inline uint64_t reaching(const float *x, uint32_t key) {
  const uint32x4_t low = vdupq_n_u32(key);
  const uint8_t weights[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t weight = vld1q_u8(weights);
  uint8x16_t bits[4];
  for (int i = 0; i < 4; ++i) bits[i] = vandq_u8(reaching16(x + 16 * i, low), weight);
  // pairwise sums combine the weighted bytes of every eight elements into one byte
  const uint8x16_t pairs = vpaddq_u8(vpaddq_u8(bits[0], bits[1]), vpaddq_u8(bits[2], bits[3]));
  return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(pairs, pairs)), 0);
}

inline void add_only(float *r, float *g) {
  for (int i = 0; i < 64; i += 4) {
    const float32x4_t old = vld1q_f32(r + i);
    vst1q_f32(r + i, vaddq_f32(old, vld1q_f32(g + i)));
    vst1q_f32(g + i, old);
  }
}

inline uint64_t add_reaching(float *r, float *g, uint32_t key) {
  add_only(r, g);
  return reaching(r, key);
}

}  // namespace

#include "scan_body.h"

const sparsync::Scan *sparsync::scan_neon() { return &passes; }
#else
const sparsync::Scan *sparsync::scan_neon() { return nullptr; }
#endif
