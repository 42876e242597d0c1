// Which experts each token goes to, and with what weights: see the operators moe_route and sparse_mixer_route.
#pragma once

#include "ops_rows.h"

namespace trivium {

// Rows of logits[tokens, experts] to weights and ids [tokens, top_k]. Whatever the logits are, the ids are experts, each at most once a row.
class Router : public Op {
public:
  Router(Ref logits, Ref weights, Ref ids, int64_t experts, int64_t top_k) : experts_(experts), top_k_(top_k), logits_(logits), weights_(weights), ids_(ids) {}
  void run(const Step& step, Worker& worker) override;
  size_t scratch_bytes() const override { return static_cast<size_t>(experts_) * (2 * sizeof(float) + sizeof(uint8_t)) + 192; }

protected:
  // One thread's memory: two rows of numbers, and which experts are taken.
  struct Scratch {
    float *first, *second;
    uint8_t* taken;
  };
  virtual void route(const Step& step, const float* logits, const Scratch& scratch, float* weights, int32_t* ids) const = 0;
  // The best expert that is not taken yet, the lowest of equals, which is then taken.
  int32_t take_best(const float* scores, uint8_t* taken) const;

  int64_t experts_, top_k_;

private:
  Ref logits_, weights_, ids_;
};

class MoeRoute : public Router {
public:
  enum class Scoring : int { softmax, sigmoid, softmax_topk };
  using Router::Router;

  Scoring scoring = Scoring::softmax;
  Ref bias;
  bool normalize = true;
  float scale = 1;
  int64_t groups = 1, top_groups = 1;

protected:
  void route(const Step& step, const float* logits, const Scratch& scratch, float* weights, int32_t* ids) const override;

private:
  float worth(const float* choice, int64_t group) const;
  void keep_best_groups(float* choice, uint8_t* taken) const;
};

class SparseMixerRoute : public Router {
public:
  using Router::Router;

  float jitter = 0;

protected:
  void route(const Step& step, const float* logits, const Scratch& scratch, float* weights, int32_t* ids) const override;
};

}  // namespace trivium
