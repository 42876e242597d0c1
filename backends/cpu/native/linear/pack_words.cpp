// The pairs of storage and layout that are packed by moving words of four codes (or two bfloat16) as they are.
#include <algorithm>
#include <cstring>

#include "rows.h"

namespace trivium::linear {
namespace {

constexpr uint32_t kLow = 0x0f0f0f0fu;

uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}
void store_word(uint8_t* p, uint32_t word) { std::memcpy(p, &word, sizeof word); }

// Four lines of one output's 32 nibbles. In storage byte i holds number i (low) and number i + 16 (high); in a line, quads of four
// numbers lie in pairs, the even one low.
void move_nibbles(const uint8_t* p, uint8_t* line) {
  const uint32_t a = load_word(p), b = load_word(p + 4), c = load_word(p + 8), d = load_word(p + 12);
  store_word(line, (a & kLow) | (b & kLow) << 4);
  store_word(line + kLine, (c & kLow) | (d & kLow) << 4);
  store_word(line + 2 * kLine, (a >> 4 & kLow) | (b & ~kLow));
  store_word(line + 3 * kLine, (c >> 4 & kLow) | (d & ~kLow));
}

// Eight lines of one output's 32 signed bytes, which the layout keeps unsigned about kZero8.
void move_bytes(const uint8_t* p, uint8_t* line) {
  for (int64_t quad = 0; quad < kQuads; ++quad) store_word(line + quad * kLine, load_word(p + 4 * quad) ^ 0x80808080u);
}

// Four words, one of each of four outputs.
using Words = uint32_t __attribute__((vector_size(16)));

#if defined(__clang__)
template <int a, int b, int c, int d>
Words pick(Words x, Words y) {
  return __builtin_shufflevector(x, y, a, b, c, d);
}
#else
template <unsigned a, unsigned b, unsigned c, unsigned d>
Words pick(Words x, Words y) {
  return __builtin_shuffle(x, y, Words{a, b, c, d});
}
#endif

struct Quads {
  Words word[4];
};

// Word i of four outputs, whose 16 bytes lie `stride` apart.
Quads gather(const uint8_t* p, int64_t stride) {
  Words row[4];
  for (int64_t i = 0; i < 4; ++i) std::memcpy(&row[i], p + i * stride, sizeof row[i]);
  const Words low01 = pick<0, 4, 1, 5>(row[0], row[1]), low23 = pick<0, 4, 1, 5>(row[2], row[3]);
  const Words high01 = pick<2, 6, 3, 7>(row[0], row[1]), high23 = pick<2, 6, 3, 7>(row[2], row[3]);
  return {{pick<0, 1, 4, 5>(low01, low23), pick<2, 3, 6, 7>(low01, low23), pick<0, 1, 4, 5>(high01, high23), pick<2, 3, 6, 7>(high01, high23)}};
}

// As move_nibbles and move_bytes, for four outputs beside each other.
void move_four_nibbles(const uint8_t* p, int64_t stride, uint8_t* line) {
  const auto [a, b, c, d] = gather(p, stride).word;
  const Words lines[4] = {(a & kLow) | (b & kLow) << 4, (c & kLow) | (d & kLow) << 4, (a >> 4 & kLow) | (b & ~kLow), (c >> 4 & kLow) | (d & ~kLow)};
  for (int64_t i = 0; i < 4; ++i) std::memcpy(line + i * kLine, &lines[i], sizeof lines[i]);
}

void move_four_bytes(const uint8_t* p, int64_t stride, uint8_t* line) {
  for (int64_t half = 0; half < 2; ++half) {
    const Quads quads = gather(p + 16 * half, stride);
    for (int64_t i = 0; i < 4; ++i) {
      const Words bytes = quads.word[i] ^ 0x80808080u;
      std::memcpy(line + (4 * half + i) * kLine, &bytes, sizeof bytes);
    }
  }
}

// Blocks of 32: float16 scale, for sm float16 minimum, codes.
template <Layout kLayout>
void move_blocks(const MatrixView& matrix, const Source& source, const uint8_t* rows, int64_t count, uint8_t* tile) {
  constexpr Shape kShape = shape(kLayout);
  constexpr int64_t kScales = is_symmetric(kLayout) ? 2 : 4, kBlock = kScales + kGroup * kShape.bits / 8;
  const int64_t groups = matrix.in / kGroup;
  if (count < kTile || groups % kShape.groups != 0) std::fill_n(tile, matrix.tile_bytes, uint8_t{0});
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t* chunk = tile + g / kShape.groups * kShape.chunk_bytes();
    uint8_t* scales = chunk + g % kShape.groups * 32;
    uint8_t* codes = chunk + kShape.header + g % kShape.groups * kShape.group_bytes();
    int64_t four = 0;
    for (; four + 4 <= count; four += 4) {
      const uint8_t* block = rows + four * source.row_bytes + g * kBlock;
      if constexpr (kShape.bits == 4) move_four_nibbles(block + kScales, source.row_bytes, codes + 4 * four);
      else move_four_bytes(block + kScales, source.row_bytes, codes + 4 * four);
    }
    for (int64_t lane = 0; lane < count; ++lane) {
      const uint8_t* block = rows + lane * source.row_bytes + g * kBlock;
      std::memcpy(scales + 2 * lane, block, 2);
      if constexpr (!is_symmetric(kLayout)) std::memcpy(scales + 32 + 2 * lane, block + 2, 2);
      if (lane < four) continue;
      if constexpr (kShape.bits == 4) move_nibbles(block + kScales, codes + 4 * lane);
      else move_bytes(block + kScales, codes + 4 * lane);
    }
  }
}

// bfloat16: pairs of inputs, all outputs of a pair beside each other.
void move_pairs(const MatrixView& matrix, const Source& source, const uint8_t* rows, int64_t count, uint8_t* tile) {
  if (count < kTile) std::fill_n(tile, matrix.tile_bytes, uint8_t{0});
  constexpr int64_t kAtATime = 16;  // a line of each row
  for (int64_t first = 0; first < matrix.in / 2; first += kAtATime) {
    const int64_t last = std::min(matrix.in / 2, first + kAtATime);
    for (int64_t lane = 0; lane < count; ++lane) {
      const uint8_t* row = rows + lane * source.row_bytes;
      for (int64_t pair = first; pair < last; ++pair) store_word(tile + (pair * kTile + lane) * 4, load_word(row + 4 * pair));
    }
  }
}

}  // namespace

bool pack_tile_words(const MatrixView& matrix, const Source& source, int64_t tile, uint8_t* memory) {
  const uint8_t* rows = source.data + tile * kTile * source.row_bytes;
  const int64_t count = std::min(matrix.out - tile * kTile, kTile);
  if (source.storage == Storage::q4_0 && matrix.layout == Layout::q4_s) {
    move_blocks<Layout::q4_s>(matrix, source, rows, count, memory);
  } else if (source.storage == Storage::q4_1 && matrix.layout == Layout::q4_sm) {
    move_blocks<Layout::q4_sm>(matrix, source, rows, count, memory);
  } else if (source.storage == Storage::q8_0 && matrix.layout == Layout::q8_s) {
    move_blocks<Layout::q8_s>(matrix, source, rows, count, memory);
  } else if (source.storage == Storage::bfloat16 && matrix.layout == Layout::bfloat16 && matrix.in % 2 == 0) {
    move_pairs(matrix, source, rows, count, memory);
  } else {
    return false;
  }
  return true;
}

}  // namespace trivium::linear
