#include "ops_attention.h"

#include <algorithm>
#include <atomic>
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

// Work is shared out in blocks of so many tokens of one kv head.
int64_t RopeWrite::block_tokens(const Step& step, int threads) const {
  return std::clamp<int64_t>(step.count(tokens_) * layer_.layout.kv_heads / (16 * threads), 1, kKeyRun);
}

// A token's key is spread over as many lines as it has pairs of dimensions, and stores wait for each of them in turn.
void RopeWrite::ask_ahead(const Step& step, int thread, int threads) const {
  const KvLayout& l = layer_.layout;
  const int64_t tokens = step.count(tokens_), size = block_tokens(step, threads), blocks = (tokens + size - 1) / size;
  const int64_t* slots = step.slot_mapping + layer_.group * step.tokens;
  const int64_t end = Shares::first(thread + 1, threads, blocks * l.kv_heads);
  int64_t left = kAhead;
  for (int64_t i = Shares::first(thread, threads, blocks * l.kv_heads); i < end; ++i) {
    const int64_t first = i / l.kv_heads * size, head = i % l.kv_heads;
    for (int64_t t = first; t < std::min(first + size, tokens); ++t) {
      if (slots[t] < 0 || (t > first && slots[t] == slots[t - 1] + 1)) continue;  // in the lines of the one before
      if (left-- == 0) return;
      const int64_t token = slots[t] % l.page_size;
      const uint8_t* page = step.kv->page(slots[t] / l.page_size) + layer_.offset;
      const uint8_t *key = page + l.key_offset(head) + l.key_at(token), *value = page + l.value_offset(head) + l.value_at(token);
      for (int64_t row = 0; row < l.key_rows(); ++row) __builtin_prefetch(key + row * l.key_row_bytes(), 1);
      for (int64_t at = 0; at < l.value_row_bytes(); at += linear::kAlign) __builtin_prefetch(value + at, 1);
    }
  }
}

void RopeWrite::run(const Step& step, Worker& worker) {
  const int64_t kv_heads = layer_.layout.kv_heads, tokens = step.count(tokens_);
  const int64_t size = block_tokens(step, worker.threads()), blocks = (tokens + size - 1) / size;
  float* keys = static_cast<float*>(worker.scratch());
  worker.share(shares[0], blocks * kv_heads, [&](int64_t i) {
    const int64_t first = i / kv_heads * size;
    run_block(step, first, std::min(first + size, tokens), i % kv_heads, keys);
  });
}

// Tokens first .. last of one kv head.
void RopeWrite::run_block(const Step& step, int64_t first, int64_t last, int64_t head, float* keys) const {
  const KvLayout& layout = layer_.layout;
  const int64_t dim = layout.head_dim, kv_heads = layout.kv_heads, group = q_.present() ? heads_ / kv_heads : 0;
  const float* rows = table.present() ? step.floats(table) : nullptr;
  const float* k = step.floats(k_) + (first * kv_heads + head) * dim;
  const float* v = step.floats(v_) + (first * kv_heads + head) * dim;
  const int64_t* slots = step.slot_mapping + layer_.group * step.tokens;
  // Other threads made most of these numbers.
  for (int64_t t = first; t < last; ++t) {
    const int64_t at = (t * kv_heads + head) * dim;
    if (group > 0) ask_for(step.floats(q_) + at * group, dim * group);
    ask_for(step.floats(k_) + at, dim);
    ask_for(step.floats(v_) + at, dim);
  }
  for (int64_t t = first; t < last; ++t) {
    const float* row = rows == nullptr ? nullptr : rows + t * 2 * half;
    for (int64_t g = 0; g < group; ++g) {
      const int64_t at = (t * heads_ + head * group + g) * dim;
      prepare(step, q_norm, step.floats(q_) + at, row, step.floats(q_out_) + at);
    }
    if (slots[t] >= 0) prepare(step, k_norm, k + (t - first) * kv_heads * dim, row, keys + (t - first) * dim);
  }
  for (int64_t t = first; t < last;) {  // as many tokens at once as lie side by side in one page
    int64_t count = 1;
    while (t + count < last && slots[t + count] == slots[t] + count && slots[t + count] % layout.page_size != 0) ++count;
    if (slots[t] >= 0) {
      uint8_t* page = step.kv->page(slots[t] / layout.page_size) + layer_.offset;
      step.kernels->write_kv(layout, slots[t] % layout.page_size, count, keys + (t - first) * dim, dim, v + (t - first) * kv_heads * dim, kv_heads * dim,
                             page + layout.key_offset(head), page + layout.value_offset(head));
    }
    t += count;
  }
}

void LatentWrite::run(const Step& step, Worker& worker) {
  const KvLayout& l = layer_.layout;
  const int64_t rest = l.head_dim - l.latent;
  const int64_t* slots = step.slot_mapping + layer_.group * step.tokens;
  share_rows(worker, shares[0], step.tokens, row_grain(l.head_dim), [&](int64_t t) {
    if (slots[t] < 0) return;
    uint8_t* page = step.kv->page(slots[t] / l.page_size) + layer_.offset;
    step.kernels->write_latent(l, slots[t] % l.page_size, step.floats(latent_) + t * l.latent, step.floats(rope_) + t * rest, page);
  });
}

