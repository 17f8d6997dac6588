// A chunk over bf16 or int8 tiles that many rows multiply as float32: elements become floats in the first-level cache,
// once for all rows of a tile, in parts that stay there while the rows take turns. Included as attention_tiles.hpp is.
//
//   scores   [kBlocks K tiles] -> wide [kBlocks][D][16 positions]             for all rows:  q x wide
//   values   [kWideBlocks V tiles, `dims` dimensions] -> wide [kWideBlocks][dims / 16][16 positions][16]    p x wide
//
// A row's additions come in the order of attend_chunk<false, ...>: its bits are those of a few rows (decode), for which
// elements are widened in registers.
#pragma once

#include "attention/attention_tiles.hpp"

namespace ktserve::KT_SIMD {

constexpr int kWideBlocks = KT_HAS_512 ? 8 : 4;
constexpr int kWideDims = 16 * kDims;
constexpr int kWideFloats = kBlocks * kKvBlock * kMaxHeadDim;
static_assert(kWideBlocks * kWideDims <= kBlocks * kMaxHeadDim);

template <class T, class Q>
void attend_chunk_wide(const ChunkWork& w) {
  constexpr bool int8 = sizeof(T) == 1;
  const int num_blocks = (w.positions + kKvBlock - 1) / kKvBlock;
  const int key_elements = kKvBlock * w.head_dim;
  const int64_t tile_bytes = cache_tile_bytes<T>(w.head_dim);
  alignas(64) float wide[kWideFloats];

  const auto keys = [&](int b) { return static_cast<const T*>(w.tiles[b]); };
  const auto values = [&](int b) { return static_cast<const T*>(w.values[b]); };
  const auto prefetch_values = [&](int block, int dim) {
    for (int b = block; b < block + kWideBlocks && b < num_blocks; ++b)
      prefetch_tile(values(b) + dim * kKvBlock, kWideDims * kKvBlock * static_cast<int64_t>(sizeof(T)));
  };

  const void* q[kTileRows];
  find_queries<false, Q>(w, q);
  for (int b = 0; b < num_blocks; b += kBlocks) {
    const int count = static_cast<int>(least(kBlocks, num_blocks - b));
    for (int n = 0; n < count; ++n) widen(keys(b + n), key_elements, wide + n * key_elements);
    for (int next = b + count; next < num_blocks && next < b + 2 * count; ++next) prefetch_tile(keys(next), tile_bytes);
    if (b + count == num_blocks) prefetch_values(0, 0);
    const auto tile = [&](int n) -> const float* { return wide + n * key_elements; };
    by_rows(w.rows, [&]<int R>(int row) { score_rows<false, float, R>(w, q, row, b, count, tile); });
    if constexpr (int8) {
      for (int n = b; n < b + count; ++n) {
        const F16 scales = load16(scales_of(keys(n), w.head_dim));
        for (int r = 0; r < w.rows; ++r) {
          float* scores = w.scores + r * kScoreStride + n * kKvBlock;
          store16(scores, mul(load16(scores), scales));
        }
      }
    }
  }
  mask_starts(w);
  const auto scales = [&](int b) { return load16(scales_of(values(b), w.value_dim)); };
  for (int r = 0; r < w.rows; ++r) softmax_row<false, int8>(w, r, num_blocks, scales);
  std::memset(w.sums, 0, sizeof(float) * static_cast<size_t>(w.rows) * static_cast<size_t>(w.value_dim));
  for (int b = 0; b < num_blocks; b += kWideBlocks) {
    const int count = static_cast<int>(least(kWideBlocks, num_blocks - b));
    for (int dim = 0; dim < w.value_dim; dim += kWideDims) {
      const int elements = kKvBlock * static_cast<int>(least(kWideDims, w.value_dim - dim));
      for (int n = 0; n < count; ++n) widen(values(b + n) + dim * kKvBlock, elements, wide + n * elements);
      if (dim + kWideDims < w.value_dim)
        prefetch_values(b, dim + kWideDims);
      else
        prefetch_values(b + kWideBlocks, 0);
      const auto at = [&](int block) -> const float* { return wide + (block - b) * elements; };
      by_rows(w.rows, [&]<int R>(int row) {
        if (elements == kKvBlock * kWideDims)
          value_tile<false, float, R, kDims>(w, row, b, count, dim, at);
        else
          value_tile<false, float, R, 1>(w, row, b, count, dim, at);
      });
    }
  }
}

// Of bf16 tiles: few rows gain nothing by the way through memory.
template <class Q>
void attend_chunk_floats(const ChunkWork& w) {
  if (w.rows <= kRows) return attend_chunk<false, bf16, Q>(w);
  attend_chunk_wide<bf16, Q>(w);
}

}  // namespace ktserve::KT_SIMD
