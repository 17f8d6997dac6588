// Blocks of 32 values, or of a group, with a scale, and a minimum or a zero point, of their own.
#include "packing/sources/unit.hpp"

namespace ktserve {
namespace {

// Q5_0 and Q5_1: the fifth bits of the 32 values in one word.
void read_q5(const uint8_t* word, const uint8_t* nibbles, Unit& unit) {
  uint32_t high;
  std::memcpy(&high, word, 4);
  read_nibbles(nibbles, unit.quants);
  for (int i = 0; i < 32; ++i) unit.quants[i] = static_cast<uint8_t>(unit.quants[i] | (high >> i & 1) << 4);
}

// The scale, the zero point in a byte, then the nibbles of each 32 values.
void read_int4(const uint8_t* block, int values, Unit& unit) {
  unit.d = load16(block);
  unit.m = block[2];
  for (int i = 0; i < values; i += 32) read_nibbles(block + 3 + i / 2, unit.quants + i);
}

}  // namespace

void read_q8_0(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  for (int i = 0; i < 32; ++i) unit.quants[i] = block[2 + i] ^ 0x80;
}

// IQ4_NL too, whose nibbles are codes.
void read_q4_0(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  read_nibbles(block + 2, unit.quants);
}

void read_q4_1(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  unit.m = load16(block + 2);
  read_nibbles(block + 4, unit.quants);
}

void read_q5_0(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  read_q5(block + 2, block + 6, unit);
}

void read_q5_1(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  unit.m = load16(block + 2);
  read_q5(block + 4, block + 8, unit);
}

void read_mxfp4(const uint8_t* block, Unit& unit) {
  unit.d = block[0];
  read_nibbles(block + 1, unit.quants);
}

void read_int4_g32(const uint8_t* block, Unit& unit) {
  read_int4(block, 32, unit);
}

void read_int4_g128(const uint8_t* block, Unit& unit) {
  read_int4(block, 128, unit);
}

}  // namespace ktserve
