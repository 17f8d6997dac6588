// Paged causal attention on a CPU: the KV blocks of all layers and the plan of a step.
//
// Memory, per layer:  block 0 | block 1 | ...          a block holds 16 positions of one sequence
//
//   block:      kv head 0 | kv head 1 | ...            what one work item reads is one run
//   kv head:    K tile | V tile                        2 x 16 x head_dim elements
//   K tile:     [D/S][16 positions][S]                 S = 2 for bf16, 1 for float32:
//                                                          d0d1 of p0 | d0d1 of p1 | ... d0d1 of p15
//                                                          d2d3 of p0 | ...
//   V tile:     [D/16][16/S][16 dims][S]                   d0: p0p1 | d1: p0p1 | ... d15: p0p1
//                                                          d0: p2p3 | ...
// An int8 cache has the elements of bf16's tiles in a byte each, and behind each tile a float32 scale of each of its
// positions: a key's, or value's, largest magnitude of this head by 127. A work item makes tiles of a chunk out of it:
// int16 ones with these scales, or, under bf16 products, bf16 ones, zeros where no position is seen. Under int16
// products it makes int16 tiles of a bf16 cache, too; those of few rows only in registers (attention_int16.hpp).
//
// Latent attention keeps one vector a position, whose first `latent` values are its value, too: a block is its K tile.
// Before a work item multiplies values, it makes V tiles of the chunk out of the K tiles.
//
// Tiles are so that scores come out one position per lane, values one dimension per lane, and a bf16 dot product finds
// its pairs side by side. Where an even position is a sequence's last, its odd neighbour in the V tile is zero: what a
// block held before cannot reach a new owner.
//
// Work: the (token, query head) rows of one kv head are cut into tiles of 32; the positions before them into
// chunks of 256, each with its own maximum. A chunk's (maximum, sum, values) do not depend on who else is
// in the step, and chunks are joined in rising order: a row's bits are the same alone or in any batch.
//
//   few tiles (decode, small chunks):  one work item per (tile, chunk); the last to finish a tile joins its chunks
//   many tiles (prefill):              one work item per group of up to 8 tiles, which walks their chunks itself: a
//                                      chunk's K and V come from memory once for the group
//
// Under a window a tile's chunks begin with the one that its first row's window begins in, and that chunk with the pair
// of blocks. What lies before is not read. A row's bits are still its own: what a chunk leaves out added zeros.
//
// A head's sink is one more score, of no value: it joins a row's total once, behind all chunks.
//
// New keys and values are written into their blocks before that; those of a row of one tile (decode) by the work items
// themselves, each what lies in its own chunk and kv head, since nobody else reads it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/attention_kernels.hpp"
#include "runtime/arena.hpp"
#include "runtime/isa.hpp"
#include "runtime/pool.hpp"

namespace ktserve {

enum class KvType { float32, bf16, int8 };

// What a bf16 or int8 cache is multiplied as where AVX-512 does it; by_cpu: as is faster on this CPU.
enum class Products { by_cpu, int16, bf16 };

struct AttentionShape {
  int layers = 0;
  int blocks = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  KvType kv = KvType::bf16;
  bool float_rows = false;  // q, k, v and out are float32 although the cache is not
  Products products = Products::by_cpu;
  int latent = 0;   // of a key, how many values are the value; 0: values are kept beside keys
  float scale = 0;  // of scores; 0: 1 / sqrt(head_dim)
  int window = 0;   // how many of the last positions a token sees, its own included; 0: all

  int value_dim() const { return latent > 0 ? latent : head_dim; }
};

// Rows of tokens: element strides from token to token; heads and dimensions are contiguous.
template <class T>
struct TokenRows {
  T* data;
  int64_t stride;
};

class PagedAttention {
 public:
  // Throws std::invalid_argument naming the field, and std::bad_alloc if the cache cannot be mapped.
  PagedAttention(WorkerPool& pool, AttentionShape shape, Isa isa);
  ~PagedAttention();
  PagedAttention(const PagedAttention&) = delete;
  PagedAttention& operator=(const PagedAttention&) = delete;

  // Row r has tokens [row_starts[r], row_starts[r + 1]) at the last positions of context_lens[r], its blocks in
  // block_tables[r]. A block that gets new positions is in one row's table only. Throws std::invalid_argument; the
  // former plan then stays.
  void plan(const std::vector<int64_t>& row_starts, const std::vector<int64_t>& context_lens,
            const std::vector<std::vector<int32_t>>& block_tables);

  // The layer's sinks: per query head a score beside those of the positions. Throws std::invalid_argument.
  void set_sinks(int layer, const float* sinks);

  // Writes k, v of the planned tokens into their blocks of the layer, then attends: out = softmax(q k / sqrt(D)) v.
  // With float rows k and v are rounded as they are written, q where a bf16 dot product takes it; out is not rounded.
  // An int8 cache rounds k and v to its scales. Latent attention reads no v; out has value_dim values a head.
  void forward(int layer, int64_t tokens, TokenRows<const void> q, TokenRows<const void> k, TokenRows<const void> v,
               TokenRows<void> out);

  int64_t tokens() const { return tokens_; }
  size_t cache_bytes() const { return cache_bytes_; }
  const char* cache() const { return cache_; }
  const AttentionShape& shape() const { return shape_; }
  bool bf16_rows() const { return row_bytes_ == 2; }
  bool int16_products() const { return shape_.kv != KvType::float32 && kernels_.int16_products(); }

