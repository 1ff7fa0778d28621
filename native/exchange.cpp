#include "exchange.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

#include "dealing.h"
#include "packed.h"
#include "scratch.h"
#include "select.h"
#include "sparse.h"

namespace sparsync {
namespace {

constexpr uint64_t header_bytes = 16, count_at = 4;

[[noreturn]] void refuse_indices() {
  throw std::invalid_argument(
      "indices must ascend within the vector; sort, coalesce and check them first");
}

void check_width(uint64_t width) {
  if (width > packed::size_limit) throw std::invalid_argument("an owner has too many elements");
}

void check_room(int64_t count, const Room &out) {
  if (count > out.capacity)
    throw std::invalid_argument("the output has room for " + std::to_string(out.capacity) +
                                " entries, and there are " + std::to_string(count));
}

struct Unpacked {
  uint32_t *indices;
  float *values;
  std::vector<uint64_t> starts;  // of every message, and the end
};

// Whether a message starts as it should and has the length that its count asks for.
bool well_formed(const Message &message, const Style &style) {
  if (message.nbytes < header_bytes) return false;
  const auto first = packed::load<uint64_t>(message.bytes);
  const uint64_t nnz = first >> 32;
  return first << 32 == style.start[0] << 32 && nnz <= style.width &&
         packed::load<uint64_t>(message.bytes + 8) == style.start[1] &&
         message.nbytes == header_bytes + packed::value_bytes(nnz, style.form, style.block) +
                               packed::index_bytes(nnz, style.width);
}

// Returns -1, or the message that is malformed.
int64_t unpack_all(const std::vector<Message> &messages, int64_t skip, const Style &style,
                   Scratch &scratch, Unpacked &out) {
  out.starts.assign(1, 0);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const bool skipped = static_cast<int64_t>(i) == skip;
    if (!skipped && !well_formed(messages[i], style)) return static_cast<int64_t>(i);
    out.starts.push_back(out.starts.back() +
                         (skipped ? 0 : packed::load<uint32_t>(messages[i].bytes + count_at)));
  }
  out.indices = scratch.take<uint32_t>(out.starts.back());
  out.values = scratch.take<float>(out.starts.back());
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (static_cast<int64_t>(i) == skip) continue;
    const uint64_t start = out.starts[i], nnz = out.starts[i + 1] - start;
    const int64_t found = packed::unpack(
        messages[i].bytes + header_bytes, messages[i].nbytes - header_bytes, nnz, style.width,
        style.form, style.block, out.indices + start, out.values + start);
    if (found < 0 || static_cast<uint64_t>(found) != nnz) return static_cast<int64_t>(i);
  }
  return -1;
}

// Of ascending entries, drops those that tie at the threshold when no place is left for them; returns
// the new count.
int64_t without_late_ties(uint32_t key, int64_t &ties, int64_t count, int64_t *indices,
                          float *values) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool tie = key_of(values[i]) == key;
    indices[kept] = indices[i];
    values[kept] = values[i];
    kept += !tie || ties > 0;
    ties -= tie && ties > 0;
  }
  return kept;
}

// Drops from every message the entries that are zero or smaller than the k largest of all; `stops` says
// where they end then.  All that tie at the threshold returned are still there, if some belong to the k.
Threshold keep_largest(const Unpacked &all, int64_t k, const Scan &scan,
                       std::vector<uint64_t> &stops) {
  const auto sent = static_cast<int64_t>(all.starts.back());
  const int64_t non_zero = scan.count(all.values, 0, sent, 1);
  Threshold least{0, 0};
  if (k < non_zero) least = k > 0 ? threshold(all.values, sent, k, scan) : Threshold{largest_key, 0};
  const uint32_t lowest = least.ties > 0 ? least.key : least.key + 1;
  if (k >= sent && non_zero == sent) return least;
  for (std::size_t r = 0; r < stops.size(); ++r) {
    uint64_t kept = all.starts[r];
    for (uint64_t i = all.starts[r]; i < all.starts[r + 1]; ++i) {
      all.indices[kept] = all.indices[i];
      all.values[kept] = all.values[i];
      kept += key_of(all.values[i]) >= lowest;
    }
    stops[r] = kept;
  }
  return least;
}

