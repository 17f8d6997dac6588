#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "gemm/kernels.hpp"
#include "packing/grids.hpp"
#include "packing/pack.hpp"
#include "runtime/address.hpp"
#include "runtime/arena.hpp"
#include "runtime/isa.hpp"
#include "runtime/pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {
namespace {

// Panels [first, last) of each matrix to `out`, one matrix's behind the other's.
void pack(WorkerPool& pool, const std::string& type, const std::string& format, const std::vector<SourceRows>& data,
          int64_t n, int64_t k, int64_t first, int64_t last, uint8_t* out) {
  const SourceType& source = source_type(type);
  const Format target = format_named(format);
  check_pack(source, target, n, k);
  if (first < 0 || first > last || last > panels_of(n)) {
    throw std::invalid_argument("panels " + std::to_string(first) + " to " + std::to_string(last) + " of " +
                                std::to_string(panels_of(n)));
  }
  constexpr int64_t read_bytes = 1 << 18;  // of a work item: large enough for disks, small enough for caches
  const int64_t read = kPanel * (k / source.block) * source.block_bytes;
  const int64_t step = std::clamp<int64_t>(read_bytes / read, 1, 64);
  const int64_t size = panel_size(target, k), steps = (last - first + step - 1) / step;
  pool.parallel_for(static_cast<int64_t>(data.size()) * steps, [&](int64_t item, int) {
    const int64_t matrix = item / steps;
    const int64_t begin = first + item % steps * step, end = std::min(begin + step, last);
    pack_panels(source, target, data[static_cast<size_t>(matrix)], n, k, begin, end,
                out + (matrix * (last - first) + begin - first) * size);
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

// A row of kFormatInfo.
struct PackedFormat {
  Format format;
  const FormatInfo& of() const { return info(format); }
};

void bind_format(nb::module_& module) {
  const auto get = [](auto member) { return [member](const PackedFormat& f) { return f.of().*member; }; };
  nb::class_<PackedFormat>(
      module, "PackedFormat",
      "How a panel of PANEL (16) output rows lies in memory: | scales, padded to 64 bytes | quants |.")
      .def_prop_ro("name", get(&FormatInfo::name))
      .def_prop_ro("unit", get(&FormatInfo::unit), "k of a unit of scales; the inner size is a multiple of it.")
      .def_prop_ro("scale_bytes", get(&FormatInfo::meta_bytes),
                   "Bytes of scales of a unit: d f16 [16] comes first (f8: d f32 [16]).")
      .def_prop_ro("quant_bytes", get(&FormatInfo::quant_bytes), "Bytes of quants of a block of BLOCK (32) k.")
      .def_prop_ro("bias", get(&FormatInfo::bias), "Subtracted from the unsigned quants, unless they are codes.")
      .def_prop_ro("group", get(&FormatInfo::group), "k that share a scale; 0: no scales.")
      .def_prop_ro(
          "low_bits", [](const PackedFormat& f) { return low_bits(f.format); },
          "Bits of a quant (2, 4 or 8) in the first plane of a block, 64 bytes for each.")
      .def_prop_ro(
          "codes",
          [](const PackedFormat& f) {
            std::vector<int> codes;
            const CodeTable table = code_table(f.format);
            if (f.of().codes != Codes::none)
              for (uint8_t code : table.codes) codes.push_back(code - f.of().bias);
            return codes;
          },
          "What the 16 quants stand for; empty: themselves, less the bias.")
      .def_prop_ro("exponents", get(&FormatInfo::exponents), "Whether d is a byte e [16] instead: 2^(e - 128).")
      .def_prop_ro(
          "upper_bits", [](const PackedFormat& f) { return upper_bits(f.format); },
          "Bits above the low ones, in planes behind theirs.")
      .def_prop_ro(
          "minimum_offset",
          [](const PackedFormat& f) { return f.of().minima && !zero_points(f.format) ? kMinimum : 0; },
          "Offset in a unit's scales of m or dmin, f16 [16]; 0: none.")
      .def_prop_ro(
          "grid_values", [](const PackedFormat& f) { return f.of().grid.values; },
          "Values of an entry of the table that the quants are indices of (8 or 4), whose bytes of signs and steps of "
          "scales are format.hpp's; 0: no such table.")
      .def_prop_ro(
          "grid",
          [](const PackedFormat& f) {
            std::vector<int> values;
            with_format(f.format, [&](auto form) {
              if constexpr (has_grid(decltype(form)::value)) {
                for (const auto entry : grid_of<decltype(form)::value>()) {
                  for (int i = 0; i < f.of().grid.values; ++i) values.push_back(static_cast<int>(entry >> 8 * i & 255));
                }
              }
            });
            return values;
          },
          "That table's values, entry by entry.")
      .def_prop_ro(
          "grid_index_bits", [](const PackedFormat& f) { return f.of().grid.index_bits; },
          "Bits of an index; eight of them are a byte of the quants.")
      .def_prop_ro(
          "grid_parity", [](const PackedFormat& f) { return f.of().grid.parity; },
          "Whether a word holds 4 x 7 signs, whose parity is the eighth, and 4 bits above them.")
      .def_prop_ro(
          "grid_high_offset", [](const PackedFormat& f) { return f.of().grid.high; },
          "Offset in a unit's scales of the upper bits of indices, u8 [8][16]; 0: none, or above a word's signs.")
      .def_prop_ro(
          "grid_step", [](const PackedFormat& f) { return f.of().grid.step; },
          "Of a factor s: the scale is d (2 s + 1) grid_step. Factors are nibbles at step_offset, [groups / 2][16], or "
          "lie above a word's signs.")
      .def_prop_ro(
          "step_offset", get(&FormatInfo::steps),
          "Offset in a unit's scales of the 8-bit factors of d, [unit / group][16] (of grids in nibbles); 0: none.")
      .def_prop_ro(
          "zero_offset", [](const PackedFormat& f) { return zero_points(f.format) ? f.of().min_steps : 0; },
          "Offset in a unit's scales of zero points, u8 [16], subtracted from the quants; 0: none.")
      .def_prop_ro(
          "minimum_step_offset", [](const PackedFormat& f) { return zero_points(f.format) ? 0 : f.of().min_steps; },
          "Offset in a unit's scales of the 8-bit factors of dmin, [unit / group][16]; 0: none. Where it is that of "
          "d's factors, those are the low nibbles and these the high ones.")
      .def(
          "scales_size", [](const PackedFormat& f, int64_t k) { return meta_size(f.format, k); }, "k"_a,
          "Bytes of a panel's scales, padded: where its quants begin.")
      .def(
          "panel_size", [](const PackedFormat& f, int64_t k) { return panel_size(f.format, k); }, "k"_a,
          "Bytes of a panel whose rows hold k values.");
  module.def(
      "packed_formats",
      [] {
        nb::typed<nb::dict, nb::str, PackedFormat> table;
        for (int f = 0; f < kFormats; ++f) table[kFormatInfo[f].name] = PackedFormat{static_cast<Format>(f)};
        return table;
      },
      "Every packed format by name.");
}

}  // namespace

void bind_pack(nb::module_& module) {
  const auto free_gil = nb::call_guard<nb::gil_scoped_release>();
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
  module.attr("PANEL") = kPanel;
  module.attr("BLOCK") = kBlock;
  bind_format(module);
  module.def("has_source_type", &has_source_type, "type"_a, "Whether a GGML type has a packed format.");
  module.def(
      "format_of", [](const std::string& type) { return info(source_type(type).format).name; }, "type"_a,
      "The packed format that holds a GGML type without loss (F32: bf16).");
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
  module.def(
      "pack",
      [](WorkerPool& pool, const std::string& type, const std::string& format, uintptr_t data, int64_t n, int64_t k,
         uintptr_t out) {
        pack(pool, type, format, {SourceRows(at<const uint8_t>(data))}, n, k, 0, panels_of(n), at<uint8_t>(out));
      },
      "pool"_a, "type"_a, "format"_a, "data"_a, "n"_a, "k"_a, "out"_a, free_gil,
      "Packs a matrix [n, k] of a GGML type from address `data` to address `out` (64-byte aligned).");
  module.def(
      "pack_panels",
      [](WorkerPool& pool, const std::string& type, const std::string& format, const std::vector<uintptr_t>& data,
         int64_t n, int64_t k, int64_t first, int64_t last, uintptr_t out, int file) {
        std::vector<SourceRows> rows;
        for (uintptr_t place : data) {
          rows.push_back(file < 0 ? SourceRows(at<const uint8_t>(place))
                                  : SourceRows(file, static_cast<int64_t>(place)));
        }
        pack(pool, type, format, rows, n, k, first, last, at<uint8_t>(out));
      },
      "pool"_a, "type"_a, "format"_a, "data"_a, "n"_a, "k"_a, "first"_a, "last"_a, "out"_a, "file"_a = -1, free_gil,
      "Packs panels [first, last) of matrices [n, k] of a GGML type from addresses, or, with `file`, from where they "
      "begin there, to address `out` (64-byte aligned), one matrix's behind the other's.");
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
