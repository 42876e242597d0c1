#include "ops_linear.h"

#include <algorithm>
#include <utility>

namespace trivium {
namespace {

int64_t tiles_of(const Target& target) { return (target.matrix.out + linear::kTile - 1) / linear::kTile; }

// `bytes` rounded up to whole cache lines.
size_t lines(int64_t bytes) { return static_cast<size_t>((bytes + linear::kAlign - 1) / linear::kAlign * linear::kAlign); }

linear::Output output_of(const Step& step, const Target& target, bool accumulate) {
  return {step.floats(target.y), target.matrix.out, target.bias.present() ? step.floats(target.bias) : nullptr, accumulate};
}

}  // namespace

bool Project::reads_plain() const {
  return std::any_of(targets.begin(), targets.end(), [](const Target& t) { return !linear::needs_quantised(t.matrix.layout); });
}

linear::Records Project::records() const {
  auto all = linear::Records::none;
  for (const Target& target : targets) all = all | linear::records_of(target.matrix.layout);
  return all;
}

int64_t Project::up_bytes() const {
  const int64_t width = !is_gated ? 0 : handed.present() ? linear::kPart : kTilesAtATime * linear::kTile;
  return kTileRowsAtATime * width * static_cast<int64_t>(sizeof(float));
}

bool Project::hands_over(int64_t rows, int64_t width, int64_t threads) {
  const int64_t pieces = (rows + kTileRowsAtATime - 1) / kTileRowsAtATime * linear::QuantisedRows::parts_of(width);
  return rows > kOwnRows && pieces >= 2 * threads;
}

size_t Project::scratch_bytes() const {
  const int64_t row = in_ * static_cast<int64_t>(sizeof(float));
  return lines(kOwnRows * row) + lines(row) + lines(up_bytes()) * (handed.present() ? 2 : 1) + lines(kOwnRows * linear::QuantisedRows::row_bytes(in_, records()));
}

Project::Scratch Project::scratch_of(Worker& worker) const {
  const int64_t row = in_ * static_cast<int64_t>(sizeof(float));
  uint8_t* at = static_cast<uint8_t*>(worker.scratch());
  Scratch s;
  s.rows = reinterpret_cast<float*>(at);
  s.row = reinterpret_cast<float*>(at += lines(kOwnRows * row));
  s.up = reinterpret_cast<float*>(at += lines(row));
  s.gated = reinterpret_cast<float*>(at += handed.present() ? lines(up_bytes()) : 0);
  s.records = at + lines(up_bytes());
  return s;
}

void Project::prepare_row(const Step& step, int64_t row, bool keep_sum, float* normed, const linear::QuantisedRows& records,
                          float* spare) const {
  const float* x = step.floats(x_) + row * in_;
  if (norm.kind != NormSpec::Kind::none) {
    float* y = normed != nullptr ? normed + row * in_ : spare;
    if (other.present()) {
      float* added = keep_sum ? step.floats(sum) + row * in_ : y;
      step.kernels->add(x, step.floats(other) + row * in_, added, in_);
      x = added;
    }
    norm.apply(step, x, y, in_);
    x = y;
  }
  if (records.data != nullptr) step.linear->quantise_row(x, records, row);
}

// The input that the matrices read: x itself, or what all threads (or, with few rows, each for itself) make of it.
linear::Input Project::prepare(const Step& step, Worker& worker, const Scratch& scratch) {
  const int64_t rows = step.count(rows_);
  const bool own = rows <= kOwnRows, has_norm = norm.kind != NormSpec::Kind::none;
  const linear::Records kinds = records();
  const bool quantises = kinds != linear::Records::none;
  linear::Input input{step.floats(x_), in_, {}};
  if (takes_over && hands_over(rows, in_, worker.threads())) {
    input.quantised = {step.floats(quantised), in_, kinds};
    return input;
  }
  if (quantises) input.quantised = {own ? static_cast<void*>(scratch.records) : step.floats(quantised), in_, kinds};
  float* made = !has_norm || !reads_plain() ? nullptr : own ? scratch.rows : step.floats(normed);
  if (has_norm) input.x = made;
  if (!has_norm && !quantises) return input;
  if (own) {
    for (int64_t r = 0; r < rows; ++r) prepare_row(step, r, worker.index() == 0, made, input.quantised, scratch.row);
  } else {
    share_rows(worker, shares[0], rows, row_grain(in_), [&](int64_t r) { prepare_row(step, r, true, made, input.quantised, scratch.row); });
    worker.barrier();
  }
  return input;
}

// Tiles are numbered through all targets.
void Project::multiply(const Step& step, const linear::Input& input, linear::Range rows, linear::Range tiles) const {
  for (const Target& target : targets) {
    const int64_t count = tiles_of(target);
    const int64_t begin = std::max<int64_t>(tiles.begin, 0), end = std::min(tiles.end, count);
    if (begin < end) {
      const linear::Range outs{begin * linear::kTile, std::min(end * linear::kTile, target.matrix.out)};
      step.linear->multiply(target.matrix, input, rows, outs, output_of(step, target, accumulate));
    }
    tiles = {tiles.begin - count, tiles.end - count};
  }
}

void Project::multiply_gated(const Step& step, const linear::Input& input, linear::Range rows, linear::Range tiles, float* up) const {
  const linear::Output out = output_of(step, targets[0], false);
  const int64_t begin = tiles.begin * linear::kTile, end = std::min(tiles.end * linear::kTile, targets[0].matrix.out), n = end - begin;
  step.linear->multiply(targets[0].matrix, input, rows, {begin, end}, out);
  const linear::Input shifted = from_row(input, rows.begin);
  const float* bias = targets[1].bias.present() ? step.floats(targets[1].bias) + begin : nullptr;
  step.linear->multiply(targets[1].matrix.rows(begin, n), shifted, {0, rows.end - rows.begin}, {0, n}, {up, n, bias, false});
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    float* y = out.y + r * out.ldy + begin;
    step.kernels->gated(y, up + (r - rows.begin) * n, gate, y, n);
  }
}

