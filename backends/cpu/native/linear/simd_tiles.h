// The vector type of amx_kernel.h: AVX-512 with VNNI, and what moves numbers between packed codes, tiles and vectors.
#pragma once

#include "simd_avx512.h"

namespace trivium::linear {

struct TileSimd : Avx512Simd<true> {
  static I32 load_whole(const int32_t* p) { return _mm512_load_si512(p); }

  // A line of two nibbles a byte as two lines of bytes, low nibbles first; minus the zero point if signed.
  template <bool kSigned>
  static void widen_nibbles(const uint8_t* from, uint8_t* low_to, uint8_t* high_to) {
    Codes low, high;
    load_nibbles(from, low, high);
    if constexpr (kSigned) {
      const __m512i zero = _mm512_set1_epi8(kZero4);
      low = _mm512_sub_epi8(low, zero);
      high = _mm512_sub_epi8(high, zero);
    }
    _mm512_store_si512(low_to, low);
    _mm512_store_si512(high_to, high);
  }

  // A line of bytes; minus the zero point if signed, which turns the highest bit.
  template <bool kSigned>
  static void copy_codes(const uint8_t* from, uint8_t* to) {
    const __m512i codes = load_codes(from);
    _mm512_store_si512(to, kSigned ? _mm512_xor_si512(codes, _mm512_set1_epi8(static_cast<char>(kZero8))) : codes);
  }
};

}  // namespace trivium::linear
