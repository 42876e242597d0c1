#include "ops_attention.h"

#include <algorithm>
#include <cstring>

namespace trivium {

void RopeWrite::prepare(const Step& step, const NormSpec& norm, const float* x, const float* row, float* y) const {
  const int64_t dim = layer_.layout.head_dim;
  if (norm.kind != NormSpec::Kind::none) {
    norm.apply(step, x, y, dim);
    x = y;
  }
  if (row != nullptr) {
    step.kernels->rope(x, row, row + half, half, interleaved, y, dim);
  } else if (x != y) {
    std::memcpy(y, x, static_cast<size_t>(dim) * sizeof(float));
  }
}

void RopeWrite::run(const Step& step, Worker& worker) {
  const KvLayout& layout = layer_.layout;
  const int64_t dim = layout.head_dim, kv_heads = layout.kv_heads, tokens = step.count(tokens_);
  const int64_t group = q_.present() ? heads_ / kv_heads : 0;
  const float* q = q_.present() ? step.floats(q_) : nullptr;
  float* q_out = q_.present() ? step.floats(q_out_) : nullptr;
  const float* k = step.floats(k_);
  const float* v = step.floats(v_);
  const float* rows = table.present() ? step.floats(table) : nullptr;
  const int64_t* slots = step.slot_mapping + layer_.group * step.tokens;
  float* key = static_cast<float*>(worker.scratch());
  share_rows(worker, shares[0], tokens * kv_heads, row_grain(2 * dim * (group + 2)), [&](int64_t i) {
    const int64_t t = i / kv_heads, head = i % kv_heads;
    const float* row = rows == nullptr ? nullptr : rows + t * 2 * half;
    for (int64_t g = 0; g < group; ++g) {
      const int64_t at = (t * heads_ + head * group + g) * dim;
      prepare(step, q_norm, q + at, row, q_out + at);
    }
    if (slots[t] < 0) return;
    prepare(step, k_norm, k + i * dim, row, key);
    uint8_t* page = step.kv->page(slots[t] / layout.page_size) + layer_.offset;
    step.kernels->write_kv(layout, slots[t] % layout.page_size, key, v + i * dim, page + layout.key_offset(head), page + layout.value_offset(head));
  });
}

// Some queries of one sequence and one kv head.
struct Attention::Tile {
  int64_t seq, head;
  int64_t first_token;     // row of q
  int64_t tokens;
  int64_t first_position;
  int64_t context;
  int64_t low, high;       // keys that any of its queries sees
};

size_t Attention::scratch_bytes() const {
  const int64_t numbers = tile_rows() * (layer_.layout.head_dim + kKeyBlock) + 2 * partial_numbers();
  return static_cast<size_t>(numbers) * sizeof(float);
}

Attention::Tile Attention::find_tile(const Step& step, int64_t index) const {
  const int32_t* starts = step.ints(query_starts_);
  const int32_t* contexts = step.ints(context_lens_);
  const int64_t kv_heads = layer_.layout.kv_heads, size = tile_tokens();
  int64_t seq = 0, tile = index / kv_heads;
  for (;; ++seq) {
    const int64_t tiles = (starts[seq + 1] - starts[seq] + size - 1) / size;
    if (tile < tiles) break;
    tile -= tiles;
  }
  const int64_t queries = starts[seq + 1] - starts[seq], context = contexts[seq], first = tile * size;
  const int64_t tokens = std::min(size, queries - first), position = context - queries + first;
  const int64_t low = window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
  const int64_t high = causal ? std::min(context, position + tokens) : context;
  return {seq, index % kv_heads, starts[seq] + first, tokens, position, context, low, high};
}

AttentionSpan Attention::span_of(const Step& step, const Tile& tile, const float* q, float* scores) const {
  const KvLayout& layout = layer_.layout;
  AttentionSpan s;
  s.q = q;
  s.rows = tile.tokens * group();
  s.group = group();
  s.head_dim = layout.head_dim;
  s.first_position = tile.first_position;
  s.context = tile.context;
  s.window = window;
  s.causal = causal;
  s.scale = scale;
  s.softcap = softcap;
  s.blocks = step.block_tables + (layer_.group * step.seqs + tile.seq) * step.blocks;
  s.pages = step.kv->page(0);
  s.page_bytes = step.kv->page_bytes();
  s.key_offset = layer_.offset + layout.key_offset(tile.head);
  s.value_offset = layer_.offset + layout.value_offset(tile.head);
  s.layout = layout;
  s.scores = scores;
  return s;
}

void Attention::gather_queries(const Step& step, const Tile& tile, float* q) const {
  const int64_t dim = layer_.layout.head_dim, width = group() * dim;
  const float* from = step.floats(q_) + tile.first_token * heads_ * dim + tile.head * width;
  for (int64_t t = 0; t < tile.tokens; ++t) {
    std::memcpy(q + t * width, from + t * heads_ * dim, static_cast<size_t>(width) * sizeof(float));
  }
}

Partial Attention::partial(float* memory) const { return {memory, memory + tile_rows(), memory + 2 * tile_rows()}; }

void Attention::finish(const Step& step, const Tile& tile, const Partial& total) const {
  const int64_t dim = layer_.layout.head_dim, value_dim = layer_.layout.value_dim(), g = group();
  const float* sinks = sinks_.present() ? step.floats(sinks_) : nullptr;
  float* y = step.floats(y_);
  for (int64_t r = 0; r < tile.tokens * g; ++r) {
    const int64_t head = tile.head * g + r % g;
    step.kernels->finish(total.peak[r], total.total[r], total.values + r * value_dim, sinks == nullptr ? nullptr : sinks + head,
                         y + ((tile.first_token + r / g) * heads_ + head) * dim, dim);
  }
}

void Attention::run(const Step& step, Worker& worker) {
  const int32_t* starts = step.ints(query_starts_);
  const int32_t* contexts = step.ints(context_lens_);
  const int64_t seqs = step.seqs, size = tile_tokens();
  int64_t tiles = 0, longest = 0;
  for (int64_t s = 0; s < seqs; ++s) {
    tiles += (starts[s + 1] - starts[s] + size - 1) / size;
    longest = std::max<int64_t>(longest, contexts[s]);
  }
  const int64_t items = tiles * layer_.layout.kv_heads, spans = (longest + kSpan - 1) / kSpan;
  if (worker.threads() > 1 && spans > 1 && items < 4 * worker.threads() && items * spans <= partial_capacity) {
    run_spans(step, worker, items, spans);
  } else {
    run_whole(step, worker, items);
  }
}

void Attention::run_whole(const Step& step, Worker& worker, int64_t items) {
  const int64_t rows = tile_rows(), dim = layer_.layout.head_dim;
  float* q = static_cast<float*>(worker.scratch());
  float* scores = q + rows * dim;
  const Partial total = partial(scores + rows * kKeyBlock), part = partial(scores + rows * kKeyBlock + partial_numbers());
  worker.share(shares[0], items, [&](int64_t item) {
    const Tile tile = find_tile(step, items - 1 - item);  // the longest contexts of a prefill first
    gather_queries(step, tile, q);
    AttentionSpan span = span_of(step, tile, q, scores);
    const int64_t first = tile.low / kSpan * kSpan;
    for (span.begin = first; span.begin < tile.high; span.begin += kSpan) {
      span.end = span.begin + kSpan;
      step.kernels->attend(span, span.begin == first ? total : part);
      if (span.begin != first) step.kernels->merge(total, part, span.rows, layer_.layout.value_dim());
    }
    finish(step, tile, total);
  });
}

void Attention::run_spans(const Step& step, Worker& worker, int64_t items, int64_t spans) {
  const int64_t rows = tile_rows(), dim = layer_.layout.head_dim;
  float* q = static_cast<float*>(worker.scratch());
  float* scores = q + rows * dim;
  float* memory = step.floats(partials);
  auto part_of = [&](int64_t item, int64_t span) { return partial(memory + (item * spans + span) * partial_numbers()); };
  worker.share(shares[0], items * spans, [&](int64_t i) {
    const Tile tile = find_tile(step, i / spans);
    AttentionSpan span = span_of(step, tile, q, scores);
    span.begin = i % spans * kSpan;
    span.end = span.begin + kSpan;
    if (span.begin >= tile.high || span.end <= tile.low) return;
    gather_queries(step, tile, q);
    step.kernels->attend(span, part_of(i / spans, i % spans));
  });
  worker.barrier();
  worker.share(shares[1], items, [&](int64_t item) {
    const Tile tile = find_tile(step, item);
    const int64_t first = tile.low / kSpan, last = (tile.high + kSpan - 1) / kSpan;
    const Partial total = part_of(item, first);
    for (int64_t span = first + 1; span < last; ++span) {
      step.kernels->merge(total, part_of(item, span), tile.tokens * group(), layer_.layout.value_dim());
    }
    finish(step, tile, total);
  });
}

}  // namespace trivium
