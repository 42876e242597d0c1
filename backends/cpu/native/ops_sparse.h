// Attention that reads chosen positions of a LatentKV layer, and their choice.
#pragma once

#include "tape.h"

namespace trivium {

// The best of many positions, best first, in memory for twice as many as are wanted: what is worth more, of equals the lower position; what is
// no number comes last.
class BestPositions {
public:
  BestPositions(uint64_t* memory, int64_t wanted) : kept_(memory), wanted_(wanted) {}

  // Positions first .. first + n.
  void see(int64_t first, const float* worth, int64_t n);
  // Writes `wanted` positions, -1 behind the last.
  void write(int32_t* positions);

  static int64_t numbers(int64_t wanted) { return 2 * wanted + kSpan; }

private:
  uint64_t* kept_;
  int64_t wanted_, count_ = 0;
  uint64_t bar_ = UINT64_MAX;  // what is beyond can't be among the best
};

// positions[tokens, top_k] = those with the largest sum over heads of weight * max(0, q . key), best first, -1 behind the last. A token is
// one piece of work; where there are few, the spans of their contexts are.
class TopPositions : public Op {
public:
  struct Shape {
    int64_t heads, top_k;
  };
  // worth: fixed memory for the `capacity` spans that are shared out at a time.
  TopPositions(Ref q, Ref weights, Ref query_starts, Ref context_lens, Ref positions, Ref worth, KvLayer layer, Shape shape, int64_t capacity)
      : q_(q), weights_(weights), query_starts_(query_starts), context_lens_(context_lens), positions_(positions), worth_(worth), layer_(layer),
        shape_(shape), capacity_(capacity), done_(static_cast<size_t>(capacity)) {}
  void run(const Step& step, Worker& worker) override;
  size_t scratch_bytes() const override;

private:
  // A token of the step, its sequence and what it sees: positions 0 .. context - 1.
  struct Token {
    int64_t row, seq, context;
  };
  struct Scratch;
  Scratch scratch(Worker& worker) const;
  Token find_token(const Step& step, int64_t row) const;
  int64_t spans_to_share(const Step& step, int threads) const;
  AttentionSpan span_of(const Step& step, const Token& token, const Scratch& memory) const;
  void choose(const Step& step, const Token& token, const Scratch& memory, const float* worth) const;
  void run_whole(const Step& step, Worker& worker);
  void run_spans(const Step& step, Worker& worker, int64_t longest);

  Ref q_, weights_, query_starts_, context_lens_, positions_, worth_;
  KvLayer layer_;
  Shape shape_;
  int64_t capacity_;
  std::vector<std::atomic<int64_t>> done_;  // spans made of each token that is shared out; 0 between runs
};

// y[tokens, heads, rank] = attention of q[tokens, heads, rank + rope_dim] over the positions chosen[tokens, top_k] of each token's sequence. What is
// no position up to the token's own stands for none; y is 0 where there is none at all. A piece of work is some heads of a token.
class SparseLatentAttention : public Op {
public:
  struct Shape {
    int64_t heads, top_k;
  };
  SparseLatentAttention(Ref q, Ref query_starts, Ref context_lens, Ref chosen, Ref y, KvLayer layer, Shape shape, float scale)
      : q_(q), query_starts_(query_starts), context_lens_(context_lens), chosen_(chosen), y_(y), layer_(layer), shape_(shape), scale_(scale) {}
  void run(const Step& step, Worker& worker) override;
  size_t scratch_bytes() const override;

private:
  static constexpr int64_t kMostHeads = 96;

  struct Scratch;
  Scratch scratch(Worker& worker) const;
  int64_t most_heads() const { return shape_.heads < kMostHeads ? shape_.heads : kMostHeads; }
  int64_t partial_numbers() const { return most_heads() * (layer_.layout.value_dim() + 2); }
  int64_t heads_together(const Step& step, int threads) const;
  int64_t find_chosen(const Step& step, int64_t row, int64_t context, int32_t* chosen) const;
  void attend(const Step& step, int64_t row, int64_t head, int64_t heads, const Scratch& memory) const;

  Ref q_, query_starts_, context_lens_, chosen_, y_;
  KvLayer layer_;
  Shape shape_;
  float scale_;
};

}  // namespace trivium
