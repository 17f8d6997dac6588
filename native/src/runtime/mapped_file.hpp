// Files in memory without a copy: mapped read-only, under a lease of the kernel's (fcntl(2), F_SETLEASE). Whoever opens
// such a file for writing, or shortens it, waits until this process has copied what it has mapped into memory of its
// own, at the same addresses; so a page that was mapped never becomes another, nor a SIGBUS.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace ktserve {

class MappedFiles;

class MappedFile {
 public:
  // Maps all of an open file. Throws std::system_error where there is no lease to be had (another user's file, one that
  // is open for writing, a file system without leases) or no mapping.
  MappedFile(std::shared_ptr<MappedFiles> files, int file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // The checksum (runtime/checksum.hpp) of the bytes from `offset` on, in three calls: `begin`, which does nothing if
  // it was called with that offset before; `sum` on as many threads as there are, each of which sums up the chunks that
  // no other has taken; `checksum`, which waits for all of them. What must come from the disk is read then. Throws
  // std::system_error if that fails.
  void begin(int64_t offset);
  void sum();
  uint64_t checksum();
  // Whether somebody waits to write to the file.
  bool wanted() const;
  std::string path() const;  // for people
  // Into memory of its own; then the lease is given back. Other threads may read meanwhile. Throws std::system_error.
  void copy();

 private:
  friend class MappedFiles;

  std::shared_ptr<MappedFiles> files_;
  std::atomic<int> file_;  // -1: copied
  int64_t bytes_ = 0;
  size_t mapped_ = 0;  // whole pages
  uint8_t* data_ = nullptr;
  dev_t device_ = 0;
  ino_t number_ = 0;

  void fetch(int64_t at, int64_t bytes) const;
  bool sum_one();

  std::mutex mutex_;  // of all below
  std::condition_variable summed_;
  int64_t offset_ = -1;  // where the sums begin; -1: none were asked for
  std::vector<uint64_t> sums_;
  size_t taken_ = 0, done_ = 0;
  int error_ = 0;  // of a chunk that could not be read
};

// Copies mapped files that others want to write to, on a thread of its own. It lives as long as one of its files.
class MappedFiles : public std::enable_shared_from_this<MappedFiles> {
 public:
  MappedFiles() = default;
  ~MappedFiles();
  MappedFiles(const MappedFiles&) = delete;
  MappedFiles& operator=(const MappedFiles&) = delete;

  // One that is there already if it is the same file's.
  std::shared_ptr<MappedFile> map(int file);
  // Maps the files at `paths` and sums them up from `offset` on, one after the other on `threads` threads of its own,
  // while the caller does something else. What cannot be mapped is left out. Once, and `drop` must follow.
  void read_ahead(const std::vector<std::string>& paths, int64_t offset, int threads);
  // Ends reading ahead; files that nobody has mapped by then are given up.
  void drop();
  // Copies all files, one after the other, on the thread that watches them: read from a file's pages of 4 KB, weights
  // come a quarter slower than from huge ones. One for which there is no memory stays mapped.
  void own();

 private:
  friend class MappedFile;
  void watch();
  void add(MappedFile* file);

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::vector<MappedFile*> mapped_;
  bool ends_ = false, owns_ = false;
  std::thread thread_;
  std::atomic<bool> stops_{false};
  std::vector<std::shared_ptr<MappedFile>> ahead_;
  std::vector<std::thread> readers_;
};

}  // namespace ktserve
