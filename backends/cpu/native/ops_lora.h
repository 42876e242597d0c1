// Low-rank adapters: what an adapter's two thin matrices add to a projection.
#pragma once

#include "ops_rows.h"

namespace trivium {

// y[t] += (x[t] a[s]^T) b[s] for every token t whose adapter s = adapters[t] is not negative; a[slots][rank][in], b[slots][rank][out].
// Every token is worked out by itself, in one order, so its bits depend on nothing else in the step. `inner`: [tokens][rank].
class Lora : public Op {
public:
  Lora(Ref y, Ref x, Ref a, Ref b, Ref adapters, Ref inner, int64_t rank, int64_t in, int64_t out)
      : y_(y), x_(x), a_(a), b_(b), adapters_(adapters), inner_(inner), rank_(rank), in_(in), out_(out) {}
  void run(const Step& step, Worker& worker) override;

private:
  static constexpr int64_t kRanks = 4;      // dot products, and
  static constexpr int64_t kColumns = 512;  // columns of y, that make a piece of work

  Ref y_, x_, a_, b_, adapters_, inner_;
  int64_t rank_, in_, out_;
};

}  // namespace trivium
