#include "linear/linear.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "packing/pack.hpp"
#include "runtime/fetch.hpp"

namespace ktserve {
namespace {

constexpr int64_t kSlabRows = 1024;              // rows of one pass: bounds the scratch
constexpr int64_t kItemRows = 96;                // a whole number of every kernel's row tiles
constexpr int64_t kDequantisedItemRows = 256;    // what is dequantised is used for so many
constexpr int64_t kCachedRowBytes = 1088 << 10;  // of them, that the second-level cache keeps from item to item
constexpr int64_t kDequantisedItemPanels = 4;    // as many as any call of more than 16 rows takes
constexpr int64_t kItemBytes = 1 << 16;          // weights of a work item with few rows: some microseconds of reading
constexpr int64_t kMaxItemPanels = 16;
constexpr int64_t kTileFloats = kItemRows * (kMaxItemPanels + 1) * kPanel;
static_assert(kDequantisedItemRows * (kDequantisedItemPanels + 1) * kPanel <= kTileFloats);
constexpr int64_t kInlineElements = 8192;  // so little is packed without waking the pool
constexpr int64_t kPackElements = 4096;    // of a work item of packing, at least, and
constexpr int64_t kMostPackElements = 16384;
constexpr int64_t kPackItems = 4;     // so many a worker, rather than longer ones
constexpr int64_t kAdapterRows = 64;  // of one work item of step 2

void require(bool holds, const char* name, int64_t value, const char* allowed) {
  if (!holds) throw std::invalid_argument(name + (": " + std::to_string(value)) + "; allowed is " + allowed);
}

// What the arena held is lost when it grows.
uint8_t* grow(Arena& arena, int64_t bytes) {
  if (static_cast<size_t>(bytes) > arena.bytes()) arena = Arena(static_cast<size_t>(bytes + bytes / 2));
  return arena.data();
}

}  // namespace

LinearRunner::LinearRunner(WorkerPool& pool, Isa isa, bool deterministic)
    : pool_(pool),
      kernels_(kernels(isa)),
      deterministic_(deterministic),
      tiles_(static_cast<size_t>(pool.threads() * kTileFloats) * sizeof(float)) {
  if (isa == Isa::none) throw std::invalid_argument("isa: none; allowed are avx2, avx512, amx");
}

void LinearRunner::run(const std::vector<LinearCall>& calls, const LinearInput& input) {
  const std::lock_guard lock(mutex_);
  require(!calls.empty(), "calls", 0, "1 or more");
  require(input.rows >= 0, "rows", input.rows, "0 or more");
  for (const LinearCall& call : calls)
    require(call.linear->k() == calls[0].linear->k(), "k", call.linear->k(), "the same for all projections of a call");
  if (input.slots != nullptr)
    for (int64_t r = 0; r < input.rows; ++r) require(input.slots[r] >= 0, "slots", input.slots[r], "0 or more");
  const int64_t element = input.is_bf16 ? 2 : 4;
  const int64_t out_element = input.out_bf16 ? 2 : 4;
  std::vector<LinearCall> slab = calls;
  for (int64_t begin = 0; begin < input.rows; begin += kSlabRows) {
    LinearInput part = input;
    part.rows = std::min(kSlabRows, input.rows - begin);
    part.x = static_cast<const char*>(input.x) + begin * input.stride * element;
    if (input.slots != nullptr) part.slots = input.slots + begin;
    for (size_t c = 0; c < calls.size(); ++c)
      slab[c].out = static_cast<char*>(calls[c].out) + begin * calls[c].out_stride * out_element;
    run_slab(slab, part);
  }
}

void LinearRunner::pack_rows(const LinearInput& input, Format format, bool dequantised, int64_t k,
                             const std::vector<int64_t>* order, uint8_t* to) {
  const int64_t rows = order == nullptr ? input.rows : static_cast<int64_t>(order->size());
  const int64_t bytes = kernels_.row_bytes_for(format, dequantised, k);
  const auto source = [&](int64_t i) {
    const int64_t from = (order == nullptr ? i : (*order)[static_cast<size_t>(i)]) * input.stride;
    return static_cast<const uint8_t*>(input.x) + from * (input.is_bf16 ? 2 : 4);
  };
  const auto one = [&](int64_t i) {
    const void* x = source(i);
    if (input.is_bf16)
      kernels_.pack(format, dequantised, static_cast<const uint16_t*>(x), k, 0, k, to + i * bytes);
    else
      kernels_.pack(format, dequantised, static_cast<const float*>(x), k, 0, k, to + i * bytes);
  };
  if (rows * k <= kInlineElements) {
    for (int64_t i = 0; i < rows; ++i) one(i);
    return;
  }
  const int64_t least = std::max<int64_t>(1, kPackElements / k), most = std::max<int64_t>(1, kMostPackElements / k);
  const int64_t per_item = std::clamp(rows / (kPackItems * pool_.threads()), least, most);
  pool_.parallel_for((rows + per_item - 1) / per_item, [&](int64_t item, int) {
    const int64_t end = std::min(rows, (item + 1) * per_item);
    for (int64_t i = item * per_item; i < end; ++i) {
      if (i + 1 < end) fetch_to_copy(source(i + 1), k * (input.is_bf16 ? 2 : 4), to + (i + 1) * bytes, bytes);
      one(i);
    }
  });
}

void LinearRunner::run_adapters(const std::vector<LinearCall>& calls, const LinearInput& input,
                                std::vector<CallState>& states) {
  std::vector<int64_t> order;
  if (input.slots != nullptr)
    for (int64_t r = 0; r < input.rows; ++r)
      if (input.slots[r] > 0) order.push_back(r);
  if (order.empty()) return;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return input.slots[a] < input.slots[b]; });

  std::vector<LoraUnit> units;
  bool needed[kFormats] = {};
  products_.resize(std::max(products_.size(), calls.size()));
  for (size_t c = 0; c < calls.size(); ++c) {
    CallState& state = states[c];
    const size_t first_unit = units.size();
    int64_t floats = 0;
    for (size_t i = 0; i < order.size();) {
      const int32_t slot = input.slots[order[i]];
      size_t end = i;
      while (end < order.size() && input.slots[order[end]] == slot) ++end;
      if (std::shared_ptr<const LoraWeights> held = calls[c].linear->adapter(slot)) {
        for (size_t begin = i; begin < end; begin += kAdapterRows) {
          const auto count = static_cast<int64_t>(std::min<size_t>(kAdapterRows, end - begin));
          units.push_back({held.get(), calls[c].linear, static_cast<int64_t>(begin), count, nullptr});
          floats += count * round_up(held->rank, kPanel);
        }
        state.held.push_back(std::move(held));
      }
      i = end;
    }
    if (units.size() == first_unit) continue;
    needed[static_cast<int>(calls[c].linear->adapter_format())] = true;
    state.by_row.assign(static_cast<size_t>(input.rows), nullptr);
    state.t_by_row.assign(static_cast<size_t>(input.rows), nullptr);
    float* t = reinterpret_cast<float*>(grow(products_[c], floats * 4));
    for (size_t u = first_unit; u < units.size(); ++u) {
      units[u].t = t;
      for (int64_t i = 0; i < units[u].count; ++i, t += round_up(units[u].lora->rank, kPanel)) {
        const auto row = static_cast<size_t>(order[static_cast<size_t>(units[u].begin + i)]);
        state.by_row[row] = units[u].lora;
        state.t_by_row[row] = t;
      }
    }
  }
  if (units.empty()) return;
  const int64_t k = calls[0].linear->k();
  for (Format format : {Format::bf16, Format::f32}) {
    if (!needed[static_cast<int>(format)]) continue;
    const int64_t bytes = static_cast<int64_t>(order.size()) * kernels_.row_bytes(format, k);
    pack_rows(input, format, false, k, &order, grow(sorted_[static_cast<int>(format)], bytes));
  }
  pool_.parallel_for(static_cast<int64_t>(units.size()), [&](int64_t i, int) {
    const LoraUnit& u = units[static_cast<size_t>(i)];
    const int64_t padded = round_up(u.lora->rank, kPanel);
    const Format format = u.linear->adapter_format();
    const int64_t bytes = kernels_.row_bytes(format, k);
    const uint8_t* x = sorted_[static_cast<int>(format)].data() + u.begin * bytes;
    kernels_.dot({format, u.lora->a.data()->bytes, padded / kPanel, k, x, bytes, u.count, u.t, padded});
    for (int64_t j = 0; j < u.count * padded; ++j) u.t[j] *= u.lora->scale;
  });
}

