#include "ops/ops.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ktserve {
namespace {

constexpr int64_t kItemElements = 4096;    // two microseconds or so
constexpr int64_t kInlineElements = 8192;  // so few take no longer than waking the pool saves

void require(bool holds, const char* name, int64_t value, const char* allowed) {
  if (!holds) throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + "; allowed is " + allowed);
}

void check_positions(const int64_t* positions, int64_t tokens, int64_t table_rows) {
  for (int64_t t = 0; t < tokens; ++t) {
    if (positions[t] >= 0 && positions[t] < table_rows) continue;
    throw std::invalid_argument("positions: " + std::to_string(positions[t]) + " of token " + std::to_string(t) +
                                "; allowed is 0 to " + std::to_string(table_rows - 1));
  }
}

bool finite(const char* values, int64_t place, bool is_bf16) {
  uint32_t bits = 0;
  if (is_bf16) {
    uint16_t upper;
    std::memcpy(&upper, values + place * 2, 2);
    bits = static_cast<uint32_t>(upper) << 16;
  } else {
    std::memcpy(&bits, values + place * 4, 4);
  }
  return (bits & 0x7f800000u) != 0x7f800000u;
}

}  // namespace

Ops::Ops(WorkerPool& pool, Isa isa) : pool_(pool), kernels_(isa == Isa::avx2 ? kOpsAvx2 : kOpsAvx512) {
  if (isa == Isa::none) throw std::invalid_argument("isa: none; allowed are avx2, avx512, amx");
}

template <class F>
void Ops::split(int64_t rows, int64_t row_elements, const F& body) const {
  const int64_t per_item = std::max<int64_t>(1, kItemElements / std::max<int64_t>(1, row_elements));
  const int64_t items = (rows + per_item - 1) / per_item;
  if (items <= 1 || rows * row_elements <= kInlineElements) {
    if (rows > 0) body(0, rows);
    return;
  }
  pool_.parallel_for(items, [&](int64_t item, int) { body(item * per_item, std::min(rows, (item + 1) * per_item)); });
}

void Ops::norm(const Norm& n, bool is_bf16) const {
  require(n.rows >= 0, "rows", n.rows, "0 or more");
  require(n.dim >= 1, "dim", n.dim, "1 or more");
  const auto kernel = kernels_.norm[is_bf16];
  split(n.rows, n.dim, [&](int64_t begin, int64_t end) { kernel(n, begin, end); });
}

void Ops::qk_norm_rope(const QkNormRope& r, bool is_bf16) const {
  require(r.tokens >= 0, "tokens", r.tokens, "0 or more");
  require(r.heads >= 1, "heads", r.heads, "1 or more");
  require(r.kv_heads >= 1, "kv_heads", r.kv_heads, "1 or more");
  if ((r.q_weight == nullptr) != (r.k_weight == nullptr))
    throw std::invalid_argument("q_weight, k_weight: one is null; allowed is a norm of both or of neither");
  require(r.head_dim >= 2, "head_dim", r.head_dim, "2 or more");
  require(r.rotary_dim >= 2 && r.rotary_dim % 2 == 0 && r.rotary_dim <= r.head_dim, "rotary_dim", r.rotary_dim,
          "an even number from 2 to head_dim");
  check_positions(r.positions, r.tokens, r.table_rows);
  const auto kernel = kernels_.qk_norm_rope[is_bf16];
  const int64_t elements = static_cast<int64_t>(r.heads + r.kv_heads) * r.head_dim;
  split(r.tokens, elements, [&](int64_t begin, int64_t end) { kernel(r, begin, end); });
}

void Ops::rotate(const Rotate& r, bool is_bf16) const {
  require(r.tokens >= 0, "tokens", r.tokens, "0 or more");
  require(r.heads >= 1, "heads", r.heads, "1 or more");
  require(r.dim >= 2 && r.dim % 2 == 0 && r.dim <= kMaxRotary, "dim", r.dim, "an even number from 2 to 256");
  check_positions(r.positions, r.tokens, r.table_rows);
  const auto kernel = kernels_.rotate[is_bf16];
  split(r.tokens, r.heads * r.dim, [&](int64_t begin, int64_t end) { kernel(r, begin, end); });
}

