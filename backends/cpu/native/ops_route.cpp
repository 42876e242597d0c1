#include "ops_route.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace trivium {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

float sum_of(const float* x, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}

// y may be x.
void softmax(const Kernels& kernels, const float* x, float* y, int64_t n) {
  const float top = kernels.max(x, n);
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] - top;
  kernels.exp(y, y, n);
  const float total = sum_of(y, n);
  for (int64_t i = 0; i < n; ++i) y[i] /= total;
}

}  // namespace

void Router::run(const Step& step, Worker& worker) {
  const int64_t line = (experts_ + 15) / 16 * 16;
  auto* memory = static_cast<float*>(worker.scratch());
  const Scratch scratch{memory, memory + line, reinterpret_cast<uint8_t*>(memory + 2 * line)};
  const float* logits = step.floats(logits_);
  float* weights = step.floats(weights_);
  auto* ids = reinterpret_cast<int32_t*>(step.floats(ids_));
  share_rows(worker, shares[0], step.tokens, row_grain(experts_ * top_k_), [&](int64_t t) {
    std::memset(scratch.taken, 0, static_cast<size_t>(experts_));
    route(step, logits + t * experts_, scratch, weights + t * top_k_, ids + t * top_k_);
  });
}

int32_t Router::take_best(const float* scores, uint8_t* taken) const {
  int64_t best = -1;
  for (int64_t e = 0; e < experts_; ++e) {
    if (!taken[e] && (best < 0 || scores[e] > scores[best])) best = e;
  }
  taken[best] = 1;
  return static_cast<int32_t>(best);
}

// The best score of a group, or for sigmoids the sum of its two best.
float MoeRoute::worth(const float* choice, int64_t group) const {
  const int64_t size = experts_ / groups;
  float best = kNone, second = kNone;
  for (const float* p = choice + group * size; p < choice + (group + 1) * size; ++p) {
    if (*p > best) {
      second = best;
      best = *p;
    } else if (*p > second) {
      second = *p;
    }
  }
  if (scoring != Scoring::sigmoid || size == 1) return best;
  const float both = best + second;
  return both == both ? both : kNone;
}

// Takes the experts of all groups but the best, of equals the lower ones.
void MoeRoute::keep_best_groups(float* choice, uint8_t* taken) const {
  const int64_t size = experts_ / groups;
  for (int64_t g = 0; g < groups; ++g) {
    const float own = worth(choice, g);
    int64_t better = 0;
    for (int64_t other = 0; other < groups; ++other) {
      const float theirs = worth(choice, other);
      better += theirs > own || (other < g && !(theirs < own));
    }
    if (better >= top_groups) std::memset(taken + g * size, 1, static_cast<size_t>(size));
  }
}

void MoeRoute::route(const Step& step, const float* logits, const Scratch& scratch, float* weights, int32_t* ids) const {
  const Kernels& kernels = *step.kernels;
  float *p = scratch.first, *choice = scratch.second;
  if (scoring == Scoring::softmax) softmax(kernels, logits, p, experts_);
  else if (scoring == Scoring::sigmoid) kernels.activation(logits, Activation::sigmoid, p, experts_);
  else std::memcpy(p, logits, static_cast<size_t>(experts_) * sizeof(float));
  if (bias.present()) kernels.add(p, step.floats(bias), choice, experts_);
  else choice = p;
  if (groups > 1) keep_best_groups(choice, scratch.taken);
  for (int64_t j = 0; j < top_k_; ++j) {
    ids[j] = take_best(choice, scratch.taken);
    weights[j] = p[ids[j]];
  }
  if (scoring == Scoring::softmax_topk) {
    softmax(kernels, weights, weights, top_k_);
  } else if (normalize) {
    const float total = sum_of(weights, top_k_);
    for (int64_t j = 0; j < top_k_; ++j) weights[j] /= total;
  }
  for (int64_t j = 0; j < top_k_; ++j) weights[j] *= scale;
}

void SparseMixerRoute::route(const Step& step, const float* logits, const Scratch& scratch, float* weights, int32_t* ids) const {
  float *left = scratch.first, *near = scratch.second;
  std::memcpy(left, logits, static_cast<size_t>(experts_) * sizeof(float));
  for (int64_t j = 0; j < top_k_; ++j) {
    ids[j] = take_best(left, scratch.taken);
    const float best = left[ids[j]];
    for (int64_t e = 0; e < experts_; ++e) {
      const bool far = best - logits[e] > 2 * jitter * std::max(std::abs(logits[e]), best);
      near[e] = far ? kNone : left[e] - best;
    }
    step.kernels->exp(near, near, experts_);
    weights[j] = 1 / sum_of(near, experts_);
    left[ids[j]] = kNone;
  }
}

}  // namespace trivium
