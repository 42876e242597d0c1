// Timed loops for benchmarks/cpu_attention.py. All times are processor seconds of the calling thread, one for each repeat.
#pragma once

#include <vector>

#include "kernels.h"

namespace trivium {

// `queries` tokens at the end of each of `layers` caches of `context` tokens, for all heads, as operations of the tape would work on them.
struct AttentionShape {
  KvLayout layout;
  int64_t group = 1;
  int64_t context = 0;
  int64_t queries = 0;
  int64_t layers = 1;

  // Multiplications and additions of both products with the keys that each query sees.
  double operations() const;
  // Keys and values of all layers.
  double bytes() const;
};

struct AttentionTimes {
  std::vector<double> attend;    // what the shape says
  std::vector<double> products;  // `rounds` times kProductSums register sums of the format's products: the ceiling
  std::vector<double> read;      // a plain read of all keys and values
  std::vector<double> write;     // writing them, context tokens in each layer
};

// The four by turns, `repeats` times.
AttentionTimes measure_attention(const Kernels& kernels, const AttentionShape& shape, int64_t rounds, int repeats);

}  // namespace trivium
