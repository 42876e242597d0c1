// Whole sequences, as encoders read them: attention to both sides, and which text of a pair a token belongs to.
#pragma once

#include "tape.h"

namespace trivium {

// ids[t] = min(separators before token t in its sequence, segments - 1): a row of the table of segments.
class SegmentIds : public Op {
public:
  SegmentIds(Ref token_ids, Ref query_starts, Ref ids, int32_t separator, int64_t segments)
      : token_ids_(token_ids), query_starts_(query_starts), ids_(ids), separator_(separator), segments_(segments) {}
  void run(const Step& step, Worker& worker) override;

private:
  Ref token_ids_, query_starts_, ids_;
  int32_t separator_;
  int64_t segments_;
};

// y[tokens, heads, head_dim] = attention of q over the keys and values of its own sequence in the step, before and behind it. Keys become
// columns first, for all tiles of their sequence; then the query heads of one kv head are worked on together, some tokens at a time (a tile).
class BidirectionalAttention : public Op {
public:
  struct Shape {
    int64_t heads, kv_heads, head_dim;
  };
  // columns: memory of column_numbers() a token.
  BidirectionalAttention(Ref q, Ref k, Ref v, Ref query_starts, Ref y, Ref columns, Shape shape)
      : q_(q), k_(k), v_(v), query_starts_(query_starts), y_(y), columns_(columns), heads_(shape.heads) {
    layout_.kv_heads = shape.kv_heads;
    layout_.head_dim = shape.head_dim;
  }
  void run(const Step& step, Worker& worker) override;
  size_t scratch_bytes() const override;

  // The last run of keys reads up to 15 numbers beyond them.
  static int64_t column_numbers(int64_t kv_heads, int64_t head_dim) { return kv_heads * head_dim + kKeyRun; }

  float scale = 1;
  int64_t window = -1;  // < 0: none

private:
  static constexpr int64_t kTileRows = 96, kTileNumbers = 96 * 128;

  // Tokens first .. first + tokens of a sequence, and a kv head.
  struct Piece {
    int64_t seq, head, first, tokens;
  };
  // A sequence and its first piece.
  struct Cursor {
    int64_t seq = 0, first = 0;
  };
  int64_t group() const { return heads_ / layout_.kv_heads; }
  int64_t most_tokens() const;
  int64_t partial_numbers() const { return most_tokens() * group() * (layout_.value_dim() + 2); }
  int64_t tile_tokens(const Step& step, int threads) const;
  int64_t count_pieces(const Step& step, int64_t size) const;
  Piece find_piece(const Step& step, int64_t size, int64_t index, Cursor& from) const;
  const float* columns_of(const Step& step, int64_t seq, int64_t head) const;
  void make_columns(const Step& step, const Piece& piece) const;
  WholeSpan span_of(const Step& step, const Piece& tile, uint8_t* q, float* scores) const;
  void attend(const Step& step, const Piece& tile, void* scratch) const;
  void finish(const Step& step, const Piece& tile, const Partial& total) const;

  Ref q_, k_, v_, query_starts_, y_, columns_;
  int64_t heads_;
  KvLayout layout_;  // float32
};

}  // namespace trivium
