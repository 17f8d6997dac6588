// Blocks of 256 values as entries of a grid: vectors of 8 values, or of 4, with signs of their own; each 16 or 32
// values have a factor of the block's scale.
#include "packing/sources/unit.hpp"

namespace ktserve {
namespace {

// Four groups of seven signs, and a factor above them.
void read_signs_and_factor(const uint8_t* p, int b, Unit& unit) {
  const uint32_t word = load32(p);
  for (int i = 0; i < 4; ++i) unit.signs[4 * b + i] = static_cast<uint8_t>(word >> 7 * i & 127);
  unit.scale[b] = static_cast<uint8_t>(word >> 28);
}

void read_factors(const uint8_t* nibbles, int count, Unit& unit) {
  for (int g = 0; g < count; ++g) unit.scale[g] = nibbles[g / 2] >> (g % 2 * 4) & 15;
}

}  // namespace

void read_iq2_xxs(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  for (int b = 0; b < 8; ++b) {
    const uint8_t* q = block + 2 + 8 * b;
    for (int i = 0; i < 4; ++i) unit.index[4 * b + i] = q[i];
    read_signs_and_factor(q + 4, b, unit);
  }
}

void read_iq2_xs(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  for (int i = 0; i < 32; ++i) {
    const uint16_t q = load16(block + 2 + 2 * i);
    unit.index[i] = q & 511;
    unit.signs[i] = static_cast<uint8_t>(q >> 9);
  }
  read_factors(block + 66, 16, unit);
}

void read_iq2_s(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  for (int i = 0; i < 32; ++i) {
    const int high = block[66 + i / 4] >> (i % 4 * 2) & 3;
    unit.index[i] = static_cast<uint16_t>(block[2 + i] | high << 8);
  }
  std::memcpy(unit.signs, block + 34, 32);
  read_factors(block + 74, 16, unit);
}

void read_iq3_xxs(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  for (int i = 0; i < 64; ++i) unit.index[i] = block[2 + i];
  for (int b = 0; b < 8; ++b) read_signs_and_factor(block + 66 + 4 * b, b, unit);
}

void read_iq3_s(const uint8_t* block, Unit& unit) {
  unit.d = load16(block);
  for (int i = 0; i < 64; ++i) {
    const int high = block[66 + i / 8] >> (i % 8) & 1;
    unit.index[i] = static_cast<uint16_t>(block[2 + i] | high << 8);
  }
  std::memcpy(unit.signs, block + 74, 32);
  read_factors(block + 106, 8, unit);
}

}  // namespace ktserve
