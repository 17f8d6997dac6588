#include <linux/futex.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "runtime/isa.hpp"
#include "runtime/mapped_file.hpp"
#include "runtime/pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {
namespace {

double now_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Which worker ran each work item; each spins for work_us, and work item `fail` throws.
std::vector<int> trace(WorkerPool& pool, int64_t items, double work_us, int64_t fail) {
  std::vector<int> ran(static_cast<size_t>(items), -1);
  pool.parallel_for(items, [&](int64_t item, int worker) {
    const double until = now_s() + work_us * 1e-6;
    while (work_us > 0 && now_s() < until) {
    }
    if (item == fail) throw std::runtime_error("work item " + std::to_string(item) + " failed");
    if (ran[static_cast<size_t>(item)] != -1) throw std::logic_error("a work item ran twice");
    ran[static_cast<size_t>(item)] = worker;
  });
  return ran;
}

// Seconds of each of `calls` empty jobs with one work item per worker, `gap_us` of idling before each.
std::vector<double> latencies(WorkerPool& pool, int calls, double gap_us) {
  std::vector<double> seconds;
  for (int i = 0; i < calls; ++i) {
    const double until = now_s() + gap_us * 1e-6;
    while (now_s() < until) {
    }
    const double begin = now_s();
    pool.parallel_for(pool.threads(), [](int64_t, int) {});
    seconds.push_back(now_s() - begin);
  }
  return seconds;
}

// Seconds from waking a thread that sleeps on a futex to its answer, `calls` times: what a parked pool costs at least.
std::vector<double> futex_wakes(int calls, double gap_us) {
  std::atomic<uint32_t> word{0};
  std::atomic<int> answered{0};
  std::thread sleeper([&] {
    for (int i = 1; i <= calls; ++i) {
      while (word.load() < static_cast<uint32_t>(i)) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, i - 1, nullptr, nullptr, 0);
      }
      answered.store(i);
    }
  });
  std::vector<double> seconds;
  for (int i = 1; i <= calls; ++i) {
    const double until = now_s() + gap_us * 1e-6;
    while (now_s() < until) {
    }
    const double begin = now_s();
    word.store(static_cast<uint32_t>(i));
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    while (answered.load() < i) {
    }
    seconds.push_back(now_s() - begin);
  }
  sleeper.join();
  return seconds;
}

}  // namespace

void bind_pack(nb::module_& module);

void bind_core(nb::module_& module) {
  bind_pack(module);
  module.def("best_isa", [] { return isa_name(best_isa()); }, "Newest instruction set of this machine, or 'none'.");
  module.def(
      "choose_isa", [](const std::string& name) { return isa_name(choose_isa(name)); }, "name"_a = "",
      "The instruction set a name or KTSERVE_ISA selects. ValueError if unknown or newer than the machine.");

  nb::class_<WorkerPool>(module, "WorkerPool", "Threads that share out numbered work items; the caller is worker 0.")
      .def(
          "__init__",
          [](WorkerPool* self, std::vector<std::vector<int>> groups, bool pin, int spin_us, std::vector<int> nodes) {
            new (self) WorkerPool(PoolOptions{std::move(groups), pin, spin_us, std::move(nodes)});
          },
          "groups"_a, "pin"_a = false, "spin_us"_a = 2000, "nodes"_a = std::vector<int>{})
      .def_prop_ro("threads", &WorkerPool::threads)
      .def_prop_ro("groups", &WorkerPool::groups)
      .def_prop_ro("nodes", &WorkerPool::nodes, "The memory node of each group; -1: not known.")
      .def("group_of", &WorkerPool::group_of, "worker"_a)
      .def("begin_step", &WorkerPool::begin_step, nb::call_guard<nb::gil_scoped_release>())
      .def("end_step", &WorkerPool::end_step, nb::call_guard<nb::gil_scoped_release>())
      .def("trace", &trace, "items"_a, "work_us"_a = 0.0, "fail"_a = -1, nb::call_guard<nb::gil_scoped_release>(),
           "The worker that ran each work item; work item `fail` raises.")
      .def("latencies", &latencies, "calls"_a, "gap_us"_a = 0.0, nb::call_guard<nb::gil_scoped_release>(),
           "Seconds of each of `calls` empty jobs, after `gap_us` without work.")
      .def("record", &WorkerPool::record, "on"_a, "Whether jobs are recorded from here on; for benchmarks.")
      .def(
          "take_recorded",
          [](WorkerPool& pool) {
            std::vector<std::tuple<int64_t, double, double>> calls;
            for (const WorkerPool::Call& c : pool.take_recorded()) {
              calls.emplace_back(c.items, c.seconds, c.busy_seconds);
            }
            return calls;
          },
          nb::call_guard<nb::gil_scoped_release>(),
          "Of each job that was recorded since the last call: work items, seconds, and seconds of all workers.");
  nb::class_<MappedFile>(module, "MappedFile", "A file in memory without a copy, which nobody may change meanwhile.")
      .def_prop_ro("num_bytes", &MappedFile::bytes)
      .def_prop_ro("wanted", &MappedFile::wanted, "Whether another program waits to write to it.")
      .def("copy", &MappedFile::copy, nb::call_guard<nb::gil_scoped_release>(),
           "Into memory of its own, at the same addresses; others may write to the file then.");
  nb::class_<MappedFiles>(module, "MappedFiles", "Mapped files; those that others want to write to are copied.")
      .def(nb::new_([] { return std::make_shared<MappedFiles>(); }))
      .def(
          "map", &MappedFiles::map, "file"_a,
          "All of an open file, read-only. RuntimeError where its changes could not be held up: no lease is to be had.")
      .def("read_ahead", &MappedFiles::read_ahead, "paths"_a, "offset"_a, "threads"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Maps files and sums them up from `offset` on, on threads of its own, for `map`. Once; `drop` must follow.")
      .def("drop", &MappedFiles::drop, nb::call_guard<nb::gil_scoped_release>(),
           "Ends reading ahead; files that nobody has mapped by then are given up.")
      .def("own", &MappedFiles::own, "Copies all files to huge pages, one after the other, on a thread.");
  module.def("futex_wakes", &futex_wakes, "calls"_a, "gap_us"_a = 0.0, nb::call_guard<nb::gil_scoped_release>(),
             "Seconds of each of `calls` wakes of one sleeping thread, answer included: the floor of a parked pool.");
}

}  // namespace ktserve
