// The kernel of layout i on matrix tiles (part_kernel.h says what is computed): a part's dots stay in a tile from its first input to its
// last, so that what else a sum costs, a store, a conversion, a product and a multiply-add, comes once for 256 inputs.
//
// A pair of blocks of rows and a pair of tiles of outputs go together: of a part of 256 inputs that is 16 dots (256 cycles), and 64 rows that
// vectors take over, of which those of the part before run beside them.
#pragma once

#include "amx_tiles.h"
#include "part_panels.h"

namespace trivium::linear {

// Memory for the weights of some parts of a pair of tiles, as dots take them.
template <class S>
struct PartPanel {
  using Kernel = PartKernel<S>;

  static constexpr int64_t kPair = PartPanelKernel<S>::kPair, kParts = PartPanelKernel<S>::kParts;
  static constexpr int64_t kPartQuads = kPart / 4;

  alignas(64) uint8_t weights[kParts][kPartQuads][kPair][kLine];
  alignas(64) float scales[kParts][kPair][kTile];

  // Fills in `groups` groups of a chunk of tile t.
  TRIVIUM_INLINE void unpack(const uint8_t* chunk, int64_t groups, int64_t part, int64_t t) {
    const uint8_t* codes = chunk + Kernel::kShape.header;
    for (int64_t group = 0; group < groups; ++group) {
      const uint8_t* steps = chunk + Kernel::kSteps + group * Kernel::kStepPair;
      const Grid<S> grid(steps);
#pragma GCC unroll 4
      for (int64_t pair = 0; pair < kQuads / 2; ++pair, codes += kLine) {
        typename S::Codes low, high;
        grid.make(codes, low, high);
        uint8_t* to = weights[part][group * kQuads + 2 * pair][t];
        S::store_codes(low, to);
        S::store_codes(high, to + kPair * kLine);
      }
    }
    S::store(S::load(reinterpret_cast<const float*>(chunk)), scales[part][t]);
  }
};

// Steps through the parts of some outputs: body(base, count, last) for `count` parts from `base` on, once they lie in the panel.
template <int kWidth, class S, class Body>
TRIVIUM_INLINE void for_panels(const MatrixView& matrix, int64_t out, PartPanel<S>& panel, const Body& body) {
  using Kernel = PartKernel<S>;
  constexpr int64_t kParts = PartPanel<S>::kParts;
  const uint8_t* tile = matrix.data + out / kTile * matrix.tile_bytes;
  const int64_t groups = Kernel::kShape.row_groups(matrix.in), parts = Kernel::kShape.chunks(matrix.in);
  const int64_t steps = (parts + kParts - 1) / kParts;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t base = parts * step / steps, count = parts * (step + 1) / steps - base;
    for (int64_t p = 0; p < count; ++p) {
      for (int t = 0; t < kWidth; ++t) {
        const uint8_t* chunk = tile + t * matrix.tile_bytes + (base + p) * Kernel::kShape.chunk_bytes();
        panel.unpack(chunk, std::min(Kernel::kPartGroups, groups - (base + p) * Kernel::kPartGroups), p, t);
      }
    }
    body(base, count, step == steps - 1);
  }
}

template <class Tiles, class S>
struct AmxPartKernel {
  using Plain = LinearKernel<S>;
  using Few = PartKernel<S>;
  using Panel = PartPanel<S>;
  using F32 = typename S::F32;

  static constexpr int64_t kPair = Panel::kPair;  // tiles of outputs, blocks of rows
  static constexpr int64_t kBlock = amx::kRows, kPanelRows = 128;
  static constexpr int64_t kDepth = amx::kRowBytes;  // inputs of a dot

  struct Dots {
    alignas(64) int32_t sum[kPair][kPair][kBlock][kTile];  // [block][tile]
  };
  struct Buffers {
    Panel panel;
    Dots dots[2];  // of a part and of the one before
    alignas(64) float sums[kPanelRows][kPair][kTile];
  };

  static amx::Config config(int64_t rows) {
    amx::Config c;
    for (int sum = 0; sum < 4; ++sum) c.shape(sum, rows, amx::kRowBytes);
    for (int input = 4; input < 6; ++input) c.shape(input, rows, amx::kRowBytes);
    for (int weight = 6; weight < 8; ++weight) c.shape(weight, amx::kRows, amx::kRowBytes);
    return c;
  }

  const MatrixView& matrix;
  const QuantisedRows& x;
  const Output& output;
  Buffers& b;
  Tiles& tiles;
  int64_t block;  // rows that the tiles are configured for

  // Dots of a part for kBlocks blocks of rows from `row` on: sum tile 2 * block + tile.
  template <int kWidth, int kBlocks>
  TRIVIUM_INLINE void dot(int64_t row, int64_t part, int64_t groups, const uint8_t* weights, Dots& dots, Ahead& ahead) {
    const auto* input = reinterpret_cast<const uint8_t*>(x.part(row)[part].q);
    tiles.template zero<0>();
    if constexpr (kWidth == 2) tiles.template zero<1>();
    if constexpr (kBlocks == 2) tiles.template zero<2>();
    if constexpr (kBlocks == 2 && kWidth == 2) tiles.template zero<3>();
    for (int64_t at = 0; at < groups * kGroup; at += kDepth, weights += kDepth / 4 * kPair * kLine) {
      ahead.ask();
      tiles.template load<4>(input + at, x.stride);
      tiles.template load<6>(weights, kPair * kLine);
      tiles.template dot_signed_unsigned<0, 4, 6>();
      if constexpr (kWidth == 2) {
        tiles.template load<7>(weights + kLine, kPair * kLine);
        tiles.template dot_signed_unsigned<1, 4, 7>();
      }
      if constexpr (kBlocks == 2) {
        tiles.template load<5>(input + at + kBlock * x.stride, x.stride);
        tiles.template dot_signed_unsigned<2, 5, 6>();
        if constexpr (kWidth == 2) tiles.template dot_signed_unsigned<3, 5, 7>();
      }
    }
    tiles.template store<0>(dots.sum[0][0], kLine);
    if constexpr (kWidth == 2) tiles.template store<1>(dots.sum[0][1], kLine);
    if constexpr (kBlocks == 2) tiles.template store<2>(dots.sum[1][0], kLine);
    if constexpr (kBlocks == 2 && kWidth == 2) tiles.template store<3>(dots.sum[1][1], kLine);
  }

