// The integer linear kernels on matrix tiles (amx_tiles.h), for blocks of rows; what they compute, bit for bit, is what kernel.h
// computes on the same vector type: the dots are exact integers, and what happens to them afterwards happens in the same order.
//
// A dot instruction takes 16 rows x 32 inputs (one group) of quantised rows as they lie and the group's codes of 16 outputs, which
// are packed as its second operand. Sums of a group are int32 and must become float32 before the next group, whose scales differ:
// they go through a buffer in the first-level cache. Work of one step (16 rows x 32 outputs x 4 groups = 65,536 multiply-adds):
//   tiles   8 dots of 16 cycles, 4 + 8 loads (64 + 32 cycles at most), 8 stores of 16 cycles: 128 cycles on their own unit and ports
//   vectors 128 conversions: shift, conversion, multiply-add of the output's scale (and of the minimum), so
//           384 (512) operations of 512 bits, 192 (256) cycles on two ports; 320 loads of sums, shifts and scales, 160 cycles
// Conversions are the bound, at 340 (256) multiply-adds a cycle, a third (a quarter) of the 1,024 of the tiles' peak, where VNNI's
// peak is 128. Tiles of step n+1 are issued among the conversions of step n, into the other half of the buffers, and four sums are
// in flight. Codes (4 groups x 32 outputs) are unpacked once for all rows of a panel: 4 kB, for up to kPanelRows rows.
//
// A layout with a scale for 16 inputs takes half as deep tiles: a unit is what has one scale.
#pragma once

#include "amx_tiles.h"
#include "kernel.h"

namespace trivium::linear {

template <class Tiles, class S>
struct AmxKernel {
  using Plain = LinearKernel<S>;
  using F32 = typename S::F32;

  static constexpr int64_t kUnits = 4;         // a step
  static constexpr int64_t kPair = 2;          // tiles of outputs a panel
  static constexpr int64_t kBlock = amx::kRows;
  static constexpr int64_t kPanelRows = 128;   // whose sums are kept while the panels go by
  static constexpr int64_t kLeast = 8;         // fewer rows are left to the vector kernel

  // One thread's memory for a call.
  struct Buffers {
    alignas(64) uint8_t codes[2][kUnits][kPair][kGroup / 4 * kLine];
    alignas(64) int32_t dots[2][kUnits][kPair][kBlock][kTile];
    alignas(64) float sums[kPair][kPanelRows][kTile];
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
      for (int input = 4; input < 6; ++input) c.shape(input, rows, kInputs);
      for (int code = 6; code < 8; ++code) c.shape(code, kInputs / 4, amx::kRowBytes);
      return c;
    }

    // Header of the chunk, and the group's number in it, of one unit of a tile.
    struct Place {
      const uint8_t* header;
      int64_t group;
    };
    TRIVIUM_INLINE Place place(const uint8_t* tile, int64_t unit) const {
      const int64_t group = unit / kParts;
      return {tile + group / kShape.groups * kShape.chunk_bytes(), group % kShape.groups};
    }

    // Codes of one unit as the dot takes them: a byte each, signed where the layout is symmetric.
    TRIVIUM_INLINE void unpack(const uint8_t* tile, int64_t unit, uint8_t* to) const {
      const Place at = place(tile, unit);
      const uint8_t* from = at.header + kShape.header + at.group * kShape.group_bytes() + unit % kParts * kCodeBytes;
      for (int64_t line = 0; line < kCodeBytes; line += kLine, from += kLine) {
        if constexpr (kShape.bits == 4) {
          S::template widen_nibbles<kSigned>(from, to + 2 * line, to + 2 * line + kLine);
        } else {
          S::template copy_codes<kSigned>(from, to + line);
        }
      }
    }

