#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "core/address.hpp"
#include "core/arena.hpp"
#include "core/isa.hpp"
#include "core/kernels.hpp"
#include "core/pack.hpp"
#include "core/pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {
namespace {

void pack(WorkerPool& pool, const std::string& type, const std::string& format, uintptr_t data, int64_t n, int64_t k,
          uintptr_t out) {
  const SourceType& source = source_type(type);
  const Format target = format_named(format);
  check_pack(source, target, n, k);
  constexpr int64_t step = 8;
  pool.parallel_for((panels_of(n) + step - 1) / step, [&](int64_t piece, int) {
    const int64_t first = piece * step;
    const int64_t last = std::min(first + step, panels_of(n));
    pack_panels(source, target, at<const uint8_t>(data), n, k, first, last,
                at<uint8_t>(out) + first * panel_size(target, k));
  });
}

// out[rows, panels * 16] = x[rows, k] (float32) times the packed matrix, on one thread.
void dot(const std::string& isa, const std::string& format, uintptr_t w, int64_t n, int64_t k, uintptr_t x,
         int64_t rows, uintptr_t out) {
  const Kernels& table = kernels(choose_isa(isa));
  const Format f = format_named(format);
  const int64_t stride = table.row_bytes(f, k);
  Arena scratch(static_cast<size_t>(stride * std::max<int64_t>(rows, 1)));
  for (int64_t r = 0; r < rows; ++r) {
    table.pack_f32(f, at<const float>(x) + r * k, k, 0, k, scratch.data() + r * stride);
  }
  table.dot(
      {f, at<const uint8_t>(w), panels_of(n), k, scratch.data(), stride, rows, at<float>(out), panels_of(n) * kPanel});
}

}  // namespace

void bind_pack(nb::module_& module) {
  const auto free_gil = nb::call_guard<nb::gil_scoped_release>();
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
  module.def("has_source_type", &has_source_type, "type"_a, "Whether a GGML type has a packed format.");
  module.def(
      "format_of", [](const std::string& type) { return info(source_type(type).format).name; }, "type"_a,
      "The packed format that holds a GGML type without loss (F32, F16, BF16: bf16).");
  module.def(
      "packed_size",
      [](const std::string& format, int64_t n, int64_t k) { return packed_size(format_named(format), n, k); },
      "format"_a, "n"_a, "k"_a, "Bytes of a packed matrix [n, k].");
  module.def(
      "check_pack",
      [](const std::string& type, const std::string& format, int64_t n, int64_t k) {
        check_pack(source_type(type), format_named(format), n, k);
      },
      "type"_a, "format"_a, "n"_a, "k"_a, "ValueError unless a [n, k] of the type can be packed so.");
  module.def("pack", &pack, "pool"_a, "type"_a, "format"_a, "data"_a, "n"_a, "k"_a, "out"_a, free_gil,
             "Packs a matrix [n, k] of a GGML type from address `data` to address `out` (64-byte aligned).");
  module.def(
      "unpack",
      [](const std::string& format, uintptr_t packed, int64_t k, int64_t first, int64_t last, uintptr_t out) {
        unpack_rows(format_named(format), at<const uint8_t>(packed), k, first, last, at<float>(out));
      },
      "format"_a, "packed"_a, "k"_a, "first"_a, "last"_a, "out"_a, free_gil,
      "Float32 values of rows [first, last) of a packed matrix.");
  module.def("dot", &dot, "isa"_a, "format"_a, "w"_a, "n"_a, "k"_a, "x"_a, "rows"_a, "out"_a, free_gil,
             "out [rows, n padded to 16] float32 = x [rows, k] float32 times packed [n, k]; one thread.");
}

}  // namespace ktserve
