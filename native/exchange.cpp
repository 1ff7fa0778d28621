#include "exchange.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "dealing.h"
#include "packed.h"
#include "select.h"
#include "sparse.h"

namespace sparsync {
namespace {

constexpr uint64_t header_bytes = 16, count_at = 4;

// Scratch memory of one call, kept for the next one of this thread: at these sizes the allocator gives
// memory back to the system, and a page that is touched for the first time costs 1 to 3 us.
class Scratch {
 public:
  // Forgets what was taken before.
  Scratch() { used_ = 0; }

  template <typename T>
  T *take(uint64_t count) {
    const uint64_t nbytes = (count * sizeof(T) + alignment) / alignment * alignment;
    if (used_ == chunks_.size()) chunks_.emplace_back();
    Chunk &chunk = chunks_[used_++];
    if (chunk.nbytes < nbytes) {
      chunk.memory.reset();
      chunk.memory.reset(new char[nbytes]);
      chunk.nbytes = nbytes;
    }
    return reinterpret_cast<T *>(chunk.memory.get());
  }

 private:
  static constexpr uint64_t alignment = 64;
  struct Chunk {
    std::unique_ptr<char[]> memory;
    uint64_t nbytes = 0;
  };
  static thread_local std::vector<Chunk> chunks_;
  static thread_local std::size_t used_;
};
thread_local std::vector<Scratch::Chunk> Scratch::chunks_;
thread_local std::size_t Scratch::used_ = 0;

struct Unpacked {
  uint32_t *indices;
  float *values;
  std::vector<uint64_t> starts;  // of every message, and the end
};

// Returns -1, or the message that is malformed.
int64_t unpack_all(const std::vector<Body> &bodies, int64_t skip, uint64_t width, Scratch &scratch,
                   Unpacked &out) {
  out.starts.assign(1, 0);
  for (std::size_t i = 0; i < bodies.size(); ++i)
    out.starts.push_back(out.starts.back() +
                         (static_cast<int64_t>(i) == skip ? 0 : bodies[i].nnz));
  out.indices = scratch.take<uint32_t>(out.starts.back());
  out.values = scratch.take<float>(out.starts.back());
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    if (static_cast<int64_t>(i) == skip) continue;
    const Body &body = bodies[i];
    const int64_t found =
        packed::unpack(body.bytes, body.nbytes, body.nnz, width, body.form, body.block,
                       out.indices + out.starts[i], out.values + out.starts[i]);
    if (found < 0 || static_cast<uint64_t>(found) != body.nnz) return static_cast<int64_t>(i);
  }
  return -1;
}

// Of `found` entries behind the first `count`, drops those that tie at the threshold when no place is
// left for them; returns the new count.
int64_t without_late_ties(Threshold &least, int64_t count, int64_t found, int64_t *indices,
                          float *values) {
  int64_t kept = count;
  for (int64_t i = count; i < count + found; ++i) {
    const bool tie = key_of(values[i]) == least.key;
    indices[kept] = indices[i];
    values[kept] = values[i];
    kept += !tie || least.ties > 0;
    least.ties -= tie && least.ties > 0;
  }
  return kept;
}

void check_width(uint64_t width) {
  if (width > packed::size_limit) throw std::invalid_argument("an owner has too many elements");
}

}  // namespace

int64_t deal_and_pack(const Entries &entries, int64_t world_size, int64_t own, int64_t limit,
                      const Style &style, const Parcels &out) {
  check_width(style.width);
  const auto n = static_cast<uint64_t>(entries.count), ranks = static_cast<uint64_t>(world_size);
  const Divisor divisor(world_size);
  Scratch scratch;
  auto *owners = scratch.take<uint32_t>(n), *groups = scratch.take<uint32_t>(n),
       *dealt = scratch.take<uint32_t>(n), *order = scratch.take<uint32_t>(n);
  auto *values = scratch.take<float>(n), *seen = scratch.take<float>(n);
  std::vector<uint64_t> next(ranks + 1, 0);
  for (uint64_t i = 0; i < n; ++i) {
    const Place place = place_of(static_cast<uint64_t>(entries.indices[i]), ranks, divisor);
    if (place.group >= style.width) throw std::invalid_argument("an index beyond the vector");
    owners[i] = static_cast<uint32_t>(place.owner);
    groups[i] = static_cast<uint32_t>(place.group);
    ++next[place.owner + 1];
  }
  for (uint64_t r = 0; r < ranks; ++r) {
    const bool over = next[r + 1] > static_cast<uint64_t>(limit);
    if (over && r != static_cast<uint64_t>(own)) return -1;
    next[r + 1] += next[r];
  }
  std::vector<uint64_t> starts(next);
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t place = next[owners[i]]++;
    dealt[place] = groups[i];
    order[place] = static_cast<uint32_t>(i);
    values[place] = entries.values[i];
  }
  for (uint64_t r = 0; r < ranks; ++r) {
    const uint64_t start = starts[r], nnz = starts[r + 1] - start;
    if (r == static_cast<uint64_t>(own)) {
      std::copy_n(dealt + start, nnz, out.own_indices);
      std::copy_n(values + start, nnz, out.own_values);
      for (uint64_t i = start; i < start + nnz; ++i) out.arriving[order[i]] = values[i];
      out.lengths[r] = 0;
      continue;
    }
    const uint64_t body =
        packed::value_bytes(nnz, style.form, style.block) + packed::index_bytes(nnz, style.width);
    if (header_bytes + body > out.stride) throw std::invalid_argument("a message has no room");
    uint8_t *message = out.messages + r * out.stride;
    std::memcpy(message, style.header, header_bytes);
    packed::store(message + count_at, static_cast<uint32_t>(nnz));
    float *decoded = style.form == packed::fp32 ? values + start : seen + start;
    if (!packed::pack(dealt + start, values + start, nnz, style.width, style.form,
                      style.block, message + header_bytes, body, decoded))
      throw std::invalid_argument("indices must ascend; sort and coalesce them first");
    for (uint64_t i = 0; i < nnz; ++i) out.arriving[order[start + i]] = decoded[i];
    out.lengths[r] = static_cast<int64_t>(header_bytes + body);
  }
  return static_cast<int64_t>(starts[static_cast<uint64_t>(own) + 1] -
                              starts[static_cast<uint64_t>(own)]);
}

