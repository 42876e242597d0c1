// The vector type of kernel.h on aarch64 with the dot product extension: 16 lanes in four registers.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "layout.h"

namespace trivium::linear {

struct NeonSimd {
  struct I32 { int32x4_t v[4]; };
  struct F32 { float32x4_t v[4]; };
  struct Codes { int8x16_t v[4]; };
  struct SignedCodes : Codes {};
  using WholeSum = I32;
  using NarrowSum = I32;
  static constexpr int kRows = 4;
  static constexpr int kFloatRows = 2;

  static I32 splat_whole(const int32_t* p) { return each<I32>([v = vdupq_n_s32(*p)](int) { return v; }); }
  static I32 zero() { return each<I32>([](int) { return vdupq_n_s32(0); }); }

  // Codes below 128, so that they may count as signed.
  static Codes load_codes(const uint8_t* p) {
    return each<Codes>([p](int i) { return vreinterpretq_s8_u8(vld1q_u8(p + 16 * i)); });
  }
  static void load_nibbles(const uint8_t* p, Codes& low, Codes& high) {
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t both = vld1q_u8(p + 16 * i);
      low.v[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
      high.v[i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
    }
  }
  static void begin(I32& sum, const I32& start) { sum = start; }
  static I32 end(const I32& sum, const I32&) { return sum; }
  static void dot(I32& sum, const Codes& w, const int8_t* x) {
    int32_t quad;
    std::memcpy(&quad, x, 4);
    const int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(quad));
    for (int i = 0; i < 4; ++i) sum.v[i] = vdotq_s32(sum.v[i], w.v[i], q);
  }

  // Codes of the whole range, minus kZero8.
  static I32 start_signed(const int32_t*) { return zero(); }
  static SignedCodes load_signed(const uint8_t* p) {
    return each<SignedCodes>([p](int i) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(kZero8))); });
  }

  static I32 shift_left(const I32& a, const int32_t* count) {
    return each<I32>([&, n = vdupq_n_s32(*count)](int i) { return vshlq_s32(a.v[i], n); });
  }
  static F32 to_float(const I32& a) { return each<F32>([&](int i) { return vcvtq_f32_s32(a.v[i]); }); }
  static F32 zero_float() { return each<F32>([](int) { return vdupq_n_f32(0); }); }
  static F32 splat(const float* p) { return each<F32>([v = vdupq_n_f32(*p)](int) { return v; }); }
  static F32 load(const float* p) { return each<F32>([p](int i) { return vld1q_f32(p + 4 * i); }); }
  static void store(const F32& a, float* p) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
  }
  static F32 load_float16(const uint8_t* p) {
    return each<F32>([p](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
  }
  static void load_bfloat16_pairs(const uint8_t* p, F32& even, F32& odd) {
    for (int i = 0; i < 4; ++i) {
      const uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8(p + 16 * i));
      even.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
      odd.v[i] = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
    }
  }
  static F32 load_uint8(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t words[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))};
    return each<F32>([&](int i) {
      return vcvtq_f32_u32(vmovl_u16(i % 2 == 0 ? vget_low_u16(words[i / 2]) : vget_high_u16(words[i / 2])));
    });
  }
  static F32 load_int8(const uint8_t* p) {
    const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t words[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))};
    return each<F32>([&](int i) {
      return vcvtq_f32_s32(vmovl_s16(i % 2 == 0 ? vget_low_s16(words[i / 2]) : vget_high_s16(words[i / 2])));
    });
  }
  static F32 add(const F32& a, const F32& b) { return each<F32>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
  static F32 mul(const F32& a, const F32& b) { return each<F32>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
  static F32 negate(const F32& a) { return each<F32>([&](int i) { return vnegq_f32(a.v[i]); }); }
  static F32 mul_add(const F32& a, const F32& b, const F32& c) {
    return each<F32>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
  }

  static uint32_t largest_bits(const float* x, int64_t n) {
    uint32x4_t largest = vdupq_n_u32(0);
    for (int64_t i = 0; i < n; i += 4) {
      largest = vmaxq_u32(largest, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), vdupq_n_u32(0x7fffffffu)));
    }
    return vmaxvq_u32(largest);
  }
  static void round_group(const float* x, float inverse, int8_t* q, int32_t sums[2]) {
    for (int half = 0; half < 2; ++half) {
      const I32 whole = each<I32>([&](int i) { return vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 16 * half + 4 * i), inverse)); });
      const int16x8_t low = vcombine_s16(vqmovn_s32(whole.v[0]), vqmovn_s32(whole.v[1]));
      const int16x8_t high = vcombine_s16(vqmovn_s32(whole.v[2]), vqmovn_s32(whole.v[3]));
      vst1q_s8(q + 16 * half, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
      sums[half] = vaddvq_s32(vaddq_s32(vaddq_s32(whole.v[0], whole.v[1]), vaddq_s32(whole.v[2], whole.v[3])));
    }
  }

private:
  template <class Vector, class Function>
  static Vector each(const Function& function) {
    Vector result;
    for (int i = 0; i < 4; ++i) result.v[i] = function(i);
    return result;
  }
};

}  // namespace trivium::linear
