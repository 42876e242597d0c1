// The vector type of kernel.h on AVX2 with FMA and F16C: 16 lanes in two registers.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "layout.h"

namespace trivium::linear {

struct Avx2Simd {
  struct I32 { __m256i a, b; };
  struct F32 { __m256 a, b; };
  using Codes = I32;
  struct SignedCodes { I32 magnitude, value; };
  using WholeSum = I32;
  struct NarrowSum { __m256i a, b; };  // of a group with 4-bit codes: int16 of pairs
  static constexpr int kRows = 4;
  static constexpr int kFloatRows = 3;

  static I32 zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static I32 splat_whole(const int32_t* p) {
    const __m256i v = _mm256_set1_epi32(*p);
    return {v, v};
  }

  static Codes load_codes(const uint8_t* p) { return {load32(p), load32(p + 32)}; }
  static void load_nibbles(const uint8_t* p, Codes& low, Codes& high) {
    const __m256i mask = _mm256_set1_epi8(15);
    const Codes both = load_codes(p);
    low = {_mm256_and_si256(both.a, mask), _mm256_and_si256(both.b, mask)};
    high = {_mm256_and_si256(_mm256_srli_epi16(both.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(both.b, 4), mask)};
  }
  static void begin(WholeSum& sum, const I32& start) { sum = start; }
  static I32 end(const WholeSum& sum, const I32&) { return sum; }
  // Sums of 8 pairs, at most 30,480, stay within int16, and are widened once.
  static void begin(NarrowSum& sum, const I32&) { sum = {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static I32 end(const NarrowSum& sum, const I32& start) { return {add_pairs(start.a, sum.a), add_pairs(start.b, sum.b)}; }
  static void dot(NarrowSum& sum, const Codes& w, const int8_t* x) {
    const __m256i quad = splat_quad(x);
    sum.a = in_order(_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, quad)));
    sum.b = in_order(_mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, quad)));
  }
  // Codes below 128: a pair's sum stays within int16.
  static void dot(I32& sum, const Codes& w, const int8_t* x) {
    const __m256i quad = splat_quad(x);
    sum = {add_pairs(sum.a, _mm256_maddubs_epi16(w.a, quad)), add_pairs(sum.b, _mm256_maddubs_epi16(w.b, quad))};
  }

  static I32 start_signed(const int32_t*) { return zero(); }
  static SignedCodes load_signed(const uint8_t* p) {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(kZero8));
    const Codes codes = load_codes(p);
    const I32 w = {_mm256_xor_si256(codes.a, flip), _mm256_xor_si256(codes.b, flip)};
    return {{_mm256_abs_epi8(w.a), _mm256_abs_epi8(w.b)}, w};
  }
  // |w| <= 128 and |x| <= 127: a pair's sum stays within int16.
  static void dot(I32& sum, const SignedCodes& w, const int8_t* x) {
    const __m256i quad = splat_quad(x);
    sum = {add_pairs(sum.a, _mm256_maddubs_epi16(w.magnitude.a, _mm256_sign_epi8(quad, w.value.a))),
           add_pairs(sum.b, _mm256_maddubs_epi16(w.magnitude.b, _mm256_sign_epi8(quad, w.value.b)))};
  }

  static I32 shift_left(const I32& v, const int32_t* count) {
    const __m256i n = _mm256_set1_epi32(*count);
    return {_mm256_sllv_epi32(v.a, n), _mm256_sllv_epi32(v.b, n)};
  }
  static F32 to_float(const I32& v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
  static F32 zero_float() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F32 splat(const float* p) {
    const __m256 v = _mm256_broadcast_ss(p);
    return {v, v};
  }
  static F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(const F32& v, float* p) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
  }
  static F32 load_float16(const uint8_t* p) { return {_mm256_cvtph_ps(load16(p)), _mm256_cvtph_ps(load16(p + 16))}; }
  static void load_bfloat16_pairs(const uint8_t* p, F32& even, F32& odd) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const I32 pairs = load_codes(p);
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(pairs.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(pairs.b, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(pairs.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(pairs.b, mask))};
  }
  static F32 load_uint8(const uint8_t* p) { return to_float({_mm256_cvtepu8_epi32(load8(p)), _mm256_cvtepu8_epi32(load8(p + 8))}); }
  static F32 load_int8(const uint8_t* p) { return to_float({_mm256_cvtepi8_epi32(load8(p)), _mm256_cvtepi8_epi32(load8(p + 8))}); }
  static F32 add(const F32& x, const F32& y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F32 mul(const F32& x, const F32& y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F32 negate(const F32& x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(x.a, sign), _mm256_xor_ps(x.b, sign)};
  }
  static F32 mul_add(const F32& x, const F32& y, const F32& z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }

  static uint32_t largest_bits(const float* x, int64_t n) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 8) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
      largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, mask));
    }
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
  }
  static void round_group(const float* x, float inverse, int8_t* q, int32_t sums[2]) {
    const __m256 factor = _mm256_set1_ps(inverse);
    for (int half = 0; half < 2; ++half) {
      const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * half), factor));
      const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * half + 8), factor));
      const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
      const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
      _mm_store_si128(reinterpret_cast<__m128i*>(q + 16 * half), bytes);
      sums[half] = sum_lanes(_mm256_add_epi32(low, high));
    }
  }

private:
  static __m256i load32(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  static __m128i load16(const uint8_t* p) { return _mm_load_si128(reinterpret_cast<const __m128i*>(p)); }
  static __m128i load8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  static __m256i splat_quad(const int8_t* x) {
    int32_t quad;
    std::memcpy(&quad, x, 4);
    return _mm256_set1_epi32(quad);
  }
  static __m256i add_pairs(__m256i sum, __m256i pairs) {
    return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
  }
  // Keeps the compiler from adding all products at once, which would not fit the registers.
  static __m256i in_order(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
  }
  static int32_t sum_lanes(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
  }
};

}  // namespace trivium::linear
