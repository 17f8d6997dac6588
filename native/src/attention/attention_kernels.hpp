// What the instruction-set files give to the shared attention code: plain function pointers over raw memory.
#pragma once

#include <cstdint>

namespace ktserve {

inline constexpr int kKvBlock = 16;           // positions of a KV block
inline constexpr int kChunk = 256;            // positions whose softmax is summed at once; never depends on the batch
inline constexpr int kKvPair = 2 * kKvBlock;  // what a kernel takes at once: windows leave out whole ones
inline constexpr int kAhead = 2;              // so many blocks before its turn a tile of the cache is fetched
inline constexpr int kFetched = kAhead + kChunk / kKvBlock / 2;  // blocks behind a chunk that are fetched with it
inline constexpr int kTileRows = 32;              // (token, query head) rows of one kv head that a work item works on
inline constexpr int kMaxHeadDim = 576;           // of latent attention; else 256
inline constexpr int kScoreStride = kChunk + 16;  // floats of scratch per row; no power of two, for the caches' sets

// int16 products are added in int32: keys' magnitudes, and so queries', are at most keys_limit; those of values and the
// sum of a chunk's probabilities (each rounded by 0.5) multiply to less than 2^31.
inline constexpr int kValueLimit = 8191;
inline constexpr int kProbabilitySum = 262000 - kChunk / 2;
static_assert(int64_t{kValueLimit} * (kProbabilitySum + kChunk / 2) < (int64_t{1} << 31));

enum class KvElements { bf16, int8, int16 };

// One tile of query rows against one chunk of positions of one kv head.
struct ChunkWork {
  const void* const* tiles;              // per block of the chunk, and kFetched that are fetched only: its K tile
  const void* const* values;             // and its V tile
  KvElements elements;                   // of these where products are int16
  void (*make)(void* maker, int block);  // where they are int16 it makes a block's tiles, before these are read
  void* maker;
  const void* const* q;  // per row: head_dim elements, bf16 or floats
  const int* limits;     // per row: how many positions of this chunk it may see, 0 .. positions
  const int* starts;     // and how many of these it may not, fewer than its limit or 0; null: none
  int rows;              // 1 .. kTileRows
  int positions;         // 1 .. kChunk: the largest limit
  int head_dim;
  int value_dim;     // head_dim, or less where values are a part of the keys
  float scale_log2;  // log2(e) times the scale of scores: the softmax works in powers of two
  float* scores;     // scratch: kTileRows x kScoreStride, 64-byte aligned as q_scratch
  int keys_limit;    // of int16 keys: the largest magnitude whose scores fit int32
  int query_limit;   // and of queries
  float* q_scratch;  // kTileRows x head_dim: queries in the type that is multiplied
  bool q_ready;      // q_scratch still holds these rows from an earlier chunk
  float* top;        // out, per row: the largest scaled score, -inf if the row sees nothing
  float* total;      // out, per row: sum of 2^(score - top)
  float* sums;       // out, rows x value_dim: sum of 2^(score - top) * v
};

// Scores before a row's start become minus infinity, whose powers are zero. Static: every instruction set has its own.
static inline void mask_starts(const ChunkWork& w) {
  if (w.starts == nullptr) return;
  for (int r = 0; r < w.rows; ++r)
    for (int p = 0; p < w.starts[r]; ++p) w.scores[r * kScoreStride + p] = -__builtin_inff();
}

// Of an element of the tiles and one of the queries.
struct AttentionKernels {
  void (*chunk_float)(const ChunkWork&);        // float32, float32
  void (*chunk_bf16)(const ChunkWork&);         // bf16, bf16; null where bf16 and int8 caches are multiplied as int16
  void (*chunk_mixed)(const ChunkWork&);        // bf16, float32
  void (*chunk_int16)(const ChunkWork&);        // int16 with scales (attention_int16.hpp), bf16; null elsewhere
  void (*chunk_int16_mixed)(const ChunkWork&);  // int16, float32
  // (top, total, sums) of a row's later chunk joins those of the earlier ones.
  void (*merge)(float* top, float* total, float* sums, float top2, float total2, const float* sums2, int head_dim);
  void (*finish_bf16)(void* out, const float* sums, float total, int head_dim);
  void (*finish_float)(void* out, const float* sums, float total, int head_dim);
  void (*to_bf16)(const float* from, uint16_t* to, int head_dim);
  // A key or value to int8; its scale, NaN if a number is not finite.
  float (*quantise_bf16)(const void* from, int8_t* to, int head_dim);
  float (*quantise_float)(const void* from, int8_t* to, int head_dim);
  // An int8 K or V tile with its scales to a bf16 tile, positions from `count` on to zeros; null beside int16 products.
  void (*expand_keys)(const int8_t* tile, int count, uint16_t* to, int head_dim);
  void (*expand_values)(const int8_t* tile, int count, uint16_t* to, int head_dim);
  // A bf16 K or V tile, whose magnitudes are to become at most `limit`, or an int8 one, to an int16 tile with scales;
  // meanwhile the tile `next` is fetched.
  void (*int16_keys)(const void* tile, int limit, int16_t* to, int head_dim, const void* next);
  void (*int16_values)(const void* tile, int limit, int16_t* to, int head_dim, const void* next);
  void (*int16_of_int8)(const void* tile, int16_t* to, int head_dim, const void* next);

  int register_rows;  // that are multiplied at once

  bool int16_products() const { return chunk_bf16 == nullptr; }
};

extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512;       // of bf16 dot products
extern const AttentionKernels kAttentionAvx512Int16;  // of int16 dot products

// chunk_bf16 and chunk_mixed on tiles, for a head_dim that is a multiple of 32.
inline constexpr int kAmxDims = 32;
void attend_chunk_amx(const ChunkWork& work);
void attend_chunk_mixed_amx(const ChunkWork& work);

}  // namespace ktserve
