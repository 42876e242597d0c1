// Recurrences with a state of fixed size: token by token, so that a token's bits do not depend on how its sequence is cut into steps.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "simd_math.h"

namespace trivium::TRIVIUM_TIER {

#if defined(__AVX512F__)
inline constexpr int kStateVectors = 4;
#else
inline constexpr int kStateVectors = 2;
#endif
inline constexpr int kScanRows = 4;

inline float exp_of_one(float x) { return first_lane(exp(set1(x))); }

// V vectors of columns from `column` on; kPart: one vector of which only `count` columns are there.
//
// A token decays the state and overwrites what it holds under the key: S' = e^g S + k (beta (v - e^g S^T k))^T, y = scale S'^T q. The sums
// S'^T k of the token that comes next are made in the same pass over the state, so each token reads and writes it once: 3 multiply-adds and
// a product on 8 bytes of the first-level cache.
template <int V, bool kPart = false>
inline void delta_columns(const DeltaRule& d, int64_t column, int64_t count = 0) {
  const auto read = [&](const float* p) { return kPart ? load_n(p, count) : load(p); };
  const auto write = [&](float* p, Vec x) { kPart ? store_n(p, x, count) : store(p, x); };
  float* state = d.state + column;
  Vec held[V];  // S^T k
  for (Vec& x : held) x = set1(0);
  for (int64_t i = 0; i < d.dk; ++i) {
    for (int v = 0; v < V; ++v) held[v] = fma(read(state + i * d.stride + v * W), set1(d.k[i]), held[v]);
  }
  for (int64_t t = 0; t < d.tokens; ++t) {
    const float *q = d.q + t * d.qk_step, *k = d.k + t * d.qk_step;
    const Vec decay = set1(exp_of_one(d.g[t * d.head_step])), beta = set1(d.beta[t * d.head_step]);
    Vec change[V], sums[V];
    for (int v = 0; v < V; ++v) {
      change[v] = beta * (read(d.v + t * d.v_step + column + v * W) - decay * held[v]);
      sums[v] = held[v] = set1(0);
    }
    const auto pass = [&](auto last) {
      for (int64_t i = 0; i < d.dk; ++i) {
        for (int v = 0; v < V; ++v) {
          float* at = state + i * d.stride + v * W;
          const Vec s = fma(set1(k[i]), change[v], decay * read(at));
          write(at, s);
          sums[v] = fma(s, set1(q[i]), sums[v]);
          if constexpr (!decltype(last)::value) held[v] = fma(s, set1(k[i + d.qk_step]), held[v]);
        }
      }
    };
    t + 1 < d.tokens ? pass(std::false_type{}) : pass(std::true_type{});
    for (int v = 0; v < V; ++v) write(d.y + t * d.v_step + column + v * W, sums[v] * set1(d.scale));
  }
}

inline void delta_rule(const DeltaRule& d) {
  int64_t column = 0;
  for (; column + kStateVectors * W <= d.columns; column += kStateVectors * W) delta_columns<kStateVectors>(d, column);
  for (; column + W <= d.columns; column += W) delta_columns<1>(d, column);
  if (column < d.columns) delta_columns<1, true>(d, column, d.columns - column);
}

// R rows of the state for one token: S' = e^(dt a) S + (dt x) b^T, y = S' c + d x.
template <int R>
inline void scan_rows(const SelectiveScan& s, const float* x, float dt, float decay, const float* b, const float* c, int64_t row, float* y) {
  Vec sums[R], factor[R];
  for (int r = 0; r < R; ++r) {
    sums[r] = set1(0);
    factor[r] = set1(dt * x[row + r]);
  }
  const Vec kept = set1(decay);
  float* state = s.state + row * s.dk;
  int64_t i = 0;
  for (; i + W <= s.dk; i += W) {
    const Vec in = load(b + i), out = load(c + i);
    for (int r = 0; r < R; ++r) {
      float* at = state + r * s.dk + i;
      const Vec now = fma(factor[r], in, kept * load(at));
      store(at, now);
      sums[r] = fma(now, out, sums[r]);
    }
  }
  if (i < s.dk) {
    const int64_t n = s.dk - i;
    const Vec in = load_n(b + i, n), out = load_n(c + i, n);
    for (int r = 0; r < R; ++r) {
      float* at = state + r * s.dk + i;
      const Vec now = fma(factor[r], in, kept * load_n(at, n));
      store_n(at, now, n);
      sums[r] = fma(now, out, sums[r]);
    }
  }
  for (int r = 0; r < R; ++r) y[row + r] = reduce_add(sums[r]) + s.d * x[row + r];
}

inline void selective_scan(const SelectiveScan& s) {
  for (int64_t t = 0; t < s.tokens; ++t) {
    const float given = s.dt[t * s.dt_step], low = given < s.dt_low ? s.dt_low : given, dt = low > s.dt_high ? s.dt_high : low;
    const float decay = exp_of_one(dt * s.a);
    const float *x = s.x + t * s.x_step, *b = s.b + t * s.bc_step, *c = s.c + t * s.bc_step;
    float* y = s.y + t * s.x_step;
    int64_t row = 0;
    for (; row + kScanRows <= s.rows; row += kScanRows) scan_rows<kScanRows>(s, x, dt, decay, b, c, row, y);
    for (; row < s.rows; ++row) scan_rows<1>(s, x, dt, decay, b, c, row, y);
  }
}

}  // namespace trivium::TRIVIUM_TIER
