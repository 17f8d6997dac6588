#include "attention/attention.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace ktserve {
namespace {

constexpr int64_t kSplitTiles = 4;         // a row of at most so many tiles is cut into chunks as well
constexpr int64_t kWalkTiles = 8;          // of one work item that walks chunks
constexpr int64_t kCachedTiles = 4;        // the same where a second-level cache keeps a head's KV between work items:
constexpr int64_t kCachedBytes = 1 << 20;  // so many bytes of it
constexpr int64_t kWalkItems = 8;          // and so many of them a thread, rather than longer ones

void require(bool holds, const char* name, int64_t value, const std::string& allowed) {
  if (!holds) throw std::invalid_argument(name + (": " + std::to_string(value)) + "; allowed is " + allowed);
}

AttentionShape checked(const AttentionShape& s) {
  require(s.layers >= 1, "layers", s.layers, "1 or more");
  require(s.blocks >= 1, "num_blocks", s.blocks, "1 or more");
  require(s.kv_heads >= 1, "kv_heads", s.kv_heads, "1 or more");
  require(s.heads >= 1 && s.heads % s.kv_heads == 0, "heads", s.heads, "a multiple of kv_heads");
  const int most = s.latent > 0 ? kMaxHeadDim : 256;
  require(s.head_dim >= 16 && s.head_dim <= most && s.head_dim % 16 == 0, "head_dim", s.head_dim,
          "a multiple of 16 up to " + std::to_string(most));
  require(s.latent >= 0 && s.latent <= s.head_dim && s.latent % 16 == 0, "latent", s.latent,
          "a multiple of 16 up to head_dim");
  require(s.window >= 0, "window", s.window, "1 or more, or 0 for none");
  require(s.latent == 0 || s.kv != KvType::int8, "latent", s.latent, "0 with an int8 cache");
  return s;
}

// With AMX a bf16 cache is read with tiles by every row, of prefill and of decode: a kernel per number of rows would
// let a row's bits depend on its batch. Head dims that are no multiple of 32 and float32 caches are AVX-512's.
AttentionKernels kernels_for(Isa isa, const AttentionShape& shape) {
  if (isa == Isa::none) throw std::invalid_argument("isa: none; allowed are avx2, avx512, amx");
  if (shape.products == Products::bf16 && isa == Isa::avx2)
    throw std::invalid_argument("products: bfloat16; avx2 has those of int16 only");
  if (shape.products != Products::by_cpu && shape.kv == KvType::float32)
    throw std::invalid_argument("products: a float32 cache has those of float32 only");
  if (isa == Isa::avx2) return kAttentionAvx2;
  const bool whole = shape.head_dim % kAmxDims == 0 && shape.value_dim() % kAmxDims == 0;
  const bool tiles = isa == Isa::amx && whole && shape.products != Products::int16;
  const bool int16 = shape.products == Products::int16 || (shape.products == Products::by_cpu && !fast_bf16_dot());
  if (!tiles) return int16 ? kAttentionAvx512Int16 : kAttentionAvx512;
  AttentionKernels kernels = kAttentionAvx512;
  kernels.chunk_bf16 = attend_chunk_amx;
  kernels.chunk_mixed = attend_chunk_mixed_amx;
  return kernels;
}

}  // namespace

