#include "measure_attention.h"

#include <algorithm>
#include <ctime>
#include <numeric>
#include <random>

#include "kv_pool.h"

namespace trivium {
namespace {

template <typename Body>
double thread_seconds(const Body& body) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double before = now();
  body();
  return now() - before;
}

struct Bench {
  Bench(const Kernels& table, const AttentionShape& size)
      : kernels(table), shape(size), pages((size.context + size.layout.page_size - 1) / size.layout.page_size),
        pool(static_cast<size_t>(pages * size.layers * size.layout.bytes())), blocks(static_cast<size_t>(pages)),
        tokens(std::max<int64_t>(1, kTileRows / size.group)), numbers(static_cast<size_t>((tokens * size.group + 1) * size.layout.head_dim)),
        memory(static_cast<size_t>(tokens * size.group * size.layout.query_bytes()) +
               static_cast<size_t>(kTileRows * kScoreStride + 2 * state()) * sizeof(float)) {
    std::iota(blocks.begin(), blocks.end(), 0);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& x : numbers) x = normal(random);
  }

  int64_t state() const { return tokens * shape.group * (shape.layout.value_dim() + 2); }
  uint8_t* layer(int64_t index) const { return pool.data() + index * pages * shape.layout.bytes(); }

  void write() {
    const KvLayout& l = shape.layout;
    for (int64_t i = 0; i < shape.layers; ++i) {
      for (int64_t t = 0; t < shape.context; t += kKeyRun) {
        uint8_t* page = layer(i) + t / l.page_size * l.bytes();
        for (int64_t head = 0; head < l.kv_heads; ++head) {
          kernels.write_kv(l, t % l.page_size, std::min(kKeyRun, shape.context - t), numbers.data(), 0, numbers.data() + l.head_dim, 0,
                           page + l.key_offset(head), page + l.value_offset(head));
        }
      }
    }
  }
  uint64_t read() const {
    uint64_t sums[8] = {};
    const auto* words = reinterpret_cast<const uint64_t*>(pool.data());
    for (size_t i = 0; i + 8 <= pool.size() / 8; i += 8) {
      for (size_t j = 0; j < 8; ++j) sums[j] += words[i + j];
    }
    return std::accumulate(sums, sums + 8, uint64_t{0});
  }
  void attend() {
    for (int64_t i = 0; i < shape.layers; ++i) {
      for (int64_t head = 0; head < shape.layout.kv_heads; ++head) {
        for (int64_t p = shape.context - shape.queries; p < shape.context; p += tokens) tile(i, head, p);
      }
    }
  }
  void tile(int64_t index, int64_t head, int64_t position) {
    const KvLayout& l = shape.layout;
    AttentionSpan s;
    s.rows = std::min(tokens, shape.context - position) * shape.group;
    uint8_t* q = memory.data();
    kernels.queries(l, numbers.data(), s.rows, 0.18f, q);
    s.q = q;
    s.group = shape.group;
    s.first_position = position;
    s.context = shape.context;
    s.blocks = blocks.data();
    s.pages = layer(index);
    s.page_bytes = l.bytes();
    s.key_offset = l.key_offset(head);
    s.value_offset = l.value_offset(head);
    s.layout = l;
    s.scores = reinterpret_cast<float*>(q + tokens * shape.group * l.query_bytes());
    const int64_t rows = tokens * shape.group;
    float* at = s.scores + kTileRows * kScoreStride;
    const Partial total{at, at + rows, at + 2 * rows}, part{at + state(), at + state() + rows, at + state() + 2 * rows};
    for (s.begin = 0; s.begin < position + s.rows / shape.group; s.begin += kSpan) {
      s.end = s.begin + kSpan;
      s.next = {s.blocks, s.end, s.context, s.key_offset};
      kernels.attend(s, s.begin == 0 ? total : part);
      if (s.begin > 0) kernels.merge(total, part, s.rows, l.value_dim());
    }
    for (int64_t r = 0; r < s.rows; ++r) kernels.finish(total.peak[r], total.total[r], total.values + r * l.value_dim(), nullptr, out, 1);
  }

  const Kernels& kernels;
  const AttentionShape& shape;
  int64_t pages;
  LazyMemory pool;
  std::vector<int32_t> blocks;
  int64_t tokens;
  std::vector<float> numbers;
  LazyMemory memory;
  float out[16];
};

}  // namespace

double AttentionShape::operations() const {
  const double keys = static_cast<double>(queries) * static_cast<double>(2 * context - queries + 1) / 2;
  return 4.0 * keys * static_cast<double>(layout.head_dim * layout.kv_heads * group * layers);
}

double AttentionShape::bytes() const {
  return static_cast<double>((context + layout.page_size - 1) / layout.page_size * layout.bytes() * layers);
}

AttentionTimes measure_attention(const Kernels& kernels, const AttentionShape& shape, int64_t rounds, int repeats) {
  Bench bench(kernels, shape);
  AttentionTimes times;
  volatile uint64_t kept = 0;
  bench.write();
  for (int i = 0; i < repeats; ++i) {
    times.attend.push_back(thread_seconds([&] { bench.attend(); }));
    times.products.push_back(thread_seconds([&] { kept = static_cast<uint64_t>(kernels.products(shape.layout.type, rounds)); }));
    times.read.push_back(thread_seconds([&] { kept = bench.read(); }));
    times.write.push_back(thread_seconds([&] { bench.write(); }));
  }
  return times;
}

}  // namespace trivium
