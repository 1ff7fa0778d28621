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
  std::vector<uint64_t> starts;  // of every message, then the end
};

// Returns whether a message has the expected start and the length that its count implies.
bool well_formed(const Message &message, const Style &style) {
  if (message.nbytes < header_bytes) return false;
  const auto first = packed::load<uint64_t>(message.bytes);
  const uint64_t nnz = first >> 32;
  return first << 32 == style.start[0] << 32 && nnz <= style.width &&
         packed::load<uint64_t>(message.bytes + 8) == style.start[1] &&
         message.nbytes == header_bytes + packed::value_bytes(nnz, style.form, style.block) +
                               packed::index_bytes(nnz, style.width);
}

// Returns -1, or the number of the first malformed message.
int64_t unpack_all(const std::vector<Message> &messages, int64_t skip, const Style &style,
                   const Scan &scan, Scratch &scratch, Unpacked &out) {
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
    const int64_t found = scan.unpack(
        messages[i].bytes + header_bytes, messages[i].nbytes - header_bytes, nnz, style.width,
        style.form, style.block, out.indices + start, out.values + start);
    if (found < 0 || static_cast<uint64_t>(found) != nnz) return static_cast<int64_t>(i);
  }
  return -1;
}

uint64_t index_of(uint64_t group, uint64_t owner, uint64_t ranks) {
  return group * ranks + offset_of(group, owner, ranks);
}

// Of the entries that tie at the threshold, zeroes those that do not fit: the ones with the highest
// indices.
void drop_late_ties(const Unpacked &all, const Threshold &least, Scratch &scratch) {
  const uint64_t sent = all.starts.back(), ranks = all.starts.size() - 1;
  auto *ties = scratch.take<uint64_t>(sent + 1);  // their positions
  int64_t count = 0;
  for (uint64_t i = 0; i < sent; ++i) {
    ties[count] = i;
    count += key_of(all.values[i]) == least.key;
  }
  if (count <= least.ties) return;
  std::vector<std::pair<uint64_t, uint64_t>> found;  // indices and positions
  for (uint64_t r = 0, t = 0; r < ranks; ++r)
    for (; t < static_cast<uint64_t>(count) && ties[t] < all.starts[r + 1]; ++t)
      found.emplace_back(index_of(all.indices[ties[t]], r, ranks), ties[t]);
  std::nth_element(found.begin(), found.begin() + least.ties, found.end());
  for (auto late = found.begin() + least.ties; late != found.end(); ++late)
    all.values[late->second] = 0;
}

// Keeps those entries of every message that are not zero and among the k largest of all messages; moves
// them to the message's start, and sets `stops` to their ends.  Moves `errors` along with the entries of
// `own`.
void keep_largest(const Unpacked &all, int64_t k, uint64_t own, float *errors, const Scan &scan,
                  Scratch &scratch, std::vector<uint64_t> &stops) {
  const auto sent = static_cast<int64_t>(all.starts.back());
  const int64_t non_zero = scan.count(all.values, 0, sent, 1);
  if (k >= sent && non_zero == sent) return;
  uint32_t lowest = 1;
  if (k < non_zero) {
    const Threshold least = k > 0 ? threshold(all.values, sent, k, scan) : Threshold{largest_key, 0};
    lowest = least.ties > 0 ? least.key : least.key + 1;
    if (least.ties > 0) drop_late_ties(all, least, scratch);
  }
  uint64_t kept = 0;
  for (uint64_t i = all.starts[own]; i < all.starts[own + 1]; ++i) {
    errors[kept] = errors[i - all.starts[own]];
    kept += key_of(all.values[i]) >= lowest;
  }
  for (std::size_t r = 0; r < stops.size(); ++r) {
    kept = all.starts[r];
    for (uint64_t i = all.starts[r]; i < all.starts[r + 1]; ++i) {
      all.indices[kept] = all.indices[i];
      all.values[kept] = all.values[i];
      kept += key_of(all.values[i]) >= lowest;
    }
    stops[r] = kept;
  }
}

constexpr int64_t batch = 1024;  // entries placed before any is moved, so that they stay in the L1 cache

// Entries grouped by owner, with room for `limit` entries of every owner and for all of the rank's own.
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
  uint32_t *groups;  // by owner, like the values
  float *values;
};

