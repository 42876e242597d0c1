#include "ops_whole.h"

#include <algorithm>

namespace trivium {

void SegmentIds::run(const Step& step, Worker& worker) {
  const int32_t *tokens = step.ints(token_ids_), *starts = step.ints(query_starts_);
  auto* ids = reinterpret_cast<int32_t*>(step.floats(ids_));
  worker.share(shares[0], step.seqs, [&](int64_t seq) {
    int64_t before = 0;
    for (int64_t t = starts[seq]; t < starts[seq + 1]; ++t) {
      ids[t] = static_cast<int32_t>(std::min(before, segments_ - 1));
      before += tokens[t] == separator_;
    }
  });
}

// So many that queries, sums and those of a span stay in the second-level cache.
int64_t BidirectionalAttention::most_tokens() const {
  const int64_t rows = std::clamp<int64_t>(kTileNumbers / layout_.value_dim(), 6, kTileRows);
  return std::max<int64_t>(1, rows / group());
}

size_t BidirectionalAttention::scratch_bytes() const {
  const auto numbers = static_cast<size_t>(kSpanRows * kScoreStride + 2 * partial_numbers());
  return static_cast<size_t>(most_tokens() * group() * layout_.query_bytes()) + numbers * sizeof(float);
}

// Fewer where there are few tiles for the threads, down to as many rows as share what they read.
int64_t BidirectionalAttention::tile_tokens(const Step& step, int threads) const {
  int64_t size = most_tokens();
  while (size * group() > 12 && size > 1 && count_pieces(step, size) * layout_.kv_heads < 4 * threads) size = (size + 1) / 2;
  return size;
}

// Of one kv head.
int64_t BidirectionalAttention::count_pieces(const Step& step, int64_t size) const {
  const int32_t* starts = step.ints(query_starts_);
  int64_t pieces = 0;
  for (int64_t s = 0; s < step.seqs; ++s) pieces += (starts[s + 1] - starts[s] + size - 1) / size;
  return pieces;
}

// Piece `index` of all, sequence by sequence and head by head. from: where the last search ended.
BidirectionalAttention::Piece BidirectionalAttention::find_piece(const Step& step, int64_t size, int64_t index, Cursor& from) const {
  const int32_t* starts = step.ints(query_starts_);
  if (index < from.first) from = {};
  int64_t tokens = 0, own = 0;
  for (;; ++from.seq, from.first += own * layout_.kv_heads) {
    tokens = starts[from.seq + 1] - starts[from.seq];
    own = (tokens + size - 1) / size;
    if (index < from.first + own * layout_.kv_heads) break;
  }
  index -= from.first;
  const int64_t first = index % own * size;
  return {from.seq, index / own, first, std::min(size, tokens - first)};
}

// A sequence's columns of one head: as many numbers as its keys have.
const float* BidirectionalAttention::columns_of(const Step& step, int64_t seq, int64_t head) const {
  const int32_t* starts = step.ints(query_starts_);
  const int64_t tokens = starts[seq + 1] - starts[seq];
  return step.floats(columns_) + (starts[seq] * layout_.kv_heads + head * tokens) * layout_.head_dim;
}

// piece: a block of keys.
void BidirectionalAttention::make_columns(const Step& step, const Piece& piece) const {
  const int64_t dim = layout_.head_dim, stride = layout_.kv_heads * dim, token = step.ints(query_starts_)[piece.seq] + piece.first;
  const float* k = step.floats(k_) + token * stride + piece.head * dim;
  float* columns = const_cast<float*>(columns_of(step, piece.seq, piece.head)) + piece.first * dim;
  for (int64_t first = 0; first < piece.tokens; first += kKeyRun) {
    const int64_t last = std::min(first + kKeyRun, piece.tokens);
    for (int64_t d = 0; d < dim; ++d) {
      for (int64_t t = first; t < last; ++t) columns[d * piece.tokens + t] = k[t * stride + d];
    }
  }
}

WholeSpan BidirectionalAttention::span_of(const Step& step, const Piece& tile, uint8_t* q, float* scores) const {
  const int32_t* starts = step.ints(query_starts_);
  const int64_t start = starts[tile.seq], dim = layout_.head_dim;
  for (int64_t t = 0; t < tile.tokens; ++t) {
    const float* from = step.floats(q_) + ((start + tile.first + t) * heads_ + tile.head * group()) * dim;
    step.kernels->queries(layout_, from, group(), scale * 1.44269504f, q + t * group() * layout_.query_bytes());
  }
  WholeSpan w;
  w.span.q = q;
  w.span.rows = tile.tokens * group();
  w.span.group = group();
  w.span.first_position = tile.first;
  w.span.context = starts[tile.seq + 1] - start;
  w.span.layout = layout_;
  w.span.scores = scores;
  w.keys = columns_of(step, tile.seq, tile.head);
  w.values = step.floats(v_) + (start * layout_.kv_heads + tile.head) * dim;
  w.value_step = layout_.kv_heads * dim;
  w.reach = window < 0 ? w.span.context : std::min(window, w.span.context);
  return w;
}

void BidirectionalAttention::attend(const Step& step, const Piece& tile, void* scratch) const {
  auto* q = static_cast<uint8_t*>(scratch);
  auto* scores = reinterpret_cast<float*>(q + most_tokens() * group() * layout_.query_bytes());
  float* memory = scores + kSpanRows * kScoreStride;
  const int64_t rows = most_tokens() * group();
  const auto partial = [&](float* at) { return Partial{at, at + rows, at + 2 * rows}; };
  const Partial total = partial(memory), part = partial(memory + partial_numbers());
  WholeSpan w = span_of(step, tile, q, scores);
  const int64_t low = std::max<int64_t>(0, tile.first - w.reach) / kSpan * kSpan;
  const int64_t high = std::min(w.span.context, tile.first + tile.tokens + w.reach);
  for (w.span.begin = low; w.span.begin < high; w.span.begin += kSpan) {
    w.span.end = w.span.begin + kSpan;
    step.kernels->attend_whole(w, w.span.begin == low ? total : part);
    if (w.span.begin != low) step.kernels->merge(total, part, w.span.rows, layout_.value_dim());
  }
  finish(step, tile, total);
}

void BidirectionalAttention::finish(const Step& step, const Piece& tile, const Partial& total) const {
  const int64_t dim = layout_.head_dim, first = step.ints(query_starts_)[tile.seq] + tile.first;
  float* y = step.floats(y_);
  for (int64_t r = 0; r < tile.tokens * group(); ++r) {
    const int64_t head = tile.head * group() + r % group();
    step.kernels->finish(total.peak[r], total.total[r], total.values + r * layout_.value_dim(), nullptr, y + ((first + r / group()) * heads_ + head) * dim, dim);
  }
}

void BidirectionalAttention::run(const Step& step, Worker& worker) {
  const int64_t heads = layout_.kv_heads, size = tile_tokens(step, worker.threads());
  Cursor block, tile;
  worker.share(shares[0], count_pieces(step, kKeyBlock) * heads, [&](int64_t i) { make_columns(step, find_piece(step, kKeyBlock, i, block)); });
  worker.barrier();
  worker.share(shares[1], count_pieces(step, size) * heads, [&](int64_t i) { attend(step, find_piece(step, size, i, tile), worker.scratch()); });
}

}  // namespace trivium