constexpr int64_t batch = 1024;  // entries placed before they are moved: they stay in the L1 cache

// Entries grouped by owner, with room for `limit` of everyone and, of the own, for all.
struct Buckets {
  Buckets(int64_t count, int64_t world_size, int64_t own, int64_t limit, Scratch &scratch) {
    for (int64_t r = 0; r < world_size; ++r)
      starts.push_back(starts.back() + static_cast<uint64_t>(r == own ? count : limit + batch));
    ends.assign(starts.begin(), starts.end() - 1);
    owners = scratch.take<uint32_t>(static_cast<uint64_t>(count));
    groups = scratch.take<uint32_t>(starts.back());
    values = scratch.take<float>(starts.back());
  }

  std::vector<uint64_t> starts{0}, ends;
  uint32_t *owners;  // in the order of the entries
  uint32_t *groups;  // by owner, as the values
  float *values;
};

// Fills the buckets; false if one but the own has more than `limit` entries.
bool fill(const Entries &entries, int64_t world_size, int64_t own, int64_t limit, uint64_t width,
          const Scan &scan, Buckets &buckets) {
  const auto ranks = static_cast<uint64_t>(world_size);
  const Divisor divisor(world_size);
  uint32_t groups[batch];
  for (int64_t start = 0; start < entries.count; start += batch) {
    const int64_t count = std::min(batch, entries.count - start);
    const int64_t *indices = entries.indices + start;
    uint32_t *owners = buckets.owners + start;
    uint64_t bits = 0;
    for (int64_t i = 0; i < count; ++i) bits |= static_cast<uint64_t>(indices[i]);
    if (bits >> 31 == 0) {
      scan.place(indices, count, static_cast<uint32_t>(ranks), groups, owners);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const Place place = place_of(static_cast<uint64_t>(indices[i]), ranks, divisor);
        if (place.group >= width) refuse_indices();
        groups[i] = static_cast<uint32_t>(place.group);
        owners[i] = static_cast<uint32_t>(place.owner);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t place = buckets.ends[owners[i]]++;
      buckets.groups[place] = groups[i];
      buckets.values[place] = entries.values[start + i];
    }
    for (int64_t r = 0; r < world_size; ++r)
      if (r != own && buckets.ends[static_cast<std::size_t>(r)] -
                          buckets.starts[static_cast<std::size_t>(r)] > static_cast<uint64_t>(limit))
        return false;
  }
  return true;
}

}  // namespace

int64_t deal_and_pack(const Entries &entries, int64_t world_size, int64_t own, int64_t limit,
                      const Style &style, const Scan &scan, const Parcels &out) {
  check_width(style.width);
  Scratch scratch;
  Buckets buckets(entries.count, world_size, own, limit, scratch);
  if (!fill(entries, world_size, own, limit, style.width, scan, buckets)) return -1;
  auto *seen = scratch.take<float>(buckets.starts.back());
  std::vector<const float *> arrived(static_cast<std::size_t>(world_size));
  for (std::size_t r = 0; r < arrived.size(); ++r) {
    const uint64_t start = buckets.starts[r], nnz = buckets.ends[r] - start;
    const uint32_t *groups = buckets.groups + start;
    const float *values = buckets.values + start;
    arrived[r] = values;
    if (r == static_cast<std::size_t>(own)) {
      std::copy_n(groups, nnz, out.own_indices);
      std::copy_n(values, nnz, out.own_values);
      out.lengths[r] = 0;
      continue;
    }
    const uint64_t body =
        packed::value_bytes(nnz, style.form, style.block) + packed::index_bytes(nnz, style.width);
    if (header_bytes + body > out.stride) throw std::invalid_argument("a message has no room");
    uint8_t *message = out.messages + r * out.stride;
    packed::store(message, style.start[0]);
    packed::store(message + 8, style.start[1]);
    packed::store(message + count_at, static_cast<uint32_t>(nnz));
    if (style.form != packed::fp32) arrived[r] = seen + start;
    if (!packed::pack(groups, values, nnz, style.width, style.form, style.block,
                      message + header_bytes, body, seen + start))
      refuse_indices();
    out.lengths[r] = static_cast<int64_t>(header_bytes + body);
  }
  for (int64_t i = 0; i < entries.count; ++i) out.arriving[i] = *arrived[buckets.owners[i]]++;
  const auto mine = static_cast<std::size_t>(own);
  return mine < arrived.size() ? static_cast<int64_t>(buckets.ends[mine] - buckets.starts[mine]) : 0;
}

