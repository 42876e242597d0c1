// The linear kernels of quantised weights for many rows on vectors with a 4-way byte dot; what they compute, bit for bit, is what
// kernel.h computes on the same vector type.
//
// There, codes are unpacked and scales looked up again for every few rows, and each dot reads its own quad of inputs from memory. Here
// that is done once for a panel of rows, into memory that stays in the first-level cache, and two tiles of outputs go side by side, so
// that a quad that was read serves two dots. What is left for 32 inputs of a row and 16 outputs is 8 dots, a shift, a conversion and a
// multiply-add (two with a minimum): where all of these share two pipes dots are 8 of 11 (12) instructions at best. Measured on a Xeon
// of model 207: 0.42 to 0.44 10^12 operations a second and core, where kernel.h reaches 0.32 to 0.39 and this bound is 0.49.
#pragma once

#include "part_panels.h"

namespace trivium::linear {

template <class S>
struct PanelKernel {
  using Plain = LinearKernel<S>;
  using I32 = typename S::I32;
  using F32 = typename S::F32;

  static constexpr int64_t kPair = 2;         // tiles side by side
  static constexpr int kRows = 6;             // in registers
  static constexpr int64_t kLeast = 32;       // fewer rows don't pay for unpacking
  static constexpr int64_t kPanelRows = 128;
  static constexpr int64_t kUnits = 20;       // groups, or halves, at a time

  // One thread's memory for a call. A unit is a group of inputs that share a scale, or half of one.
  struct Buffers {
    alignas(64) uint8_t codes[kUnits][kQuads][kPair][kLine];
    alignas(64) float scales[kUnits][kQuarters][kPair][kTile];
    alignas(64) float minimums[kUnits][kPair][kTile];
    alignas(64) float sums[kPanelRows][kPair][kTile];
  };

  template <Layout kLayout>
  struct Panels {
    static constexpr Shape kShape = shape(kLayout);
    static constexpr int64_t kParts = has_half_groups(kLayout) ? 2 : 1;
    static constexpr int64_t kUnitQuads = kQuads / kParts;

    const MatrixView& matrix;
    const QuantisedRows& x;
    int64_t units;

    Panels(const MatrixView& m, const QuantisedRows& rows) : matrix(m), x(rows), units(kShape.row_groups(m.in) * kParts) {}

    // Codes of one unit of a tile, its scales and its minimum.
    TRIVIUM_INLINE void unpack(const uint8_t* tile, int64_t unit, Buffers& b, int64_t u, int t) const {
      const int64_t index = unit / kParts, group = index % kShape.groups, part = unit % kParts;
      const uint8_t* header = tile + index / kShape.groups * kShape.chunk_bytes();
      const uint8_t* from = header + kShape.header + group * kShape.group_bytes() + part * (kShape.group_bytes() / kParts);
#pragma GCC unroll 8
      for (int64_t quad = 0; quad < kUnitQuads; ++quad) {
        if constexpr (kShape.bits == 8) {
          S::store_codes(S::load_codes(from + quad * kLine), b.codes[u][quad][t]);
        } else if (quad % 2 == 0) {
          typename S::Codes low, high;
          S::load_nibbles(from + quad / 2 * kLine, low, high);
          S::store_codes(low, b.codes[u][quad][t]);
          S::store_codes(high, b.codes[u][quad + 1][t]);
        }
      }
      Plain::fill_scales(Plain::template group_scale<kLayout>(header, group, static_cast<int>(part)), b.scales[u][0][t], kPair * kTile);
      if constexpr (!is_symmetric(kLayout)) S::store(Plain::template group_min<kLayout>(header, group), b.minimums[u][t]);
    }

    // `count` units of kWidth tiles, the first of them `base`, for R rows from `row` on; sums: of these rows, between the units.
    template <int kWidth, int R>
    [[gnu::noinline]] static void add_units(const Panels& panels, const Buffers& b, int64_t row, int64_t base, int64_t count, float* sums) {
      typename Plain::template Groups<R> x(panels.x, row, base / kParts);
      F32 sum[R][kWidth];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int t = 0; t < kWidth; ++t) sum[r][t] = base == 0 ? S::zero_float() : S::load(sums + (r * kPair + t) * kTile);
      }
      const uint8_t* codes = b.codes[0][0][0];
      const float* scales = b.scales[0][0][0];
      const float* minimums = b.minimums[0][0];
      for (int64_t u = 0; u < count; ++u) {
        const int part = kParts == 1 ? 0 : static_cast<int>(u % kParts);
        add_unit<kWidth, R>(codes, scales, minimums, x, part, sum);
        codes += sizeof b.codes[0];
        scales += sizeof b.scales[0] / sizeof(float);
        minimums += kPair * kTile;
        asm("" : "+r"(codes), "+r"(scales), "+r"(minimums));  // one register each, and offsets from it
        if (part == kParts - 1) x.next();
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int t = 0; t < kWidth; ++t) S::store(sum[r][t], sums + (r * kPair + t) * kTile);
      }
    }

    template <int kWidth, int R>
    TRIVIUM_INLINE static void add_unit(const uint8_t* codes, const float* scales, const float* minimums,
                                        const typename Plain::template Groups<R>& x, int part, F32 (&sum)[R][kWidth]) {
      I32 acc[R][kWidth];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const I32 start = Plain::template start<kLayout>(x[r], part);
#pragma GCC unroll 2
        for (int t = 0; t < kWidth; ++t) acc[r][t] = start;
      }
      const int first = static_cast<int>(4 * kUnitQuads) * part;
