#include "runtime/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <system_error>

#ifndef F_SETSIG
#define F_SETSIG 10
#endif
#ifndef F_SETLEASE
#define F_SETLEASE 1024
#define F_GETLEASE 1025
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MREMAP_FIXED
#define MREMAP_MAYMOVE 1
#define MREMAP_FIXED 2
#endif

namespace ktserve {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr auto kLook = std::chrono::milliseconds(200);  // the kernel waits for 45 s (lease-break-time)

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

size_t pages(int64_t bytes) { return (static_cast<size_t>(bytes) + kPage - 1) / kPage * kPage; }

// Addresses that begin on a huge page, reserved.
uint8_t* reserve(size_t bytes) {
  void* got = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) fail("addresses for packed weights");
  const uintptr_t begin = reinterpret_cast<uintptr_t>(got);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > begin) munmap(got, aligned - begin);
  munmap(reinterpret_cast<void*>(aligned + bytes), begin + kHugePage - aligned);
  return reinterpret_cast<uint8_t*>(aligned);
}

}  // namespace

MappedFile::MappedFile(std::shared_ptr<MappedFiles> files, int file)
    : files_(std::move(files)), file_(fcntl(file, F_DUPFD_CLOEXEC, 0)) {
  const int held = file_;
  if (held < 0) fail("a descriptor");
  try {
    // The signal of a lease that is to be given back: SIGIO would end the process, SIGURG is ignored.
    if (fcntl(held, F_SETSIG, SIGURG) < 0 || fcntl(held, F_SETLEASE, F_RDLCK) < 0) fail("a lease");
    struct stat state;
    if (fstat(held, &state) < 0) fail("its size");
    if (state.st_size < 1) throw std::system_error(EINVAL, std::generic_category(), "an empty file");
    bytes_ = state.st_size;
    mapped_ = pages(bytes_);
    data_ = reserve(mapped_);
    if (mmap(data_, mapped_, PROT_READ, MAP_SHARED | MAP_FIXED, held, 0) == MAP_FAILED) {
      munmap(data_, mapped_);
      fail("a mapping");
    }
  } catch (...) {
    close(held);
    throw;
  }
  madvise(data_, mapped_, MADV_HUGEPAGE);  // a hint: where the file's pages are that large
}

MappedFile::~MappedFile() {
  {
    const std::lock_guard lock(files_->mutex_);
    std::erase(files_->mapped_, this);
  }
  munmap(data_, mapped_);
  if (file_ >= 0) close(file_);
}

void MappedFile::fetch(int64_t at, int64_t bytes) const {
  const int64_t begin = at / static_cast<int64_t>(kPage) * static_cast<int64_t>(kPage);
  const size_t size = pages(std::min(at + bytes, bytes_) - begin);
  while (madvise(data_ + begin, size, MADV_POPULATE_READ) < 0) {
    if (errno != EINTR && errno != EAGAIN) fail("packed weights");
  }
}

bool MappedFile::lock() const { return mlock(data_, mapped_) == 0; }

bool MappedFile::wanted() const { return file_ >= 0 && fcntl(file_, F_GETLEASE) != F_RDLCK; }

std::string MappedFile::path() const {
  char path[4096];
  const ssize_t size = readlink(("/proc/self/fd/" + std::to_string(file_)).c_str(), path, sizeof path);
  return size < 0 ? "packed weights" : std::string(path, static_cast<size_t>(size));
}

void MappedFile::copy() {
  if (file_ < 0) return;
  uint8_t* made = reserve(mapped_);
  if (mmap(made, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
    munmap(made, mapped_);
    fail("memory for packed weights");
  }
  madvise(made, mapped_, MADV_HUGEPAGE);
  std::memcpy(made, data_, static_cast<size_t>(bytes_));
  // In one step for every other thread: one that reads now has the old pages or waits for the new ones, which hold the
  // same bytes.
  if (mremap(made, mapped_, mapped_, MREMAP_MAYMOVE | MREMAP_FIXED, data_) == MAP_FAILED) {
    munmap(made, mapped_);
    fail("memory for packed weights");
  }
  close(file_.exchange(-1));
}

MappedFiles::~MappedFiles() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<MappedFile> MappedFiles::map(int file) {
  auto made = std::make_shared<MappedFile>(shared_from_this(), file);
  const std::lock_guard lock(mutex_);
  mapped_.push_back(made.get());
  if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
  return made;
}

void MappedFiles::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [this] { return ends_; })) {
    for (MappedFile* file : mapped_) {
      if (!file->wanted()) continue;
      const std::string path = file->path();
      try {
        file->copy();
      } catch (const std::system_error& error) {
        // What is mapped would change, or be gone, while it is computed with.
        std::fprintf(stderr, "engine: %s is being changed and cannot be copied (%s): the engine ends\n", path.c_str(),
                     error.what());
        std::_Exit(1);
      }
      std::fprintf(stderr, "engine: another program opens %s for writing: its weights were copied to memory\n",
                   path.c_str());
    }
  }
}

}  // namespace ktserve
