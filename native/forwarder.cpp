#include "forwarder.h"

#include <stdexcept>

#ifdef __linux__

#include <arpa/inet.h>
#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>
#include <queue>
#include <random>
#include <utility>

namespace sparsync {
namespace {

constexpr int64_t second = 1'000'000'000;  // in nanoseconds, like all times here
// Under load, packets are moved once per tick.  Moving them one by one would also cost a sleep and a wake-up
// of the receiver per packet, which take a virtual machine longer than moving the packet.
constexpr int64_t tick = 1'000'000;
constexpr double memory = 10'000'000, few = 20;  // load: more than a few packets in about this time
// If this thread is late by at most this, a wire catches up, like the buckets of the lab's other links.
constexpr int64_t late = 1'000'000;

// The kernel's header before a frame: virtio_net_hdr of linux/virtio_net.h, which is C.
struct Offload {
  uint8_t flags, kind;
  uint16_t header_bytes, segment_bytes, checksum_start, checksum_offset;
};

constexpr size_t ethernet = 14, ipv4 = 20, tcp = 20;  // bytes of their headers, without options
constexpr size_t start = sizeof(Offload);             // of the frame
constexpr size_t largest = start + ethernet + 65'536;

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * second + time.tv_nsec;
}

struct Packet {
  int64_t due = 0;
  size_t dest = 0;
  size_t length = 0;  // bytes here
  // The kernel may hand over several TCP segments as one packet.  These are the bytes of the headers, from
  // Ethernet on, that each segment has on the wire, and of the payload of each segment but the last.
  size_t headers = 0, segment = 1;
  std::unique_ptr<unsigned char[]> bytes;

  size_t payload() const { return length - start - headers; }
  size_t segments() const { return headers == 0 ? 1 : (payload() + segment - 1) / segment; }
  size_t on_wire() const { return length - start + (segments() - 1) * headers; }
  unsigned char *ip() const { return bytes.get() + start + ethernet; }
  size_t ip_bytes() const { return 4 * (*ip() & 15U); }
};

// Finds out whether a packet has several segments; a packet of any other form counts as one.
void measure(Packet &packet) {
  Offload offload;
  std::memcpy(&offload, packet.bytes.get(), start);
  const size_t before = start + ethernet + packet.ip_bytes();
  if (offload.kind == 0 || offload.segment_bytes == 0 || packet.length < before + tcp) return;
  const size_t headers = before - start + 4 * (packet.bytes[before + 12] >> 4U);
  if (packet.ip_bytes() < ipv4 || headers < before - start + tcp) return;
  if (packet.length <= start + headers) return;
  packet.headers = headers;
  packet.segment = offload.segment_bytes;
}

uint32_t load(const unsigned char *from, int bytes) {
  uint32_t value = 0;
  for (int i = 0; i < bytes; ++i) value = value << 8U | from[i];
  return value;
}

void store(unsigned char *to, int bytes, uint32_t value) {
  for (int i = bytes; i-- > 0; value >>= 8U) to[i] = static_cast<unsigned char>(value);
}

uint32_t fold(uint32_t sum) {  // adds the carries, as the checksums of IP and TCP do
  while (sum >> 16U != 0) sum = (sum & 0xffffU) + (sum >> 16U);
  return sum;
}

// Copies the segments [from, to) of a packet, with the headers that they would have if sent alone.
Packet cut(const Packet &whole, size_t from, size_t to) {
  const size_t first = from * whole.segment, last = std::min(to * whole.segment, whole.payload());
  const size_t kept = start + whole.headers;
  Packet part;
  part.dest = whole.dest;
  part.length = kept + last - first;
  part.bytes.reset(new unsigned char[part.length]);
  std::memcpy(part.bytes.get(), whole.bytes.get(), kept);
  std::memcpy(part.bytes.get() + kept, whole.bytes.get() + kept + first, last - first);
  unsigned char *const ip = part.ip(), *const segment = ip + part.ip_bytes();
  const auto bytes = static_cast<uint32_t>(part.length - start - ethernet);
  const uint32_t before = load(ip + 2, 2);
  store(ip + 2, 2, bytes);
  store(ip + 4, 2, load(ip + 4, 2) + static_cast<uint32_t>(from));
  store(ip + 10, 2, 0);
  uint32_t sum = 0;
  for (size_t i = 0; i < part.ip_bytes(); i += 2) sum += load(ip + i, 2);
  store(ip + 10, 2, ~fold(sum));
  store(segment + 4, 4, load(segment + 4, 4) + static_cast<uint32_t>(first));
  if (to < whole.segments()) segment[13] &= 0xf6U;  // neither FIN nor PSH
  if (from > 0) segment[13] &= 0x7fU;               // nor CWR
  // the checksum so far is a sum of addresses, protocol and length; only the length has changed
  store(segment + 16, 2, fold(load(segment + 16, 2) + (~before & 0xffffU) + bytes));
  Offload offload;
  std::memcpy(&offload, part.bytes.get(), start);
  offload.header_bytes = static_cast<uint16_t>(whole.headers);
  if (to - from == 1) offload.kind = 0, offload.segment_bytes = 0;
  std::memcpy(part.bytes.get(), &offload, start);
  measure(part);
  return part;
}

class Line {
 public:
  Line(const Wire &wire, uint64_t seed) : wire_(wire), random_(seed) {}