PagedAttention::PagedAttention(WorkerPool& pool, AttentionShape shape, Isa isa)
    : pool_(pool),
      shape_(checked(shape)),
      kernels_(kernels_for(isa, shape)),
      group_(shape.heads / shape.kv_heads),
      element_bytes_(shape.kv == KvType::float32 ? 4 : 2),
      row_bytes_(element_bytes_ == 2 && !shape.float_rows ? 2 : 4),
      tile_bytes_(shape.kv == KvType::int8 ? kKvBlock * (shape.head_dim + 4)
                                           : element_bytes_ * kKvBlock * shape.head_dim),
      made_bytes_(kKvBlock * (element_bytes_ * shape.head_dim + (int16_products() ? 4 : 0))),
      planes_(shape.latent > 0 ? 1 : 2),
      cache_bytes_(static_cast<size_t>(tile_bytes_ * planes_) * static_cast<size_t>(shape.kv_heads) *
                   static_cast<size_t>(shape.blocks) * static_cast<size_t>(shape.layers)),
      sinks_(static_cast<size_t>(shape.layers)) {
  chunk_ = shape.kv == KvType::float32 ? kernels_.chunk_float
           : int16_products()          ? (bf16_rows() ? kernels_.chunk_int16 : kernels_.chunk_int16_mixed)
                                       : (bf16_rows() ? kernels_.chunk_bf16 : kernels_.chunk_mixed);
  scratch_floats_ = kTileRows * kScoreStride + part_floats(kTileRows) +
                    kWalkTiles * (kTileRows * shape_.head_dim + part_floats(kTileRows));
  scratch_ = Arena(static_cast<size_t>(scratch_floats_) * static_cast<size_t>(pool.threads()) * sizeof(float));
  if (makes_keys() || shape_.latent > 0)
    made_ = Arena(static_cast<size_t>(pool.threads() * kChunk / kKvBlock * 2 * made_bytes_));
  // Mapped, not allocated: pages come as zeros when a block is first used.
  void* memory =
      mmap(nullptr, cache_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  madvise(memory, cache_bytes_, MADV_HUGEPAGE);  // a hint
  cache_ = static_cast<char*>(memory);
}

PagedAttention::~PagedAttention() {
  munmap(cache_, cache_bytes_);
}

PagedAttention::Tile PagedAttention::tile_of(const Row& row, int tile) const {
  const int64_t first = static_cast<int64_t>(tile) * kTileRows;
  const int64_t end = std::min<int64_t>(first + kTileRows, row.tokens * group_);
  const int64_t past = row.context - row.tokens, before = past + first / group_ + 1 - shape_.window;
  const int64_t begin = shape_.window > 0 ? std::max<int64_t>(before, 0) / kKvPair * kKvPair : 0;
  return {first, static_cast<int>(end - first), begin, past + (end - 1) / group_ + 1};
}

void PagedAttention::set_sinks(int layer, const float* sinks) {
  require(layer >= 0 && layer < shape_.layers, "layer", layer, "0 to " + std::to_string(shape_.layers - 1));
  std::vector<float>& held = sinks_[static_cast<size_t>(layer)];
  held.assign(sinks, sinks + shape_.heads);
  for (float& sink : held) sink *= 1.4426950408889634f;
}

void PagedAttention::plan(const std::vector<int64_t>& row_starts, const std::vector<int64_t>& context_lens,
                          const std::vector<std::vector<int32_t>>& block_tables) {
  const size_t count = context_lens.size();
  require(row_starts.size() == count + 1, "row_starts", static_cast<int64_t>(row_starts.size()), "one more than rows");
  require(block_tables.size() == count, "block_tables", static_cast<int64_t>(block_tables.size()), "one per row");
  require(row_starts[0] == 0, "row_starts[0]", row_starts[0], "0");
  for (size_t r = 0; r < count; ++r) {
    const int64_t tokens = row_starts[r + 1] - row_starts[r];
    require(tokens >= 1, "tokens of a row", tokens, "1 or more");
    require(context_lens[r] >= tokens, "context_lens", context_lens[r], "at least the row's tokens");
    const int64_t needed = (context_lens[r] + kKvBlock - 1) / kKvBlock;
    require(static_cast<int64_t>(block_tables[r].size()) >= needed, "blocks of a row",
            static_cast<int64_t>(block_tables[r].size()), "at least " + std::to_string(needed));
    for (int64_t i = 0; i < needed; ++i) {
      const int32_t block = block_tables[r][static_cast<size_t>(i)];
      require(block >= 0 && block < shape_.blocks, "block_tables", block, "0 to " + std::to_string(shape_.blocks - 1));
    }
  }

  tokens_ = row_starts[count];
  rows_.clear();
  tables_.clear();
  items_.clear();
  writes_.clear();
  first_writes_.clear();
  unit_chunks_.clear();
  const auto tiles_of = [this](const Row& row) { return (row.tokens * group_ + kTileRows - 1) / kTileRows; };
  for (size_t r = 0; r < count; ++r) {
    Row row{row_starts[r],
            row_starts[r + 1] - row_starts[r],
            context_lens[r],
            static_cast<int64_t>(tables_.size()),
            static_cast<int64_t>(writes_.size()),
            0};
    std::vector<Write>& writes = tiles_of(row) == 1 ? writes_ : first_writes_;
    const std::vector<int32_t>& table = block_tables[r];
    const int64_t needed = (row.context + kKvBlock - 1) / kKvBlock;
    tables_.insert(tables_.end(), table.begin(), table.begin() + needed);
    for (int64_t p = row.context - row.tokens; p < row.context;) {
      const int64_t end = std::min(row.context, (p / kKvBlock + 1) * kKvBlock);
      writes.push_back({row.first_token + p - (row.context - row.tokens), static_cast<int32_t>(p / kChunk),
                        table[static_cast<size_t>(p / kKvBlock)], static_cast<int16_t>(p % kKvBlock),
                        static_cast<int16_t>(end - p)});
      p = end;
    }
    row.count = static_cast<int64_t>(writes_.size()) - row.writes;
    rows_.push_back(row);
  }
  int64_t walked = 0;
  for (const Row& row : rows_)
    if (tiles_of(row) > kSplitTiles) walked += tiles_of(row) * shape_.kv_heads;
  const int64_t most = std::clamp<int64_t>(walked / (kWalkItems * pool_.threads()), 1, kWalkTiles);
  int64_t partial_floats = 0;
  for (size_t r = 0; r < count; ++r) {
    const Row& row = rows_[r];
    const int64_t tiles = tiles_of(row);
    const bool cached = (row.context + kKvBlock - 1) / kKvBlock * planes_ * tile_bytes_ <= kCachedBytes;
    const int64_t group = cached ? std::min(most, kCachedTiles) : most;
    for (int g = 0; g < shape_.kv_heads; ++g) {
      WorkItem item{static_cast<int32_t>(r), g, 0, 1, -1, -1, -1};
      if (tiles > kSplitTiles) {  // the last tiles see most: they come first
        for (int64_t end = tiles; end > 0; end -= group) {
          item.tiles = static_cast<int32_t>(std::min(group, end));
          item.tile = static_cast<int32_t>(end - item.tiles);
          items_.push_back(item);
        }
        continue;
      }
      partial_floats = plan_chunks(row, tiles, item, partial_floats);
    }
  }
  // The long work items first, so that none is left over when everything else has ended.
  std::stable_partition(items_.begin(), items_.end(), [](const WorkItem& p) { return p.chunk < 0; });
  const size_t partial_bytes = static_cast<size_t>(partial_floats) * sizeof(float);
  if (partials_.bytes() < partial_bytes) partials_ = Arena(partial_bytes + partial_bytes / 2);
  if (pending_.size() < unit_chunks_.size()) pending_ = std::vector<std::atomic<int>>(2 * unit_chunks_.size());
}

// A row's few tiles, cut into chunks: those of one chunk follow each other, since they read the same memory.
int64_t PagedAttention::plan_chunks(const Row& row, int64_t tiles, WorkItem item, int64_t partial_floats) {
  struct Unit {
    int first, chunks;
    int32_t index;
    int64_t partial;
    int64_t size;
  };
  Unit units[kSplitTiles];
  for (int64_t t = 0; t < tiles; ++t) {
    const Tile tile = tile_of(row, static_cast<int>(t));
    const int chunks = tile.chunks();
    units[t] = {tile.first_chunk(), chunks, static_cast<int32_t>(unit_chunks_.size()), partial_floats,
                part_floats(tile.rows)};
    if (chunks == 1) continue;
    unit_chunks_.push_back(chunks);
    partial_floats += chunks * units[t].size;
  }
  for (int c = units[0].first; c < units[tiles - 1].first + units[tiles - 1].chunks; ++c) {
    for (int64_t t = 0; t < tiles; ++t) {
      const Unit& unit = units[t];
      if (c < unit.first || c >= unit.first + unit.chunks) continue;
      item.tile = static_cast<int32_t>(t);
      item.chunk = unit.chunks == 1 ? -1 : c;
      item.unit = unit.chunks == 1 ? -1 : unit.index;
      item.partial = unit.partial + (c - unit.first) * unit.size;
      items_.push_back(item);
    }
  }
  return partial_floats;
}

void PagedAttention::forward(int layer, int64_t tokens, TokenRows<const void> q, TokenRows<const void> k,
                             TokenRows<const void> v, TokenRows<void> out) {
  require(layer >= 0 && layer < shape_.layers, "layer", layer, "0 to " + std::to_string(shape_.layers - 1));
  require(tokens == tokens_, "tokens", tokens, "the plan's " + std::to_string(tokens_));
  const auto bytes = [this](auto rows) {
    return TokenRows<const char>{static_cast<const char*>(rows.data), rows.stride * row_bytes_};
  };
  const std::vector<float>& sinks = sinks_[static_cast<size_t>(layer)];
  const Call call{cache_ + static_cast<int64_t>(cache_bytes_) / shape_.layers * layer,
                  bytes(q),
                  bytes(k),
                  bytes(v),
                  {static_cast<char*>(out.data), out.stride * row_bytes_},
                  sinks.empty() ? nullptr : sinks.data()};
  pool_.parallel_for(static_cast<int64_t>(first_writes_.size()), [&](int64_t i, int) {
    for (int g = 0; g < shape_.kv_heads; ++g) write(call, first_writes_[static_cast<size_t>(i)], g);
  });
  for (size_t u = 0; u < unit_chunks_.size(); ++u) pending_[u].store(unit_chunks_[u], std::memory_order_relaxed);
  pool_.parallel_for(static_cast<int64_t>(items_.size()),
                     [&](int64_t i, int worker) { attend(call, items_[static_cast<size_t>(i)], worker); });
}

PagedAttention::Span PagedAttention::span_of(int chunk, int64_t begin, int64_t seen) {
  const int64_t start = static_cast<int64_t>(chunk) * kChunk;
  return {std::max(start, begin), std::min(start + kChunk, seen)};
}

// The tiles of a block that the kernels multiply where these are not the cache's; meanwhile the next block is fetched.
void PagedAttention::make_tiles(Making& making, int64_t place) {
  if (place < making.made) return;
  making.made = place + 1;
  const Row& row = rows_[static_cast<size_t>(making.item.row)];
  const int dim = shape_.head_dim;
  const auto tiles_of = [&](int64_t at) {
    return kv_tile(making.call.cache, tables_[static_cast<size_t>(row.table + at)], making.item.kv_head);
  };
  const int count = static_cast<int>(std::min<int64_t>(kKvBlock, making.seen - place * kKvBlock));
  const char* keys = tiles_of(place);
  const char* next = (place + 1) * kKvBlock < row.context ? tiles_of(place + 1) : keys;
  char* to = made(making.worker, place);
  auto* to16 = reinterpret_cast<int16_t*>(to);
  if (!int16_products())
    for (int64_t i = 0; i < planes_ * tile_bytes_; i += 64) __builtin_prefetch(next + i);
  if (int16_products() && shape_.kv == KvType::int8) {
    kernels_.int16_of_int8(keys, to16, dim, next);
    kernels_.int16_of_int8(keys + tile_bytes_, to16 + made_bytes_ / 2, dim, next + tile_bytes_);
  } else if (int16_products()) {
    kernels_.int16_keys(keys, keys_limit(), to16, dim, next);
    if (shape_.latent == 0)
      kernels_.int16_values(keys + tile_bytes_, kValueLimit, to16 + made_bytes_ / 2, dim, next + tile_bytes_);
  } else if (shape_.kv == KvType::int8) {
    const auto* from = reinterpret_cast<const int8_t*>(keys);
    kernels_.expand_keys(from, count, reinterpret_cast<uint16_t*>(to), dim);
    kernels_.expand_values(from + tile_bytes_, count, reinterpret_cast<uint16_t*>(to + made_bytes_), dim);
  }
  if (shape_.latent == 0) return;
  values_of_keys(makes_keys() ? to : keys, count, to + made_bytes_);
  if (int16_products())  // the scales lie behind the elements
    std::memcpy(to + made_bytes_ + kKvBlock * 2 * shape_.latent, to + kKvBlock * 2 * dim, kKvBlock * sizeof(float));
}

int PagedAttention::keys_limit() const {
  return std::min(kValueLimit, static_cast<int>(std::sqrt(2147483647.0 / shape_.head_dim)));
}

void PagedAttention::run_chunk(Making& making, const Tile& tile, int chunk, float* queries, float* part) {
  const Call& call = making.call;
  const WorkItem& item = making.item;
  const Row& row = rows_[static_cast<size_t>(item.row)];
  const Span span = span_of(chunk, tile.begin, tile.seen);
  const void* tiles[kChunk / kKvBlock + kFetched];
  const void* values[kChunk / kKvBlock + kFetched];
  const void* q[kTileRows];
  int limits[kTileRows], starts[kTileRows];
  const int positions = static_cast<int>(span.end - span.begin);
  const int64_t first = span.begin / kKvBlock, last = (row.context - 1) / kKvBlock;
  const int few = shape_.kv == KvType::int8 ? kTileRows : kernels_.register_rows;
  const bool in_registers = int16_products() && shape_.latent == 0 && item.tiles == 1 && tile.rows <= few;
  const bool makes = !in_registers && (makes_keys() || shape_.latent > 0);
  auto make = [&](int b) { make_tiles(making, first + b); };
  for (int b = 0; (b - kFetched) * kKvBlock < positions; ++b) {
    const int64_t place = std::min(first + b, last);
    const char* keys = kv_tile(call.cache, tables_[static_cast<size_t>(row.table + place)], item.kv_head);
    const char* made_keys = made(making.worker, place);
    tiles[b] = makes && makes_keys() ? made_keys : keys;
    values[b] = makes ? made_keys + made_bytes_ : keys + tile_bytes_;
    if (makes && !int16_products() && b * kKvBlock < positions) make(b);
  }
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t token = (tile.first_row + r) / group_;
    const int64_t head = item.kv_head * group_ + (tile.first_row + r) % group_;
    q[r] = call.q.data + (row.first_token + token) * call.q.stride + head * shape_.head_dim * row_bytes_;
    const int64_t sees = row.context - row.tokens + token + 1 - span.begin;
    limits[r] = static_cast<int>(std::clamp<int64_t>(sees, 0, positions));
    if (shape_.window == 0) continue;
    starts[r] = static_cast<int>(std::clamp<int64_t>(sees - shape_.window, 0, positions));
    if (starts[r] >= limits[r]) starts[r] = limits[r] = 0;
  }
  ChunkWork work{};
  work.tiles = tiles;
  work.values = values;
  work.elements = makes ? KvElements::int16 : shape_.kv == KvType::int8 ? KvElements::int8 : KvElements::bf16;
  work.maker = &make;
  work.make = [](void* maker, int b) { (*static_cast<decltype(make)*>(maker))(b); };
  work.q = q;
  work.limits = limits;
  work.starts = shape_.window > 0 ? starts : nullptr;
  work.rows = tile.rows;
  work.positions = positions;
  work.head_dim = shape_.head_dim;
  work.value_dim = shape_.value_dim();
  const double scale = shape_.scale != 0 ? shape_.scale : 1 / std::sqrt(static_cast<double>(shape_.head_dim));
  work.scale_log2 = static_cast<float>(1.4426950408889634 * scale);
  work.keys_limit = keys_limit();
  work.query_limit = shape_.kv == KvType::int8 ? INT16_MAX : keys_limit();
  work.scores = scratch(making.worker);
  work.q_scratch = queries;
  work.q_ready = item.chunk < 0 && chunk > tile.first_chunk();
  work.sums = part;
  work.top = part + static_cast<int64_t>(tile.rows) * shape_.value_dim();
  work.total = work.top + tile.rows;
  chunk_(work);
}

