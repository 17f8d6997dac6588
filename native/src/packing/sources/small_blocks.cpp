// Blocks of 32 values with a scale, and a minimum, of their own.
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

}  // namespace ktserve
