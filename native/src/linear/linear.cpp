#include "linear/linear.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "core/pack.hpp"

namespace ktserve {
namespace {

constexpr int kWideKind = kFormats;       // activation rows as float32
constexpr int64_t kSlabRows = 1024;       // rows of one pass: bounds the scratch
constexpr int64_t kPieceRows = 96;        // a whole number of every kernel's row tiles
constexpr int64_t kPieceBytes = 1 << 18;  // weights of a piece with few rows: some ten microseconds of reading
constexpr int64_t kMaxPiecePanels = 16;
constexpr int64_t kInlineElements = 32768;  // so little is packed without waking the pool
constexpr int64_t kAdapterRows = 64;        // of one piece of step 2

int kind_of(const WeightForm& form) {
  return form.wide ? kWideKind : static_cast<int>(form.format);
}

void require(bool holds, const char* name, int64_t value, const char* allowed) {
  if (!holds) throw std::invalid_argument(name + (": " + std::to_string(value)) + "; allowed is " + allowed);
}

float plain_value(const SourceType& source, const uint8_t* data, int64_t index) {
  if (source.block_bytes == 4) {
    float v;
    std::memcpy(&v, data + index * 4, 4);
    return v;
  }
  uint16_t half;
  std::memcpy(&half, data + index * 2, 2);
  return source.name[0] == 'B' ? bf16_to_f32(half) : f16_to_f32(half);
}

// Panels [k][16 outputs] of float32; outputs beyond n stay zero.
void pack_wide(const SourceType& source, const uint8_t* data, int64_t n, int64_t k, int64_t panel, float* out) {
  for (int64_t i = 0; i < std::min(kPanel, n - panel * kPanel); ++i)
    for (int64_t j = 0; j < k; ++j) out[j * kPanel + i] = plain_value(source, data, (panel * kPanel + i) * k + j);
}

int64_t wide_panel_bytes(int64_t k) {
  return k * kPanel * 4;
}

std::vector<Line> lines(int64_t bytes) {
  return std::vector<Line>(static_cast<size_t>(round_up(bytes, 64) / 64));
}

// What the arena held is lost when it grows.
uint8_t* grow(Arena& arena, int64_t bytes) {
  if (static_cast<size_t>(bytes) > arena.bytes()) arena = Arena(static_cast<size_t>(bytes + bytes / 2));
  return arena.data();
}

}  // namespace

WeightForm form_named(const std::string& name) {
  if (name == "f32") return {true, Format::bf16};
  return {false, format_named(name)};
}

PackedLinear::PackedLinear(WorkerPool& pool, const std::string& source_name, const std::string& form,
                           const uint8_t* data, int64_t data_bytes, int64_t n, int64_t k, const float* bias)
    : n_(n), k_(k), form_(form_named(form)) {
  const SourceType& source = source_type(source_name);
  require(n >= 1, "n", n, "1 or more");
  require(k >= 1 && k % source.block == 0, "k", k, "a multiple of the type's block");
  require(data_bytes == n * (k / source.block) * source.block_bytes, "data_bytes", data_bytes, "n rows of k");
  if (form_.wide) {
    if (source.block != 1) throw std::invalid_argument("form: f32 for " + source_name + "; allowed is F32, F16, BF16");
    panel_bytes_ = wide_panel_bytes(k);
  } else {
    check_pack(source, form_.format, n, k);
    panel_bytes_ = panel_size(form_.format, k);
  }
  weights_ = Arena(static_cast<size_t>(panels_of(n) * panel_bytes_));
  pool.parallel_for(panels_of(n), [&](int64_t p, int) {
    uint8_t* out = weights_.data() + p * panel_bytes_;
    if (form_.wide)
      pack_wide(source, data, n, k, p, reinterpret_cast<float*>(out));
    else
      pack_panels(source, form_.format, data, n, k, p, p + 1, out);
  });
  if (bias != nullptr) bias_.assign(bias, bias + n);
}

void PackedLinear::set_adapter(int slot, const void* a, const void* b, bool is_bf16, int64_t rank, float scale) {
  require(slot >= 1, "slot", slot, "1 or more");
  require(rank >= 1, "rank", rank, "1 or more");
  const SourceType& source = source_type(is_bf16 ? "BF16" : "F32");
  const uint8_t* a_bytes = static_cast<const uint8_t*>(a);
  const uint8_t* b_bytes = static_cast<const uint8_t*>(b);
  auto made = std::make_shared<LoraWeights>();
  made->rank = rank;
  const int64_t values = panels_of(n_) * rank * kPanel;
  if (form_.wide) {
    made->a = lines(panels_of(rank) * wide_panel_bytes(k_));
    made->b = lines(values * 4);
    uint8_t* panels = made->a.data()->bytes;
    for (int64_t p = 0; p < panels_of(rank); ++p)
      pack_wide(source, a_bytes, rank, k_, p, reinterpret_cast<float*>(panels + p * wide_panel_bytes(k_)));
    float* out = reinterpret_cast<float*>(made->b.data()->bytes);
    for (int64_t i = 0; i < n_ * rank; ++i) {
      const int64_t row = i / rank;
      out[(row / kPanel * rank + i % rank) * kPanel + row % kPanel] = plain_value(source, b_bytes, i) * scale;
    }
  } else {
    made->a = lines(packed_size(Format::bf16, rank, k_));
    made->b = lines(values * 2);
    pack_panels(source, Format::bf16, a_bytes, rank, k_, 0, panels_of(rank), made->a.data()->bytes);
    pack_lora_b(b, is_bf16, n_, rank, scale, reinterpret_cast<uint16_t*>(made->b.data()->bytes));
  }
  const std::lock_guard lock(mutex_);
  if (adapters_.size() <= static_cast<size_t>(slot)) adapters_.resize(static_cast<size_t>(slot) + 1);
  adapters_[static_cast<size_t>(slot)] = std::move(made);
}

void PackedLinear::clear_adapter(int slot) {
  const std::lock_guard lock(mutex_);
  if (slot >= 0 && static_cast<size_t>(slot) < adapters_.size()) adapters_[static_cast<size_t>(slot)] = nullptr;
}

std::shared_ptr<const LoraWeights> PackedLinear::adapter(int slot) const {
  const std::lock_guard lock(mutex_);
  return static_cast<size_t>(slot) < adapters_.size() ? adapters_[static_cast<size_t>(slot)] : nullptr;
}

bool PackedLinear::has_adapters() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(adapters_.begin(), adapters_.end(), [](const auto& held) { return held != nullptr; });
}

