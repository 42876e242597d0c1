// Operators with a state of fixed size along each sequence, which lies as it is in the sequence's page. One that starts in this step starts
// from zeros, whatever its page holds.
#pragma once

#include "ops_rows.h"

namespace trivium {

// The sequences of a step and the pages of one layer's states.
class Sequences {
public:
  Sequences(const Step& step, const KvLayer& layer, Ref query_starts, Ref context_lens)
      : step_(step), layer_(layer), starts_(step.ints(query_starts)), contexts_(step.ints(context_lens)) {}

  int64_t begin(int64_t seq) const { return starts_[seq]; }
  int64_t tokens(int64_t seq) const { return starts_[seq + 1] - starts_[seq]; }
  bool is_fresh(int64_t seq) const { return contexts_[seq] == tokens(seq); }
  float* state(int64_t seq) const {
    const int32_t page = step_.block_tables[(layer_.group * step_.seqs + seq) * step_.blocks];
    return reinterpret_cast<float*>(step_.kv->page(page) + layer_.offset);
  }

private:
  const Step& step_;
  const KvLayer& layer_;
  const int32_t *starts_, *contexts_;
};

// The gated delta rule: y[tokens, heads, dv] from q, k [tokens, heads, dk], v [tokens, heads, dv], g and beta [tokens, heads]; states [heads, dk, dv].
// A piece of work is some columns of one head's state, which stay in the first-level cache while a sequence's tokens go by.
class DeltaRuleOp : public Op {
public:
  DeltaRuleOp(const std::array<Ref, 5>& qkvgb, Ref query_starts, Ref context_lens, Ref y, KvLayer layer, int64_t heads, int64_t dk, int64_t dv,
              float scale)
      : inputs_(qkvgb), query_starts_(query_starts), context_lens_(context_lens), y_(y), layer_(layer), heads_(heads), dk_(dk), dv_(dv),
        scale_(scale) {}
  void run(const Step& step, Worker& worker) override;

private:
  static constexpr int64_t kColumns = 64;

  std::array<Ref, 5> inputs_;
  Ref query_starts_, context_lens_, y_;
  KvLayer layer_;
  int64_t heads_, dk_, dv_;
  float scale_;
};

// Mamba-2's recurrence: y[tokens, heads, dv] from x [tokens, heads, dv], dt [tokens, heads], b, c [tokens, groups, dk] and constants a, d [heads];
// states [heads, dv, dk]. A piece of work is some rows of one head's state.
class SelectiveScanOp : public Op {
public:
  SelectiveScanOp(const std::array<Ref, 4>& x_dt_b_c, Ref a, Ref d, Ref query_starts, Ref context_lens, Ref y, KvLayer layer)
      : inputs_(x_dt_b_c), a_(a), d_(d), query_starts_(query_starts), context_lens_(context_lens), y_(y), layer_(layer) {}
  void run(const Step& step, Worker& worker) override;

  int64_t heads = 1, groups = 1, dv = 1, dk = 1;
  float dt_low = 0, dt_high = 0;

private:
  static constexpr int64_t kStateRows = 32;

  std::array<Ref, 4> inputs_;
  Ref a_, d_, query_starts_, context_lens_, y_;
  KvLayer layer_;
};

// y[t] = f(sum over i of weight[i] * x[t - width + 1 + i] + bias) channel by channel; weight [width, channels], states [width - 1, channels]: the last inputs.
class ShortConv : public Op {
public:
  ShortConv(Ref x, Ref weight, Ref bias, Ref query_starts, Ref context_lens, Ref y, KvLayer layer, int64_t width, int64_t channels)
      : x_(x), weight_(weight), bias_(bias), query_starts_(query_starts), context_lens_(context_lens), y_(y), layer_(layer), width_(width),
        channels_(channels) {}
  void run(const Step& step, Worker& worker) override;

  bool has_activation = false;
  Activation kind = Activation::silu;

private:
  static constexpr int64_t kChannels = 256;

  void convolve(const Step& step, const Sequences& seqs, int64_t seq, int64_t channel, int64_t n) const;
  void keep(const float* x, int64_t tokens, bool fresh, float* state, int64_t n) const;

  Ref x_, weight_, bias_, query_starts_, context_lens_, y_;
  KvLayer layer_;
  int64_t width_, channels_;
};

}  // namespace trivium
