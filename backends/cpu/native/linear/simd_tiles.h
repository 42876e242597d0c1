// The vector type of amx_kernel.h: AVX-512 with VNNI, and what makes bfloat16 for tiles of packed codes and of quantised rows.
#pragma once

#include "simd_avx512.h"

namespace trivium::linear {

struct TileSimd : Avx512Simd<true> {
  // A line of two nibbles a byte, 8 inputs of 16 outputs, as four lines of pairs of bfloat16, in the order of QuantisedRows; minus the
  // zero point if signed. One look-up each: of a word it sees the lowest 5 bits, and the table holds every number twice.
  template <bool kSigned>
  static void widen_nibbles(const uint8_t* from, uint8_t* to) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(kSigned ? kSmall : kSmall + 16)));
    const __m512i words = load_codes(from);
    const auto put = [&](int line, __m512i index) { _mm512_store_si512(to + line * kLine, _mm512_permutexvar_epi16(index, table)); };
    put(0, words);
    put(1, _mm512_srli_epi16(words, 4));
    put(2, _mm512_srli_epi16(words, 8));
    put(3, _mm512_srli_epi16(words, 12));
  }

  // The same of two lines of bytes. A float32 of 8 significant bits ends in 16 zeros.
  template <bool kSigned>
  static void widen_bytes(const uint8_t* from, uint8_t* to) {
#pragma GCC unroll 2
    for (int quad = 0; quad < 2; ++quad) {
      __m512i codes = load_codes(from + quad * kLine);
      if constexpr (kSigned) codes = _mm512_xor_si512(codes, _mm512_set1_epi8(static_cast<char>(kZero8)));
      const auto byte = [&](int i) {
        const __m512i top = i == 3 ? codes : _mm512_slli_epi32(codes, 24 - 8 * i);
        return _mm512_castps_si512(to_float(kSigned ? _mm512_srai_epi32(top, 24) : _mm512_srli_epi32(top, 24)));
      };
      const auto pair = [&](int low, int high) { return _mm512_or_si512(_mm512_srli_epi32(byte(low), 16), byte(high)); };
      _mm512_store_si512(to + quad * kLine, pair(0, 2));
      _mm512_store_si512(to + (2 + quad) * kLine, pair(1, 3));
    }
  }

  // The codes of a quantised group times `multiplier`, a power of two, in the order of QuantisedRows.
  static void widen_group(const int8_t* q, float multiplier, uint8_t* to) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    const __m256i codes = _mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(q)), order);
    const auto half = [&](__m128i bytes) {
      const F32 value = mul(to_float(_mm512_cvtepi8_epi32(bytes)), _mm512_set1_ps(multiplier));
      return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(value), 16));
    };
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), half(_mm256_castsi256_si128(codes)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + 32), half(_mm256_extracti128_si256(codes, 1)));
  }

  static I32 load_whole(const int32_t* p) { return _mm512_load_si512(p); }
  static I32 add_whole(I32 a, I32 b) { return _mm512_add_epi32(a, b); }

private:
  // -8 to 7, then 0 to 15, in bfloat16.
  alignas(32) static constexpr uint16_t kSmall[] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
};

}  // namespace trivium::linear
