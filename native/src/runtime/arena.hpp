// One block of memory from the kernel: page-aligned, zeroed, on huge pages where the machine gives them, optionally
// on one NUMA node. Anonymous memory, so a GPU can pin it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktserve {

class Arena {
 public:
  Arena() = default;
  // node -1: wherever it is first touched. Throws std::bad_alloc.
  explicit Arena(size_t bytes, int node = -1);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ktserve