// Fills the buckets; returns false if any bucket except the rank's own has more than `limit` entries.
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
    if (!scan.pack(groups, values, nnz, style.width, style.form, style.block,
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
  const int64_t broken = unpack_all(messages, own, style, scan, scratch, all);
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

std::pair<int64_t, int64_t> unpack_and_undeal(const std::vector<Message> &messages,
                                              const Style &style, uint64_t size, int64_t k,
                                              const Sums &own, const Entries &sent,
                                              const Scan &scan, const Room &total,
                                              const Room &delivered) {
  check_width(style.width);
  Scratch scratch;
  Unpacked all{};
  const int64_t broken = unpack_all(messages, -1, style, scan, scratch, all);
  if (broken >= 0) return {-1 - broken, 0};
  const uint64_t ranks = messages.size(), mine = static_cast<uint64_t>(own.owner);
  const uint64_t groups = std::max<uint64_t>(slots_per_tile / ranks, 1);
  if (groups * ranks > slots_per_tile) throw std::invalid_argument("too many ranks");
  for (uint64_t r = 0; r < ranks; ++r) {
    if (all.starts[r] == all.starts[r + 1]) continue;
    if (index_of(all.indices[all.starts[r + 1] - 1], r, ranks) >= size)
      return {-1 - static_cast<int64_t>(r), 0};
  }
  if (mine >= ranks || static_cast<uint64_t>(own.count) != all.starts[mine + 1] - all.starts[mine])
    throw std::invalid_argument("give the sums of the rank's own message");
  auto *errors = scratch.take<float>(static_cast<uint64_t>(own.count) + 1);
  for (int64_t i = 0; i < own.count; ++i)
    errors[i] = all.values[all.starts[mine] + static_cast<uint64_t>(i)] - own.values[i];
  std::vector<uint64_t> stops(all.starts.begin() + 1, all.starts.end());
  keep_largest(all, k, mine, errors, scan, scratch, stops);
  std::vector<uint64_t> at(all.starts.begin(), all.starts.end() - 1);
  auto *slots = scratch.take<uint16_t>(slots_per_tile), *places = scratch.take<uint16_t>(slots_per_tile);
  auto *values = scratch.take<float>(slots_per_tile), *parts = scratch.take<float>(slots_per_tile);
  auto *bits = scratch.take<uint64_t>(words_per_tile);
  int64_t count = 0, given = 0, next = 0;
  for (;;) {
    uint64_t first = style.width;  // skip tiles without entries
    for (uint64_t r = 0; r < ranks; ++r)
      if (at[r] < stops[r]) first = std::min<uint64_t>(first, all.indices[at[r]]);
    if (first == style.width) return {count, given};
    first = first / groups * groups;
    const auto base = static_cast<int64_t>(first * ranks);
    uint64_t my_errors = 0;
    int64_t found = 0, my_slots = 0, errors_here = 0;
    for (uint64_t r = 0; r < ranks; ++r) {
      const uint64_t start = at[r];
      while (at[r] < stops[r] && all.indices[at[r]] < first + groups) ++at[r];
      const uint64_t here = at[r] - start;
      scan.undeal(all.indices + start, static_cast<int64_t>(here), first, static_cast<uint32_t>(r),
                  static_cast<uint32_t>(ranks), slots + found);
      std::copy_n(all.values + start, here, values + found);
      if (r == mine) {
        my_errors = start - all.starts[mine];
        my_slots = found;
        errors_here = static_cast<int64_t>(here);
      }
      found += static_cast<int64_t>(here);
    }
    check_room(count + found, total);
    check_room(given + found, delivered);
    count += scan.sum(slots, values, found, base, bits, total.indices + count, total.values + count);

    int64_t taken = 0;
    next = std::lower_bound(sent.indices + next, sent.indices + sent.count, base) - sent.indices;
    const int64_t stop = std::min(sent.count, next + static_cast<int64_t>(groups * ranks));
    for (; next < stop; ++next) {
      const auto place = static_cast<uint64_t>(sent.indices[next] - base);
      if (place >= groups * ranks) break;
      places[taken] = static_cast<uint16_t>(place);
      parts[taken] = sent.values[next];
      taken += static_cast<int64_t>(bits[place / 64] >> (place % 64) & 1);
    }
    const int64_t mixed = merge<uint16_t>(
        {{places, parts, taken}, {slots + my_slots, errors + my_errors, errors_here}},
        static_cast<int64_t>(slots_per_tile), scan, delivered.indices + given, delivered.values + given);
    for (int64_t i = given; i < given + mixed; ++i) delivered.indices[i] += base;
    given += mixed;
  }
}

}  // namespace sparsync
