#include "ops_stacked.h"

#include <algorithm>
#include <cstring>

namespace trivium {
namespace {

int64_t record_numbers(int64_t in, linear::Records records) {
  return linear::QuantisedRows::row_bytes(in, records) / static_cast<int64_t>(sizeof(float));
}

const float* floats_or_null(const Step& step, const Ref& ref) { return ref.present() ? step.floats(ref) : nullptr; }

}  // namespace

Stack::Columns Stack::multiply(const Step& step, int64_t index, int64_t piece, const linear::Input& input, int64_t rows, const float* bias,
                               float* y) const {
  const int64_t begin = index * out_, end = begin + out_, last = std::min(ceil_div(end, linear::kTile) * linear::kTile, all_.out);
  const int64_t base = (begin / linear::kTile + piece * kTilesAtATime) * linear::kTile, count = std::min(kWidth, last - base);
  if (count <= 0) return {0, 0, 0};
  step.linear->multiply(all_.rows(base, count), input, {0, rows}, {0, count}, {y, kWidth, bias == nullptr ? nullptr : bias + base, false});
  const int64_t first = std::max(base, begin);
  return {first - begin, std::min(base + count, end) - first, first - base};
}

void HeadLinear::run(const Step& step, Worker& worker) {
  const int64_t tokens = step.tokens, in = stack_.in(), out = stack_.out(), at_a_time = rows_at_a_time(step);
  const float* x = step.floats(x_);
  float* y = step.floats(y_);
  const linear::QuantisedRows records(stack_.reads_quantised() ? step.floats(records_) : nullptr, in, stack_.records());
  if (stack_.reads_quantised()) {  // head by head, so that a head's tokens are rows that follow each other
    share_rows(worker, shares[0], tokens * heads_, row_grain(in), [&](int64_t row) {
      step.linear->quantise_row(x + (row % tokens * heads_ + row / tokens) * in, records, row);
    });
    worker.barrier();
  }
  auto* made = static_cast<float*>(worker.scratch());
  const int64_t pieces = stack_.pieces(), blocks = ceil_div(tokens, at_a_time);
  worker.share(shares[1], heads_ * pieces * blocks, [&](int64_t item) {
    const int64_t head = item / (pieces * blocks), piece = item / blocks % pieces, first = item % blocks * at_a_time;
    const int64_t rows = std::min(at_a_time, tokens - first);
    linear::Input input{x + (first * heads_ + head) * in, heads_ * in, records};
    if (records.data != nullptr) input.quantised.data += (head * tokens + first) * records.stride;
    const Stack::Columns c = stack_.multiply(step, head, piece, input, rows, nullptr, made);
    for (int64_t r = 0; r < rows; ++r) {
      float* to = y + ((first + r) * heads_ + head) * out + c.first;
      std::memcpy(to, made + r * Stack::kWidth + c.lead, static_cast<size_t>(c.count) * sizeof(float));
    }
  });
}

// Where an Experts operation keeps its pairs in a step.
struct Experts::Pairs {
  int64_t count;
  int32_t* from;          // [count]: the pair t * top_k + j at each place of the sorted ones
  int32_t* place;         // [count]: where each pair went
  int32_t *first, *block; // [experts + 1]: each expert's first place, and its first block of rows
  linear::Input wide;     // what gate and up read
  float* plain;           // [count][hidden], its numbers if they are read
  float* results;         // [count][hidden], in the same memory
  linear::Input inner;    // what down reads
  float* gated;           // [count][inter]
};

// A piece of an expert's outputs for some places.
struct Experts::Item {
  int64_t expert, piece, first, rows;
};

int64_t Experts::wide_numbers(const Weights& w, int64_t top_k) {
  const int64_t hidden = w.gate.in(), plain = !w.gate.reads_quantised() || !w.up.reads_quantised() ? hidden : 0;
  const linear::Records kinds = w.gate.records() | w.up.records();
  const int64_t records = kinds != linear::Records::none ? record_numbers(hidden, kinds) : 0;
  return top_k * std::max(plain + records, w.down.out());
}

int64_t Experts::inner_numbers(const Weights& w, int64_t top_k) {
  return top_k * (w.down.in() + (w.down.reads_quantised() ? record_numbers(w.down.in(), w.down.records()) : 0));
}

// Records come first, so that they keep their alignment.
Experts::Pairs Experts::pairs_of(const Step& step) const {
  Pairs p{};
  p.count = step.tokens * top_k_;
  p.from = reinterpret_cast<int32_t*>(step.floats(memory_.order));
  p.place = p.from + p.count;
  p.first = reinterpret_cast<int32_t*>(step.floats(memory_.fixed));
  p.block = p.first + experts_ + 1;
  const int64_t hidden = w_.gate.in(), inter = w_.down.in();
  p.results = step.floats(memory_.wide);
  float* at = p.results;
  if (const linear::Records kinds = w_.gate.records() | w_.up.records(); kinds != linear::Records::none) {
    p.wide.quantised = {at, hidden, kinds};
    at += p.count * record_numbers(hidden, kinds);
  }
  if (!w_.gate.reads_quantised() || !w_.up.reads_quantised()) {
    p.wide.x = p.plain = at;
    p.wide.ldx = hidden;
  }
  at = step.floats(memory_.inner);
  if (w_.down.reads_quantised()) {
    p.inner.quantised = {at, inter, w_.down.records()};
    at += p.count * record_numbers(inter, w_.down.records());
  }
  p.gated = at;
  p.inner.x = at;
  p.inner.ldx = inter;
  return p;
}

// Sorts the pairs by expert, those of one by token.
void Experts::sort(const Step& step, const Pairs& p) const {
  const int32_t* ids = step.ints(ids_);
  std::fill(p.first, p.first + experts_ + 1, 0);
  for (int64_t i = 0; i < p.count; ++i) ++p.first[ids[i] + 1];
  const int64_t at_a_time = rows_at_a_time(step);
  p.block[0] = 0;
  for (int64_t e = 0; e < experts_; ++e) {
    p.block[e + 1] = p.block[e] + static_cast<int32_t>(ceil_div(p.first[e + 1], at_a_time));
    p.first[e + 1] += p.first[e];
  }
  for (int64_t i = p.count - 1; i >= 0; --i) {  // from the end, so that `first` moves to where each begins
    const int32_t place = --p.first[ids[i] + 1];
    p.place[i] = place;
    p.from[place] = static_cast<int32_t>(i);
  }
  for (int64_t e = 0; e < experts_; ++e) p.first[e] = p.first[e + 1];
  p.first[experts_] = static_cast<int32_t>(p.count);
}

// The row that an expert reads at `place`.
void Experts::gather(const Step& step, const Pairs& p, int64_t place) const {
  const float* x = step.floats(x_) + p.from[place] / top_k_ * w_.gate.in();
  if (p.wide.quantised.data != nullptr) step.linear->quantise_row(x, p.wide.quantised, place);
  if (p.plain != nullptr) std::memcpy(p.plain + place * p.wide.ldx, x, static_cast<size_t>(p.wide.ldx) * sizeof(float));
}

void Experts::open_up(const Step& step, const Pairs& p, const Item& item, float* scratch) const {
  const linear::Input input = from_row(p.wide, item.first);
  float* up = scratch + kMostRows * Stack::kWidth;
  const Stack::Columns c = w_.gate.multiply(step, item.expert, item.piece, input, item.rows, floats_or_null(step, w_.gate_bias), scratch);
  w_.up.multiply(step, item.expert, item.piece, input, item.rows, floats_or_null(step, w_.up_bias), up);
  for (int64_t r = 0; r < item.rows; ++r) {
    const int64_t at = r * Stack::kWidth + c.lead;
    step.kernels->gated(scratch + at, up + at, gate_, p.gated + (item.first + r) * w_.down.in() + c.first, c.count);
  }
}

void Experts::bring_down(const Step& step, const Pairs& p, const Item& item, float* scratch) const {
  const int64_t hidden = w_.down.out();
  const Stack::Columns c =
      w_.down.multiply(step, item.expert, item.piece, from_row(p.inner, item.first), item.rows, floats_or_null(step, w_.down_bias), scratch);
  for (int64_t r = 0; r < item.rows; ++r) {
    std::memcpy(p.results + (item.first + r) * hidden + c.first, scratch + r * Stack::kWidth + c.lead, static_cast<size_t>(c.count) * sizeof(float));
  }
}

void Experts::add_up(const Step& step, const Pairs& p, int64_t token) const {
  const int64_t hidden = w_.down.out();
  const float* weights = step.floats(weights_) + token * top_k_;
  float* y = step.floats(y_) + token * hidden;
  std::memset(y, 0, static_cast<size_t>(hidden) * sizeof(float));
  for (int64_t j = 0; j < top_k_; ++j) step.kernels->add_scaled(p.results + p.place[token * top_k_ + j] * hidden, weights[j], y, hidden);
}

// Calls f(item) for all pieces of all blocks of rows, as even as they can be, of the experts that have any, one expert after the other.
template <typename F>
void Experts::share_blocks(Worker& worker, Shares& shares, const Pairs& p, int64_t pieces, F f) const {
  worker.share(shares, p.block[experts_] * pieces, [&](int64_t i) {
    const int64_t block = i / pieces, expert = std::upper_bound(p.block, p.block + experts_ + 1, block) - p.block - 1;
    const int64_t begin = p.first[expert], count = p.first[expert + 1] - begin;
    const int64_t blocks = p.block[expert + 1] - p.block[expert], own = block - p.block[expert], first = count * own / blocks;
    f(Item{expert, i % pieces, begin + first, count * (own + 1) / blocks - first});
  });
}

void Experts::run(const Step& step, Worker& worker) {
  if (step.tokens == 0) return;
  const Pairs p = pairs_of(step);
  auto* scratch = static_cast<float*>(worker.scratch());
  if (worker.index() == 0) sort(step, p);
  worker.barrier();
  share_rows(worker, shares[0], p.count, row_grain(w_.gate.in()), [&](int64_t place) { gather(step, p, place); });
  worker.barrier();
  share_blocks(worker, shares[1], p, w_.gate.pieces(), [&](const Item& item) { open_up(step, p, item, scratch); });
  worker.barrier();
  if (w_.down.reads_quantised()) {
    share_rows(worker, shares[2], p.count, row_grain(w_.down.in()), [&](int64_t place) {
      step.linear->quantise_row(p.gated + place * w_.down.in(), p.inner.quantised, place);
    });
    worker.barrier();
  }
  share_blocks(worker, shares[3], p, w_.down.pieces(), [&](const Item& item) { bring_down(step, p, item, scratch); });
  worker.barrier();
  share_rows(worker, shares[4], step.tokens, row_grain(w_.down.out()), [&](int64_t token) { add_up(step, p, token); });
}

}  // namespace trivium
