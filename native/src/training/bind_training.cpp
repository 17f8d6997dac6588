#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>

#include "experts/moe.hpp"
#include "runtime/address.hpp"
#include "runtime/isa.hpp"
#include "training/trainer.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {
namespace {

using Three = std::array<uintptr_t, 3>;

TrainLora make_lora(int slot, int64_t rank, float scale, Three a, Three b, Three grad_a, Three grad_b) {
  if (slot < 1 || slot > 65535) {
    throw std::invalid_argument("slot: " + std::to_string(slot) + "; allowed are 1 to 65535");
  }
  if (rank < 1 || rank > 1024) {
    throw std::invalid_argument("rank: " + std::to_string(rank) + "; allowed are 1 to 1024");
  }
  TrainLora lora{slot, rank, scale, {}, {}, {}, {}};
  for (size_t p = 0; p < 3; ++p) {
    lora.a[p] = at<const float>(a[p]);
    lora.b[p] = at<const float>(b[p]);
    lora.grad_a[p] = at<float>(grad_a[p]);
    lora.grad_b[p] = at<float>(grad_b[p]);
  }
  return lora;
}

TrainBatch make_batch(uintptr_t ids, uintptr_t weights, uintptr_t slots, uintptr_t hidden, int64_t rows, int64_t top_k,
                      bool bf16) {
  if (rows < 0) throw std::invalid_argument("rows: " + std::to_string(rows) + "; at least 0");
  if (top_k < 1 || top_k > kMostTopK) {
    throw std::invalid_argument("top_k: " + std::to_string(top_k) + "; allowed are 1 to " + std::to_string(kMostTopK));
  }
  return {at<const int64_t>(ids),
          at<const float>(weights),
          at<const int32_t>(slots),
          at<const void>(hidden),
          rows,
          top_k,
          bf16};
}

}  // namespace

void bind_training(nb::module_& module) {
  const auto free_gil = nb::call_guard<nb::gil_scoped_release>();

  nb::class_<TrainLora>(module, "TrainLora", "Addresses of an adapter's float32 matrices of one layer.")
      .def(nb::new_(&make_lora), "slot"_a, "rank"_a, "scale"_a, "a"_a, "b"_a, "grad_a"_a = Three{},
           "grad_b"_a = Three{},
           "A [E, r, in] and B [E, out, r] of gate, up, down; their gradients, written by `backward` (0: not wanted).");

  nb::class_<TrainBatch>(module, "TrainBatch", "Addresses of the rows of a training step.")
      .def(nb::new_(&make_batch), nb::kw_only(), "ids"_a, "weights"_a, "slots"_a, "hidden"_a, "rows"_a, "top_k"_a,
           "bf16"_a,
           "ids int64 [rows, top_k] (-1: skipped), weights float32 [rows, top_k], slots int32 [rows] (0: no LoRA), "
           "hidden [rows, hidden] in bf16 or float32.");

  nb::class_<ExpertTrainer>(module, "ExpertTrainer",
                            "Forward and backward of a layer's experts with LoRA on a pool, one call at a time.")
      .def(
          "__init__",
          [](ExpertTrainer* self, WorkerPool& pool, const std::string& isa) {
            new (self) ExpertTrainer(pool, choose_isa(isa));
          },
          "pool"_a, "isa"_a = "", nb::keep_alive<1, 2>())
      .def_prop_ro("isa", [](const ExpertTrainer& trainer) { return isa_name(trainer.isa()); })
      .def(
          "forward",
          [](ExpertTrainer& trainer, const ExpertLayer& layer, const std::vector<TrainLora>& loras,
             const TrainBatch& batch, uintptr_t out,
             uintptr_t kept) { trainer.forward(layer, loras, batch, at<void>(out), at<void>(kept)); },
          "layer"_a, "loras"_a, "batch"_a, nb::kw_only(), "out"_a, "kept"_a = 0, free_gil,
          "out [rows, hidden]; kept [rows * top_k, 2 (intermediate + the largest rank)] or 0: memory for "
          "`backward`, gate and up of each choice, then A x of both; "
          "both in hidden's type. ValueError for an id or slot out of range.")
      .def(
          "backward",
          [](ExpertTrainer& trainer, const ExpertLayer& layer, const std::vector<TrainLora>& loras,
             const TrainBatch& batch, uintptr_t kept, uintptr_t grad_out, uintptr_t grad_hidden,
             uintptr_t grad_weights) {
            trainer.backward(layer, loras, batch, at<const void>(kept), at<const void>(grad_out), at<void>(grad_hidden),
                             at<float>(grad_weights));
          },
          "layer"_a, "loras"_a, "batch"_a, nb::kw_only(), "kept"_a, "grad_out"_a, "grad_hidden"_a, "grad_weights"_a,
          free_gil,
          "From grad_out: grad_hidden [rows, hidden] (0: not wanted), both in hidden's type, grad_weights float32 "
          "[rows, top_k]; writes the gradients of `loras`. kept: what forward kept of the same batch, or 0: computed "
          "again. ValueError for an id or slot out of range.");
}

}  // namespace ktserve