// Some queries of one sequence and one kv head.
struct Attention::Tile {
  int64_t seq, head;
  int64_t first_token;  // row of q
  int64_t tokens;
  int64_t first_position;
  int64_t first_span, last_span;  // those with keys that any of its queries sees
};

// What a thread needs for a tile.
struct Attention::Scratch {
  uint8_t* q;
  float* scores;
  Partial total, part;
};

size_t Attention::scratch_bytes() const {
  return static_cast<size_t>(tile_rows() * layer_.layout.query_bytes()) + static_cast<size_t>(kTileRows * kScoreStride + 2 * partial_numbers()) * sizeof(float);
}

Attention::Scratch Attention::scratch(Worker& worker) const {
  auto* q = static_cast<uint8_t*>(worker.scratch());
  auto* scores = reinterpret_cast<float*>(q + tile_rows() * layer_.layout.query_bytes());
  return {q, scores, partial(scores + kTileRows * kScoreStride), partial(scores + kTileRows * kScoreStride + partial_numbers())};
}

Attention::Work Attention::plan(const Step& step) const {
  const int32_t* starts = step.ints(query_starts_);
  const int32_t* contexts = step.ints(context_lens_);
  Work work{0, 1, 0};
  for (int64_t s = 0; s < step.seqs; ++s) {
    const int64_t tiles = (starts[s + 1] - starts[s] + tile_tokens() - 1) / tile_tokens(), spans = (contexts[s] + kSpan - 1) / kSpan;
    work.tiles += tiles;
    work.longest = std::max(work.longest, spans);
    work.spans += tiles * spans;
  }
  return work;
}

// Tile `index` of all: sequence by sequence, so that a thread finds what it wrote of them (see RopeWrite), then kv head by kv head, so that
// neighbours read the same keys; the longest contexts of a prefill first. from: where the last search ended, so that a walk over the tiles of
// many sequences does not begin each time with the first of them.
Attention::Tile Attention::find_tile(const Step& step, int64_t index, Cursor& from) const {
  const int32_t* starts = step.ints(query_starts_);
  const int32_t* contexts = step.ints(context_lens_);
  const int64_t size = tile_tokens(), kv_heads = layer_.layout.kv_heads;
  if (index < from.first) from = {};
  int64_t own = 0;
  for (;; ++from.seq, from.first += own * kv_heads) {
    own = (starts[from.seq + 1] - starts[from.seq] + size - 1) / size;
    if (index < from.first + own * kv_heads) break;
  }
  const int64_t seq = from.seq;
  index -= from.first;
  const int64_t queries = starts[seq + 1] - starts[seq], context = contexts[seq], first = (own - 1 - index % own) * size;
  const int64_t tokens = std::min(size, queries - first), position = context - queries + first;
  const int64_t low = window > 0 ? std::max<int64_t>(0, position + 1 - window) : chunk > 0 ? position / chunk * chunk : 0;
  const int64_t high = causal ? std::min(context, position + tokens) : context;
  return {seq, index / own, starts[seq] + first, tokens, position, low / kSpan, (high + kSpan - 1) / kSpan};
}

// The keys of a tile's span; none for a span that it has not.
KeySpan Attention::keys_of(const Step& step, const Tile& tile, int64_t span) const {
  if (span >= tile.last_span) return {};
  const int32_t* blocks = step.block_tables + (layer_.group * step.seqs + tile.seq) * step.blocks;
  const int64_t end = std::min((span + 1) * kSpan, int64_t{step.ints(context_lens_)[tile.seq]});
  return {blocks, span * kSpan, end, layer_.offset + layer_.layout.key_offset(tile.head)};
}

// The tile's part of an AttentionSpan; rounds its queries into `memory`.
AttentionSpan Attention::span_of(const Step& step, const Tile& tile, const Scratch& memory) const {
  const KvLayout& layout = layer_.layout;
  const float factor = softcap > 0 ? scale : scale * 1.44269504f;
  const int64_t width = group() * layout.head_dim, stride = heads_ * layout.head_dim;
  const float* q = step.floats(q_) + tile.first_token * stride + tile.head * width;
  for (int64_t t = 0; t < tile.tokens; ++t) ask_for(q + t * stride, width);
  for (int64_t t = 0; t < tile.tokens; ++t) {
    step.kernels->queries(layout, q + t * stride, group(), factor, memory.q + t * group() * layout.query_bytes());
  }
  AttentionSpan s;
  s.q = memory.q;
  s.rows = tile.tokens * group();
  s.group = group();
  s.first_position = tile.first_position;
  s.context = step.ints(context_lens_)[tile.seq];
  s.window = window;
  s.chunk = chunk;
  s.causal = causal;
  s.softcap = softcap;
  s.blocks = step.block_tables + (layer_.group * step.seqs + tile.seq) * step.blocks;
  s.pages = step.kv->page(0);
  s.page_bytes = step.kv->page_bytes();
  s.key_offset = layer_.offset + layout.key_offset(tile.head);
  s.value_offset = layer_.offset + layout.value_offset(tile.head);
  s.layout = layout;
  s.scores = memory.scores;
  return s;
}

