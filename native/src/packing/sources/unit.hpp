// One row's values of one unit of a packed format, and the readers of GGUF's blocks that make it.
#pragma once

#include <cstdint>
#include <cstring>

namespace ktserve {

// 32 or 256 of k in plain order: what all the bit layouts have in common.
struct Unit {
  uint8_t quants[256];
  uint16_t d;          // as it lies in the packed meta: half precision, or an exponent
  uint16_t m;          // the minimum, or dmin, or the zero point
  uint8_t scale[16];   // factors of d per group, uint8 or int8
  uint8_t min[16];     // and of dmin
  uint16_t index[64];  // grids: of entries, instead of quants
  uint8_t signs[32];   // and those of 8 values each; 7 of them, where parity gives the eighth
};

inline uint16_t load16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

inline uint32_t load32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// 16 bytes of nibbles: the low ones are values 0 to 15, the high ones 16 to 31.
inline void read_nibbles(const uint8_t* nibbles, uint8_t* quants) {
  for (int i = 0; i < 16; ++i) {
    quants[i] = nibbles[i] & 15;
    quants[i + 16] = nibbles[i] >> 4;
  }
}

// A unit of one source type from the block at `block`.
void read_q8_0(const uint8_t* block, Unit& unit);
void read_q4_0(const uint8_t* block, Unit& unit);
void read_q4_1(const uint8_t* block, Unit& unit);
void read_q5_0(const uint8_t* block, Unit& unit);
void read_q5_1(const uint8_t* block, Unit& unit);
void read_mxfp4(const uint8_t* block, Unit& unit);
void read_int4_g32(const uint8_t* block, Unit& unit);
void read_int4_g128(const uint8_t* block, Unit& unit);
void read_q2_k(const uint8_t* block, Unit& unit);
void read_q3_k(const uint8_t* block, Unit& unit);
void read_q4_k(const uint8_t* block, Unit& unit);
void read_q5_k(const uint8_t* block, Unit& unit);
void read_q6_k(const uint8_t* block, Unit& unit);
void read_iq4_xs(const uint8_t* block, Unit& unit);
void read_iq2_xxs(const uint8_t* block, Unit& unit);
void read_iq2_xs(const uint8_t* block, Unit& unit);
void read_iq2_s(const uint8_t* block, Unit& unit);
void read_iq3_xxs(const uint8_t* block, Unit& unit);
void read_iq3_s(const uint8_t* block, Unit& unit);

}  // namespace ktserve
