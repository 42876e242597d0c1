#include "ops_sparse.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

namespace trivium {
namespace {

// The sequence of a row of the step, and how many positions the row's token sees.
struct Place {
  int64_t seq, context;
};

Place find_place(const int32_t* starts, const int32_t* contexts, int64_t seqs, int64_t row) {
  const int64_t seq = std::upper_bound(starts + 1, starts + seqs, row) - (starts + 1);
  return {seq, contexts[seq] - (starts[seq + 1] - 1 - row)};
}

// Small for what is worth much; -0 as 0.
uint64_t rank_of(float worth, int64_t position) {
  const auto bits = std::bit_cast<uint32_t>(worth + 0.0f);
  const uint32_t rising = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  const uint32_t order = worth == worth ? ~rising : UINT32_MAX;
  return static_cast<uint64_t>(order) << 32 | static_cast<uint64_t>(position);
}

AttentionSpan latent_span(const Step& step, const KvLayer& layer, int64_t seq) {
  AttentionSpan s;
  s.blocks = step.block_tables + (layer.group * step.seqs + seq) * step.blocks;
  s.pages = step.kv->page(0);
  s.page_bytes = step.kv->page_bytes();
  s.key_offset = layer.offset;
  s.layout = layer.layout;
  return s;
}

}  // namespace

void BestPositions::see(int64_t first, const float* worth, int64_t n) {
  if (count_ + n > numbers(wanted_)) {
    std::nth_element(kept_, kept_ + wanted_ - 1, kept_ + count_);
    count_ = wanted_;
    bar_ = kept_[wanted_ - 1];
  }
  for (int64_t i = 0; i < n; ++i) {
    kept_[count_] = rank_of(worth[i], first + i);
    count_ += kept_[count_] < bar_;
  }
}

void BestPositions::write(int32_t* positions) {
  const int64_t found = std::min(count_, wanted_);
  if (found < count_) std::nth_element(kept_, kept_ + found, kept_ + count_);
  std::sort(kept_, kept_ + found);
  for (int64_t i = 0; i < wanted_; ++i) positions[i] = i < found ? static_cast<int32_t>(kept_[i] & UINT32_MAX) : -1;
}

struct TopPositions::Scratch {
  uint8_t* q;
  float *scores, *worth;
  uint64_t* kept;
};

size_t TopPositions::scratch_bytes() const {
  const auto floats = static_cast<size_t>(kSpanRows * kScoreStride + kSpan), ranks = static_cast<size_t>(BestPositions::numbers(shape_.top_k));
  return static_cast<size_t>(shape_.heads * layer_.layout.query_bytes()) + floats * sizeof(float) + ranks * sizeof(uint64_t);
}

TopPositions::Scratch TopPositions::scratch(Worker& worker) const {
  auto* q = static_cast<uint8_t*>(worker.scratch());
  auto* scores = reinterpret_cast<float*>(q + shape_.heads * layer_.layout.query_bytes());
  float* worth = scores + kSpanRows * kScoreStride;
  return {q, scores, worth, reinterpret_cast<uint64_t*>(worth + kSpan)};
}

TopPositions::Token TopPositions::find_token(const Step& step, int64_t row) const {
  const Place place = find_place(step.ints(query_starts_), step.ints(context_lens_), step.seqs, row);
  return {row, place.seq, place.context};
}

// Spans of the longest context, where spans are shared out rather than tokens; else 0.
int64_t TopPositions::spans_to_share(const Step& step, int threads) const {
  const int32_t* contexts = step.ints(context_lens_);
  int64_t longest = 0, all = 0;
  for (int64_t s = 0; s < step.seqs; ++s) {
    const int64_t tokens = step.ints(query_starts_)[s + 1] - step.ints(query_starts_)[s], spans = (contexts[s] + kSpan - 1) / kSpan;
    if (tokens > 0) longest = std::max(longest, spans);
    all += tokens * spans;
  }
  const bool few = step.tokens < 4 * threads || longest * 2 * threads > all;
  return threads > 1 && longest > 1 && few && step.tokens * longest <= capacity_ ? longest : 0;
}

AttentionSpan TopPositions::span_of(const Step& step, const Token& token, const Scratch& memory) const {
  const KvLayout& layout = layer_.layout;
  step.kernels->queries(layout, step.floats(q_) + token.row * shape_.heads * layout.head_dim, shape_.heads, 1, memory.q);
  AttentionSpan s = latent_span(step, layer_, token.seq);
  s.q = memory.q;
  s.rows = s.group = shape_.heads;
  s.first_position = token.context - 1;
  s.context = token.context;
  s.scores = memory.scores;
  return s;
}

// worth: of all positions.
void TopPositions::choose(const Step& step, const Token& token, const Scratch& memory, const float* worth) const {
  BestPositions best(memory.kept, shape_.top_k);
  for (int64_t at = 0; at < token.context; at += kSpan) best.see(at, worth + at, std::min(kSpan, token.context - at));
  best.write(reinterpret_cast<int32_t*>(step.floats(positions_)) + token.row * shape_.top_k);
}

void TopPositions::run(const Step& step, Worker& worker) {
  const int64_t longest = spans_to_share(step, worker.threads());
  if (longest > 0) run_spans(step, worker, longest);
  else run_whole(step, worker);
}

void TopPositions::run_whole(const Step& step, Worker& worker) {
  const Scratch memory = scratch(worker);
  worker.share(shares[0], step.tokens, [&](int64_t row) {
    const Token token = find_token(step, row);
    AttentionSpan s = span_of(step, token, memory);
    BestPositions best(memory.kept, shape_.top_k);
    for (s.begin = 0; s.begin < token.context; s.begin += kSpan) {
      s.end = s.begin + kSpan;
      step.kernels->worth(s, step.floats(weights_) + row * shape_.heads, memory.worth);
      best.see(s.begin, memory.worth, std::min(kSpan, token.context - s.begin));
    }
    best.write(reinterpret_cast<int32_t*>(step.floats(positions_)) + row * shape_.top_k);
  });
}

// Whoever makes the last of a token's spans chooses among them all.
void TopPositions::run_spans(const Step& step, Worker& worker, int64_t longest) {
  const Scratch memory = scratch(worker);
  worker.share(shares[0], step.tokens * longest, [&](int64_t i) {
    const int64_t row = i / longest, span = i % longest;
    const Token token = find_token(step, row);
    if (span * kSpan >= token.context) return;
    float* worth = step.floats(worth_) + row * longest * kSpan;
    AttentionSpan s = span_of(step, token, memory);
    s.begin = span * kSpan;
    s.end = s.begin + kSpan;
    step.kernels->worth(s, step.floats(weights_) + row * shape_.heads, worth + s.begin);
    std::atomic<int64_t>& done = done_[static_cast<size_t>(row)];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < (token.context + kSpan - 1) / kSpan) return;
    done.store(0, std::memory_order_relaxed);
    choose(step, token, memory, worth);
  });
}

