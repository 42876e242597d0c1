// Attention of whole sequences to both sides: keys and values are rows of the step, without pages.
//
// Keys have been turned into blocks of columns (see WholeSpan), so that, as in pages, a vector holds the same dimension of many keys and no sum
// runs across lanes; values are read where they lie, since a tile needs rows of them. Spans count from the first token of the sequence, and
// softmax and merging are those of attention_impl.h: a row's bits follow from its query and its sequence alone. Arithmetic is float32.
#pragma once

#include <algorithm>

#include "attention_impl.h"

namespace trivium::TRIVIUM_TIER {

// Keys of the span that row r sees.
inline Keys in_reach(const WholeSpan& w, int64_t row) {
  const AttentionSpan& s = w.span;
  const int64_t position = s.first_position + row / s.group;
  const int64_t low = std::clamp(position - w.reach, s.begin, s.end), high = std::clamp(std::min(position + w.reach + 1, s.context), low, s.end);
  return {low - s.begin, high - s.begin};
}

// scores[r][..] = q[r] . keys for R rows and N runs of keys, whose dimensions are rows `stride` apart.
template <int R, int N>
inline void score_columns(const AttentionSpan& s, int64_t row, const float* keys, int64_t stride, float* scores) {
  constexpr int kAll = N * kRunVectors;
  Vec sums[R][kAll];
  for (auto& of_row : sums) {
    for (Vec& x : of_row) x = set1(0);
  }
  const auto* q = reinterpret_cast<const float*>(s.q + row * s.layout.query_bytes());
  const int64_t step = s.layout.query_bytes() / static_cast<int64_t>(sizeof(float));
  for (int64_t d = 0; d < s.layout.head_dim; ++d) {
    Vec k[kAll];
    for (int v = 0; v < kAll; ++v) k[v] = load(keys + d * stride + v * W);
    for (int r = 0; r < R; ++r) {
      const Vec x = set1(q[r * step + d]);
      for (int v = 0; v < kAll; ++v) sums[r][v] = fma(x, k[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kAll; ++v) store(scores + r * kScoreStride + v * W, sums[r][v]);
  }
}

// The same for `runs` runs, N at a time, then half of them.
template <int R, int N>
inline void score_block(const AttentionSpan& s, int64_t row, const float* keys, int64_t stride, int64_t runs, float* scores) {
  for (; runs >= N; runs -= N, keys += N * kKeyRun, scores += N * kKeyRun) score_columns<R, N>(s, row, keys, stride, scores);
  if constexpr (N > 1) score_block<R, N / 2>(s, row, keys, stride, runs, scores);
}

// scores[r][..] of `scored` (whole runs, the last of which may reach beyond the last key: what is there is read, but means nothing).
template <int R>
inline void score_whole(const WholeSpan& w, int64_t row, Keys scored) {
  constexpr int kFit = kSums / (R * kRunVectors), kTogether = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  const AttentionSpan& s = w.span;
  for (int64_t at = scored.low; at < scored.high;) {
    const int64_t key = s.begin + at, block = key / kKeyBlock * kKeyBlock, stride = std::min(kKeyBlock, s.context - block);
    const int64_t stop = std::min(scored.high, block + kKeyBlock - s.begin);
    score_block<R, kTogether>(s, row, w.keys + block * s.layout.head_dim + key - block, stride, (stop - at) / kKeyRun, s.scores + at);
    at = stop;
  }
}

// values[r][dim ..] = sum of weight * value over `keys`, for R rows and V vectors of which the last has `part` numbers.
template <int R, int V>
inline void weigh_whole(const WholeSpan& w, Keys keys, float* values, int64_t dim, int64_t part) {
  const AttentionSpan& s = w.span;
  Vec sums[R][V];
  for (auto& of_row : sums) {
    for (Vec& x : of_row) x = set1(0);
  }
  for (int64_t i = keys.low; i < keys.high; ++i) {
    const float* from = w.values + (s.begin + i) * w.value_step + dim;
    Vec x[V];
    for (int v = 0; v < V; ++v) x[v] = v + 1 == V && part < W ? load_n(from + v * W, part) : load(from + v * W);
    for (int r = 0; r < R; ++r) {
      const Vec weight = set1(s.scores[r * kScoreStride + i]);
      for (int v = 0; v < V; ++v) sums[r][v] = fma(weight, x[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(values + r * s.layout.value_dim() + dim + v * W, sums[r][v]);
  }
}

template <int R>
inline void attend_whole_rows(const WholeSpan& w, int64_t row, const Partial& out) {
  const AttentionSpan& s = w.span;
  const Keys keys{in_reach(w, row).low, in_reach(w, row + R - 1).high};
  if (keys.low >= keys.high) {
    for (int r = 0; r < R; ++r) out.peak[row + r] = -INFINITY;
    return;
  }
  const Keys scored{keys.low / kKeyRun * kKeyRun, (keys.high + kKeyRun - 1) / kKeyRun * kKeyRun};
  score_whole<R>(w, row, scored);
  for (int r = 0; r < R; ++r) out.peak[row + r] = find_peak(s, in_reach(w, row + r), s.scores + r * kScoreStride);
  for (int r = 0; r < R; ++r) {
    float* scores = s.scores + r * kScoreStride;
    out.total[row + r] = soften<Float32Pages>(s, in_reach(w, row + r), scored, nullptr, out.peak[row + r], scores).total;
  }
  const int64_t n = s.layout.head_dim, padded = s.layout.value_dim();
  float* values = out.values + row * padded;
  int64_t dim = 0;
  for (; dim + kVectors * W <= n; dim += kVectors * W) weigh_whole<R, kVectors>(w, keys, values, dim, W);
  for (; dim < n; dim += W) weigh_whole<R, 1>(w, keys, values, dim, n - dim);
  if (dim < padded) {  // for merge
    for (int r = 0; r < R; ++r) std::memset(values + r * padded + dim, 0, static_cast<size_t>(padded - dim) * sizeof(float));
  }
}

inline void attend_whole(const WholeSpan& w, const Partial& out) {
  row_blocks<kRows>(w.span.rows, [&]<int R>(int64_t row) { attend_whole_rows<R>(w, row, out); });
}

}  // namespace trivium::TRIVIUM_TIER