// Joins a later chunk's part to the earlier ones; rows that see nothing of it are left alone.
static void join(const AttentionKernels& kernels, float* part, const float* later, int rows, int dim) {
  float* top = part + static_cast<int64_t>(rows) * dim;
  const float* top2 = later + static_cast<int64_t>(rows) * dim;
  for (int r = 0; r < rows; ++r) {
    if (top2[rows + r] == 0.0f) continue;
    kernels.merge(top + r, top + rows + r, part + r * dim, top2[r], top2[rows + r], later + r * dim, dim);
  }
}

void PagedAttention::finish(const Call& call, const WorkItem& item, const Tile& tile, float* part) const {
  const Row& row = rows_[static_cast<size_t>(item.row)];
  const int dim = shape_.value_dim();
  const float* top = part + static_cast<int64_t>(tile.rows) * dim;
  float* total = part + static_cast<int64_t>(tile.rows) * (dim + 1);
  // A sink far above all scores makes the total infinite, and what comes out zero.
  if (call.sinks != nullptr)
    for (int r = 0; r < tile.rows; ++r)
      total[r] += std::exp2(call.sinks[item.kv_head * group_ + (tile.first_row + r) % group_] - top[r]);
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t token = row.first_token + (tile.first_row + r) / group_;
    const int64_t head = item.kv_head * group_ + (tile.first_row + r) % group_;
    char* out = call.out.data + token * call.out.stride + head * dim * row_bytes_;
    (bf16_rows() ? kernels_.finish_bf16 : kernels_.finish_float)(out, part + r * dim, total[r], dim);
  }
}

