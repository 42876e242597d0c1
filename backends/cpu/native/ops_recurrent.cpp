#include "ops_recurrent.h"

#include <algorithm>
#include <cstring>

namespace trivium {

void DeltaRuleOp::run(const Step& step, Worker& worker) {
  const Sequences seqs(step, layer_, query_starts_, context_lens_);
  const int64_t pieces = (dv_ + kColumns - 1) / kColumns;
  worker.share(shares[0], step.seqs * heads_ * pieces, [&](int64_t item) {
    const int64_t seq = item / (heads_ * pieces), head = item / pieces % heads_, column = item % pieces * kColumns;
    const int64_t tokens = seqs.tokens(seq), row = seqs.begin(seq) * heads_ + head;
    if (tokens == 0) return;
    DeltaRule d;
    d.q = step.floats(inputs_[0]) + row * dk_;
    d.k = step.floats(inputs_[1]) + row * dk_;
    d.v = step.floats(inputs_[2]) + row * dv_ + column;
    d.g = step.floats(inputs_[3]) + row;
    d.beta = step.floats(inputs_[4]) + row;
    d.qk_step = heads_ * dk_;
    d.v_step = heads_ * dv_;
    d.head_step = heads_;
    d.state = seqs.state(seq) + head * dk_ * dv_ + column;
    d.dk = dk_;
    d.stride = dv_;
    d.columns = std::min(kColumns, dv_ - column);
    d.tokens = tokens;
    d.scale = scale_;
    d.y = step.floats(y_) + row * dv_ + column;
    if (seqs.is_fresh(seq)) {
      for (int64_t i = 0; i < dk_; ++i) std::memset(d.state + i * dv_, 0, static_cast<size_t>(d.columns) * sizeof(float));
    }
    step.kernels->delta_rule(d);
  });
}

void SelectiveScanOp::run(const Step& step, Worker& worker) {
  const Sequences seqs(step, layer_, query_starts_, context_lens_);
  const int64_t pieces = (dv + kStateRows - 1) / kStateRows;
  worker.share(shares[0], step.seqs * heads * pieces, [&](int64_t item) {
    const int64_t seq = item / (heads * pieces), head = item / pieces % heads, row = item % pieces * kStateRows;
    const int64_t tokens = seqs.tokens(seq), first = seqs.begin(seq), group = head / (heads / groups);
    if (tokens == 0) return;
    SelectiveScan s;
    s.x = step.floats(inputs_[0]) + (first * heads + head) * dv + row;
    s.dt = step.floats(inputs_[1]) + first * heads + head;
    s.b = step.floats(inputs_[2]) + (first * groups + group) * dk;
    s.c = step.floats(inputs_[3]) + (first * groups + group) * dk;
    s.x_step = heads * dv;
    s.dt_step = heads;
    s.bc_step = groups * dk;
    s.a = step.floats(a_)[head];
    s.d = step.floats(d_)[head];
    s.dt_low = dt_low;
    s.dt_high = dt_high;
    s.state = seqs.state(seq) + (head * dv + row) * dk;
    s.rows = std::min(kStateRows, dv - row);
    s.dk = dk;
    s.tokens = tokens;
    s.y = step.floats(y_) + (first * heads + head) * dv + row;
    if (seqs.is_fresh(seq)) std::memset(s.state, 0, static_cast<size_t>(s.rows * dk) * sizeof(float));
    step.kernels->selective_scan(s);
  });
}

// `n` channels of one sequence from `channel` on.
void ShortConv::convolve(const Step& step, const Sequences& seqs, int64_t seq, int64_t channel, int64_t n) const {
  const int64_t first = seqs.begin(seq), tokens = seqs.tokens(seq);
  const float* x = step.floats(x_) + first * channels_ + channel;
  const float* weight = step.floats(weight_) + channel;
  const float* state = seqs.state(seq) + channel;
  for (int64_t t = 0; t < tokens; ++t) {
    float* y = step.floats(y_) + (first + t) * channels_ + channel;
    const auto bytes = static_cast<size_t>(n) * sizeof(float);
    bias_.present() ? std::memcpy(y, step.floats(bias_) + channel, bytes) : std::memset(y, 0, bytes);
    for (int64_t i = 0; i < width_; ++i) {
      const int64_t at = t - width_ + 1 + i;
      if (at < 0 && seqs.is_fresh(seq)) continue;
      step.kernels->add_product(at < 0 ? state + (at + width_ - 1) * channels_ : x + at * channels_, weight + i * channels_, y, n);
    }
    if (has_activation) step.kernels->activation(y, kind, y, n);
  }
}

// The last width - 1 inputs as the state; where there are fewer, older ones move up.
void ShortConv::keep(const float* x, int64_t tokens, bool fresh, float* state, int64_t n) const {
  const auto bytes = static_cast<size_t>(n) * sizeof(float);
  for (int64_t i = 0; i < width_ - 1; ++i) {
    const int64_t at = tokens - (width_ - 1) + i;
    float* to = state + i * channels_;
    if (at >= 0) std::memcpy(to, x + at * channels_, bytes);
    else if (fresh) std::memset(to, 0, bytes);
    else std::memcpy(to, state + (i + tokens) * channels_, bytes);
  }
}

void ShortConv::run(const Step& step, Worker& worker) {
  const Sequences seqs(step, layer_, query_starts_, context_lens_);
  const int64_t pieces = (channels_ + kChannels - 1) / kChannels;
  worker.share(shares[0], step.seqs * pieces, [&](int64_t item) {
    const int64_t seq = item / pieces, channel = item % pieces * kChannels, n = std::min(kChannels, channels_ - channel);
    if (seqs.tokens(seq) == 0) return;
    convolve(step, seqs, seq, channel, n);
    keep(step.floats(x_) + seqs.begin(seq) * channels_ + channel, seqs.tokens(seq), seqs.is_fresh(seq), seqs.state(seq) + channel, n);
  });
}

}  // namespace trivium