struct SparseLatentAttention::Scratch {
  uint8_t* q;
  float* scores;
  Partial total, part;
  int32_t* chosen;
};

size_t SparseLatentAttention::scratch_bytes() const {
  const auto numbers = static_cast<size_t>(kSpanRows * kScoreStride + 2 * partial_numbers() + shape_.top_k);
  return static_cast<size_t>(most_heads() * layer_.layout.query_bytes()) + numbers * sizeof(float);
}

SparseLatentAttention::Scratch SparseLatentAttention::scratch(Worker& worker) const {
  auto* q = static_cast<uint8_t*>(worker.scratch());
  auto* scores = reinterpret_cast<float*>(q + most_heads() * layer_.layout.query_bytes());
  float* memory = scores + kSpanRows * kScoreStride;
  const auto partial = [&](float* at) { return Partial{at, at + most_heads(), at + 2 * most_heads()}; };
  return {q, scores, partial(memory), partial(memory + partial_numbers()), reinterpret_cast<int32_t*>(memory + 2 * partial_numbers())};
}

// Fewer where there are few tokens for the threads, down to as many rows as share what they read.
int64_t SparseLatentAttention::heads_together(const Step& step, int threads) const {
  const int64_t all = shape_.heads;
  int64_t size = most_heads();
  while (size > 12 && step.tokens * ((all + size - 1) / size) < 4 * threads) size = (size + 1) / 2;
  return size;
}

// The positions that are some, in their order; returns how many.
int64_t SparseLatentAttention::find_chosen(const Step& step, int64_t row, int64_t context, int32_t* chosen) const {
  const int32_t* given = step.ints(chosen_) + row * shape_.top_k;
  int64_t count = 0;
  for (int64_t i = 0; i < shape_.top_k; ++i) {
    chosen[count] = given[i];
    count += given[i] >= 0 && given[i] < context;
  }
  return count;
}

void SparseLatentAttention::attend(const Step& step, int64_t row, int64_t head, int64_t heads, const Scratch& memory) const {
  const KvLayout& layout = layer_.layout;
  const int64_t rank = layout.value_size(), first = row * shape_.heads + head;
  const Place place = find_place(step.ints(query_starts_), step.ints(context_lens_), step.seqs, row);
  float* y = step.floats(y_) + first * rank;
  AttentionSpan s = latent_span(step, layer_, place.seq);
  s.context = find_chosen(step, row, place.context, memory.chosen);
  if (s.context == 0) {
    std::memset(y, 0, static_cast<size_t>(heads * rank) * sizeof(float));
    return;
  }
  step.kernels->queries(layout, step.floats(q_) + first * layout.head_dim, heads, scale_ * 1.44269504f, memory.q);
  s.q = memory.q;
  s.rows = s.group = heads;
  s.causal = false;
  s.chosen = memory.chosen;
  s.scores = memory.scores;
  for (s.begin = 0; s.begin < s.context; s.begin += kSpan) {
    s.end = s.begin + kSpan;
    step.kernels->attend(s, s.begin == 0 ? memory.total : memory.part);
    if (s.begin > 0) step.kernels->merge(memory.total, memory.part, heads, layout.value_dim());
  }
  for (int64_t h = 0; h < heads; ++h) {
    step.kernels->finish(memory.total.peak[h], memory.total.total[h], memory.total.values + h * layout.value_dim(), nullptr, y + h * rank, rank);
  }
}

void SparseLatentAttention::run(const Step& step, Worker& worker) {
  const Scratch memory = scratch(worker);
  const int64_t size = heads_together(step, worker.threads()), pieces = (shape_.heads + size - 1) / size;
  worker.share(shares[0], step.tokens * pieces, [&](int64_t i) {
    const int64_t head = i % pieces * size;
    attend(step, i / pieces, head, std::min(size, shape_.heads - head), memory);
  });
}

}  // namespace trivium
