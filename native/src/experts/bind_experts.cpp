#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <tuple>

#include "experts/moe.hpp"
#include "packing/packed_file.hpp"
#include "runtime/address.hpp"
#include "runtime/isa.hpp"
#include "runtime/task.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {
namespace {

// A call that can be replayed: a layer over a set of buffers. Python keeps the buffers alive.
struct MoeTask : Task {
  std::shared_ptr<MoeRunner> runner;
  std::shared_ptr<ExpertLayer> layer;
  MoeBuffers buffers;

  MoeTask(std::shared_ptr<MoeRunner> runner, std::shared_ptr<ExpertLayer> layer, const MoeBuffers& buffers)
      : runner(std::move(runner)), layer(std::move(layer)), buffers(buffers) {}

  void run() const override { runner->forward(*layer, buffers); }
};

LayerShape shape_of(int64_t experts, int64_t hidden, int64_t intermediate, const std::vector<std::string>& formats,
                    int shards) {
  if (formats.size() != 3) throw std::invalid_argument("formats: three are needed, of gate, up and down");
  return {experts,
          hidden,
          intermediate,
          {format_named(formats[0]), format_named(formats[1]), format_named(formats[2])},
          shards};
}

std::shared_ptr<ExpertLayer> make_layer(int64_t experts, int64_t hidden, int64_t intermediate,
                                        const std::vector<std::string>& formats, int shards,
                                        const std::vector<int>& nodes, bool biased, float limit, float alpha) {
  LayerShape shape = shape_of(experts, hidden, intermediate, formats, shards);
  shape.biased = biased;
  shape.activation = {limit, alpha};
  return std::make_shared<ExpertLayer>(shape, nodes);
}

void check_projection(int projection) {
  if (projection < 0 || projection > 2)
    throw std::invalid_argument("projection: allowed are 0 (gate), 1 (up), 2 (down)");
}

void load(ExpertLayer& layer, WorkerPool& pool, int projection, const std::string& type, int64_t first,
          const std::vector<uintptr_t>& data, int file) {
  check_projection(projection);
  std::vector<SourceRows> rows;
  for (uintptr_t place : data) {
    rows.push_back(file < 0 ? SourceRows(at<const uint8_t>(place)) : SourceRows(file, static_cast<int64_t>(place)));
  }
  layer.load(pool, projection, source_type(type), first, rows);
}

void set_lora(ExpertLayer& layer, WorkerPool& pool, int slot, int64_t rank, bool bf16, std::array<uintptr_t, 3> a,
              std::array<uintptr_t, 3> b, std::array<float, 3> scales) {
  LoraSource source{};
  source.rank = rank;
  source.bf16 = bf16;
  for (size_t p = 0; p < 3; ++p) {
    source.a[p] = at<const void>(a[p]);
    source.b[p] = at<const void>(b[p]);
    source.scales[p] = scales[p];
  }
  layer.set_lora(pool, slot, source);
}

void dequantise(const ExpertLayer& layer, int projection, int64_t expert, uintptr_t out) {
  const int64_t k = layer.inner_of(projection);
  for (int64_t p = 0; p < layer.rows_of(projection) / kPanel; ++p) {
    unpack_rows(layer.shape().formats[projection], layer.panel(projection, expert, p), k, 0, kPanel,
                at<float>(out) + p * kPanel * k);
  }
}

MoeTask make_task(std::shared_ptr<MoeRunner> runner, std::shared_ptr<ExpertLayer> layer, uintptr_t bsz, uintptr_t ids,
                  uintptr_t weights, uintptr_t slots, uintptr_t hidden, uintptr_t out, int64_t max_rows, int64_t top_k,
                  bool bf16, uintptr_t touched) {
  if (max_rows < 1) throw std::invalid_argument("max_rows: " + std::to_string(max_rows) + "; at least 1");
  if (top_k < 1 || top_k > kMostTopK) {
    throw std::invalid_argument("top_k: " + std::to_string(top_k) + "; allowed are 1 to " + std::to_string(kMostTopK));
  }
  return {std::move(runner), std::move(layer),
          MoeBuffers{at<const int32_t>(bsz), at<const int64_t>(ids), at<const float>(weights), at<const int32_t>(slots),
                     at<const void>(hidden), at<void>(out), max_rows, top_k, bf16, at<int64_t>(touched)}};
}

}  // namespace

