// One block of memory from the kernel: page-aligned, zeroed, on huge pages where the machine gives them, optionally
// on one NUMA node. Anonymous memory, so a GPU can pin it; or read-only bytes that another object holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ktserve {

class Arena {
 public:
  Arena() = default;
  // node -1: wherever it is first touched. Throws std::bad_alloc.
  explicit Arena(size_t bytes, int node = -1);
  // `bytes` at `data`, which `owner` keeps there: never written to.
  Arena(std::shared_ptr<const void> owner, const uint8_t* data, size_t bytes);
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
  std::shared_ptr<const void> owner_;  // null: the kernel's own memory
};

}  // namespace ktserve
