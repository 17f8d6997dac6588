// The one packed layout of weights, read by every kernel, the disk cache and the GPU.
//
// A matrix [n, k] (y = W x) is cut into panels of 16 output rows, each panel one contiguous run of memory:
//
//    panel p = rows 16p .. 16p+15     | meta (scales, minima), padded to 64 B | quants, K x 16 values |
//
//    quants, 8-bit:   for each 4 of k:  [row 0: k..k+3][row 1: k..k+3] ... [row 15: k..k+3]       = 64 bytes
//            bf16:    for each 2 of k:  [row 0: k,k+1][row 1: k,k+1]   ... [row 15: k,k+1]        = 64 bytes
//            f32:     for each k:       [row 0: k] ... [row 15: k]                              = 64 bytes
//            4-bit:   for each block of 32 k, four vectors of 64 bytes; vector j holds k = 4j..4j+3 of the block in
//                     the low nibbles and k = 16+4j..16+4j+3 in the high ones
//            6-bit:   the same four vectors of low nibbles, then two vectors of upper bit pairs: vector j of eight
//                     (k = 4j..4j+3) takes bits 2(j%4), 2(j%4)+1 of upper vector j/4
//            5-bit:   the same four vectors of low nibbles, then one vector of upper bits: vector j of eight takes bit
//            j
//
// so one 64-byte load feeds one vpdpbusd / vdpbf16ps for 16 outputs, with four (two) activations broadcast, and
// 16 (8) consecutive vectors are an AMX tile. Rows and k are padded with zeros to multiples of 16 and 32.
//
//    meta, per block of 32 k:        i8, i4, i5: d[16] f16        i4m, i5m: d[16] f16, m[16] f16
//          per super-block of 256 k: k4, k5: d[16] f16, dmin[16] f16, scale[8][16] u8, min[8][16] u8
//                                    k6:     d[16] f16, scale[16][16] i8
//
//    value:  i8 d (u - 128)   i4 d (u - 8)   i5 d (u - 16)   i4m, i5m d u + m   k4, k5 d scale u - dmin min
//            k6 d scale (u - 32)
//
// The formats hold GGUF's blocks without loss: Q8_0 -> i8; Q4_0 -> i4; Q4_1 -> i4m; Q5_0 -> i5; Q5_1 -> i5m;
// Q4_K -> k4; Q5_K -> k5; Q6_K -> k6. f32 serves models computed in float32. (Block formats: ggml-common.h of the GGML
// project.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ktserve {

enum class Format : int { bf16 = 0, i8 = 1, i4 = 2, i4m = 3, i5 = 4, i5m = 5, k4 = 6, k5 = 7, k6 = 8, f32 = 9 };
constexpr int kFormats = 10;
constexpr int kLayoutVersion = 2;
constexpr int64_t kPanel = 16;  // output rows of a panel
constexpr int64_t kBlock = 32;  // k of a block
constexpr int64_t kSuper = 256;

static constexpr int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

// Numbers that differ between formats, in one place; packed_formats() shows them to Python.
struct FormatInfo {
  const char* name;
  int64_t unit;         // k must be a multiple of this (bf16: padded to it)
  int64_t meta_bytes;   // of a panel, per unit of k
  int64_t quant_bytes;  // of a panel, per block of 32 k
  int bias;             // subtracted from the unsigned quants
  int group;            // k that share a scale
  bool minima;          // has an additive term per block
  int64_t steps;        // offset in a unit's meta of the 8-bit factors of d; 0: none
  int64_t min_steps;    // and of those of dmin
};

constexpr int64_t kMinimum = 32;  // offset in a unit's meta of m or dmin, behind d[16]