    // Dots of units [first, end) (two or less) of a step that starts at unit `base`, for the rows of one block.
    template <int kWidth>
    TRIVIUM_INLINE void dot(Tiles& tiles, Buffers& b, int64_t half, int64_t panel, int64_t row, int64_t base, int64_t first,
                            int64_t end) const {
      const auto one = [&]<int kSum, int kInput>(int64_t i) {
        tiles.template load<kInput>(x.group(row)[(base + i) / kParts].q + (base + i) % kParts * kInputs, x.stride);
        const auto tile = [&]<int c, int code>(int64_t t) {
          tiles.template zero<c>();
          tiles.template load<code>(b.codes[panel][i][t], kLine);
          if constexpr (kSigned) tiles.template dot_signed_signed<c, kInput, code>();
          else tiles.template dot_signed_unsigned<c, kInput, code>();
          tiles.template store<c>(b.dots[half][i][t], kLine);
        };
        tile.template operator()<kSum, 6>(0);
        if constexpr (kWidth == 2) tile.template operator()<kSum + 1, 7>(1);
      };
      if (first < end) one.template operator()<0, 4>(first);
      if (first + 1 < end) one.template operator()<2, 5>(first + 1);
    }

    // Adds `count` units' dots of R rows into their sums. row: of the matrix of inputs; local: in the block; kept: in the panel.
    template <int kWidth, int R>
    TRIVIUM_INLINE void convert(Buffers& b, const uint8_t* const (&tile)[kPair], int64_t half, int64_t row, int64_t local,
                                int64_t kept, int64_t base, int64_t count) const {
      F32 sum[kWidth][R];
#pragma GCC unroll 2
      for (int t = 0; t < kWidth; ++t) {
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) sum[t][i] = base == 0 ? S::zero_float() : S::load(b.sums[t][kept + i]);
      }
      for (int64_t u = 0; u < count; ++u) {
        const int64_t index = (base + u) / kParts;
        typename Plain::ScaleTable scales[kWidth];
#pragma GCC unroll 2
        for (int t = 0; t < kWidth; ++t) {
          const Place at = place(tile[t], base + u);
          scales[t].fill(Plain::template group_scale<kLayout>(at.header, at.group, static_cast<int>((base + u) % kParts)));
        }
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) {
          const QuantisedGroup& group = x.group(row + i)[index];
#pragma GCC unroll 2
          for (int t = 0; t < kWidth; ++t) {
            const F32 value = S::to_float(S::shift_left(S::load_whole(b.dots[half][u][t][local + i]), &group.shift));
            sum[t][i] = S::mul_add(value, S::load(scales[t].value[group.quarters]), sum[t][i]);
          }
        }
        if constexpr (!kSigned) {
          F32 minimum[kWidth];
#pragma GCC unroll 2
          for (int t = 0; t < kWidth; ++t) {
            const Place at = place(tile[t], base + u);
            minimum[t] = Plain::template group_min<kLayout>(at.header, at.group);
          }
#pragma GCC unroll 8
          for (int i = 0; i < R; ++i) {
            const F32 row_sum = S::splat(&x.group(row + i)[index].scaled_sum);
#pragma GCC unroll 2
            for (int t = 0; t < kWidth; ++t) sum[t][i] = S::mul_add(minimum[t], row_sum, sum[t][i]);
          }
        }
      }
#pragma GCC unroll 2
      for (int t = 0; t < kWidth; ++t) {
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) S::store(sum[t][i], b.sums[t][kept + i]);
      }
    }

    // kWidth tiles of outputs from `out` for rows that are whole blocks of `block` rows, the tiles' configuration.
    template <int kWidth>
    void multiply(Tiles& tiles, Buffers& b, Range rows, int64_t block, int64_t out, int64_t end, const Output& output) const {
      const uint8_t* first = matrix.data + out / kTile * matrix.tile_bytes;
      const uint8_t* const tile[kPair] = {first, first + (kWidth - 1) * matrix.tile_bytes};
      const int64_t blocks = (rows.end - rows.begin) / block, steps = (units + kUnits - 1) / kUnits * blocks;
      const auto begin = [&](int64_t step) { return step / blocks * kUnits; };
      const auto count = [&](int64_t step) { return std::min(kUnits, units - begin(step)); };
      // Half 0 starts the step: its codes, if the panel is new, and its first two dots; half 1 ends it.
      const auto issue = [&](int64_t step, int64_t part) {
        if (step >= steps) return;
        const int64_t panel = step / blocks % 2, base = begin(step), n = count(step);
        if (part == 0 && step % blocks == 0) {
          for (int64_t u = 0; u < n; ++u) {
            for (int t = 0; t < kWidth; ++t) unpack(tile[t], base + u, b.codes[panel][u][t]);
          }
        }
        dot<kWidth>(tiles, b, step % 2, panel, rows.begin + step % blocks * block, base, 2 * part, std::min(2 * part + 2, n));
      };
      issue(0, 0);
      issue(0, 1);
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t kept = step % blocks * block;
        const auto add = [&]<int R>(int64_t local) {
          convert<kWidth, R>(b, tile, step % 2, rows.begin + kept + local, local, kept + local, begin(step), count(step));
        };
        issue(step + 1, 0);
        Plain::template for_rows<8>({0, std::min<int64_t>(block, 8)}, add);
        issue(step + 1, 1);
        Plain::template for_rows<8>({8, block}, add);
      }
      for (int t = 0; t < kWidth; ++t) {
        for (int64_t row = rows.begin; row < rows.end; ++row) {
          const int64_t at = out + t * kTile;
          Plain::finish(S::mul(S::load(b.sums[t][row - rows.begin]), S::splat(x.scale(row))), output, row, at, end - at);
        }
      }
    }

    void multiply_blocks(Buffers& b, Range rows, int64_t block, Range outs, const Output& output) const {
      Tiles tiles(config(block));
      const int64_t most = kPanelRows / block * block;
      for (; rows.begin < rows.end; rows.begin += most) {
        const Range some = {rows.begin, std::min(rows.begin + most, rows.end)};
        int64_t out = outs.begin;
        for (; outs.end - out > kTile; out += 2 * kTile) multiply<2>(tiles, b, some, block, out, outs.end, output);
        if (out < outs.end) multiply<1>(tiles, b, some, block, out, outs.end, output);
      }
    }
  };

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
    switch (matrix.layout) {
      case Layout::q8_s: return multiply_codes<Layout::q8_s>(matrix, input, tiled, outs, output);
      case Layout::q8_sm: return multiply_codes<Layout::q8_sm>(matrix, input, tiled, outs, output);
      case Layout::q8_k: return multiply_codes<Layout::q8_k>(matrix, input, tiled, outs, output);
      case Layout::q8_k6: return multiply_codes<Layout::q8_k6>(matrix, input, tiled, outs, output);
      case Layout::q4_s: return multiply_codes<Layout::q4_s>(matrix, input, tiled, outs, output);
      case Layout::q4_sm: return multiply_codes<Layout::q4_sm>(matrix, input, tiled, outs, output);
      case Layout::q8_c: return multiply_codes<Layout::q8_c>(matrix, input, tiled, outs, output);
      case Layout::q4_k6: return multiply_codes<Layout::q4_k6>(matrix, input, tiled, outs, output);
      case Layout::q4_s64: return multiply_codes<Layout::q4_s64>(matrix, input, tiled, outs, output);
      case Layout::q4_s128: return multiply_codes<Layout::q4_s128>(matrix, input, tiled, outs, output);
      case Layout::q4_z64: return multiply_codes<Layout::q4_z64>(matrix, input, tiled, outs, output);
      case Layout::q4_z128: return multiply_codes<Layout::q4_z128>(matrix, input, tiled, outs, output);
      default: return multiply_codes<Layout::q4_k>(matrix, input, tiled, outs, output);
    }
  }
};

}  // namespace trivium::linear
