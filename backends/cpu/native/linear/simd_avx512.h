// The vector type of kernel.h on AVX-512 (F, BW, DQ, VL), with or without VNNI.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own _mm512_undefined_*
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstring>

#include "layout.h"

namespace trivium::linear {

template <bool kVnni>
struct Avx512Simd {
  using I32 = __m512i;
  using F32 = __m512;
  using Codes = __m512i;
  struct Quad { int8_t q[4]; };
  struct SignedCodes { __m512i bytes; __mmask64 negative; };  // VNNI: the codes; else magnitudes and signs
  struct WholeSum { __m512i lanes; };
  struct NarrowSum { __m512i lanes; };  // of a group with 4-bit codes. VNNI: int32; else int16 of pairs
  static constexpr int kRows = 8;
  static constexpr int kFloatRows = 12;

  static I32 zero() { return _mm512_setzero_si512(); }
  static I32 splat_whole(const int32_t* p) { return _mm512_set1_epi32(*p); }
  static Codes load_codes(const uint8_t* p) { return _mm512_load_si512(p); }
  static void load_nibbles(const uint8_t* p, Codes& low, Codes& high) {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i both = load_codes(p);
    low = _mm512_and_si512(both, mask);
    high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
  }
  static void begin(WholeSum& sum, I32 start) { sum.lanes = start; }
  static I32 end(WholeSum sum, I32) { return sum.lanes; }
  // Sums of 8 pairs, at most 30,480, stay within int16, and are widened once.
  static void begin(NarrowSum& sum, I32 start) { sum.lanes = kVnni ? start : zero(); }
  static I32 end(NarrowSum sum, I32 start) { return kVnni ? sum.lanes : add_pairs(start, sum.lanes); }
  static void dot(NarrowSum& sum, Codes w, const int8_t* x) {
    if constexpr (kVnni) dot(sum.lanes, w, x);
    else sum.lanes = in_order(_mm512_add_epi16(sum.lanes, _mm512_maddubs_epi16(w, splat_quad(x))));
  }
  static void dot(WholeSum& sum, Codes w, const int8_t* x) { dot(sum.lanes, w, x); }
  static void dot(WholeSum& sum, SignedCodes w, const int8_t* x) { dot(sum.lanes, w, x); }
  static void dot(I32& sum, Codes w, const int8_t* x) {
    if constexpr (kVnni) {  // in this order, and without a broadcast into a register first
      asm volatile("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const Quad*>(x)));
    } else {  // codes below 128: a pair's sum stays within int16
      sum = add_pairs(sum, _mm512_maddubs_epi16(w, splat_quad(x)));
    }
  }

  // The same of a quad that serves several dots (VNNI).
  static I32 splat_inputs(const int8_t* x) { return splat_quad(x); }
  static void dot_inputs(I32& sum, Codes w, I32 x) { asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }
  static void store_codes(Codes w, uint8_t* p) { _mm512_store_si512(p, w); }

  // A byte an output, in both words of its lane; in all four bytes; and 64 bytes step * code + offset, which must fit their bytes.
  static I32 splat_words(const uint8_t* p) { return spread(p, _mm512_set1_epi32(static_cast<int>(0x80008000u))); }
  static I32 splat_bytes(const uint8_t* p) { return spread(p, zero()); }
  static Codes scale_bytes(Codes w, I32 step, I32 offset) { return _mm512_add_epi8(_mm512_mullo_epi16(w, step), offset); }

  static I32 start_signed(const int32_t* p) {
    if constexpr (kVnni) return splat_whole(p);
    else return zero();
  }
  static SignedCodes load_signed(const uint8_t* p) {
    if constexpr (kVnni) {
      return {load_codes(p), 0};
    } else {
      const __m512i w = _mm512_xor_si512(load_codes(p), _mm512_set1_epi8(static_cast<char>(kZero8)));
      return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
    }
  }
  static void dot(I32& sum, SignedCodes w, const int8_t* x) {
    if constexpr (kVnni) {
      dot(sum, w.bytes, x);
    } else {  // |w| <= 128 and |x| <= 127: a pair's sum stays within int16
      const __m512i quad = splat_quad(x);
      sum = add_pairs(sum, _mm512_maddubs_epi16(w.bytes, _mm512_mask_sub_epi8(quad, w.negative, zero(), quad)));
    }
  }

  static I32 shift_left(I32 a, const int32_t* count) { return _mm512_sllv_epi32(a, _mm512_set1_epi32(*count)); }
  static F32 to_float(I32 a) { return _mm512_cvtepi32_ps(a); }
  static F32 zero_float() { return _mm512_setzero_ps(); }
  static F32 splat(const float* p) { return _mm512_set1_ps(*p); }
  static F32 load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(F32 a, float* p) { _mm512_storeu_ps(p, a); }
  static F32 load_float16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p))); }
  static void load_bfloat16_pairs(const uint8_t* p, F32& even, F32& odd) {
    const __m512i pairs = load_codes(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static F32 load_uint8(const uint8_t* p) { return to_float(_mm512_cvtepu8_epi32(load16(p))); }
  static F32 load_int8(const uint8_t* p) { return to_float(_mm512_cvtepi8_epi32(load16(p))); }
  static F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
  static F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
  static F32 negate(F32 a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static F32 mul_add(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }

  // The largest magnitude of n numbers, whole groups, as its bits.
  static uint32_t largest_bits(const float* x, int64_t n) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    __m512i low = zero(), high = zero();
    for (int64_t i = 0; i < n; i += 32) {
      low = _mm512_max_epu32(low, _mm512_and_si512(_mm512_loadu_si512(x + i), mask));
      high = _mm512_max_epu32(high, _mm512_and_si512(_mm512_loadu_si512(x + i + 16), mask));
    }
    return _mm512_reduce_max_epu32(_mm512_max_epu32(low, high));
  }
  static void round_group(const float* x, float inverse, int8_t* q, int32_t sums[2]) {
    const auto half = [&](int i) {
      return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(load(x + 16 * i), _mm512_set1_ps(inverse))));
    };
    const __m256i codes = _mm256_inserti128_si256(_mm256_castsi128_si256(half(0)), half(1), 1);
    _mm256_store_si256(reinterpret_cast<__m256i*>(q), codes);
    const __m256i sum8 = _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80))), _mm256_setzero_si256());
    const __m256i sum16 = _mm256_add_epi32(sum8, _mm256_shuffle_epi32(sum8, 0x4e));  // of codes + 128
    sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(sum16)) - 16 * 128;
    sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(sum16, 1)) - 16 * 128;
  }
  // `pairs` pairs of groups of a part at once, and zeros behind them; the sum of each group, and that of all.
  static int32_t round_part(const float* x, int64_t pairs, float inverse, int8_t* q, float* sums) {
    const __m512 factor = _mm512_set1_ps(inverse);
    // Packing leaves quads of four vectors side by side in a lane: a lane's first half belongs to the first group.
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bias = _mm512_set1_epi8(-128);
    __m512i halves[kPart / (2 * kGroup)];  // of lanes: sums of 8 codes + 128
    for (int p = 0; p < kPart / (2 * kGroup); ++p, x += 2 * kGroup, q += 2 * kGroup) {
      __m512i codes = zero();
      if (p < pairs) {
        const auto whole = [&](int i) { return _mm512_cvtps_epi32(_mm512_mul_ps(load(x + 16 * i), factor)); };
        codes = _mm512_packs_epi16(_mm512_packs_epi32(whole(0), whole(1)), _mm512_packs_epi32(whole(2), whole(3)));
      }
      _mm512_store_si512(q, _mm512_permutexvar_epi32(in_order, codes));
      halves[p] = _mm512_sad_epu8(_mm512_xor_si512(codes, bias), zero());
    }
    const __m512i first = _mm512_or_si512(halves[0], _mm512_slli_epi64(halves[1], 32)), last = _mm512_or_si512(halves[2], _mm512_slli_epi64(halves[3], 32));
    const __m512i pairs_of_lanes = _mm512_add_epi32(_mm512_shuffle_i64x2(first, last, 0x44), _mm512_shuffle_i64x2(first, last, 0xee));
    const __m512i lanes = _mm512_add_epi32(pairs_of_lanes, _mm512_shuffle_i64x2(pairs_of_lanes, pairs_of_lanes, 0xb1));
    const __m512i by_group = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 0, 0, 0, 0, 0, 0, 0, 0), lanes);
    const __m256i whole = _mm256_sub_epi32(_mm512_castsi512_si256(by_group), _mm256_set1_epi32(kGroup * 128));
    _mm256_storeu_ps(sums, _mm256_cvtepi32_ps(whole));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
  }

private:
  // Byte i of 16 in the four bytes of lane i, but for those that `none` marks by their highest bit: they become 0.
  static I32 spread(const uint8_t* p, I32 none) {
    const __m512i four = _mm512_set1_epi32(0x01010101);
    const __m512i lanes = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), four);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load16(p)), _mm512_or_si512(lanes, none));
  }
  static __m128i load16(const uint8_t* p) { return _mm_load_si128(reinterpret_cast<const __m128i*>(p)); }
  static __m512i splat_quad(const int8_t* x) {
    int32_t quad;
    std::memcpy(&quad, x, 4);
    return _mm512_set1_epi32(quad);
  }
  static I32 add_pairs(I32 sum, __m512i pairs) {
    return in_order(_mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))));
  }
  // Keeps the compiler from adding all products at once, which would not fit the registers.
  static __m512i in_order(__m512i sum) {
    asm("" : "+v"(sum));
    return sum;
  }
};

}  // namespace trivium::linear
