// Vec: W float32 lanes of the instruction set that the including file is built for. Everything here and in the files that build on
// it lives in a namespace named after that instruction set (TRIVIUM_TIER), so that variants can't be mixed by the linker.
#pragma once

#include <cstdint>
#include <cstring>

#if !defined(TRIVIUM_TIER)
#error "define TRIVIUM_TIER (portable, avx2, avx512) before including simd.h"
#endif

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace trivium::TRIVIUM_TIER {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float bf16_to_float(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }

// Rounded to nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#if defined(__F16C__)

inline float f16_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t float_to_f16(float value) { return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)); }

#else

inline float f16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  // A power of two brings the exponent into place, and subnormal halves into normal floats.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000u) {  // subnormal: the addition rounds at the last place of a half
    return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | (magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u) >> 13);
}

#endif

#if defined(__AVX512F__)

struct Vec {
  static constexpr int W = 16;
  __m512 v;
};
struct Pair {
  Vec even, odd;
};

inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Vec load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store_n(float* p, Vec x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec round(Vec x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a < b ? x : y, lane by lane.
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// 2^n for whole n in -126..127.
inline Vec exp2_whole(Vec n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}
inline Vec abs(Vec x) { return {_mm512_abs_ps(x.v)}; }
// The bits of consecutive pairs of bfloat16 numbers, as W even and W odd ones.
inline Pair load_pairs_bf16(const uint16_t* p) {
  const __m512i both = _mm512_loadu_si512(p);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
inline Vec load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline __m256 low_half(Vec x) { return _mm512_castps512_ps256(x.v); }
inline __m256 high_half(Vec x) { return _mm512_extractf32x8_ps(x.v, 1); }
inline float first_lane(Vec x) { return _mm512_cvtss_f32(x.v); }

#elif defined(__AVX2__)

struct Vec {
  static constexpr int W = 8;
  __m256 v;
};
struct Pair {
  Vec even, odd;
};

inline __m256i first(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
inline Vec load_n(const float* p, int64_t n) { return {_mm256_maskload_ps(p, first(n))}; }
inline void store_n(float* p, Vec x, int64_t n) { _mm256_maskstore_ps(p, first(n), x.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec round(Vec x) { return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) { return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))}; }
inline Vec exp2_whole(Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23))};
}
inline Vec abs(Vec x) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.v)}; }
inline Pair load_pairs_bf16(const uint16_t* p) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(both, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
inline Vec load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline float first_lane(Vec x) { return _mm256_cvtss_f32(x.v); }

#else

using Lanes = float __attribute__((vector_size(16)));
using IntLanes = int32_t __attribute__((vector_size(16)));

struct Vec {
  static constexpr int W = 4;
  Lanes v;
};
struct Pair {
  Vec even, odd;
};

inline Vec set1(float x) { return {Lanes{x, x, x, x}}; }
inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x.v, p, sizeof(x.v));
  return x;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x.v, sizeof(x.v)); }
inline Vec load_n(const float* p, int64_t n) {
  Vec x = set1(0);
  for (int64_t i = 0; i < n; ++i) x.v[i] = p[i];
  return x;
}
inline void store_n(float* p, Vec x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = x.v[i];
}
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }  // two roundings: not every machine has a fused one
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  const IntLanes mask = a.v < b.v;
  return {reinterpret_cast<Lanes>((mask & reinterpret_cast<IntLanes>(x.v)) | (~mask & reinterpret_cast<IntLanes>(y.v)))};
}
inline Vec min(Vec a, Vec b) { return select_less(a, b, a, b); }
inline Vec max(Vec a, Vec b) { return select_less(b, a, a, b); }
// For |x| < 2^22: adding and taking away 1.5 * 2^23 leaves no room for a fraction.
inline Vec round(Vec x) {
  const Vec magic = set1(12582912.0f);
  return (x + magic) - magic;
}
inline Vec exp2_whole(Vec n) {
  const IntLanes exponent = __builtin_convertvector(n.v, IntLanes) + 127;
  return {reinterpret_cast<Lanes>(exponent << 23)};
}
inline Vec abs(Vec x) { return {reinterpret_cast<Lanes>(reinterpret_cast<IntLanes>(x.v) & 0x7fffffff)}; }
inline Pair load_pairs_bf16(const uint16_t* p) {
  Pair pair;
  for (int i = 0; i < 4; ++i) {
    pair.even.v[i] = bf16_to_float(p[2 * i]);
    pair.odd.v[i] = bf16_to_float(p[2 * i + 1]);
  }
  return pair;
}
inline Vec load_f16(const uint16_t* p) {
  return {Lanes{f16_to_float(p[0]), f16_to_float(p[1]), f16_to_float(p[2]), f16_to_float(p[3])}};
}
inline float first_lane(Vec x) { return x.v[0]; }

#endif

inline constexpr int W = Vec::W;

// x in the lanes [low, high), -infinity in the others.
inline Vec between(Vec x, int64_t low, int64_t high) {
  static constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec lane = load(kLanes), none = set1(-__builtin_inff());
  x = select_less(lane, set1(static_cast<float>(high)), x, none);
  return select_less(lane, set1(static_cast<float>(low)), none, x);
}

// Sum and maximum of the lanes, halving: a fixed order.
#if defined(__AVX2__)

// The upper half of the lanes is folded onto the lower one until one is left.
template <typename F>
inline float fold(__m256 x, F f) {
  __m128 y = f(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = f(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(f(y, _mm_movehdup_ps(y)));
}
#if defined(__AVX512F__)
inline float reduce_add(Vec x) {
  return fold(_mm256_add_ps(low_half(x), high_half(x)), [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
inline float reduce_max(Vec x) {
  return fold(_mm256_max_ps(low_half(x), high_half(x)), [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
#else
inline float reduce_add(Vec x) {
  return fold(x.v, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
inline float reduce_max(Vec x) {
  return fold(x.v, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
#endif

#else

inline float reduce_add(Vec x) {
  alignas(64) float lanes[W];
  store(lanes, x);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

inline float reduce_max(Vec x) {
  alignas(64) float lanes[W];
  store(lanes, x);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] < lanes[i + half] ? lanes[i + half] : lanes[i];
  }
  return lanes[0];
}

#endif

// y[i] = f(x[i], ...) over n numbers; lanes beyond n are zero on input and not stored.
template <typename F, typename... Inputs>
inline void map(float* y, int64_t n, F f, const Inputs*... x) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(y + i, f(load(x + i)...));
  if (i < n) store_n(y + i, f(load_n(x + i, n - i)...), n - i);
}

// Sum of f(x[i]) over n numbers in a fixed order; f(0) must be 0.
template <typename F>
inline float sum(const float* x, int64_t n, F f) {
  Vec a = set1(0), b = set1(0);
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    a = a + f(load(x + i));
    b = b + f(load(x + i + W));
  }
  for (; i + W <= n; i += W) a = a + f(load(x + i));
  if (i < n) b = b + f(load_n(x + i, n - i));
  return reduce_add(a + b);
}

}  // namespace trivium::TRIVIUM_TIER
