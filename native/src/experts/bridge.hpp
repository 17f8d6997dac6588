// Runs tasks for a device that can only read and write memory: a GPU stream, or a thread in its place.
//
//   entry (128 bytes of memory that both sides see)           device                        bridge thread
//   | posted u64 | pad 56 |  line 0: the device writes        posted = n   ───────────►    sees posted > served
//   | done u64 | error u32 | pad 52 |  line 1: both write                                   runs the task
//                                                             waits for done >= n  ◄────    done = n
//
// Numbers of an entry only grow and are never reset; a replayed graph takes them from a counter of its own. A task
// that fails writes its error before done, so that the waiter is freed, and its message waits in take_errors(). A
// waiter whose patience ends writes error = timed_out itself and goes on. The thread spins between begin_step and
// end_step only; otherwise it sleeps. Nothing here needs a CUDA header: pinned memory is memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/pool.hpp"

namespace ktserve {

struct BridgeEntry {
  alignas(64) uint64_t posted;
  alignas(64) uint64_t done;
  uint32_t error;
};
static_assert(sizeof(BridgeEntry) == 128);

enum class BridgeError : uint32_t { none = 0, failed = 1, timed_out = 2 };

class Bridge {
 public:
  // `memory`: `capacity` entries, zeroed, 64-byte aligned; must outlive the bridge. Tasks run on `pool`.
  Bridge(WorkerPool& pool, BridgeEntry* memory, int capacity);
  ~Bridge();
  Bridge(const Bridge&) = delete;
  Bridge& operator=(const Bridge&) = delete;

  // The entry's index. Throws std::length_error when all are taken.
  int add(std::function<void()> task);
  // Within a step (of which several may overlap) the thread polls. Also begins and ends the pool's step.
  void begin_step();
  void end_step();
  // Messages of failed tasks and of waiters that gave up, since the last call; error words are cleared.
  std::vector<std::string> take_errors();

  // What the device does, for a thread in its place. wait returns false and sets the error word after `timeout_s`.
  void post(int entry, uint64_t number);
  bool wait(int entry, uint64_t number, double timeout_s);
  int entries() const { return count_.load(); }

 private:
  struct Slot {
    std::function<void()> task;
    uint64_t served = 0;
  };

  void serve();
  bool poll();
  void run(int entry, uint64_t number);
  void check(int entry) const;

  WorkerPool& pool_;
  BridgeEntry* memory_;
  int capacity_;
  std::vector<Slot> slots_;  // capacity_ of them: never moved
  std::atomic<int> count_{0};
  std::atomic<int> steps_{0};
  std::atomic<uint32_t> epoch_{0};  // bumped by begin_step and stop: what the sleeping thread waits on
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // of errors_ and add
  std::vector<std::string> errors_;
  std::thread thread_;
};

}  // namespace ktserve
