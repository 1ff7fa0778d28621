#include "messages.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>

#include "packed.h"
#include "scratch.h"
#include "sparse.h"

namespace sparsync::messages {
namespace {

constexpr int coo = 0;
constexpr uint64_t coo_header = 8, packed_header = 16, index_bytes = 4, value_bytes = 4;
constexpr unsigned block_bits = 48;  // where the second word of a header states the block

using View = Stream<uint32_t>;

void check_width(int64_t width) {
  if (width < 0 || static_cast<uint64_t>(width) > packed::size_limit)
    throw std::invalid_argument("a region has more than 2^32 elements; cut more regions");
}

// Writes indices relative to `start`; refuses indices that do not ascend within `width` elements.
void narrow(const int64_t *indices, int64_t count, int64_t start, int64_t width, uint32_t *out) {
  bool inside = count == 0 || (indices[0] >= start && indices[count - 1] < start + width);
  for (int64_t i = 1; i < count; ++i) inside &= indices[i - 1] < indices[i];
  if (!inside)
    throw std::invalid_argument("indices must ascend within the vector; sort, coalesce and check them first");
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint32_t>(indices[i] - start);
}

// Returns the address, or the address of a copy if the given one is not aligned.
template <typename T>
const T *aligned(const uint8_t *from, uint64_t count, Scratch &scratch) {
  if (reinterpret_cast<uintptr_t>(from) % alignof(T) == 0) return reinterpret_cast<const T *>(from);
  T *copy = scratch.take<T>(count);
  std::memcpy(copy, from, count * sizeof(T));
  return copy;
}

// Reads a message; returns false if it is malformed.
bool open(const Share &share, const Layout &layout, uint64_t width, const Scan &scan, Scratch &scratch,
          View &view) {
  const uint64_t header = layout.form == coo ? coo_header : packed_header;
  if (share.nbytes < header) return false;
  const auto first = packed::load<uint64_t>(share.message);
  const uint64_t nnz = first >> 32;
  if (first << 32 != layout.start << 32 || nnz > width) return false;
  view.count = static_cast<int64_t>(nnz);
  const uint8_t *body = share.message + header;
  if (layout.form == coo) {
    if (share.nbytes != header + nnz * (index_bytes + value_bytes)) return false;
    view.indices = aligned<uint32_t>(body, nnz, scratch);
    view.values = aligned<float>(body + nnz * index_bytes, nnz, scratch);
    bool ascending = nnz == 0 || view.indices[nnz - 1] < width;
    for (uint64_t i = 1; i < nnz; ++i) ascending &= view.indices[i - 1] < view.indices[i];
    return ascending;
  }
  if (packed::load<uint64_t>(share.message + 8) != (width | layout.block << block_bits)) return false;
  const uint64_t nbytes = packed::value_bytes(nnz, layout.form, layout.block) + packed::index_bytes(nnz, width);
  if (share.nbytes != header + nbytes) return false;
  auto *indices = scratch.take<uint32_t>(nnz);
  auto *values = scratch.take<float>(nnz);
  view.indices = indices;
  view.values = values;
  return scan.unpack(body, nbytes, nnz, width, layout.form, layout.block, indices, values) ==
         view.count;
}

View view_of(const Share &entries, int64_t width, Scratch &scratch) {
  auto *indices = scratch.take<uint32_t>(static_cast<uint64_t>(entries.count));
  narrow(entries.indices, entries.count, 0, width, indices);
  return {indices, entries.values, entries.count};
}

void check_room(int64_t count, const Output &out) {
  if (count > out.capacity) throw std::invalid_argument("the output has no room for all entries");
}

}  // namespace

std::vector<int64_t> cut(const int64_t *indices, const float *values, int64_t count,
                         const std::vector<int64_t> &boundaries, int64_t own, const Layout &layout,
                         const Scan &scan, uint8_t *out, uint64_t capacity) {
  if (layout.form != coo && layout.form != packed::fp32)
    throw std::invalid_argument("values would be rounded; encode the regions one by one");
  Scratch scratch;
  auto *narrowed = scratch.take<uint32_t>(static_cast<uint64_t>(count));
  std::vector<int64_t> lengths;
  uint64_t end = 0;
  const int64_t *last = indices + count, *low = indices;
  for (std::size_t r = 0; r + 1 < boundaries.size(); ++r) {
    const int64_t start = boundaries[r], width = boundaries[r + 1] - start;
    check_width(width);
    low = std::lower_bound(low, last, start);
    const int64_t *high = std::lower_bound(low, last, start + width);
    lengths.push_back(0);
    if (static_cast<int64_t>(r) == own) continue;
    const auto nnz = static_cast<uint64_t>(high - low);
    const uint64_t header = layout.form == coo ? coo_header : packed_header;
    const uint64_t bytes_of_indices = layout.form == coo
                                          ? nnz * index_bytes
                                          : packed::index_bytes(nnz, static_cast<uint64_t>(width));
    const uint64_t body = bytes_of_indices + nnz * value_bytes;
    if (header + body > capacity - end) throw std::invalid_argument("a message has no room");
    uint8_t *message = out + end;
    packed::store(message, (layout.start << 32 >> 32) | nnz << 32);
    narrow(low, high - low, start, width, narrowed);
    const float *part = values + (low - indices);
    if (layout.form == coo) {
      if (nnz > 0) {
        std::memcpy(message + header, narrowed, bytes_of_indices);
        std::memcpy(message + header + bytes_of_indices, part, nnz * value_bytes);
      }
    } else {
      packed::store(message + 8, static_cast<uint64_t>(width));
      scan.pack(narrowed, part, nnz, static_cast<uint64_t>(width), layout.form, layout.block,
                   message + header, body, nullptr);
    }
    lengths.back() = static_cast<int64_t>(header + body);
    end += header + body;
  }
  return lengths;
}

int64_t fold(const std::vector<Share> &shares, const Layout &layout, int64_t width, const Scan &scan,
             const Output &out) {
  check_width(width);
  Scratch scratch;
  std::vector<View> views;
  int64_t room = 0;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    views.push_back({});
    if (!shares[i].is_message)
      views.back() = view_of(shares[i], width, scratch);
    else if (!open(shares[i], layout, static_cast<uint64_t>(width), scan, scratch, views.back()))
      return -1 - static_cast<int64_t>(i);
    room += views.back().count;
  }
  check_room(room, out);
  return merge(views, width, scan, out.indices, out.values);
}

int64_t join(const std::vector<Share> &shares, const Layout &layout,
             const std::vector<Region> &regions, const Scan &scan, const Output &out) {
  int64_t count = 0;
  if (regions.size() != shares.size()) throw std::invalid_argument("give a region per message");
  for (std::size_t i = 0; i < shares.size(); ++i) {
    Scratch scratch;
    View view{};
    const int64_t start = regions[i].start, width = regions[i].stop - start;
    check_width(width);
    if (!open(shares[i], layout, static_cast<uint64_t>(width), scan, scratch, view))
      return -1 - static_cast<int64_t>(i);
    check_room(count + view.count, out);
    for (int64_t j = 0; j < view.count; ++j) out.indices[count + j] = start + view.indices[j];
    if (view.count > 0) std::copy_n(view.values, view.count, out.values + count);
    count += view.count;
  }
  return count;
}

}  // namespace sparsync::messages
