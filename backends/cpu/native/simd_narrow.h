// Numbers of 8 and 16 bits over Vec: rounding floats to them, and sums of products of pairs, for pages of keys and values.
#pragma once

#include "simd.h"

namespace trivium::TRIVIUM_TIER {

// Ints: W int32 lanes. Int16Pairs: W pairs of int16. dot(sum, x, two): sum + x.first * two[0] + x.second * two[1] in each lane, exactly.
// Bf16Pairs likewise; its sums flush subnormal numbers, and round after each product.
#if defined(__AVX512F__)

struct Ints {
  __m512i v;
};
struct Int16Pairs {
  __m512i v;
};
inline int32_t two_numbers(const void* two) {
  int32_t bits;
  std::memcpy(&bits, two, sizeof(bits));
  return bits;
}
inline Ints zero_ints() { return {_mm512_setzero_si512()}; }
inline void load_sum(Ints& x, const float* p) { x.v = _mm512_loadu_si512(p); }
inline void store(float* p, Ints x) { _mm512_storeu_si512(p, x.v); }
inline Vec to_float(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Int16Pairs load_pairs_i8(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline Vec load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Int16Pairs first_of_pairs(Int16Pairs x) { return {_mm512_and_si512(x.v, _mm512_set1_epi32(0xffff))}; }
inline Ints dot(Ints sum, Int16Pairs x, const int16_t* two) {
  const __m512i factor = _mm512_set1_epi32(two_numbers(two));
#if defined(__AVX512VNNI__)
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(x.v), "v"(factor));  // GCC 12 keeps the sums of its intrinsic in memory
  return sum;
#else
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(x.v, factor))};
#endif
}
#if defined(__AVX512BF16__)
struct Bf16Pairs {
  __m512i v;
};
inline Bf16Pairs load_bf16_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bf16Pairs first_of_pairs(Bf16Pairs x) { return {_mm512_and_si512(x.v, _mm512_set1_epi32(0xffff))}; }
inline Vec dot(Vec sum, Bf16Pairs x, const uint16_t* two) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)x.v, (__m512bh)_mm512_set1_epi32(two_numbers(two)))};
}
#endif
inline Vec load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store_bf16(uint16_t* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
// The same for numbers that no page holds: subnormal ones may become 0.
inline void round_bf16(uint16_t* p, Vec x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x.v));
#else
  store_bf16(p, x);
#endif
}
inline void store_f16(uint16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Rounded to nearest, ties to even, and held within the type.
inline void store_i16(int16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v)));
}
inline void store_i8(int8_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

#else

// One number at a time; `convert` rounds it.
template <typename T, typename F>
inline void store_each(T* p, Vec x, F convert) {
  alignas(64) float lanes[W];
  store(lanes, x);
  for (int i = 0; i < W; ++i) p[i] = convert(lanes[i]);
}
inline void store_bf16(uint16_t* p, Vec x) { store_each(p, x, float_to_bf16); }
inline void round_bf16(uint16_t* p, Vec x) { store_bf16(p, x); }

#if defined(__AVX2__)

struct Ints {
  __m256i v;
};
struct Int16Pairs {
  __m256i v;
};
inline Ints zero_ints() { return {_mm256_setzero_si256()}; }
inline void load_sum(Ints& x, const float* p) { x.v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store(float* p, Ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v); }
inline Vec to_float(Ints x) { return {_mm256_cvtepi32_ps(x.v)}; }
inline Int16Pairs load_pairs_i8(const int8_t* p) { return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline Vec load_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline Int16Pairs first_of_pairs(Int16Pairs x) { return {_mm256_and_si256(x.v, _mm256_set1_epi32(0xffff))}; }
inline Ints dot(Ints sum, Int16Pairs x, const int16_t* two) {
  int32_t bits;
  std::memcpy(&bits, two, sizeof(bits));
  return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(x.v, _mm256_set1_epi32(bits)))};
}
inline Vec load_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline void store_f16(uint16_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline __m128i packed_i16(Vec x) {
  const __m256i whole = _mm256_cvtps_epi32(x.v);
  return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
}
inline void store_i16(int16_t* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed_i16(x)); }
inline void store_i8(int8_t* p, Vec x) {
  const __m128i words = packed_i16(x);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

#else

struct Ints {
  IntLanes v;
};
struct Int16Pairs {
  IntLanes first, second;
};
inline Ints zero_ints() { return {IntLanes{0, 0, 0, 0}}; }
inline void load_sum(Ints& x, const float* p) { std::memcpy(&x.v, p, sizeof(x.v)); }
inline void store(float* p, Ints x) { std::memcpy(p, &x.v, sizeof(x.v)); }
inline Vec to_float(Ints x) { return {__builtin_convertvector(x.v, Lanes)}; }
inline Int16Pairs load_pairs_i8(const int8_t* p) { return {IntLanes{p[0], p[2], p[4], p[6]}, IntLanes{p[1], p[3], p[5], p[7]}}; }
inline Vec load_i8(const int8_t* p) {
  return {Lanes{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])}};
}
inline Int16Pairs first_of_pairs(Int16Pairs x) { return {x.first, IntLanes{0, 0, 0, 0}}; }
inline Ints dot(Ints sum, const Int16Pairs& x, const int16_t* two) { return {sum.v + x.first * two[0] + x.second * two[1]}; }
inline Vec load_bf16(const uint16_t* p) {
  return {Lanes{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])}};
}
inline void store_f16(uint16_t* p, Vec x) { store_each(p, x, float_to_f16); }
// A number beyond the type is held within it, one that is undefined becomes 0 (as the products with its scale are undefined anyway).
template <typename T>
inline void store_whole(T* p, Vec x, float limit) {
  store_each(p, round(min(set1(limit), max(set1(-limit), x))), [](float v) { return v == v ? static_cast<T>(v) : T{0}; });
}
inline void store_i16(int16_t* p, Vec x) { store_whole(p, x, 32767.0f); }
inline void store_i8(int8_t* p, Vec x) { store_whole(p, x, 127.0f); }

#endif
#endif

// Sums on their way to memory and back: whole numbers keep their bits.
inline void load_sum(Vec& x, const float* p) { x = load(p); }

// Two vectors of numbers, one behind the other.
inline void round_bf16(uint16_t* p, Vec x, Vec next) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(next.v, x.v));
#else
  round_bf16(p, x);
  round_bf16(p + W, next);
#endif
}

}  // namespace trivium::TRIVIUM_TIER
