// Rounding float32 weights to 8 and 4 bits, in groups with a float16 scale (and a minimum or a zero point).
//
// 8 bits: to nearest, scale = largest magnitude / 127. 4 bits: of a few scales about the range the one of the least squared error,
// measured with scale and minimum as float16 will hold them; refined by least squares (the scale, and minimum, of the least
// squared error for the codes that it gave; then the codes again). Whole steps: the part's largest magnitude / 127 is its scale; of a few
// steps about a group's range the one of the least squared error, each refined by the mean of what its codes leave, rounded.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "rows.h"
#include "scalar.h"

namespace trivium::linear {
namespace {

constexpr float kLargestHalf = 65504.0f;
constexpr int64_t kMostWeights = 128;
constexpr float kMost4 = 15.0f;

uint16_t half_of(float value) {
  if (!(std::fabs(value) <= kLargestHalf)) {
    throw std::invalid_argument("weights that are not finite, or too large for a float16 scale, can't be held in 8 or 4 bits");
  }
  return to_float16(value);
}

// The number of largest magnitude, with its sign; NaN if there is one.
float extreme(const float* x, int64_t n) {
  float most = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(x[i])) return x[i];
    if (std::fabs(x[i]) > std::fabs(most)) most = x[i];
  }
  return most;
}

// Weights that share a scale, zeros behind them up to a whole number of lanes.
struct Group {
  static constexpr int kLanes = 8;
  float x[kMostWeights];
  int64_t n;  // a multiple of kLanes

  Group(const float* from, int64_t count) : x{}, n((count + kLanes - 1) / kLanes * kLanes) { std::copy_n(from, count, x); }
};

// Whole numbers, in float32 so that the loops stay in vectors. A weight is scale * value + min.
struct Fit {
  uint16_t scale = 0, min = 0;
  int zero = 0;  // added to a value to make a code
  float error = INFINITY;
  float value[kMostWeights] = {};
};

// value = (x - min) / scale, to nearest within [least, most], ties to even.
void round_to(const float* x, int64_t n, float scale, float min, float least, float most, float* value) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float inverse = std::fabs(scale) < 1e-37f ? 0.0f : 1.0f / scale;
  for (int64_t i = 0; i < n; ++i) {
    const float raw = (x[i] - min) * inverse;
    const float above = raw < least ? least : raw;
    const float limited = above > most ? most : above;
    value[i] = (limited + kWhole) - kWhole;
  }
}

struct Sums {
  float x = 0, q = 0, xq = 0, qq = 0, error = 0;
};

// Sums over a group, and the squared error of what it would be read back as.
Sums sums_of(const Group& group, const Fit& fit) {
  constexpr int kLanes = Group::kLanes;
  const float scale = from_float16(fit.scale), min = from_float16(fit.min);
  Sums lanes[kLanes], sum;
  for (int64_t i = 0; i < group.n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const float x = group.x[i + j], q = fit.value[i + j], difference = x - (scale * q + min);
      lanes[j].x += x;
      lanes[j].q += q;
      lanes[j].xq += x * q;
      lanes[j].qq += q * q;
      lanes[j].error += difference * difference;
    }
  }
  for (const Sums& lane : lanes) {
    sum = {sum.x + lane.x, sum.q + lane.q, sum.xq + lane.xq, sum.qq + lane.qq, sum.error + lane.error};
  }
  return sum;
}

// Rounds with `scale` and `min`, `rounds` times, each with the best scale (and minimum, if it has one) for the codes before, and
// keeps the best.
void improve(const Group& group, float scale, float min, int zero, bool has_min, int rounds, Fit& best) {
  Fit fit;
  fit.zero = zero;
  for (; rounds > 0; --rounds) {
    fit.scale = half_of(scale);
    fit.min = half_of(min);
    const auto least = static_cast<float>(-zero);
    round_to(group.x, group.n, from_float16(fit.scale), from_float16(fit.min), least, least + kMost4, fit.value);
    const Sums sum = sums_of(group, fit);
    fit.error = sum.error;
    if (fit.error < best.error) best = fit;
    const auto n = static_cast<float>(group.n);
    const float spread = has_min ? n * sum.qq - sum.q * sum.q : sum.qq;
    if (spread <= 0.0f) return;
    scale = (has_min ? n * sum.xq - sum.x * sum.q : sum.xq) / spread;
    if (has_min) min = (sum.x - scale * sum.q) / n;
  }
}

// About the largest magnitude, which takes the code without a mirror image.
Fit fit_symmetric(const Group& group) {
  const float most = extreme(group.x, group.n);
  Fit best;
  for (const float divisor : {-8.0f, -7.0f, -7.5f, -8.5f, -9.0f, 7.5f, 8.0f}) {
    improve(group, most / divisor, 0.0f, kZero4, false, 1, best);
  }
  improve(group, from_float16(best.scale), 0.0f, kZero4, false, 2, best);
  return best;
}

// About the whole range and a little less. A zero point is a code, so the range holds 0; a minimum is any number.
Fit fit_asymmetric(const Group& group, bool has_min) {
  half_of(extreme(group.x, group.n));
  const auto [low_at, high_at] = std::minmax_element(group.x, group.x + group.n);
  const float low = has_min ? *low_at : std::min(*low_at, 0.0f), range = (has_min ? *high_at : std::max(*high_at, 0.0f)) - low;
  const int zero = has_min || range == 0.0f ? 0 : static_cast<int>(std::lround(-low / range * kMost4));
  Fit best;
  for (const float part : {1.0f, 0.92f, 0.84f}) {
    const float min = has_min ? low + range * (1.0f - part) / 2 : 0.0f;
    improve(group, range * part / kMost4, min, zero, has_min, 3, best);
  }
  return best;
}

