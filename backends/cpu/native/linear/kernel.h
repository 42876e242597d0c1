// The linear kernels, written once over a vector type (simd_*.h) and compiled in one file for each instruction set.
//
// Integer layouts: for output o and a group g of inputs that share a scale,
//   y[o] = sum_g scale[o,g] * (sx[g] * float(sum_i code[o,i] * q[i])) + min[o,g] * (sx[g] * sum_i q[i]),
// the inner sum exact in int32. A symmetric layout starts it at -zero * sum_i q[i] and has no min. Groups are added front to
// back, each by one rounded product and one (two with a minimum) multiply-add, whatever the number of rows: that is why batches
// don't change bits. Float layouts add input by input, front to back, one multiply-add each.
//
// Registers hold kRows rows of one tile (integer), or kFloatRows rows of two tiles (float), so that a line of weights is loaded
// and unpacked once for that many rows. Rows are walked in blocks whose quantised form stays in the second-level cache.
#pragma once

#include <algorithm>

#include "layout.h"

namespace trivium::linear {

#define TRIVIUM_INLINE [[gnu::always_inline]] inline

template <class S>
struct LinearKernel {
  using I32 = typename S::I32;
  using F32 = typename S::F32;

  static constexpr int64_t kRowBlockBytes = 256 << 10;

  // ------------------------------------------------------------------------------------------------------------ results

  TRIVIUM_INLINE static void finish(F32 value, const Output& output, int64_t row, int64_t out, int64_t width) {
    float* y = output.y + row * output.ldy + out;
    if (width >= kTile) {
      if (output.bias) value = S::add(value, S::load(output.bias + out));
      S::store(output.accumulate ? S::add(S::load(y), value) : value, y);
      return;
    }
    alignas(64) float lane[kTile];
    S::store(value, lane);
    for (int64_t i = 0; i < width; ++i) {
      const float sum = output.bias ? lane[i] + output.bias[out + i] : lane[i];
      y[i] = output.accumulate ? y[i] + sum : sum;
    }
  }

  // Calls body<R>(row) for blocks of R rows, R falling from kMost in halves.
  template <int kMost, class Body>
  TRIVIUM_INLINE static void for_rows(Range rows, const Body& body) {
    for (; rows.end - rows.begin >= kMost; rows.begin += kMost) body.template operator()<kMost>(rows.begin);
    if constexpr (kMost > 1) {
      if (rows.begin < rows.end) for_rows<(kMost > 8 ? 8 : kMost > 4 ? 4 : kMost > 2 ? 2 : 1)>(rows, body);
    }
  }

  // ----------------------------------------------------------------------------------------------------- integer layouts

  // The rows that a block of R reads; offsets in bytes from the first row's record.
  struct Rows {
    const uint8_t* record;
    int64_t stride;
    int64_t scale;
    int64_t scaled_sum;
    int64_t negative_sum;
    int64_t negative_half_sum;

    TRIVIUM_INLINE Rows(const QuantisedRows& rows, int64_t first)
        : record(rows.data + first * rows.stride), stride(rows.stride), scale(rows.padded(rows.in)),
          scaled_sum(scale + 4 * rows.groups()), negative_sum(scaled_sum + 4 * rows.groups()),
          negative_half_sum(negative_sum + 4 * rows.groups()) {}

    template <class T>
    TRIVIUM_INLINE const T* at(int row, int64_t offset) const {
      return reinterpret_cast<const T*>(record + row * stride + offset);
    }
  };

  template <Layout kLayout>
  TRIVIUM_INLINE static F32 group_scale(const uint8_t* header, int64_t group, int part) {
    const uint8_t* sub_scales = header + 64 + 32 * group;
    if constexpr (kLayout == Layout::q8_k6) return S::mul(S::load_float16(header), S::load_int8(sub_scales + 16 * part));
    else if constexpr (is_blocked(kLayout)) return S::mul(S::load_float16(header), S::load_uint8(sub_scales));
    else return S::load_float16(header + 32 * group);
  }
  template <Layout kLayout>
  TRIVIUM_INLINE static F32 group_min(const uint8_t* header, int64_t group) {
    const uint8_t* sub_mins = header + 80 + 32 * group;
    if constexpr (is_blocked(kLayout)) return S::negate(S::mul(S::load_float16(header + 32), S::load_uint8(sub_mins)));
    else return S::load_float16(header + 32);
  }