void bind_experts(nb::module_& module) {
  const auto free_gil = nb::call_guard<nb::gil_scoped_release>();

  nb::class_<ExpertLayer>(module, "ExpertLayer", "One layer's routed experts, packed, and their adapters.")
      .def(
          nb::new_(&make_layer), "experts"_a, "hidden"_a, "intermediate"_a, "formats"_a, "shards"_a = 1,
          "nodes"_a = std::vector<int>{}, nb::kw_only(), "biased"_a = false, "limit"_a = 0.0f, "alpha"_a = 1.0f,
          "`nodes`: the memory node of each shard, or none. `biased`: projections have biases. `limit` and `alpha`: of "
          "the clamped activation; 0: silu(gate) up.")
      .def(
          "load", &load, "pool"_a, "projection"_a, "type"_a, "first"_a, "data"_a, "file"_a = -1, free_gil,
          "Packs experts first.. of projection 0 (gate), 1 (up) or 2 (down) from the addresses of their rows, or, with "
          "`file`, from where they begin in it.")
      .def(
          "load_bias",
          [](ExpertLayer& layer, int projection, uintptr_t values) {
            check_projection(projection);
            layer.load_bias(projection, at<const float>(values));
          },
          "projection"_a, "values"_a, free_gil, "Copies a projection's biases: float32 [experts, out].")
      .def("set_lora", &set_lora, "pool"_a, "slot"_a, "rank"_a, "bf16"_a, "a"_a, "b"_a, "scales"_a, free_gil,
           "Copies an adapter into a slot: addresses of A [E, r, in] and B [E, out, r] of gate, up, down.")
      .def("clear_lora", &ExpertLayer::clear_lora, "slot"_a)
      .def("dequantise", &dequantise, "projection"_a, "expert"_a, "out"_a, free_gil, "Float32 [out, in] of one expert.")
      .def(
          "shard",
          [](const ExpertLayer& layer, int shard) {
            if (shard < 0 || shard >= layer.shape().shards) throw nb::index_error("shard");
            const Arena& arena = layer.shard(shard);
            return std::make_tuple(reinterpret_cast<uintptr_t>(arena.data()), arena.bytes());
          },
          "shard"_a, "Address and bytes of a NUMA shard's memory.")
      .def(
          "write",
          [](const ExpertLayer& layer, WorkerPool& pool, int file, int64_t offset) {
            return write_spans(pool, layer.spans(), file, offset);
          },
          "pool"_a, "file"_a, "offset"_a, free_gil, "Writes the packed memory to a file descriptor; its checksum.")
      .def(
          "read",
          [](ExpertLayer& layer, WorkerPool& pool, int file, int64_t offset) {
            return read_spans(pool, layer.spans(), file, offset);
          },
          "pool"_a, "file"_a, "offset"_a, free_gil, "Fills the packed memory from a file; the checksum of what came.")
      .def("adopt", &ExpertLayer::adopt, "pool"_a, "file"_a, "offset"_a, free_gil,
           "Takes the packed memory from a mapped file, without a copy; the checksum of what is there.")
      .def_prop_ro("shards", [](const ExpertLayer& layer) { return layer.shape().shards; })
      .def_prop_ro(
          "formats",
          [](const ExpertLayer& layer) {
            std::vector<std::string> names;
            for (Format format : layer.shape().formats) names.emplace_back(info(format).name);
            return names;
          },
          "Packed formats of gate, up, down.")
      .def_prop_ro("choices", &ExpertLayer::choices, "How often rows have chosen each expert in all tasks so far.")
      .def_prop_ro("num_bytes", &ExpertLayer::bytes);

  module.def(
      "expert_scratch_bytes",
      [](const std::string& isa, bool deterministic, const std::vector<int>& pool, int64_t hidden, int64_t intermediate,
         const std::vector<std::string>& formats, int64_t rows, int64_t top_k, int64_t rank) {
        int threads = 0;
        for (int workers : pool) threads += workers;
        const LayerShape shape = shape_of(1, hidden, intermediate, formats, static_cast<int>(pool.size()));
        return MoeRunner::scratch_bytes(choose_isa(isa), deterministic, threads, shape, rows, top_k, rank);
      },
      "isa"_a, "deterministic"_a, "pool"_a, "hidden"_a, "intermediate"_a, "formats"_a, "rows"_a, "top_k"_a, "rank"_a,
      "The most scratch memory that a MoeRunner takes for calls of up to `rows` rows. pool: workers of each node; "
      "rank: "
      "the largest of the adapters, 0: none.");

  nb::class_<MoeRunner>(module, "MoeRunner", "Computes expert tasks on a pool, one at a time.")
      .def(
          "__init__",
          [](MoeRunner* self, WorkerPool& pool, const std::string& isa, bool deterministic) {
            new (self) MoeRunner(pool, choose_isa(isa), deterministic);
          },
          "pool"_a, "isa"_a = "", "deterministic"_a = false, nb::keep_alive<1, 2>())
      .def_prop_ro("deterministic", &MoeRunner::deterministic)
      .def_prop_ro("weight_bytes_read", &MoeRunner::weight_bytes_read,
                   "Bytes of base weights that all calls so far have gone through: an expert's once for all rows of a "
                   "work item, whatever adapters they have.")
      .def_prop_ro("isa", [](const MoeRunner& runner) { return isa_name(runner.isa()); });

  nb::class_<MoeTask, Task>(module, "MoeTask", "A layer over a set of buffers; replayed with whatever bsz says.")
      .def(nb::new_(&make_task), "runner"_a, "layer"_a, nb::kw_only(), "bsz"_a, "ids"_a, "weights"_a, "slots"_a,
           "hidden"_a, "out"_a, "max_rows"_a, "top_k"_a, "bf16"_a, "touched"_a = 0,
           "Addresses of bsz int32 [1], ids int64 [max_rows, top_k] (-1: skipped), weights float32 [max_rows, top_k], "
           "slots "
           "int32 [max_rows] (0: base), hidden and out [max_rows, hidden] in bf16 or float32. touched: int64 [1], to "
           "which each "
           "call adds how many distinct experts its rows have chosen; 0: nobody asks.")
      .def("run", &MoeTask::run, free_gil, "Computes `out`. ValueError for a bsz, id or slot out of range.");
}

}  // namespace ktserve
