// Scratch memory that is kept for the next call of this thread.  At these sizes, the allocator returns memory
// to the system, and the first access to a new page costs 1 to 3 us.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace sparsync {

// The memory that a call takes; when the call ends, other calls may use it.
class Scratch {
 public:
  Scratch() : before_(used_) {}
  ~Scratch() { used_ = before_; }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;

  template <typename T>
  T *take(uint64_t count) {
    const uint64_t nbytes = (count * sizeof(T) + alignment) / alignment * alignment;
    if (used_ == chunks_.size()) chunks_.emplace_back();
    Chunk &chunk = chunks_[used_++];
    if (chunk.nbytes < nbytes) {
      chunk.nbytes = 0;
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
  inline static thread_local std::vector<Chunk> chunks_;
  inline static thread_local std::size_t used_ = 0;
  const std::size_t before_;
};

}  // namespace sparsync
