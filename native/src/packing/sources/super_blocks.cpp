// Blocks of 256 values whose scales, and minima, are factors of a common one.
#include "packing/sources/unit.hpp"

namespace ktserve {
namespace {

// The 6-bit scales and minima of Q4_K and Q5_K, eight of each in 12 bytes.
void scales_k4(const uint8_t* packed, Unit& unit) {
  for (int i = 0; i < 4; ++i) {
    unit.scale[i] = packed[i] & 63;
    unit.min[i] = packed[i + 4] & 63;
    unit.scale[i + 4] = static_cast<uint8_t>((packed[i + 8] & 15) | (packed[i] >> 6) << 4);
    unit.min[i + 4] = static_cast<uint8_t>(packed[i + 8] >> 4 | (packed[i + 4] >> 6) << 4);
  }
}

// Pairs of bits: byte i of each 32 holds values i, 32 + i, 64 + i and 96 + i of 128.
void read_pairs(const uint8_t* bytes, Unit& unit) {
  for (int run = 0; run < 8; ++run) {
    for (int i = 0; i < 32; ++i) {
      unit.quants[32 * run + i] = static_cast<uint8_t>(bytes[run / 4 * 32 + i] >> (run % 4 * 2) & 3);
    }
  }
}

}  // namespace

void read_q2_k(const uint8_t* block, Unit& unit) {
  for (int g = 0; g < 16; ++g) {
    unit.scale[g] = block[g] & 15;
    unit.min[g] = block[g] >> 4;
  }
  read_pairs(block + 16, unit);
  unit.d = load16(block + 80);
  unit.m = load16(block + 82);
}

// The third bits: bit g of byte i is that of value 32 g + i. 6-bit scales: four low bits of two in each of eight bytes,
// upper pairs of four in each of the next four.
void read_q3_k(const uint8_t* block, Unit& unit) {
  read_pairs(block + 32, unit);
  for (int run = 0; run < 8; ++run) {
    for (int i = 0; i < 32; ++i) {
      uint8_t& quant = unit.quants[32 * run + i];
      quant = static_cast<uint8_t>(quant | (block[i] >> run & 1) << 2);
    }
  }
  const uint8_t* scales = block + 96;
  for (int g = 0; g < 16; ++g) {
    const int low = scales[g % 8] >> (g / 8 * 4) & 15;
    const int high = scales[8 + g % 4] >> (g / 4 * 2) & 3;
    unit.scale[g] = static_cast<uint8_t>((low | high << 4) - 32);
  }
  unit.d = load16(block + 108);
}

void read_q4_k(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  unit.m = load16(block + 2);
  scales_k4(block + 4, unit);
  for (int pair = 0; pair < 4; ++pair) {
    const uint8_t* q = block + 16 + 32 * pair;
    for (int i = 0; i < 32; ++i) {
      unit.quants[64 * pair + i] = q[i] & 15;
      unit.quants[64 * pair + 32 + i] = q[i] >> 4;
    }
  }
}

void read_q5_k(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  unit.m = load16(block + 2);
  scales_k4(block + 4, unit);
  const uint8_t* high = block + 16;
  for (int pair = 0; pair < 4; ++pair) {
    const uint8_t* q = block + 48 + 32 * pair;
    for (int i = 0; i < 32; ++i) {
      unit.quants[64 * pair + i] = static_cast<uint8_t>((q[i] & 15) | (high[i] >> (2 * pair) & 1) << 4);
      unit.quants[64 * pair + 32 + i] = static_cast<uint8_t>(q[i] >> 4 | (high[i] >> (2 * pair + 1) & 1) << 4);
    }
  }
}

void read_q6_k(const uint8_t* block, Unit& unit) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t* low = block + 64 * half;
    const uint8_t* high = block + 128 + 32 * half;
    for (int i = 0; i < 32; ++i) {
      uint8_t* q = unit.quants + 128 * half + i;
      q[0] = static_cast<uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
      q[32] = static_cast<uint8_t>((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
      q[64] = static_cast<uint8_t>(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      q[96] = static_cast<uint8_t>(low[i + 32] >> 4 | (high[i] >> 6 & 3) << 4);
    }
  }
  std::memcpy(unit.scale, block + 192, 16);
  unit.d = load16(block + 208);
}

// 6-bit scales: pairs of low nibbles, and a word of upper pairs.
void read_iq4_xs(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  const int high = load16(block + 2);
  for (int b = 0; b < 8; ++b) {
    const int low = block[4 + b / 2] >> (b % 2 * 4) & 15;
    unit.scale[b] = static_cast<uint8_t>((low | (high >> 2 * b & 3) << 4) - 32);
    read_nibbles(block + 8 + 16 * b, unit.quants + 32 * b);
  }
}

}  // namespace ktserve
