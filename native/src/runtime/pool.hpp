// A pool of worker threads that share out numbered work items.
//
//   caller (worker 0)      parallel_for(n, body) ──► ranges: | w0 | w1 | w2 | w3 |   one atomic {next, end} each
//   workers 1..T-1         each takes the next work item of its own range; when that is empty it steals from the
//                          others, those of its own NUMA group first. The call returns when all n are done.
//
// Between begin_step() and end_step() idle workers spin, so that a call costs about a microsecond; otherwise they
// park on a futex and cost nothing. A claim is one compare-and-swap on {next, end}, which describes itself: a
// worker that wakes late either claims a live work item of the job that runs now, or nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace ktserve {

struct PoolOptions {
  std::vector<std::vector<int>>
      groups;                   // CPU numbers per NUMA node; one worker per CPU listed, the caller is the first
  bool pin = false;             // bind each thread of the pool (not the caller) to its CPU
  int spin_us = 2000;           // within a step, a worker without work parks after this long
  std::vector<int> nodes = {};  // the system's number of each group's node, -1: unknown; or nothing
};

class WorkerPool {
 public:
  explicit WorkerPool(PoolOptions options);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()); }
  int groups() const { return static_cast<int>(group_first_.size()) - 1; }
  // The memory node of each group, for weights that its workers read; -1: wherever they touch it first.
  const std::vector<int>& nodes() const { return nodes_; }
  int group_of(int worker) const { return workers_[static_cast<size_t>(worker)].group; }

  // Runs body(item, worker) for every work item in [0, items) and returns when all have ended. The first
  // exception is thrown here; work items not yet begun are then dropped. Calls from several threads queue up; a call
  // from inside a work item runs inline.
  template <class F>
  void parallel_for(int64_t items, F&& body) {
    run(items, nullptr, &invoke<std::remove_reference_t<F>>, const_cast<void*>(static_cast<const void*>(&body)));
  }

  // The same with work items [first[g], first[g + 1]) begun by the workers of group g; first has groups() + 1 entries.
  template <class F>
  void parallel_for_groups(const std::vector<int64_t>& first, F&& body) {
    run(first.back(), first.data(), &invoke<std::remove_reference_t<F>>,
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Binds a thread that will call parallel_for (worker 0) to worker 0's CPU, if this pool binds its own.
  void adopt(std::thread::native_handle_type caller) const;

  // Idle workers spin between begin and end. Steps may overlap: the last end parks.
  void begin_step();
  void end_step();

  // A call of parallel_for: its seconds, and those that its workers were busy, added up.
  struct Call {
    int64_t items;
    double seconds, busy_seconds;
  };
  // Whether calls are recorded from here on; to be said between calls.
  void record(bool on) { recording_ = on; }
  std::vector<Call> take_recorded();

 private:
  using Body = void (*)(void* context, int64_t item, int worker);

  template <class F>
  static void invoke(void* context, int64_t item, int worker) {
    (*static_cast<F*>(context))(item, worker);
  }

  struct alignas(64) Worker {
    std::atomic<uint64_t> range{0};  // next in the high half, end in the low half
    int group = 0;
    int cpu = -1;
    std::thread thread;
  };

  void run(int64_t items, const int64_t* group_first, Body body, void* context);
  void share_out(int64_t items, const int64_t* group_first);
  bool claim(Worker& from, int64_t* item);
  void work(int worker);
  void serve(int worker);
  void wait_for_job(uint32_t seen);
  void wait_done(int64_t items);
  void wake();

  std::vector<Worker> workers_;
  std::vector<int> group_first_;  // first worker of each group, then threads()
  std::vector<int> nodes_;
  int spin_us_;
  bool pin_;
  int owner_pid_;
  std::mutex callers_;
  std::vector<Call> recorded_;
  alignas(64) std::atomic<uint32_t> epoch_{0};  // bumped for every job, begin_step and stop: what workers wait on
  std::atomic<int> parked_{0};
  std::atomic<int> steps_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int64_t> done_{0};
  std::atomic<bool> failed_{false};
  std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::exception_ptr error_;
  std::atomic<bool> recording_{false};
  std::atomic<int64_t> busy_ns_{0};
};

}  // namespace ktserve
