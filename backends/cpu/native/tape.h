// The tape: a compiled Program as a flat list of operations that all threads walk together.
//
// Every value has a place in one of four arenas. Those of the symbolic arenas (tokens, rows, pooled) are laid out for one row and scaled by the
// number of rows in the step, so that a step of one token touches a few neighbouring cache lines and nothing is allocated in a step.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "kv_pool.h"
#include "linear/linear.h"
#include "pool.h"
#include "sampler.h"

namespace trivium {

enum class Space : int { tokens, rows, pooled, fixed, constant, input };
inline constexpr size_t kArenas = 4;

// The integer arrays of a step that operations may name.
enum class Input : int { token_ids, positions, query_starts, context_lens, sample_rows, pool_rows, adapters };
inline constexpr size_t kInputs = 7;

// Where a value lies. tokens, rows, pooled: `offset` numbers (4 bytes each) times the rows of the step; fixed: `offset` numbers; constant: `pointer`;
// input: `offset` is an Input.
struct Ref {
  Space space = Space::constant;
  int64_t offset = 0;
  const void* pointer = nullptr;

  bool present() const { return space != Space::constant || pointer != nullptr; }
};

// A size: `factor` times the tokens, sampled rows or pooled rows of the step, or just `factor` (Space::fixed).
struct Extent {
  Space symbol = Space::fixed;
  int64_t factor = 0;
};

// One step, as operations see it.
struct Step {
  int64_t tokens = 0, seqs = 0, rows = 0, pooled = 0;
  int64_t blocks = 0;  // columns of a block table
  std::array<const int32_t*, kInputs> inputs{};
  const int32_t* block_tables = nullptr;  // [groups][seqs][blocks]
  const int64_t* slot_mapping = nullptr;  // [groups][tokens]
  std::array<float*, kArenas> arenas{};
  const Kernels* kernels = nullptr;
  const linear::LinearKernels* linear = nullptr;
  const KvPool* kv = nullptr;

  int64_t unit(Space space) const { return space == Space::tokens ? tokens : space == Space::rows ? rows : space == Space::pooled ? pooled : 1; }
  int64_t count(Extent extent) const { return extent.factor * unit(extent.symbol); }
  float* floats(const Ref& ref) const {
    if (ref.space == Space::constant) return static_cast<float*>(const_cast<void*>(ref.pointer));
    return arenas[static_cast<size_t>(ref.space)] + ref.offset * unit(ref.space);
  }
  const int32_t* ints(const Ref& ref) const {
    if (ref.space == Space::input) return inputs[static_cast<size_t>(ref.offset)];
    return reinterpret_cast<const int32_t*>(floats(ref));
  }
};

// One operation. Every thread calls run(); operations share out their work through `shares`, one for each phase.
class Op {
public:
  virtual ~Op() = default;
  virtual void run(const Step& step, Worker& worker) = 0;
  // How often its threads share out work: the number of `shares`.
  virtual int phases() const { return 2; }
  // Scratch that each thread needs, bytes.
  virtual size_t scratch_bytes() const { return 0; }
  // Asks memory for what thread `thread` of `threads` will touch first, before it waits for the others: constants and pages, not what the
  // operation before this one makes.
  virtual void ask_ahead(const Step& step, int thread, int threads) const { (void)step, (void)thread, (void)threads; }

  const char* name = "";
  bool barrier = true;  // all threads meet before it, because it depends on what came before
  Space rows = Space::fixed;  // it has nothing to do in a step without such rows
  std::vector<Shares> shares;
};

// The layer of a PagedKV state: where its keys and values lie in a page, and which block table it uses.
struct KvLayer {
  int64_t group = 0;
  int64_t offset = 0;  // bytes from the start of a page
  KvLayout layout;
};

class Tape {
public:
  Tape(std::shared_ptr<ThreadPool> pool, const Kernels& kernels, const linear::LinearKernels& linear, std::shared_ptr<KvPool> kv);

  // Sizes of the arenas in numbers (per row for all but fixed), and the largest step that is expected, without pooled rows. A larger one
  // grows them.
  void set_arenas(std::array<int64_t, kArenas> numbers, int64_t max_tokens, int64_t max_rows);
  void add(std::unique_ptr<Op> op, const char* name, bool barrier);
  // The operation that was added last only makes rows of `space`.
  void makes_rows(Space space) { ops_.back()->rows = space; }
  int64_t size() const { return static_cast<int64_t>(ops_.size()); }
  // Keeps something alive as long as the tape.
  void keep(std::shared_ptr<const void> thing) { kept_.push_back(std::move(thing)); }

  // Points the tape at a step. The arrays must stay until the last run_range.
  void begin(const Step& step);
  // Runs operations [first, last) of the current step.
  void run_range(int64_t first, int64_t last);
  // The current step, with its arenas.
  const Step& step() const { return step_; }
  // Samples from `logits` of the current step.
  void sample(const Ref& logits, int64_t width, const SampleArrays& in, int64_t vocab_size, const SampledArrays& out);

  // Seconds that each operation took since profiling was switched on, as the first thread saw it; all threads meet between operations.
  void set_profile(bool on);
  const std::vector<double>& seconds() const { return seconds_; }
  const char* name(int64_t index) const { return ops_[static_cast<size_t>(index)]->name; }

private:
  // An operation of the current stretch that has something to do. meet: all threads meet before it.
  struct Active {
    Op* op;
    int64_t index;
    bool meet;
  };

  void grow(std::array<int64_t, kArenas> units);
  void activate(int64_t first, int64_t last);

  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<KvPool> kv_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Active> active_;
  std::vector<std::shared_ptr<const void>> kept_;
  std::array<int64_t, kArenas> numbers_{}, units_{};
  std::array<std::unique_ptr<LazyMemory>, kArenas> memory_;
  Step step_;
  Sampler sampler_;
  Shares sample_shares_;
  bool profile_ = false;
  std::vector<double> seconds_;
};

}  // namespace trivium
