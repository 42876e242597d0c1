// Packing checkpoint rows into tiles, and reading rows of a packed matrix back.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "rows.h"
#include "scalar.h"

namespace trivium::linear {
namespace {

// The integer layout that holds a block storage exactly; float32 if there is none.
Layout exact_codes(Format format, Storage storage) {
  const bool four = format == Format::int4 || format == Format::int4_asym;
  if (!four && format != Format::int8) return Layout::float32;
  switch (storage) {
    case Storage::q4_0: return four ? Layout::q4_s : Layout::q8_s;
    case Storage::q4_1: return four ? Layout::q4_sm : Layout::q8_sm;
    case Storage::q4_k: return four ? Layout::q4_k : Layout::q8_k;
    case Storage::q5_0:
    case Storage::q8_0: return four ? Layout::float32 : Layout::q8_s;
    case Storage::q5_1: return four ? Layout::float32 : Layout::q8_sm;
    case Storage::q5_k: return four ? Layout::float32 : Layout::q8_k;
    case Storage::q3_k: return four ? Layout::q4_k6 : Layout::q8_k6;
    case Storage::iq4_xs:
    case Storage::q6_k: return four ? Layout::float32 : Layout::q8_k6;
    case Storage::tq1_0:
    case Storage::tq2_0: return four ? Layout::q4_s128 : Layout::q8_s;
    case Storage::iq4_nl:
    case Storage::mxfp4: return four ? Layout::float32 : Layout::q8_s;
    default: return Layout::float32;
  }
}

bool holds_blocks(Layout layout, Storage storage) {
  return needs_quantised(layout) &&
         (exact_codes(Format::int8, storage) == layout || exact_codes(Format::int4, storage) == layout);
}

// One output's place in a tile.
class Lane {
public:
  Lane(uint8_t* tile, Layout layout, int64_t lane) : tile_(tile), layout_(layout), shape_(shape(layout)), lane_(lane) {}

  uint8_t* chunk(int64_t group) const { return tile_ + group / shape_.groups * shape_.chunk_bytes(); }

  // The first four bytes of this output's codes of a group; the next are a line further on.
  uint8_t* codes(int64_t group) const {
    return chunk(group) + shape_.header + group % shape_.groups * shape_.group_bytes() + 4 * lane_;
  }

  uint8_t* half(int64_t group, int64_t offset) const { return chunk(group) + offset + 2 * lane_; }
  uint8_t* scale(int64_t group) const { return half(group, 32 * (group % shape_.groups / shape_.span)); }
  uint8_t* part_scale(int64_t group) const { return chunk(group) + static_cast<int64_t>(sizeof(float)) * lane_; }
  uint8_t* zero_point(int64_t group) const { return chunk(group) + 32 + lane_; }
  uint8_t* min(int64_t group) const { return half(group, 32); }
  uint8_t* sub_scale(int64_t group) const { return chunk(group) + 64 + 32 * (group % 8) + lane_; }
  uint8_t* sub_min(int64_t group) const { return sub_scale(group) + 16; }  // for k6: the second half group's scale