void LinearRunner::run_slab(const std::vector<LinearCall>& calls, const LinearInput& input) {
  const int64_t k = calls[0].linear->k();
  std::vector<CallState> states(calls.size());
  bool done[kFormats + 1] = {};
  for (size_t c = 0; c < calls.size(); ++c) {
    const Format format = calls[c].linear->format();
    const int64_t dequantised_from = deterministic_ ? 0 : kernels_.dequantised_from(format);
    const bool dequantised = states[c].dequantised = dequantised_from > 0 && input.rows >= dequantised_from;
    const int form = dequantised ? kFormats : static_cast<int>(format);
    if (std::exchange(done[form], true)) continue;
    pack_rows(input, format, dequantised, k, nullptr,
              grow(packed_[form], input.rows * kernels_.row_bytes_for(format, dequantised, k)));
  }
  run_adapters(calls, input, states);

  std::vector<int64_t> begin;
  const std::vector<Part> parts = share_out(calls, states, input.rows, &begin);
  const auto body = [&](int64_t item, int worker) {
    size_t p = parts.size() - 1;
    while (parts[p].first_item > item) --p;
    const size_t c = parts[p].call;
    run_item(calls[c], states[c], input, parts[p], item - parts[p].first_item, worker);
  };
  if (begin.size() > 2) {
    pool_.parallel_for_groups(begin, body);
  } else {
    pool_.parallel_for(begin.back(), body);
  }
}

