// Rounding float32 weights to 8 and 4 bits, symmetric, in groups of 32 with a float16 scale.
#include <cmath>
#include <stdexcept>

#include "rows.h"
#include "scalar.h"

namespace trivium::linear {
namespace {

constexpr float kLargestHalf = 65504.0f;

uint16_t half_scale(float scale) {
  if (!(std::fabs(scale) <= kLargestHalf)) {
    throw std::invalid_argument("weights that are not finite, or too large for a float16 scale, can't be held in 8 or 4 bits");
  }
  return to_float16(scale);
}

// The number of largest magnitude, with its sign; NaN if there is one.
float extreme(const float* x) {
  float most = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    if (std::isnan(x[i])) return x[i];
    if (std::fabs(x[i]) > std::fabs(most)) most = x[i];
  }
  return most;
}

// Whole numbers, in float32 so that the loops stay in vectors.
struct Codes {
  float value[kGroup];
};

void round_to(const float* x, float scale, float least, float most, Codes& codes) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  for (int i = 0; i < kGroup; ++i) {
    const float raw = x[i] * inverse;
    const float above = raw < least ? least : raw;
    const float limited = above > most ? most : above;
    codes.value[i] = (limited + kWhole) - kWhole;
  }
}

float squared_error(const float* x, float scale, const Codes& codes) {
  float sums[8] = {};
  for (int i = 0; i < kGroup; i += 8) {
    for (int j = 0; j < 8; ++j) {
      const float difference = x[i + j] - scale * codes.value[i + j];
      sums[j] += difference * difference;
    }
  }
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

// 4 bits: of a few scales about extreme / -8 (the extreme takes the code that has no mirror image) the one with the least
// squared error, measured with the scale as float16 will hold it.
uint16_t best_scale(const float* x, float most, Codes& best_codes) {
  constexpr float kDivisors[] = {-8.0f, -7.0f, -7.5f, -8.5f, -9.0f, 7.5f, 8.0f};
  uint16_t best = 0;
  float least_error = INFINITY;
  for (const float divisor : kDivisors) {
    const uint16_t half = half_scale(most / divisor);
    const float scale = from_float16(half);
    Codes codes;
    round_to(x, scale, -kZero4, kZero4 - 1, codes);
    const float error = squared_error(x, scale, codes);
    if (!(error < least_error)) continue;
    least_error = error;
    best = half;
    best_codes = codes;
  }
  return best;
}

}  // namespace

void round_row(Layout layout, const float* x, int64_t in, RowCodes& codes) {
  const bool four = layout == Layout::q4_s;
  codes.zero = four ? kZero4 : kZero8;
  for (int64_t start = 0; start < in; start += kGroup) {
    float group[kGroup] = {};
    for (int64_t i = 0; i < kGroup && start + i < in; ++i) group[i] = x[start + i];
    const float most = extreme(group);
    Codes rounded{};
    uint16_t scale = 0;
    if (four) {
      scale = best_scale(group, most, rounded);
    } else {
      scale = half_scale(std::fabs(most) / 127.0f);
      round_to(group, from_float16(scale), -127.0f, 127.0f, rounded);
    }
    codes.scale[start / kGroup] = scale;
    for (int i = 0; i < kGroup; ++i) codes.code[start + i] = static_cast<uint8_t>(static_cast<int>(rounded.value[i]) + codes.zero);
  }
}

}  // namespace trivium::linear
