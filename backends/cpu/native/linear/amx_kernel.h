// The linear kernels of quantised weights on matrix tiles (amx_tiles.h), for blocks of rows; what they compute, bit for bit, is what
// kernel.h computes on the same vector type: the dots are exact integers, and what happens to them afterwards happens in the same order.
//
// Dots are of bfloat16, which holds every code (8 bits) and every quantised input times its group's shift (a power of two): their
// sums of a group are whole numbers of at most 20 significant bits times that power, exact in float32 in any order. So a dot comes out
// as the float32 that a vector kernel makes of an int32 by a shift and a conversion, and takes no longer: a tile's rows count (16
// cycles for 16 rows), not its depth, so that one of 32 bfloat16 costs what one of 32 bytes does.
//
// What a group of 16 rows and 16 outputs (8,192 multiply-adds, a "tile") costs, measured on a core of Emerald Rapids whose sibling
// thread other work shared:
//   dot 16 cycles; with its store (one row a cycle) 20; with loads of both operands, each used twice, 25
//   one multiply-add a row, of the dot and of the output's scale times 1 + quarters / 4 from a table: 8 cycles alone, 10 to 12 beside the
//   above, whose loads and stores leave vectors one of two ports
// That is 35 cycles at best, and 82 to 92 as it is with 128 rows; what is left are loads of the inputs from the second-level cache, of
// the table and of the sums, the waiting for the last dot of a step, and unpacking (12). Longer steps (kUnits) cost more than they save.
//
// A layout with a scale for 16 inputs takes half as deep tiles: a unit is what has one scale.
#pragma once

#include "amx_parts.h"

namespace trivium::linear {

template <class Tiles, class S>
struct AmxKernel {
  using Plain = LinearKernel<S>;
  using F32 = typename S::F32;

  static constexpr int64_t kUnits = 2;         // a step
  static constexpr int64_t kPair = 2;          // tiles of outputs a panel, blocks of rows a step
  static constexpr int64_t kBlock = amx::kRows;
  static constexpr int64_t kPanelRows = 128;   // whose sums are kept while the panels go by
  static constexpr int64_t kLeast = 8;         // fewer rows are left to the vector kernel
  static constexpr int64_t kConvert = 8;       // rows, of kPair tiles, whose sums are in registers

  // One thread's memory for a call.
  struct Buffers {
    alignas(64) uint8_t codes[kUnits][kPair][amx::kTileBytes];
    alignas(64) float dots[kUnits][kPair][kPair][kBlock][kTile];  // [unit][block][tile]
    alignas(64) float scales[kUnits][kQuarters][kPair][kTile];
    alignas(64) float minimums[kUnits][kPair][kTile];
    alignas(64) float sums[kPanelRows][kPair][kTile];
    alignas(64) float row_scales[kPanelRows];
  };

  template <Layout kLayout>
  struct Panels {
    static constexpr Shape kShape = shape(kLayout);
    static constexpr int64_t kParts = has_half_groups(kLayout) ? 2 : 1;
    static constexpr int64_t kInputs = kGroup / kParts;  // a unit
    static constexpr int64_t kCodeBytes = kInputs * kTile * kShape.bits / 8;
    static constexpr bool kSigned = is_symmetric(kLayout);

    const MatrixView& matrix;
    const QuantisedRows& x;
    int64_t units;

    Panels(const MatrixView& m, const QuantisedRows& rows)
        : matrix(m), x(rows), units(kShape.row_groups(m.in) * kParts) {}

    static amx::Config config(int64_t rows) {
      amx::Config c;
      for (int sum = 0; sum < 4; ++sum) c.shape(sum, rows, amx::kRowBytes);
      for (int input = 4; input < 6; ++input) c.shape(input, rows, kInputs * 2);
      for (int code = 6; code < 8; ++code) c.shape(code, kInputs / 2, amx::kRowBytes);
      return c;
    }