int64_t LinearRunner::item_rows(const PackedLinear& linear, const CallState& state) const {
  if (!state.dequantised) return kItemRows;
  const int64_t cached = kCachedRowBytes / kernels_.row_bytes_for(linear.format(), true, linear.k());
  return std::clamp(cached / 32 * 32, kItemRows, kDequantisedItemRows);
}

std::vector<LinearRunner::Part> LinearRunner::share_out(const std::vector<LinearCall>& calls,
                                                        const std::vector<CallState>& states, int64_t rows,
                                                        std::vector<int64_t>* begin) const {
  const bool sharded = std::all_of(calls.begin(), calls.end(),
                                   [this](const LinearCall& call) { return call.linear->shards() == pool_.groups(); });
  const int nodes = sharded ? pool_.groups() : 1;
  std::vector<Part> parts;
  int64_t items = 0;
  for (int node = 0; node < nodes; ++node) {
    begin->push_back(items);
    for (size_t c = 0; c < calls.size(); ++c) {
      const PackedLinear& linear = *calls[c].linear;
      const int64_t all = panels_of(linear.n());
      const int64_t row_blocks = (rows + item_rows(linear, states[c]) - 1) / item_rows(linear, states[c]);
      int64_t step = 4;
      if (states[c].dequantised && rows <= kItemRows) step = 8;
      if (rows <= 16) step = std::clamp<int64_t>(kItemBytes / linear.panel_bytes() / 4 * 4, 4, kMaxItemPanels);
      // Panels are read side by side, but for one row of float32, and where workers would get none (routers).
      const bool single = rows == 1 || (row_blocks == 1 && all < 2 * pool_.threads());
      const int64_t least = single && linear.format() == Format::f32 ? 1 : 2;
      while (step > least && all * row_blocks < step * 4 * pool_.threads()) step /= 2;
      for (int s = sharded ? node : 0; s < (sharded ? node + 1 : linear.shards()); ++s) {
        const int64_t panels = linear.first_panel(s + 1) - linear.first_panel(s);
        if (panels == 0) continue;
        parts.push_back({c, linear.first_panel(s), panels, step, row_blocks, items});
        items += (panels + step - 1) / step * row_blocks;
      }
    }
  }
  begin->push_back(items);
  return parts;
}

void LinearRunner::run_item(const LinearCall& call, const CallState& state, const LinearInput& input, const Part& part,
                            int64_t item, int worker) {
  const PackedLinear& linear = *call.linear;
  const Format format = linear.format();
  const int64_t blocks = part.row_blocks;
  const int64_t cuts = (part.panels + part.panels_per_item - 1) / part.panels_per_item;
  // Neighbours share their weights, which are read where they lie; or, if those are dequantised, their rows.
  const int64_t block = state.dequantised ? item / cuts : item % blocks;
  const int64_t row = input.rows * block / blocks;
  const int64_t rows = input.rows * (block + 1) / blocks - row;
  const int64_t first = (state.dequantised ? item % cuts : item / blocks) * part.panels_per_item;
  const int64_t panel = part.panel + first;
  const int64_t panels = std::min(part.panels_per_item, part.panels - first);
  const int64_t width = panels * kPanel;
  const int64_t stride = odd_lines(width * 4) / 4;
  const int64_t bytes = kernels_.row_bytes_for(format, state.dequantised, linear.k());
  const uint8_t* x = packed_[state.dequantised ? kFormats : static_cast<int>(format)].data() + row * bytes;
  float* tile = reinterpret_cast<float*>(tiles_.data()) + worker * kTileFloats;
  const DotArgs args{format, linear.panel(panel), panels, linear.k(), x, bytes, rows, tile, stride};
  (state.dequantised ? kernels_.dot_dequantised : kernels_.dot)(args);

  const int64_t count = std::min(width, linear.n() - panel * kPanel);
  for (int64_t r = 0; r < rows; ++r) {
    float* values = tile + r * stride;
    const auto index = static_cast<size_t>(row + r);
    if (!state.by_row.empty() && state.by_row[index] != nullptr) {
      const LoraWeights& lora = *state.by_row[index];
      const uint8_t* b = lora.b.data()->bytes;
      const int64_t at = panel * lora.rank * kPanel;
      const float* t = state.t_by_row[index];
      if (format == Format::f32)
        kernels_.lora_b_f32(reinterpret_cast<const float*>(b) + at, panels, lora.rank, t, values);
      else
        kernels_.lora_b(reinterpret_cast<const uint16_t*>(b) + at, panels, lora.rank, t, values);
    }
    if (const float* bias = linear.bias())
      for (int64_t i = 0; i < width; ++i) values[i] += bias[panel * kPanel + i];
    const int64_t at = (row + r) * call.out_stride + panel * kPanel;
    if (input.out_bf16)
      kernels_.to_bf16(values, count, static_cast<uint16_t*>(call.out) + at);
    else
      std::memcpy(static_cast<float*>(call.out) + at, values, static_cast<size_t>(count) * 4);
  }
}

}  // namespace ktserve
