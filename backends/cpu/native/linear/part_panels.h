// The kernel of layout i for rows enough that weights are made of the codes once for all of them (part_kernel.h says what is computed), on
// vectors with a 4-way byte dot.
//
// A weight is a byte, step * code + offset: the two bytes of a 16-bit product with the step don't carry into each other, so 64 weights take a
// mask, a product and a sum. They stay in the first-level cache for up to kPanelRows rows; two tiles of outputs go side by side, so that
// a quad of inputs that was read serves two dots. What is left beside the 64 dots of a part are a conversion, a product and a
// multiply-add: 95 of 100 instructions are dots.
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

// Memory for the weights of some parts of a pair of tiles, as dots take them.
template <class S>
struct PartPanel {
  using Kernel = PartKernel<S>;

  static constexpr int64_t kPair = 2;   // tiles side by side
  static constexpr int64_t kParts = 3;  // at a time: 24 KiB
  static constexpr int64_t kPartQuads = kPart / 4;

  alignas(64) uint8_t weights[kParts][kPartQuads][kPair][kLine];
  alignas(64) float scales[kParts][kPair][kTile];

  // Fills in `groups` groups of a chunk of tile t.
  TRIVIUM_INLINE void unpack(const uint8_t* chunk, int64_t groups, int64_t part, int64_t t) {
    const uint8_t* codes = chunk + Kernel::kShape.header;
    for (int64_t group = 0; group < groups; ++group) {
      const uint8_t* steps = chunk + Kernel::kSteps + group * Kernel::kStepPair;
      const auto step = S::splat_words(steps), offset = S::splat_bytes(steps + kTile);
#pragma GCC unroll 4
      for (int64_t pair = 0; pair < kQuads / 2; ++pair, codes += kLine) {
        typename S::Codes low, high;
        S::load_nibbles(codes, low, high);
        uint8_t* to = weights[part][group * kQuads + 2 * pair][t];
        S::store_codes(S::scale_bytes(low, step, offset), to);
        S::store_codes(S::scale_bytes(high, step, offset), to + kPair * kLine);
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

// Weights to come, asked for a few lines at a time while others are multiplied, which need none of the memory's time.
struct Ahead {
  const uint8_t* at;
  int64_t lines;  // at a time

  // Those behind `at`, `bytes` in all, within so many times.
  Ahead(const uint8_t* begin, int64_t bytes, int64_t times) : at(begin), lines((bytes / kLine + times) / times) {}

  TRIVIUM_INLINE void ask() {
    for (int64_t i = 0; i < lines; ++i, at += kLine) __builtin_prefetch(at, 0, 2);
  }
};

template <class S>
struct PartPanelKernel {
  using Plain = LinearKernel<S>;
  using Few = PartKernel<S>;
  using Panel = PartPanel<S>;
  using I32 = typename S::I32;
  using F32 = typename S::F32;

  static constexpr int kRows = 8;  // whose sums of a part are in registers, all in all
  static constexpr int64_t kPair = Panel::kPair, kPanelRows = 128;
  static constexpr int64_t kLeast = 8;  // fewer rows don't pay for unpacking

  struct Buffers {
    Panel panel;
    alignas(64) float sums[kPanelRows][kPair][kTile];
  };

  // Dots of one part with kWidth tiles for R rows, added to their sums.
  template <int kWidth, int R>
  TRIVIUM_INLINE static void add_part(const uint8_t* weights, const float* scales, int64_t groups,
                                      const typename Few::template Parts<R>& x, bool first, float* sums, Ahead& ahead) {
    I32 acc[R * kWidth];
    unrolled<R>([&]<int r>() __attribute__((always_inline)) {
      const I32 start = S::splat_whole(&x[r].start);
      unrolled<kWidth>([&]<int t>() __attribute__((always_inline)) { acc[r * kWidth + t] = start; });
    });
    for (int64_t at = 0; at < groups * kGroup; at += kGroup, weights += kQuads * kPair * kLine) {
      ahead.ask();
      unrolled<kQuads>([&]<int quad>() __attribute__((always_inline)) {
        typename S::Codes w[kWidth];
        unrolled<kWidth>([&]<int t>() __attribute__((always_inline)) { w[t] = S::load_codes(weights + (quad * kPair + t) * kLine); });
        unrolled<R>([&]<int r>() __attribute__((always_inline)) {
          const auto inputs = S::splat_inputs(x[r].q + at + 4 * quad);
          unrolled<kWidth>([&]<int t>() __attribute__((always_inline)) { S::dot_inputs(acc[r * kWidth + t], w[t], inputs); });
        });
      });
    }
    unrolled<R>([&]<int r>() __attribute__((always_inline)) {
      const F32 scale = S::splat(&x[r].scale);
      unrolled<kWidth>([&]<int t>() __attribute__((always_inline)) {
        float* sum = sums + (r * kPair + t) * kTile;
        const F32 before = first ? S::zero_float() : S::load(sum);
        S::store(S::mul_add(S::to_float(acc[r * kWidth + t]), S::mul(S::load(scales + t * kTile), scale), before), sum);
      });
    });
  }

  // `count` parts of kWidth tiles, the first of them `base`, for R rows from `row` on; sums: of these rows, between the steps.
  template <int kWidth, int R>
  [[gnu::noinline]] static void add_parts(const MatrixView& matrix, const QuantisedRows& rows, const Panel& panel, int64_t row, int64_t base,
                                          int64_t count, bool last, float* sums, int64_t out, int64_t end, const Output& output, Ahead& ahead) {
    typename Few::template Parts<R> x(rows, row, base);
    if (last) {
      for (int r = 0; r < R; ++r) {
        for (int t = 0; t < kWidth; ++t) __builtin_prefetch(output.y + (row + r) * output.ldy + out + t * kTile, 1);
      }
    }
    const int64_t groups = Few::kShape.row_groups(matrix.in) - base * Few::kPartGroups;
    for (int64_t p = 0; p < count; ++p) {
      add_part<kWidth, R>(panel.weights[p][0][0], panel.scales[p][0], std::min(Few::kPartGroups, groups - p * Few::kPartGroups), x,
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

  template <int kWidth>
  static void multiply_tiles(Buffers& b, const MatrixView& matrix, const QuantisedRows& x, Range rows, int64_t out, int64_t end,
                             const Output& output) {
    const uint8_t* next = matrix.data + (out / kTile + kWidth) * matrix.tile_bytes;
    const int64_t blocks = (rows.end - rows.begin + kRows - 1) / kRows;
    Ahead ahead(next, kPair * matrix.tile_bytes, blocks * Few::kShape.row_groups(matrix.in));
    for_panels<kWidth>(matrix, out, b.panel, [&](int64_t base, int64_t count, bool last) {
      Plain::template for_even_rows<kRows>(rows, [&]<int R>(int64_t row) {
        add_parts<kWidth, R>(matrix, x, b.panel, row, base, count, last, b.sums[row - rows.begin][0], out, end, output, ahead);
      });
    });
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
