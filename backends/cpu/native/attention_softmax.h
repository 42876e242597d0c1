// The keys that rows of a span see, and the softmax of their scores: see attention_impl.h for what a span is.
#pragma once

#include <algorithm>

#include "kv_pages.h"
#include "rows_impl.h"

namespace trivium::TRIVIUM_TIER {

// A run of kKeyRun keys of one page: its page and the first key's token in it.
struct Run {
  const uint8_t* page;
  int64_t token;
};

// Run n of a span.
inline Run run_of(const AttentionSpan& s, int64_t n) {
  const int64_t at = s.begin + n * kKeyRun;
  return {s.pages + s.blocks[at / s.layout.page_size] * s.page_bytes, at % s.layout.page_size};
}

// Keys of a span, [low, high), counted from its first.
struct Keys {
  int64_t low, high;
};

// Those that row r sees.
inline Keys visible(const AttentionSpan& s, int64_t row) {
  const int64_t position = s.first_position + row / s.group;
  int64_t high = s.causal && position + 1 < s.context ? position + 1 : s.context;
  int64_t low = s.window > 0 && position + 1 > s.window ? position + 1 - s.window : s.chunk > 0 ? position / s.chunk * s.chunk : 0;
  high = (high < s.end ? high : s.end) - s.begin;
  low = (low < s.begin ? s.begin : low > s.end ? s.end : low) - s.begin;
  return {low, high > low ? high : low};
}

// int8: what the sums of a row and of W keys of a run, from its key `at` on, are multiplied by.
inline float query_scale(const AttentionSpan& s, int64_t row) {
  return *reinterpret_cast<const float*>(s.q + (row + 1) * s.layout.query_bytes() - sizeof(float));
}
inline Vec key_scale(const AttentionSpan& s, const Run& run, int64_t at) {
  return load_bf16(key_scales(s.layout, const_cast<uint8_t*>(run.page) + s.key_offset) + run.token + at);
}

// What a row's softmax over one span comes to. factor: what the weighted sums must be multiplied by.
struct Softened {
  float total, factor;
};

// Vectors with keys that are seen.
inline Keys whole_vectors(Keys seen) { return {seen.low / W * W, (seen.high + W - 1) / W * W}; }

// The largest score of one row; -infinity: it sees no key. Scores beyond `seen` in the same vectors become -infinity.
inline float find_peak(const AttentionSpan& s, Keys seen, float* scores) {
  if (seen.low >= seen.high) return -INFINITY;
  const Keys whole = whole_vectors(seen);
  if (s.softcap > 0) map(scores + whole.low, whole.high - whole.low, [cap = set1(s.softcap)](Vec x) { return capped(x, cap) * set1(kLog2e); }, scores + whole.low);
  if (seen.low > whole.low || seen.high < whole.high) {
    for (const int64_t i : {whole.low, whole.high - W}) store(scores + i, between(load(scores + i), seen.low - i, seen.high - i));
  }
  return max_of(scores + whole.low, whole.high - whole.low);
}

// Turns the scores of one row, from find_peak, into weights 2^(score - peak), rounded to the format's Numbers and stored in the scores' place:
// all of `scored` (whole runs), 0 outside `seen`. Rows wait for their peaks, so those of all rows are looked for first.
template <typename Pages>
inline Softened soften(const AttentionSpan& s, Keys seen, Keys scored, const Run* runs, float peak, float* scores) {
  using Number = typename Pages::Number;
  auto* numbers = reinterpret_cast<Number*>(scores);
  const auto zero = [numbers](int64_t from, int64_t to) {
    for (; from < to; from += W) std::memset(numbers + from, 0, W * sizeof(Number));
  };
  const Keys whole = whole_vectors(seen);
  if (peak == -INFINITY) {
    zero(scored.low, scored.high);
    return {0, 0};
  }
  zero(scored.low, whole.low);  // numbers are no wider than scores: none of those to come is lost
  const Vec shift = set1(peak);
  float total, factor = 1;
  if constexpr (kScaled<Pages>) {
    // A weight takes the scale of its value along, and 15 bits below the largest such product.
    Vec sums = set1(0), largest = set1(0);
    for (int64_t i = whole.low; i < whole.high; i += W) {
      const Run& run = runs[i / kKeyRun];
      const uint16_t* scales = value_scales(s.layout, const_cast<uint8_t*>(run.page) + s.value_offset) + run.token;
      const Vec e = exp2_negative<4>(load(scores + i) - shift);
      sums = sums + e;
      const Vec scale = load_bf16(scales + i % kKeyRun), x = e * scale;
      const Vec product = i < seen.low || i + W > seen.high ? select_less(set1(0), e, x, set1(0)) : x;
      store(scores + i, product);
      largest = max(largest, product);
    }
    const float most = reduce_max(largest);
    const Vec fit = set1(most == 0 ? 0 : 32767.0f / most);
    for (int64_t i = whole.low; i < whole.high; i += W) store_i16(numbers + i, load(scores + i) * fit);
    total = reduce_add(sums);
    factor = most / 32767.0f;
  } else if constexpr (std::is_same_v<Number, float>) {
    Vec sums = set1(0);
    for (int64_t i = whole.low; i < whole.high; i += W) {
      const Vec e = exp2_negative(load(scores + i) - shift);
      store(numbers + i, e);
      sums = sums + e;
    }
    total = reduce_add(sums);
  } else {
    Vec even = set1(0), odd = set1(0);
    int64_t i = whole.low;
    for (; i + 2 * W <= whole.high; i += 2 * W) {
      const Vec a = exp2_rough(load(scores + i) - shift), b = exp2_rough(load(scores + i + W) - shift);
      round_bf16(numbers + i, a, b);
      even = even + a;
      odd = odd + b;
    }
    if (i < whole.high) {
      const Vec a = exp2_rough(load(scores + i) - shift);
      round_bf16(numbers + i, a);
      even = even + a;
    }
    total = reduce_add(even + odd);
  }
  zero(whole.high, scored.high);
  return {total, factor};
}

// Of how many keys at a time weights are made.
template <typename Pages>
inline constexpr int64_t kWeightStep = std::is_same_v<typename Pages::Number, uint16_t> ? 2 * W : W;

// The weight 2^x of a score that is x above the peak. What comes of it has the precision of the format's items.
template <typename Pages>
inline Vec weight(Vec x) {
  if constexpr (std::is_same_v<typename Pages::Number, uint16_t>) return exp2_rough(x);
  else return exp2_weight<sizeof(typename Pages::Item) == sizeof(float) ? 6 : 4>(x);
}

// The keys of R rows from `row` on.
template <int R>
struct SeenKeys {
  Keys of_row[R];
  Keys any, all;  // those that at least one row, and that each row sees

