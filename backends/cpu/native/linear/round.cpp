// Rounding float32 weights to 8 and 4 bits, symmetric, in groups of 32 with a float16 scale.
#include <cmath>
#include <cstdlib>
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
    if (!(std::fabs(x[i]) <= std::fabs(most))) most = x[i];
    if (std::isnan(most)) break;
  }
  return most;
}

void round_to(const float* x, float scale, int least, int most, int* code) {
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  for (int i = 0; i < kGroup; ++i) {
    const float limited = std::fmin(std::fmax(x[i] * inverse, static_cast<float>(least)), static_cast<float>(most));
    code[i] = round_even(limited);
  }
}

float squared_error(const float* x, float scale, const int* code) {
  float sum = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float difference = x[i] - scale * static_cast<float>(code[i]);
    sum += difference * difference;
  }
  return sum;
}

// 4 bits: of a few scales about extreme / -8 (the extreme takes the code that has no mirror image) the one with the least squared error,
// measured with the scale as float16 will hold it.
uint16_t best_scale(const float* x, float most, int* best_code) {
  constexpr float kDivisors[] = {-8.0f, -7.0f, -7.5f, -8.5f, -9.0f, 7.5f, 8.0f};
  uint16_t best = 0;
  float least_error = INFINITY;
  for (const float divisor : kDivisors) {
    const uint16_t half = half_scale(most / divisor);
    int code[kGroup];
    round_to(x, from_float16(half), -kZero4, kZero4 - 1, code);
    const float error = squared_error(x, from_float16(half), code);
    if (!(error < least_error)) continue;
    least_error = error;
    best = half;
    for (int i = 0; i < kGroup; ++i) best_code[i] = code[i];
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
    int code[kGroup] = {};
    uint16_t scale = 0;
    if (four) {
      scale = best_scale(group, most, code);
    } else {
      scale = half_scale(std::fabs(most) / 127.0f);
      round_to(group, from_float16(scale), -127, 127, code);
    }
    codes.scale[start / kGroup] = scale;
    for (int i = 0; i < kGroup; ++i) codes.code[start + i] = static_cast<uint8_t>(code[i] + codes.zero);
  }
}

}  // namespace trivium::linear
