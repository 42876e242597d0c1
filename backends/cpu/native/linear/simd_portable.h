// The vector type of kernel.h in plain C++: 16 lanes in arrays, left to the compiler.
#pragma once

#include <bit>
#include <cstring>

#include "layout.h"
#include "scalar.h"

namespace trivium::linear {

// Whole numbers are held as float32: the sums of a group stay below 2^24 and so are exact, and compilers vectorise them on any
// machine.
struct PortableSimd {
  struct F32 { float lane[16]; };
  using I32 = F32;
  struct Codes { float input[4][16]; };  // the four inputs of a quad, for each output
  using SignedCodes = Codes;
  using WholeSum = I32;
  using NarrowSum = I32;
  static constexpr int kRows = 4;       // rows in registers, integer kernels
  static constexpr int kFloatRows = 4;  // rows in registers, float kernels (two tiles)

  template <class Function>
  static F32 each(Function function) {
    F32 result;
    for (int i = 0; i < 16; ++i) result.lane[i] = function(i);
    return result;
  }

  static I32 zero() { return {}; }
  static I32 splat_whole(const int32_t* p) {
    const auto value = static_cast<float>(*p);
    return each([=](int) { return value; });
  }

  // `width` bits of each byte, from bit `low` up, minus `zero`.
  static Codes take_bits(const uint8_t* p, int low, int width, int zero) {
    uint32_t quads[16];
    std::memcpy(quads, p, sizeof quads);
    Codes codes;
    for (int i = 0; i < 4; ++i) {
      const int shift = 8 * quad_byte(i) + low;
      for (int o = 0; o < 16; ++o) {
        codes.input[i][o] = static_cast<float>(static_cast<int32_t>(quads[o] >> shift & ((1u << width) - 1)) - zero);
      }
    }
    return codes;
  }
  static Codes load_codes(const uint8_t* p) { return take_bits(p, 0, 8, 0); }
  static void load_nibbles(const uint8_t* p, Codes& low, Codes& high) {
    low = take_bits(p, 0, 4, 0);
    high = take_bits(p, 4, 4, 0);
  }
  static void begin(I32& sum, const I32& start) { sum = start; }
  static I32 end(const I32& sum, const I32&) { return sum; }
  static void dot(I32& sum, const Codes& w, const int8_t* x) {
    for (int i = 0; i < 4; ++i) {
      const auto value = static_cast<float>(x[i]);
      for (int o = 0; o < 16; ++o) sum.lane[o] += w.input[i][o] * value;
    }
  }

  // Codes of the whole range, minus kZero8: start() makes up for the form they are multiplied in.
  static I32 start_signed(const int32_t*) { return {}; }
  static SignedCodes load_signed(const uint8_t* p) { return take_bits(p, 0, 8, kZero8); }

  static I32 shift_left(const I32& a, const int32_t* count) {
    const auto factor = static_cast<float>(1 << *count);
    return each([&](int i) { return a.lane[i] * factor; });
  }
  static F32 to_float(const I32& a) { return a; }
  static F32 zero_float() { return {}; }
  static F32 splat(const float* p) { const float v = *p; return each([=](int) { return v; }); }
  static F32 load(const float* p) { return each([=](int i) { return p[i]; }); }
  static void store(const F32& a, float* p) { for (int i = 0; i < 16; ++i) p[i] = a.lane[i]; }
  static F32 load_float16(const uint8_t* p) {
    return each([=](int i) { return from_float16(static_cast<uint16_t>(p[2 * i] | p[2 * i + 1] << 8)); });
  }
  static void load_bfloat16_pairs(const uint8_t* p, F32& even, F32& odd) {
    for (int i = 0; i < 16; ++i) {
      even.lane[i] = from_bfloat16(static_cast<uint16_t>(p[4 * i] | p[4 * i + 1] << 8));
      odd.lane[i] = from_bfloat16(static_cast<uint16_t>(p[4 * i + 2] | p[4 * i + 3] << 8));
    }
  }
  static F32 load_uint8(const uint8_t* p) { return each([=](int i) { return static_cast<float>(p[i]); }); }
  static F32 load_int8(const uint8_t* p) { return each([=](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); }); }
  static F32 add(const F32& a, const F32& b) { return each([&](int i) { return a.lane[i] + b.lane[i]; }); }
  static F32 mul(const F32& a, const F32& b) { return each([&](int i) { return a.lane[i] * b.lane[i]; }); }
  static F32 negate(const F32& a) { return each([&](int i) { return -a.lane[i]; }); }
  static F32 mul_add(const F32& a, const F32& b, const F32& c) {
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }

  // Quantising; see kernel.h.
  static uint32_t largest_bits(const float* x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
    return largest;
  }
  static void round_group(const float* x, float inverse, int8_t* q, int32_t sums[2]) {
    sums[0] = sums[1] = 0;
    for (int i = 0; i < kGroup; ++i) {
      const int32_t value = round_even(x[i] * inverse);
      q[i] = static_cast<int8_t>(value);
      sums[i / 16] += value;
    }
  }

private:
  // Where byte i of a quad is in a word.
  static constexpr int quad_byte(int i) { return std::endian::native == std::endian::little ? i : 3 - i; }
};

}  // namespace trivium::linear