 private:
  struct Row {
    int64_t first_token;
    int64_t tokens;
    int64_t context;
    int64_t table;          // index of its first block in tables_
    int64_t writes, count;  // its part of writes_, if its work items write
  };
  struct WorkItem {
    int32_t row;
    int32_t kv_head;
    int32_t tile;
    int32_t tiles;    // from there on; 1 where the chunks are work items of their own
    int32_t chunk;    // -1: all chunks of the tiles
    int32_t unit;     // of a tile cut into chunks: its counter
    int64_t partial;  // and where in partials_ this chunk's part goes
  };
  struct Write {
    int64_t token;  // first
    int32_t chunk;  // of the row's positions
    int32_t block;
    int16_t offset;
    int16_t count;
  };
  struct Call {
    char* cache;  // the layer's
    TokenRows<const char> q, k, v;
    TokenRows<char> out;
    const float* sinks;  // per query head, as powers of two; null: none
  };
  struct Tile {
    int64_t first_row;
    int rows;
    int64_t begin;  // the first position that its first row sees, down to a whole pair of blocks
    int64_t seen;   // positions that lie before the last row's end

    int first_chunk() const { return static_cast<int>(begin / kChunk); }
    int chunks() const { return static_cast<int>((seen + kChunk - 1) / kChunk) - first_chunk(); }
  };
  // A work item that makes tiles of blocks in rising order, each once, as its query tiles come to them.
  struct Making {
    const Call& call;
    const WorkItem& item;
    int worker;
    int64_t seen;  // positions that lie before the end of its last row
    int64_t made;  // blocks up to here, of those that its query tiles see, are made
  };
  // The positions of a chunk that a tile has to do with.
  struct Span {
    int64_t begin, end;
  };

  Tile tile_of(const Row& row, int tile) const;
  int64_t plan_chunks(const Row& row, int64_t tiles, WorkItem item, int64_t partial_floats);
  void write(const Call& call, const Write& write, int kv_head) const;
  void write_int8(const Call& call, const Write& write, int kv_head) const;
  // The V tile of a K tile's first `latent` values; zeros beside an odd last position of the `count` seen.
  void values_of_keys(const char* keys, int count, char* values) const;
  static Span span_of(int chunk, int64_t begin, int64_t seen);
  void make_tiles(Making& making, int64_t place);
  void attend(const Call& call, const WorkItem& item, int worker);
  void walk(const Call& call, const WorkItem& item, int worker);
  void run_chunk(Making& making, const Tile& tile, int chunk, float* queries, float* part);
  void join_last(const Call& call, const WorkItem& item, const Tile& tile);
  void finish(const Call& call, const WorkItem& item, const Tile& tile, float* part) const;
  char* kv_tile(char* cache, int32_t block, int kv_head) const {
    return cache + (static_cast<int64_t>(block) * shape_.kv_heads + kv_head) * planes_ * tile_bytes_;
  }
  // A part: sums [rows, value_dim], then the rows' maxima, then their totals; whole cache lines.
  int64_t part_floats(int rows) const { return (static_cast<int64_t>(rows) * (shape_.value_dim() + 2) + 15) / 16 * 16; }
  // A worker's scratch: scores, a part; then per tile of a group: queries, a part. Aligned to cache lines.
  float* scratch(int worker) { return reinterpret_cast<float*>(scratch_.data()) + scratch_floats_ * worker; }
  // Whether tiles of the cache become int16 or bf16 ones before they are multiplied.
  bool makes_keys() const { return shape_.kv == KvType::int8 || int16_products(); }
  int keys_limit() const;  // of int16 keys and queries: the largest magnitude whose scores fit int32
  // What a worker has made of a block of the chunk: a K tile, behind it a V tile.
  char* made(int worker, int64_t block) {
    const int64_t in_chunk = block % (kChunk / kKvBlock);
    return reinterpret_cast<char*>(made_.data()) + (worker * (kChunk / kKvBlock) + in_chunk) * 2 * made_bytes_;
  }
  float* partial(int64_t offset) { return reinterpret_cast<float*>(partials_.data()) + offset; }

  WorkerPool& pool_;
  AttentionShape shape_;
  AttentionKernels kernels_;
  void (*chunk_)(const ChunkWork&);  // the one of kernels_ that this cache and these rows take
  int group_;                        // query heads of a kv head
  int64_t element_bytes_;            // of the tiles that are multiplied
  int64_t row_bytes_;                // of an element of q, k, v and out
  int64_t tile_bytes_;               // of the cache's
  int64_t made_bytes_;               // of a tile that a work item makes
  int64_t planes_;                   // tiles of a head in a block
  size_t cache_bytes_;
  char* cache_;
  std::vector<std::vector<float>> sinks_;  // per layer [heads], as powers of two; empty: none
  int64_t tokens_ = 0;
  std::vector<Row> rows_;
  std::vector<int32_t> tables_;
  std::vector<WorkItem> items_;
  std::vector<Write> writes_;
  std::vector<Write> first_writes_;  // before any work item: of rows of several tiles
  Arena partials_;
  Arena scratch_;
  Arena made_;
  int64_t scratch_floats_;                 // of a worker
  std::vector<std::atomic<int>> pending_;  // per unit: chunks still to come
  std::vector<int> unit_chunks_;
};

}  // namespace ktserve
