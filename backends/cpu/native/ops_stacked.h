// Projections by one of several matrices that lie in one packed matrix: experts, and heads with a projection each.
#pragma once

#include "ops_rows.h"

namespace trivium {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How rows are cut into blocks that are multiplied at once: more of them where codes are unpacked once.
inline constexpr int64_t kMostRows = 128;
inline int64_t rows_at_a_time(const Step& step) { return unpacks_once(step.linear->isa) ? kMostRows : 3 * linear::kRowBlock; }

// `count` matrices of `out` rows each, packed one below the other. A tile of outputs that two of them share is multiplied for each, and what is
// not its own is left out.
class Stack {
public:
  static constexpr int64_t kTilesAtATime = 8;
  static constexpr int64_t kWidth = kTilesAtATime * linear::kTile;  // numbers of a row that a piece makes, at most

  Stack() = default;
  Stack(linear::MatrixView all, int64_t count) : all_(all), out_(all.out / count) {}

  int64_t out() const { return out_; }
  int64_t in() const { return all_.in; }
  linear::Records records() const { return linear::records_of(all_.layout); }
  bool reads_quantised() const { return linear::needs_quantised(all_.layout); }
  // Pieces of kTilesAtATime tiles that a matrix takes, at most.
  int64_t pieces() const { return ceil_div(ceil_div(out_, linear::kTile) + (out_ % linear::kTile != 0), kTilesAtATime); }

  // Outputs first .. first + count of a matrix, which lie `lead` numbers from where rows of kWidth numbers begin.
  struct Columns {
    int64_t first, count, lead;
  };
  // Piece `piece` of matrix `index` times `rows` rows of `input`, into y[rows][kWidth]. bias: of all matrices, or null.
  Columns multiply(const Step& step, int64_t index, int64_t piece, const linear::Input& input, int64_t rows, const float* bias, float* y) const;

private:
  linear::MatrixView all_;
  int64_t out_ = 0;
};

// y[t, h] = matrix h times x[t, h] for x [tokens, heads, in], y [tokens, heads, out].
class HeadLinear : public Op {
public:
  HeadLinear(Ref x, Stack stack, Ref y, Ref records, int64_t heads) : x_(x), y_(y), records_(records), stack_(stack), heads_(heads) {}
  void run(const Step& step, Worker& worker) override;
  size_t scratch_bytes() const override { return static_cast<size_t>(kMostRows * Stack::kWidth) * sizeof(float); }

private:
  Ref x_, y_, records_;
  Stack stack_;
  int64_t heads_;
};

// y[t] = sum over j of weights[t, j] * (down[e] gated(gate[e] x[t] + gate_bias[e], up[e] x[t] + up_bias[e]) + down_bias[e]) with e = ids[t, j].
//
// A pair is a token and one of its experts; pairs are sorted by expert, so that each expert's weights are read once and meet all its rows at
// once. With B bytes of weights an expert, E experts that any token chose and 6 * hidden * inter operations a pair the floor is the larger of E * B at the
// machine's bandwidth and of the operations at its rate. A pair's numbers depend on its token and expert alone, and a token's are added
// up in the order of its choices.
class Experts : public Op {
public:
  struct Weights {
    Stack gate, up, down;
    Ref gate_bias, up_bias, down_bias;
  };
  // For each token: 2 * top_k whole numbers; the rows that the experts read, in whose place their results come: see wide_numbers; the rows
  // that `down` reads: see inner_numbers. fixed: 2 * (experts + 1) whole numbers.
  struct Memory {
    Ref order, wide, inner, fixed;
  };
  Experts(Ref x, Ref weights, Ref ids, Ref y, const Weights& w, const Memory& memory, const Gate& gate, int64_t experts, int64_t top_k)
      : x_(x), weights_(weights), ids_(ids), y_(y), w_(w), memory_(memory), gate_(gate), experts_(experts), top_k_(top_k) {}
  void run(const Step& step, Worker& worker) override;
  int phases() const override { return 5; }
  size_t scratch_bytes() const override { return 2 * static_cast<size_t>(kMostRows * Stack::kWidth) * sizeof(float); }

  // A token's numbers of Memory::wide and Memory::inner.
  static int64_t wide_numbers(const Weights& w, int64_t top_k);
  static int64_t inner_numbers(const Weights& w, int64_t top_k);

private:
  struct Pairs;
  struct Item;

  Pairs pairs_of(const Step& step) const;
  void sort(const Step& step, const Pairs& pairs) const;
  template <typename F>
  void share_blocks(Worker& worker, Shares& shares, const Pairs& pairs, int64_t pieces, F f) const;
  void gather(const Step& step, const Pairs& pairs, int64_t pair) const;
  void open_up(const Step& step, const Pairs& pairs, const Item& item, float* scratch) const;
  void bring_down(const Step& step, const Pairs& pairs, const Item& item, float* scratch) const;
  void add_up(const Step& step, const Pairs& pairs, int64_t token) const;

  Ref x_, weights_, ids_, y_;
  Weights w_;
  Memory memory_;
  Gate gate_;
  int64_t experts_, top_k_;
};

}  // namespace trivium