  Layout layout() const { return layout_; }

private:
  uint8_t* tile_;
  Layout layout_;
  Shape shape_;
  int64_t lane_;
};

void write_half(uint8_t* p, uint16_t bits) {
  p[0] = static_cast<uint8_t>(bits);
  p[1] = static_cast<uint8_t>(bits >> 8);
}
float read_float(const uint8_t* p) {
  float value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
float read_half(const uint8_t* p) { return from_float16(static_cast<uint16_t>(p[0] | p[1] << 8)); }

int zero_of(Layout layout) {
  if (!is_symmetric(layout)) return 0;
  return shape(layout).bits == 4 ? kZero4 : kZero8;
}

void write_scales(const RowCodes& row, int64_t groups, const Lane& lane) {
  const bool k6 = has_half_groups(lane.layout());
  for (int64_t g = 0; g < groups; ++g) {
    if (is_stepped(lane.layout())) {
      std::memcpy(lane.part_scale(g), &row.part_scale[static_cast<size_t>(g * kGroup / kPart)], sizeof(float));
      *lane.sub_scale(g) = row.sub_scale[g];
      *lane.sub_min(g) = row.sub_min[g];
      continue;
    }
    if (!is_blocked(lane.layout())) {
      write_half(lane.scale(g), row.scale[g]);
      if (has_zero_points(lane.layout())) *lane.zero_point(g) = row.sub_min[g];
      else if (!is_symmetric(lane.layout())) write_half(lane.min(g), row.min[g]);
      continue;
    }
    write_half(lane.half(g, 0), row.d[g / 8]);
    if (!k6) write_half(lane.half(g, 32), row.d_min[g / 8]);
    *lane.sub_scale(g) = k6 ? row.sub_scale[2 * g] : row.sub_scale[g];
    *lane.sub_min(g) = k6 ? row.sub_scale[2 * g + 1] : row.sub_min[g];
  }
}

// The codes of one group, moved to another zero, as quads of bytes.
void write_group(const uint8_t* code, int zero_shift, int bits, uint8_t* line) {
  const uint32_t shift = 0x01010101u * static_cast<uint32_t>(zero_shift);  // sums stay below 256: bytes don't carry
  uint32_t quads[kQuads];
  std::memcpy(quads, code, sizeof quads);
  const int step = bits == 4 ? 2 : 1;
  for (int quad = 0; quad < kQuads; quad += step, line += kLine) {
    const uint32_t low = quads[quad] + shift;
    const uint32_t word = bits == 4 ? low | (quads[quad + 1] + shift) << 4 : low;
    std::memcpy(line, &word, sizeof word);
  }
}

void write_codes(const RowCodes& row, int64_t in, const Lane& lane) {
  const int64_t groups = (in + kGroup - 1) / kGroup;
  write_scales(row, groups, lane);
  for (int64_t g = 0; g < groups; ++g) {
    write_group(row.code.data() + g * kGroup, zero_of(lane.layout()) - row.zero, shape(lane.layout()).bits, lane.codes(g));
  }
}

void write_floats(const float* x, int64_t in, Layout layout, int64_t lane, uint8_t* tile) {
  auto* floats = reinterpret_cast<float*>(tile) + lane;
  auto* words = reinterpret_cast<uint16_t*>(tile);
  if (layout == Layout::float32) {
    for (int64_t i = 0; i < in; ++i) floats[i * kTile] = x[i];
  } else if (layout == Layout::bfloat16) {
    for (int64_t i = 0; i < in; ++i) words[(i / 2 * kTile + lane) * 2 + i % 2] = to_bfloat16(x[i]);
  } else {
    for (int64_t i = 0; i < in; ++i) {
      words[i * kTile + lane] = to_float16(x[i]);
      if (std::isinf(from_float16(words[i * kTile + lane])) && !std::isinf(x[i])) {
        throw std::invalid_argument("a weight is too large for float16 (largest 65504); bfloat16 or float32 hold it");
      }
    }
  }
}

void read_floats(const MatrixView& matrix, const uint8_t* tile, int64_t lane, float* out) {
  const auto* words = reinterpret_cast<const uint16_t*>(tile);
  for (int64_t i = 0; i < matrix.in; ++i) {
    if (matrix.layout == Layout::float32) out[i] = reinterpret_cast<const float*>(tile)[i * kTile + lane];
    else if (matrix.layout == Layout::bfloat16) out[i] = from_bfloat16(words[(i / 2 * kTile + lane) * 2 + i % 2]);
    else out[i] = from_float16(words[i * kTile + lane]);
  }
}

struct Scales {
  float scale[2];  // of each half group
  float min;
};

Scales read_scales(const Lane& lane, int64_t group) {
  if (is_stepped(lane.layout())) {  // with the part's scale still to come: both are whole
    const auto step = static_cast<float>(*lane.sub_scale(group));
    return {{step, step}, static_cast<float>(*lane.sub_min(group) - kZero8)};
  }
  if (!is_blocked(lane.layout())) {
    const float scale = read_half(lane.scale(group));
    if (has_zero_points(lane.layout())) return {{scale, scale}, -(scale * static_cast<float>(*lane.zero_point(group)))};
    return {{scale, scale}, is_symmetric(lane.layout()) ? 0.0f : read_half(lane.min(group))};
  }
  const float d = read_half(lane.half(group, 0));
  if (has_half_groups(lane.layout())) {
    const auto first = static_cast<int8_t>(*lane.sub_scale(group));
    const auto second = static_cast<int8_t>(*lane.sub_min(group));
    return {{d * static_cast<float>(first), d * static_cast<float>(second)}, 0.0f};
  }
  const float scale = d * static_cast<float>(*lane.sub_scale(group));
  return {{scale, scale}, -(read_half(lane.half(group, 32)) * static_cast<float>(*lane.sub_min(group)))};
}

void read_codes(const Lane& lane, int64_t in, float* out) {
  const int zero = zero_of(lane.layout());
  const bool four = shape(lane.layout()).bits == 4;
  Scales scales{};
  const uint8_t* codes = nullptr;
  for (int64_t i = 0; i < in; ++i) {
    const int64_t place = i % kGroup;
    if (place == 0) {
      scales = read_scales(lane, i / kGroup);
      codes = lane.codes(i / kGroup);
    }
    const int byte = codes[(four ? place / 8 : place / 4) * kLine + place % 4];
    const int code = four ? byte >> (place / 4 % 2 * 4) & 15 : byte;
    const float product = scales.scale[place / 16] * static_cast<float>(code - zero);
    out[i] = is_symmetric(lane.layout()) ? product : product + scales.min;
    if (is_stepped(lane.layout())) out[i] *= read_float(lane.part_scale(i / kGroup));
  }
}

// Scratch of one packing thread.
struct RowPacker {
  MatrixView matrix;
  const Source& source;
  RowCodes codes;
  std::vector<float> floats;

  RowPacker(const MatrixView& view, const Source& from)
      : matrix(view), source(from), codes(view.in), floats(static_cast<size_t>(view.in)) {}

  void pack(int64_t row, uint8_t* tile) {
    const uint8_t* data = source.data + row * source.row_bytes;
    if (holds_blocks(matrix.layout, source.storage)) {
      read_blocks(source.storage, data, matrix.in, codes);
      return write_codes(codes, matrix.in, Lane(tile, matrix.layout, row % kTile));
    }
    decode_row(source.storage, data, matrix.in, floats.data(), codes);
    if (!needs_quantised(matrix.layout)) return write_floats(floats.data(), matrix.in, matrix.layout, row % kTile, tile);
    round_row(matrix.layout, floats.data(), matrix.in, codes);
    write_codes(codes, matrix.in, Lane(tile, matrix.layout, row % kTile));
  }
};

}  // namespace

Layout choose_layout(Format format, Storage storage) {
  switch (format) {
    case Format::float32: return Layout::float32;
    case Format::bfloat16: return Layout::bfloat16;
    case Format::float16: return Layout::float16;
    default: break;
  }
  const Layout exact = exact_codes(format, storage);
  if (exact != Layout::float32) return exact;
  switch (format) {
    case Format::int4: return Layout::q4_s;
    case Format::int4_g64: return Layout::q4_s64;
    case Format::int4_g128: return Layout::q4_s128;
    case Format::int4_asym: return Layout::q4_sm;
    case Format::int4_asym_g64: return Layout::q4_z64;
    case Format::int4_asym_g128: return Layout::q4_z128;
    case Format::int4_i8: return Layout::q4_i;
    case Format::int8_channel: return Layout::q8_c;
    default: return Layout::q8_s;
  }
}

bool is_lossless(Format format, Storage storage) {
  switch (format) {
    case Format::float32: return true;
    case Format::bfloat16: return storage == Storage::bfloat16;
    case Format::float16: return storage == Storage::float16;
    default: return exact_codes(format, storage) != Layout::float32;
  }
}

void pack_tiles(PackedMatrix& matrix, const Source& source, int64_t tile_begin, int64_t tile_end) {
  const MatrixView view = matrix.view();
  if (needs_quantised(view.layout) && !can_round(view.layout) && !holds_blocks(view.layout, source.storage)) {
    throw std::invalid_argument("this layout holds its own block format only");
  }
  if (source.row_bytes < storage_row_bytes(source.storage, view.in) || storage_row_bytes(source.storage, view.in) == 0) {
    throw std::invalid_argument("a source row is shorter than its matrix, or not a whole number of blocks");
  }
  RowPacker packer(view, source);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    uint8_t* memory = matrix.tile(tile);
    if (pack_tile_words(view, source, tile, memory)) continue;
    std::fill_n(memory, view.tile_bytes, uint8_t{0});
    for (int64_t row = tile * kTile; row < std::min(view.out, (tile + 1) * kTile); ++row) packer.pack(row, memory);
  }
}

void unpack_row(const MatrixView& matrix, int64_t row, float* out) {
  // Lane only reads here; it is shared with packing, which writes.
  auto* tile = const_cast<uint8_t*>(matrix.data) + row / kTile * matrix.tile_bytes;
  if (!needs_quantised(matrix.layout)) return read_floats(matrix, tile, row % kTile, out);
  read_codes(Lane(tile, matrix.layout, row % kTile), matrix.in, out);
}

}  // namespace trivium::linear