int64_t unpack_and_sum(const std::vector<Body> &bodies, int64_t own, const Entries &mine,
                       uint64_t width, int64_t *indices, float *values) {
  check_width(width);
  Scratch scratch;
  Unpacked all{};
  const int64_t broken = unpack_all(bodies, own, width, scratch, all);
  if (broken >= 0) return -1 - broken;
  auto *my_indices = scratch.take<uint32_t>(static_cast<uint64_t>(mine.count));
  std::copy_n(mine.indices, mine.count, my_indices);
  std::vector<Stream<uint32_t>> streams;
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    if (static_cast<int64_t>(i) == own)
      streams.push_back({my_indices, mine.values, mine.count});
    else
      streams.push_back({all.indices + all.starts[i], all.values + all.starts[i],
                         static_cast<int64_t>(bodies[i].nnz)});
  }
  return merge(streams, static_cast<int64_t>(width), indices, values);
}

int64_t unpack_and_undeal(const std::vector<Body> &bodies, uint64_t width, uint64_t size, int64_t k,
                          const Scan &scan, int64_t *indices, float *values) {
  check_width(width);
  Scratch scratch;
  Unpacked all{};
  const int64_t broken = unpack_all(bodies, -1, width, scratch, all);
  if (broken >= 0) return -1 - broken;
  const uint64_t ranks = bodies.size();
  const uint64_t groups = std::max<uint64_t>(slots_per_tile / ranks, 1);
  if (groups * ranks > slots_per_tile) throw std::invalid_argument("too many ranks");
  Threshold least{0, 0};  // all that is not zero
  const auto sent = static_cast<int64_t>(all.starts.back());
  if (k < scan.count(all.values, 0, sent, 1))
    least = k > 0 ? threshold(all.values, sent, k, scan) : Threshold{largest_key, 0};
  const bool has_ties = least.ties > 0;
  const uint32_t lowest = has_ties ? least.key : least.key + 1;
  std::vector<uint64_t> at(all.starts.begin(), all.starts.end() - 1);
  auto *slots = scratch.take<uint16_t>(slots_per_tile + 1);
  auto *chosen = scratch.take<float>(slots_per_tile + 1);
  int64_t count = 0;
  for (;;) {
    uint64_t first = width;  // tiles without entries are skipped
    for (uint64_t r = 0; r < ranks; ++r)
      if (at[r] < all.starts[r + 1]) first = std::min<uint64_t>(first, all.indices[at[r]]);
    if (first == width) return count;
    first = first / groups * groups;
    int64_t found = 0;
    for (uint64_t r = 0; r < ranks; ++r) {
      for (uint64_t &i = at[r]; i < all.starts[r + 1] && all.indices[i] < first + groups; ++i) {
        const uint64_t group = all.indices[i], offset = offset_of(group, r, ranks);
        if (group * ranks + offset >= size) return -1 - static_cast<int64_t>(r);
        slots[static_cast<uint64_t>(found)] =
            static_cast<uint16_t>((group - first) * ranks + offset);
        chosen[static_cast<uint64_t>(found)] = all.values[i];
        found += key_of(all.values[i]) >= lowest;
      }
    }
    scan.order(slots, chosen, found, static_cast<int64_t>(first * ranks),
               indices + count, values + count);
    count = has_ties ? without_late_ties(least, count, found, indices, values) : count + found;
  }
}

}  // namespace sparsync
