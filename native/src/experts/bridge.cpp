#include "experts/bridge.hpp"

#include <immintrin.h>
#include <pthread.h>

#include <chrono>
#include <exception>
#include <stdexcept>

namespace ktserve {
namespace {

uint64_t read_number(uint64_t& word) {
  return std::atomic_ref<uint64_t>(word).load(std::memory_order_acquire);
}
void write_number(uint64_t& word, uint64_t n) {
  std::atomic_ref<uint64_t>(word).store(n, std::memory_order_release);
}
void write_error(BridgeEntry& entry, BridgeError error) {
  std::atomic_ref<uint32_t>(entry.error).store(static_cast<uint32_t>(error), std::memory_order_release);
}

}  // namespace

Bridge::Bridge(WorkerPool& pool, BridgeEntry* memory, int capacity)
    : pool_(pool), memory_(memory), capacity_(capacity) {
  if (memory == nullptr || reinterpret_cast<uintptr_t>(memory) % 64 != 0) {
    throw std::invalid_argument("memory: the bridge's entries need 64-byte aligned memory");
  }
  if (capacity < 1) throw std::invalid_argument("capacity: " + std::to_string(capacity) + "; at least 1");
  slots_.resize(static_cast<size_t>(capacity));
  thread_ = std::thread([this] { serve(); });
  pool_.adopt(thread_.native_handle());
}

Bridge::~Bridge() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  thread_.join();
  while (steps_.fetch_sub(1) > 0) pool_.end_step();
}

int Bridge::add(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int index = count_.load();
  if (index == capacity_) throw std::length_error("the bridge's " + std::to_string(capacity_) + " entries are taken");
  slots_[static_cast<size_t>(index)] = {std::move(task), read_number(memory_[index].posted)};
  count_.store(index + 1, std::memory_order_release);
  return index;
}

void Bridge::begin_step() {
  pool_.begin_step();
  steps_.fetch_add(1);
  epoch_.fetch_add(1);
  epoch_.notify_all();
}

void Bridge::end_step() {
  if (steps_.fetch_sub(1) < 1) {
    steps_.fetch_add(1);
    throw std::logic_error("end_step without begin_step");
  }
  pool_.end_step();
}

void Bridge::run(int entry, uint64_t number) {
  BridgeEntry& words = memory_[entry];
  try {
    slots_[static_cast<size_t>(entry)].task();
  } catch (const std::exception& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    errors_.push_back("task " + std::to_string(entry) + ", call " + std::to_string(number) + ": " + error.what());
    write_error(words, BridgeError::failed);
  }
  write_number(words.done, number);
}

bool Bridge::poll() {
  bool any = false;
  const int count = count_.load(std::memory_order_acquire);
  for (int i = 0; i < count; ++i) {
    const uint64_t posted = read_number(memory_[i].posted);
    uint64_t& served = slots_[static_cast<size_t>(i)].served;
    if (posted == served) continue;
    served = posted;
    run(i, posted);
    any = true;
  }
  return any;
}

void Bridge::serve() {
  while (true) {
    const uint32_t seen = epoch_.load();
    if (stop_.load()) return;
    if (steps_.load() == 0) {
      // What was posted before the last end_step is still served.
      if (!poll()) epoch_.wait(seen);
      continue;
    }
    if (!poll()) _mm_pause();
  }
}

std::vector<std::string> Bridge::take_errors() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> errors = std::move(errors_);
  errors_.clear();
  for (int i = 0; i < count_.load(); ++i) {
    const uint32_t code = std::atomic_ref<uint32_t>(memory_[i].error).exchange(0);
    if (code == static_cast<uint32_t>(BridgeError::timed_out)) {
      errors.push_back("task " + std::to_string(i) + ": no answer in time");
    }
  }
  return errors;
}

void Bridge::check(int entry) const {
  if (entry < 0 || entry >= count_.load()) {
    throw std::out_of_range("entry: " + std::to_string(entry) + "; there are " + std::to_string(count_.load()));
  }
}

void Bridge::post(int entry, uint64_t number) {
  check(entry);
  if (number <= read_number(memory_[entry].posted)) {
    throw std::invalid_argument("number: " + std::to_string(number) + " is not greater than the last one posted");
  }
  write_number(memory_[entry].posted, number);
}

bool Bridge::wait(int entry, uint64_t number, double timeout_s) {
  check(entry);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  for (uint32_t spins = 1; read_number(memory_[entry].done) < number; ++spins) {
    _mm_pause();
    if (spins % 64 == 0 && std::chrono::steady_clock::now() > end) {
      write_error(memory_[entry], BridgeError::timed_out);
      return false;
    }
  }
  return true;
}

}  // namespace ktserve
