#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace trivium {
namespace {

// exp(-28) * 2^40 < 1: such a candidate has the weight 0.
constexpr float kVanishing = -28.0f;
constexpr int kFractionBits = 31;
constexpr float kGone = -std::numeric_limits<float>::infinity();
// So many candidates are brought into order at a time; most draws end among the first.
constexpr int64_t kSorted = 512;

// A 64-bit key whose ascending order is (value descending, id ascending); -0 equals 0.
uint64_t sort_key(float value, int64_t id) {
  const float plain = value + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &plain, sizeof(bits));
  const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint64_t>(id);
}

int64_t id_of(uint64_t key) { return static_cast<int64_t>(key & 0xffffffffu); }

// Keys in ascending order, sorted only as far as they are asked for.
class LazyOrder {
public:
  LazyOrder(uint64_t* keys, int64_t count) : keys_(keys), count_(count) {}

  int64_t at(int64_t index) {
    if (index >= sorted_) sort_to(index + 1);
    return id_of(keys_[index]);
  }

private:
  void sort_to(int64_t wanted) {
    const int64_t end = std::min(count_, std::max(wanted, std::max(sorted_ * 4, kSorted)));
    if (end < count_) std::nth_element(keys_ + sorted_, keys_ + end, keys_ + count_);
    std::sort(keys_ + sorted_, keys_ + end);
    sorted_ = end;
  }

  uint64_t* keys_;
  int64_t count_;
  int64_t sorted_ = 0;
};

int64_t argmax(const Kernels& kernels, const float* x, int64_t n) {
  const float peak = kernels.max(x, n);
  return std::max<int64_t>(0, std::find(x, x + n, peak) - x) % n;
}

// exp(d) for -28 < d <= 0 by the published sequence of float32 operations (ops/sample.py, exp_weights): this file is built
// without contraction, so each product and each sum is rounded by itself.
inline float exp_fixed(float d) {
  const float scaled = d * 1.44269504f + 0.5f;
  const auto whole = static_cast<int32_t>(scaled);
  const int32_t power = whole - (static_cast<float>(whole) > scaled);  // the floor, without a call that can't be vectorised
  const auto k = static_cast<float>(power);
  const float r = (d - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 1.0f / 5040;
  for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + coefficient;
  return p * std::bit_cast<float>((power + 127) << 23);
}

inline int64_t weight(float e) { return static_cast<int64_t>(e * 0x1p40f); }

// floor(total * fraction / 2^31) for total < 2^62, fraction <= 2^31.
int64_t part(int64_t total, int64_t fraction) {
  const int64_t low = total & ((int64_t{1} << kFractionBits) - 1);
  return (total >> kFractionBits) * fraction + (low * fraction >> kFractionBits);
}

// What one thread needs for a row.
struct Scratch {
  float* edited;    // logits after penalties, bias and mask
  float* y;         // those over the temperature
  uint64_t* keys;

  static size_t bytes(int64_t vocab) { return static_cast<size_t>(vocab + 16) * (2 * sizeof(float) + sizeof(uint64_t)); }
  Scratch(void* memory, int64_t vocab) {
    const int64_t padded = vocab + 16;
    keys = static_cast<uint64_t*>(memory);
    edited = reinterpret_cast<float*>(keys + padded);
    y = edited + padded;
  }
};

void apply_penalties(float* x, int64_t row, const SampleArrays& in) {
  const float repetition = in.repetition[row], frequency = in.frequency[row], presence = in.presence[row];
  for (int32_t i = in.seen_starts[row]; i < in.seen_starts[row + 1]; ++i) {
    float v = x[in.seen_ids[i]];
    v = v > 0 ? v / repetition : v * repetition;
    const float used = frequency * static_cast<float>(in.seen_counts[i]);
    v = v - used;
    x[in.seen_ids[i]] = v - presence * (in.seen_counts[i] > 0 ? 1.0f : 0.0f);
  }
}

void apply_mask(float* x, const uint32_t* mask, int64_t vocab) {
  for (int64_t i = 0; i < vocab; ++i) {
    if (!(mask[i / 32] >> (i % 32) & 1)) x[i] = kGone;
  }
}

// Stages 2 to 4. Returns x itself if there is nothing to do.
const float* adjust(const float* x, int64_t row, const SampleArrays& in, int64_t vocab, float* edited) {
  const bool seen = in.seen_starts[row] < in.seen_starts[row + 1], biased = in.bias_starts[row] < in.bias_starts[row + 1];
  if (!seen && !biased && in.mask == nullptr) return x;
  std::memcpy(edited, x, static_cast<size_t>(vocab) * sizeof(float));
  apply_penalties(edited, row, in);
  for (int32_t i = in.bias_starts[row]; i < in.bias_starts[row + 1]; ++i) edited[in.bias_ids[i]] += in.bias[i];
  if (in.mask != nullptr) apply_mask(edited, in.mask + row * in.mask_words, vocab);
  return edited;
}

// The weight that a prefix must reach: a float32 fraction of the total, at least 1.
int64_t share(int64_t total, float fraction) { return std::max<int64_t>(part(total, static_cast<int64_t>(fraction * 0x1p31f)), 1); }

// Stage 7: d becomes -inf where x is too many standard deviations below the greatest.
void keep_near_the_top(const Kernels& kernels, const float* x, float sigmas, float* d, int64_t vocab) {
  const float peak = kernels.max(x, vocab);
  const auto gap = [&](int64_t i) { return static_cast<int64_t>(std::min(peak - x[i], 512.0f) * 4096.0f); };
  int64_t count = 0, sum = 0, squares = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    count += x[i] > kGone;
    sum += x[i] > kGone ? gap(i) : 0;
  }
  const int64_t mean = sum / count;
  for (int64_t i = 0; i < vocab; ++i) squares += x[i] > kGone ? (gap(i) - mean) * (gap(i) - mean) : 0;
  // Below 2^42, so that the root of the double has the integer part of the exact one.
  const auto deviation = static_cast<int64_t>(std::sqrt(static_cast<double>(squares / count)));
  const int64_t limit = deviation * static_cast<int64_t>(sigmas * 0x1p16f) >> 16;
  for (int64_t i = 0; i < vocab; ++i) d[i] = gap(i) <= limit ? d[i] : kGone;
}

