// exp, tanh and the activations over Vec, to about one unit in the last place.
#pragma once

#include <cmath>

#include "simd.h"

namespace trivium::TRIVIUM_TIER {

// e^(x - n ln 2) for n = round(x / ln 2), so that the argument is at most ln 2 / 2: its Taylor series to the seventh power (error below
// 2^-27).
inline Vec exp_fraction(Vec x, Vec n) {
  const Vec r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
  Vec p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  return fma(p, r, set1(1.0f));
}

// e^x. Below -87.3 the result is 0, above 88.7 infinity; NaN gives NaN.
inline Vec exp(Vec x) {
  const Vec low = set1(-87.33654f), high = set1(88.72283f);
  const Vec clamped = min(high, max(low, x));  // in this order NaN passes through
  const Vec n = round(clamped * set1(1.44269504f));
  const Vec p = exp_fraction(clamped, n);
  // 2^n in two steps, since n may be 128.
  const Vec half = round(n * set1(0.5f) - set1(0.25f));
  Vec y = p * exp2_whole(half) * exp2_whole(n - half);
  y = select_less(x, low, set1(0), y);
  return select_less(high, x, set1(INFINITY), y);
}

inline constexpr float kLog2e = 1.44269504f;

// 2^f for f in [-1/2, 1/2], by the polynomial of degree 6 of the least greatest relative error, 2^-29.
inline Vec exp2_fraction(Vec f) {
  Vec p = fma(f, set1(1.534581169e-4f), set1(1.339993124e-3f));
  p = fma(p, f, set1(9.618488959e-3f));
  p = fma(p, f, set1(5.550328777e-2f));
  p = fma(p, f, set1(2.402264689e-1f));
  p = fma(p, f, set1(6.931472057e-1f));
  return fma(p, f, set1(1.0f));
}

// 2^x for x <= 0 or -infinity, as softmax needs it: 2^n times a polynomial in x - n for n = round(x), of the least greatest relative error over
// [-1/2, 1/2]: 2^-29 for degree 6, 2^-18 for degree 4. NaN gives NaN.
template <int kDegree = 6>
inline Vec exp2_negative(Vec x) {
  static_assert(kDegree == 6 || kDegree == 4);
#if defined(__AVX512F__)
  const Vec low = set1(-200);
#else
  const Vec low = set1(-126);
#endif
  const Vec clamped = max(low, x);
  const Vec n = round(clamped), f = clamped - n;
  Vec p;
  if constexpr (kDegree == 6) {
    p = exp2_fraction(f);
  } else {
    p = fma(f, set1(9.570101911e-3f), set1(5.591786032e-2f));
    p = fma(p, f, set1(2.402474483e-1f));
    p = fma(p, f, set1(6.931218147e-1f));
    p = fma(p, f, set1(9.999992614e-1f));
  }
#if defined(__AVX512F__)
  return {_mm512_scalef_ps(p.v, n.v)};
#else
  return select_less(x, low, set1(0), p * exp2_whole(n));
#endif
}

#if defined(__AVX512F__)
// 2^n p(x - n) for n = floor(x), without a step for n of its own.
template <typename... Coefficients>
inline Vec exp2_floor(Vec x, float last, Coefficients... others) {
  const Vec f = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  Vec p = set1(last);
  ((p = fma(p, f, set1(others))), ...);
  return {_mm512_scalef_ps(p.v, x.v)};
}
#endif

// The same within 2^-13, for what is then rounded to 8 bits: n = floor(x), over [0, 1].
inline Vec exp2_rough(Vec x) {
#if defined(__AVX512F__)
  return exp2_floor(x, 7.802456669e-2f, 2.260671992e-1f, 6.958334666e-1f, 9.999252325e-1f);
#else
  return exp2_negative<4>(x);
#endif
}

// exp2_negative to the same degrees, and within as much (degree 6: the last place), where subnormal results need no care.
template <int kDegree>
inline Vec exp2_weight(Vec x) {
#if defined(__AVX512F__)
  if constexpr (kDegree == 4) {
    return exp2_floor(x, 1.353416792e-2f, 5.201146061e-2f, 2.414427569e-1f, 6.930038345e-1f, 1.000002593f);
  } else {
    return exp2_floor(x, 2.170225545e-4f, 1.243968783e-3f, 9.678840996e-3f, 5.548334198e-2f, 2.402298363e-1f, 6.931469838e-1f, 1.0f);
  }
#else
  return exp2_negative<kDegree>(x);
#endif
}

// The same operations on one number, so that the bits agree with a lane.
inline float exp2_negative(float x) { return first_lane(exp2_negative(set1(x))); }

// 1 / (1 + e^-x). Beyond +-87 as at it: 1, and 2^-125.
inline Vec sigmoid(Vec x) {
#if defined(__AVX512F__)
  // 2^(n + f) for n + f = -x log2 e, f exact to twice the precision; the reciprocal from 14 bits by one step of Newton's.
  const Vec t = min(set1(87), max(set1(-87), x));  // in this order NaN passes through
  const Vec n = round(t * set1(-kLog2e));
  const Vec f = fma(t, set1(-1.92596299e-8f), fma(t, set1(-kLog2e), set1(0) - n));
  const __m512 d = _mm512_add_ps(_mm512_set1_ps(1.0f), _mm512_scalef_ps(exp2_fraction(f).v, n.v)), r = _mm512_rcp14_ps(d);
  return {_mm512_fmadd_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(1.0f)), r)};
#else
  return set1(1) / (set1(1) + exp(set1(0) - x));
#endif
}

// Below 0.55 a rational approximation (continued fraction of tanh, seven levels), elsewhere 1 - 2 / (e^2x + 1).
inline Vec tanh(Vec x) {
  const Vec z = x * x;
  const Vec small = x * fma(z, fma(z, z + set1(378), set1(17325)), set1(135135)) /
                    fma(z, fma(z, fma(z, set1(28), set1(3150)), set1(62370)), set1(135135));
  const Vec large = set1(1) - set1(2) / (exp(x + x) + set1(1));
  return select_less(abs(x), set1(0.55f), small, large);
}

template <typename F>
inline Vec each_lane(Vec x, F f) {
  alignas(64) float lanes[W];
  store(lanes, x);
  for (float& lane : lanes) lane = f(lane);
  return load(lanes);
}

inline Vec silu(Vec x) { return x * sigmoid(x); }
inline Vec gelu(Vec x) {
  return set1(0.5f) * x * (set1(1) + each_lane(x * set1(0.70710678f), [](float t) { return std::erf(t); }));
}
inline Vec gelu_tanh(Vec x) {
  const Vec inner = set1(0.7978845608f) * (x + set1(0.044715f) * x * x * x);
  return set1(0.5f) * x * (set1(1) + tanh(inner));
}
inline Vec relu(Vec x) { return max(set1(0), x); }
inline Vec relu2(Vec x) { return relu(x) * relu(x); }
inline Vec quick_gelu(Vec x) { return x * sigmoid(set1(1.702f) * x); }
inline Vec softplus(Vec x) {
  return each_lane(x, [](float t) { return t > 0 ? t + std::log1p(std::exp(-t)) : std::log1p(std::exp(t)); });
}

}  // namespace trivium::TRIVIUM_TIER
