// Projections: one or more matrices on one input, with what comes before (norm, quantisation) and after (gate, residual).
#pragma once

#include "ops_rows.h"

namespace trivium {

// Where one matrix of a projection writes.
struct Target {
  linear::MatrixView matrix;
  Ref bias;
  Ref y;
};

// input = x, or norm(x), or norm(x + other) (the sum is kept); then for each target y = input W^T + bias, or y += with `accumulate`; or, if
// gated, one y = gate(input W0^T + bias0, input W1^T + bias1). No result may share memory with what is read.
class Project : public Op {
public:
  Project(Ref x, int64_t in, Extent rows) : x_(x), in_(in), rows_(rows) {}
  void run(const Step& step, Worker& worker) override;
  size_t scratch_bytes() const override;
  void ask_ahead(const Step& step, int thread, int threads) const override;

  Ref other, sum;  // a residual that is added before the norm, and where the sum goes
  NormSpec norm;
  Ref normed;      // [rows, in], if there is a norm and a matrix reads plain numbers
  Ref quantised;   // row_bytes(in) a row, if a matrix reads quantised ones
  // Of a gated projection: the rows of the one that reads its result, and nothing else does, which are then made here, part by part as they
  // leave the gate, instead of y; of that one: that they are. Only with rows enough, see hands_over.
  Ref handed;
  bool takes_over = false;
  std::vector<Target> targets;
  bool accumulate = false;
  bool is_gated = false;
  Gate gate;

private:
  // Up to so many rows every thread prepares the input for itself, which is cheaper than waiting for another.
  static constexpr int64_t kOwnRows = 2;
  static constexpr int64_t kRowsAtATime = 3 * linear::kRowBlock;
  static constexpr int64_t kTileRowsAtATime = 128;  // where codes are unpacked once for many
  static constexpr int64_t kTilesAtATime = 8;
  static constexpr int64_t kBandRows = 24;              // a thread, at least
  static constexpr int64_t kBandNumbers = 320 << 10;    // of a band's rows, about; quantised they take twice as many bytes
  static constexpr int64_t kPieces = 4;     // a thread, at least
  static constexpr int64_t kAhead = 2048;   // bytes

  // One thread's memory. If nobody takes over, up is as wide as kTilesAtATime tiles.
  struct Scratch {
    float* rows;         // [kOwnRows][in]
    float* row;          // [in]
    float* up;           // [kTileRowsAtATime][kPart]
    float* gated;        // the same, if there is one who takes over
    uint8_t* records;    // [kOwnRows]
  };

  // Whether a result of `width` numbers goes from one projection to the next as records: both ask with the same numbers.
  static bool hands_over(int64_t rows, int64_t width, int64_t threads);

  int64_t all_tiles() const;
  bool reads_plain() const;
  linear::Records records() const;
  Scratch scratch_of(Worker& worker) const;
  linear::Input prepare(const Step& step, Worker& worker, const Scratch& scratch);
  void prepare_row(const Step& step, int64_t row, bool keep_sum, float* normed, const linear::QuantisedRows& records, float* spare) const;
  void multiply(const Step& step, const linear::Input& input, linear::Range rows, linear::Range tiles) const;
  void multiply_gated(const Step& step, const linear::Input& input, linear::Range rows, linear::Range tiles, float* up) const;
  void multiply_into_records(const Step& step, const linear::Input& input, linear::Range rows, int64_t part, const Scratch& scratch) const;
  int64_t up_bytes() const;

  Ref x_;
  int64_t in_;
  Extent rows_;
};

}  // namespace trivium
