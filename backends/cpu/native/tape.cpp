#include "tape.h"

#include <algorithm>
#include <utility>

namespace trivium {

Tape::Tape(std::shared_ptr<ThreadPool> pool, const Kernels& kernels, const linear::LinearKernels& linear, std::shared_ptr<KvPool> kv)
    : pool_(std::move(pool)), kv_(std::move(kv)), sampler_(kernels), sample_shares_(pool_->threads()) {
  step_.kernels = &kernels;
  step_.linear = &linear;
  step_.kv = kv_.get();
}

void Tape::set_arenas(std::array<int64_t, kArenas> numbers, int64_t max_tokens, int64_t max_rows) {
  numbers_ = numbers;
  units_ = {};
  grow({max_tokens, max_rows, 0, 0});
}

void Tape::grow(std::array<int64_t, kArenas> units) {
  for (size_t i = 0; i < kArenas; ++i) {
    const int64_t want = std::max<int64_t>(units[i], 1);
    if (want > units_[i]) {
      units_[i] = 0;
      memory_[i].reset();
      memory_[i] = std::make_unique<LazyMemory>(static_cast<size_t>(numbers_[i] * want) * sizeof(float));
      units_[i] = want;
    }
    step_.arenas[i] = reinterpret_cast<float*>(memory_[i]->data());
  }
}

void Tape::add(std::unique_ptr<Op> op, const char* name, bool barrier) {
  op->name = name;
  op->barrier = barrier;
  for (int i = op->phases(); i > 0; --i) op->shares.emplace_back(pool_->threads());
  pool_->reserve_scratch(op->scratch_bytes());
  ops_.push_back(std::move(op));
  seconds_.push_back(0);
}

void Tape::begin(const Step& step) {
  grow({step.tokens, step.rows, step.pooled, 0});
  const Step old = step_;
  step_ = step;
  step_.arenas = old.arenas;
  step_.kernels = old.kernels;
  step_.linear = old.linear;
  step_.kv = old.kv;
}

void Tape::activate(int64_t first, int64_t last) {
  active_.clear();
  bool meet = false;
  for (int64_t i = first; i < last; ++i) {
    Op& op = *ops_[static_cast<size_t>(i)];
    meet = (meet || op.barrier) && !active_.empty();
    if (step_.unit(op.rows) == 0) continue;
    for (Shares& shares : op.shares) shares.reset();
    active_.push_back({&op, i, std::exchange(meet, false)});
  }
}

void Tape::run_range(int64_t first, int64_t last) {
  activate(first, last);
  using Clock = std::chrono::steady_clock;
  pool_->run([&](Worker& worker) {
    for (size_t i = 0; i < active_.size(); ++i) {
      const Active& at = active_[i];
      if (at.meet || profile_) worker.barrier();
      const auto start = profile_ ? Clock::now() : Clock::time_point{};
      at.op->run(step_, worker);
      if (i + 1 < active_.size()) active_[i + 1].op->ask_ahead(step_, worker.index(), worker.threads());
      if (!profile_) continue;
      worker.barrier();
      if (worker.index() == 0) seconds_[static_cast<size_t>(at.index)] += std::chrono::duration<double>(Clock::now() - start).count();
    }
  });
}

void Tape::sample(const Ref& logits, int64_t width, const SampleArrays& in, int64_t vocab_size, const SampledArrays& out) {
  sampler_.reserve(*pool_, vocab_size);
  const float* x = step_.floats(logits);
  sample_shares_.reset();
  pool_->run([&](Worker& worker) {
    worker.share(sample_shares_, step_.rows, [&](int64_t row) { sampler_.draw(x + row * width, row, in, vocab_size, out, worker.scratch()); });
  });
}

void Tape::set_profile(bool on) {
  profile_ = on;
  std::fill(seconds_.begin(), seconds_.end(), 0.0);
}

}  // namespace trivium