Fit fit_four_bits(Layout layout, const Group& group) {
  return is_symmetric(layout) ? fit_symmetric(group) : fit_asymmetric(group, !has_zero_points(layout));
}

// 8 bits: [start, start + n) with one scale.
void round_bytes(const float* x, int64_t start, int64_t n, RowCodes& codes) {
  const uint16_t half = half_of(std::fabs(extreme(x + start, n)) / 127.0f);
  const float scale = from_float16(half);
  for (int64_t first = start; first < start + n; first += kGroup) {
    float value[kGroup] = {};
    const int64_t count = std::min(kGroup, start + n - first);
    round_to(x + first, count, scale, 0.0f, -127.0f, 127.0f, value);
    codes.scale[first / kGroup] = half;
    for (int i = 0; i < kGroup; ++i) codes.code[first + i] = static_cast<uint8_t>(static_cast<int>(value[i]) + kZero8);
  }
}

void round_nibbles(Layout layout, const float* x, int64_t start, int64_t n, RowCodes& codes) {
  const Fit fit = fit_four_bits(layout, Group(x + start, n));
  for (int64_t i = 0; i < (n + kGroup - 1) / kGroup * kGroup; ++i) {
    codes.code[start + i] = static_cast<uint8_t>(static_cast<int>(fit.value[i]) + fit.zero);
  }
  for (int64_t g = start / kGroup; g * kGroup < start + n; ++g) {
    codes.scale[g] = fit.scale;
    codes.min[g] = fit.min;
    codes.sub_min[g] = static_cast<uint8_t>(fit.zero);
  }
}

// A group of layout i in units of its part's scale, about kZero8: 0 to 255.
struct WholeFit {
  int step = 1, offset = 0;
  float error = INFINITY;
  float value[kGroup] = {};
};

// Rounds with `step` and the offset nearest to `offset` that keeps every weight in a byte, `rounds` times, each with the best offset for the
// codes before, and keeps the best.
void improve_whole(const float* x, int step, float offset, int rounds, WholeFit& best) {
  WholeFit fit;
  fit.step = step;
  for (; rounds > 0; --rounds) {
    const auto most = static_cast<float>(255 - static_cast<int>(kMost4) * step);
    fit.offset = static_cast<int>(std::lround(std::clamp(offset, 0.0f, most)));
    const auto scale = static_cast<float>(step), low = static_cast<float>(fit.offset);
    round_to(x, kGroup, scale, low, 0.0f, kMost4, fit.value);
    float left = 0.0f;
    fit.error = 0.0f;
    for (int64_t i = 0; i < kGroup; ++i) {
      const float rest = x[i] - scale * fit.value[i], difference = rest - low;
      left += rest;
      fit.error += difference * difference;
    }
    if (fit.error < best.error) best = fit;
    offset = left / kGroup;
  }
}

WholeFit fit_whole(const float* x) {
  constexpr int kMostStep = 17;  // 15 of them span a byte
  const auto [low, high] = std::minmax_element(x, x + kGroup);
  const int least = static_cast<int>((*high - *low) / kMost4);
  WholeFit best;
  for (int step = std::max(least - 1, 1); step <= std::clamp(least + 2, 1, kMostStep); ++step) {
    improve_whole(x, step, (*low + *high - kMost4 * static_cast<float>(step)) / 2, 4, best);
  }
  return best;
}

// Layout i: [start, start + n) is one part. Numbers behind its end repeat the last, so that they cost no range.
void round_part(const float* x, int64_t start, int64_t n, RowCodes& codes) {
  const float most = std::fabs(extreme(x + start, n));
  if (!std::isfinite(most)) throw std::invalid_argument("weights that are not finite can't be held in 8 or 4 bits");
  const float scale = most / 127.0f, inverse = most < 1e-30f ? 0.0f : 127.0f / most;
  codes.part_scale[static_cast<size_t>(start / kPart)] = scale;
  for (int64_t first = start; first < start + n; first += kGroup) {
    float units[kGroup];
    for (int64_t i = 0; i < kGroup; ++i) units[i] = x[std::min(first + i, start + n - 1)] * inverse + kZero8;
    const WholeFit fit = fit_whole(units);
    codes.sub_scale[static_cast<size_t>(first / kGroup)] = static_cast<uint8_t>(fit.step);
    codes.sub_min[static_cast<size_t>(first / kGroup)] = static_cast<uint8_t>(fit.offset);
    for (int i = 0; i < kGroup; ++i) codes.code[first + i] = static_cast<uint8_t>(static_cast<int>(fit.value[i]));
  }
}

}  // namespace

bool can_round(Layout layout) {
  return layout == Layout::q4_sm || is_stepped(layout) || has_zero_points(layout) || (is_symmetric(layout) && !has_half_groups(layout));
}

void round_row(Layout layout, const float* x, int64_t in, RowCodes& codes) {
  const bool four = shape(layout).bits == 4;
  const int64_t each = std::min(is_stepped(layout) ? kPart : shape(layout).span * kGroup, in);
  codes.zero = is_symmetric(layout) ? (four ? kZero4 : kZero8) : 0;
  for (int64_t start = 0; start < in; start += each) {
    const int64_t n = std::min(each, in - start);
    if (is_stepped(layout)) round_part(x, start, n, codes);
    else if (four) round_nibbles(layout, x, start, n, codes);
    else round_bytes(x, start, n, codes);
  }
}

}  // namespace trivium::linear
