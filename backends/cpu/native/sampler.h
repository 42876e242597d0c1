// The sampling pipeline of trivium.ops.sample for one row, operation for operation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "pool.h"

namespace trivium {

// SampleInputs (ops/batch.py); mask may be null. `mask_words` words a row.
struct SampleArrays {
  const float *temperature = nullptr, *top_p = nullptr, *min_p = nullptr, *typical_p = nullptr, *top_n_sigma = nullptr;
  const float *xtc_probability = nullptr, *xtc_threshold = nullptr, *repetition = nullptr, *presence = nullptr, *frequency = nullptr;
  const int32_t* top_k = nullptr;
  const uint64_t* seed = nullptr;
  const int64_t* position = nullptr;
  const int32_t *seen_starts = nullptr, *seen_ids = nullptr, *seen_counts = nullptr;
  const int32_t *bias_starts = nullptr, *bias_ids = nullptr;
  const float* bias = nullptr;
  const int32_t* score_ids = nullptr;
  const uint32_t* mask = nullptr;
  int64_t mask_words = 0;
  int64_t top_logprobs = -1;
};

// Sampled: ids[rows]; with logprobs also logprobs[rows], ranks[rows], top_ids and top_logprobs [rows][alternatives].
struct SampledArrays {
  int32_t* ids = nullptr;
  float* logprobs = nullptr;
  int32_t* ranks = nullptr;
  int32_t* top_ids = nullptr;
  float* top_logprobs = nullptr;
  int64_t alternatives = 0;
};

// A draw for a token: 31 bits, from Philox4x32-10 keyed by the seed at the position. Stream 0 chooses the token, 2 decides about XTC.
int64_t uniform(uint64_t seed, int64_t position, uint32_t stream = 0);

class Sampler {
public:
  explicit Sampler(const Kernels& kernels) : kernels_(kernels) {}

  // Makes sure that the threads' scratch is large enough.
  static void reserve(ThreadPool& pool, int64_t vocab_size);
  // Samples one row x[vocab_size] of logits.
  void draw(const float* x, int64_t row, const SampleArrays& in, int64_t vocab_size, const SampledArrays& out, void* scratch) const;

private:
  const Kernels& kernels_;
};

}  // namespace trivium