std::vector<float> PackedLinear::row(int64_t index) const {
  require(index >= 0 && index < n_, "row", index, "0 to n - 1");
  std::vector<float> out(static_cast<size_t>(k_));
  if (!form_.wide) {
    unpack_rows(form_.format, weights_.data(), k_, index, index + 1, out.data());
    return out;
  }
  const float* w = reinterpret_cast<const float*>(panel(index / kPanel)) + index % kPanel;
  for (int64_t j = 0; j < k_; ++j) out[static_cast<size_t>(j)] = w[j * kPanel];
  return out;
}

LinearRunner::LinearRunner(WorkerPool& pool, Isa isa)
    : pool_(pool),
      kernels_(kernels(isa)),
      wide_(isa == Isa::avx2 ? kWideAvx2 : kWideAvx512),
      packed_(kWideKind + 1),
      sorted_(kWideKind + 1),
      tiles_(static_cast<size_t>(pool.threads()) * kPieceRows * kMaxPiecePanels * kPanel * sizeof(float)) {
  if (isa == Isa::none) throw std::invalid_argument("isa: none; allowed are avx2, avx512, amx");
}

int64_t LinearRunner::row_bytes(int kind, int64_t k) const {
  return kind == kWideKind ? round_up(k * 4, 64) : round_up(kernels_.row_bytes(static_cast<Format>(kind), k), 64);
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

void LinearRunner::pack_rows(const LinearInput& input, int64_t k, int kind, const std::vector<int64_t>* order,
                             uint8_t* to) {
  const int64_t rows = order == nullptr ? input.rows : static_cast<int64_t>(order->size());
  const int64_t bytes = row_bytes(kind, k);
  const auto one = [&](int64_t i) {
    const int64_t from = (order == nullptr ? i : (*order)[static_cast<size_t>(i)]) * input.stride;
    uint8_t* row = to + i * bytes;
    const uint16_t* halves = static_cast<const uint16_t*>(input.x) + from;
    const float* floats = static_cast<const float*>(input.x) + from;
    if (kind != kWideKind) {
      if (input.is_bf16)
        kernels_.pack_bf16(static_cast<Format>(kind), halves, k, 0, k, row);
      else
        kernels_.pack_f32(static_cast<Format>(kind), floats, k, 0, k, row);
    } else if (input.is_bf16) {
      kernels_.from_bf16(halves, k, reinterpret_cast<float*>(row));
    } else {
      std::memcpy(row, floats, static_cast<size_t>(k) * 4);
    }
  };
  if (rows * k <= kInlineElements) {
    for (int64_t i = 0; i < rows; ++i) one(i);
    return;
  }
  const int64_t per_piece = std::max<int64_t>(1, kInlineElements / 2 / k);
  pool_.parallel_for((rows + per_piece - 1) / per_piece, [&](int64_t piece, int) {
    for (int64_t i = piece * per_piece; i < std::min(rows, (piece + 1) * per_piece); ++i) one(i);
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
  bool needed[kWideKind + 1] = {};
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
    needed[calls[c].linear->form().wide ? kWideKind : static_cast<int>(Format::bf16)] = true;
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
  for (int kind : {static_cast<int>(Format::bf16), kWideKind}) {
    if (!needed[kind]) continue;
    const int64_t bytes = static_cast<int64_t>(order.size()) * row_bytes(kind, k);
    pack_rows(input, k, kind, &order, grow(sorted_[static_cast<size_t>(kind)], bytes));
  }
  pool_.parallel_for(static_cast<int64_t>(units.size()), [&](int64_t i, int) {
    const LoraUnit& u = units[static_cast<size_t>(i)];
    const int64_t padded = round_up(u.lora->rank, kPanel);
    const int kind = u.linear->form().wide ? kWideKind : static_cast<int>(Format::bf16);
    const int64_t bytes = row_bytes(kind, k);
    const uint8_t* x = sorted_[static_cast<size_t>(kind)].data() + u.begin * bytes;
    if (u.linear->form().wide) {
      wide_.dot({reinterpret_cast<const float*>(u.lora->a.data()->bytes), padded / kPanel, k,
                 reinterpret_cast<const float*>(x), bytes / 4, u.count, u.t, padded});
    } else {
      kernels_.dot({Format::bf16, u.lora->a.data()->bytes, padded / kPanel, k, x, bytes, u.count, u.t, padded});
    }
  });
}

void LinearRunner::run_slab(const std::vector<LinearCall>& calls, const LinearInput& input) {
  const int64_t k = calls[0].linear->k();
  bool done[kWideKind + 1] = {};
  for (const LinearCall& call : calls) {
    const int kind = kind_of(call.linear->form());
    if (done[kind]) continue;
    done[kind] = true;
    pack_rows(input, k, kind, nullptr, grow(packed_[static_cast<size_t>(kind)], input.rows * row_bytes(kind, k)));
  }
  std::vector<CallState> states(calls.size());
  run_adapters(calls, input, states);

  const int64_t row_blocks = (input.rows + kPieceRows - 1) / kPieceRows;
  int64_t pieces = 0;
  for (size_t c = 0; c < calls.size(); ++c) {
    const PackedLinear& linear = *calls[c].linear;
    int64_t panels = 4;
    if (input.rows <= 16) panels = std::clamp<int64_t>(kPieceBytes / linear.panel_bytes() / 4 * 4, 4, kMaxPiecePanels);
    while (panels > 2 && panels_of(linear.n()) * row_blocks < panels * 4 * pool_.threads()) panels /= 2;
    states[c].panels_per_piece = panels;
    states[c].first_piece = pieces;
    pieces += (panels_of(linear.n()) + panels - 1) / panels * row_blocks;
  }
  pool_.parallel_for(pieces, [&](int64_t piece, int worker) {
    size_t c = calls.size() - 1;
    while (states[c].first_piece > piece) --c;
    run_piece(calls[c], states[c], input, piece - states[c].first_piece, worker);
  });
}

void LinearRunner::run_piece(const LinearCall& call, const CallState& state, const LinearInput& input, int64_t piece,
                             int worker) {
  const PackedLinear& linear = *call.linear;
  const int kind = kind_of(linear.form());
  const int64_t blocks = (input.rows + kPieceRows - 1) / kPieceRows;
  const int64_t row = input.rows * (piece % blocks) / blocks;
  const int64_t rows = input.rows * (piece % blocks + 1) / blocks - row;
  const int64_t panel = piece / blocks * state.panels_per_piece;
  const int64_t panels = std::min(state.panels_per_piece, panels_of(linear.n()) - panel);
  const int64_t width = panels * kPanel;
  const int64_t bytes = row_bytes(kind, linear.k());
  const uint8_t* x = packed_[static_cast<size_t>(kind)].data() + row * bytes;
  float* tile = reinterpret_cast<float*>(tiles_.data()) + worker * kPieceRows * kMaxPiecePanels * kPanel;
  if (kind == kWideKind) {
    wide_.dot({reinterpret_cast<const float*>(linear.panel(panel)), panels, linear.k(),
               reinterpret_cast<const float*>(x), bytes / 4, rows, tile, width});
  } else {
    kernels_.dot({linear.form().format, linear.panel(panel), panels, linear.k(), x, bytes, rows, tile, width});
  }
  const int64_t count = std::min(width, linear.n() - panel * kPanel);
  const float* bias = linear.bias() == nullptr ? nullptr : linear.bias() + panel * kPanel;
  const int64_t element = input.out_bf16 ? 2 : 4;
  for (int64_t r = 0; r < rows; ++r) {
    float* values = tile + r * width;
    const auto index = static_cast<size_t>(row + r);
    if (!state.by_row.empty() && state.by_row[index] != nullptr) {
      const LoraWeights& lora = *state.by_row[index];
      const uint8_t* b = lora.b.data()->bytes + panel * lora.rank * kPanel * (kind == kWideKind ? 4 : 2);
      if (kind == kWideKind)
        wide_.lora_b(reinterpret_cast<const float*>(b), panels, lora.rank, state.t_by_row[index], values);
      else
        kernels_.lora_b(reinterpret_cast<const uint16_t*>(b), panels, lora.rank, state.t_by_row[index], values);
    }
    char* out = static_cast<char*>(call.out) + ((row + r) * call.out_stride + panel * kPanel) * element;
    (input.out_bf16 ? wide_.store_bf16 : wide_.store_float)(values, bias, count, out);
  }
}

}  // namespace ktserve
