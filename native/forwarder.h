// Virtual wires between the network devices of the lab's ranks: a rate, a delay, jitter, loss and a
// bounded queue in each direction of every link.
#pragma once

#include <cstdint>
#include <vector>

namespace sparsync {

// One direction of a rank's link, between the rank and the middle of the network.
struct Wire {
  double bytes_per_second;  // of Ethernet frames
  double delay;             // seconds
  double jitter;            // seconds by which the delay varies, either way; order is kept
  double loss;              // probability that a packet is lost
  double queue;             // seconds that a packet may wait for the wire; a longer wait drops it
};

// Carries packets among devices until `stop` is readable or closed at its other end.
//
// The devices are TAP devices with IFF_VNET_HDR, in non-blocking mode.  The device of rank r has the address
// `network` + 1 + r; its packets go out over the wire ups[r] and come in over downs[r].  Packets to other
// addresses are dropped.
void forward(const std::vector<int> &devices, const std::vector<Wire> &ups,
             const std::vector<Wire> &downs, uint32_t network, int stop);

}  // namespace sparsync
