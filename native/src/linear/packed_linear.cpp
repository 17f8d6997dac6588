#include "linear/packed_linear.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "packing/pack.hpp"

namespace ktserve {
namespace {

constexpr int64_t kShardPanels = 4;           // shards hold whole runs of so many: work items are as large
constexpr int64_t kInlineElements = 1 << 12;  // so little is unpacked without waking the pool

void require(bool holds, const char* name, int64_t value, const char* allowed) {
  if (!holds) throw std::invalid_argument(name + (": " + std::to_string(value)) + "; allowed is " + allowed);
}

std::vector<Line> lines(int64_t bytes) {
  return std::vector<Line>(static_cast<size_t>(round_up(bytes, 64) / 64));
}

}  // namespace

PackedLinear::PackedLinear(const std::string& format, int64_t n, int64_t k, int shards, const float* bias,
                           const std::vector<int>& nodes)
    : n_(n), k_(k), format_(format_named(format)), panel_bytes_(panel_size(format_, k)) {
  require(n >= 1, "n", n, "1 or more");
  require(k >= 1 && k % step_of_k(format_) == 0, "k", k, "a multiple of the format's block");
  require(shards >= 1 && shards <= 64, "shards", shards, "1 to 64");
  const int64_t named = static_cast<int64_t>(nodes.size());
  require(named == 0 || named == shards, "nodes", named, "none, or one for each shard");
  shards_.resize(static_cast<size_t>(shards));
  for (int s = 0; s < shards; ++s) {
    const int64_t panels = first_panel(s + 1) - first_panel(s);
    const int node = shards > 1 && named > 0 ? nodes[static_cast<size_t>(s)] : -1;
    shards_[static_cast<size_t>(s)] = Arena(static_cast<size_t>(panels * panel_bytes_), node);
  }
  if (bias != nullptr) {
    bias_.assign(static_cast<size_t>(panels_of(n) * kPanel), 0.0f);
    std::copy(bias, bias + n, bias_.begin());
  }
}

void PackedLinear::load(WorkerPool& pool, const std::string& source_name, const SourceRows& data, int64_t data_bytes) {
  const SourceType& source = source_type(source_name);
  require(k_ % source.block == 0, "k", k_, "a multiple of the type's block");
  require(data_bytes == n_ * (k_ / source.block) * source.block_bytes, "data_bytes", data_bytes, "n rows of k");
  check_pack(source, format_, n_, k_);
  // Begun by the workers of the shard's node, which also is where an unbound page would be touched first.
  std::vector<int64_t> starts;
  for (int g = 0; g <= pool.groups(); ++g) starts.push_back(first_panel(shards() * g / pool.groups()));
  pool.parallel_for_groups(starts, [&](int64_t p, int) {
    pack_panels(source, format_, data, n_, k_, p, p + 1, const_cast<uint8_t*>(panel(p)));
  });
}

int64_t PackedLinear::first_panel(int shard) const {
  const int64_t runs = (panels_of(n_) + kShardPanels - 1) / kShardPanels;
  return std::min(panels_of(n_), runs * shard / shards() * kShardPanels);
}

const uint8_t* PackedLinear::panel(int64_t p) const {
  int shard = 0;
  while (p >= first_panel(shard + 1)) ++shard;
  return shards_[static_cast<size_t>(shard)].data() + (p - first_panel(shard)) * panel_bytes_;
}

std::vector<Span> PackedLinear::spans() const {
  std::vector<Span> all;
  for (int s = 0; s < shards(); ++s) {
    all.push_back({shards_[static_cast<size_t>(s)].data(), (first_panel(s + 1) - first_panel(s)) * panel_bytes_});
  }
  return all;
}

void PackedLinear::set_adapter(int slot, const void* a, const void* b, bool is_bf16, int64_t rank, float scale) {
  require(slot >= 1, "slot", slot, "1 or more");
  require(rank >= 1, "rank", rank, "1 or more");
  auto made = std::make_shared<LoraWeights>();
  made->rank = rank;
  made->scale = scale;
  made->a = lines(packed_size(adapter_format(), rank, k_));
  pack_panels(source_type(is_bf16 ? "BF16" : "F32"), adapter_format(), static_cast<const uint8_t*>(a), rank, k_, 0,
              panels_of(rank), made->a.data()->bytes);
  const int64_t values = panels_of(n_) * rank * kPanel;
  if (format_ == Format::f32) {
    made->b = lines(values * 4);
    pack_lora_b_f32(b, is_bf16, n_, rank, reinterpret_cast<float*>(made->b.data()->bytes));
  } else {
    made->b = lines(values * 2);
    pack_lora_b(b, is_bf16, n_, rank, 1.0f, reinterpret_cast<uint16_t*>(made->b.data()->bytes));
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

void PackedLinear::rows(WorkerPool& pool, const int64_t* ids, int64_t count, float* out) const {
  for (int64_t i = 0; i < count; ++i) require(ids[i] >= 0 && ids[i] < n_, "row", ids[i], "0 to n - 1");
  const auto one = [&](int64_t i, int) {
    const int64_t row = ids[i] % kPanel;
    unpack_rows(format_, panel(ids[i] / kPanel), k_, row, row + 1, out + i * k_);
  };
  if (count * k_ > kInlineElements) {
    pool.parallel_for(count, one);
    return;
  }
  for (int64_t i = 0; i < count; ++i) one(i, 0);
}

}  // namespace ktserve
