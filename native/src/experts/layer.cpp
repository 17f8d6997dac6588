#include "experts/layer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ktserve {
namespace {

void check_size(const char* name, int64_t value) {
  if (value < 32 || value % 32 != 0) {
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + "; it must be a multiple of 32");
  }
}

bool any_nonzero(const uint8_t* bytes, int64_t count, int64_t value_bytes) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < value_bytes; ++j) {
      const uint8_t byte = bytes[i * value_bytes + j];
      if (j + 1 == value_bytes ? (byte & 0x7f) != 0 : byte != 0) return true;  // -0 is zero
    }
  }
  return false;
}

}  // namespace

ExpertLayer::ExpertLayer(const LayerShape& shape, const std::vector<int>& nodes) : shape_(shape) {
  if (shape.experts < 1) throw std::invalid_argument("experts: " + std::to_string(shape.experts) + "; at least 1");
  if (shape.shards < 1 || shape.shards > 64) {
    throw std::invalid_argument("shards: " + std::to_string(shape.shards) + "; allowed are 1 to 64");
  }
  if (!nodes.empty() && nodes.size() != static_cast<size_t>(shape.shards)) {
    throw std::invalid_argument("nodes: " + std::to_string(nodes.size()) + "; allowed is one for each shard, or none");
  }
  if (!(shape.activation.limit >= 0) || !std::isfinite(shape.activation.limit) ||
      !std::isfinite(shape.activation.alpha)) {
    throw std::invalid_argument("limit: " + std::to_string(shape.activation.limit) + " (alpha " +
                                std::to_string(shape.activation.alpha) + "); allowed are finite numbers from 0 on");
  }
  choices_ = std::vector<std::atomic<int64_t>>(static_cast<size_t>(shape.experts));
  check_size("hidden size", shape.hidden);
  check_size("expert intermediate size", shape.intermediate);
  for (int p = 0; p < 3; ++p) {
    const int64_t unit = info(shape.formats[p]).unit;
    if (inner_of(p) % unit != 0) {
      throw std::invalid_argument(std::string(info(shape.formats[p]).name) + ": the inner size is " +
                                  std::to_string(inner_of(p)) + "; it must be a multiple of " + std::to_string(unit));
    }
  }
  for (int s = 0; s < shape.shards; ++s) {
    const int node = shape.shards > 1 && !nodes.empty() ? nodes[static_cast<size_t>(s)] : -1;
    shards_.emplace_back(static_cast<size_t>(shard_bytes(s)), node);
  }
}

// Shards hold whole pairs of panels: 32 outputs are one block of the next projection's input.
int64_t ExpertLayer::first_panel(int projection, int shard) const {
  return rows_of(projection) / 32 * shard / shape_.shards * 2;
}

int64_t ExpertLayer::projection_offset(int shard, int projection) const {
  int64_t offset = 0;
  for (int p = 0; p < projection; ++p) {
    offset += shape_.experts * shard_panels(p, shard) * panel_size(shape_.formats[p], inner_of(p));
  }
  return offset;
}

int64_t ExpertLayer::bias_offset(int shard, int projection) const {
  int64_t values = 0;
  for (int p = 0; p < projection && shape_.biased; ++p) values += shape_.experts * shard_panels(p, shard) * kPanel;
  return projection_offset(shard, 3) + values * 4;
}

int ExpertLayer::shard_of(int projection, int64_t panel) const {
  int shard = 0;
  while (panel >= first_panel(projection, shard + 1)) ++shard;
  return shard;
}

uint8_t* ExpertLayer::panel(int projection, int64_t expert, int64_t panel) const {
  const int shard = shard_of(projection, panel);
  const int64_t at = expert * shard_panels(projection, shard) + panel - first_panel(projection, shard);
  return shards_[static_cast<size_t>(shard)].data() + projection_offset(shard, projection) +
         at * panel_size(shape_.formats[projection], inner_of(projection));
}

