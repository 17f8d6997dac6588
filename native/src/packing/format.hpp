// The one packed layout of weights, read by every kernel, the disk cache and the GPU.
//
// A matrix [n, k] (y = W x) is cut into panels of 16 output rows, each panel one contiguous run of memory:
//
//    panel p = rows 16p .. 16p+15     | meta (scales, minima), padded to 64 B | quants, K x 16 values |
//
//    quants, 8-bit:   for each 4 of k:  [row 0: k..k+3][row 1: k..k+3] ... [row 15: k..k+3]       = 64 bytes
//            bf16:    for each 2 of k:  [row 0: k,k+1][row 1: k,k+1]   ... [row 15: k,k+1]        = 64 bytes
//            f32:     for each k:       [row 0: k] ... [row 15: k]                              = 64 bytes
//            f16:     for each k:       [row 0: k] ... [row 15: k]                              = 32 bytes
//            f8:      for each k:       [row 0: k] ... [row 15: k]                              = 16 bytes
//            4-bit:   for each block of 32 k, four vectors of 64 bytes; vector j holds k = 4j..4j+3 of the block in
//                     the low nibbles and k = 16+4j..16+4j+3 in the high ones
//            6-bit:   the same four vectors of low nibbles, then two vectors of upper bit pairs: vector j of eight
//                     (k = 4j..4j+3) takes bits 2(j%4), 2(j%4)+1 of upper vector j/4
//            5-bit:   the same four vectors of low nibbles, then one vector of upper bits: vector j of eight takes bit
//            j
//            2-bit:   two vectors of pairs of bits: vector j of eight takes bits 2(j%4), 2(j%4)+1 of vector j/4
//            3-bit:   the same two vectors of pairs, then one vector of upper bits as 5-bit has
//            grids:   a word per row, then a byte per entry of a grid (8 values, or 4), four entries of each row a
//                     vector. The word: 4 x 8 signs; or 4 x 7, each group's eighth sign being their parity, and above
//                     them 4 bits: the ninth bits of four indices (g2xs) or the factor of d (g2xxs, g3xxs)
//
// so one 64-byte load feeds one vpdpbusd / vdpbf16ps for 16 outputs, with four (two) activations broadcast, and
// 16 (8) consecutive vectors are an AMX tile. Rows and k are padded with zeros to multiples of 16 and 32.
//
//    meta, per block of 32 k:        i8, i4, i5, n4: d[16] f16     i4m, i5m: d[16] f16, m[16] f16
//                                    mx4: e[16] u8, d = 2^(e - 128)            z32: d[16] f16, zero[16] u8
//               per 128 k:           z128: d[16] f16, zero[16] u8              f8: d[16] f32
//          per super-block of 256 k: k4, k5: d[16] f16, dmin[16] f16, scale[8][16] u8, min[8][16] u8
//                                    k2:     d[16] f16, dmin[16] f16, [16][16] u8: scale in the low nibble, min above
//                                    k3, k6: d[16] f16, scale[16][16] i8       x4: d[16] f16, scale[8][16] i8
//                                    g2xxs, g3xxs: d[16] f16      g2xs: d[16] f16, [8][16] u8: two factors in nibbles
//                                    g2s, g3s: d[16] f16, [8][16] ([4][16]) u8: two factors, [8][16] u8: upper bits of
//                                    the indices of 32 k
//
//    value:  i8 d (u - 128)   i4 d (u - 8)   i5 d (u - 16)   i4m, i5m d u + m   k2, k4, k5 d scale u - dmin min
//            k3 d scale (u - 4)   k6 d scale (u - 32)   n4, mx4 d code[u]   x4 d scale code[u]   z32, z128 d (u - zero)
//            f8 d e4m3   g2* d (2 factor + 1) / 8 entry   g3xxs d (2 factor + 1) / 4 entry   g3s d (2 factor + 1) entry
//
// The formats hold GGUF's blocks without loss: Q8_0 -> i8; Q4_0 -> i4; Q4_1 -> i4m; Q5_0 -> i5; Q5_1 -> i5m;
// Q2_K ... Q6_K -> k2 ... k6; IQ4_NL -> n4; IQ4_XS -> x4; MXFP4 -> mx4; F16 -> f16; IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS,
// IQ3_S -> g2xxs, g2xs, g2s, g3xxs, g3s. f32 serves models computed in float32. Those of safetensors: F8_E4M3 with
// scales -> f8; INT4_G32 and INT4_G128, GPTQ's and AWQ's groups with their zero points, -> z32 and z128. (Block
// formats: ggml-common.h of the GGML project; MXFP4: OCP Microscaling Formats.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace ktserve {

