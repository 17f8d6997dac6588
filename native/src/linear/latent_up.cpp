#include "linear/latent_up.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "packing/pack.hpp"

namespace ktserve {
namespace {

constexpr int64_t kItemRows = 96;
constexpr int64_t kFewRows = 16;
constexpr int64_t kItemBytes = 1 << 16;  // weights of a work item with few rows, at most
constexpr int64_t kFewRowItems = 4;      // so many a worker, or items of
constexpr int64_t kLeastPanels = 2;      // panels, which kernels read side by side
constexpr int64_t kManyRowPanels = 8;    // of many rows, which each item packs again: one a worker, or items of so many
constexpr int64_t kMostRank = 1024;      // of an adapter

void require(bool holds, const char* name, int64_t value, const std::string& allowed) {
  if (!holds) throw std::invalid_argument(name + (": " + std::to_string(value)) + "; allowed is " + allowed);
}

std::vector<Line> lines(int64_t bytes) {
  return std::vector<Line>(static_cast<size_t>(round_up(bytes, 64) / 64));
}

// [n, k] float32 into panels of [k][16], float32 or bf16, at `to`.
void pack_panels_of(const std::vector<float>& from, int64_t n, int64_t k, bool floats, uint8_t* to) {
  if (floats)
    pack_lora_b_f32(from.data(), false, n, k, reinterpret_cast<float*>(to));
  else
    pack_lora_b(from.data(), false, n, k, 1.0f, reinterpret_cast<uint16_t*>(to));
}

}  // namespace

LatentUp::LatentUp(WorkerPool& pool, Isa isa, bool deterministic, const PackedLinear& keys, const PackedLinear& values,
                   int heads)
    : pool_(pool), kernels_(kernels(isa)), deterministic_(deterministic), keys_(keys), values_(values), heads_(heads) {
  if (isa == Isa::none) throw std::invalid_argument("isa: none; allowed are avx2, avx512, amx");
  require(heads >= 1, "heads", heads, "1 or more");
  require(keys.n() == heads * values.k(), "keys", keys.n(), "heads times the values' inputs");
  require(values.n() % heads == 0, "values", values.n(), "a multiple of heads");
  require(values.k() % kPanel == 0 && value() % kPanel == 0, "rows of a head", value(), "a multiple of 16");
  const auto bytes = [&](const PackedLinear& w) {
    const int64_t row = std::max(kernels_.row_bytes(w.format(), w.k()), kernels_.row_bytes(Format::bf16, w.k()));
    return kItemRows * row + (kItemRows * odd_lines(w.n() / heads * 4) / 4 + w.k() + kMostRank) * 4;
  };
  scratch_bytes_ = round_up(std::max(bytes(keys), bytes(values)), 4096);
  scratch_ = Arena(static_cast<size_t>(scratch_bytes_ * pool.threads()));
}

void LatentUp::absorb(HeadRows<const void> in, HeadRows<void> out, int64_t tokens, bool is_bf16, const int32_t* slots) {
  run(keys_, true, in, out, tokens, is_bf16, slots);
}

void LatentUp::values(HeadRows<const void> in, HeadRows<void> out, int64_t tokens, bool is_bf16, const int32_t* slots) {
  run(values_, false, in, out, tokens, is_bf16, slots);
}

LatentUp::Held LatentUp::held(const int32_t* slots, int64_t tokens) const {
  if (slots == nullptr) return {};
  const std::lock_guard lock(mutex_);
  Held found(static_cast<size_t>(tokens));
  bool any = false;
  for (int64_t t = 0; t < tokens; ++t) {
    require(slots[t] >= 0, "slots", slots[t], "0 or more");
    if (slots[t] == 0 || static_cast<size_t>(slots[t]) >= adapters_.size()) continue;
    found[static_cast<size_t>(t)] = adapters_[static_cast<size_t>(slots[t])];
    any |= found[static_cast<size_t>(t)] != nullptr;
  }
  return any ? found : Held{};
}

LatentUp::Cut LatentUp::cut(const PackedLinear& weights, int64_t tokens) const {
  const bool few = tokens <= kFewRows;
  Cut c{};
  c.panels = weights.n() / heads_ / kPanel;
  c.row_blocks = (tokens + kItemRows - 1) / kItemRows;
  const int64_t least = few ? kLeastPanels : kManyRowPanels;
  const int64_t wanted = pool_.threads() * (few ? kFewRowItems : 1);
  int64_t parts = few ? (c.panels * weights.panel_bytes() + kItemBytes - 1) / kItemBytes : 1;
  while (heads_ * parts * c.row_blocks < wanted && c.panels >= 2 * parts * least) parts *= 2;
  c.item_panels = round_up((c.panels + parts - 1) / parts, kLeastPanels);
  c.per_head = (c.panels + c.item_panels - 1) / c.item_panels;
  c.items = heads_ * c.per_head * c.row_blocks;
  return c;
}

std::vector<int64_t> LatentUp::begins(const PackedLinear& weights, const Cut& cut) const {
  if (weights.shards() != pool_.groups()) return {0, cut.items};
  std::vector<int64_t> begin;
  for (int shard = 0; shard < weights.shards(); ++shard) {
    const int64_t head = weights.first_panel(shard) / cut.panels, panel = weights.first_panel(shard) % cut.panels;
    begin.push_back((head * cut.per_head + (panel + cut.item_panels - 1) / cut.item_panels) * cut.row_blocks);
  }
  begin.push_back(cut.items);
  return begin;
}

void LatentUp::run(const PackedLinear& weights, bool keys, HeadRows<const void> in, HeadRows<void> out, int64_t tokens,
                   bool is_bf16, const int32_t* slots) {
  const Held adapters = held(slots, tokens);
  const Cut cut = this->cut(weights, tokens);
  const Format format = weights.format();
  const int64_t dequantised_from = deterministic_ ? 0 : kernels_.dequantised_from(format);
  const bool dequantised = dequantised_from > 0 && tokens >= dequantised_from;
  const int64_t k = weights.k(), row_bytes = kernels_.row_bytes_for(format, dequantised, k);
  const int64_t element = is_bf16 ? 2 : 4;
  const auto body = [&](int64_t item, int worker) {
    const int64_t block = item % cut.row_blocks, part = item / cut.row_blocks % cut.per_head;
    const int64_t head = item / cut.row_blocks / cut.per_head;
    const int64_t row = tokens * block / cut.row_blocks, rows = tokens * (block + 1) / cut.row_blocks - row;
    const int64_t first = part * cut.item_panels, count = std::min(cut.item_panels, cut.panels - first);
    uint8_t* x = scratch_.data() + scratch_bytes_ * worker;
    const int64_t stride = odd_lines(count * kPanel * 4) / 4;
    auto* tile = reinterpret_cast<float*>(x + kItemRows * row_bytes);
    float* wide = tile + kItemRows * stride;
    const auto source = [&](int64_t r) {
      const int64_t at = (row + r) * in.token_stride + head * in.head_stride;
      return static_cast<const uint8_t*>(in.data) + at * element;
    };
    for (int64_t r = 0; r < rows; ++r) {
      uint8_t* to = x + r * row_bytes;
      if (is_bf16)
        kernels_.pack(format, dequantised, reinterpret_cast<const uint16_t*>(source(r)), k, 0, k, to);
      else
        kernels_.pack(format, dequantised, reinterpret_cast<const float*>(source(r)), k, 0, k, to);
    }
    // The panels of a shard follow each other; heads may lie across shards.
    for (int64_t p = 0; p < count;) {
      const int64_t panel = head * cut.panels + first + p;
      int shard = 0;
      while (panel >= weights.first_panel(shard + 1)) ++shard;
      const int64_t n = std::min(count - p, weights.first_panel(shard + 1) - panel);
      const DotArgs args{format, weights.panel(panel), n, k, x, row_bytes, rows, tile + p * kPanel, stride};
      (dequantised ? kernels_.dot_dequantised : kernels_.dot)(args);
      p += n;
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* values = tile + r * stride;
      const Adapter* adapter = adapters.empty() ? nullptr : adapters[static_cast<size_t>(row + r)].get();
      if (adapter != nullptr) {
        const auto* from = source(r);
        if (is_bf16)
          kernels_.from_bf16(reinterpret_cast<const uint16_t*>(from), k, wide);
        else
          std::memcpy(wide, from, static_cast<size_t>(k) * 4);
        add(*adapter, keys ? adapter->keys : adapter->values, head, first, count, k, wide, wide + k, values);
      }
      const int64_t at = (row + r) * out.token_stride + head * out.head_stride + first * kPanel;
      if (is_bf16)
        kernels_.to_bf16(values, count * kPanel, static_cast<uint16_t*>(out.data) + at);
      else
        std::memcpy(static_cast<float*>(out.data) + at, values, static_cast<size_t>(count * kPanel) * 4);
    }
  };
  const std::vector<int64_t> begin = begins(weights, cut);
  if (begin.size() > 2)
    pool_.parallel_for_groups(begin, body);
  else
    pool_.parallel_for(cut.items, body);
}

void LatentUp::add(const Adapter& adapter, const Half& half, int64_t head, int64_t panel, int64_t panels, int64_t k,
                   const float* x, float* small, float* out) const {
  std::memset(small, 0, static_cast<size_t>(adapter.rank) * 4);
  const uint8_t* first = half.first.data()->bytes + head * half.first_bytes;
  const int64_t element = adapter.floats ? 4 : 2;
  const uint8_t* second =
      half.second.data()->bytes + head * half.second_bytes + panel * adapter.rank * kPanel * element;
  const auto product = [&](const uint8_t* b, int64_t to, int64_t from, const float* t, float* sums) {
    if (adapter.floats)
      kernels_.lora_b_f32(reinterpret_cast<const float*>(b), to, from, t, sums);
    else
      kernels_.lora_b(reinterpret_cast<const uint16_t*>(b), to, from, t, sums);
  };
  product(first, adapter.rank / kPanel, k, x, small);
  for (int64_t i = 0; i < adapter.rank; ++i) small[i] *= adapter.scale;
  product(second, panels, adapter.rank, small, out);
}

void LatentUp::set_adapter(int slot, const LatentPair& pair) {
  require(slot >= 1, "slot", slot, "1 or more");
  require(pair.rank >= 1 && pair.rank <= kMostRank, "rank", pair.rank, "1 to " + std::to_string(kMostRank));
  const int64_t rank = round_up(pair.rank, kPanel);
  auto made = std::make_shared<Adapter>();
  made->rank = rank;
  made->scale = pair.scale;
  made->floats = keys_.adapter_format() == Format::f32 || values_.adapter_format() == Format::f32;
  const int64_t element = made->floats ? 4 : 2;
  const auto read = [&](const void* data, int64_t at) {
    return pair.is_bf16 ? bf16_to_f32(static_cast<const uint16_t*>(data)[at]) : static_cast<const float*>(data)[at];
  };
  // Matrices [n, k] of `count` heads, of which value(head, row, column) is an element.
  const auto pack = [&](int64_t count, int64_t n, int64_t k, const auto& value, std::vector<Line>& to) {
    const int64_t bytes = n * k * element;
    to = lines(count * bytes);
    std::vector<float> matrix(static_cast<size_t>(n * k));
    for (int64_t head = 0; head < count; ++head) {
      for (int64_t row = 0; row < n; ++row)
        for (int64_t column = 0; column < k; ++column)
          matrix[static_cast<size_t>(row * k + column)] = value(head, row, column);
      pack_panels_of(matrix, n, k, made->floats, to.data()->bytes + head * bytes);
    }
    return bytes;
  };
  const auto a = [&](int64_t r, int64_t c) { return r < pair.rank ? read(pair.a, r * latent() + c) : 0.0f; };
  const auto b = [&](const void* data, int64_t size, int64_t head, int64_t row, int64_t r) {
    return r < pair.rank ? read(data, (head * size + row) * pair.rank + r) : 0.0f;
  };
  made->keys.first_bytes = pack(
      heads_, rank, nope(), [&](int64_t h, int64_t r, int64_t n) { return b(pair.keys, nope(), h, n, r); },
      made->keys.first);
  pack(1, latent(), rank, [&](int64_t, int64_t c, int64_t r) { return a(r, c); }, made->keys.second);
  made->keys.second_bytes = 0;
  pack(1, rank, latent(), [&](int64_t, int64_t r, int64_t c) { return a(r, c); }, made->values.first);
  made->values.first_bytes = 0;
  made->values.second_bytes = pack(
      heads_, value(), rank, [&](int64_t h, int64_t v, int64_t r) { return b(pair.values, value(), h, v, r); },
      made->values.second);
  const std::lock_guard lock(mutex_);
  if (adapters_.size() <= static_cast<size_t>(slot)) adapters_.resize(static_cast<size_t>(slot) + 1);
  adapters_[static_cast<size_t>(slot)] = std::move(made);
}

void LatentUp::clear_adapter(int slot) {
  const std::lock_guard lock(mutex_);
  if (slot >= 0 && static_cast<size_t>(slot) < adapters_.size()) adapters_[static_cast<size_t>(slot)] = nullptr;
}

}  // namespace ktserve
