// Files in memory without a copy: mapped read-only, under a lease of the kernel's (fcntl(2), F_SETLEASE). Whoever opens
// such a file for writing, or shortens it, waits until this process has copied what it has mapped into memory of its
// own, at the same addresses; so a page that was mapped never becomes another, nor a SIGBUS.
#pragma once

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
  // Reads [at, at + bytes) from the disk where it is not in memory yet. Throws std::system_error if that fails.
  void fetch(int64_t at, int64_t bytes) const;
  // Keeps it in memory; false where this user may not (RLIMIT_MEMLOCK).
  bool lock() const;
  // Whether somebody waits to write to the file.
  bool wanted() const;
  std::string path() const;  // for people
  // Into memory of its own; then the lease is given back. Other threads may read meanwhile. Throws std::system_error.
  void copy();

 private:
  std::shared_ptr<MappedFiles> files_;
  std::atomic<int> file_;  // -1: copied
  int64_t bytes_ = 0;
  size_t mapped_ = 0;  // whole pages
  uint8_t* data_ = nullptr;
};

// Copies mapped files that others want to write to, on a thread of its own. It lives as long as one of its files.
class MappedFiles : public std::enable_shared_from_this<MappedFiles> {
 public:
  MappedFiles() = default;
  ~MappedFiles();
  MappedFiles(const MappedFiles&) = delete;
  MappedFiles& operator=(const MappedFiles&) = delete;

  std::shared_ptr<MappedFile> map(int file);

 private:
  friend class MappedFile;
  void watch();

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::vector<MappedFile*> mapped_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace ktserve
