// Attention over paged keys and values, and the writing of both, over Vec. See kernels.h for the layout.
#pragma once

#include "kernels.h"
#include "rows_impl.h"

namespace trivium::TRIVIUM_TIER {

// The element formats of a KV page. keys(p, page_size, pair): W keys' dimensions 2 * pair and 2 * pair + 1, for the keys that start at column p;
// values(p, dims, pair): W dimensions of tokens 2 * pair and 2 * pair + 1.
struct Float32Pages {
  using Item = float;
  static constexpr bool kPairs = false;
  static float encode(float x) { return x; }
  static float decode(float x) { return x; }
  static int64_t key_index(int64_t dim, int64_t token, int64_t page_size) { return dim * page_size + token; }
  static int64_t value_index(int64_t dim, int64_t token, int64_t dims) { return token * dims + dim; }
  static Pair keys(const Item* block, int64_t token, int64_t page_size, int64_t pair) {
    const float* at = block + 2 * pair * page_size + token;
    return {load(at), load(at + page_size)};
  }
  static Pair values(const Item* block, int64_t dim, int64_t dims, int64_t pair) {
    const float* at = block + 2 * pair * dims + dim;
    return {load(at), load(at + dims)};
  }
};

struct Float16Pages {
  using Item = uint16_t;
  static constexpr bool kPairs = false;
  static uint16_t encode(float x) { return float_to_f16(x); }
  static float decode(uint16_t x) { return f16_to_float(x); }
  static int64_t key_index(int64_t dim, int64_t token, int64_t page_size) { return dim * page_size + token; }
  static int64_t value_index(int64_t dim, int64_t token, int64_t dims) { return token * dims + dim; }
  static Pair keys(const Item* block, int64_t token, int64_t page_size, int64_t pair) {
    const Item* at = block + 2 * pair * page_size + token;
    return {load_f16(at), load_f16(at + page_size)};
  }
  static Pair values(const Item* block, int64_t dim, int64_t dims, int64_t pair) {
    const Item* at = block + 2 * pair * dims + dim;
    return {load_f16(at), load_f16(at + dims)};
  }
};

struct Bfloat16Pages {
  using Item = uint16_t;
  static constexpr bool kPairs = true;
  static uint16_t encode(float x) { return float_to_bf16(x); }
  static float decode(uint16_t x) { return bf16_to_float(x); }
  static int64_t key_index(int64_t dim, int64_t token, int64_t page_size) { return (dim / 2 * page_size + token) * 2 + dim % 2; }
  static int64_t value_index(int64_t dim, int64_t token, int64_t dims) { return (token / 2 * dims + dim) * 2 + token % 2; }
  static Pair keys(const Item* block, int64_t token, int64_t page_size, int64_t pair) {
    return load_pairs_bf16(block + (pair * page_size + token) * 2);
  }
  static Pair values(const Item* block, int64_t dim, int64_t dims, int64_t pair) {
    return load_pairs_bf16(block + (pair * dims + dim) * 2);
  }
};

template <typename Use>
inline void with_pages(KvType type, Use use) {
  switch (type) {
    case KvType::float32: return use(Float32Pages{});
    case KvType::bfloat16: return use(Bfloat16Pages{});
    case KvType::float16: return use(Float16Pages{});
  }
}

// Encodes up to kEncoded numbers at a time and stores each where its format wants it. Pairs of dimensions of a key lie side by side in
// bfloat16, so two go in one store; the partner of a value may be another thread's to write, so values go one by one.
inline void write_kv(const KvLayout& layout, int64_t offset, const float* k, const float* v, uint8_t* key, uint8_t* value) {
  constexpr int64_t kEncoded = 64;
  with_pages(layout.type, [&](auto pages) {
    using Pages = decltype(pages);
    using Item = typename Pages::Item;
    auto* keys = reinterpret_cast<Item*>(key);
    auto* values = reinterpret_cast<Item*>(value);
    const int64_t page_size = layout.page_size, dims = layout.value_dim();
    Item encoded[kEncoded + 1];
    for (int64_t d = 0; d < layout.head_dim; d += kEncoded) {
      const int64_t n = layout.head_dim - d < kEncoded ? layout.head_dim - d : kEncoded;
      for (int64_t i = 0; i < n; ++i) encoded[i] = Pages::encode(k[d + i]);
      encoded[n] = 0;
      if constexpr (Pages::kPairs) {
        for (int64_t i = 0; i < n; i += 2) std::memcpy(keys + Pages::key_index(d + i, offset, page_size), encoded + i, 2 * sizeof(Item));
      } else {
        for (int64_t i = 0; i < n; ++i) keys[Pages::key_index(d + i, offset, page_size)] = encoded[i];
      }
      for (int64_t i = 0; i < n; ++i) encoded[i] = Pages::encode(v[d + i]);
      for (int64_t i = 0; i < n; ++i) values[Pages::value_index(d + i, offset, dims)] = encoded[i];
    }
  });
}

inline void read_kv(const KvLayout& layout, int64_t offset, const uint8_t* key, const uint8_t* value, float* k, float* v) {
  with_pages(layout.type, [&](auto pages) {
    using Pages = decltype(pages);
    const auto* keys = reinterpret_cast<const typename Pages::Item*>(key);
    const auto* values = reinterpret_cast<const typename Pages::Item*>(value);
    const int64_t dims = layout.value_dim();
    for (int64_t d = 0; d < layout.head_dim; ++d) {
      k[d] = Pages::decode(keys[Pages::key_index(d, offset, layout.page_size)]);
      v[d] = Pages::decode(values[Pages::value_index(d, offset, dims)]);
    }
  });
}

// Registers: up to kRows rows and kSums vectors of sums at a time.
#if defined(__AVX512F__)
inline constexpr int kRows = 6, kVectors = 4, kSums = 24;
#elif defined(__AVX2__)
inline constexpr int kRows = 4, kVectors = 2, kSums = 12;
#else
inline constexpr int kRows = 2, kVectors = 4, kSums = 8;
#endif
inline constexpr int kRunVectors = static_cast<int>(kKeyRun) / W;
inline constexpr int kRuns = static_cast<int>(kKeyBlock / kKeyRun);

// A run of kKeyRun keys of one page: its page and the first key's token in it.
struct Run {
  const uint8_t* page;
  int64_t token;
};

inline Run find_run(const AttentionSpan& s, int64_t at) {
  const int64_t page = s.blocks[at / s.layout.page_size];
  return {s.pages + page * s.page_bytes, at % s.layout.page_size};
}

// scores[r][n * kKeyRun + i] = q[r] . key i of run n, for R rows and N runs. Each sum runs over the dimensions in order.
template <typename Pages, int R, int N>
inline void score_runs(const AttentionSpan& s, const float* q, const Run* runs, float* scores) {
  using Item = typename Pages::Item;
  constexpr int kAll = N * kRunVectors;
  const int64_t pairs = s.head_dim / 2, page_size = s.layout.page_size;
  Vec sums[R][kAll];
  for (auto& row : sums) {
    for (Vec& x : row) x = set1(0);
  }
  auto keys = [&](int v, int64_t pair) {
    const Run& run = runs[v / kRunVectors];
    return Pages::keys(reinterpret_cast<const Item*>(run.page + s.key_offset), run.token + v % kRunVectors * W, page_size, pair);
  };
  for (int64_t pair = 0; pair < pairs; ++pair) {
    Pair k[kAll];
    for (int v = 0; v < kAll; ++v) k[v] = keys(v, pair);
    for (int r = 0; r < R; ++r) {
      const float* at = q + r * s.head_dim + 2 * pair;
      const Vec even = set1(at[0]), odd = set1(at[1]);
      for (int v = 0; v < kAll; ++v) sums[r][v] = fma(odd, k[v].odd, fma(even, k[v].even, sums[r][v]));
    }
  }
  for (int v = 0; v < kAll; ++v) {
    if (s.head_dim % 2 != 0) {
      const Pair k = keys(v, pairs);
      for (int r = 0; r < R; ++r) sums[r][v] = fma(set1(q[r * s.head_dim + 2 * pairs]), k.even, sums[r][v]);
    }
    for (int r = 0; r < R; ++r) store(scores + r * kKeyBlock + v * W, sums[r][v]);
  }
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

// Keys that row r may see, [low, high).
struct Visible {
  int64_t low, high;
};

inline Visible visible(const AttentionSpan& s, int64_t row) {
  const int64_t position = s.first_position + row / s.group;
  const int64_t high = s.causal && position + 1 < s.context ? position + 1 : s.context;
  const int64_t low = s.window > 0 && position + 1 > s.window ? position + 1 - s.window : 0;
  return {low, high};
}

// Keys that any row sees, within the span.
inline Visible reach(const AttentionSpan& s) {
  const Visible first = visible(s, 0), last = visible(s, s.rows - 1);
  return {first.low > s.begin ? first.low : s.begin, last.high < s.end ? last.high : s.end};
}

// Turns the scores of one row and block (keys begin ..) into weights e^(score - peak), updates the row's peak and total, and returns by
// how much earlier sums shrink. Keys outside [low, high) get the weight 0.
inline float soften(const AttentionSpan& s, Visible seen, int64_t begin, float* scores, float& peak, float& total) {
  const int64_t low = seen.low - begin, high = seen.high - begin;
  for (int64_t i = 0; i < kKeyBlock && i < low; ++i) scores[i] = -INFINITY;
  for (int64_t i = high < 0 ? 0 : high; i < kKeyBlock; ++i) scores[i] = -INFINITY;
  Vec top = set1(-INFINITY);
  const Vec factor = set1(s.scale), cap = set1(s.softcap);
  for (int64_t i = 0; i < kKeyBlock; i += W) {
    Vec x = load(scores + i) * factor;
    if (s.softcap > 0) x = select_less(load(scores + i), set1(-3e38f), set1(-INFINITY), capped(x, cap));
    store(scores + i, x);
    top = max(top, x);
  }
  const float block_peak = reduce_max(top);
  const float new_peak = peak < block_peak ? block_peak : peak;
  if (new_peak == -INFINITY) {
    for (int64_t i = 0; i < kKeyBlock; ++i) scores[i] = 0;
    return 1;
  }
  const float shrink = peak == new_peak ? 1.0f : exp_negative(peak - new_peak);
  Vec sums = set1(0);
  for (int64_t i = 0; i < kKeyBlock; i += W) {
    const Vec e = exp_negative(load(scores + i) - set1(new_peak));
    store(scores + i, e);
    sums = sums + e;
  }
  total = total * shrink + reduce_add(sums);
  peak = new_peak;
  return shrink;
}

// values[r] = values[r] * shrink[r] + sum of weight * value over keys [low, high) of the block at `begin`, for R rows and V vectors
// of dimensions from `dim` on. Each sum runs over the keys in order.
template <typename Pages, int R, int V>
inline void weigh(const AttentionSpan& s, Visible keys, int64_t begin, const float* weights, const float* shrink, float* values, int64_t dim) {
  const int64_t dims = s.layout.value_dim();
  Vec sums[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sums[r][v] = load(values + r * dims + dim + v * W) * set1(shrink[r]);
  }
  for (int64_t at = keys.low / 2 * 2; at < keys.high;) {
    const Run run = find_run(s, at);
    const auto* block = reinterpret_cast<const typename Pages::Item*>(run.page + s.value_offset);
    const int64_t run_end = at / kKeyRun * kKeyRun + kKeyRun;
    const int64_t stop = run_end < keys.high ? run_end : keys.high;
    for (; at + 2 <= stop; at += 2) {
      for (int v = 0; v < V; ++v) {
        const Pair x = Pages::values(block, dim + v * W, dims, (at % s.layout.page_size) / 2);
        for (int r = 0; r < R; ++r) {
          const float* w = weights + r * kKeyBlock + at - begin;
          sums[r][v] = fma(set1(w[1]), x.odd, fma(set1(w[0]), x.even, sums[r][v]));
        }
      }
    }
    if (at < stop) {  // the partner of the last key does not exist yet; its memory may hold anything
      for (int v = 0; v < V; ++v) {
        const Pair x = Pages::values(block, dim + v * W, dims, (at % s.layout.page_size) / 2);
        for (int r = 0; r < R; ++r) sums[r][v] = fma(set1(weights[r * kKeyBlock + at - begin]), x.even, sums[r][v]);
      }
      ++at;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(values + r * dims + dim + v * W, sums[r][v]);
  }
}

template <typename Pages>
inline void attend_block(const AttentionSpan& s, Visible keys, int64_t begin, const Partial& out) {
  Run runs[kRuns];
  const int first = static_cast<int>((keys.low - begin) / kKeyRun), last = static_cast<int>((keys.high - begin + kKeyRun - 1) / kKeyRun);
  for (int n = first; n < last; ++n) runs[n] = find_run(s, begin + n * kKeyRun);
  row_blocks<kRows>(s.rows, [&]<int R>(int64_t r) {
    constexpr int kFit = kSums / (R * kRunVectors), kTogether = kFit >= kRuns ? kRuns : kFit >= 2 ? 2 : 1;
    const float* q = s.q + r * s.head_dim;
    float* scores = s.scores + r * kKeyBlock;
    int n = first;
    for (; n + kTogether <= last; n += kTogether) score_runs<Pages, R, kTogether>(s, q, runs + n, scores + n * kKeyRun);
    for (; n < last; ++n) score_runs<Pages, R, 1>(s, q, runs + n, scores + n * kKeyRun);
  });
  float shrink[kRows];
  row_blocks<kRows>(s.rows, [&]<int R>(int64_t r) {
    for (int i = 0; i < R; ++i) {
      Visible seen = visible(s, r + i);
      seen.low = seen.low > keys.low ? seen.low : keys.low;
      seen.high = seen.high < keys.high ? seen.high : keys.high;
      shrink[i] = soften(s, seen, begin, s.scores + (r + i) * kKeyBlock, out.peak[r + i], out.total[r + i]);
    }
    const int64_t dims = s.layout.value_dim();
    const float* weights = s.scores + r * kKeyBlock;
    int64_t dim = 0;
    for (; dim + kVectors * W <= dims; dim += kVectors * W) {
      weigh<Pages, R, kVectors>(s, keys, begin, weights, shrink, out.values + r * dims, dim);
    }
    for (; dim < dims; dim += W) weigh<Pages, R, 1>(s, keys, begin, weights, shrink, out.values + r * dims, dim);
  });
}

inline void attend(const AttentionSpan& s, const Partial& out) {
  const int64_t dims = s.layout.value_dim();
  for (int64_t r = 0; r < s.rows; ++r) {
    out.peak[r] = -INFINITY;
    out.total[r] = 0;
  }
  for (int64_t i = 0; i < s.rows * dims; ++i) out.values[i] = 0;
  const Visible all = reach(s);
  with_pages(s.layout.type, [&](auto pages) {
    for (int64_t begin = all.low / kKeyBlock * kKeyBlock; begin < all.high; begin += kKeyBlock) {
      const Visible keys{all.low > begin ? all.low : begin, all.high < begin + kKeyBlock ? all.high : begin + kKeyBlock};
      attend_block<decltype(pages)>(s, keys, begin, out);
    }
  });
}

inline void merge(const Partial& total, const Partial& part, int64_t rows, int64_t value_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    float* sums = total.values + r * value_dim;
    const float* more = part.values + r * value_dim;
    if (part.peak[r] == -INFINITY) continue;
    if (total.peak[r] == -INFINITY) {
      total.peak[r] = part.peak[r];
      total.total[r] = part.total[r];
      for (int64_t i = 0; i < value_dim; ++i) sums[i] = more[i];
      continue;
    }
    const float peak = total.peak[r] < part.peak[r] ? part.peak[r] : total.peak[r];
    const float old_factor = exp_negative(total.peak[r] - peak), new_factor = exp_negative(part.peak[r] - peak);
    total.total[r] = total.total[r] * old_factor + part.total[r] * new_factor;
    total.peak[r] = peak;
    map(sums, value_dim, [a = set1(old_factor), b = set1(new_factor)](Vec s, Vec t) { return s * a + t * b; }, sums, more);
  }
}

inline void finish(float peak, float total, const float* values, const float* sink, float* y, int64_t head_dim) {
  float factor = 1;
  if (sink != nullptr) {
    const float top = peak < *sink ? *sink : peak;
    factor = exp_negative(peak - top);
    total = total * factor + exp_negative(*sink - top);
  }
  map(y, head_dim, [f = set1(factor / total)](Vec v) { return v * f; }, values);
}

}  // namespace trivium::TRIVIUM_TIER