    // Codes of one unit of a tile as the dot takes them, its scales and its minimum.
    TRIVIUM_INLINE void unpack(const uint8_t* tile, int64_t unit, Buffers& b, int64_t u, int t) const {
      const int64_t index = unit / kParts, group = index % kShape.groups;
      const uint8_t* header = tile + index / kShape.groups * kShape.chunk_bytes();
      const uint8_t* from = header + kShape.header + group * kShape.group_bytes() + unit % kParts * kCodeBytes;
      uint8_t* to = b.codes[u][t];
      constexpr int64_t kStep = kShape.bits == 4 ? kLine : 2 * kLine;
#pragma GCC unroll 4
      for (int64_t line = 0; line < kCodeBytes; line += kStep, from += kStep, to += 4 * kLine) {
        if constexpr (kShape.bits == 4) S::template widen_nibbles<kSigned>(from, to);
        else S::template widen_bytes<kSigned>(from, to);
      }
      const F32 scale = Plain::template group_scale<kLayout>(header, group, static_cast<int>(unit % kParts));
      Plain::fill_scales(scale, b.scales[u][0][t], kPair * kTile);
      if constexpr (!kSigned) S::store(Plain::template group_min<kLayout>(header, group), b.minimums[u][t]);
    }

    // Dots of `count` units from `base` on for kBlocks blocks of rows from `row` on. A pair of dots is stored while the next is computed.
    template <int kWidth, int kBlocks>
    TRIVIUM_INLINE void dot(Tiles& tiles, Buffers& b, int64_t row, int64_t base, int64_t count) const {
      constexpr int64_t kUnitDots = sizeof b.dots[0] / sizeof(float), kTileDots = kBlock * kTile;
      const int64_t stride = x.stride;
      const uint8_t* input = x.wide(row) + base * (kInputs * 2);
      const uint8_t* codes = b.codes[0][0];
      float* dots = b.dots[0][0][0][0];
      const auto store = [&]<int kSum>(float* to) {
        tiles.template store<kSum>(to, kLine);
        if constexpr (kWidth == 2) tiles.template store<kSum + 1>(to + kTileDots, kLine);
      };
      // Stages 0 and 1 have their own tiles and take turns: two blocks, or units of one.
      const auto stage = [&]<int kStage>(const uint8_t* from, float* last) {
        constexpr int kSum = 2 * kStage, kLast = 2 - kSum, kInput = 4 + kStage;
        constexpr bool kFresh = kBlocks == 1 || kStage == 0;
        tiles.template load<kInput>(from, stride);
        if constexpr (kFresh) tiles.template load<6>(codes, kLine);
        tiles.template zero<kSum>();
        tiles.template dot_bfloat16<kSum, kInput, 6>();
        if (last != nullptr) tiles.template store<kLast>(last, kLine);
        if constexpr (kWidth == 2) {
          if constexpr (kFresh) tiles.template load<7>(codes + amx::kTileBytes, kLine);
          tiles.template zero<kSum + 1>();
          tiles.template dot_bfloat16<kSum + 1, kInput, 7>();
          if (last != nullptr) tiles.template store<kLast + 1>(last + kTileDots, kLine);
        }
      };
      const auto next = [&] {
        input += kInputs * 2;
        codes += sizeof b.codes[0];
        dots += kUnitDots;
      };
      constexpr int64_t kOther = kPair * kTileDots;  // dots of the other block
      if constexpr (kBlocks == 2) {
        const int64_t other = kBlock * stride;
        stage.template operator()<0>(input, nullptr);
        stage.template operator()<1>(input + other, dots);
        while (--count > 0) {
          next();
          stage.template operator()<0>(input, dots - kUnitDots + kOther);
          stage.template operator()<1>(input + other, dots);
        }
        store.template operator()<2>(dots + kOther);
      } else {
        stage.template operator()<0>(input, nullptr);
        for (; count > 2; count -= 2) {
          next();
          stage.template operator()<1>(input, dots - kUnitDots);
          next();
          stage.template operator()<0>(input, dots - kUnitDots);
        }
        if (count == 2) {
          next();
          stage.template operator()<1>(input, dots - kUnitDots);
          store.template operator()<2>(dots);
        } else {
          store.template operator()<0>(dots);
        }
      }
    }

