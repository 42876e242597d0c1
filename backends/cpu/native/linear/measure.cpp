// Timed loops for benchmarks.
#include "measure.h"

#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <ctime>
#include <map>
#include <thread>

namespace trivium::linear {
namespace {

// Processor time of the calling thread, in seconds: without what other programs took meanwhile.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Keeps the calling thread on the thread-th processor it may use: unpinned, a fresh thread often shares a core with its maker.
void pin(int thread) {
#ifdef __linux__
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  CPU_ZERO(&one);
  for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed) && seen++ == thread) CPU_SET(cpu, &one);
  }
  if (CPU_COUNT(&one) == 1) sched_setaffinity(0, sizeof one, &one);
#else
  (void)thread;
#endif
}

// Runs body(thread) on `threads` threads of its own, `repeats` times.
template <class Body>
std::vector<double> time_repeats(int threads, int repeats, const Body& body) {
  std::vector<std::vector<double>> seconds(static_cast<size_t>(repeats), std::vector<double>(static_cast<size_t>(threads)));
  std::barrier start(threads);
  const auto work = [&](int thread) {
    pin(thread);
    for (auto& repeat : seconds) {
      start.arrive_and_wait();
      const double before = thread_seconds();
      body(thread);
      repeat[static_cast<size_t>(thread)] = thread_seconds() - before;
    }
  };
  std::vector<std::jthread> workers;
  for (int thread = 0; thread < threads; ++thread) workers.emplace_back(work, thread);
  workers.clear();  // joins
  std::vector<double> slowest;
  for (const auto& repeat : seconds) slowest.push_back(*std::max_element(repeat.begin(), repeat.end()));
  return slowest;
}

Range share(const MatrixView& matrix, int thread, int threads) {
  const int64_t tiles = (matrix.out + kTile - 1) / kTile;
  return {tiles * thread / threads * kTile, std::min(matrix.out, tiles * (thread + 1) / threads * kTile)};
}

// Sums the 64-bit words of [begin, end): a read of every line.
uint64_t read_all(const uint8_t* begin, const uint8_t* end) {
  uint64_t sums[8] = {};
  for (const uint8_t* p = begin; p + 64 <= end; p += 64) {
    const auto* words = reinterpret_cast<const uint64_t*>(p);
    for (int i = 0; i < 8; ++i) sums[i] += words[i];
  }
  uint64_t sum = 0;
  for (const uint64_t s : sums) sum += s;
  return sum;
}

struct AlignedBuffer {
  std::vector<uint8_t> bytes;
  explicit AlignedBuffer(int64_t size) : bytes(static_cast<size_t>(size + kAlign)) {}
  uint8_t* data() { return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(bytes.data()) + kAlign - 1) / kAlign * kAlign); }
};

}  // namespace

std::vector<double> measure_read(const std::vector<MatrixView>& matrices, int threads, int repeats) {
  std::atomic<uint64_t> sink{0};
  return time_repeats(threads, repeats, [&](int thread) {
    uint64_t sum = 0;
    for (const MatrixView& matrix : matrices) {
      const Range outs = share(matrix, thread, threads);
      const int64_t tiles = (outs.end - outs.begin + kTile - 1) / kTile;
      const uint8_t* begin = matrix.data + outs.begin / kTile * matrix.tile_bytes;
      sum += read_all(begin, begin + tiles * matrix.tile_bytes);
    }
    sink += sum;
  });
}

std::vector<double> measure_dots(const LinearKernels& kernels, int64_t rounds, int threads, int repeats) {
  std::atomic<int64_t> sink{0};
  return time_repeats(threads, repeats, [&](int) { sink += kernels.dot_ceiling(rounds); });
}

std::vector<double> measure_multiply(const LinearKernels& kernels, const std::vector<MatrixView>& matrices, int64_t rows,
                                     int threads, int repeats) {
  int64_t most_in = 1, most_out = 1;
  for (const MatrixView& matrix : matrices) {
    most_in = std::max(most_in, matrix.in);
    most_out = std::max(most_out, matrix.out);
  }
  std::vector<float> x(static_cast<size_t>(rows * most_in));
  std::vector<float> y(static_cast<size_t>(rows * most_out));
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  std::map<int64_t, AlignedBuffer> buffers;
  for (const MatrixView& matrix : matrices) {
    if (buffers.contains(matrix.in)) continue;
    auto& buffer = buffers.emplace(matrix.in, rows * QuantisedRows::row_bytes(matrix.in, Records::both)).first->second;
    for (int64_t row = 0; row < rows; ++row) kernels.quantise_row(x.data() + row * most_in, {buffer.data(), matrix.in, Records::both}, row);
  }
  return time_repeats(threads, repeats, [&](int thread) {
    for (const MatrixView& matrix : matrices) {
      const Input input{x.data(), most_in, {buffers.at(matrix.in).data(), matrix.in, Records::both}};
      kernels.multiply(matrix, input, {0, rows}, share(matrix, thread, threads), {y.data(), matrix.out});
    }
  });
}

std::vector<double> measure_quantise(const LinearKernels& kernels, Records records, int64_t in, int64_t count, int repeats) {
  std::vector<float> x(static_cast<size_t>(in), 0.5f);
  AlignedBuffer buffer(QuantisedRows::row_bytes(in, records));
  return time_repeats(1, repeats, [&](int) {
    for (int64_t i = 0; i < count; ++i) {
      x[0] = static_cast<float>(i);
      kernels.quantise_row(x.data(), {buffer.data(), in, records}, 0);
    }
  });
}

}  // namespace trivium::linear
