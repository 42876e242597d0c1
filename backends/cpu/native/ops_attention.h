// Writing keys and values to pages, and attention over them.
#pragma once

#include "ops_rows.h"

namespace trivium {

// Per token and kv head: optionally normalises and rotates the kv head's queries and its key, and stores key and value in the token's slot.
// Without q only key and value are dealt with; without a table nothing is rotated.
class RopeWrite : public Op {
public:
  RopeWrite(Ref q, Ref k, Ref v, Ref q_out, KvLayer layer, int64_t heads, Extent tokens)
      : q_(q), k_(k), v_(v), q_out_(q_out), layer_(layer), heads_(heads), tokens_(tokens) {}
  void run(const Step& step, Worker& worker) override;
  void ask_ahead(const Step& step, int thread, int threads) const override;
  size_t scratch_bytes() const override { return static_cast<size_t>(kKeyRun * layer_.layout.head_dim) * sizeof(float); }

  Ref table;
  int64_t half = 0;
  bool interleaved = false;
  NormSpec q_norm, k_norm;

private:
  static constexpr int64_t kAhead = 64;  // tokens' keys and values of one head

  int64_t block_tokens(const Step& step, int threads) const;
  void prepare(const Step& step, const NormSpec& norm, const float* x, const float* row, float* y) const;
  void run_block(const Step& step, int64_t first, int64_t last, int64_t head, float* keys) const;

  Ref q_, k_, v_, q_out_;
  KvLayer layer_;
  int64_t heads_;
  Extent tokens_;
};

// Stores latent[tokens, rank] and rope[tokens, rope_dim] in the tokens' slots of a LatentKV layer.
class LatentWrite : public Op {
public:
  LatentWrite(Ref latent, Ref rope, KvLayer layer) : latent_(latent), rope_(rope), layer_(layer) {}
  void run(const Step& step, Worker& worker) override;

private:
  Ref latent_, rope_;
  KvLayer layer_;
};

// y[tokens, heads, head_dim] = attention of q over the pages. The query heads of one kv head are worked on together, some tokens at a time (a tile);
// where there are few tiles and long contexts the spans of a tile are shared out as well and merged in their order, with the same bits.
// Queries of a LatentKV layer have its keys' numbers, y only the values'.
class Attention : public Op {
public:
  Attention(Ref q, Ref query_starts, Ref context_lens, Ref sinks, Ref y, KvLayer layer, int64_t heads, int64_t partial_capacity)
      : q_(q), query_starts_(query_starts), context_lens_(context_lens), sinks_(sinks), y_(y), layer_(layer), heads_(heads),
        partial_capacity_(partial_capacity), done_(static_cast<size_t>(partial_capacity)) {}
  void run(const Step& step, Worker& worker) override;
  void ask_ahead(const Step& step, int thread, int threads) const override;
  size_t scratch_bytes() const override;

  float scale = 1, softcap = 0;
  int64_t window = 0, chunk = 0;
  bool causal = true;
  Ref partials;  // fixed memory for partial_capacity spans of a tile that are shared out

  int64_t group() const { return heads_ / layer_.layout.kv_heads; }
  int64_t tile_tokens() const { return group() >= kTileRows ? 1 : kTileRows / group(); }
  int64_t tile_rows() const { return tile_tokens() * group(); }
  // Numbers of a tile's softmax state.
  int64_t partial_numbers() const { return tile_rows() * (layer_.layout.value_dim() + 2); }

private:
  // tiles: of one kv head; longest: spans of the longest context; spans: of all tiles of a kv head.
  struct Work {
    int64_t tiles, longest, spans;
  };
  struct Tile;
  // A sequence and its first tile.
  struct Cursor {
    int64_t seq = 0, first = 0;
  };
  struct Scratch;
  Scratch scratch(Worker& worker) const;
  Work plan(const Step& step) const;
  Tile find_tile(const Step& step, int64_t index, Cursor& from) const;
  KeySpan keys_of(const Step& step, const Tile& tile, int64_t span) const;
  AttentionSpan span_of(const Step& step, const Tile& tile, const Scratch& memory) const;
  Partial partial(float* memory) const;
  void attend(const Step& step, AttentionSpan& s, int64_t span, const KeySpan& next, const Partial& out) const;
  void finish(const Step& step, const Tile& tile, const Partial& total) const;
  bool shares_spans(const Work& work, int threads) const;
  void run_whole(const Step& step, Worker& worker, const Work& work);
  void run_spans(const Step& step, Worker& worker, const Work& work);

  Ref q_, query_starts_, context_lens_, sinks_, y_;
  KvLayer layer_;
  int64_t heads_, partial_capacity_;
  std::vector<std::atomic<int64_t>> done_;  // spans made of each tile that is shared out; 0 between runs
};

}  // namespace trivium
