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
//   s64, s128  float16 scale[2], each for 2 or 4 groups
//   z64, z128  float16 scale, uint8 zero point, 16 bytes unused; the chunk's 2 or 4 groups share them
//   c    float16 scale, 32 bytes unused; one chunk is the whole row
//   i    float32 scale, then for each of 8 groups: uint8 step, uint8 offset
// The last chunk of a row ends with the row's last pair of groups. Codes are unsigned; symmetric layouts subtract kZero4 or kZero8.
#pragma once

#include "linear.h"

namespace trivium::linear {

inline constexpr int kZero4 = 8;
inline constexpr int kZero8 = 128;
inline constexpr int64_t kQuads = kGroup / 4;
inline constexpr int64_t kLine = 64;

struct Shape {
  int bits;
  int64_t groups;    // a chunk
  int64_t header;    // bytes
  int64_t span = 1;  // groups that share a scale

  constexpr int64_t group_bytes() const { return kGroup * kTile * bits / 8; }
  constexpr int64_t chunk_bytes() const { return header + groups * group_bytes(); }
  constexpr int64_t chunks(int64_t in) const { return (in + groups * kGroup - 1) / (groups * kGroup); }
  // Groups of a row: a chunk that is cut short still has whole pairs, as quantised inputs have.
  constexpr int64_t row_groups(int64_t in) const {
    const int64_t unit = groups < 2 ? 1 : 2;
    return (in + unit * kGroup - 1) / (unit * kGroup) * unit;
  }
  constexpr int64_t row_bytes(int64_t in) const { return chunks(in) * header + row_groups(in) * group_bytes(); }
};

inline constexpr int64_t kWholeRow = int64_t{1} << 24;

constexpr Shape shape(Layout layout) {
  const int bits = layout >= Layout::q4_s ? 4 : 8;
  switch (layout) {
    case Layout::q8_s:
    case Layout::q4_s: return {bits, 2, 64};
    case Layout::q8_sm:
    case Layout::q4_sm: return {bits, 1, 64};
    case Layout::q4_s64: return {bits, 4, 64, 2};
    case Layout::q4_s128: return {bits, 8, 64, 4};
    case Layout::q4_z64: return {bits, 2, 64, 2};
    case Layout::q4_z128: return {bits, 4, 64, 4};
    case Layout::q8_c: return {bits, kWholeRow, 64, kWholeRow};
    default: return {bits, 8, 320};
  }
}

constexpr bool has_half_groups(Layout layout) { return layout == Layout::q8_k6 || layout == Layout::q4_k6; }
constexpr bool has_zero_points(Layout layout) { return layout == Layout::q4_z64 || layout == Layout::q4_z128; }
constexpr bool is_stepped(Layout layout) { return layout == Layout::q4_i; }
constexpr bool is_blocked(Layout layout) { return layout == Layout::q8_k || layout == Layout::q4_k || has_half_groups(layout); }
// Layouts of published files, whose kernels are compiled for every number of rows in registers; others for few, which cost them some
// speed in batches and everybody less compiling.
constexpr bool is_common(Layout layout) { return layout != Layout::q8_c && layout <= Layout::q4_k; }
constexpr bool is_symmetric(Layout layout) {
  return layout == Layout::q8_s || layout == Layout::q8_c || layout == Layout::q4_s || layout == Layout::q4_s64 ||
         layout == Layout::q4_s128 || has_half_groups(layout);
}

}  // namespace trivium::linear