int64_t unpack_and_sum(const std::vector<Message> &messages, int64_t own, const Entries &mine,
                       const Style &style, int64_t k, const Scan &scan, const Room &out) {
  check_width(style.width);
  Scratch scratch;
  Unpacked all{};
  const int64_t broken = unpack_all(messages, own, style, scratch, all);
  if (broken >= 0) return -1 - broken;
  auto *my_indices = scratch.take<uint32_t>(static_cast<uint64_t>(mine.count));
  std::copy_n(mine.indices, mine.count, my_indices);
  std::vector<Stream<uint32_t>> streams;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (static_cast<int64_t>(i) == own)
      streams.push_back({my_indices, mine.values, mine.count});
    else
      streams.push_back({all.indices + all.starts[i], all.values + all.starts[i],
                         static_cast<int64_t>(all.starts[i + 1] - all.starts[i])});
  }
  const uint64_t room = all.starts.back() + static_cast<uint64_t>(mine.count);
  auto *places = scratch.take<int64_t>(room);
  auto *sums = scratch.take<float>(room);
  const int64_t count = merge(streams, static_cast<int64_t>(style.width), scan, places, sums);
  auto *largest = scratch.take<int64_t>(room);
  const int64_t kept = top(sums, count, std::min(k, count), largest, scan);
  check_room(kept, out);
  for (int64_t i = 0; i < kept; ++i) {
    out.indices[i] = places[largest[i]];
    out.values[i] = sums[largest[i]];
  }
  return kept;
}

int64_t unpack_and_undeal(const std::vector<Message> &messages, const Style &style, uint64_t size,
                          int64_t k, const Scan &scan, const Room &out) {
  check_width(style.width);
  Scratch scratch;
  Unpacked all{};
  const int64_t broken = unpack_all(messages, -1, style, scratch, all);
  if (broken >= 0) return -1 - broken;
  const uint64_t ranks = messages.size();
  const uint64_t groups = std::max<uint64_t>(slots_per_tile / ranks, 1);
  if (groups * ranks > slots_per_tile) throw std::invalid_argument("too many ranks");
  for (uint64_t r = 0; r < ranks; ++r) {
    if (all.starts[r] == all.starts[r + 1]) continue;
    const uint64_t group = all.indices[all.starts[r + 1] - 1];
    if (group * ranks + offset_of(group, r, ranks) >= size) return -1 - static_cast<int64_t>(r);
  }
  std::vector<uint64_t> stops(all.starts.begin() + 1, all.starts.end());
  const Threshold least = keep_largest(all, k, scan, stops);
  std::vector<uint64_t> at(all.starts.begin(), all.starts.end() - 1);
  auto *slots = scratch.take<uint16_t>(slots_per_tile);
  auto *chosen = scratch.take<float>(slots_per_tile);
  int64_t count = 0, ties = least.ties;
  for (;;) {
    uint64_t first = style.width;  // tiles without entries are skipped
    for (uint64_t r = 0; r < ranks; ++r)
      if (at[r] < stops[r]) first = std::min<uint64_t>(first, all.indices[at[r]]);
    if (first == style.width) return count;
    first = first / groups * groups;
    int64_t found = 0;
    for (uint64_t r = 0; r < ranks; ++r) {
      const uint64_t start = at[r];
      while (at[r] < stops[r] && all.indices[at[r]] < first + groups) ++at[r];
      const auto here = static_cast<int64_t>(at[r] - start);
      scan.undeal(all.indices + start, here, first, static_cast<uint32_t>(r),
                  static_cast<uint32_t>(ranks), slots + found);
      std::copy_n(all.values + start, here, chosen + found);
      found += here;
    }
    check_room(count + found, out);  // a tile is written whole; late ties are dropped afterwards
    int64_t *indices = out.indices + count;
    float *values = out.values + count;
    scan.sum(slots, chosen, found, static_cast<int64_t>(first * ranks), indices, values);
    if (least.ties > 0) found = without_late_ties(least.key, ties, found, indices, values);
    count += found;
  }
}

}  // namespace sparsync
