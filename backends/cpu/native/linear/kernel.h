// The linear kernels, written once over a vector type (simd_*.h) and compiled in one file for each instruction set.
//
// Integer layouts: for output o and groups g of inputs that share a scale,
//   y[o] = sx * sum_g (scale[o,g] * m[g] * float(2^shift[g] * sum_i code[o,i] * q[i]) + min[o,g] * (m[g] * 2^shift[g] * sum_i q[i])),
// the inner sum exact in int32, scale * m from a table for the four values of m = 1 + quarters / 4. A symmetric layout starts the inner
// sum at -zero * sum_i q[i] and has no min. Groups are added front to back, each by one multiply-add (two with a minimum), whatever
// the number of rows: that is why batches don't change bits. Where dots and multiply-adds share their pipes this leaves 8 of 9 slots (8
// of 10) to the dots: shifts, conversions and the masks that unpack 4 bits run beside them. Float layouts add input by input, front
// to back, one multiply-add each.
//
// Registers hold up to kRows rows of one tile (integer), or kFloatRows rows of two tiles (float), so that a line of weights is
// loaded and unpacked once for that many rows. Quantised rows stay in the first-level cache while all tiles go by, which are read in
// order; float rows are walked in blocks that stay in the second-level cache.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "layout.h"

namespace trivium::linear {

#define TRIVIUM_INLINE [[gnu::always_inline]] inline

// Calls body<kLayout>() for an integer layout.
template <class Body>
TRIVIUM_INLINE void call_for(Layout layout, const Body& body) {
  switch (layout) {
    case Layout::q8_s: return body.template operator()<Layout::q8_s>();
    case Layout::q8_sm: return body.template operator()<Layout::q8_sm>();
    case Layout::q8_k: return body.template operator()<Layout::q8_k>();
    case Layout::q8_k6: return body.template operator()<Layout::q8_k6>();
    case Layout::q8_c: return body.template operator()<Layout::q8_c>();
    case Layout::q4_s: return body.template operator()<Layout::q4_s>();
    case Layout::q4_sm: return body.template operator()<Layout::q4_sm>();
    case Layout::q4_k6: return body.template operator()<Layout::q4_k6>();
    case Layout::q4_s64: return body.template operator()<Layout::q4_s64>();
    case Layout::q4_s128: return body.template operator()<Layout::q4_s128>();
    case Layout::q4_z64: return body.template operator()<Layout::q4_z64>();
    case Layout::q4_z128: return body.template operator()<Layout::q4_z128>();
    default: return body.template operator()<Layout::q4_k>();
  }
}

// The current record of each of R rows that lie `stride` bytes apart. Every third row has a pointer, from which the next two are one and two
// strides away: there are too few registers for more, and hiding these keeps the compiler from trying.
template <class Record, int R>
struct RowRecords {
  static constexpr int kPointers = (R + 2) / 3;
  const uint8_t* pointer[kPointers];
  int64_t stride;

  TRIVIUM_INLINE RowRecords(const void* first, int64_t row_stride) : stride(row_stride) {
    for (int i = 0; i < kPointers; ++i) pointer[i] = static_cast<const uint8_t*>(first) + 3 * i * stride;
  }
  TRIVIUM_INLINE const Record& operator[](int row) const {
    return *reinterpret_cast<const Record*>(pointer[row / 3] + row % 3 * stride);
  }
  TRIVIUM_INLINE void next() {
#pragma GCC unroll 4
    for (auto& p : pointer) {
      p += sizeof(Record);
      asm("" : "+r"(p));
    }
    asm("" : "+r"(stride));
  }
};

template <class S>
struct PartKernel;  // part_kernel.h

template <class S>
struct LinearKernel {
  using I32 = typename S::I32;
  using F32 = typename S::F32;

  static constexpr int64_t kRowBlockBytes = 256 << 10;

  // ------------------------------------------------------------------------------------------------------------ results

