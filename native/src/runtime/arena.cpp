#include "runtime/arena.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>
#include <utility>

namespace ktserve {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Arena::Arena(size_t bytes, int node) {
  if (bytes == 0) return;
  const size_t step = bytes >= kHugePage ? kHugePage : 4096;
  bytes_ = (bytes + step - 1) / step * step;
  // One huge page more than needed, and the ends cut off, so that the block begins on a huge page.
  const size_t extra = step == kHugePage ? kHugePage : 0;
  void* got = mmap(nullptr, bytes_ + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  const uintptr_t begin = reinterpret_cast<uintptr_t>(got);
  const uintptr_t aligned = (begin + step - 1) / step * step;
  data_ = reinterpret_cast<uint8_t*>(aligned);
  if (aligned > begin) munmap(got, aligned - begin);
  const size_t after = extra - (aligned - begin);
  if (extra != 0 && after > 0) munmap(data_ + bytes_, after);
  if (step == kHugePage) madvise(data_, bytes_, MADV_HUGEPAGE);
  if (node >= 0 && node < 64) {
    constexpr long bind = 2;
    const unsigned long mask = 1ul << node;
    // A node whose memory this process may not have leaves it where it is touched first.
    syscall(SYS_mbind, data_, bytes_, bind, &mask, 64ul, 0ul);
  }
}

Arena::Arena(std::shared_ptr<const void> owner, const uint8_t* data, size_t bytes)
    : data_(const_cast<uint8_t*>(data)), bytes_(bytes), owner_(std::move(owner)) {}

Arena::~Arena() {
  if (data_ != nullptr && owner_ == nullptr) munmap(data_, bytes_);
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      owner_(std::move(other.owner_)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(owner_, other.owner_);
  return *this;
}

}  // namespace ktserve
