// A weight row between a checkpoint's blocks and a packed tile: plain codes and scales.
#pragma once

#include <vector>

#include "layout.h"

namespace trivium::linear {

// Row r means, per layout suffix:
//   s, sm  scale[group] * (code - zero) (+ min[group])
//   s64, s128, c: as s; groups that share a scale have it each. z64, z128: scale[group] * (code - sub_min[group])
//   k      (d[block] * sub_scale[group]) * code - d_min[block] * sub_min[group]
//   i      part_scale[part] * (sub_scale[group] * code + sub_min[group] - kZero8)
//   k6     (d[block] * int8(sub_scale[half group])) * (code - zero)
// scale, min, d and d_min are float16 bit patterns. Sized for `in` rounded up to 256, which is a part, too.
struct RowCodes {
  std::vector<uint8_t> code;
  std::vector<uint16_t> scale, min, d, d_min;
  std::vector<uint8_t> sub_scale, sub_min;
  std::vector<float> part_scale;
  int zero = 0;

  explicit RowCodes(int64_t in);
};

constexpr bool is_float(Storage storage) { return storage <= Storage::float16; }

// Reads a row of blocks (not a float storage).
void read_blocks(Storage storage, const uint8_t* row, int64_t in, RowCodes& codes);
// Decodes a row of any storage: out[0, in).
void decode_row(Storage storage, const uint8_t* row, int64_t in, float* out, RowCodes& scratch);
// True for the layouts that round_row makes.
bool can_round(Layout layout);
// Rounds x[0, in) to codes of a layout. Throws std::invalid_argument if a scale doesn't fit float16.
void round_row(Layout layout, const float* x, int64_t in, RowCodes& codes);

// Packs a whole tile word by word where storage and layout allow it: the same bytes as by rows of codes, several times as fast. False:
// they don't, and nothing was done. memory: tile_bytes, not initialised.
bool pack_tile_words(const MatrixView& matrix, const Source& source, int64_t tile, uint8_t* memory);

}  // namespace trivium::linear