enum class Format : int {
  bf16 = 0,
  i8 = 1,
  i4 = 2,
  i4m = 3,
  i5 = 4,
  i5m = 5,
  k4 = 6,
  k5 = 7,
  k6 = 8,
  f32 = 9,
  f16 = 10,
  k2 = 11,
  k3 = 12,
  n4 = 13,
  x4 = 14,
  mx4 = 15,
  z32 = 16,
  z128 = 17,
  f8 = 18,
  g2xxs = 19,
  g2xs = 20,
  g2s = 21,
  g3xxs = 22,
  g3s = 23
};
constexpr int kFormats = 24;
constexpr int kLayoutVersion = 2;
constexpr int64_t kPanel = 16;  // output rows of a panel
constexpr int64_t kBlock = 32;  // k of a block
constexpr int64_t kSuper = 256;

static constexpr int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

// What 4-bit quants stand for, where they are no numbers themselves.
enum class Codes { none, nl, e2m1 };

// Of formats whose quants are indices into a table of vectors (packing/grids.hpp).
struct Grid {
  int values = 0;       // of an entry; 0: no grid
  int index_bits = 0;   // eight in the quants, those above in the word or the meta
  bool parity = false;  // of whether words hold 7 signs of 8
  int64_t high = 0;     // offset in a unit's meta of the upper bits of indices; 0: none
  float step = 0;       // of the factor 2 s + 1 of d
};

// Numbers that differ between formats, in one place; packed_formats() shows them to Python.
struct FormatInfo {
  const char* name;
  int64_t unit;         // k must be a multiple of this (bf16: padded to it)
  int64_t meta_bytes;   // of a panel, per unit of k
  int64_t quant_bytes;  // of a panel, per block of 32 k
  int bias;             // subtracted from the unsigned quants, added to codes
  int group;            // k that share a scale
  bool minima;          // has an additive term per group
  int64_t steps;        // offset in a unit's meta of the 8-bit factors of d, signed if there are no minima; 0: none
  int64_t min_steps;    // and of those of dmin; the same offset: nibbles of one byte. Without steps: of zero points
  Codes codes = Codes::none;
  bool exponents = false;  // d is a power of two, stored as a byte
  Grid grid = {};          // then steps are of nibbles, two groups a byte
};

constexpr int64_t kMinimum = 32;  // offset in a unit's meta of m or dmin, behind d[16]

constexpr FormatInfo kFormatInfo[kFormats] = {
    {"bf16", 32, 0, 1024, 0, 0, false, 0, 0},
    {"i8", 32, 32, 512, 128, 32, false, 0, 0},
    {"i4", 32, 32, 256, 8, 32, false, 0, 0},
    {"i4m", 32, 64, 256, 0, 32, true, 0, 0},
    {"i5", 32, 32, 320, 16, 32, false, 0, 0},
    {"i5m", 32, 64, 320, 0, 32, true, 0, 0},
    {"k4", 256, 320, 256, 0, 32, true, 64, 192},
    {"k5", 256, 320, 320, 0, 32, true, 64, 192},
    {"k6", 256, 288, 384, 32, 16, false, 32, 0},
    {"f32", 32, 0, 2048, 0, 0, false, 0, 0},
    {"f16", 32, 0, 1024, 0, 0, false, 0, 0},
    {"k2", 256, 320, 128, 0, 16, true, 64, 64},
    {"k3", 256, 288, 192, 4, 16, false, 32, 0},
    {"n4", 32, 32, 256, 128, 32, false, 0, 0, Codes::nl},
    {"x4", 256, 160, 256, 128, 32, false, 32, 0, Codes::nl},
    {"mx4", 32, 16, 256, 16, 32, false, 0, 0, Codes::e2m1, true},
    {"z32", 32, 48, 256, 0, 32, true, 0, 32},
    {"z128", 128, 48, 256, 0, 32, true, 0, 32},
    {"f8", 128, 64, 512, 0, 0, false, 0, 0},
    {"g2xxs", 256, 32, 128, 64, 32, false, 0, 0, Codes::none, false, {8, 8, true, 0, 0.125f}},
    {"g2xs", 256, 160, 128, 64, 16, false, 32, 0, Codes::none, false, {8, 9, true, 0, 0.125f}},
    {"g2s", 256, 288, 128, 64, 16, false, 32, 0, Codes::none, false, {8, 10, false, 160, 0.125f}},
    {"g3xxs", 256, 32, 192, 64, 32, false, 0, 0, Codes::none, false, {4, 8, true, 0, 0.25f}},
    {"g3s", 256, 224, 192, 64, 32, false, 32, 0, Codes::none, false, {4, 9, false, 96, 1}},
};