#pragma GCC unroll 8
      for (int quad = 0; quad < kUnitQuads; ++quad) {
        typename S::Codes w[kWidth];
#pragma GCC unroll 2
        for (int t = 0; t < kWidth; ++t) w[t] = S::load_codes(codes + (quad * kPair + t) * kLine);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const auto inputs = S::splat_inputs(x[r].q + first + 4 * quad);
#pragma GCC unroll 2
          for (int t = 0; t < kWidth; ++t) S::dot_inputs(acc[r][t], w[t], inputs);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float* scale = scales + x[r].quarters * (kPair * kTile);
#pragma GCC unroll 2
        for (int t = 0; t < kWidth; ++t) {
          const F32 value = S::to_float(S::shift_left(acc[r][t], &x[r].shift));
          sum[r][t] = S::mul_add(value, S::load(scale + t * kTile), sum[r][t]);
        }
      }
      if constexpr (!is_symmetric(kLayout)) {
#pragma GCC unroll 2
        for (int t = 0; t < kWidth; ++t) {
          const F32 minimum = S::load(minimums + t * kTile);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sum[r][t] = S::mul_add(minimum, S::splat(&x[r].scaled_sum), sum[r][t]);
        }
      }
    }

    // kWidth tiles of outputs from `out` on for a panel of rows.
    template <int kWidth>
    void multiply(Buffers& b, Range rows, int64_t out, int64_t end, const Output& output) const {
      const uint8_t* tile = matrix.data + out / kTile * matrix.tile_bytes;
      const int64_t steps = (units + kUnits - 1) / kUnits;
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t base = units / kParts * step / steps * kParts, count = units / kParts * (step + 1) / steps * kParts - base;
        for (int64_t u = 0; u < count; ++u) {
          for (int t = 0; t < kWidth; ++t) unpack(tile + t * matrix.tile_bytes, base + u, b, u, t);
        }
        Plain::template for_even_rows<kRows>(rows, [&]<int R>(int64_t row) {
          float* sums = b.sums[row - rows.begin][0];
          if (step == steps - 1) ask_for_results<kWidth, R>(output, row, out);
          add_units<kWidth, R>(*this, b, row, base, count, sums);
          if (step == steps - 1) finish_rows<kWidth, R>(sums, row, out, end, output);
        });
      }
    }

    // Asks for the memory that is written when these rows are done.
    template <int kWidth, int R>
    TRIVIUM_INLINE static void ask_for_results(const Output& output, int64_t row, int64_t out) {
      for (int r = 0; r < R; ++r) {
        for (int t = 0; t < kWidth; ++t) __builtin_prefetch(output.y + (row + r) * output.ldy + out + t * kTile, 1);
      }
    }

    template <int kWidth, int R>
    TRIVIUM_INLINE void finish_rows(const float* sums, int64_t row, int64_t out, int64_t end, const Output& output) const {
      for (int r = 0; r < R; ++r) {
        const F32 scale = S::splat(x.scale(row + r));
        for (int t = 0; t < kWidth; ++t) {
          const F32 sum = S::mul(S::load(sums + (r * kPair + t) * kTile), scale);
          Plain::finish(sum, output, row + r, out + t * kTile, end - out - t * kTile);
        }
      }
    }
  };

  template <Layout kLayout>
  static void multiply_codes(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
    const Panels<kLayout> panels(matrix, input.quantised);
    Buffers buffers;
    for (; rows.begin < rows.end; rows.begin += kPanelRows) {
      const Range some = {rows.begin, std::min(rows.begin + kPanelRows, rows.end)};
      int64_t out = outs.begin;
      for (; outs.end - out > kTile; out += kPair * kTile) panels.template multiply<2>(buffers, some, out, outs.end, output);
      if (out < outs.end) panels.template multiply<1>(buffers, some, out, outs.end, output);
    }
  }

  // As LinearKernels::multiply.
  static void multiply(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
    if (is_stepped(matrix.layout)) return PartPanelKernel<S>::multiply(matrix, input, rows, outs, output);
    if (!needs_quantised(matrix.layout) || rows.end - rows.begin < kLeast) return Plain::multiply(matrix, input, rows, outs, output);
    call_for(matrix.layout, [&]<Layout kLayout>() { multiply_codes<kLayout>(matrix, input, rows, outs, output); });
  }
};

}  // namespace trivium::linear
