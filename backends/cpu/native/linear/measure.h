// Timed loops for benchmarks/cpu_linear.py: the kernels on a model's matrices, and the ceilings of the machine they run on.
#pragma once

#include <vector>

#include "linear.h"

namespace trivium::linear {

// Each returns, for every repeat, the processor seconds of the slowest thread. The threads start together, each on a core of its
// own.
std::vector<double> measure_read(const std::vector<MatrixView>& matrices, int threads, int repeats);
std::vector<double> measure_dots(const LinearKernels& kernels, int64_t rounds, int threads, int repeats);
// One pass over all matrices with `rows` inputs, outputs split evenly over the threads, no barrier between matrices.
std::vector<double> measure_multiply(const LinearKernels& kernels, const std::vector<MatrixView>& matrices, int64_t rows,
                                     int threads, int repeats);
// `count` quantisations of one row of `in` numbers.
std::vector<double> measure_quantise(const LinearKernels& kernels, Records records, int64_t in, int64_t count, int repeats);

}  // namespace trivium::linear