void PagedAttention::attend(const Call& call, const WorkItem& item, int worker) {
  const Row& row = rows_[static_cast<size_t>(item.row)];
  for (int64_t i = row.writes; i < row.writes + row.count; ++i) {
    const Write& w = writes_[static_cast<size_t>(i)];
    if (item.chunk < 0 || item.chunk == w.chunk) write(call, w, item.kv_head);
  }
  if (item.chunk < 0) return walk(call, item, worker);
  const Tile tile = tile_of(row, item.tile);
  float* queries = scratch(worker) + kTileRows * kScoreStride;
  Making making{call, item, worker, tile.seen, 0};
  run_chunk(making, tile, item.chunk, queries, partial(item.partial));
  if (pending_[static_cast<size_t>(item.unit)].fetch_sub(1, std::memory_order_acq_rel) == 1)
    join_last(call, item, tile);
}

void PagedAttention::walk(const Call& call, const WorkItem& item, int worker) {
  float* later = scratch(worker) + kTileRows * kScoreStride;
  float* own = later + part_floats(kTileRows);
  const int64_t queries_floats = static_cast<int64_t>(kTileRows) * shape_.head_dim;
  const auto queries = [&](int t) { return own + t * (queries_floats + part_floats(kTileRows)); };
  const auto part = [&](int t) { return queries(t) + queries_floats; };
  Tile tiles[kWalkTiles];
  for (int t = 0; t < item.tiles; ++t) tiles[t] = tile_of(rows_[static_cast<size_t>(item.row)], item.tile + t);
  const int64_t seen = tiles[item.tiles - 1].seen;
  Making making{call, item, worker, seen, 0};
  for (int chunk = tiles[0].first_chunk(); static_cast<int64_t>(chunk) * kChunk < seen; ++chunk) {
    for (int t = 0; t < item.tiles; ++t) {
      const int place = chunk - tiles[t].first_chunk();
      if (place < 0 || place >= tiles[t].chunks()) continue;
      run_chunk(making, tiles[t], chunk, queries(t), place == 0 ? part(t) : later);
      if (place > 0) join(kernels_, part(t), later, tiles[t].rows, shape_.value_dim());
    }
  }
  for (int t = 0; t < item.tiles; ++t) finish(call, item, tiles[t], part(t));
}

void PagedAttention::join_last(const Call& call, const WorkItem& item, const Tile& tile) {
  const int64_t size = part_floats(tile.rows);
  float* first = partial(item.partial - (item.chunk - tile.first_chunk()) * size);
  for (int chunk = 1; chunk < unit_chunks_[static_cast<size_t>(item.unit)]; ++chunk)
    join(kernels_, first, first + chunk * size, tile.rows, shape_.value_dim());
  finish(call, item, tile, first);
}

}  // namespace ktserve
