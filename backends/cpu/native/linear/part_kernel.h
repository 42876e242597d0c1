// The kernels of weights whose groups have whole steps and offsets (layout i): y[o] = sum over parts p of
//   float(sum_i weight[o,i] * q[i]) * (scale[o,p] * sx[p]),  weight = step * code + offset - kZero8, a whole number of 8 bits.
//
// The inner sum is a whole number below 2^24, so it may be had in any way: here, for few rows, from the codes' own dots,
//   start[p] + sum_g (step[o,g] * sum_i code[o,i] * q[i] + offset[o,g] * sum_i q[i]),
// in part_panels.h and amx_parts.h, for many, from dots with the weights themselves, which are made of the codes once for all rows. What is
// rounded is one multiply-add a part, front to back: the bits of an output don't depend on which of them ran.
//
// Source of the idea, whole steps under a coarser scale so that sums stay whole: "QServe: W4A8KV4 Quantization and System Co-design" (2024),
// "progressive group quantization". There the coarse scale is a row's, here that of a part of kPart inputs.
#pragma once

#include "kernel.h"

namespace trivium::linear {

template <class S>
struct PartKernel {
  using Plain = LinearKernel<S>;
  using F32 = typename S::F32;

  static constexpr Layout kLayout = Layout::q4_i;
  static constexpr Shape kShape = shape(kLayout);
  static constexpr int64_t kPartGroups = kPart / kGroup;
  static_assert(kShape.groups == kPartGroups);

  // Where a chunk's header keeps the step of a group; its offset follows.
  static constexpr int64_t kSteps = kTile * sizeof(float), kStepPair = 2 * kTile;

  // The current part of each of R rows.
  template <int R>
  struct Parts : RowRecords<QuantisedPart, R> {
    TRIVIUM_INLINE Parts(const QuantisedRows& rows, int64_t first, int64_t part = 0)
        : RowRecords<QuantisedPart, R>(rows.part(first) + part, rows.stride) {}
  };

  // One part of a tile for R rows.
  template <int R>
  TRIVIUM_INLINE static void add_part(const uint8_t* chunk, int64_t groups, const Parts<R>& x, F32 (&sum)[R]) {
    F32 whole[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) whole[r] = S::splat(&x[r].start_float);
    const uint8_t* codes = chunk + kShape.header;
    for (int64_t group = 0; group < groups; ++group, codes += kShape.group_bytes()) {
      Plain::template ask_ahead<kShape.group_bytes() / kLine + 1>(codes);
      typename S::NarrowSum acc[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) S::begin(acc[r], S::zero());
#pragma GCC unroll 8
      for (int pair = 0; pair < kQuads / 2; ++pair) {
        typename S::Codes low, high;
        S::load_nibbles(codes + kLine * pair, low, high);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) S::dot(acc[r], low, x[r].q + group * kGroup + 8 * pair);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) S::dot(acc[r], high, x[r].q + group * kGroup + 8 * pair + 4);
      }
      const uint8_t* steps = chunk + kSteps + group * kStepPair;
      const F32 step = S::load_uint8(steps), offset = S::load_uint8(steps + kTile);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        whole[r] = S::mul_add(step, S::to_float(S::end(acc[r], S::zero())), whole[r]);
        whole[r] = S::mul_add(offset, S::splat(&x[r].sums[group]), whole[r]);
      }
    }
    const F32 scale = S::load(reinterpret_cast<const float*>(chunk));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r] = S::mul_add(whole[r], S::mul(scale, S::splat(&x[r].scale)), sum[r]);
  }

  // A tile, which starts at output `out`, for R rows.
  template <int R>
  [[gnu::noinline]] static void tile_rows(const MatrixView& matrix, const QuantisedRows& rows, int64_t row, int64_t out, int64_t end,
                                          const Output& output) {
    Parts<R> x(rows, row);
    F32 sum[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r] = S::zero_float();
    const uint8_t* chunk = matrix.data + out / kTile * matrix.tile_bytes;
    for (int64_t left = kShape.row_groups(matrix.in); left > 0; left -= kPartGroups, chunk += kShape.chunk_bytes()) {
      add_part<R>(chunk, std::min(kPartGroups, left), x, sum);
      x.next();
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) Plain::finish(sum[r], output, row + r, out, end - out);
  }

  static void multiply(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
    constexpr int kMost = std::min(S::kRows, 8);
    Plain::template for_even_rows<kMost>(rows, [&]<int R>(int64_t row) {
      for (int64_t out = outs.begin; out < outs.end; out += kTile) {
        tile_rows<R>(matrix, input.quantised, row, out, outs.end, output);
      }
    });
  }

  // Quantises x[0, in). A part whose largest magnitude is below 1e-30 counts as zero (its inverse scale would overflow).
  static void quantise(const float* x, int64_t in, QuantisedPart* part) {
    for (; in > 0; in -= kPart, x += kPart, ++part) {
      const int64_t groups = std::min(kPartGroups, QuantisedRows::groups_of(in));
      alignas(64) float padded[kPart];
      const float* from = x;
      if (in < groups * kGroup) {
        std::fill(std::copy_n(x, in, padded), padded + groups * kGroup, 0.0f);
        from = padded;
      }
      quantise_part(from, groups, *part);
    }
  }

  static void quantise_part(const float* x, int64_t groups, QuantisedPart& part) {
    constexpr uint32_t kInfinity = 0x7f800000u;
    const uint32_t bits = S::largest_bits(x, groups * kGroup);
    const float largest = std::bit_cast<float>(bits);
    if (bits >= kInfinity || largest < 1e-30f) {
      part = QuantisedPart{};
      if (bits >= kInfinity) part.scale = std::bit_cast<float>(0x7fc00000u);
      return;
    }
    part.scale = largest * (1.0f / 127.0f);
    const int32_t total = round_part(x, groups, 127.0f / largest, part.q, part.sums);
    part.start = -kZero8 * total;
    part.start_float = static_cast<float>(part.start);
  }

  // The first `groups` groups of a part, an even number, and zeros behind them. Returns the sum of all.
  static int32_t round_part(const float* x, int64_t groups, float inverse, int8_t* q, float* sums) {
    if constexpr (requires { S::round_part(x, groups / 2, inverse, q, sums); }) {
      return S::round_part(x, groups / 2, inverse, q, sums);
    } else {
      int32_t total = 0;
      for (int64_t g = 0; g < kPartGroups; ++g, q += kGroup) {
        int32_t halves[2] = {};
        if (g < groups) S::round_group(x + g * kGroup, inverse, q, halves);
        else std::fill_n(q, kGroup, int8_t{0});
        sums[g] = static_cast<float>(halves[0] + halves[1]);
        total += halves[0] + halves[1];
      }
      return total;
    }
  }
};

}  // namespace trivium::linear