  // Adds a part's dots of `count` rows from `row` on into their sums.
  template <int kWidth>
  TRIVIUM_INLINE void add(const Dots& dots, int64_t row, int64_t count, int64_t part, const float* scales, float* sums) const {
    F32 scale[kWidth];
#pragma GCC unroll 2
    for (int t = 0; t < kWidth; ++t) scale[t] = S::load(scales + t * kTile);
    const int64_t each = x.stride;
    const auto* record = reinterpret_cast<const uint8_t*>(x.part(row) + part);
#pragma GCC unroll 4
    for (int64_t r = 0; r < count; ++r, record += each, sums += kPair * kTile) {
      const auto& inputs = *reinterpret_cast<const QuantisedPart*>(record);
      const auto start = S::splat_whole(&inputs.start);
      const F32 of_row = S::splat(&inputs.scale);
#pragma GCC unroll 2
      for (int t = 0; t < kWidth; ++t) {
        const auto whole = S::add_whole(S::load_whole(dots.sum[r / kBlock][t][r % kBlock]), start);
        const F32 sum = part == 0 ? S::zero_float() : S::load(sums + t * kTile);
        S::store(S::mul_add(S::to_float(whole), S::mul(scale[t], of_row), sum), sums + t * kTile);
      }
    }
  }

  // Parts [base, base + count) of kWidth tiles and kBlocks blocks of rows; local: of the panel's first row.
  template <int kWidth, int kBlocks>
  TRIVIUM_INLINE void step(int64_t row, int64_t local, int64_t base, int64_t count, bool last, int64_t out, int64_t end, Ahead& ahead) {
    const int64_t rows = kBlocks * block, groups = Few::kShape.row_groups(matrix.in);
    float* sums = b.sums[local][0];
    for (int64_t p = 0; p <= count; ++p) {
      const int64_t part = base + p;
      if (p < count) {
        const int64_t some = std::min(Few::kPartGroups, groups - part * Few::kPartGroups);
        dot<kWidth, kBlocks>(row, part, some, b.panel.weights[p][0][0], b.dots[p % 2], ahead);
      }
      if (p > 0) add<kWidth>(b.dots[(p - 1) % 2], row, rows, part - 1, b.panel.scales[p - 1][0], sums);
    }
    if (!last) return;
    for (int64_t r = 0; r < rows; ++r) {
      for (int t = 0; t < kWidth; ++t) {
        Plain::finish(S::load(sums + (r * kPair + t) * kTile), output, row + r, out + t * kTile, end - out - t * kTile);
      }
    }
  }

  // kWidth tiles for rows that are whole blocks.
  template <int kWidth>
  [[gnu::noinline]] void multiply_tiles(Range rows, int64_t out, int64_t end) {
    const int64_t pairs = (rows.end - rows.begin + 2 * kBlock - 1) / (2 * kBlock);
    Ahead ahead(matrix.data + (out / kTile + kWidth) * matrix.tile_bytes, kPair * matrix.tile_bytes,
                pairs * Few::kShape.row_groups(matrix.in) * kGroup / kDepth);
    for_panels<kWidth>(matrix, out, b.panel, [&](int64_t base, int64_t count, bool last) {
      int64_t row = rows.begin;
      for (; block == kBlock && rows.end - row >= 2 * kBlock; row += 2 * kBlock) {
        step<kWidth, 2>(row, row - rows.begin, base, count, last, out, end, ahead);
      }
      if (row < rows.end) step<kWidth, 1>(row, row - rows.begin, base, count, last, out, end, ahead);
    });
  }

  void multiply_blocks(Range rows, Range outs) {
    for (; rows.begin < rows.end; rows.begin += kPanelRows) {
      const Range some = {rows.begin, std::min(rows.begin + kPanelRows, rows.end)};
      int64_t out = outs.begin;
      for (; outs.end - out > kTile; out += 2 * kTile) multiply_tiles<2>(some, out, outs.end);
      if (out < outs.end) multiply_tiles<1>(some, out, outs.end);
    }
  }

  // As LinearKernels::multiply, of layout i, for any number of rows.
  static void multiply(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
    Buffers b;
    const int64_t whole = rows.begin + (rows.end - rows.begin) / kBlock * kBlock;
    const auto blocks = [&](Range some, int64_t block) {
      if (some.begin == some.end) return;
      Tiles tiles(config(block));
      AmxPartKernel{matrix, input.quantised, output, b, tiles, block}.multiply_blocks(some, outs);
    };
    blocks({rows.begin, whole}, kBlock);
    blocks({whole, rows.end}, rows.end - whole);
  }
};

}  // namespace trivium::linear