// Stage 9: d becomes -inf where the surprise is too far from the entropy.
void keep_typical(float* d, int64_t vocab, float typical_p, uint64_t* keys) {
  const auto surprise = [&](int64_t i) { return static_cast<int64_t>(d[i] * -65536.0f); };
  int64_t total = 0, parts = 0, moment = 0, count = 0;
  for (int64_t i = 0; i < vocab; ++i) total += d[i] > kVanishing ? weight(exp_fixed(d[i])) : 0;
  const int shift = std::max(static_cast<int>(std::bit_width(static_cast<uint64_t>(total))) - 41, 0);
  for (int64_t i = 0; i < vocab; ++i) {
    if (!(d[i] > kVanishing)) continue;
    const int64_t v = weight(exp_fixed(d[i])) >> shift;
    parts += v;
    moment += v * surprise(i);
    keys[count++] = static_cast<uint64_t>(i);
  }
  const int64_t mean = moment / parts, target = share(total, typical_p);
  for (int64_t i = 0; i < count; ++i) keys[i] |= static_cast<uint64_t>(std::abs(surprise(id_of(keys[i])) - mean)) << 32;
  LazyOrder order(keys, count);
  int64_t end = 0;
  for (int64_t sum = 0; end < count && sum < target; ++end) sum += weight(exp_fixed(d[order.at(end)]));
  for (; end < count; ++end) d[id_of(keys[end])] = kGone;
}

// The last key, in order, that top_k and top_p let stay.
uint64_t last_key(const float* d, int64_t vocab, int64_t top_k, float top_p, uint64_t* keys) {
  int64_t count = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    keys[count] = sort_key(d[i], i);
    count += d[i] > kVanishing;
  }
  if (top_k > 0 && top_k < count) {
    std::nth_element(keys, keys + top_k, keys + count);
    count = top_k;
  }
  if (top_p >= 1) return *std::max_element(keys, keys + count);
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += weight(exp_fixed(d[id_of(keys[i])]));
  const int64_t target = share(total, top_p);
  LazyOrder order(keys, count);
  int64_t last = 0, sum = 0;
  for (int64_t end = 0; end < count && sum < target; ++end) {
    last = order.at(end);
    sum += weight(exp_fixed(d[last]));
  }
  return sort_key(d[last], last);
}

// Stage 12: of the weights that reach the threshold only the least likely stays. Returns what the others weighed.
int64_t exclude_top(const float* d, int64_t vocab, int64_t threshold, int64_t* weights) {
  int64_t last = -1, gone = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (weights[i] < threshold) continue;
    const int64_t other = last < 0 || d[i] <= d[last] ? std::exchange(last, i) : i;
    if (other < 0) continue;
    gone += weights[other];
    weights[other] = 0;
  }
  return gone;
}

