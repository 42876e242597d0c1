#include "ops_lora.h"

#include <algorithm>

namespace trivium {

void Lora::run(const Step& step, Worker& worker) {
  const int32_t* adapters = step.ints(adapters_);
  if (std::all_of(adapters, adapters + step.tokens, [](int32_t slot) { return slot < 0; })) return;
  const float *x = step.floats(x_), *a = step.floats(a_), *b = step.floats(b_);
  float *y = step.floats(y_), *inner = step.floats(inner_);
  const int64_t pieces = (rank_ + kRanks - 1) / kRanks, blocks = (out_ + kColumns - 1) / kColumns;
  worker.share(shares[0], step.tokens * pieces, [&](int64_t item) {
    const int64_t t = item / pieces, begin = item % pieces * kRanks;
    if (adapters[t] < 0) return;
    for (int64_t r = begin; r < std::min(begin + kRanks, rank_); ++r) {
      inner[t * rank_ + r] = step.kernels->dot(x + t * in_, a + (adapters[t] * rank_ + r) * in_, in_);
    }
  });
  worker.barrier();
  worker.share(shares[1], step.tokens * blocks, [&](int64_t item) {
    const int64_t t = item / blocks, column = item % blocks * kColumns, n = std::min(kColumns, out_ - column);
    if (adapters[t] < 0) return;
    for (int64_t r = 0; r < rank_; ++r) {
      step.kernels->add_scaled(b + (adapters[t] * rank_ + r) * out_ + column, inner[t * rank_ + r], y + t * out_ + column, n);
    }
  });
}

}  // namespace trivium
