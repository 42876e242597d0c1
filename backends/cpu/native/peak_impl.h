// multiply_adds of one tier, over Vec.
#pragma once

#include "simd.h"

namespace trivium::TRIVIUM_TIER {

int64_t multiply_adds(int64_t rounds);

int64_t multiply_adds(int64_t rounds) {
  constexpr int kChains = 12;
  Vec sums[kChains];  // in registers: every loop over them is unrolled
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) sums[c] = set1(static_cast<float>(c));  // equal chains would become one
  float factor = 0.5f;
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+m"(factor));  // it may have changed: no product can be used twice
    const Vec f = set1(factor);
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sums[c] = fma(sums[c], f, f);
  }
  float lanes[Vec::W], total = 0;
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) {
    store(lanes, sums[c]);
    total += lanes[0];
  }
  return total >= 0 ? rounds * kChains * Vec::W : 0;
}

}  // namespace trivium::TRIVIUM_TIER