static constexpr const FormatInfo& info(Format format) {
  return kFormatInfo[static_cast<int>(format)];
}

// Of numbers that meet floats, and need no activations of their own kind; f8 has scales nevertheless.
static constexpr bool plain(Format f) {
  return f == Format::bf16 || f == Format::f32 || f == Format::f16 || f == Format::f8;
}

// Whether quants are indices of a table's entries.
static constexpr bool has_grid(Format f) {
  return info(f).grid.values != 0;
}

// What k must be a multiple of.
static constexpr int64_t step_of_k(Format f) {
  return info(f).meta_bytes == 0 ? 1 : info(f).unit;
}

// Groups of a block: 1, or 2 if 16 k share a scale.
static constexpr int groups_of(Format f) {
  return info(f).group == 16 ? 2 : 1;
}

// Whether factors of d are stored in the low nibbles of bytes whose high ones are those of dmin.
static constexpr bool nibble_steps(Format f) {
  return info(f).steps != 0 && info(f).steps == info(f).min_steps;
}

// Whether the minimum is -d times a stored zero point.
static constexpr bool zero_points(Format f) {
  return info(f).steps == 0 && info(f).min_steps != 0;
}

// The 16 codes as quants: with the format's bias.
struct CodeTable {
  uint8_t codes[16];
};

static constexpr CodeTable code_table(Format f) {
  constexpr int8_t nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  constexpr int8_t e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // times two
  CodeTable table{};
  for (int i = 0; i < 16; ++i) {
    table.codes[i] = static_cast<uint8_t>((info(f).codes == Codes::nl ? nl[i] : e2m1[i]) + info(f).bias);
  }
  return table;
}

template <Format F>
using FormatConstant = std::integral_constant<Format, F>;

template <class Call, int... I>
static void with_format_of(Format format, Call& call, std::integer_sequence<int, I...>) {
  ((format == static_cast<Format>(I) ? call(FormatConstant<static_cast<Format>(I)>{}) : void()), ...);
}

// Calls `call` with the format as a constant.
template <class Call>
static void with_format(Format format, Call&& call) {
  with_format_of(format, call, std::make_integer_sequence<int, kFormats>{});
}

// Bits of a quant: the low ones, and those above them in planes of their own. Grids: of a value.
static constexpr int low_bits(Format f) {
  if (has_grid(f)) return 8;
  return info(f).quant_bytes >= 512 ? 8 : info(f).quant_bytes >= 256 ? 4 : 2;
}
static constexpr int upper_bits(Format f) {
  return plain(f) || has_grid(f) ? 0 : static_cast<int>(info(f).quant_bytes / 64) - low_bits(f);
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
//    | q[k] int8 | scale[k/32] f32 | init[k/group] i32 = -bias * sum(q of the group) | sum[k/group] f32 = scale *
//    sum(q) |
//
// init starts the integer accumulator, which takes the weights' bias off again; sum multiplies the minima. Rows of bf16
// are bf16, those of f32, f16 and f8 float32.
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
  row.bytes = odd_lines(row.sum + (info(f).minima ? kp / info(f).group * 4 : 0));
  return row;
}

}  // namespace ktserve