constexpr FormatInfo kFormatInfo[kFormats] = {
    {"bf16", 32, 0, 1024, 0, 0, false, 0, 0},    {"i8", 32, 32, 512, 128, 32, false, 0, 0},
    {"i4", 32, 32, 256, 8, 32, false, 0, 0},     {"i4m", 32, 64, 256, 0, 32, true, 0, 0},
    {"i5", 32, 32, 320, 16, 32, false, 0, 0},    {"i5m", 32, 64, 320, 0, 32, true, 0, 0},
    {"k4", 256, 320, 256, 0, 32, true, 64, 192}, {"k5", 256, 320, 320, 0, 32, true, 64, 192},
    {"k6", 256, 288, 384, 32, 16, false, 32, 0}, {"f32", 32, 0, 2048, 0, 0, false, 0, 0},
};

static constexpr const FormatInfo& info(Format format) {
  return kFormatInfo[static_cast<int>(format)];
}

static constexpr bool plain(Format f) {
  return f == Format::bf16 || f == Format::f32;
}

template <Format F>
using FormatConstant = std::integral_constant<Format, F>;

// Calls `call` with the format as a constant.
template <class Call>
static void with_format(Format format, Call&& call) {
  switch (format) {
    case Format::bf16:
      return call(FormatConstant<Format::bf16>{});
    case Format::i8:
      return call(FormatConstant<Format::i8>{});
    case Format::i4:
      return call(FormatConstant<Format::i4>{});
    case Format::i4m:
      return call(FormatConstant<Format::i4m>{});
    case Format::i5:
      return call(FormatConstant<Format::i5>{});
    case Format::i5m:
      return call(FormatConstant<Format::i5m>{});
    case Format::k4:
      return call(FormatConstant<Format::k4>{});
    case Format::k5:
      return call(FormatConstant<Format::k5>{});
    case Format::k6:
      return call(FormatConstant<Format::k6>{});
    case Format::f32:
      return call(FormatConstant<Format::f32>{});
  }
}

// Bits above the four low ones, in planes of their own (quants of 8 bits have no planes).
static constexpr int upper_bits(Format f) {
  return info(f).quant_bytes == 320 ? 1 : info(f).quant_bytes == 384 ? 2 : 0;
}

static constexpr int64_t padded_k(int64_t k) {
  return round_up(k, kBlock);
}
static constexpr int64_t panels_of(int64_t n) {
  return round_up(n, kPanel) / kPanel;
}
static constexpr int64_t meta_size(Format f, int64_t k) {
  return round_up(padded_k(k) / info(f).unit * info(f).meta_bytes, 64);
}
static constexpr int64_t panel_size(Format f, int64_t k) {
  return meta_size(f, k) + padded_k(k) / kBlock * info(f).quant_bytes;
}
static constexpr int64_t packed_size(Format f, int64_t n, int64_t k) {
  return panels_of(n) * panel_size(f, k);
}

// An activation row as the kernels of quantised formats read it: int8 per block of 32, all parts 64-byte aligned.
//
//    | q[k] int8 | scale[k/32] f32 | init[k/group] i32 = -bias * sum(q of the group) | sum[k/32] f32 = scale * sum(q) |
//
// init starts the integer accumulator, which takes the weights' bias off again; sum multiplies the minima.
// The length is an odd number of cache lines, so that the same k of several rows never shares a cache set.
struct RowLayout {
  int64_t scale, init, sum, bytes;
};

static constexpr int64_t odd_lines(int64_t bytes) {
  return (round_up(bytes, 64) / 64 | 1) * 64;
}

static constexpr RowLayout row_layout(Format f, int64_t k) {
  const int64_t kp = padded_k(k);
  RowLayout row{};
  if (plain(f)) {
    row.bytes = odd_lines(kp * (f == Format::bf16 ? 2 : 4));
    return row;
  }
  row.scale = round_up(kp, 64);
  row.init = row.scale + round_up(kp / kBlock * 4, 64);
  row.sum = row.init + (info(f).bias != 0 ? round_up(kp / info(f).group * 4, 64) : 0);
  row.bytes = odd_lines(row.sum + (info(f).minima ? kp / kBlock * 4 : 0));
  return row;
}

}  // namespace ktserve
