#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string_view>

#include "attention/attention.hpp"
#include "runtime/address.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ktserve {

static KvType kv_type(const std::string& name) {
  if (name == "float32") return KvType::float32;
  if (name == "bfloat16") return KvType::bf16;
  if (name == "int8") return KvType::int8;
  throw std::invalid_argument("kv: " + name + "; allowed are float32, bfloat16, int8");
}

static Products products_of(const std::string& name) {
  if (name.empty()) return Products::by_cpu;
  if (name == "int16") return Products::int16;
  if (name == "bfloat16") return Products::bf16;
  throw std::invalid_argument("products: " + name + "; allowed are int16, bfloat16");
}

// A block table: a buffer of int32, as array("i") is, in one copy; any other sequence number by number.
static std::vector<int32_t> block_table(nb::handle table) {
  Py_buffer view;
  if (PyObject_CheckBuffer(table.ptr()) && PyObject_GetBuffer(table.ptr(), &view, PyBUF_ND | PyBUF_FORMAT) == 0) {
    std::vector<int32_t> blocks;
    const bool fits =
        view.ndim == 1 && view.itemsize == 4 && view.format != nullptr && view.format == std::string_view("i");
    if (fits) {
      const auto* from = static_cast<const int32_t*>(view.buf);
      blocks.assign(from, from + view.shape[0]);
    }
    PyBuffer_Release(&view);
    if (fits) return blocks;
  }
  PyErr_Clear();
  return nb::cast<std::vector<int32_t>>(table);
}

void bind_attention(nb::module_& module) {
  nb::class_<PagedAttention>(module, "PagedAttention", "Paged causal attention; owns the KV blocks of all layers.")
      .def(
          "__init__",
          [](PagedAttention* self, WorkerPool& pool, int layers, int num_blocks, int heads, int kv_heads, int head_dim,
             const std::string& kv, const std::string& isa, bool float_rows, const std::string& products, int latent,
             float scale, int window) {
            const AttentionShape shape{layers,   num_blocks,  heads,      kv_heads,
                                       head_dim, kv_type(kv), float_rows, products_of(products),
                                       latent,   scale,       window};
            new (self) PagedAttention(pool, shape, choose_isa(isa));
          },
          "pool"_a, nb::kw_only(), "layers"_a, "num_blocks"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "kv"_a,
          "isa"_a = "", "float_rows"_a = false, "products"_a = "", "latent"_a = 0, "scale"_a = 0.0f, "window"_a = 0,
          nb::keep_alive<1, 2>(),
          "kv: the cache, float32, bfloat16 or int8. q, k, v and out are bfloat16, but float32 with float_rows or a "
          "float32 cache. products: int16 or bfloat16 forces what a bfloat16 or int8 cache is multiplied as. latent: "
          "of "
          "a key, how many values are the value, which is then not kept again; 0: values are apart. scale: of scores, "
          "0: 1 / sqrt(head_dim). window: how many of the last positions a token sees, its own included; 0: all. "
          "ValueError for a shape that the kernels do not take.")
      .def_prop_ro("cache_bytes", &PagedAttention::cache_bytes)
      .def_prop_ro(
          "cache_address", [](const PagedAttention& self) { return reinterpret_cast<Address>(self.cache()); },
          "Of [layers, num_blocks, bytes of a block], as long as the object lives.")
      .def_prop_ro("tokens", &PagedAttention::tokens)
      .def_prop_ro(
          "products",
          [](const PagedAttention& self) {
            if (self.shape().kv == KvType::float32) return "float32";
            return self.int16_products() ? "int16" : "bfloat16";
          },
          "What keys and values are multiplied as.")
      .def(
          "set_sinks",
          [](PagedAttention& self, int layer, Address sinks) { self.set_sinks(layer, at<const float>(sinks)); },
          "layer"_a, "sinks"_a,
          "The layer's sinks, float32 [heads], which are copied: of each query head a score that takes part in the "
          "softmax and has no value. ValueError for a layer that is not there.")
      .def(
          "plan",
          [](PagedAttention& self, const std::vector<int64_t>& row_starts, const std::vector<int64_t>& context_lens,
             const nb::typed<nb::sequence, nb::typed<nb::sequence, int>>& block_tables) {
            std::vector<std::vector<int32_t>> tables;
            tables.reserve(nb::len(block_tables));
            for (nb::handle table : block_tables) tables.push_back(block_table(table));
            self.plan(row_starts, context_lens, tables);
          },
          "row_starts"_a, "context_lens"_a, "block_tables"_a,
          "Lay out a step. ValueError if a table is short or names a block that is not there.")
      .def(
          "forward",
          [](PagedAttention& self, int layer, int64_t tokens, Address q, int64_t q_stride, Address k, int64_t k_stride,
             Address v, int64_t v_stride, Address out, int64_t out_stride) {
            self.forward(layer, tokens, {at<const void>(q), q_stride}, {at<const void>(k), k_stride},
                         {at<const void>(v), v_stride}, {at<void>(out), out_stride});
          },
          "layer"_a, "tokens"_a, nb::kw_only(), "q"_a, "q_stride"_a, "k"_a, "k_stride"_a, "v"_a, "v_stride"_a, "out"_a,
          "out_stride"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Of the planned tokens: k, v into their blocks, then out = softmax(q k / sqrt(head_dim)) v. Addresses of "
          "rows [tokens, heads, head_dim] (k, v: kv_heads); strides from token to token in elements.");
}

}  // namespace ktserve
