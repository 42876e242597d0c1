// Attention over paged keys and values. See kernels.h for the layout of pages, kv_pages.h for the arithmetic of each format.
//
// A span of kSpan keys is one block of the softmax: scores of a few rows against all its keys, their weights, then the weighted sum of its
// values, all in registers and the first-level cache; spans are merged in their order (merge). A row's bits therefore follow from its
// query, the keys it sees and their positions alone.
//
// Another implementation for the same format (matrix tiles) replaces attend_rows<Pages, R>: for R rows of AttentionSpan::q it makes
// scores[R][kScoreStride] of the keys that any of them sees (score), calls soften() row by row, which leaves pairs of Numbers for the runs that
// were scored, and multiplies them with the values (weigh). It must do so for every number of rows, one included, since a row's bits may not
// depend on its neighbours; what it reads beyond a row's keys must meet a weight of 0, and nothing beyond the last key may be read as a
// number, for it may be NaN.
#pragma once

#include "attention_softmax.h"

namespace trivium::TRIVIUM_TIER {

// Registers: up to kRows rows and kSums vectors of sums at a time.
#if defined(__AVX512F__)
inline constexpr int kRows = 6, kVectors = 4, kSums = 24;
#elif defined(__AVX2__)
inline constexpr int kRows = 6, kVectors = 2, kSums = 12;
#else
inline constexpr int kRows = 2, kVectors = 4, kSums = 8;
#endif
inline constexpr int kRunVectors = static_cast<int>(kKeyRun) / W;
inline constexpr int kRuns = static_cast<int>(kSpan / kKeyRun);

// Rounds rows of queries, times `factor`, to what the format's products take: query_bytes() apart.
inline void queries(const KvLayout& layout, const float* q, int64_t rows, float factor, uint8_t* out) {
  const int64_t n = layout.head_dim;
  with_pages(layout.latent > 0 ? KvType::float32 : layout.type, [&](auto pages) {
    using Number = typename decltype(pages)::Number;
    for (int64_t r = 0; r < rows; ++r, out += layout.query_bytes()) {
      auto* to = reinterpret_cast<Number*>(out);
      const float* x = q + r * n;
      if constexpr (std::is_same_v<Number, float>) {
        each_vec(x, n, [&, f = set1(factor)](int64_t i, Vec v) { store(to + i, v * f); });
      } else if constexpr (std::is_same_v<Number, uint16_t>) {
        each_vec(x, n, [&, f = set1(factor)](int64_t i, Vec v) { round_bf16(to + i, v * f); });
      } else {
        // The sum over all dimensions must fit into 32 bits.
        const float limit = n <= 512 ? 32767.0f : static_cast<float>((int64_t{1} << 24) / n - 1);
        const float top = largest(x, n);
        each_vec(x, n, [&, f = set1(top == 0 ? 0 : limit / top)](int64_t i, Vec v) { store_i16(to + i, v * f); });
        *reinterpret_cast<float*>(out + layout.query_bytes() - sizeof(float)) = top / limit * factor;
      }
      if (n % 2 != 0) to[n] = 0;
    }
  });
}

inline void fetch(const uint8_t* at) { __builtin_prefetch(at); }

// scores[r][i] = q[r] . key i for R rows from `row` on and the keys of N runs.
template <typename Pages, int R, int N>
inline void score_runs(const AttentionSpan& s, int64_t row, const Run* runs, float* scores) {
  using Item = typename Pages::Item;
  constexpr int kAll = N * kRunVectors;
  const int64_t pairs = s.layout.key_dim() / 2, page_size = s.layout.page_size, stride = s.layout.query_bytes();
  const Item* blocks[N];
  for (int n = 0; n < N; ++n) blocks[n] = reinterpret_cast<const Item*>(runs[n].page + s.key_offset);
  typename Pages::Sum sums[R][kAll];
  for (auto& of_row : sums) {
    for (auto& x : of_row) x = Pages::zero();
  }
  const uint8_t* q = s.q + row * stride;
  // Few rows wait for memory: the values of the same tokens come meanwhile, in as many steps as their keys take.
  constexpr int64_t kStep = 2 * kKeyRun * static_cast<int64_t>(sizeof(Item)) / Pages::kHalves;
  const bool ahead = s.rows <= kFewRows;
  const int64_t row_bytes = s.layout.value_dim() * static_cast<int64_t>(sizeof(Item));
  for (int64_t pair = 0; pair < pairs; ++pair) {
    for (int half = 0; half < Pages::kHalves; ++half) {
      for (int n = 0; ahead && n < N; ++n) {
        fetch(runs[n].page + s.value_offset + runs[n].token * row_bytes + (pair * Pages::kHalves + half) * kStep);
      }
      decltype(Pages::key(blocks[0], 0, 0, 0, 0)) k[kAll];
      for (int v = 0; v < kAll; ++v) k[v] = Pages::key(blocks[v / kRunVectors], runs[v / kRunVectors].token + v % kRunVectors * W, page_size, pair, half);
      for (int r = 0; r < R; ++r) {
        const auto* two = reinterpret_cast<const typename Pages::Number*>(q + r * stride) + 2 * pair;
        for (int v = 0; v < kAll; ++v) sums[r][v] = Pages::step(sums[r][v], k[v], two, half);
      }
    }
  }
  for (int v = 0; v < kAll; ++v) {
    if constexpr (kScaled<Pages>) {
      const Vec scale = key_scale(s, runs[v / kRunVectors], v % kRunVectors * W);
      for (int r = 0; r < R; ++r) store(scores + r * kScoreStride + v * W, to_float(sums[r][v]) * (scale * set1(query_scale(s, row + r))));
    } else {
      for (int r = 0; r < R; ++r) store(scores + r * kScoreStride + v * W, sums[r][v]);
    }
  }
}

// The same for runs n .. last, N at a time, then half of them.
template <typename Pages, int R, int N>
inline void score(const AttentionSpan& s, int64_t row, const Run* runs, int n, int last, float* scores) {
  for (; n + N <= last; n += N) score_runs<Pages, R, N>(s, row, runs + n, scores + n * kKeyRun);
  if constexpr (N > 1) score<Pages, R, N / 2>(s, row, runs, n, last, scores);
}

// Fetches the run of keys that lies `after` keys from where AttentionSpan::next begins.
inline void fetch_keys(const AttentionSpan& s, int64_t after) {
  const KvLayout& l = s.layout;
  const int64_t at = s.next.begin + after;
  if (at >= s.next.end) return;
  const uint8_t* key = s.pages + s.next.blocks[at / l.page_size] * s.page_bytes + s.next.key_offset + l.key_at(at % l.page_size);
  for (int64_t i = 0; i < l.key_rows(); ++i) fetch(key + i * l.key_row_bytes());
}

// values[r][..] = sum of weight * value over `keys`, for R rows and V vectors of dimensions from `dim` on.
template <typename Pages, int R, int V>
inline void weigh(const AttentionSpan& s, Keys keys, const Run* runs, const float* weights, const Softened* softened, float* values, int64_t dim) {
  using Number = typename Pages::Number;
  const int64_t dims = s.layout.value_dim();
  typename Pages::Sum sums[R][V];
  for (auto& of_row : sums) {
    for (auto& x : of_row) x = Pages::zero();
  }
  auto add = [&](const typename Pages::Item* block, int64_t pair, int64_t at, bool whole) {
    for (int half = 0; half < (whole ? Pages::kHalves : 1); ++half) {
      decltype(Pages::value(block, 0, 0, 0, 0)) x[V];
      for (int v = 0; v < V; ++v) x[v] = Pages::value(block, dim + v * W, dims, pair, half);
      if (!whole) {
        for (int v = 0; v < V; ++v) x[v] = Pages::first(x[v]);
      }
      for (int r = 0; r < R; ++r) {
        const auto* two = reinterpret_cast<const Number*>(weights + r * kScoreStride) + at;
        for (int v = 0; v < V; ++v) sums[r][v] = Pages::step(sums[r][v], x[v], two, half);
      }
    }
  };
  for (int64_t at = keys.low / 2 * 2; at < keys.high;) {
    const Run& run = runs[at / kKeyRun];
    if (dim == 0 && s.rows <= kFewRows) fetch_keys(s, at / kKeyRun * kKeyRun);
    const auto* block = reinterpret_cast<const typename Pages::Item*>(run.page + s.value_offset);
    const int64_t run_end = at / kKeyRun * kKeyRun + kKeyRun, stop = run_end < keys.high ? run_end : keys.high;
    int64_t pair = (run.token + at % kKeyRun) / 2;
    for (; at + 2 <= stop; at += 2) add(block, pair++, at, true);
    if (at < stop) {  // the partner of the last key does not exist yet; its memory may hold anything
      add(block, pair, at, false);
      ++at;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      if constexpr (kScaled<Pages>) {
        store(values + r * dims + dim + v * W, to_float(sums[r][v]) * set1(softened[r].factor));
      } else {
        store(values + r * dims + dim + v * W, sums[r][v]);
      }
    }
  }
}

// Rows row .. row + R of the span.
template <typename Pages, int R>
inline void attend_rows(const AttentionSpan& s, int64_t row, const Partial& out) {
  constexpr int kFit = kSums / (R * kRunVectors), kTogether = kFit >= 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  const int64_t dims = s.layout.value_dim();
  const Keys keys{visible(s, row).low, visible(s, row + R - 1).high};
  float* values = out.values + row * dims;
  if (keys.low >= keys.high) {
    for (int r = 0; r < R; ++r) out.peak[row + r] = -INFINITY;
    return;
  }
  const int first = static_cast<int>(keys.low / kKeyRun), last = static_cast<int>((keys.high + kKeyRun - 1) / kKeyRun);
  Run runs[kRuns];
  for (int n = first; n < last; ++n) runs[n] = run_of(s, n);
  score<Pages, R, kTogether>(s, row, runs, first, last, s.scores);
  Softened softened[R];
  soften_rows<Pages, R>(s, row, runs, s.scores, softened, out);
  int64_t dim = 0;
  for (; dim + kVectors * W <= dims; dim += kVectors * W) weigh<Pages, R, kVectors>(s, keys, runs, s.scores, softened, values, dim);
  for (; dim < dims; dim += W) weigh<Pages, R, 1>(s, keys, runs, s.scores, softened, values, dim);
}

// Calls f.template operator()<R>(r) for all rows, at most kMax at a time.
template <int kMax, typename F>
inline void row_blocks(int64_t rows, F f) {
  int64_t r = 0;
  for (; r + kMax <= rows; r += kMax) f.template operator()<kMax>(r);
  if constexpr (kMax > 1) {
    if (r < rows) {
      row_blocks<kMax - 1>(rows - r, [&]<int R>(int64_t i) { f.template operator()<R>(r + i); });
    }
  }
}

inline void attend_latent(const AttentionSpan& s, const Partial& out);  // latent_impl.h

template <typename Pages>
inline void attend_many(const AttentionSpan& s, const Partial& out);  // attention_panels.h

// Rows from `first` on, a few at a time.
template <typename Pages>
inline void attend_few(const AttentionSpan& s, int64_t first, const Partial& out) {
  row_blocks<kRows>(s.rows - first, [&]<int R>(int64_t row) { attend_rows<Pages, R>(s, first + row, out); });
}

inline void attend(const AttentionSpan& s, const Partial& out) {
  if (s.layout.latent > 0) return attend_latent(s, out);
  with_pages(s.layout.type, [&](auto pages) { attend_many<decltype(pages)>(s, out); });
}

// `rounds` times kProductSums sums of a pair of products, all in registers: what the format's arithmetic can reach at most.
inline float products(KvType type, int64_t rounds) {
  alignas(64) uint8_t zeros[8 * kKeyRun];
  for (uint8_t& zero : zeros) zero = rounds < 0;  // which the compiler can't know
  float result = 0;
  with_pages(type, [&](auto pages) {
    using Pages = decltype(pages);
    typename Pages::Number two[2];
    std::memcpy(two, zeros, sizeof(two));
    typename Pages::Sum sums[kProductSums];
    for (auto& sum : sums) sum = Pages::zero();
    const auto x = Pages::key(reinterpret_cast<const typename Pages::Item*>(zeros), 0, 0, 0, 0);
    for (int64_t i = 0; i < rounds; ++i) {
      for (int half = 0; half < Pages::kHalves; ++half) {
        for (auto& sum : sums) sum = Pages::step(sum, x, two, half);
      }
    }
    for (const auto& sum : sums) {
      if constexpr (kScaled<Pages>) {
        result += reduce_add(to_float(sum));
      } else {
        result += reduce_add(sum);
      }
    }
  });
  return result;
}

// Rows first .. first + count, at most W: see merge.
inline void merge_rows(const Partial& total, const Partial& part, int64_t first, int64_t count, int64_t value_dim) {
  const Vec old_peaks = load_n(total.peak + first, count), new_peaks = load_n(part.peak + first, count), peaks = max(old_peaks, new_peaks);
  float old_factors[W], new_factors[W];
  store(old_factors, exp2_negative(old_peaks - peaks));
  store(new_factors, exp2_negative(new_peaks - peaks));
  for (int64_t r = first; r < first + count; ++r) {
    float* sums = total.values + r * value_dim;
    const float* more = part.values + r * value_dim;
    if (part.peak[r] == -INFINITY) continue;
    if (total.peak[r] == -INFINITY) {
      total.total[r] = part.total[r];
      std::memcpy(sums, more, static_cast<size_t>(value_dim) * sizeof(float));
      continue;
    }
    const float old_factor = old_factors[r - first], new_factor = new_factors[r - first];
    total.total[r] = total.total[r] * old_factor + part.total[r] * new_factor;
    map(sums, value_dim, [a = set1(old_factor), b = set1(new_factor)](Vec s, Vec t) { return s * a + t * b; }, sums, more);
  }
  store_n(total.peak + first, peaks, count);
}

inline void merge(const Partial& total, const Partial& part, int64_t rows, int64_t value_dim) {
  for (int64_t r = 0; r < rows; r += W) merge_rows(total, part, r, std::min<int64_t>(W, rows - r), value_dim);
}

inline void finish(float peak, float total, const float* values, const float* sink, float* y, int64_t head_dim) {
  float factor = 1;
  if (sink != nullptr) {
    const float score = *sink * kLog2e, top = peak < score ? score : peak;
    factor = exp2_negative(peak - top);
    total = total * factor + exp2_negative(score - top);
  }
  map(y, head_dim, [f = set1(factor / total)](Vec v) { return v * f; }, values);
}

}  // namespace trivium::TRIVIUM_TIER