Partial Attention::partial(float* memory) const { return {memory, memory + tile_rows(), memory + 2 * tile_rows()}; }

void Attention::finish(const Step& step, const Tile& tile, const Partial& total) const {
  const int64_t dim = layer_.layout.value_size(), value_dim = layer_.layout.value_dim(), g = group();
  const float* sinks = sinks_.present() ? step.floats(sinks_) : nullptr;
  float* y = step.floats(y_);
  for (int64_t r = 0; r < tile.tokens * g; ++r) {
    const int64_t head = tile.head * g + r % g;
    step.kernels->finish(total.peak[r], total.total[r], total.values + r * value_dim, sinks == nullptr ? nullptr : sinks + head,
                         y + ((tile.first_token + r / g) * heads_ + head) * dim, dim);
  }
}

bool Attention::shares_spans(const Work& work, int threads) const {
  const int64_t items = work.tiles * layer_.layout.kv_heads;
  const bool few = items < 4 * threads || work.longest * 2 * threads > work.spans * layer_.layout.kv_heads;
  return threads > 1 && work.longest > 1 && few && items * work.longest <= partial_capacity_;
}

void Attention::run(const Step& step, Worker& worker) {
  const Work work = plan(step);
  if (shares_spans(work, worker.threads())) {
    run_spans(step, worker, work);
  } else {
    run_whole(step, worker, work);
  }
}

// The keys of the tile that the thread begins with, where few rows will wait for them.
void Attention::ask_ahead(const Step& step, int thread, int threads) const {
  const KvLayout& l = layer_.layout;
  if (l.latent > 0) return;
  const Work work = plan(step);
  const bool spans = shares_spans(work, threads);
  const int64_t items = work.tiles * l.kv_heads, each = spans ? work.longest : 1, i = Shares::first(thread, threads, items * each);
  if (i >= items * each) return;
  Cursor cursor;
  const Tile tile = find_tile(step, i / each, cursor);
  if (tile.tokens * group() > kFewRows) return;
  const KeySpan keys = keys_of(step, tile, std::max(tile.first_span, i % each));
  for (int64_t at = keys.begin; at < keys.end; at += kKeyRun) {
    const uint8_t* key = step.kv->page(keys.blocks[at / l.page_size]) + keys.key_offset + l.key_at(at % l.page_size);
    for (int64_t row = 0; row < l.key_rows(); ++row) __builtin_prefetch(key + row * l.key_row_bytes());
  }
}

void Attention::run_whole(const Step& step, Worker& worker, const Work& work) {
  const Scratch memory = scratch(worker);
  const int64_t items = work.tiles * layer_.layout.kv_heads;
  Tile next{};
  int64_t found = -1;  // the item of `next`
  Cursor cursor;
  worker.share(shares[0], items, [&](int64_t item) {
    const Tile tile = item == found ? next : find_tile(step, item, cursor);
    if (item + 1 < items) next = find_tile(step, found = item + 1, cursor);
    AttentionSpan s = span_of(step, tile, memory);
    for (int64_t span = tile.first_span; span < tile.last_span; ++span) {
      const KeySpan keys = span + 1 < tile.last_span ? keys_of(step, tile, span + 1) : keys_of(step, next, next.first_span);
      attend(step, s, span, keys, span == tile.first_span ? memory.total : memory.part);
      if (span != tile.first_span) step.kernels->merge(memory.total, memory.part, s.rows, layer_.layout.value_dim());
    }
    finish(step, tile, memory.total);
  });
}

void Attention::attend(const Step& step, AttentionSpan& s, int64_t span, const KeySpan& next, const Partial& out) const {
  s.begin = span * kSpan;
  s.end = s.begin + kSpan;
  s.next = next;
  step.kernels->attend(s, out);
}

// Whoever makes the last of a tile's spans merges them all.
void Attention::run_spans(const Step& step, Worker& worker, const Work& work) {
  const Scratch memory = scratch(worker);
  float* partials_of = step.floats(partials);
  Cursor cursor;
  worker.share(shares[0], work.tiles * layer_.layout.kv_heads * work.longest, [&](int64_t i) {
    const int64_t item = i / work.longest, span = i % work.longest;
    auto part_of = [&](int64_t at) { return partial(partials_of + (item * work.longest + at) * partial_numbers()); };
    const Tile tile = find_tile(step, item, cursor);
    if (span < tile.first_span || span >= tile.last_span) return;
    AttentionSpan s = span_of(step, tile, memory);
    attend(step, s, span, keys_of(step, tile, span + 1), part_of(span));
    std::atomic<int64_t>& done = done_[static_cast<size_t>(item)];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < tile.last_span - tile.first_span) return;
    done.store(0, std::memory_order_relaxed);
    const Partial total = part_of(tile.first_span);
    for (int64_t at = tile.first_span + 1; at < tile.last_span; ++at) step.kernels->merge(total, part_of(at), s.rows, layer_.layout.value_dim());
    finish(step, tile, total);
  });
}

}  // namespace trivium
