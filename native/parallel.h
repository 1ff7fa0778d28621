// Threads that start and end within one call: a lasting pool would compete with torch's.
#pragma once

#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace sparsync {

// Calls work(worker, start, stop) until [0, n) is covered, in steps of at most `step` elements.
//
// Workers come in pairs that share a stretch: the even worker takes steps from its start upwards, the odd
// worker from its end downwards, until they meet.  So the steps of each worker adjoin, in order.  If a
// worker has to wait for a core, its partner does more of the work; this happens because torch's threads
// spin on their cores for milliseconds after every operation.  Worker 0 is the calling thread.  If a
// thread cannot be started, its partner, or the caller, takes all of its steps.
template <typename Work>
void share(int64_t n, int workers, int64_t step, const Work &work) {
  const int64_t steps = (n + step - 1) / step;
  const int stretches = (workers + 1) / 2;
  const auto first = [&](int stretch) { return steps * stretch / stretches; };
  std::vector<std::atomic<int64_t>> claimed(static_cast<size_t>(stretches));

  const auto run = [&](int worker) {
    const int stretch = worker / 2;
    const int64_t low = first(stretch), high = first(stretch + 1);
    std::atomic<int64_t> &taken = claimed[static_cast<size_t>(stretch)];
    for (int64_t mine = 0; taken.fetch_add(1, std::memory_order_relaxed) < high - low; ++mine) {
      const int64_t start = (worker % 2 == 0 ? low + mine : high - 1 - mine) * step;
      work(worker, start, start + step < n ? start + step : n);
    }
  };

  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(workers));
  std::vector<int> not_started;
  not_started.reserve(static_cast<size_t>(workers));
  for (int worker = 1; worker < workers; ++worker) {
    try {
      threads.emplace_back(run, worker);
    } catch (const std::system_error &) {
      if (worker % 2 == 0) not_started.push_back(worker);
    }
  }
  run(0);
  for (const int worker : not_started) run(worker);
  for (std::thread &thread : threads) thread.join();
}

}  // namespace sparsync