void Ops::silu_mul(const SiluMul& s, bool is_bf16) const {
  require(s.rows >= 0, "rows", s.rows, "0 or more");
  require(s.dim >= 1, "dim", s.dim, "1 or more");
  const auto kernel = kernels_.silu_mul[is_bf16];
  split(s.rows, s.dim, [&](int64_t begin, int64_t end) { kernel(s, begin, end); });
}

void Ops::add_gated(const AddGated& g, bool is_bf16) const {
  require(g.rows >= 0, "rows", g.rows, "0 or more");
  require(g.dim >= 1, "dim", g.dim, "1 or more");
  const auto kernel = kernels_.add_gated[is_bf16];
  split(g.rows, g.dim, [&](int64_t begin, int64_t end) { kernel(g, begin, end); });
}

void Ops::gate_heads(const GateHeads& g, bool is_bf16) const {
  require(g.tokens >= 0, "tokens", g.tokens, "0 or more");
  require(g.heads >= 1, "heads", g.heads, "1 or more");
  require(g.dim >= 1, "dim", g.dim, "1 or more");
  const auto kernel = kernels_.gate_heads[is_bf16];
  split(g.tokens, g.heads * g.dim, [&](int64_t begin, int64_t end) { kernel(g, begin, end); });
}

void Ops::copy_heads(const CopyHeads& c, int64_t element_bytes) const {
  require(c.tokens >= 0, "tokens", c.tokens, "0 or more");
  split(c.tokens, c.heads * c.dim, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const char* from = static_cast<const char*>(c.x) + t * c.x_stride * element_bytes;
      char* to = static_cast<char*>(c.out) + t * c.out_stride * element_bytes;
      for (int64_t h = 0; h < c.heads; ++h)
        std::memcpy(to + h * c.dim * element_bytes, from + h * c.x_head_stride * element_bytes,
                    static_cast<size_t>(c.dim * element_bytes));
    }
  });
}

void Ops::router_topk(const RouterTopK& r, bool is_bf16) const {
  require(r.rows >= 0, "rows", r.rows, "0 or more");
  r.router.check(r.experts);
  const auto scores = r.router.score == Score::softmax ? kernels_.softmax[is_bf16] : kernels_.sigmoid[is_bf16];
  split(r.rows, r.experts * 16, [&](int64_t begin, int64_t end) { route_rows(r, scores, is_bf16, begin, end); });
}

void Ops::embed(const Embed& e, int64_t element_bytes) const {
  require(e.rows >= 0, "rows", e.rows, "0 or more");
  require(e.dim >= 1, "dim", e.dim, "1 or more");
  for (int64_t i = 0; i < e.rows; ++i) {
    if (e.ids[i] >= 0 && e.ids[i] < e.vocab) continue;
    throw std::invalid_argument("ids: token id " + std::to_string(e.ids[i]) + "; allowed is 0 to " +
                                std::to_string(e.vocab - 1));
  }
  const int64_t row_bytes = e.dim * element_bytes;
  split(e.rows, e.dim, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(static_cast<char*>(e.out) + i * e.out_stride * element_bytes,
                  static_cast<const char*>(e.table) + e.ids[i] * row_bytes, static_cast<size_t>(row_bytes));
  });
}

void Ops::argmax(const Argmax& l, bool is_bf16) const {
  require(l.rows >= 0, "rows", l.rows, "0 or more");
  require(l.n >= 1, "n", l.n, "1 or more");
  const auto kernel = kernels_.largest[is_bf16];
  split(l.rows, l.n, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const char* logits = static_cast<const char*>(l.logits) + row * l.stride * (is_bf16 ? 2 : 4);
      const int64_t place = kernel(logits, l.n);
      l.out[row] = finite(logits, place, is_bf16) ? place : -1;
    }
  });
}

}  // namespace ktserve