// Stages 6 to 13 of a row with a temperature.
int64_t draw_from(const Kernels& kernels, const float* x, int64_t row, const SampleArrays& in, int64_t vocab, const Scratch& scratch) {
  const float temperature = in.temperature[row], top_p = in.top_p[row], typical_p = in.typical_p[row];
  float *d = scratch.y, min_e = in.min_p[row];
  int64_t top_k = in.top_k[row];
  for (int64_t i = 0; i < vocab; ++i) d[i] = x[i] / temperature;
  const float peak = kernels.max(d, vocab);
  if (!std::isfinite(peak)) return argmax(kernels, x, vocab);
  for (int64_t i = 0; i < vocab; ++i) d[i] -= peak;
  if (in.top_n_sigma[row] > 0) keep_near_the_top(kernels, x, in.top_n_sigma[row], d, vocab);
  if (typical_p < 1) {
    if (top_k > 0) {
      const uint64_t last = last_key(d, vocab, std::exchange(top_k, 0), 1, scratch.keys);
      for (int64_t i = 0; i < vocab; ++i) d[i] = sort_key(d[i], i) <= last ? d[i] : kGone;
    }
    keep_typical(d, vocab, typical_p, scratch.keys);
    min_e *= exp_fixed(kernels.max(d, vocab));
  }
  const bool all = top_k <= 0 && top_p >= 1;
  const uint64_t last = all ? std::numeric_limits<uint64_t>::max() : last_key(d, vocab, top_k, top_p, scratch.keys);
  // The keys are no longer needed: their place takes the weights of those that stay, 0 for the others.
  int64_t* weights = reinterpret_cast<int64_t*>(scratch.keys);
  int64_t total = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    const float e = exp_fixed(std::max(d[i], kVanishing));
    const bool stays = d[i] > kVanishing && e >= min_e && (all || sort_key(d[i], i) <= last);
    weights[i] = stays ? weight(e) : 0;
    total += weights[i];
  }
  const uint64_t seed = in.seed[row];
  const int64_t position = in.position[row];
  if (in.xtc_probability[row] > 0 && uniform(seed, position, 2) < static_cast<int64_t>(in.xtc_probability[row] * 0x1p31f))
    total -= exclude_top(d, vocab, share(total, in.xtc_threshold[row]), weights);
  const int64_t target = part(total, uniform(seed, position));
  int64_t id = 0;
  for (int64_t sum = weights[0]; sum <= target; sum += weights[++id]) {
  }
  return id;
}

// Logprobs, rank and alternatives of a chosen id, from raw logits.
void report(const Kernels& kernels, const float* x, int64_t row, int64_t chosen, int64_t vocab, const SampledArrays& out, const Scratch& scratch) {
  const float peak = kernels.max(x, vocab);
  for (int64_t i = 0; i < vocab; ++i) scratch.y[i] = x[i] - peak;
  kernels.exp(scratch.y, scratch.y, vocab);
  double sum = 0;
  int32_t rank = 1;
  for (int64_t i = 0; i < vocab; ++i) {
    sum += scratch.y[i];
    rank += x[i] > x[chosen] || (x[i] == x[chosen] && i < chosen);
    scratch.keys[i] = sort_key(x[i], i);
  }
  const double normaliser = static_cast<double>(peak) + std::log(sum);
  out.logprobs[row] = static_cast<float>(x[chosen] - normaliser);
  out.ranks[row] = rank;
  LazyOrder order(scratch.keys, vocab);
  for (int64_t i = 0; i < out.alternatives; ++i) {
    const int64_t id = order.at(i);
    out.top_ids[row * out.alternatives + i] = static_cast<int32_t>(id);
    out.top_logprobs[row * out.alternatives + i] = static_cast<float>(x[id] - normaliser);
  }
}

}  // namespace

int64_t uniform(uint64_t seed, int64_t position, uint32_t stream) {
  const uint64_t at = static_cast<uint64_t>(position);
  uint32_t c[4] = {static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32), 0, stream};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
                              static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    std::copy(next, next + 4, c);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<int64_t>(c[0] >> 1);
}

void Sampler::reserve(ThreadPool& pool, int64_t vocab_size) { pool.reserve_scratch(Scratch::bytes(vocab_size)); }

void Sampler::draw(const float* x, int64_t row, const SampleArrays& in, int64_t vocab, const SampledArrays& out, void* memory) const {
  const Scratch scratch(memory, vocab);
  int64_t id = in.score_ids[row];
  if (id < 0) {
    const float* edited = adjust(x, row, in, vocab, scratch.edited);
    id = in.temperature[row] > 0 ? draw_from(kernels_, edited, row, in, vocab, scratch) : argmax(kernels_, edited, vocab);
  }
  out.ids[row] = static_cast<int32_t>(id);
  if (in.top_logprobs >= 0) report(kernels_, x, row, id, vocab, out, scratch);
}

}  // namespace trivium
