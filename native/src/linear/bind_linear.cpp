#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "linear/latent_up.hpp"
#include "linear/linear.hpp"
#include "linear/packed_linear.hpp"
#include "packing/pack.hpp"
#include "runtime/address.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {

void bind_linear(nb::module_& module) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  module.def(
      "linear_format",
      [](const std::string& source) { return has_source_type(source) ? info(source_type(source).format).name : ""; },
      "source"_a, "The packed format that holds a GGML type without loss (F32 and F16: rounded to bf16), or ''.");

  nb::class_<PackedLinear>(module, "PackedLinear", "One projection's packed weights and its adapters by slot.")
      .def(
          "__init__",
          [](PackedLinear* self, const std::string& format, int64_t n, int64_t k, int shards, Address bias,
             const std::vector<int>& nodes) {
            new (self) PackedLinear(format, n, k, shards, at<const float>(bias), nodes);
          },
          "format"_a, "n"_a, "k"_a, "shards"_a = 1, "bias"_a = 0, "nodes"_a = std::vector<int>{},
          "`nodes`: the memory node of each shard, or none.")
      .def(
          "load",
          [](PackedLinear& self, WorkerPool& pool, const std::string& source, Address data, int64_t data_bytes,
             int file) {
            const SourceRows rows =
                file < 0 ? SourceRows(at<const uint8_t>(data)) : SourceRows(file, static_cast<int64_t>(data));
            self.load(pool, source, rows, data_bytes);
          },
          "pool"_a, "source"_a, "data"_a, "data_bytes"_a, "file"_a = -1, release(),
          "Packs [n, k] of a GGML type from an address, or, with `file`, from where it begins there.")
      .def("write", &PackedLinear::write, "pool"_a, "file"_a, "offset"_a, release(),
           "Writes the packed memory to a file descriptor; its checksum.")
      .def("read", &PackedLinear::read, "pool"_a, "file"_a, "offset"_a, release(),
           "Fills the packed memory from a file; the checksum of what came.")
      .def("adopt", &PackedLinear::adopt, "pool"_a, "file"_a, "offset"_a, release(),
           "Takes the packed memory from a mapped file, without a copy; the checksum of what is there.")
      .def_prop_ro("format", [](const PackedLinear& self) { return info(self.format()).name; })
      .def_prop_ro("num_bytes", &PackedLinear::bytes)
      .def_prop_ro("shards", &PackedLinear::shards)
      .def("first_panel", &PackedLinear::first_panel, "shard"_a)
      .def(
          "rows",
          [](const PackedLinear& self, WorkerPool& pool, Address ids, int64_t count, Address out) {
            self.rows(pool, at<const int64_t>(ids), count, at<float>(out));
          },
          "pool"_a, "ids"_a, "count"_a, "out"_a, release(),
          "Float32 [count, k] at `out`: the weights of the outputs listed as int64.")
      .def(
          "set_adapter",
          [](PackedLinear& self, int slot, Address a, Address b, bool is_bf16, int64_t rank, float scale) {
            self.set_adapter(slot, at<const void>(a), at<const void>(b), is_bf16, rank, scale);
          },
          "slot"_a, "a"_a, "b"_a, "is_bf16"_a, "rank"_a, "scale"_a, release(),
          "A [rank, k] and B [n, rank], both bf16 or both float32, copied into a slot (1 or more) that no call in "
          "flight uses.")
      .def("clear_adapter", &PackedLinear::clear_adapter, "slot"_a)
      .def_prop_ro("has_adapters", &PackedLinear::has_adapters);

  nb::class_<LinearRunner>(module, "LinearRunner", "Runs projections that share an input.")
      .def(
          "__init__",
          [](LinearRunner* self, WorkerPool& pool, const std::string& isa, bool deterministic) {
            new (self) LinearRunner(pool, choose_isa(isa), deterministic);
          },
          "pool"_a, "isa"_a = "", "deterministic"_a = false, nb::keep_alive<1, 2>())
      .def_prop_ro("deterministic", &LinearRunner::deterministic)
      .def(
          "run",
          [](LinearRunner& self, const PackedLinear& linear, Address x, int64_t stride, int64_t rows, bool is_bf16,
             Address slots, Address out, int64_t out_stride) {
            self.run({{&linear, at<void>(out), out_stride}},
                     {at<const void>(x), stride, rows, is_bf16, is_bf16, at<const int32_t>(slots)});
          },
          "linear"_a, nb::kw_only(), "x"_a, "stride"_a, "rows"_a, "is_bf16"_a, "slots"_a, "out"_a, "out_stride"_a,
          release(),
          "out [rows, n] = x [rows, k] W^T (+ bias) (+ adapters), bf16 or float32 as x; strides in elements. slots: "
          "int32 [rows], 0 = base; address 0: base rows only.")
      .def(
          "run_many",
          [](LinearRunner& self, const std::vector<const PackedLinear*>& linears, Address x, int64_t stride,
             int64_t rows, bool is_bf16, Address slots, const std::vector<Address>& outs,
             const std::vector<int64_t>& out_strides) {
            if (outs.size() != linears.size() || out_strides.size() != linears.size())
              throw std::invalid_argument("outs, out_strides: one for each of linears");
            std::vector<LinearCall> calls;
            for (size_t i = 0; i < linears.size(); ++i)
              calls.push_back({linears[i], reinterpret_cast<void*>(outs[i]), out_strides[i]});
            self.run(calls, {at<const void>(x), stride, rows, is_bf16, is_bf16, at<const int32_t>(slots)});
          },
          "linears"_a, nb::kw_only(), "x"_a, "stride"_a, "rows"_a, "is_bf16"_a, "slots"_a, "outs"_a, "out_strides"_a,
          release(), "The same for projections that share x; each has its own out and stride.");

  nb::class_<LatentUp>(module, "LatentUp", "The projection from latents to keys and values, by heads.")
      .def(
          "__init__",
          [](LatentUp* self, WorkerPool& pool, const PackedLinear& keys, const PackedLinear& values, int heads,
             const std::string& isa,
             bool deterministic) { new (self) LatentUp(pool, choose_isa(isa), deterministic, keys, values, heads); },
          "pool"_a, "keys"_a, "values"_a, "heads"_a, "isa"_a = "", "deterministic"_a = false, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          "keys [heads * latent, nope], of each head transposed; values [heads * value, latent]; each in a format of "
          "its "
          "own. ValueError for sizes that do not go together.")
      .def(
          "absorb",
          [](LatentUp& self, Address x, int64_t x_stride, int64_t x_head_stride, Address out, int64_t out_stride,
             int64_t out_head_stride, int64_t tokens, bool is_bf16, Address slots) {
            self.absorb({at<const void>(x), x_stride, x_head_stride}, {at<void>(out), out_stride, out_head_stride},
                        tokens, is_bf16, at<const int32_t>(slots));
          },
          nb::kw_only(), "x"_a, "x_stride"_a, "x_head_stride"_a, "out"_a, "out_stride"_a, "out_head_stride"_a,
          "tokens"_a, "is_bf16"_a, "slots"_a, release(),
          "Queries [tokens, heads, nope] -> [tokens, heads, latent], which meet latents. slots: int32 [tokens] or 0.")
      .def(
          "values",
          [](LatentUp& self, Address x, int64_t x_stride, int64_t x_head_stride, Address out, int64_t out_stride,
             int64_t out_head_stride, int64_t tokens, bool is_bf16, Address slots) {
            self.values({at<const void>(x), x_stride, x_head_stride}, {at<void>(out), out_stride, out_head_stride},
                        tokens, is_bf16, at<const int32_t>(slots));
          },
          nb::kw_only(), "x"_a, "x_stride"_a, "x_head_stride"_a, "out"_a, "out_stride"_a, "out_head_stride"_a,
          "tokens"_a, "is_bf16"_a, "slots"_a, release(),
          "Sums of latents [tokens, heads, latent] -> [tokens, heads, value].")
      .def(
          "set_adapter",
          [](LatentUp& self, int slot, Address a, Address keys, Address values, bool is_bf16, int64_t rank,
             float scale) {
            self.set_adapter(slot,
                             {at<const void>(a), at<const void>(keys), at<const void>(values), is_bf16, rank, scale});
          },
          "slot"_a, "a"_a, "keys"_a, "values"_a, "is_bf16"_a, "rank"_a, "scale"_a, release(),
          "A [rank, latent], and B's rows of keys [heads, nope, rank] and of values [heads, value, rank], all bf16 or "
          "all float32, copied into a slot (1 or more) that no call in flight uses.")
      .def("clear_adapter", &LatentUp::clear_adapter, "slot"_a);
}

}  // namespace ktserve
