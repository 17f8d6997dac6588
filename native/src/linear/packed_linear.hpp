// One projection's weights in the packed layout (packing/format.hpp), and its adapters.
//
//   shard 0 (node 0):  panels [0, P/S)      shard 1 (node 1):  panels [P/S, 2P/S) ...
//
// The output panels are split over the NUMA nodes, each part in its node's memory. A row is one output: of an
// embedding, one token.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "packing/format.hpp"
#include "packing/packed_file.hpp"
#include "packing/source_rows.hpp"
#include "runtime/arena.hpp"
#include "runtime/pool.hpp"

namespace ktserve {

// On the heap: a model's adapters are too many for a mapping each.
struct alignas(64) Line {
  uint8_t bytes[64];
};

struct LoraWeights {
  int64_t rank = 0;
  float scale = 1;
  std::vector<Line> a;  // A [rank, k], packed as bf16, or as f32 for f32 weights
  std::vector<Line> b;  // B in panels of [rank][16], of the same type
};

// Not changed after loading, but for its adapters.
class PackedLinear {
 public:
  // Zeros until `load` or `read`. bias: n floats or null. nodes: the memory node of each shard (WorkerPool::nodes), or
  // nothing: wherever it is touched first.
  PackedLinear(const std::string& format, int64_t n, int64_t k, int shards, const float* bias,
               const std::vector<int>& nodes = {});
  // Packs `data` ([n, k] in a GGML type).
  void load(WorkerPool& pool, const std::string& source, const SourceRows& data, int64_t data_bytes);
  // From or to a file, at `offset`; the checksum of the bytes (packing/packed_file.hpp).
  uint64_t read(WorkerPool& pool, int file, int64_t offset) { return read_spans(pool, spans(), file, offset); }
  uint64_t write(WorkerPool& pool, int file, int64_t offset) const { return write_spans(pool, spans(), file, offset); }

  // Read-only, of a file that others keep from changing (adopt_file); the checksum of the bytes.
  uint64_t adopt(WorkerPool& pool, const std::shared_ptr<MappedFile>& file, int64_t offset) {
    return adopt_file(pool, shards_, file, offset, bytes());
  }

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  Format format() const { return format_; }
  // Of the rows that an adapter's A multiplies, and of A.
  Format adapter_format() const { return format_ == Format::f32 ? Format::f32 : Format::bf16; }
  int64_t bytes() const { return panels_of(n_) * panel_bytes_; }
  int shards() const { return static_cast<int>(shards_.size()); }
  int64_t first_panel(int shard) const;  // of shard shards(): how many there are
  // Panel p; the following ones of the same shard lie behind it.
  const uint8_t* panel(int64_t p) const;
  int64_t panel_bytes() const { return panel_bytes_; }
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }

  // a [rank, k], b [n, rank]: both float32 or both bf16. No call in flight may use the slot.
  void set_adapter(int slot, const void* a, const void* b, bool is_bf16, int64_t rank, float scale);
  void clear_adapter(int slot);
  // What a slot holds now, or null.
  std::shared_ptr<const LoraWeights> adapter(int slot) const;
  bool has_adapters() const;
  // out [count, k] float32: the weights of outputs ids[0], ids[1] ..., as GGUF's own formulas give them.
  void rows(WorkerPool& pool, const int64_t* ids, int64_t count, float* out) const;

 private:
  std::vector<Span> spans() const;

  int64_t n_, k_;
  Format format_;
  int64_t panel_bytes_;
  std::vector<Arena> shards_;
  std::vector<float> bias_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const LoraWeights>> adapters_;  // by slot
};

}  // namespace ktserve