float* ExpertLayer::bias(int projection, int64_t expert, int64_t panel) const {
  if (!shape_.biased) return nullptr;
  const int shard = shard_of(projection, panel);
  const int64_t at = expert * shard_panels(projection, shard) + panel - first_panel(projection, shard);
  uint8_t* begin = shards_[static_cast<size_t>(shard)].data() + bias_offset(shard, projection);
  return reinterpret_cast<float*>(begin) + at * kPanel;
}

int64_t ExpertLayer::bytes() const {
  int64_t total = 0;
  for (int s = 0; s < shape_.shards; ++s) total += shard_bytes(s);
  return total;
}

std::vector<Span> ExpertLayer::spans() const {
  std::vector<Span> all;
  for (int s = 0; s < shape_.shards; ++s) all.push_back({shard(s).data(), shard_bytes(s)});
  return all;
}

void ExpertLayer::load(WorkerPool& pool, int projection, const SourceType& source, int64_t first,
                       const std::vector<SourceRows>& data) {
  const Format format = shape_.formats[projection];
  const int64_t n = rows_of(projection);
  const int64_t k = inner_of(projection);
  const int64_t count = static_cast<int64_t>(data.size());
  check_pack(source, format, n, k);
  if (first < 0 || first + count > shape_.experts) {
    throw std::invalid_argument("experts " + std::to_string(first) + " to " + std::to_string(first + count - 1) +
                                " of " + std::to_string(shape_.experts));
  }
  // Work items are panels of a shard, of one expert after the other as they lie in the file; a quarter of a megabyte to
  // read, or less where there would be too few of them.
  constexpr int64_t read_bytes = 1 << 18;
  const int64_t most = read_bytes / (kPanel * (k / source.block) * source.block_bytes);
  const int64_t step = std::max<int64_t>(2, std::min(most, count * (n / kPanel) / (4 * pool.threads())));
  const auto pieces = [&](int shard) { return (shard_panels(projection, shard) + step - 1) / step; };
  std::vector<int64_t> begins{0};  // of each shard
  for (int s = 0; s < shape_.shards; ++s) begins.push_back(begins.back() + count * pieces(s));
  // Begun by the workers of the shard's node, which also is where an unbound page would be touched first.
  std::vector<int64_t> starts;
  for (int g = 0; g <= pool.groups(); ++g)
    starts.push_back(begins[static_cast<size_t>(shape_.shards * g / pool.groups())]);
  pool.parallel_for_groups(starts, [&](int64_t item, int) {
    const int shard = static_cast<int>(std::upper_bound(begins.begin(), begins.end(), item) - begins.begin()) - 1;
    const int64_t nth = item - begins[static_cast<size_t>(shard)];
    const int64_t expert = nth / pieces(shard);
    const int64_t begin = first_panel(projection, shard) + nth % pieces(shard) * step;
    const int64_t end = std::min(begin + step, first_panel(projection, shard + 1));
    try {
      pack_panels(source, format, data[static_cast<size_t>(expert)], n, k, begin, end,
                  panel(projection, first + expert, begin));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("expert " + std::to_string(first + expert) + ", " + error.what());
    }
  });
}

void ExpertLayer::load_bias(int projection, const float* values) {
  if (!shape_.biased) throw std::invalid_argument("biases: this layer was made without");
  const int64_t rows = rows_of(projection);
  for (int64_t i = 0; i < shape_.experts * rows; ++i) {
    if (!std::isfinite(values[i])) {
      throw std::invalid_argument("expert " + std::to_string(i / rows) + ", bias of row " + std::to_string(i % rows) +
                                  ": it is not finite");
    }
  }
  for (int64_t e = 0; e < shape_.experts; ++e) {
    for (int s = 0; s < shape_.shards; ++s) {
      const int64_t panels = shard_panels(projection, s);
      if (panels == 0) continue;  // a small matrix over many shards
      const int64_t first = first_panel(projection, s);
      std::memcpy(bias(projection, e, first), values + e * rows + first * kPanel,
                  static_cast<size_t>(panels * kPanel) * 4);
    }
  }
}

