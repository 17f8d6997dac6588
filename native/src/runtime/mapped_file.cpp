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
#include <stdexcept>
#include <system_error>

#include "runtime/checksum.hpp"

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

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

size_t pages(int64_t bytes) {
  return (static_cast<size_t>(bytes) + kPage - 1) / kPage * kPage;
}

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
    device_ = state.st_dev;
    number_ = state.st_ino;
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

void MappedFile::begin(int64_t offset) {
  const std::lock_guard lock(mutex_);
  if (offset_ == offset) return;
  if (offset_ >= 0) throw std::invalid_argument("offset: the file is summed up from another");
  if (offset < 0 || offset > bytes_) throw std::invalid_argument("offset: " + std::to_string(offset));
  offset_ = offset;
  sums_.assign(static_cast<size_t>((bytes_ - offset + kSumChunk - 1) / kSumChunk), 0);
}

void MappedFile::sum() {
  while (sum_one()) {
  }
}

// False: there is none left.
bool MappedFile::sum_one() {
  size_t chunk;
  {
    const std::lock_guard lock(mutex_);
    if (taken_ == sums_.size()) return false;
    chunk = taken_++;
  }
  const int64_t at = offset_ + static_cast<int64_t>(chunk) * kSumChunk;
  const int64_t size = std::min(kSumChunk, bytes_ - at);
  uint64_t sum = 0;
  int error = 0;
  try {
    fetch(at, size);
    sum = chunk_sum(data_ + at, size, chunk);
  } catch (const std::system_error& failed) {
    error = failed.code().value();
  }
  const std::lock_guard lock(mutex_);
  sums_[chunk] = sum;
  if (error != 0) error_ = error;
  if (++done_ == sums_.size()) summed_.notify_all();
  return true;
}

uint64_t MappedFile::checksum() {
  std::unique_lock lock(mutex_);
  summed_.wait(lock, [this] { return done_ == sums_.size(); });
  if (error_ != 0) throw std::system_error(error_, std::generic_category(), "packed weights");
  return checksum_of(sums_.data(), static_cast<int64_t>(sums_.size()));
}

bool MappedFile::wanted() const {
  return file_ >= 0 && fcntl(file_, F_GETLEASE) != F_RDLCK;
}

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
  struct stat state;
  if (fstat(file, &state) < 0) fail("a descriptor");
  {
    const std::lock_guard lock(mutex_);
    for (const auto& held : ahead_) {
      if (held->device_ == state.st_dev && held->number_ == state.st_ino) return held;
    }
  }
  auto made = std::make_shared<MappedFile>(shared_from_this(), file);
  add(made.get());
  return made;
}

void MappedFiles::add(MappedFile* file) {
  const std::lock_guard lock(mutex_);
  mapped_.push_back(file);
  if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
}

void MappedFiles::read_ahead(const std::vector<std::string>& paths, int64_t offset, int threads) {
  std::vector<std::shared_ptr<MappedFile>> files;
  for (const std::string& path : paths) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    try {
      files.push_back(std::make_shared<MappedFile>(shared_from_this(), file));
      add(files.back().get());
      files.back()->begin(offset);
    } catch (const std::exception&) {
      if (!files.empty() && files.back()->offset_ < 0) files.pop_back();  // shorter than `offset`
    }
    close(file);
  }
  const std::lock_guard lock(mutex_);
  ahead_ = files;
  for (int i = 0; i < threads; ++i) {
    readers_.emplace_back([this, files] {
      for (const auto& file : files) {
        while (!stops_ && file->sum_one()) {
        }
      }
    });
  }
}

void MappedFiles::drop() {
  stops_ = true;
  std::vector<std::thread> readers;
  std::vector<std::shared_ptr<MappedFile>> files;
  {
    const std::lock_guard lock(mutex_);
    readers.swap(readers_);
    files.swap(ahead_);
  }
  for (std::thread& reader : readers) reader.join();
}

void MappedFiles::own() {
  {
    const std::lock_guard lock(mutex_);
    owns_ = true;
  }
  changed_.notify_all();
}

void MappedFiles::watch() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    bool copied = false;
    const auto began = std::chrono::steady_clock::now();
    for (MappedFile* file : mapped_) {
      const bool wanted = file->wanted();
      if (!wanted && (copied || !owns_ || file->file_ < 0)) continue;
      const std::string path = file->path();
      try {
        file->copy();
        copied = true;
      } catch (const std::system_error& error) {
        if (!wanted) {
          owns_ = false;
          continue;
        }
        // What is mapped would change, or be gone, while it is computed with.
        std::fprintf(stderr, "engine: %s is being changed and cannot be copied (%s): the engine ends\n", path.c_str(),
                     error.what());
        std::_Exit(1);
      }
      if (wanted) {
        std::fprintf(stderr, "engine: another program opens %s for writing: its weights were copied to memory\n",
                     path.c_str());
      }
    }
    // A fifth of a CPU, so that the first requests are not held up.
    const auto took = std::chrono::steady_clock::now() - began;
    changed_.wait_for(lock, copied ? 4 * took : std::chrono::nanoseconds(kLook), [this] { return ends_; });
  }
}

}  // namespace ktserve