  // Takes a packet that arrived at `time`, or the part of it that is not lost.  Returns whether the line
  // was empty and no longer is.
  bool put(Packet packet, int64_t time, int64_t credit) {
    if (static_cast<double>(free_ - time) > wire_.queue * second) return false;
    const auto crossing = static_cast<double>(packet.on_wire()) / wire_.bytes_per_second * second;
    free_ = std::max(free_, time - credit) + static_cast<int64_t>(crossing);
    double delay = wire_.delay;
    if (wire_.jitter > 0) delay += wire_.jitter * (2 * uniform_(random_) - 1);
    last_ = std::max(last_, std::max(free_, time) + static_cast<int64_t>(delay * second));
    packet.due = last_;
    const bool was_empty = packets_.empty();
    keep(std::move(packet));
    return was_empty && !packets_.empty();
  }

  Packet take() {
    Packet packet = std::move(packets_.front());
    packets_.pop_front();
    return packet;
  }

  bool empty() const { return packets_.empty(); }
  int64_t due() const { return packets_.front().due; }

 private:
  // Queues a packet; if it has several segments, queues the runs between the lost ones.
  void keep(Packet packet) {
    const size_t segments = packet.segments();
    size_t kept = 0;  // first segment not queued yet
    for (size_t i = 0; wire_.loss > 0 && i < segments; ++i) {
      if (uniform_(random_) >= wire_.loss) continue;
      if (kept < i) part(packet, kept, i);
      kept = i + 1;
    }
    if (kept == 0) return packets_.push_back(std::move(packet));
    if (kept < segments) part(packet, kept, segments);
  }

  void part(const Packet &whole, size_t from, size_t to) {
    packets_.push_back(cut(whole, from, to));
    packets_.back().due = whole.due;
  }

  Wire wire_;
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> uniform_{0.0, 1.0};
  std::deque<Packet> packets_;
  int64_t free_ = 0;  // when the wire has carried everything that it was given
  int64_t last_ = 0;  // when the last packet arrives
};

class Forwarder {
 public:
  Forwarder(const std::vector<int> &devices, const std::vector<Wire> &ups,
            const std::vector<Wire> &downs, uint32_t network, int stop)
      : network_(network), scratch_(new unsigned char[largest]) {
    polled_.push_back({stop, POLLIN, 0});
    for (const int device : devices) polled_.push_back({device, POLLIN, 0});
    for (const Wire &wire : ups) lines_.emplace_back(wire, lines_.size());
    for (const Wire &wire : downs) lines_.emplace_back(wire, lines_.size());
  }

