// Attention of many rows over one span: see attention_impl.h for what a span is, and for few rows.
//
// Keys and values are brought into the form that products take once for all rows, a panel of kPanelKeys tokens and kPanelDims dimensions at a
// time, and panels stay in the first-level cache while all rows meet them. What rows have summed up waits in memory meanwhile: the scores in
// their place, the values in the partial result. So each sum is the same chain of the same steps as that of attend_rows, and equal bit for bit.
// For 96 rows, 64 keys and 64 dimensions of float32 in vectors of 16:
//   products  24,576 multiply-adds of a vector each for scores and values, two a cycle: 24,576 cycles
//   packing   512 vectors read, widened and stored: 600 cycles
//   softmax   384 vectors of 12 operations, two a cycle: 2,300 cycles
#pragma once

#include "attention_impl.h"

// GCC 12 keeps an array of sums in registers only if it unrolls the loops over it early.
#if defined(__GNUC__) && !defined(__clang__)
#define TRIVIUM_UNROLL _Pragma("GCC unroll 8")
#else
#define TRIVIUM_UNROLL
#endif

namespace trivium::TRIVIUM_TIER {

inline constexpr int64_t kPanelKeys = 64, kPanelDims = 64;
inline constexpr int kPanelRuns = static_cast<int>(kPanelKeys / kKeyRun);
inline constexpr int kScoreRuns = kSums / (kRows * kRunVectors);  // of keys that a block of rows meets at a time
static_assert(kScoreRuns >= 1 && kPanelDims % W == 0 && kVectors * W <= kPanelDims);

// A step of a sum takes one number, or one pair, of a query or of weights.
template <typename Pages>
inline constexpr int64_t kPerStep = 2 / Pages::kHalves;

template <typename Pages>
using Factor = decltype(Pages::key(nullptr, 0, 0, 0, 0));

// Keys: a row for each step along the dimensions. Values: a row for each step along the tokens.
template <typename Pages>
struct Panel {
  static constexpr int64_t kSteps = kPanelKeys / kPerStep<Pages>, kWidth = kPanelKeys / W;
  static_assert(kPanelKeys == kPanelDims);
  alignas(64) Factor<Pages> rows[kSteps][kWidth];
  Vec scales[kWidth];  // of int8 keys
};

// Up to kTileRows rows of a span in blocks of kRows, and the keys that any of them sees.
struct RowBlocks {
  const AttentionSpan& s;
  int64_t row, count;
  Keys keys;
  Keys of_block[kTileRows / kRows];
  Run runs[kRuns];