// Part `part` of the gated result for some rows: both products stay in this thread's memory until the part is quantised.
void Project::multiply_into_records(const Step& step, const linear::Input& input, linear::Range rows, int64_t part,
                                    const Scratch& scratch) const {
  const int64_t width = targets[0].matrix.out, begin = part * linear::kPart, n = std::min(linear::kPart, width - begin);
  const int64_t count = rows.end - rows.begin;
  const linear::Input shifted = from_row(input, rows.begin);
  for (const auto& [target, y] : {std::pair{&targets[0], scratch.gated}, std::pair{&targets[1], scratch.up}}) {
    const float* bias = target->bias.present() ? step.floats(target->bias) + begin : nullptr;
    step.linear->multiply(target->matrix.rows(begin, n), shifted, {0, count}, {0, n}, {y, linear::kPart, bias, false});
  }
  const linear::QuantisedRows records(step.floats(handed), width, linear::Records::parts);
  for (int64_t r = 0; r < count; ++r) {
    float* y = scratch.gated + r * linear::kPart;
    step.kernels->gated(y, scratch.up + r * linear::kPart, gate, y, n);
    step.linear->quantise_parts(y, n, records.part(rows.begin + r) + part);
  }
}

void Project::run(const Step& step, Worker& worker) {
  const int64_t rows = step.count(rows_);
  if (rows == 0) return;
  const Scratch scratch = scratch_of(worker);
  const linear::Input input = prepare(step, worker, scratch);
  // Few rows: every thread streams one stretch of the weights, a whole number of pieces as even as tiles allow, and who is done first may take
  // what is left of another's in small pieces. Many: every thread takes bands of rows, those that it prepared, and all weights go by each band,
  // whose rows stay in its second-level cache meanwhile.
  const int64_t threads = worker.threads(), tiles = all_tiles();
  const int64_t bands = rows < kBandRows * threads ? 1 : threads * ((rows * in_ + threads * kBandNumbers - 1) / (threads * kBandNumbers));
  const int64_t least = (tiles + kTilesAtATime - 1) / kTilesAtATime, most = std::max(least, kPieces * threads);
  const bool into_records = handed.present() && hands_over(rows, targets[0].matrix.out, threads);
  const int64_t pieces = into_records ? linear::QuantisedRows::parts_of(targets[0].matrix.out)
                         : bands > 1  ? least
                                      : std::min((most + threads - 1) / threads * threads, tiles);
  const auto band_begin = [&](int64_t band) { return band == bands ? rows : rows * band / bands / linear::kRowBlock * linear::kRowBlock; };
  const auto tile_begin = [&](int64_t piece) { return piece == pieces ? tiles : tiles / 2 * piece / pieces * 2; };  // kernels take pairs
  const int64_t at_a_time = unpacks_once(step.linear->isa) ? kTileRowsAtATime : kRowsAtATime;
  const int64_t blocks = (rows / bands + linear::kRowBlock + at_a_time - 1) / at_a_time;  // of a band, at most
  worker.share(shares[1], bands * pieces * blocks, [&](int64_t item) {
    const int64_t band = item / (pieces * blocks), piece = item / blocks % pieces, row = band_begin(band) + item % blocks * at_a_time;
    const linear::Range some_rows{row, std::min(row + at_a_time, band_begin(band + 1))};
    const linear::Range some_tiles{tile_begin(piece), tile_begin(piece + 1)};
    if (some_rows.begin >= some_rows.end) return;
    if (into_records) {
      multiply_into_records(step, input, some_rows, piece, scratch);
    } else if (is_gated) {
      multiply_gated(step, input, some_rows, some_tiles, scratch.up);
    } else {
      multiply(step, input, some_rows, some_tiles);
    }
  });
}

int64_t Project::all_tiles() const {
  int64_t tiles = 0;
  for (const Target& target : targets) tiles += tiles_of(target);
  return is_gated ? tiles_of(targets[0]) : tiles;
}

void Project::ask_ahead(const Step&, int thread, int threads) const {
  int64_t tile = all_tiles() * thread / threads;
  for (const Target& target : targets) {
    if (tile < tiles_of(target)) {
      const uint8_t* at = target.matrix.data + tile * target.matrix.tile_bytes;
      for (int64_t line = 0; line < kAhead; line += linear::kAlign) __builtin_prefetch(at + line);
      if (!is_gated) return;
    } else {
      tile -= tiles_of(target);
    }
  }
}

}  // namespace trivium
