// Row-wise kernels over Vec.
#pragma once

#include "kernels.h"
#include "simd_math.h"

namespace trivium::TRIVIUM_TIER {

inline void add(const float* a, const float* b, float* y, int64_t n) {
  map(y, n, [](Vec s, Vec t) { return s + t; }, a, b);
}

inline void mul(const float* a, const float* b, float* y, int64_t n) {
  map(y, n, [](Vec s, Vec t) { return s * t; }, a, b);
}

inline void scale(const float* x, float factor, float* y, int64_t n) {
  map(y, n, [f = set1(factor)](Vec s) { return s * f; }, x);
}

inline Vec capped(Vec x, Vec cap) { return cap * tanh(x / cap); }

inline void softcap(const float* x, float cap, float* y, int64_t n) {
  map(y, n, [c = set1(cap)](Vec s) { return capped(s, c); }, x);
}

// Calls use(f) with the function of `kind`.
template <typename Use>
inline void with_activation(Activation kind, Use use) {
  switch (kind) {
    case Activation::silu: return use([](Vec x) { return silu(x); });
    case Activation::gelu: return use([](Vec x) { return gelu(x); });
    case Activation::gelu_tanh: return use([](Vec x) { return gelu_tanh(x); });
    case Activation::relu: return use([](Vec x) { return relu(x); });
    case Activation::relu2: return use([](Vec x) { return relu2(x); });
    case Activation::quick_gelu: return use([](Vec x) { return quick_gelu(x); });
    case Activation::sigmoid: return use([](Vec x) { return sigmoid(x); });
    case Activation::tanh: return use([](Vec x) { return tanh(x); });
    case Activation::softplus: return use([](Vec x) { return softplus(x); });
  }
}

inline void activation(const float* x, Activation kind, float* y, int64_t n) {
  with_activation(kind, [&](auto f) { map(y, n, f, x); });
}

inline void gated(const float* gate, const float* up, const Gate& how, float* y, int64_t n) {
  if (how.limit < 0 && how.alpha == 1 && how.up_offset == 0) {
    return with_activation(how.kind, [&](auto f) { map(y, n, [=](Vec g, Vec u) { return f(g) * u; }, gate, up); });
  }
  const Vec limit = set1(how.limit < 0 ? INFINITY : how.limit), floor = set1(how.limit < 0 ? -INFINITY : -how.limit);
  const Vec offset = set1(how.up_offset);
  auto apply = [&](auto f) {
    map(y, n, [=](Vec g, Vec u) { return f(min(limit, g)) * (min(limit, max(floor, u)) + offset); }, gate, up);
  };
  if (how.alpha != 1) {
    apply([alpha = set1(how.alpha)](Vec g) { return g * sigmoid(alpha * g); });
  } else {
    with_activation(how.kind, apply);
  }
}

inline void rms_norm(const float* x, const float* weight, float eps, float offset, float* y, int64_t n) {
  const float mean = sum(x, n, [](Vec v) { return v * v; }) / static_cast<float>(n);
  const Vec factor = set1(1.0f / std::sqrt(mean + eps));
  if (weight == nullptr) return map(y, n, [=](Vec v) { return v * factor; }, x);
  map(y, n, [=, shift = set1(offset)](Vec v, Vec w) { return v * factor * (shift + w); }, x, weight);
}

inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, float* y, int64_t n) {
  const Vec mean = set1(sum(x, n, [](Vec v) { return v; }) / static_cast<float>(n));
  map(y, n, [=](Vec v) { return v - mean; }, x);
  const float variance = sum(y, n, [](Vec v) { return v * v; }) / static_cast<float>(n);
  const Vec factor = set1(1.0f / std::sqrt(variance + eps));
  map(y, n, [=](Vec v) { return v * factor; }, y);
  if (weight != nullptr) mul(y, weight, y, n);
  if (bias != nullptr) add(y, bias, y, n);
}

inline void rope(const float* x, const float* cosine, const float* sine, int64_t half, bool interleaved, float* y, int64_t n) {
  if (interleaved) {
    int64_t i = 0;
#if defined(__AVX512F__)
    // Neighbours change places; every sine comes twice, first with a minus.
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512 sign = _mm512_castsi512_ps(_mm512_set1_epi64(0x80000000));
    for (; i + W / 2 <= half; i += W / 2) {
      const Vec a = load(x + 2 * i), b = {_mm512_permute_ps(a.v, 0xb1)};
      const Vec c = {_mm512_permutexvar_ps(low, _mm512_castps256_ps512(_mm256_loadu_ps(cosine + i)))};
      const __m512 s = _mm512_permutexvar_ps(low, _mm512_castps256_ps512(_mm256_loadu_ps(sine + i)));
      store(y + 2 * i, a * c + b * Vec{_mm512_xor_ps(s, sign)});
    }
#endif
    for (; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      y[2 * i] = a * cosine[i] - b * sine[i];
      y[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
  } else {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
      const Vec a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
      store(y + i, a * c - b * s);
      store(y + half + i, b * c + a * s);
    }
    if (i < half) {
      const int64_t count = half - i;
      const Vec a = load_n(x + i, count), b = load_n(x + half + i, count);
      const Vec c = load_n(cosine + i, count), s = load_n(sine + i, count);
      store_n(y + i, a * c - b * s, count);
      store_n(y + half + i, b * c + a * s, count);
    }
  }
  if (y != x) {
    for (int64_t i = 2 * half; i < n; ++i) y[i] = x[i];
  }
}

inline float max_of(const float* x, int64_t n) {
  Vec even = set1(-INFINITY), odd = even;
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    even = max(even, load(x + i));
    odd = max(odd, load(x + i + W));
  }
  if (i + W <= n) {
    even = max(even, load(x + i));
    i += W;
  }
  float best = reduce_max(max(even, odd));
  for (; i < n; ++i) best = best < x[i] ? x[i] : best;
  return best;
}

// Four running sums hide the time that one addition takes; a fixed order.
inline float dot(const float* a, const float* b, int64_t n) {
  Vec sums[4] = {set1(0), set1(0), set1(0), set1(0)};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    for (int64_t k = 0; k < 4; ++k) sums[k] = fma(load(a + i + k * W), load(b + i + k * W), sums[k]);
  }
  for (; i + W <= n; i += W) sums[0] = fma(load(a + i), load(b + i), sums[0]);
  if (i < n) sums[1] = fma(load_n(a + i, n - i), load_n(b + i, n - i), sums[1]);
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

inline void add_scaled(const float* x, float factor, float* y, int64_t n) {
  map(y, n, [f = set1(factor)](Vec s, Vec t) { return fma(s, f, t); }, x, y);
}

inline void add_product(const float* a, const float* b, float* y, int64_t n) {
  map(y, n, [](Vec s, Vec t, Vec u) { return fma(s, t, u); }, a, b, y);
}

inline void exp_of(const float* x, float* y, int64_t n) {
  map(y, n, [](Vec v) { return exp(v); }, x);
}

}  // namespace trivium::TRIVIUM_TIER
