// The tile instructions in plain C++; see amx_tiles.h.
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "amx_dot.h"

namespace trivium::amx {
namespace {

[[noreturn]] void fault(const char* what) {
  std::fprintf(stderr, "trivium: emulated tiles: %s\n", what);
  std::abort();
}

// Numbers too small for a normal float32 count as zero, of the same sign.
float flushed(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return (bits & 0x7f800000u) == 0 ? std::bit_cast<float>(bits & 0x80000000u) : x;
}

float widened(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return flushed(std::bit_cast<float>(uint32_t{half} << 16));
}

// std::fma, which is slow where it isn't an instruction: a product of two bfloat16 is exact in float32 unless it leaves its range.
float fused(float x, float y, float sum) {
  const float product = x * y;
  return std::isnormal(product) || x == 0.0f || y == 0.0f ? sum + product : std::fma(x, y, sum);
}

int32_t byte_of(uint8_t byte, bool is_signed) { return is_signed ? static_cast<int8_t>(byte) : byte; }

}  // namespace

void EmulatedTiles::configure(const Config& config) {
  if (config.palette != 1) fault("palette is not 1");
  if (config.start_row != 0) fault("start row is not 0");  // allowed by the processor, and never right here
  for (const uint8_t byte : config.reserved) {
    if (byte != 0) fault("reserved bytes of the configuration are not 0");
  }
  for (int i = 0; i < 16; ++i) {
    const int rows = config.rows[i], bytes = config.row_bytes[i];
    if (i >= kTiles && (rows != 0 || bytes != 0)) fault("a tile that does not exist is configured");
    if (rows > kRows || bytes > kRowBytes) fault("a tile is larger than the palette's");
    if ((rows == 0) != (bytes == 0)) fault("a tile has rows without bytes or bytes without rows");
    if (i >= kTiles) continue;
    tiles_[i] = Tile{};
    tiles_[i].rows = rows;
    tiles_[i].row_bytes = bytes;
  }
}

const EmulatedTiles::Tile& EmulatedTiles::configured(int tile) const {
  if (tile < 0 || tile >= kTiles || tiles_[tile].rows == 0) fault("a tile is used that is not configured");
  return tiles_[tile];
}

void EmulatedTiles::zero_tile(int tile) {
  configured(tile);
  std::memset(tiles_[tile].data, 0, sizeof tiles_[tile].data);
}

void EmulatedTiles::load_tile(int tile, const void* from, int64_t stride) {
  configured(tile);
  Tile& t = tiles_[tile];
  std::memset(t.data, 0, sizeof t.data);
  for (int row = 0; row < t.rows; ++row) {
    std::memcpy(t.data[row], static_cast<const uint8_t*>(from) + row * stride, static_cast<size_t>(t.row_bytes));
  }
}

void EmulatedTiles::store_tile(int tile, void* to, int64_t stride) const {
  const Tile& t = configured(tile);
  for (int row = 0; row < t.rows; ++row) {
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, t.data[row], static_cast<size_t>(t.row_bytes));
  }
}

void EmulatedTiles::check_dot(int c, int a, int b) const {
  const Tile &tc = configured(c), &ta = configured(a), &tb = configured(b);
  if (c == a || c == b || a == b) fault("a dot names a tile twice");
  if (tc.row_bytes % 4 != 0 || ta.row_bytes % 4 != 0 || tb.row_bytes % 4 != 0) fault("a row of a dot is not whole dwords");
  if (tc.rows != ta.rows) fault("rows of the sums and of the first factor differ");
  if (tc.row_bytes != tb.row_bytes) fault("columns of the sums and of the second factor differ");
  if (ta.row_bytes != 4 * tb.rows) fault("columns of the first factor and rows of the second differ");
}

void EmulatedTiles::dot_bytes(int c, int a, int b, bool a_is_signed, bool b_is_signed) {
  check_dot(c, a, b);
  Tile& sums = tiles_[c];
  for (int m = 0; m < sums.rows; ++m) {
    for (int n = 0; n < sums.row_bytes / 4; ++n) {
      uint32_t sum;  // wraps, as the processor's
      std::memcpy(&sum, &sums.data[m][4 * n], 4);
      for (int k = 0; k < tiles_[b].rows; ++k) {
        for (int i = 0; i < 4; ++i) {
          const int32_t x = byte_of(tiles_[a].data[m][4 * k + i], a_is_signed), y = byte_of(tiles_[b].data[k][4 * n + i], b_is_signed);
          sum += static_cast<uint32_t>(x * y);
        }
      }
      std::memcpy(&sums.data[m][4 * n], &sum, 4);
    }
  }
}

// Even and odd numbers are summed apart from zero, each by fused multiply-adds, then added, then added to what the tile holds. Every
// operand and result that is not a normal number counts as zero.
void EmulatedTiles::dot_pairs(int c, int a, int b) {
  check_dot(c, a, b);
  Tile& sums = tiles_[c];
  for (int m = 0; m < sums.rows; ++m) {
    for (int n = 0; n < sums.row_bytes / 4; ++n) {
      float part[2] = {0.0f, 0.0f};
      for (int k = 0; k < tiles_[b].rows; ++k) {
        for (int i = 0; i < 2; ++i) {
          const float x = widened(&tiles_[a].data[m][4 * k + 2 * i]), y = widened(&tiles_[b].data[k][4 * n + 2 * i]);
          part[i] = flushed(fused(x, y, part[i]));
        }
      }
      float sum;
      std::memcpy(&sum, &sums.data[m][4 * n], 4);
      sum = flushed(flushed(sum) + flushed(part[0] + part[1]));
      std::memcpy(&sums.data[m][4 * n], &sum, 4);
    }
  }
}

void emulated_dot(Dot kind, const Config& config, const uint8_t* a, const uint8_t* b, uint8_t* c) {
  dot_once<EmulatedTiles>(kind, config, a, b, c);
}

}  // namespace trivium::amx
