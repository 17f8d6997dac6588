#include "bridge/bridge.hpp"

#include <immintrin.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

namespace ktserve {
namespace {

using Clock = std::chrono::steady_clock;

enum Word : int { kPosted = 0, kDone = 1, kExpired = 2 };
constexpr size_t kMostFailures = 64;  // kept until someone asks; the first ones say most

static_assert(sizeof(std::atomic<int64_t>) == 8 && std::atomic<int64_t>::is_always_lock_free);

}  // namespace

Bridge::Bridge(WorkerPool& pool, int64_t* words, int capacity, int spin_us, int nap_us)
    : pool_(pool), words_(words), capacity_(capacity), spin_us_(spin_us), nap_us_(nap_us), owner_pid_(getpid()) {
  if (words == nullptr || reinterpret_cast<uintptr_t>(words) % 8 != 0) {
    throw std::invalid_argument("words: an address that is a multiple of 8 is needed");
  }
  if (capacity < 1) throw std::invalid_argument("capacity: " + std::to_string(capacity) + "; at least 1");
  if (spin_us < 0) throw std::invalid_argument("spin_us: " + std::to_string(spin_us) + "; at least 0");
  if (nap_us < 1) throw std::invalid_argument("nap_us: " + std::to_string(nap_us) + "; at least 1");
  channels_.resize(static_cast<size_t>(capacity));
  poller_ = std::thread([this] { poll(); });
  pool_.adopt(poller_.native_handle());
}

Bridge::~Bridge() {
  close();
}

void Bridge::close() {
  if (!poller_.joinable()) return;
  if (getpid() != owner_pid_) {  // a forked child has the handle but not the thread
    poller_.detach();
    return;
  }
  stop_.store(true);
  wake();
  poller_.join();
}

std::atomic<int64_t>& Bridge::word(int kind, int channel) const {
  return reinterpret_cast<std::atomic<int64_t>*>(words_)[static_cast<int64_t>(kind) * capacity_ + channel];
}

void Bridge::check(int channel) const {
  if (channel < 0 || channel >= channels()) {
    throw std::invalid_argument("channel: " + std::to_string(channel) + "; there are " + std::to_string(channels()));
  }
}

int Bridge::add(const Task& task) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int channel = channels();
  if (channel == capacity_) throw std::length_error("all " + std::to_string(capacity_) + " channels are taken");
  channels_[static_cast<size_t>(channel)].task = &task;
  count_.store(channel + 1, std::memory_order_release);
  return channel;
}

void Bridge::wake() {
  woken_.store(true);
  if (!parked_.load()) return;
  std::lock_guard<std::mutex> lock(mutex_);  // the poller waits, or has yet to look at woken_
  awake_.notify_one();
}

int64_t Bridge::post(int channel) {
  check(channel);
  if (!poller_.joinable()) throw std::logic_error("the bridge is closed");
  const int64_t number = word(kPosted, channel).load(std::memory_order_relaxed) + 1;
  word(kPosted, channel).store(number, std::memory_order_release);
  wake();
  return number;
}

Outcome Bridge::wait(int channel, double timeout_s) {
  check(channel);
  const int64_t number = word(kPosted, channel).load(std::memory_order_relaxed);
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
  for (uint32_t spins = 1;; ++spins) {
    const int64_t done = word(kDone, channel).load(std::memory_order_acquire);
    if (done >> 1 >= number) return (done & 1) != 0 ? Outcome::failed : Outcome::done;
    if (spins % 256 != 0) {
      _mm_pause();
      continue;
    }
    if (Clock::now() > deadline) {
      word(kExpired, channel).store(number, std::memory_order_release);
      return Outcome::expired;
    }
    std::this_thread::yield();  // the poller may need this very core
  }
}

std::vector<BridgeFailure> Bridge::take_failures() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<BridgeFailure> taken = std::exchange(failures_, {});
  for (int c = 0; c < channels(); ++c) {
    const int64_t expired = word(kExpired, c).load(std::memory_order_acquire);
    Channel& channel = channels_[static_cast<size_t>(c)];
    if (expired > channel.expired) {
      channel.expired = expired;
      taken.push_back({c, expired, "the pool did not answer in time"});
    }
  }
  return taken;
}

void Bridge::keep(BridgeFailure failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failures_.size() < kMostFailures) failures_.push_back(std::move(failure));
}

void Bridge::run(int channel, int64_t number) {
  Channel& c = channels_[static_cast<size_t>(channel)];
  bool failed = true;
  try {
    c.task->run();
    failed = false;
  } catch (const std::exception& error) {
    keep({channel, number, error.what()});
  } catch (...) {
    keep({channel, number, "unknown error"});
  }
  c.handled = number;
  word(kDone, channel).store(number * 2 + (failed ? 1 : 0), std::memory_order_release);
}

void Bridge::begin_pool_step() {
  if (!stepping_) pool_.begin_step();
  stepping_ = true;
}

bool Bridge::serve_all() {
  bool worked = false;
  const int count = channels();
  for (int c = 0; c < count; ++c) {
    const int64_t posted = word(kPosted, c).load(std::memory_order_acquire);
    if (posted <= channels_[static_cast<size_t>(c)].handled) continue;
    begin_pool_step();
    run(c, posted);
    worked = true;
  }
  return worked;
}

void Bridge::park() {
  if (stepping_) pool_.end_step();
  stepping_ = false;
  parked_.store(true);
  while (!woken_.load() && !stop_.load()) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (!woken_.load() && !stop_.load()) awake_.wait_for(lock, std::chrono::microseconds(nap_us_));
    }
    if (serve_all()) break;  // a post that nobody announced
  }
  parked_.store(false);
}

void Bridge::poll() {
  auto active = Clock::now() - std::chrono::hours(1);
  for (uint32_t spins = 1; !stop_.load(std::memory_order_relaxed); ++spins) {
    if (serve_all()) {
      active = Clock::now();
      continue;
    }
    if (woken_.load(std::memory_order_relaxed)) {
      woken_.store(false);
      begin_pool_step();
      active = Clock::now();
      continue;
    }
    _mm_pause();
    if (spins % 64 != 0 || Clock::now() - active < std::chrono::microseconds(spin_us_)) continue;
    park();
    active = Clock::now();
  }
  if (stepping_) pool_.end_step();
}

}  // namespace ktserve