  // Adds kQuadCount quads of a group into acc.
  template <Layout kLayout, int R, int kQuadCount>
  TRIVIUM_INLINE static void dot_quads(const uint8_t* codes, const Rows& x, int64_t offset, I32 (&acc)[R]) {
    if constexpr (shape(kLayout).bits == 4) {
#pragma GCC unroll 8
      for (int pair = 0; pair < kQuadCount / 2; ++pair) {
        typename S::Codes low, high;
        S::load_nibbles(codes + kLine * pair, low, high);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) S::dot(acc[r], low, x.template at<int8_t>(r, offset + 8 * pair));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) S::dot(acc[r], high, x.template at<int8_t>(r, offset + 8 * pair + 4));
      }
    } else {
#pragma GCC unroll 8
      for (int quad = 0; quad < kQuadCount; ++quad) {
        if constexpr (is_symmetric(kLayout)) {
          const auto w = S::load_signed(codes + kLine * quad);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) S::dot_signed(acc[r], w, x.template at<int8_t>(r, offset + 4 * quad));
        } else {
          const auto w = S::load_codes(codes + kLine * quad);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) S::dot(acc[r], w, x.template at<int8_t>(r, offset + 4 * quad));
        }
      }
    }
  }

  template <Layout kLayout>
  TRIVIUM_INLINE static I32 start(const int32_t* negative_sum) {
    if constexpr (!is_symmetric(kLayout)) return S::zero();
    else if constexpr (shape(kLayout).bits == 4) return S::template splat_shifted<kZero4Shift>(negative_sum);
    else return S::start_signed(negative_sum);
  }

  // One group of a tile for R rows; `index` counts groups from the start of the row.
  template <Layout kLayout, int R>
  TRIVIUM_INLINE static void add_group(const uint8_t* header, const uint8_t* codes, int64_t group, int64_t index, const Rows& x,
                                       F32 (&sum)[R]) {
    constexpr int kParts = kLayout == Layout::q8_k6 ? 2 : 1;
    constexpr int kQuadCount = static_cast<int>(kQuads) / kParts;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const int64_t start_offset = kParts == 2 ? x.negative_half_sum + 8 * index + 4 * part : x.negative_sum + 4 * index;
      I32 acc[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r] = start<kLayout>(x.template at<int32_t>(r, start_offset));
      dot_quads<kLayout, R, kQuadCount>(codes + part * kQuadCount * kLine, x, kGroup * index + 4 * kQuadCount * part, acc);
      const F32 scale = group_scale<kLayout>(header, group, part);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F32 scaled = S::mul(S::to_float(acc[r]), S::splat(x.template at<float>(r, x.scale + 4 * index)));
        sum[r] = S::mul_add(scaled, scale, sum[r]);
      }
    }
    if constexpr (!is_symmetric(kLayout)) {
      const F32 minimum = group_min<kLayout>(header, group);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r] = S::mul_add(minimum, S::splat(x.template at<float>(r, x.scaled_sum + 4 * index)), sum[r]);
    }
  }

  template <Layout kLayout, int R>
  static void tile_rows(const uint8_t* tile, int64_t chunks, const Rows& rows, F32 (&sum)[R]) {
    constexpr Shape kShape = shape(kLayout);
    const Rows x = rows;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r] = S::zero_float();
    for (int64_t chunk = 0, index = 0; chunk < chunks; ++chunk, tile += kShape.chunk_bytes()) {
      const uint8_t* codes = tile + kShape.header;
      for (int64_t group = 0; group < kShape.groups; ++group, ++index, codes += kShape.group_bytes()) {
        add_group<kLayout, R>(tile, codes, group, index, x, sum);
      }
    }
  }

  template <Layout kLayout>
  static void multiply_codes(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
    const QuantisedRows& x = input.quantised;
    const int64_t chunks = shape(kLayout).chunks(matrix.in);
    const int64_t block = std::max<int64_t>(1, kRowBlockBytes / x.stride / S::kRows) * S::kRows;
    for (int64_t first = rows.begin; first < rows.end; first += block) {
      const Range some = {first, std::min(first + block, rows.end)};
      for (int64_t out = outs.begin; out < outs.end; out += kTile) {
        const uint8_t* tile = matrix.data + out / kTile * matrix.tile_bytes;
        for_rows<S::kRows>(some, [&]<int R>(int64_t row) {
          F32 sum[R];
          tile_rows<kLayout, R>(tile, chunks, Rows(x, row), sum);
          for (int r = 0; r < R; ++r) finish(sum[r], output, row + r, out, outs.end - out);
        });
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------- float layouts

  // T tiles of R rows. x: first row, ldx apart. tile_bytes lie between tiles.
  template <Layout kLayout, int T, int R>
  static void float_tiles(const uint8_t* tile, int64_t tile_bytes, int64_t in, const float* x, int64_t ldx, F32 (&sum)[T][R]) {
    constexpr int64_t kStep = kLayout == Layout::float32 ? 4 * kTile : 2 * kTile;  // bytes an input
    for (int t = 0; t < T; ++t) {
      for (int r = 0; r < R; ++r) sum[t][r] = S::zero_float();
    }
    const auto add_input = [&](const F32(&w)[T], int64_t i) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F32 value = S::splat(x + r * ldx + i);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) sum[t][r] = S::mul_add(w[t], value, sum[t][r]);
      }
    };
    F32 w[T];
    if constexpr (kLayout == Layout::bfloat16) {
      F32 odd[T];
      for (int64_t i = 0; i + 1 < in; i += 2) {
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) S::load_bfloat16_pairs(tile + t * tile_bytes + i * kStep, w[t], odd[t]);
        add_input(w, i);
        add_input(odd, i + 1);
      }
      if (in % 2) {
        for (int t = 0; t < T; ++t) S::load_bfloat16_pairs(tile + t * tile_bytes + (in - 1) * kStep, w[t], odd[t]);
        add_input(w, in - 1);
      }
    } else {
      for (int64_t i = 0; i < in; ++i) {
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const uint8_t* p = tile + t * tile_bytes + i * kStep;
          if constexpr (kLayout == Layout::float32) w[t] = S::load(reinterpret_cast<const float*>(p));
          else w[t] = S::load_float16(p);
        }
        add_input(w, i);
      }
    }
  }

  template <Layout kLayout, int T, int R>
  static void float_block(const MatrixView& matrix, const Input& input, int64_t row, int64_t out, int64_t end,
                          const Output& output) {
    F32 sum[T][R];
    const uint8_t* tile = matrix.data + out / kTile * matrix.tile_bytes;
    float_tiles<kLayout, T, R>(tile, matrix.tile_bytes, matrix.in, input.x + row * input.ldx, input.ldx, sum);
    for (int t = 0; t < T; ++t) {
      for (int r = 0; r < R; ++r) finish(sum[t][r], output, row + r, out + t * kTile, end - out - t * kTile);
    }
  }

  // A single row walks four tiles at once, to hide the latency of the additions; more rows walk two.
  template <Layout kLayout>
  static void multiply_floats(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
    const int64_t row_bytes = std::max<int64_t>(1, matrix.in * 4);
    const int64_t block = std::max<int64_t>(1, kRowBlockBytes / row_bytes / S::kFloatRows) * S::kFloatRows;
    for (int64_t first = rows.begin; first < rows.end; first += block) {
      const Range some = {first, std::min(first + block, rows.end)};
      const bool single = some.end - some.begin == 1;
      int64_t out = outs.begin;
      for (; single && outs.end - out > 3 * kTile; out += 4 * kTile) {
        float_block<kLayout, 4, 1>(matrix, input, first, out, outs.end, output);
      }
      for (; outs.end - out > kTile; out += 2 * kTile) {
        for_rows<S::kFloatRows>(some, [&]<int R>(int64_t row) {
          float_block<kLayout, 2, R>(matrix, input, row, out, outs.end, output);
        });
      }
      for (; out < outs.end; out += kTile) {
        for_rows<S::kFloatRows>(some, [&]<int R>(int64_t row) {
          float_block<kLayout, 1, R>(matrix, input, row, out, outs.end, output);
        });
      }
    }
  }

  // --------------------------------------------------------------------------------------------------------- entry points

  static void multiply(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
    switch (matrix.layout) {
      case Layout::float32: return multiply_floats<Layout::float32>(matrix, input, rows, outs, output);
      case Layout::bfloat16: return multiply_floats<Layout::bfloat16>(matrix, input, rows, outs, output);
      case Layout::float16: return multiply_floats<Layout::float16>(matrix, input, rows, outs, output);
      case Layout::q8_s: return multiply_codes<Layout::q8_s>(matrix, input, rows, outs, output);
      case Layout::q8_sm: return multiply_codes<Layout::q8_sm>(matrix, input, rows, outs, output);
      case Layout::q8_k: return multiply_codes<Layout::q8_k>(matrix, input, rows, outs, output);
      case Layout::q8_k6: return multiply_codes<Layout::q8_k6>(matrix, input, rows, outs, output);
      case Layout::q4_s: return multiply_codes<Layout::q4_s>(matrix, input, rows, outs, output);
      case Layout::q4_sm: return multiply_codes<Layout::q4_sm>(matrix, input, rows, outs, output);
      case Layout::q4_k: return multiply_codes<Layout::q4_k>(matrix, input, rows, outs, output);
    }
  }

  // The ceiling of the integer kernels: 12 independent chains of dots on registers, `rounds` long. Each dot multiplies 64
  // pairs.
  static int64_t dot_ceiling(int64_t rounds) {
    constexpr int kChains = 12;
    alignas(64) uint8_t bytes[64] = {1};
    const auto w = S::load_codes(bytes);
    const int8_t* x = reinterpret_cast<const int8_t*>(bytes);
    I32 acc[kChains];
    for (auto& a : acc) a = S::zero();
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
      for (auto& a : acc) {
        asm volatile("" : "+r"(x));  // x may have changed: no product can be used twice
        S::dot(a, w, x);
      }
    }
    F32 sum = S::zero_float();
    for (auto& a : acc) sum = S::add(sum, S::to_float(a));
    alignas(64) float lanes[kTile];
    S::store(sum, lanes);
    return lanes[0] != 0.0f ? rounds * kChains : 0;
  }

  // Symmetric, to nearest: scale = largest / 127. A group whose largest magnitude is below 1e-30 counts as zero (its inverse
  // scale would overflow).
  static void quantise_group(const float* x, int8_t* q, float& scale, float& scaled_sum, int32_t& negative_sum,
                             int32_t* negative_half_sum) {
    constexpr uint32_t kInfinity = 0x7f800000u;
    const uint32_t bits = S::largest_bits(x);
    const float largest = std::bit_cast<float>(bits);
    const bool finite = bits < kInfinity;
    const bool live = finite && largest >= 1e-30f;
    int32_t sums[2] = {0, 0};
    if (live) S::round_group(x, 127.0f / largest, q, sums);
    else std::fill_n(q, kGroup, int8_t{0});
    scale = finite ? (live ? largest * (1.0f / 127.0f) : 0.0f) : std::bit_cast<float>(0x7fc00000u);
    scaled_sum = scale * static_cast<float>(sums[0] + sums[1]);
    negative_sum = -(sums[0] + sums[1]);
    negative_half_sum[0] = -sums[0];
    negative_half_sum[1] = -sums[1];
  }

  static void quantise_row(const float* x, const QuantisedRows& rows, int64_t row) {
    const int64_t groups = rows.groups();
    int8_t* q = rows.q(row);
    float* scale = rows.scale(row);
    float* scaled_sum = rows.scaled_sum(row);
    int32_t* sum = rows.negative_sum(row);
    int32_t* half_sum = rows.negative_half_sum(row);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t left = rows.in - g * kGroup;
      alignas(64) float padded[kGroup] = {};
      if (left < kGroup && left > 0) std::copy_n(x + g * kGroup, left, padded);
      quantise_group(left < kGroup ? padded : x + g * kGroup, q + g * kGroup, scale[g], scaled_sum[g], sum[g], half_sum + 2 * g);
    }
  }
};

}  // namespace trivium::linear