  void run() {
    prctl(PR_SET_TIMERSLACK, 1UL);
    double load = 0;
    for (int64_t time = now(), before = time;; before = time, time = now()) {
      load *= std::exp(static_cast<double>(before - time) / memory);
      // on average, a packet is half a tick late when it comes, and half a tick early when it goes
      const int64_t early = load > few ? tick / 2 : 0;
      moved_ = 0;
      deliver(time + early);
      if (!poll(early > 0 ? 0 : next() - now())) return;
      receive(early);
      load += moved_;
      if (early > 0) {
        const int64_t wake = time + tick;
        const timespec until{static_cast<time_t>(wake / second), static_cast<long>(wake % second)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
      }
    }
  }

 private:
  // Waits at most `wait` for a packet to receive; returns whether to continue.
  bool poll(int64_t wait) {
    wait = std::max<int64_t>(wait, 0);
    const timespec most{static_cast<time_t>(wait / second), static_cast<long>(wait % second)};
    const int ready = ppoll(polled_.data(), polled_.size(), &most, nullptr);
    if (ready <= 0)  // nothing, or a signal
      for (pollfd &one : polled_) one.revents = 0;
    return polled_[0].revents == 0;
  }

  int64_t next() const { return heads_.empty() ? now() + second : heads_.top().first; }

  void receive(int64_t early) {
    for (size_t rank = 0; rank + 1 < polled_.size(); ++rank) {
      pollfd &device = polled_[rank + 1];
      if (device.revents & (POLLERR | POLLHUP | POLLNVAL)) device.fd = -1;  // it is gone
      while (device.fd >= 0 && (device.revents & POLLIN) != 0) {
        const ssize_t length = read(device.fd, scratch_.get(), largest);
        if (length <= 0) break;
        ++moved_;
        enter(rank, static_cast<size_t>(length), now() - early);
      }
    }
  }

  void enter(size_t rank, size_t length, int64_t time) {
    const unsigned char *frame = scratch_.get() + start;
    if (length < start + ethernet + ipv4 || frame[12] != 8 || frame[13] != 0) return;  // not IPv4
    uint32_t address;
    std::memcpy(&address, frame + ethernet + 16, sizeof address);
    Packet packet;
    packet.dest = size_t{ntohl(address)} - network_ - 1;
    if (packet.dest >= ranks()) return;
    packet.length = length;
    packet.bytes.reset(new unsigned char[length]);
    std::memcpy(packet.bytes.get(), scratch_.get(), length);
    measure(packet);
    put(rank, std::move(packet), time, late);
  }

  void put(size_t line, Packet packet, int64_t time, int64_t credit) {
    if (lines_[line].put(std::move(packet), time, credit))
      heads_.emplace(lines_[line].due(), line);
  }

  // Moves the packets that are due, in order of time: from a rank's wire to the wire of their destination,
  // and from there to the device.
  void deliver(int64_t time) {
    while (!heads_.empty() && heads_.top().first <= time) {
      const size_t line = heads_.top().second;
      heads_.pop();
      Packet packet = lines_[line].take();
      if (!lines_[line].empty()) heads_.emplace(lines_[line].due(), line);
      if (line < ranks()) {
        const size_t dest = ranks() + packet.dest;
        const int64_t arrived = packet.due;
        put(dest, std::move(packet), arrived, 0);
        continue;
      }
      ++moved_;
      const int device = polled_[1 + packet.dest].fd;
      // a device that is down or gone refuses the packet, like a cable without a computer
      if (device >= 0 && write(device, packet.bytes.get(), packet.length) < 0) continue;
    }
  }

  size_t ranks() const { return polled_.size() - 1; }

  using Head = std::pair<int64_t, size_t>;  // when the first packet of a line is due, and the line
  std::priority_queue<Head, std::vector<Head>, std::greater<Head>> heads_;
  std::vector<pollfd> polled_;  // `stop`, then the devices
  std::deque<Line> lines_;      // up of every rank, then down of every rank
  uint32_t network_;
  std::unique_ptr<unsigned char[]> scratch_;
  int moved_ = 0;  // packets in this turn
};

}  // namespace

void forward(const std::vector<int> &devices, const std::vector<Wire> &ups,
             const std::vector<Wire> &downs, uint32_t network, int stop) {
  if (ups.size() != devices.size() || downs.size() != devices.size())
    throw std::invalid_argument("a device needs two wires");
  Forwarder(devices, ups, downs, network, stop).run();
}

}  // namespace sparsync

#else

namespace sparsync {

void forward(const std::vector<int> &, const std::vector<Wire> &, const std::vector<Wire> &,
             uint32_t, int) {
  throw std::runtime_error("network devices of this kind are Linux's");
}

}  // namespace sparsync

#endif
