// Loops for all machines, which the compiler vectorises.
#include "scan.h"

namespace {

using sparsync::key_of;

inline uint64_t reaching(const float *x, uint32_t key) {
  uint8_t flags[64];
  for (int i = 0; i < 64; ++i) flags[i] = key_of(x[i]) >= key;
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) {
    uint64_t eight;
    __builtin_memcpy(&eight, flags + 8 * i, sizeof eight);
    // the product brings the lowest bit of byte j to bit 56 + j
    word |= ((eight * 0x0102040810204080u) >> 56) << (8 * i);
  }
  return word;
}

inline void add_only(float *r, float *g) {
  for (int i = 0; i < 64; ++i) {
    const float old = r[i];
    r[i] = old + g[i];
    g[i] = old;
  }
}

inline uint64_t add_reaching(float *r, float *g, uint32_t key) {
  add_only(r, g);
  return reaching(r, key);
}

}  // namespace

#include "scan_body.h"

const sparsync::Scan *sparsync::scan_plain() { return &passes; }