  TRIVIUM_INLINE static void finish(F32 value, const Output& output, int64_t row, int64_t out, int64_t width) {
    if (width < kTile) return finish_part(value, output, row, out, width);
    float* y = output.y + row * output.ldy + out;
    if (output.bias) value = S::add(value, S::load(output.bias + out));
    S::store(output.accumulate ? S::add(S::load(y), value) : value, y);
  }
  [[gnu::noinline]] static void finish_part(F32 value, const Output& output, int64_t row, int64_t out, int64_t width) {
    float* y = output.y + row * output.ldy + out;
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

  // Calls body<R>(row) for as few blocks of at most kMost rows as there must be, as even as they can be.
  template <int kMost, class Body>
  TRIVIUM_INLINE static void for_even_rows(Range rows, const Body& body) {
    for (int64_t blocks = (rows.end - rows.begin + kMost - 1) / kMost; blocks > 0; --blocks) {
      const int64_t count = (rows.end - rows.begin + blocks - 1) / blocks;
      call_block<kMost>(count, rows.begin, body);
      rows.begin += count;
    }
  }
  template <int R, class Body>
  TRIVIUM_INLINE static void call_block(int64_t count, int64_t row, const Body& body) {
    if (count == R) return body.template operator()<R>(row);
    if constexpr (R > 1) call_block<R - 1>(count, row, body);
  }

  // ----------------------------------------------------------------------------------------------------- integer layouts

  // The current group of each of R rows.
  template <int R>
  struct Groups : RowRecords<QuantisedGroup, R> {
    TRIVIUM_INLINE Groups(const QuantisedRows& rows, int64_t first, int64_t group = 0)
        : RowRecords<QuantisedGroup, R>(rows.group(first) + group, rows.stride) {}
  };

  template <Layout kLayout>
  TRIVIUM_INLINE static F32 group_scale(const uint8_t* header, int64_t group, int part) {
    const uint8_t* sub_scales = header + 64 + 32 * group;
    if constexpr (has_half_groups(kLayout)) return S::mul(S::load_float16(header), S::load_int8(sub_scales + 16 * part));
    else if constexpr (is_blocked(kLayout)) return S::mul(S::load_float16(header), S::load_uint8(sub_scales));
    else return S::load_float16(header + 32 * (group / shape(kLayout).span));
  }
  template <Layout kLayout>
  TRIVIUM_INLINE static F32 group_min(const uint8_t* header, int64_t group) {
    const uint8_t* sub_mins = header + 80 + 32 * group;
    if constexpr (is_blocked(kLayout)) return S::negate(S::mul(S::load_float16(header + 32), S::load_uint8(sub_mins)));
    else if constexpr (has_zero_points(kLayout)) return S::negate(S::mul(S::load_float16(header), S::load_uint8(header + 32)));
    else return S::load_float16(header + 32);
  }

  // Adds the quad at input `offset` of a group, whose codes are w, into acc.
  template <int R, class Codes, class Sum>
  TRIVIUM_INLINE static void dot_quad(const Codes& w, const Groups<R>& x, int offset, Sum (&acc)[R]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) S::dot(acc[r], w, x[r].q + offset);
  }

  // Adds kQuadCount quads of a group, from input `offset` on, into acc.
  template <Layout kLayout, int kQuadCount, int R, class Sum>
  TRIVIUM_INLINE static void dot_quads(const uint8_t* codes, const Groups<R>& x, int offset, Sum (&acc)[R]) {
    if constexpr (shape(kLayout).bits == 4) {
#pragma GCC unroll 8
      for (int pair = 0; pair < kQuadCount / 2; ++pair) {
        typename S::Codes low, high;
        S::load_nibbles(codes + kLine * pair, low, high);
        dot_quad<R>(low, x, offset + 8 * pair, acc);
        dot_quad<R>(high, x, offset + 8 * pair + 4, acc);
      }
    } else {
#pragma GCC unroll 8
      for (int quad = 0; quad < kQuadCount; ++quad) {
        if constexpr (is_symmetric(kLayout)) dot_quad<R>(S::load_signed(codes + kLine * quad), x, offset + 4 * quad, acc);
        else dot_quad<R>(S::load_codes(codes + kLine * quad), x, offset + 4 * quad, acc);
      }
    }
  }

  template <Layout kLayout>
  TRIVIUM_INLINE static I32 start(const QuantisedGroup& x, int part) {
    if constexpr (!is_symmetric(kLayout)) return S::zero();
    else if constexpr (kLayout == Layout::q4_k6) {
      const int32_t half = x.start8_half[part] / (kZero8 / kZero4);
      return S::splat_whole(&half);
    } else if constexpr (shape(kLayout).bits == 4) return S::splat_whole(&x.start4);
    else return S::start_signed(has_half_groups(kLayout) ? &x.start8_half[part] : &x.start8);
  }

  // Stores scale * (1 + quarters / 4) for each number of quarters, `step` numbers apart.
  TRIVIUM_INLINE static void fill_scales(F32 scale, float* to, int64_t step) {
    constexpr float kQuarter = 1.0f / kQuarters;
    const F32 quarter = S::mul(scale, S::splat(&kQuarter));
#pragma GCC unroll 4
    for (int i = 0; i < kQuarters; ++i, scale = S::add(scale, quarter)) S::store(scale, to + i * step);
  }