    // Adds `count` units' dots of R rows into their sums, which go to the result after the last unit. row: of the matrix of inputs;
    // local: in the step; kept: in the panel; factor: of the first row and unit.
    template <int kWidth, int R>
    TRIVIUM_INLINE void convert(Buffers& b, int64_t row, int64_t local, int64_t kept, const uint8_t* factor, int64_t base, int64_t count,
                                int64_t out, int64_t end, const Output& output) const {
      F32 sum[R][kWidth];
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) {
#pragma GCC unroll 2
        for (int t = 0; t < kWidth; ++t) sum[i][t] = base == 0 ? S::zero_float() : S::load(b.sums[kept + i][t]);
      }
      RowRecords<TileFactor, R> factors(factor, x.stride);
      const float* dots = b.dots[0][local / kBlock][0][local % kBlock];
      const float* scales = b.scales[0][0][0];
      const float* minimums = b.minimums[0][0];
      for (int64_t u = 0; u < count; ++u) {
        asm("" : "+r"(dots), "+r"(scales));  // one register each, and offsets from it
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) {
          const float* scale = scales + factors[i].entry;
#pragma GCC unroll 2
          for (int t = 0; t < kWidth; ++t) {
            sum[i][t] = S::mul_add(S::load(dots + (t * kBlock + i) * kTile), S::load(scale + t * kTile), sum[i][t]);
          }
        }
        if constexpr (!kSigned) {
          asm("" : "+r"(minimums));
          F32 minimum[kWidth];
#pragma GCC unroll 2
          for (int t = 0; t < kWidth; ++t) minimum[t] = S::load(minimums + t * kTile);
#pragma GCC unroll 8
          for (int i = 0; i < R; ++i) {
#pragma GCC unroll 2
            for (int t = 0; t < kWidth; ++t) sum[i][t] = S::mul_add(minimum[t], S::splat(&factors[i].scaled_sum), sum[i][t]);
          }
          minimums += kPair * kTile;
        }
        dots += sizeof b.dots[0] / sizeof(float);
        scales += sizeof b.scales[0] / sizeof(float);
        if (kParts == 1 || u % kParts == kParts - 1) factors.next();
      }
      if (base + count < units) {
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) {
#pragma GCC unroll 2
          for (int t = 0; t < kWidth; ++t) S::store(sum[i][t], b.sums[kept + i][t]);
        }
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) {
          const F32 scale = S::splat(&b.row_scales[kept + i]);
#pragma GCC unroll 2
          for (int t = 0; t < kWidth; ++t) {
            Plain::finish(S::mul(sum[i][t], scale), output, row + i, out + t * kTile, end - out - t * kTile);
          }
        }
      }
    }

    // One step: kBlocks blocks of `block` rows.
    template <int kWidth, int kBlocks>
    TRIVIUM_INLINE void step(Tiles& tiles, Buffers& b, int64_t first, int64_t kept, int64_t block, int64_t base, int64_t count,
                             int64_t out, int64_t end, const Output& output) const {
      const int64_t rows = block * kBlocks;
      if (base + count == units) {  // soon written
        float* y = output.y + (first + kept) * output.ldy + out;
        for (int64_t i = 0; i < rows; ++i, y += output.ldy) {
          for (int t = 0; t < kWidth; ++t) __builtin_prefetch(y + t * kTile, 1);
        }
      }
      dot<kWidth, kBlocks>(tiles, b, first + kept, base, count);
      const uint8_t* factor = reinterpret_cast<const uint8_t*>(x.factors(first + kept) + base / kParts);
      Plain::template for_rows<kConvert>({0, rows}, [&]<int R>(int64_t local) __attribute__((always_inline)) {
        convert<kWidth, R>(b, first + kept + local, local, kept + local, factor, base, count, out, end, output);
        factor += R * x.stride;
      });
    }

    // kWidth tiles of outputs from `out` for rows that are whole blocks of `block` rows, the tiles' configuration.
    template <int kWidth>
    [[gnu::noinline]] void multiply(Tiles& tiles, Buffers& b, Range rows, int64_t block, int64_t out, int64_t end,
                                    const Output& output) const {
      const uint8_t* tile = matrix.data + out / kTile * matrix.tile_bytes;
      const int64_t count = rows.end - rows.begin;
      for (int64_t base = 0; base < units; base += kUnits) {
        const int64_t some = std::min(kUnits, units - base);
        for (int64_t u = 0; u < some; ++u) {
          for (int t = 0; t < kWidth; ++t) unpack(tile + t * matrix.tile_bytes, base + u, b, u, t);
        }
        int64_t kept = 0;
        for (; count - kept >= 2 * kBlock; kept += 2 * kBlock) {
          step<kWidth, 2>(tiles, b, rows.begin, kept, block, base, some, out, end, output);
        }
        if (kept < count) step<kWidth, 1>(tiles, b, rows.begin, kept, block, base, some, out, end, output);
      }
    }

    void multiply_blocks(Buffers& b, Range rows, int64_t block, Range outs, const Output& output) const {
      Tiles tiles(config(block));
      for (; rows.begin < rows.end; rows.begin += kPanelRows) {
        const Range some = {rows.begin, std::min(rows.begin + kPanelRows, rows.end)};
        for (int64_t row = some.begin; row < some.end; ++row) b.row_scales[row - some.begin] = *x.scale(row);
        int64_t out = outs.begin;
        for (; outs.end - out > kTile; out += 2 * kTile) multiply<2>(tiles, b, some, block, out, outs.end, output);
        if (out < outs.end) multiply<1>(tiles, b, some, block, out, outs.end, output);
      }
    }
  };

  // As LinearKernels::quantise_row, with what the tiles read.
  static void quantise_row(const float* x, const QuantisedRows& rows, int64_t row) {
    Plain::quantise_row(x, rows, row);
    if (!has(rows.records, Records::groups)) return;
    const QuantisedGroup* group = rows.group(row);
    uint8_t* wide = rows.wide(row);
    TileFactor* factors = rows.factors(row);
    for (int64_t g = 0; g < rows.groups(); ++g) {
      S::widen_group(group[g].q, static_cast<float>(1 << group[g].shift), wide + g * kAlign);
      factors[g] = {group[g].scaled_sum, static_cast<uint32_t>(group[g].quarters * (kPair * kTile))};
    }
  }

  static void quantise_parts(const float* x, int64_t in, QuantisedPart* parts) { Plain::quantise_parts(x, in, parts); }

  template <Layout kLayout>
  static void multiply_codes(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
    const Panels<kLayout> panels(matrix, input.quantised);
    Buffers buffers;
    const int64_t whole = rows.begin + (rows.end - rows.begin) / kBlock * kBlock;
    if (rows.begin < whole) panels.multiply_blocks(buffers, {rows.begin, whole}, kBlock, outs, output);
    if (whole < rows.end) panels.multiply_blocks(buffers, {whole, rows.end}, rows.end - whole, outs, output);
  }

  // As LinearKernels::multiply. `plain`, the vector kernel of the same bits, takes float layouts and rows that fill no tile.
  static void multiply(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output,
                       const LinearKernels& plain) {
    const int64_t rest = (rows.end - rows.begin) % kBlock;
    const Range tiled = {rows.begin, rows.end - (rest < kLeast ? rest : 0)};
    if (!needs_quantised(matrix.layout) || tiled.begin >= tiled.end) return plain.multiply(matrix, input, rows, outs, output);
    if (tiled.end < rows.end) plain.multiply(matrix, input, {tiled.end, rows.end}, outs, output);
    if (is_stepped(matrix.layout)) return AmxPartKernel<Tiles, S>::multiply(matrix, input, tiled, outs, output);
    call_for(matrix.layout, [&]<Layout kLayout>() { multiply_codes<kLayout>(matrix, input, tiled, outs, output); });
  }
};

}  // namespace trivium::linear
