// The kernel of layout i for rows enough that weights are made of the codes once for all of them (part_kernel.h says what is computed), on
// vectors with a 4-way byte dot.
//
// A weight is a byte, step * code + offset: the two bytes of a 16-bit product with the step don't carry into each other, so 64 weights take a
// mask, a product and a sum. The first rows' dots take them as they are made, so that waiting for codes, making and dots overlap; they stay in
// the first-level cache for up to kPanelRows rows. Two tiles of outputs go side by side, so that a quad of inputs that was read serves two
// dots. What is left beside the 64 dots of a part are a conversion, a product and a multiply-add: 95 of 100 instructions are dots.
#pragma once

#include <utility>

#include "part_kernel.h"

namespace trivium::linear {

// Calls body<i>() for each i below kCount: places in arrays that are constants from the start, so that the arrays stay in registers.
template <int kCount, class Body>
TRIVIUM_INLINE void unrolled(const Body& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (body.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// What stands for the codes of a group of a tile: bytes step * code + offset.
template <class S>
struct Grid {
  typename S::I32 step, offset;

  Grid() = default;
  TRIVIUM_INLINE explicit Grid(const uint8_t* steps) : step(S::splat_words(steps)), offset(S::splat_bytes(steps + kTile)) {}

  // Two lines of weights of a line of codes.
  TRIVIUM_INLINE void make(const uint8_t* codes, typename S::Codes& low, typename S::Codes& high) const {
    S::load_nibbles(codes, low, high);
    low = S::scale_bytes(low, step, offset);
    high = S::scale_bytes(high, step, offset);
  }
};

// Weights to come, asked for a few lines at a time while others are multiplied, which need none of the memory's time.
struct Ahead {
  const uint8_t* at;
  int64_t lines;  // at a time

  // Those behind `at`, `bytes` in all, within so many times.
  Ahead(const uint8_t* begin, int64_t bytes, int64_t times) : at(begin), lines((bytes / kLine + times - 1) / times) {}

  TRIVIUM_INLINE void ask() {
    for (int64_t i = 0; i < lines; ++i, at += kLine) __builtin_prefetch(at, 0, 2);
  }
};

template <class S>
struct PartPanelKernel {
  using Plain = LinearKernel<S>;
  using Few = PartKernel<S>;
  using I32 = typename S::I32;
  using F32 = typename S::F32;

  static constexpr int kRows = 8;        // whose sums of a part are in registers, all in all
  static constexpr int64_t kPair = 2;    // tiles side by side
  static constexpr int64_t kParts = 3;   // whose weights are kept: 24 KiB
  static constexpr int64_t kPanelRows = 128;
  static constexpr int64_t kLeast = 5;   // fewer rows don't pay for making bytes

  struct Buffers {
    alignas(64) uint8_t weights[kParts][kPart / 4][kPair][kLine];
    alignas(64) float sums[kPanelRows][kPair][kTile];
  };

  // Dots of one part of kWidth tiles, which starts at `chunk`, with R rows, added to their sums. kMake: weights are made of the codes and kept,
  // and the next tiles' codes asked for; else they are those that were kept.
  template <int kWidth, int R, bool kMake>
  TRIVIUM_INLINE static void add_part(const uint8_t* chunk, int64_t tile_bytes, uint8_t* weights, int64_t groups,
                                      const typename Few::template Parts<R>& x, bool first, float* sums, Ahead& ahead) {
    I32 acc[R * kWidth];
    unrolled<R>([&]<int r>() __attribute__((always_inline)) {
      const I32 start = S::splat_whole(&x[r].start);
      unrolled<kWidth>([&]<int t>() __attribute__((always_inline)) { acc[r * kWidth + t] = start; });
    });
    const uint8_t *codes = chunk + Few::kShape.header, *steps = chunk + Few::kSteps;
    for (int64_t at = 0; at < groups * kGroup; at += kGroup, weights += kQuads * kPair * kLine) {
      ahead.ask();
      Grid<S> grid[kWidth];
      if constexpr (kMake) {
        unrolled<kWidth>([&]<int t>() __attribute__((always_inline)) { grid[t] = Grid<S>(steps + t * tile_bytes); });
        steps += Few::kStepPair;
      }
      unrolled<kQuads / 2>([&]<int two>() __attribute__((always_inline)) {
        typename S::Codes w[2][kWidth];
        unrolled<kWidth>([&]<int t>() __attribute__((always_inline)) {
          uint8_t* even = weights + (2 * two * kPair + t) * kLine;
          uint8_t* odd = even + kPair * kLine;
          if constexpr (kMake) {
            __builtin_prefetch(codes + (kPair + t) * tile_bytes, 0, 2);
            grid[t].make(codes + t * tile_bytes, w[0][t], w[1][t]);
            S::store_codes(w[0][t], even);
            S::store_codes(w[1][t], odd);
          } else {
            w[0][t] = S::load_codes(even);
            w[1][t] = S::load_codes(odd);
          }
        });
        if constexpr (kMake) codes += kLine;
        unrolled<2>([&]<int odd>() __attribute__((always_inline)) {
          unrolled<R>([&]<int r>() __attribute__((always_inline)) {
            const auto inputs = S::splat_inputs(x[r].q + at + 4 * (2 * two + odd));
            unrolled<kWidth>([&]<int t>() __attribute__((always_inline)) { S::dot_inputs(acc[r * kWidth + t], w[odd][t], inputs); });
          });
        });
      });
    }
    unrolled<R>([&]<int r>() __attribute__((always_inline)) {
      const F32 scale = S::splat(&x[r].scale);
      unrolled<kWidth>([&]<int t>() __attribute__((always_inline)) {
        float* sum = sums + (r * kPair + t) * kTile;
        const F32 before = first ? S::zero_float() : S::load(sum);
        const F32 factor = S::mul(S::load(reinterpret_cast<const float*>(chunk + t * tile_bytes)), scale);
        S::store(S::mul_add(S::to_float(acc[r * kWidth + t]), factor, before), sum);
      });
    });
  }

  // `count` parts of kWidth tiles, the first of them `base`, for R rows from `row` on; sums: of these rows, between the steps.
  template <int kWidth, int R, bool kMake>
  [[gnu::noinline]] static void add_parts(const MatrixView& matrix, const QuantisedRows& rows, Buffers& b, int64_t row, int64_t base,
                                          int64_t count, bool last, float* sums, int64_t out, int64_t end, const Output& output, Ahead& ahead) {
    typename Few::template Parts<R> x(rows, row, base);
    if (last) {
      for (int r = 0; r < R; ++r) {
        for (int t = 0; t < kWidth; ++t) __builtin_prefetch(output.y + (row + r) * output.ldy + out + t * kTile, 1);
      }
    }
    const uint8_t* chunk = matrix.data + out / kTile * matrix.tile_bytes + base * Few::kShape.chunk_bytes();
    const int64_t groups = Few::kShape.row_groups(matrix.in) - base * Few::kPartGroups;
    for (int64_t p = 0; p < count; ++p, chunk += Few::kShape.chunk_bytes()) {
      add_part<kWidth, R, kMake>(chunk, matrix.tile_bytes, b.weights[p][0][0], std::min(Few::kPartGroups, groups - p * Few::kPartGroups), x,
                                 base + p == 0, sums, ahead);
      x.next();
    }
    if (!last) return;
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < kWidth; ++t) {
        Plain::finish(S::load(sums + (r * kPair + t) * kTile), output, row + r, out + t * kTile, end - out - t * kTile);
      }
    }
  }

  // Some parts at a time: the first rows have their weights made, the others find them.
  template <int kWidth>
  static void multiply_tiles(Buffers& b, const MatrixView& matrix, const QuantisedRows& x, Range rows, int64_t out, int64_t end,
                             const Output& output) {
    const uint8_t* next = matrix.data + (out / kTile + kWidth) * matrix.tile_bytes;
    const int64_t blocks = (rows.end - rows.begin + kRows - 1) / kRows;
    // Where there is more than one block of rows, the memory has time beyond the first: asking again then made 32 streams 3 % faster.
    Ahead ahead(next, blocks > 1 ? kPair * matrix.tile_bytes : 0, blocks * Few::kShape.row_groups(matrix.in));
    const int64_t parts = Few::kShape.chunks(matrix.in), steps = (parts + kParts - 1) / kParts;
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t base = parts * step / steps, count = parts * (step + 1) / steps - base;
      Plain::template for_even_rows<kRows>(rows, [&]<int R>(int64_t row) {
        const auto add = row == rows.begin ? add_parts<kWidth, R, true> : add_parts<kWidth, R, false>;
        add(matrix, x, b, row, base, count, step == steps - 1, b.sums[row - rows.begin][0], out, end, output, ahead);
      });
    }
  }

  // As LinearKernels::multiply, of layout i.
  static void multiply(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
    if (rows.end - rows.begin < kLeast) return Few::multiply(matrix, input, rows, outs, output);
    Buffers b;
    for (; rows.begin < rows.end; rows.begin += kPanelRows) {
      const Range some = {rows.begin, std::min(rows.begin + kPanelRows, rows.end)};
      int64_t out = outs.begin;
      for (; outs.end - out > kTile; out += kPair * kTile) multiply_tiles<2>(b, matrix, input.quantised, some, out, outs.end, output);
      if (out < outs.end) multiply_tiles<1>(b, matrix, input.quantised, some, out, outs.end, output);
    }
  }
};

}  // namespace trivium::linear