  // One group of a tile for R rows.
  template <Layout kLayout, int R>
  TRIVIUM_INLINE static void add_group(const uint8_t* header, const uint8_t* codes, int64_t group, const Groups<R>& x, F32 (&sum)[R]) {
    constexpr int kParts = has_half_groups(kLayout) ? 2 : 1;
    constexpr int kQuadCount = static_cast<int>(kQuads) / kParts;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      alignas(64) float scales[kQuarters][kTile];
      fill_scales(group_scale<kLayout>(header, group, part), scales[0], kTile);
      constexpr bool kNarrow = shape(kLayout).bits == 4;
      std::conditional_t<kNarrow, typename S::NarrowSum, typename S::WholeSum> acc[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) S::begin(acc[r], start<kLayout>(x[r], part));
      dot_quads<kLayout, kQuadCount, R>(codes + part * (shape(kLayout).group_bytes() / kParts), x, 4 * kQuadCount * part, acc);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F32 value = S::to_float(S::shift_left(S::end(acc[r], start<kLayout>(x[r], part)), &x[r].shift));
        sum[r] = S::mul_add(value, S::load(scales[x[r].quarters]), sum[r]);
      }
    }
    if constexpr (!is_symmetric(kLayout)) {
      const F32 minimum = group_min<kLayout>(header, group);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r] = S::mul_add(minimum, S::splat(&x[r].scaled_sum), sum[r]);
    }
  }

  // Asks for `lines` lines of weights that lie kAhead bytes further on: the processor's own prefetchers stop at the end of a page and, where
  // several rows keep a thread busy, fall behind.
  static constexpr int64_t kAhead = 4096;
  template <int64_t kLines>
  TRIVIUM_INLINE static void ask_ahead(const uint8_t* weights) {
#pragma GCC unroll 16
    for (int64_t line = 0; line < kLines; ++line) __builtin_prefetch(weights + kAhead + line * kLine);
  }

  // A tile, which starts at output `out`, for R rows. A function of its own, so that it has all registers.
  template <Layout kLayout, int R>
  [[gnu::noinline]] static void tile_rows(const MatrixView& matrix, const QuantisedRows& rows, int64_t row, int64_t out, int64_t end,
                                          const Output& output) {
    constexpr Shape kShape = shape(kLayout);
    Groups<R> x(rows, row);
    F32 sum[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r] = S::zero_float();
    const uint8_t* tile = matrix.data + out / kTile * matrix.tile_bytes;
    for (int64_t left = kShape.row_groups(matrix.in); left > 0; left -= kShape.groups, tile += kShape.chunk_bytes()) {
      const uint8_t* codes = tile + kShape.header;
      const int64_t groups = kShape.groups <= 2 ? kShape.groups : std::min(kShape.groups, left);
      for (int64_t group = 0; group < groups; ++group, codes += kShape.group_bytes()) {
        ask_ahead<kShape.group_bytes() / kLine + 1>(codes);
        add_group<kLayout, R>(tile, codes, group, x, sum);
        x.next();
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) finish(S::mul(sum[r], S::splat(rows.scale(row + r))), output, row + r, out, end - out);
  }

  template <Layout kLayout>
  static void multiply_codes(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output) {
    constexpr int kMost = is_common(kLayout) ? S::kRows : std::min(S::kRows, 6);
    for_even_rows<kMost>(rows, [&]<int R>(int64_t row) {
      for (int64_t out = outs.begin; out < outs.end; out += kTile) {
        tile_rows<kLayout, R>(matrix, input.quantised, row, out, outs.end, output);
      }
    });
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
    const auto ask_ahead_of_tiles = [&](int64_t i) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) ask_ahead<1>(tile + t * tile_bytes + i * kStep);
    };
    F32 w[T];
    if constexpr (kLayout == Layout::bfloat16) {
      F32 odd[T];
      for (int64_t i = 0; i + 1 < in; i += 2) {
        if constexpr (R == 1) ask_ahead_of_tiles(i);
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
        if constexpr (R == 1) ask_ahead_of_tiles(i);
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
      case Layout::q4_i: return PartKernel<S>::multiply(matrix, input, rows, outs, output);
      default: call_for(matrix.layout, [&]<Layout kLayout>() { multiply_codes<kLayout>(matrix, input, rows, outs, output); });
    }
  }

  // The ceiling of the integer kernels: 12 independent chains of dots, `rounds` long, on operands that stay where they are. Each dot
  // multiplies 64 pairs.
  static int64_t dot_ceiling(int64_t rounds) {
    constexpr int kChains = 12;
    alignas(64) uint8_t bytes[64] = {1};
    asm volatile("" : "+m"(bytes));  // any numbers
    const auto w = S::load_codes(bytes);
    const int8_t* x = reinterpret_cast<const int8_t*>(bytes);
    I32 acc[kChains];
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) acc[i] = S::zero();
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) {
        asm volatile("" : "+r"(x));  // x may have changed: no product can be used twice
        S::dot(acc[i], w, x + 4 * i);
      }
    }
    F32 sum = S::zero_float();
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum = S::add(sum, S::to_float(acc[i]));
    alignas(64) float lanes[kTile];
    S::store(sum, lanes);
    return lanes[0] != 0.0f ? rounds * kChains : 0;
  }

  // Multipliers of kSome groups at once, so that divisions go through vectors: the least that holds each group, whose own largest is
  // `most` where the row's is `largest`, and what its inputs are multiplied by.
  static constexpr int kSome = 32;
  struct Multipliers {
    uint32_t steps[kSome];  // a multiplier's bits, in quarters
    float inverse[kSome];

    void find(const float (&most)[kSome], float largest) {
      const float codes = 127.0f / largest;
      for (int i = 0; i < kSome; ++i) {
        const float share = std::max(most[i] / largest, 1.0f / (1 << kMaxShift));
        steps[i] = (std::bit_cast<uint32_t>(share) + (kStep - 1)) / kStep;
        inverse[i] = codes / std::bit_cast<float>(steps[i] * kStep);
      }
    }
    static constexpr uint32_t kStep = 1u << 21;  // a quarter, in the mantissa
  };

  // x * inverse, rounded to nearest.
  TRIVIUM_INLINE static void quantise_group(const float* x, float inverse, uint32_t steps, QuantisedGroup& group) {
    int32_t sums[2];
    S::round_group(x, inverse, group.q, sums);
    group.shift = static_cast<int32_t>(steps / kQuarters) - 127 + kMaxShift;
    group.quarters = static_cast<int32_t>(steps % kQuarters);
    group.start4 = -kZero4 * (sums[0] + sums[1]);
    group.start8 = -kZero8 * (sums[0] + sums[1]);
    for (int half = 0; half < 2; ++half) group.start8_half[half] = -kZero8 * sums[half];
    const float multiplier = std::bit_cast<float>(steps * Multipliers::kStep);
    group.scaled_sum = static_cast<float>(sums[0] + sums[1]) * (multiplier * (1 << kMaxShift));
  }

  static void quantise_row(const float* x, const QuantisedRows& rows, int64_t row) {
    if (has(rows.records, Records::groups)) quantise_groups(x, rows, row);
    if (has(rows.records, Records::parts)) quantise_parts(x, rows.in, rows.part(row));
  }

  static void quantise_parts(const float* x, int64_t in, QuantisedPart* parts) { PartKernel<S>::quantise(x, in, parts); }

  // A row whose largest magnitude is below 1e-30 counts as zero (its inverse scale would overflow).
  static void quantise_groups(const float* x, const QuantisedRows& rows, int64_t row) {
    constexpr uint32_t kInfinity = 0x7f800000u;
    const int64_t whole = rows.in / kGroup, groups = rows.groups();
    QuantisedGroup* group = rows.group(row);
    alignas(64) float padded[2 * kGroup] = {};
    std::copy_n(x + whole * kGroup, rows.in - whole * kGroup, padded);
    const auto input = [&](int64_t g) { return g < whole ? x + g * kGroup : padded + (g - whole) * kGroup; };
    uint32_t bits = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const uint32_t most = S::largest_bits(input(g), kGroup);
      group[g].shift = static_cast<int32_t>(most);  // kept here for the second pass
      bits = std::max(bits, most);
    }
    const float largest = std::bit_cast<float>(bits);
    const bool finite = bits < kInfinity, live = finite && largest >= 1e-30f;
    *rows.scale(row) = !finite ? std::bit_cast<float>(0x7fc00000u) : live ? largest * (1.0f / (127 << kMaxShift)) : 0.0f;
    if (!live) {
      std::fill_n(group, groups, QuantisedGroup{});
      return;
    }
    for (int64_t first = 0; first < groups; first += kSome) {
      const int some = static_cast<int>(std::min<int64_t>(kSome, groups - first));
      float most[kSome] = {};
      for (int i = 0; i < some; ++i) most[i] = std::bit_cast<float>(group[first + i].shift);
      Multipliers multipliers;
      multipliers.find(most, largest);
      for (int i = 0; i < some; ++i) quantise_group(input(first + i), multipliers.inverse[i], multipliers.steps[i], group[first + i]);
    }
  }
};

}  // namespace trivium::linear

#include "part_kernel.h"