  SeenKeys(const AttentionSpan& s, int64_t row) {
    for (int r = 0; r < R; ++r) of_row[r] = visible(s, row + r);
    any = {of_row[0].low, of_row[R - 1].high};
    all = {of_row[R - 1].low, of_row[0].high};
  }
  // Whether each row sees keys i .. i + n.
  bool whole(int64_t i, int64_t n) const { return i >= all.low && i + n <= all.high; }
};

// Prepares scores for their weights: softcap, -infinity for keys that a row does not see. Returns in shifts what is taken from them: the peaks.
template <int R>
inline void find_peaks(const AttentionSpan& s, const SeenKeys<R>& seen, Keys steps, float* scores, float* peaks, Vec (&shifts)[R]) {
  if (s.softcap > 0) {
    for (int r = 0; r < R; ++r) {
      float* x = scores + r * kScoreStride + steps.low;
      map(x, steps.high - steps.low, [cap = set1(s.softcap)](Vec v) { return capped(v, cap) * set1(kLog2e); }, x);
    }
  }
  Vec top[R];
  for (Vec& x : top) x = set1(-INFINITY);
  for (int64_t i = steps.low; i < steps.high; i += W) {
    float* x = scores + i;
    if (!seen.whole(i, W)) {
      for (int r = 0; r < R; ++r) store(x + r * kScoreStride, between(load(x + r * kScoreStride), seen.of_row[r].low - i, seen.of_row[r].high - i));
    }
    for (int r = 0; r < R; ++r) top[r] = max(top[r], load(x + r * kScoreStride));
  }
  for (int r = 0; r < R; ++r) {
    peaks[r] = reduce_max(top[r]);
    shifts[r] = set1(peaks[r] == -INFINITY ? 0 : peaks[r]);
  }
}

// Weights of whole numbers take the scales of their values along, and 15 bits below the largest such product of their row.
template <int R>
inline void weights_i16(const AttentionSpan& s, const SeenKeys<R>& seen, Keys steps, const Run* runs, const Vec (&shifts)[R], float* scores, Vec (&sums)[R],
                        Softened* softened) {
  Vec largest[R];
  for (Vec& x : largest) x = set1(0);
  for (int64_t i = steps.low; i < steps.high; i += W) {
    const Run& run = runs[i / kKeyRun];
    const Vec scale = load_bf16(value_scales(s.layout, const_cast<uint8_t*>(run.page) + s.value_offset) + run.token + i % kKeyRun);
    const bool whole = seen.whole(i, W);
    for (int r = 0; r < R; ++r) {
      float* at = scores + r * kScoreStride + i;
      const Vec e = weight<Int8Pages>(load(at) - shifts[r]);
      sums[r] = sums[r] + e;
      const Vec x = e * scale, product = whole ? x : select_less(set1(0), e, x, set1(0));
      store(at, product);
      largest[r] = max(largest[r], product);
    }
  }
  Vec fit[R];
  for (int r = 0; r < R; ++r) {
    const float most = reduce_max(largest[r]);
    fit[r] = set1(most == 0 ? 0 : 32767.0f / most);
    softened[r].factor = most / 32767.0f;
  }
  for (int64_t i = steps.low; i < steps.high; i += W) {
    for (int r = 0; r < R; ++r) {
      const float* at = scores + r * kScoreStride;
      store_i16(reinterpret_cast<int16_t*>(scores + r * kScoreStride) + i, load(at + i) * fit[r]);
    }
  }
}

// soften() of R rows from `row` on, step by step together, so that none of them waits; a row's bits are the same in any such block. Only
// what weigh() reads becomes a weight. Some key is seen by some row.
template <typename Pages, int R>
inline void soften_rows(const AttentionSpan& s, int64_t row, const Run* runs, float* scores, Softened* softened, const Partial& out) {
  using Number = typename Pages::Number;
  constexpr int64_t kStep = kWeightStep<Pages>;
  const SeenKeys<R> seen(s, row);
  const Keys steps{seen.any.low / kStep * kStep, (seen.any.high + kStep - 1) / kStep * kStep};
  Vec shifts[R], sums[R];
  for (Vec& x : sums) x = set1(0);
  find_peaks<R>(s, seen, steps, scores, out.peak + row, shifts);
  if constexpr (kScaled<Pages>) {
    weights_i16<R>(s, seen, steps, runs, shifts, scores, sums, softened);
  } else {
    for (int64_t i = steps.low; i < steps.high; i += kStep) {
      for (int r = 0; r < R; ++r) {
        const float* at = scores + r * kScoreStride;
        auto* numbers = reinterpret_cast<Number*>(scores + r * kScoreStride) + i;
        const Vec a = weight<Pages>(load(at + i) - shifts[r]);
        if constexpr (std::is_same_v<Number, float>) {
          store(numbers, a);
          sums[r] = sums[r] + a;
        } else {
          const Vec b = weight<Pages>(load(at + i + W) - shifts[r]);
          round_bf16(numbers, a, b);
          sums[r] = sums[r] + (a + b);
        }
      }
    }
    for (int r = 0; r < R; ++r) softened[r].factor = 1;
  }
  for (int r = 0; r < R; ++r) out.total[row + r] = softened[r].total = reduce_add(sums[r]);
}

}  // namespace trivium::TRIVIUM_TIER