const LayerLora* ExpertLayer::lora(int slot) const {
  if (slot <= 0) return nullptr;
  const std::lock_guard lock(mutex_);
  return static_cast<size_t>(slot) < loras_.size() ? loras_[static_cast<size_t>(slot)].get() : nullptr;
}

void ExpertLayer::clear_lora(int slot) {
  const std::lock_guard lock(mutex_);
  if (slot > 0 && static_cast<size_t>(slot) < loras_.size()) loras_[static_cast<size_t>(slot)].reset();
}

void ExpertLayer::set_lora(WorkerPool& pool, int slot, const LoraSource& source) {
  if (slot < 1 || slot > 65535)
    throw std::invalid_argument("slot: " + std::to_string(slot) + "; allowed are 1 to 65535");
  if (source.rank < 1 || source.rank > 1024) {
    throw std::invalid_argument("rank: " + std::to_string(source.rank) + "; allowed are 1 to 1024");
  }
  auto lora = std::make_unique<LayerLora>();
  const int64_t r = source.rank;
  const Format form = shape_.lora_format();
  lora->rank = r;
  std::copy(source.scales, source.scales + 3, lora->scales);
  lora->a_gate_up = 0;
  lora->a_down = packed_size(form, 2 * r, shape_.hidden);
  int64_t offset = lora->a_down + packed_size(form, r, shape_.intermediate);
  for (int p = 0; p < 3; ++p) {
    lora->b[p] = offset;
    offset += round_up(rows_of(p) * r * (form == Format::bf16 ? 2 : 4), 64);
  }
  lora->expert_bytes = offset;
  lora->memory = Arena(static_cast<size_t>(offset * shape_.experts));
  lora->present.assign(static_cast<size_t>(shape_.experts), 0);
  const SourceType type = source_type(source.bf16 ? "BF16" : "F32");
  const int64_t size = source.bf16 ? 2 : 4;
  const auto at = [&](const void* tensor, int64_t values) {
    return static_cast<const uint8_t*>(tensor) + values * size;
  };
  pool.parallel_for(shape_.experts, [&](int64_t e, int) {
    uint8_t* base = lora->memory.data() + e * lora->expert_bytes;
    std::vector<uint8_t> both(static_cast<size_t>(2 * r * shape_.hidden * size));
    const size_t half = both.size() / 2;
    std::memcpy(both.data(), at(source.a[kGate], e * r * shape_.hidden), half);
    std::memcpy(both.data() + half, at(source.a[kUp], e * r * shape_.hidden), half);
    pack_panels(type, form, both.data(), 2 * r, shape_.hidden, 0, panels_of(2 * r), base + lora->a_gate_up);
    pack_panels(type, form, at(source.a[kDown], e * r * shape_.intermediate), r, shape_.intermediate, 0, panels_of(r),
                base + lora->a_down);
    bool present = false;
    for (int p = 0; p < 3; ++p) {
      const uint8_t* b = at(source.b[p], e * rows_of(p) * r);
      present = present || any_nonzero(b, rows_of(p) * r, size);
      if (form == Format::bf16) {
        pack_lora_b(b, source.bf16, rows_of(p), r, 1.0f, reinterpret_cast<uint16_t*>(base + lora->b[p]));
      } else {
        pack_lora_b_f32(b, source.bf16, rows_of(p), r, reinterpret_cast<float*>(base + lora->b[p]));
      }
    }
    lora->present[static_cast<size_t>(e)] = present ? 1 : 0;
  });
  const std::lock_guard lock(mutex_);  // a task may be looking other slots up meanwhile
  if (static_cast<size_t>(slot) >= loras_.size()) loras_.resize(static_cast<size_t>(slot) + 1);
  loras_[static_cast<size_t>(slot)] = std::move(lora);
}

}  // namespace ktserve