  RowBlocks(const AttentionSpan& span, int64_t at, int64_t blocks) : s(span), row(at), count(blocks) {
    for (int64_t b = 0; b < count; ++b) of_block[b] = {visible(s, row + b * kRows).low, visible(s, row + b * kRows + kRows - 1).high};
    keys = {of_block[0].low, of_block[count - 1].high};
    for (int64_t n = keys.low / kKeyRun; n * kKeyRun < keys.high; ++n) runs[n] = run_of(s, n);
  }
};

// The part of `keys` that lies in the panel from key `at` on, in whole units of `unit` keys.
inline Keys within(Keys keys, int64_t at, int64_t unit) {
  const int64_t low = std::max(keys.low, at) / unit * unit, high = (std::min(keys.high, at + kPanelKeys) + unit - 1) / unit * unit;
  return {low, std::max(low, high)};
}

// Keys `at` .. and pairs pair .. pair + pairs of their dimensions.
template <typename Pages>
inline void pack_keys(const RowBlocks& b, int64_t at, int64_t pair, int64_t pairs, Panel<Pages>& panel) {
  const AttentionSpan& s = b.s;
  const Keys keys = within(b.keys, at, kKeyRun);
  for (int64_t key = keys.low; key < keys.high; key += kKeyRun) {
    const Run& run = b.runs[key / kKeyRun];
    const auto* block = reinterpret_cast<const typename Pages::Item*>(run.page + s.key_offset);
    const int64_t first = (key - at) / W, page_size = s.layout.page_size;
    if constexpr (kScaled<Pages>) {
      for (int v = 0; v < kRunVectors; ++v) panel.scales[first + v] = key_scale(s, run, v * W);
    }
    for (int64_t i = 0; i < pairs; ++i) {
      for (int v = 0; v < kRunVectors; ++v) {
        for (int half = 0; half < Pages::kHalves; ++half) {
          panel.rows[i * Pages::kHalves + half][first + v] = Pages::key(block, run.token + v * W, page_size, pair + i, half);
        }
      }
    }
  }
}

// Tokens `at` .. and `vectors` vectors of their values from dimension `dim` on.
template <typename Pages>
inline void pack_values(const RowBlocks& b, int64_t at, int64_t dim, int64_t vectors, Panel<Pages>& panel) {
  const AttentionSpan& s = b.s;
  const int64_t dims = s.layout.value_dim();
  const Keys keys = within(b.keys, at, 2);
  for (int64_t key = keys.low; key < keys.high; key += 2) {
    const Run& run = b.runs[key / kKeyRun];
    const auto* block = reinterpret_cast<const typename Pages::Item*>(run.page + s.value_offset);
    const int64_t pair = (run.token + key % kKeyRun) / 2;
    const bool whole = key + 1 < b.keys.high;  // else the partner may not exist yet; its memory may hold anything
    for (int64_t v = 0; v < vectors; ++v) {
      for (int half = 0; half < (whole ? Pages::kHalves : 1); ++half) {
        const auto x = Pages::value(block, dim + v * W, dims, pair, half);
        panel.rows[(key - at) / kPerStep<Pages> + half][v] = whole ? x : Pages::first(x);
      }
    }
  }
}

// sums[r][v] += the products of `steps` rows of a panel, from vector `first` on, with rows of numbers `stride` bytes apart.
template <typename Pages, int V>
inline void add_products(const Panel<Pages>& panel, int64_t begin, int64_t end, int64_t first, const uint8_t* numbers, int64_t stride,
                         typename Pages::Sum (&sums)[kRows][V]) {
  using Number = typename Pages::Number;
  for (int64_t step = begin; step < end; ++step) {
    const Factor<Pages>* x = panel.rows[step] + first;
    const uint8_t* at = numbers + (step - begin) * kPerStep<Pages> * static_cast<int64_t>(sizeof(Number));
    TRIVIUM_UNROLL for (int r = 0; r < kRows; ++r) {
      TRIVIUM_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = Pages::step(sums[r][v], x[v], reinterpret_cast<const Number*>(at + r * stride), 0);
    }
  }
}

// From zero, or as store_sums left them.
template <typename Pages, int V>
inline void begin_sums(bool fresh, const float* from, int64_t stride, typename Pages::Sum (&sums)[kRows][V]) {
  TRIVIUM_UNROLL for (int r = 0; r < kRows; ++r) {
    TRIVIUM_UNROLL for (int v = 0; v < V; ++v) {
      sums[r][v] = Pages::zero();
      if (!fresh) load_sum(sums[r][v], from + r * stride + v * W);
    }
  }
}

template <typename Sum, int V>
inline void store_sums(float* to, int64_t stride, const Sum (&sums)[kRows][V]) {
  TRIVIUM_UNROLL for (int r = 0; r < kRows; ++r) {
    TRIVIUM_UNROLL for (int v = 0; v < V; ++v) store(to + r * stride + v * W, sums[r][v]);
  }
}

// Scores of one block of rows and N runs from run n on (of the span), over the dimensions of the panel. last: there are no others.
template <typename Pages, int N>
inline void score_panel(const RowBlocks& b, int64_t row, int64_t n, const Panel<Pages>& panel, int64_t at, int64_t pair, int64_t pairs, bool last) {
  constexpr int kAll = N * kRunVectors;
  const AttentionSpan& s = b.s;
  const int64_t stride = s.layout.query_bytes();
  const uint8_t* q = s.q + row * stride;
  float* scores = s.scores + (row - b.row) * kScoreStride + n * kKeyRun;
  typename Pages::Sum sums[kRows][kAll];
  begin_sums<Pages>(pair == 0, scores, kScoreStride, sums);
  add_products<Pages>(panel, 0, pairs * Pages::kHalves, (n * kKeyRun - at) / W, q + 2 * pair * static_cast<int64_t>(sizeof(typename Pages::Number)), stride,
                      sums);
  if constexpr (kScaled<Pages>) {
    if (last) {
      TRIVIUM_UNROLL for (int v = 0; v < kAll; ++v) {
        const Vec scale = panel.scales[(n * kKeyRun - at) / W + v];
        TRIVIUM_UNROLL for (int r = 0; r < kRows; ++r) store(scores + r * kScoreStride + v * W, to_float(sums[r][v]) * (scale * set1(query_scale(s, row + r))));
      }
      return;
    }
  }
  store_sums(scores, kScoreStride, sums);
}

// Calls f.template operator()<N>(i) for first .. last, at most kMax at a time.
template <int kMax, typename F>
inline void widths(int64_t first, int64_t last, F f) {
  for (; first + kMax <= last; first += kMax) f.template operator()<kMax>(first);
  if constexpr (kMax > 1) {
    if (first < last) widths<kMax - 1>(first, last, f);
  }
}

template <typename Pages>
inline void score_all(const RowBlocks& b, Panel<Pages>& panel) {
  const int64_t pairs = b.s.layout.key_dim() / 2;
  for (int64_t at = b.keys.low / kPanelKeys * kPanelKeys; at < b.keys.high; at += kPanelKeys) {
    for (int64_t pair = 0; pair < pairs; pair += kPanelDims / 2) {
      const int64_t here = std::min(kPanelDims / 2, pairs - pair);
      pack_keys(b, at, pair, here, panel);
      for (int64_t i = 0; i < b.count; ++i) {
        const Keys keys = within(b.of_block[i], at, kKeyRun);
        widths<kScoreRuns>(keys.low / kKeyRun, keys.high / kKeyRun, [&]<int N>(int64_t n) {
          score_panel<Pages, N>(b, b.row + i * kRows, n, panel, at, pair, here, pair + here == pairs);
        });
      }
    }
  }
}

// The weighted sums of one block of rows over its keys in the panel, V vectors of dimensions. Sums of whole numbers become floats with the last ones.
template <typename Pages, int V>
inline void weigh_panel(const RowBlocks& b, int64_t block, const Panel<Pages>& panel, int64_t at, int64_t vector, const Softened* softened, float* values) {
  const int64_t dims = b.s.layout.value_dim(), row = block * kRows;
  const Keys all = b.of_block[block], keys{std::max(all.low / 2 * 2, at), std::min(all.high, at + kPanelKeys)};
  const auto* weights = reinterpret_cast<const typename Pages::Number*>(b.s.scores + row * kScoreStride) + keys.low;
  typename Pages::Sum sums[kRows][V];
  begin_sums<Pages>(at <= all.low, values, dims, sums);
  add_products<Pages>(panel, (keys.low - at) / kPerStep<Pages>, (keys.high - at + kPerStep<Pages> - 1) / kPerStep<Pages>, vector,
                      reinterpret_cast<const uint8_t*>(weights), kScoreStride * static_cast<int64_t>(sizeof(float)), sums);
  if constexpr (kScaled<Pages>) {
    if (at + kPanelKeys >= all.high) {
      TRIVIUM_UNROLL for (int r = 0; r < kRows; ++r) {
        TRIVIUM_UNROLL for (int v = 0; v < V; ++v) store(values + r * dims + v * W, to_float(sums[r][v]) * set1(softened[row + r].factor));
      }
      return;
    }
  }
  store_sums(values, dims, sums);
}

template <typename Pages>
inline void weigh_all(const RowBlocks& b, const Softened* softened, float* values, Panel<Pages>& panel) {
  const int64_t dims = b.s.layout.value_dim();
  for (int64_t dim = 0; dim < dims; dim += kPanelDims) {
    const int64_t vectors = std::min(kPanelDims, dims - dim) / W;
    for (int64_t at = b.keys.low / kPanelKeys * kPanelKeys; at < b.keys.high; at += kPanelKeys) {
      pack_values(b, at, dim, vectors, panel);
      for (int64_t i = 0; i < b.count; ++i) {
        if (b.of_block[i].low >= std::min(b.of_block[i].high, at + kPanelKeys) || b.of_block[i].high <= at) continue;
        widths<kVectors>(0, vectors, [&]<int V>(int64_t v) {
          weigh_panel<Pages, V>(b, i, panel, at, v, softened, values + i * kRows * dims + dim + v * W);
        });
      }
    }
  }
}

// Weights of all rows, in the scores' place.
template <typename Pages>
inline void soften_all(const RowBlocks& b, const Partial& out, Softened* softened) {
  const AttentionSpan& s = b.s;
  for (int64_t i = 0; i < b.count; ++i) {
    const int64_t first = i * kRows;
    if (b.of_block[i].low < b.of_block[i].high) {
      soften_rows<Pages, kRows>(s, b.row + first, b.runs, s.scores + first * kScoreStride, softened + first, out);
    } else {
      std::fill_n(out.peak + b.row + first, kRows, -INFINITY);
    }
  }
}

// `blocks` blocks of kRows rows from `row` on.
template <typename Pages>
inline void attend_panels(const AttentionSpan& s, int64_t row, int64_t blocks, const Partial& out) {
  const RowBlocks b(s, row, blocks);
  Panel<Pages> panel;
  Softened softened[kTileRows];
  score_all(b, panel);
  soften_all<Pages>(b, out, softened);
  weigh_all(b, softened, out.values + row * s.layout.value_dim(), panel);
}

// All rows: those beyond whole blocks go the way of few rows.
template <typename Pages>
inline void attend_many(const AttentionSpan& s, const Partial& out) {
  int64_t row = 0;
  while (s.rows - row >= kPanelRows) {
    const int64_t blocks = std::min(kTileRows, s.rows - row) / kRows;
    attend_panels<Pages>(s, row, blocks, out);
    row += blocks * kRows;
  }
  attend_few<Pages>(s, row, out);
}

}  // namespace trivium::TRIVIUM_TIER
