// The extension module sparsync.kernels._native.  Tensors are passed as addresses and sizes, validated by
// kernels/native.py; the GIL is released while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "dealing.h"
#include "exchange.h"
#include "forwarder.h"
#include "messages.h"
#include "packing.h"
#include "parallel.h"
#include "scan.h"
#include "scratch.h"
#include "select.h"
#include "sparse.h"

namespace nb = nanobind;
using Address = uintptr_t;

namespace {

template <typename T>
T *at(Address address) {
  return reinterpret_cast<T *>(address);  // NOLINT: the caller holds the tensor
}

struct Named {
  const char *name;
  const sparsync::Scan *(*scan)();
};
constexpr Named instruction_sets[] = {{"avx512", sparsync::scan_avx512},
                                      {"avx2", sparsync::scan_avx2},
                                      {"neon", sparsync::scan_neon},
                                      {"plain", sparsync::scan_plain}};

std::vector<std::string> usable() {
  std::vector<std::string> names;
  for (const Named &set : instruction_sets)
    if (set.scan() != nullptr) names.emplace_back(set.name);
  return names;
}

const sparsync::Scan &scan_of(const char *isa) {
  for (const Named &set : instruction_sets)
    if (std::strcmp(set.name, isa) == 0 && set.scan() != nullptr) return *set.scan();
  throw std::invalid_argument(std::string("this machine or build has no instruction set ") + isa);
}

constexpr int64_t plain_step = int64_t{1} << 15;  // elements per step of a pass that collects nothing

// Runs a pass that collects entries.  Every worker has `limit` places of the output to itself; the entries
// are joined afterwards.  Returns the count, or -1 if more than `limit` were found.
template <typename Pass>
int64_t collect(int64_t n, int64_t limit, int workers, int64_t *indices, float *values,
                const Pass &pass) {
  std::vector<sparsync::Found> parts;
  for (int64_t w = 0; w < workers; ++w)
    parts.push_back({indices + w * limit, values + w * limit, limit, w % 2 == 1, 0});
  sparsync::share(n, workers, sparsync::scan_step, [&](int worker, int64_t start, int64_t stop) {
    pass(start, stop, parts[static_cast<size_t>(worker)]);
  });
  int64_t total = 0;
  for (const auto &part : parts) total += part.count;
  if (total > limit) return -1;
  int64_t end = 0;
  for (const auto &part : parts) {
    if (part.count == 0) continue;  // without room, the addresses are null
    const auto count = static_cast<size_t>(part.count);
    const int64_t skip = part.downwards ? limit - part.count : 0;
    std::memmove(indices + end, part.indices + skip, count * sizeof(int64_t));
    std::memmove(values + end, part.values + skip, count * sizeof(float));
    end += part.count;
  }
  return total;
}

void swap_add(Address residual, Address gradient, int64_t n, int threads, const char *isa) {
  const auto &scan = scan_of(isa);
  sparsync::share(n, threads, plain_step, [&](int, int64_t start, int64_t stop) {
    scan.swap_add(at<float>(residual), at<float>(gradient), start, stop);
  });
}

int64_t accumulate(Address residual, Address gradient, int64_t n, uint32_t key, int64_t limit,
                   Address indices, Address values, int threads, const char *isa) {
  const auto &scan = scan_of(isa);
  return collect(n, limit, threads, at<int64_t>(indices), at<float>(values),
                 [&](int64_t start, int64_t stop, sparsync::Found &found) {
                   scan.accumulate(at<float>(residual), at<float>(gradient), start, stop, key,
                                   found);
                 });
}

int64_t find(Address x, int64_t n, uint32_t key, int64_t limit, Address indices, Address values,
             int threads, const char *isa) {
  const auto &scan = scan_of(isa);
  return collect(n, limit, threads, at<int64_t>(indices), at<float>(values),
                 [&](int64_t start, int64_t stop, sparsync::Found &found) {
                   scan.find(at<float>(x), start, stop, key, found);
                 });
}

int64_t count(Address x, int64_t n, uint32_t key, int threads, const char *isa) {
  const auto &scan = scan_of(isa);
  std::vector<int64_t> counts(static_cast<size_t>(threads), 0);
  sparsync::share(n, threads, plain_step, [&](int worker, int64_t start, int64_t stop) {
    counts[static_cast<size_t>(worker)] += scan.count(at<float>(x), start, stop, key);
  });
  int64_t total = 0;
  for (const int64_t part : counts) total += part;
  return total;
}

int64_t top(Address x, int64_t n, int64_t k, Address positions, const char *isa) {
  return sparsync::top(at<float>(x), n, k, at<int64_t>(positions), scan_of(isa));
}

uint32_t guess(Address x, int64_t n, int64_t k, int64_t stride) {
  return sparsync::guess(at<float>(x), n, k, stride);
}

using RawStream = std::tuple<Address, Address, int64_t>;

std::vector<sparsync::Stream<int64_t>> streams_of(const std::vector<RawStream> &raw) {
  std::vector<sparsync::Stream<int64_t>> streams;
  streams.reserve(raw.size());
  for (const auto &[i, v, count] : raw) streams.push_back({at<int64_t>(i), at<float>(v), count});
  return streams;
}

int64_t merge(const std::vector<RawStream> &streams, int64_t size, Address indices, Address values,
              const char *isa) {
  return sparsync::merge(streams_of(streams), size, scan_of(isa), at<int64_t>(indices),
                         at<float>(values));
}

int64_t merge_within(const std::vector<RawStream> &streams, int64_t size, Address among, int64_t m,
                     Address indices, Address values, const char *isa) {
  return sparsync::merge_within(streams_of(streams), size, at<int64_t>(among), m, scan_of(isa),
                                at<int64_t>(indices), at<float>(values));
}

int64_t restrict_to(Address indices, int64_t n, Address among, int64_t m, Address positions) {
  return sparsync::restrict_to(at<int64_t>(indices), n, at<int64_t>(among), m,
                               at<int64_t>(positions));
}

void subtract(Address dense, int64_t size, Address indices, Address values, int64_t n) {
  sparsync::subtract(at<float>(dense), size, at<int64_t>(indices), at<float>(values), n);
}

void scatter(Address dense, int64_t size, Address indices, Address values, int64_t n,
             int threads) {
  sparsync::scatter(at<float>(dense), size, at<int64_t>(indices), at<float>(values), n, threads);
}

void deal(Address indices, int64_t n, int64_t world_size, Address order, Address local,
          Address counts) {
  sparsync::deal(at<int64_t>(indices), n, world_size, at<int64_t>(order), at<int64_t>(local),
                 at<int64_t>(counts));
}

void undeal(Address local, int64_t n, int64_t owner, int64_t world_size, Address indices) {
  sparsync::undeal(at<int64_t>(local), n, owner, world_size, at<int64_t>(indices));
}

constexpr int64_t few_bins = 128;  // up to this number, a mask per bin beats a search per element

void count_from(Address values, int64_t n, Address keys, int64_t bins, Address counts,
                const char *isa) {
  for (int64_t i = 1; i < bins; ++i)
    if (at<int64_t>(keys)[i - 1] > at<int64_t>(keys)[i])
      throw std::invalid_argument("keys must ascend; sort them first");
  if (bins <= few_bins)
    scan_of(isa).count_from(at<float>(values), n, at<int64_t>(keys), bins, at<int64_t>(counts));
  else
    sparsync::count_from(at<float>(values), n, at<int64_t>(keys), bins, at<int64_t>(counts));
}

using RawLevels = std::tuple<int, int64_t, float, Address, Address>;
constexpr int64_t quantised_step = int64_t{1} << 14;  // elements; a step has whole blocks

// Calls work(start, stop, scratch) for steps of whole blocks.
template <typename Work>
void share_blocks(int64_t n, int64_t block, int threads, const Work &work) {
  const int64_t step = std::max(quantised_step / block, int64_t{1}) * block;
  sparsync::share(n, threads, step, [&](int, int64_t start, int64_t stop) {
    sparsync::Scratch scratch;
    work(start, stop, scratch.take<float>(static_cast<uint64_t>(sparsync::levels_scratch * block)));
  });
}

sparsync::Levels levels_of(const RawLevels &raw) {
  const auto &[bits, block, limit, thresholds, levels] = raw;
  return {bits, block, limit, at<float>(thresholds), at<float>(levels)};
}

constexpr int64_t summed_step = int64_t{1} << 12;  // elements whose sum stays in the L1 cache

int64_t summed_blocks(int64_t block) {
  return std::max(summed_step / block, int64_t{1}) * block;
}

// Quantises x, or x + more if `more` is not 0.
void quantise(Address x, Address more, int64_t n, const RawLevels &raw, Address scales,
              Address codes, int threads, const char *isa) {
  const auto &scan = scan_of(isa);
  const auto given = levels_of(raw);
  share_blocks(n, given.block, threads, [&](int64_t start, int64_t stop, float *scratch) {
    const auto write = [&](const float *from, int64_t low, int64_t size) {
      scan.quantise(from, size, given, at<uint8_t>(scales) + 2 * low / given.block,
                    at<uint8_t>(codes) + low * given.bits / 8, scratch);
    };
    if (more == 0) return write(at<float>(x) + start, start, stop - start);
    const int64_t step = summed_blocks(given.block);
    sparsync::Scratch room;
    float *sums = room.take<float>(static_cast<uint64_t>(step));
    for (int64_t low = start; low < stop; low += step) {
      const int64_t size = std::min(step, stop - low);
      const float *a = at<float>(x) + low, *b = at<float>(more) + low;
      for (int64_t i = 0; i < size; ++i) sums[i] = a[i] + b[i];
      write(sums, low, size);
    }
  });
}

using RawCodes = std::tuple<Address, Address>;  // scales and codes

// into = (the message - the sum of the messages in `less`) / divisor; with `keep`, this is added to
// into + plus, where a `plus` of 0 is left out.
void decode_levels(Address into, Address plus, const std::vector<RawCodes> &less, float divisor,
                   bool keep, int64_t n, const RawLevels &raw, Address scales, Address codes,
                   int threads, const char *isa) {
  const auto &scan = scan_of(isa);
  const auto given = levels_of(raw);
  share_blocks(n, given.block, threads, [&](int64_t start, int64_t stop, float *scratch) {
    const auto decode = [&](const RawCodes &from, int64_t low, int64_t size, float by, bool add,
                            float *to) {
      scan.decode_levels(at<uint8_t>(std::get<0>(from)) + 2 * low / given.block,
                         at<uint8_t>(std::get<1>(from)) + low * given.bits / 8, size, given, by, add,
                         to, scratch);
    };
    const RawCodes own{scales, codes};
    if (plus == 0 && less.empty())
      return decode(own, start, stop - start, divisor, keep, at<float>(into) + start);
    const int64_t step = summed_blocks(given.block);
    sparsync::Scratch room;
    float *made = room.take<float>(static_cast<uint64_t>(2 * step)), *others = made + step;
    for (int64_t low = start; low < stop; low += step) {
      const int64_t size = std::min(step, stop - low);
      float *here = at<float>(into) + low;
      if (plus != 0) {
        const float *more = at<float>(plus) + low;
        for (int64_t i = 0; i < size; ++i) here[i] += more[i];
      }
      if (less.empty()) {
        decode(own, low, size, divisor, keep, here);
        continue;
      }
      decode(own, low, size, 1.0f, false, made);
      bool add = false;
      for (const RawCodes &other : less) {
        decode(other, low, size, 1.0f, add, others);
        add = true;
      }
      for (int64_t i = 0; i < size; ++i)
        here[i] = (keep ? here[i] : 0.0f) + (made[i] - others[i]) / divisor;
    }
  });
}

// into = the sum of the messages, in their order, + own, where an `own` of 0 is left out.
void sum_levels(Address into, const std::vector<RawCodes> &messages, Address own, int64_t n,
                const RawLevels &raw, int threads, const char *isa) {
  const auto &scan = scan_of(isa);
  const auto given = levels_of(raw);
  share_blocks(n, given.block, threads, [&](int64_t start, int64_t stop, float *scratch) {
    const int64_t step = summed_blocks(given.block);
    for (int64_t low = start; low < stop; low += step) {
      const int64_t size = std::min(step, stop - low);
      float *sums = at<float>(into) + low;
      if (messages.empty()) std::fill_n(sums, size, 0.0f);
      bool keep = false;
      for (const auto &[scales, codes] : messages) {
        scan.decode_levels(at<uint8_t>(scales) + 2 * low / given.block,
                           at<uint8_t>(codes) + low * given.bits / 8, size, given, 1.0f, keep, sums,
                           scratch);
        keep = true;
      }
      if (own != 0) {
        const float *mine = at<float>(own) + low;
        for (int64_t i = 0; i < size; ++i) sums[i] += mine[i];
      }
    }
  });
}

using RawMoments = std::tuple<float, float, float, float>;
constexpr int64_t moments_step = int64_t{1} << 14;

void lengthen(Address first, Address second, Address weights, int64_t n, const RawMoments &raw,
              int threads, const char *isa) {
  const sparsync::Scan &scan = scan_of(isa);
  const auto &[lengthened, own, eps, rate] = raw;
  const sparsync::Moments given{lengthened, own, eps, rate};
  sparsync::share(n, threads, moments_step, [&](int, int64_t start, int64_t stop) {
    scan.lengthen(at<float>(first) + start, at<float>(second) + start, at<float>(weights) + start,
                  stop - start, given);
  });
}

// as `lengthen`, with a factor of v per row in place of `lengthened`
void lengthen_rows(Address first, Address second, Address weights, Address factors, int64_t rows,
                   int64_t columns, const RawMoments &raw, int threads, const char *isa) {
  const sparsync::Scan &scan = scan_of(isa);
  const auto &[unused, own, eps, rate] = raw;
  const sparsync::Moments common{0.0f, own, eps, rate};
  const int64_t step = std::max<int64_t>(moments_step / std::max<int64_t>(columns, 1), 1);
  sparsync::share(rows, threads, step, [&](int, int64_t start, int64_t stop) {
    sparsync::Moments given = common;
    for (int64_t row = start; row < stop; ++row) {
      given.lengthened = at<float>(factors)[row];
      const int64_t place = row * columns;
      scan.lengthen(at<float>(first) + place, at<float>(second) + place,
                    at<float>(weights) + place, columns, given);
    }
  });
}

using RawMessage = std::tuple<Address, uint64_t>;
using RawStyle = std::tuple<uint64_t, uint64_t, int, uint64_t, uint64_t>;
using RawRoom = std::tuple<Address, Address, int64_t>;

std::vector<sparsync::Message> messages_of(const std::vector<RawMessage> &raw) {
  std::vector<sparsync::Message> messages;
  messages.reserve(raw.size());
  for (const auto &[bytes, nbytes] : raw) messages.push_back({at<uint8_t>(bytes), nbytes});
  return messages;
}

sparsync::Style style_of(const RawStyle &raw) {
  const auto &[first, second, form, block, width] = raw;
  return {{first, second}, form, block, width};
}

sparsync::Room room_of(const RawRoom &raw) {
  const auto &[indices, values, capacity] = raw;
  return {at<int64_t>(indices), at<float>(values), capacity};
}

int64_t deal_and_pack(Address indices, Address values, int64_t n, int64_t world_size, int64_t own,
                      int64_t limit, const RawStyle &style,
                      const std::tuple<Address, uint64_t, Address> &messages, Address arriving,
                      Address own_indices, Address own_values, const char *isa) {
  const auto &[start, stride, lengths] = messages;
  return sparsync::deal_and_pack(
      {at<int64_t>(indices), at<float>(values), n}, world_size, own, limit,
      style_of(style), scan_of(isa),
      {at<uint8_t>(start), stride, at<int64_t>(lengths), at<float>(arriving),
       at<int64_t>(own_indices), at<float>(own_values)});
}

int64_t unpack_and_sum(const std::vector<RawMessage> &raw, int64_t own, Address indices,
                       Address values, int64_t n, const RawStyle &style, int64_t k,
                       const RawRoom &out, const char *isa) {
  return sparsync::unpack_and_sum(messages_of(raw), own, {at<int64_t>(indices), at<float>(values), n},
                                  style_of(style), k, scan_of(isa), room_of(out));
}

std::pair<int64_t, int64_t> unpack_and_undeal(const std::vector<RawMessage> &raw,
                                              const RawStyle &style, uint64_t size, int64_t k,
                                              const std::tuple<int64_t, Address, int64_t> &own,
                                              const std::tuple<Address, Address, int64_t> &sent,
                                              const RawRoom &total, const RawRoom &delivered,
                                              const char *isa) {
  const auto &[rank, sums, summed] = own;
  const auto &[indices, values, n] = sent;
  return sparsync::unpack_and_undeal(messages_of(raw), style_of(style), size, k,
                                     {rank, at<float>(sums), summed},
                                     {at<int64_t>(indices), at<float>(values), n}, scan_of(isa),
                                     room_of(total), room_of(delivered));
}

using RawLayout = std::tuple<uint64_t, int, uint64_t>;
using RawShare = std::tuple<bool, Address, Address, int64_t>;  // a message and its bytes, or entries

sparsync::messages::Layout layout_of(const RawLayout &raw) {
  const auto &[start, form, block] = raw;
  return {start, form, block};
}

std::vector<sparsync::messages::Share> shares_of(const std::vector<RawShare> &raw) {
  std::vector<sparsync::messages::Share> shares;
  shares.reserve(raw.size());
  for (const auto &[is_message, first, second, count] : raw) {
    if (is_message)
      shares.push_back({true, at<uint8_t>(first), static_cast<uint64_t>(count), nullptr, nullptr, 0});
    else
      shares.push_back({false, nullptr, 0, at<int64_t>(first), at<float>(second), count});
  }
  return shares;
}

std::vector<int64_t> cut(Address indices, Address values, int64_t n,
                         const std::vector<int64_t> &boundaries, int64_t own,
                         const RawLayout &layout, Address out, uint64_t capacity, const char *isa) {
  return sparsync::messages::cut(at<int64_t>(indices), at<float>(values), n, boundaries, own,
                                 layout_of(layout), scan_of(isa), at<uint8_t>(out), capacity);
}

int64_t fold(const std::vector<RawShare> &shares, const RawLayout &layout, int64_t width,
             const RawRoom &out, const char *isa) {
  const auto &[indices, values, capacity] = out;
  return sparsync::messages::fold(shares_of(shares), layout_of(layout), width, scan_of(isa),
                                  {at<int64_t>(indices), at<float>(values), capacity});
}

int64_t join(const std::vector<RawShare> &shares, const RawLayout &layout,
             const std::vector<std::tuple<int64_t, int64_t>> &spans, const RawRoom &out,
             const char *isa) {
  std::vector<sparsync::messages::Region> regions;
  for (const auto &[start, stop] : spans) regions.push_back({start, stop});
  const auto &[indices, values, capacity] = out;
  return sparsync::messages::join(shares_of(shares), layout_of(layout), regions, scan_of(isa),
                                  {at<int64_t>(indices), at<float>(values), capacity});
}

using RawWire = std::tuple<double, double, double, double, double>;

std::vector<sparsync::Wire> wires_of(const std::vector<RawWire> &raw) {
  std::vector<sparsync::Wire> wires;
  for (const auto &[rate, delay, jitter, loss, queue] : raw)
    wires.push_back({rate, delay, jitter, loss, queue});
  return wires;
}

void forward(const std::vector<int> &devices, const std::vector<RawWire> &ups,
             const std::vector<RawWire> &downs, uint32_t network, int stop) {
  sparsync::forward(devices, wires_of(ups), wires_of(downs), network, stop);
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__)
constexpr bool sanitized = true;
#elif defined(__has_feature)
constexpr bool sanitized = __has_feature(address_sanitizer);
#else
constexpr bool sanitized = false;
#endif

NB_MODULE(_native, m) {
  using released = nb::call_guard<nb::gil_scoped_release>;
  m.doc() = "The CPU kernels; kernels/native.py is their door.";
  m.attr("interface") = 10;  // of this module's functions; kernels/native.py refuses another
  m.attr("sanitized") = sanitized;
  m.attr("slots_per_tile") = sparsync::slots_per_tile;
  m.def("instruction_sets", &usable);
  m.def("swap_add", &swap_add, released());
  m.def("accumulate", &accumulate, released());
  m.def("find", &find, released());
  m.def("count", &count, released());
  m.def("top", &top, released());
  m.def("guess", &guess, released());
  m.def("merge", &merge, released());
  m.def("merge_within", &merge_within, released());
  m.def("restrict_to", &restrict_to, released());
  m.def("subtract", &subtract, released());
  m.def("scatter", &scatter, released());
  m.def("count_from", &count_from, released());
  m.def("quantise", &quantise, released());
  m.def("decode_levels", &decode_levels, released());
  m.def("sum_levels", &sum_levels, released());
  m.def("lengthen", &lengthen, released());
  m.def("lengthen_rows", &lengthen_rows, released());
  m.def("deal", &deal, released());
  m.def("undeal", &undeal, released());
  m.def("deal_and_pack", &deal_and_pack, released());
  m.def("unpack_and_sum", &unpack_and_sum, released());
  m.def("unpack_and_undeal", &unpack_and_undeal, released());
  m.def("cut", &cut, released());
  m.def("fold", &fold, released());
  m.def("join", &join, released());
  m.def("forward", &forward, released());
  bind_packing(m);
}
