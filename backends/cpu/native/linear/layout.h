// Where the bytes of a packed tile are. Shared by packing, unpacking and the kernels.
//
// float32, float16: for each input its kTile weights. bfloat16: for each pair of inputs, kTile pairs (even input first), so
// that the even ones are a shift and the odd ones a mask away from float32.
//
// Integer layouts: a tile is a row of chunks, read front to back. A chunk is a header with the scales of its groups, then its
// groups' codes. Codes of a group lie in quads of 4 consecutive inputs: byte 4 * o + i holds input i of the quad for output o,
// which is what a 4-way byte dot product accumulates into 16 lanes of int32, and what an AMX int8 tile reads as one row of its
// B operand. With 4 bits a 64-byte line holds two quads: the even one in the low nibbles.
//
// Headers (kTile entries each):
//   s    float16 scale[2 groups]
//   sm   float16 scale, float16 min
//   k    float16 d, float16 dmin, then for each of 8 groups: uint8 scale, uint8 min
//   k6   float16 d, 32 bytes unused, then for each of 16 half groups: int8 scale
// Codes are unsigned; symmetric layouts subtract kZero4 or kZero8.
#pragma once

#include "linear.h"

namespace trivium::linear {

inline constexpr int kZero4 = 8;
inline constexpr int kZero8 = 128;
inline constexpr int64_t kQuads = kGroup / 4;
inline constexpr int64_t kLine = 64;

struct Shape {
  int bits;
  int64_t groups;  // a chunk
  int64_t header;  // bytes

  constexpr int64_t group_bytes() const { return kGroup * kTile * bits / 8; }
  constexpr int64_t chunk_bytes() const { return header + groups * group_bytes(); }
  constexpr int64_t chunks(int64_t in) const { return (in + groups * kGroup - 1) / (groups * kGroup); }
};

constexpr Shape shape(Layout layout) {
  const int bits = layout >= Layout::q4_s ? 4 : 8;
  switch (layout) {
    case Layout::q8_s:
    case Layout::q4_s: return {bits, 2, 64};
    case Layout::q8_sm:
    case Layout::q4_sm: return {bits, 1, 64};
    default: return {bits, 8, 320};
  }
}

constexpr bool is_symmetric(Layout layout) { return layout == Layout::q8_s || layout == Layout::q4_s || layout == Layout::q8_k6; }
constexpr bool is_blocked(Layout layout) { return layout == Layout::q8_k || layout == Layout::q4_k || layout == Layout::q8_k6; }

}  // namespace trivium::linear
