#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "bridge/bridge.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {
namespace {

// Does nothing for a while, or fails: the handshake's cost, its time-out and its errors are measured with it.
struct IdleTask : Task {
  double seconds;
  std::string error;

  IdleTask(double seconds, std::string error) : seconds(seconds), error(std::move(error)) {}

  void run() const override {
    if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    if (!error.empty()) throw std::runtime_error(error);
  }
};

// A thread in a stream's place: posts and waits for each channel in turn, `rounds` times. Seconds of each round.
std::vector<double> drive(Bridge& bridge, const std::vector<int>& channels, int rounds, double timeout_s) {
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int channel : channels) {
      bridge.post(channel);
      if (bridge.wait(channel, timeout_s) != Outcome::done) throw std::runtime_error("a channel failed");
    }
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return seconds;
}

}  // namespace

void bind_bridge(nb::module_& module) {
  const auto free_gil = nb::call_guard<nb::gil_scoped_release>();

  nb::class_<Task>(module, "Task", "Work that a bridge replays.");
  nb::class_<IdleTask, Task>(module, "IdleTask", "Sleeps, then fails if `error` is not empty.")
      .def(nb::init<double, std::string>(), "seconds"_a = 0.0, "error"_a = "");

  nb::class_<Bridge>(module, "Bridge", "Runs tasks whenever a stream posts a number in their channel's word.")
      .def(
          "__init__",
          [](Bridge* self, WorkerPool& pool, uintptr_t words, int capacity, int spin_us, int nap_us) {
            new (self) Bridge(pool, reinterpret_cast<int64_t*>(words), capacity, spin_us, nap_us);
          },
          "pool"_a, "words"_a, "capacity"_a, "spin_us"_a = 5000, "nap_us"_a = 2000, nb::keep_alive<1, 2>(),
          "`words`: address of int64 [3][capacity], zero: posted, done (2 n + failed), expired.")
      .def("add", &Bridge::add, "task"_a, nb::keep_alive<1, 2>(), "The channel of a task.")
      .def_prop_ro("channels", &Bridge::channels)
      .def_prop_ro("parked", &Bridge::parked)
      .def("wake", &Bridge::wake, free_gil, "Announces posts, so that the poller is awake for the first of them.")
      .def("post", &Bridge::post, "channel"_a, free_gil, "A stream's part on the CPU: the number posted.")
      .def(
          "wait",
          [](Bridge& bridge, int channel, double timeout_s) {
            return static_cast<int>(bridge.wait(channel, timeout_s));
          },
          "channel"_a, "timeout_s"_a, free_gil, "For what was posted last: 0 done, 1 failed, 2 expired.")
      .def(
          "take_failures",
          [](Bridge& bridge) {
            std::vector<std::tuple<int, int64_t, std::string>> out;
            for (auto& f : bridge.take_failures()) out.emplace_back(f.channel, f.number, f.message);
            return out;
          },
          "(channel, number, message) of what failed or expired since the last call.")
      .def("drive", &drive, "channels"_a, "rounds"_a, "timeout_s"_a = 10.0, free_gil,
           "A thread in a stream's place: seconds of each round of post and wait over the channels.")
      .def("close", &Bridge::close, free_gil, "Ends the poller.");
}

}  // namespace ktserve
