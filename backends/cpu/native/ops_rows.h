// Operations that work on rows: elementwise arithmetic, norms, embedding, rotary tables, and moving numbers about.
#pragma once

#include <algorithm>

#include "tape.h"

namespace trivium {

// y = f(a[, b]) over `count` numbers.
class Elementwise : public Op {
public:
  enum class Kind : int { add, mul, scale, softcap, activation, gated, copy };
  Elementwise(Kind kind, Ref a, Ref b, Ref y, Extent count) : kind_(kind), a_(a), b_(b), y_(y), count_(count) {}
  void run(const Step& step, Worker& worker) override;

  float factor = 1;  // scale: factor; softcap: cap
  Gate gate;         // activation: gate.kind

private:
  Kind kind_;
  Ref a_, b_, y_;
  Extent count_;
};

// How a row is normalised. kind none: not at all.
struct NormSpec {
  enum class Kind : int { none, rms, layer };
  Kind kind = Kind::none;
  Ref weight, bias;
  float eps = 0;
  float offset = 0;

  void apply(const Step& step, const float* x, float* y, int64_t n) const;
};

// y = norm(x) for `rows` rows of n numbers; with `other` first sum = x + other, then y = norm(sum); with `residual` y = residual + norm(x).
class Norm : public Op {
public:
  Norm(NormSpec norm, Ref x, Ref other, Ref sum, Ref y, Extent rows, int64_t n)
      : norm_(norm), x_(x), other_(other), sum_(sum), y_(y), rows_(rows), n_(n) {}
  void run(const Step& step, Worker& worker) override;

  Ref residual;

private:
  NormSpec norm_;
  Ref x_, other_, sum_, y_;
  Extent rows_;
  int64_t n_;
};

// y[t] = factor * table[ids[t]].
class Embedding : public Op {
public:
  Embedding(Ref ids, linear::MatrixView table, float factor, Ref y, Extent rows)
      : ids_(ids), table_(table), factor_(factor), y_(y), rows_(rows) {}
  void run(const Step& step, Worker& worker) override;

private:
  Ref ids_;
  linear::MatrixView table_;
  float factor_;
  Ref y_;
  Extent rows_;
};

// y[t] = (scale * cos(positions[t] * inv_freq), scale * sin(...)), 2 * half numbers a token: made once a step for all layers.
class RopeTable : public Op {
public:
  RopeTable(Ref positions, Ref inv_freq, int64_t half, float scale, Ref y, Extent tokens)
      : positions_(positions), inv_freq_(inv_freq), half_(half), scale_(scale), y_(y), tokens_(tokens) {}
  void run(const Step& step, Worker& worker) override;

private:
  Ref positions_, inv_freq_;
  int64_t half_;
  float scale_;
  Ref y_;
  Extent tokens_;
};

// Rotates every head of x[tokens, heads, dim] by the table's row of its token.
class Rope : public Op {
public:
  Rope(Ref x, Ref table, int64_t half, bool interleaved, Ref y, Extent tokens, int64_t heads, int64_t dim)
      : x_(x), table_(table), half_(half), interleaved_(interleaved), y_(y), tokens_(tokens), heads_(heads), dim_(dim) {}
  void run(const Step& step, Worker& worker) override;

private:
  Ref x_, table_;
  int64_t half_;
  bool interleaved_;
  Ref y_;
  Extent tokens_;
  int64_t heads_, dim_;
};

// y[t] = x[t] * (1 + beta * ln(1 + floor((positions[t] + offset) / period))), n numbers a token.
class PositionScale : public Op {
public:
  PositionScale(Ref x, Ref positions, Ref y, Extent tokens, int64_t n) : x_(x), positions_(positions), y_(y), tokens_(tokens), n_(n) {}
  void run(const Step& step, Worker& worker) override;

  float beta = 0;
  int64_t period = 1, offset = 0;

private:
  Ref x_, positions_, y_;
  Extent tokens_;
  int64_t n_;
};

// y[r, y_start + i] = x[r, x_start + i] for i < n: slices and halves of a concatenation.
class CopyColumns : public Op {
public:
  CopyColumns(Ref x, int64_t x_width, int64_t x_start, Ref y, int64_t y_width, int64_t y_start, int64_t n, Extent rows)
      : x_(x), y_(y), x_width_(x_width), x_start_(x_start), y_width_(y_width), y_start_(y_start), n_(n), rows_(rows) {}
  void run(const Step& step, Worker& worker) override;

private:
  Ref x_, y_;
  int64_t x_width_, x_start_, y_width_, y_start_, n_;
  Extent rows_;
};

// y[r] = x[rows[r]].
class GatherRows : public Op {
public:
  GatherRows(Ref x, Ref index, Ref y, Extent count, int64_t n) : x_(x), index_(index), y_(y), count_(count), n_(n) {}
  void run(const Step& step, Worker& worker) override;

private:
  Ref x_, index_, y_;
  Extent count_;
  int64_t n_;
};

// Whether linear kernels of an instruction set unpack codes once for many rows.
constexpr bool unpacks_once(linear::Isa isa) {
  return isa == linear::Isa::amx || isa == linear::Isa::amx_emulated || isa == linear::Isa::avx512_vnni;
}

// Asks memory for n numbers.
inline void ask_for(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(x + i);
}

// Runs f(i) for i < count, up to `grain` at a time; a few pieces for each thread.
template <typename F>
void share_rows(Worker& worker, Shares& shares, int64_t count, int64_t grain, F&& f) {
  grain = std::clamp<int64_t>(count / (4 * worker.threads()), 1, grain);
  worker.share(shares, (count + grain - 1) / grain, [&](int64_t block) {
    const int64_t end = block * grain + grain < count ? block * grain + grain : count;
    for (int64_t i = block * grain; i < end; ++i) f(i);
  });
}

// Rows of n numbers that make a piece of work worth handing out.
inline int64_t row_grain(int64_t n) { return n >= 4096 ? 1 : 4096 / (n < 1 ? 1 : n); }

}  // namespace trivium
