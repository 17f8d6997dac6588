#include "runtime/pool.hpp"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>
#include <utility>

namespace ktserve {
namespace {

thread_local const WorkerPool* inside = nullptr;  // the pool whose work item this thread is running
thread_local int inside_as = 0;                   // and as which worker

// A call from inside a work item must find itself there, or it would wait for its own caller.
struct Inside {
  const WorkerPool* outer = inside;
  int outer_as = inside_as;
  Inside(const WorkerPool* pool, int worker) {
    inside = pool;
    inside_as = worker;
  }
  ~Inside() {
    inside = outer;
    inside_as = outer_as;
  }
};

uint64_t pack(uint64_t next, uint64_t end) {
  return next << 32 | end;
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

int64_t now_us() {
  using namespace std::chrono;
  return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

int64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// A CPU that the cgroup does not grant leaves the thread where the kernel puts it.
void bind_to(std::thread::native_handle_type thread, int cpu) {
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  pthread_setaffinity_np(thread, sizeof(set), &set);
}

size_t count(const PoolOptions& options) {
  size_t total = 0;
  for (const auto& group : options.groups) {
    if (group.empty()) throw std::invalid_argument("groups: a group without CPUs");
    total += group.size();
  }
  if (total < 1 || total > 1024) {
    throw std::invalid_argument("groups: " + std::to_string(total) + " CPUs; allowed are 1 to 1024");
  }
  return total;
}

}  // namespace

WorkerPool::WorkerPool(PoolOptions options)
    : workers_(count(options)),
      nodes_(std::move(options.nodes)),
      spin_us_(options.spin_us),
      pin_(options.pin),
      owner_pid_(getpid()) {
  if (options.spin_us < 0) throw std::invalid_argument("spin_us: " + std::to_string(options.spin_us) + " is negative");
  if (nodes_.empty()) nodes_.assign(options.groups.size(), -1);
  if (nodes_.size() != options.groups.size()) {
    throw std::invalid_argument("nodes: " + std::to_string(nodes_.size()) + "; allowed is one for each of " +
                                std::to_string(options.groups.size()) + " groups");
  }
  int index = 0;
  for (size_t g = 0; g < options.groups.size(); ++g) {
    group_first_.push_back(index);
    for (int cpu : options.groups[g]) {
      workers_[static_cast<size_t>(index)].group = static_cast<int>(g);
      workers_[static_cast<size_t>(index++)].cpu = cpu;
    }
  }
  group_first_.push_back(index);
  for (int w = 1; w < threads(); ++w) {
    Worker& worker = workers_[static_cast<size_t>(w)];
    worker.thread = std::thread([this, w] { serve(w); });
    if (pin_) bind_to(worker.thread.native_handle(), worker.cpu);
  }
}

WorkerPool::~WorkerPool() {
  if (getpid() != owner_pid_) {  // a forked child has the handles but not the threads
    for (auto& worker : workers_) {
      if (worker.thread.joinable()) worker.thread.detach();
    }
    return;
  }
  stop_.store(true);
  wake();
  for (auto& worker : workers_) {
    if (worker.thread.joinable()) worker.thread.join();
  }
}

void WorkerPool::adopt(std::thread::native_handle_type caller) const {
  if (pin_) bind_to(caller, workers_[0].cpu);
}

void WorkerPool::wake() {
  epoch_.fetch_add(1);                             // both seq_cst: either we see the parked worker
  if (parked_.load() > 0) futex_wake_all(epoch_);  // or it sees the new epoch
}

void WorkerPool::begin_step() {
  if (steps_.fetch_add(1) == 0 && threads() > 1) wake();  // within a step they are awake already, or a job wakes them
}

void WorkerPool::end_step() {
  if (steps_.fetch_sub(1) < 1) {
    steps_.fetch_add(1);
    throw std::logic_error("end_step without begin_step");
  }
}

std::vector<WorkerPool::Call> WorkerPool::take_recorded() {
  const std::lock_guard<std::mutex> lock(callers_);
  return std::exchange(recorded_, {});
}

void WorkerPool::share_out(int64_t items, const int64_t* group_first) {
  for (int g = 0; g < groups(); ++g) {
    const int64_t first_worker = group_first_[static_cast<size_t>(g)];
    const int64_t members = group_first_[static_cast<size_t>(g) + 1] - first_worker;
    int64_t low = items * first_worker / threads();
    int64_t high = items * (first_worker + members) / threads();
    if (group_first != nullptr) {
      low = group_first[g];
      high = group_first[g + 1];
    }
    for (int64_t i = 0; i < members; ++i) {
      const int64_t next = low + (high - low) * i / members;
      const int64_t end = low + (high - low) * (i + 1) / members;
      workers_[static_cast<size_t>(first_worker + i)].range.store(
          pack(static_cast<uint64_t>(next), static_cast<uint64_t>(end)), std::memory_order_release);
    }
  }
}

bool WorkerPool::claim(Worker& from, int64_t* item) {
  uint64_t range = from.range.load(std::memory_order_acquire);
  while ((range >> 32) < (range & 0xffffffffu)) {
    if (from.range.compare_exchange_weak(range, range + (uint64_t{1} << 32), std::memory_order_acq_rel,
                                         std::memory_order_acquire)) {
      *item = static_cast<int64_t>(range >> 32);
      return true;
    }
  }
  return false;
}

void WorkerPool::work(int self) {
  const Inside here(this, self);
  const int64_t began = recording_.load(std::memory_order_relaxed) ? now_ns() : 0;
  const Worker& me = workers_[static_cast<size_t>(self)];
  int64_t finished = 0;
  int64_t item = 0;
  auto drain = [&](int victim) {
    while (claim(workers_[static_cast<size_t>(victim)], &item)) {
      if (!failed_.load(std::memory_order_relaxed)) {
        try {
          body_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), item, self);
        } catch (...) {
          if (!failed_.exchange(true)) error_ = std::current_exception();
        }
      }
      ++finished;  // counted only when nothing is left to claim: until then this very job cannot end
    }
  };
  drain(self);
  const int first = group_first_[static_cast<size_t>(me.group)];
  const int members = group_first_[static_cast<size_t>(me.group) + 1] - first;
  for (int i = 1; i < members; ++i) drain(first + (self - first + i) % members);
  if (members < threads()) {
    for (int i = 1; i < threads(); ++i) {
      const int victim = (self + i) % threads();
      if (workers_[static_cast<size_t>(victim)].group != me.group) drain(victim);
    }
  }
  if (finished > 0 && began != 0) busy_ns_.fetch_add(now_ns() - began, std::memory_order_relaxed);
  if (finished > 0) done_.fetch_add(finished, std::memory_order_release);
}

void WorkerPool::wait_for_job(uint32_t seen) {
  int64_t deadline = 0;
  for (uint32_t spins = 1; epoch_.load(std::memory_order_acquire) == seen; ++spins) {
    const bool spinning = steps_.load(std::memory_order_relaxed) > 0;
    if (spinning && spins % 256 != 0) {
      _mm_pause();
      continue;
    }
    if (spinning) {
      const int64_t now = now_us();
      if (deadline == 0) deadline = now + spin_us_;
      if (now < deadline) continue;
    }
    parked_.fetch_add(1);
    while (epoch_.load() == seen) futex_wait(epoch_, seen);
    parked_.fetch_sub(1);
  }
}

void WorkerPool::serve(int self) {
  uint32_t seen = 0;
  while (true) {
    wait_for_job(seen);
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    work(self);
  }
}

void WorkerPool::wait_done(int64_t items) {
  for (uint32_t spins = 1; done_.load(std::memory_order_acquire) != items; ++spins) {
    if (spins % 1024 == 0) {
      sched_yield();  // the last work item may sit on a worker that was preempted by this very thread
    } else {
      _mm_pause();
    }
  }
}

void WorkerPool::run(int64_t items, const int64_t* group_first, Body body, void* context) {
  if (items <= 0) return;
  if (items > INT_MAX) throw std::invalid_argument("items: " + std::to_string(items) + " exceed 2^31 - 1");
  if (inside == this) {
    for (int64_t item = 0; item < items; ++item) body(context, item, inside_as);
    return;
  }
  if (getpid() != owner_pid_) throw std::logic_error("a worker pool does not survive fork; make it after");
  std::lock_guard<std::mutex> lock(callers_);
  const bool records = recording_.load(std::memory_order_relaxed);
  const int64_t began = records ? now_ns() : 0;
  if (threads() == 1 || items == 1) {
    const Inside here(this, 0);
    for (int64_t item = 0; item < items; ++item) body(context, item, 0);
    if (records) {
      const double seconds = static_cast<double>(now_ns() - began) * 1e-9;
      recorded_.push_back({items, seconds, seconds});
    }
    return;
  }
  busy_ns_.store(0, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  share_out(items, group_first);
  wake();
  work(0);
  wait_done(items);
  if (records) {
    const auto busy = static_cast<double>(busy_ns_.load(std::memory_order_relaxed));
    recorded_.push_back({items, static_cast<double>(now_ns() - began) * 1e-9, busy * 1e-9});
  }
  if (failed_.load(std::memory_order_acquire)) {
    std::exception_ptr error;
    std::swap(error, error_);
    std::rethrow_exception(error);
  }
}

}  // namespace ktserve
