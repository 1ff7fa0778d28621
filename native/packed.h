// The packed format of one message's body, for packing.cpp and exchange.cpp.
//
// This is plain C++ for all machines: the bit streams are serial, and the compiler vectorises the loops over
// values.  For any input bytes, only memory in the given buffers is read or written.  All functions have
// internal linkage, because scan_body.h compiles them for several instruction sets.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace sparsync::packed {
namespace {

constexpr int bf16 = 1, int8 = 2, fp32 = 3;  // as in kernels/packing.py
constexpr uint64_t size_limit = uint64_t{1} << 32;
// magnitudes are signed integers, because every vector unit can compare those
constexpr int32_t infinity = 0x7f800000, nan_bits = 0x7fc00000, magnitude_bits = 0x7fffffff;
constexpr float largest_scale = 0x1.020406p+121f;  // 127 times the next float is infinite
constexpr int8_t not_finite = -128;

template <typename T>
T load(const uint8_t *from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
inline void store(uint8_t *to, T value) {
  std::memcpy(to, &value, sizeof value);
}

template <typename T, typename U>
T bits_to(U bits) {
  static_assert(sizeof(T) == sizeof(U));
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
inline T least(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
inline T most(T a, T b) {
  return a < b ? b : a;
}

// ---- sizes --------------------------------------------------------------------------------------

inline unsigned low_bits(uint64_t nnz, uint64_t size) {
  return nnz == 0 ? 0u : 63u - static_cast<unsigned>(__builtin_clzll(size / nnz));
}

inline uint64_t index_bytes(uint64_t nnz, uint64_t size) {
  if (nnz == 0) return 0;
  const unsigned low = low_bits(nnz, size);
  const uint64_t high_parts = (size + (uint64_t{1} << low) - 1) >> low;
  return (nnz * (low + 1) + high_parts + 7) / 8;
}

inline uint64_t value_bytes(uint64_t nnz, int form, uint64_t block) {
  if (form == int8) return nnz + 4 * ((nnz + block - 1) / block);
  return nnz * (form == bf16 ? 2 : 4);
}

// ---- bit streams --------------------------------------------------------------------------------

inline uint64_t load_word(const uint8_t *bytes, uint64_t nbytes, uint64_t at) {
  if (at + 8 <= nbytes) return load<uint64_t>(bytes + at);
  uint64_t word = 0;
  if (at < nbytes) std::memcpy(&word, bytes + at, nbytes - at);
  return word;
}

inline void store_word(uint8_t *bytes, uint64_t nbytes, uint64_t at, uint64_t word) {
  if (at + 8 <= nbytes)
    store(bytes + at, word);
  else if (at < nbytes)
    std::memcpy(bytes + at, &word, nbytes - at);
}

// Appends bits, a word at a time; the last word is cut to the remaining bytes.
class BitWriter {
 public:
  BitWriter(uint8_t *bytes, uint64_t nbytes) : bytes_(bytes), nbytes_(nbytes) {}

  // `count` is between 1 and 64; the bits above it are zero
  void put(uint64_t bits, unsigned count) {
    word_ |= bits << fill_;
    fill_ += count;
    if (fill_ < 64) return;
    flush();
    fill_ -= 64;
    word_ = fill_ > 0 ? bits >> (count - fill_) : 0;
  }

  void flush() {
    store_word(bytes_, nbytes_, at_, word_);
    at_ += 8;
  }

 private:
  uint8_t *bytes_;
  uint64_t nbytes_, at_ = 0, word_ = 0;
  unsigned fill_ = 0;
};

// ---- indices ------------------------------------------------------------------------------------

// Joins the low bits of `group` entries before they enter the stream, because writes to it are serial.
template <int group, typename Index>
inline void put_low_bits(BitWriter writer, const Index *indices, uint64_t nnz, unsigned low) {
  const uint64_t mask = (uint64_t{1} << low) - 1;
  uint64_t i = 0;
  for (; i + group <= nnz; i += group) {
    uint64_t joined = 0;
    for (int j = group - 1; j >= 0; --j)
      joined = joined << low | (static_cast<uint64_t>(indices[i + j]) & mask);
    writer.put(joined, group * low);
  }
  for (; i < nnz; ++i) writer.put(static_cast<uint64_t>(indices[i]) & mask, low);
  writer.flush();
}

// Returns false if the indices do not ascend strictly below `size`.
template <typename Index>
inline bool pack_indices(const Index *indices, uint64_t nnz, uint64_t size, uint8_t *out,
                  uint64_t nbytes) {
  const unsigned low = low_bits(nnz, size);
  std::memset(out, 0, nbytes);
  if (low > 16)
    put_low_bits<1>({out, nbytes}, indices, nnz, low);
  else if (low > 0)
    put_low_bits<4>({out, nbytes}, indices, nnz, low);
  const auto add_word = [&](uint64_t at, uint64_t word) {
    word |= load_word(out, nbytes, 8 * at);
    store_word(out, nbytes, 8 * at, word);
  };
  uint64_t lowest = 0, at = 0, word = 0;
  for (uint64_t i = 0; i < nnz; ++i) {
    const auto index = static_cast<uint64_t>(indices[i]);
    if (index < lowest || index >= size) return false;
    lowest = index + 1;
    const uint64_t bit = nnz * low + (index >> low) + i;
    if (bit / 64 != at) {
      add_word(at, word);
      at = bit / 64;
      word = 0;
    }
    word |= uint64_t{1} << (bit % 64);
  }
  add_word(at, word);
  return true;
}

// `whole` promises that 8 bytes can be read wherever low bits start.
template <bool whole, typename Index>
inline int64_t unpack_bits(const uint8_t *in, uint64_t nbytes, uint64_t nnz, uint64_t size,
                           Index *indices) {
  const unsigned low = low_bits(nnz, size);
  const uint64_t mask = (uint64_t{1} << low) - 1;
  const uint64_t start = nnz * low / 8, before = nnz * low % 8;
  uint64_t found = 0, lowest = 0, bit = 0;
  bool ascending = true;
  for (uint64_t at = start; at < nbytes; at += 8) {
    uint64_t word = load_word(in, nbytes, at);
    if (at == start) word &= ~uint64_t{0} << before;
    const uint64_t base = 8 * (at - start) - before;
    for (; word != 0 && found < nnz; word &= word - 1, ++found, bit += low) {
      const uint64_t position = base + static_cast<unsigned>(__builtin_ctzll(word));
      const uint64_t bits = whole ? load<uint64_t>(in + bit / 8) : load_word(in, nbytes, bit / 8);
      const uint64_t index = (position - found) << low | (bits >> (bit % 8) & mask);
      ascending &= index >= lowest;
      lowest = index + 1;
      indices[found] = static_cast<Index>(index);
    }
    for (; word != 0; word &= word - 1) ++found;
  }
  if (found != nnz) return static_cast<int64_t>(found);
  return ascending && lowest <= size ? static_cast<int64_t>(found) : -1;
}

// Returns the number of set bits, which should be `nnz`, or -1 if the indices do not ascend below `size`.
template <typename Index>
inline int64_t unpack_indices(const uint8_t *in, uint64_t nbytes, uint64_t nnz, uint64_t size,
                              Index *indices) {
  if (nnz * low_bits(nnz, size) / 8 + 8 <= nbytes)
    return unpack_bits<true>(in, nbytes, nnz, size, indices);
  return unpack_bits<false>(in, nbytes, nnz, size, indices);
}

// ---- values -------------------------------------------------------------------------------------

inline int32_t magnitude_of(float value) { return bits_to<int32_t>(value) & magnitude_bits; }

inline void pack_bf16(const float *values, uint64_t nnz, uint8_t *out, float *decoded) {
  for (uint64_t i = 0; i < nnz; ++i) {  // round to nearest, ties to even; finite values never become Inf
    const int32_t bits = bits_to<int32_t>(values[i]), magnitude = bits & magnitude_bits;
    const int32_t finite = least(magnitude, 0x7f7f0000);  // the largest bf16
    int32_t rounded = (finite + 0x7fff + (finite >> 16 & 1)) & ~0xffff;
    rounded = magnitude < infinity ? rounded : magnitude > infinity ? nan_bits : infinity;
    rounded |= bits & ~magnitude_bits;
    store(out + 2 * i, static_cast<int16_t>(rounded >> 16));
    decoded[i] = bits_to<float>(rounded);
  }
}

inline void unpack_bf16(const uint8_t *in, uint64_t nnz, float *values) {
  for (uint64_t i = 0; i < nnz; ++i)
    values[i] = bits_to<float>(static_cast<uint32_t>(load<uint16_t>(in + 2 * i)) << 16);
}

inline float restore(int8_t code, float scale) {
  return code == not_finite ? bits_to<float>(nan_bits) : static_cast<float>(code) * scale;
}

inline float scale_of(const float *values, uint64_t count) {
  int32_t peak = 0;  // the largest finite magnitude
  for (uint64_t i = 0; i < count; ++i) {
    const int32_t magnitude = magnitude_of(values[i]);
    peak = most(peak, magnitude < infinity ? magnitude : 0);
  }
  return least(bits_to<float>(peak) / 127.0f, largest_scale);
}

inline void pack_block(const float *values, uint64_t count, float scale, uint8_t *out, float *decoded) {
  constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to integers, ties to even
  const float divisor = scale == 0.0f ? 1.0f : scale;
  for (uint64_t i = 0; i < count; ++i) {
    const bool finite = magnitude_of(values[i]) < infinity;
    const float quotient = (finite ? values[i] : 0.0f) / divisor;
    const float rounded = least(most(quotient, -127.0f), 127.0f) + to_integer - to_integer;
    const int code = finite ? static_cast<int>(rounded) : not_finite;
    out[i] = static_cast<uint8_t>(code);
    decoded[i] = restore(static_cast<int8_t>(code), scale);
  }
}

inline void pack_int8(const float *values, uint64_t nnz, uint64_t block, uint8_t *out, float *decoded) {
  uint8_t *codes = out + 4 * ((nnz + block - 1) / block);
  for (uint64_t i = 0; i < nnz; i += block, out += 4) {
    const uint64_t count = least(block, nnz - i);
    const float scale = scale_of(values + i, count);
    store(out, scale);
    pack_block(values + i, count, scale, codes + i, decoded + i);
  }
}

inline void unpack_int8(const uint8_t *in, uint64_t nnz, uint64_t block, float *values) {
  const uint8_t *codes = in + 4 * ((nnz + block - 1) / block);
  for (uint64_t i = 0; i < nnz; i += block, in += 4) {
    const auto scale = load<float>(in);
    const uint64_t stop = least(i + block, nnz);
    for (uint64_t j = i; j < stop; ++j) values[j] = restore(static_cast<int8_t>(codes[j]), scale);
  }
}

// ---- a whole body -------------------------------------------------------------------------------

inline void check(uint64_t nnz, uint64_t size, int form, uint64_t block, uint64_t nbytes) {
  if (form < bf16 || form > fp32 || size > size_limit || nnz > size || (form == int8 && block == 0))
    throw std::invalid_argument("no such packed message");
  if (nbytes != value_bytes(nnz, form, block) + index_bytes(nnz, size))
    throw std::invalid_argument("a packed message of another length");
}

// Writes values and indices to `body`, and the values that a receiver sees to `decoded` (not for fp32).
template <typename Index>
bool pack(const Index *indices, const float *values, uint64_t nnz, uint64_t size, int form,
          uint64_t block, uint8_t *body, uint64_t nbytes, float *decoded) {
  check(nnz, size, form, block, nbytes);
  if (form == bf16)
    pack_bf16(values, nnz, body, decoded);
  else if (form == int8)
    pack_int8(values, nnz, block, body, decoded);
  else if (nnz > 0)
    std::memcpy(body, values, nnz * sizeof(float));
  const uint64_t middle = value_bytes(nnz, form, block);
  return pack_indices(indices, nnz, size, body + middle, nbytes - middle);
}

// Inverts `pack`; returns the result of unpack_indices.
template <typename Index>
int64_t unpack(const uint8_t *body, uint64_t nbytes, uint64_t nnz, uint64_t size, int form,
               uint64_t block, Index *indices, float *values) {
  check(nnz, size, form, block, nbytes);
  if (form == bf16)
    unpack_bf16(body, nnz, values);
  else if (form == int8)
    unpack_int8(body, nnz, block, values);
  else if (nnz > 0)
    std::memcpy(values, body, nnz * sizeof(float));
  const uint64_t middle = value_bytes(nnz, form, block);
  return unpack_indices(body + middle, nbytes - middle, nnz, size, indices);
}

}  // namespace
}  // namespace sparsync::packed
