// The handshake between a stream and the pool: no host function, no lock, no CUDA header. Pinned memory is memory.
//
//   stream                       words of channel c              poller (worker 0 of the pool)
//
//   post: writes posted = n  --> | posted  n             | -->   sees posted > handled and runs the task
//   ... other work ...
//   waits for done >= 2n     <-- | done    2n + failed   | <--   writes done; the message of a failure is kept
//   gave up waiting          --> | expired n             | -->   read by whoever asks for failures
//
// Numbers only grow and no word is ever reset, so a replay needs no cleaning up and a late answer to an old number
// is never taken for the answer to a new one. A stream's numbers come from a counter of its own on the device.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/pool.hpp"
#include "runtime/task.hpp"

namespace ktserve {

struct BridgeFailure {
  int channel;
  int64_t number;
  std::string message;
};

enum class Outcome : int { done = 0, failed = 1, expired = 2 };

class Bridge {
 public:
  // `words`: int64 [3][capacity], zero: posted, done, expired; they outlive the bridge. While posts come at most
  // `spin_us` apart, the poller spins and the pool's workers with it; then it parks, looking once in `nap_us`, until
  // wake().
  Bridge(WorkerPool& pool, int64_t* words, int capacity, int spin_us, int nap_us);
  ~Bridge();
  Bridge(const Bridge&) = delete;
  Bridge& operator=(const Bridge&) = delete;

  // A channel for a task that outlives the bridge. Throws std::length_error when all are taken.
  int add(const Task& task);
  int channels() const { return count_.load(std::memory_order_acquire); }

  // Call before a step is launched: the poller is then up by the time of its first post.
  void wake();

  // The stream's part, for a caller on the CPU, one thread per channel at a time. wait is for the last number.
  int64_t post(int channel);
  Outcome wait(int channel, double timeout_s);

  std::vector<BridgeFailure> take_failures();
  bool parked() const { return parked_.load(); }
  void close();

 private:
  struct Channel {
    const Task* task = nullptr;
    int64_t handled = 0;  // the poller's
    int64_t expired = 0;  // reported already
  };

  std::atomic<int64_t>& word(int kind, int channel) const;
  void check(int channel) const;
  void poll();
  bool serve_all();
  void run(int channel, int64_t number);
  void begin_pool_step();
  void park();
  void keep(BridgeFailure failure);

  WorkerPool& pool_;
  int64_t* words_;
  int capacity_;
  int spin_us_, nap_us_;
  int owner_pid_;
  std::vector<Channel> channels_;
  std::atomic<int> count_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> woken_{false};
  std::atomic<bool> parked_{true};
  bool stepping_ = false;  // the poller holds the pool's workers awake
  std::mutex mutex_;       // of what follows
  std::condition_variable awake_;
  std::vector<BridgeFailure> failures_;
  std::thread poller_;
};

}  // namespace ktserve
