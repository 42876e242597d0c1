#include "ops_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace trivium {

void Elementwise::run(const Step& step, Worker& worker) {
  constexpr int64_t kChunk = 8192;
  const Kernels& k = *step.kernels;
  const float* a = step.floats(a_);
  const float* b = b_.present() ? step.floats(b_) : nullptr;
  float* y = step.floats(y_);
  const int64_t total = step.count(count_);
  worker.share(shares[0], (total + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t i = chunk * kChunk, n = std::min(kChunk, total - i);
    switch (kind_) {
      case Kind::add: return k.add(a + i, b + i, y + i, n);
      case Kind::mul: return k.mul(a + i, b + i, y + i, n);
      case Kind::scale: return k.scale(a + i, factor, y + i, n);
      case Kind::softcap: return k.softcap(a + i, factor, y + i, n);
      case Kind::activation: return k.activation(a + i, gate.kind, y + i, n);
      case Kind::gated: return k.gated(a + i, b + i, gate, y + i, n);
      case Kind::copy: std::memcpy(y + i, a + i, static_cast<size_t>(n) * sizeof(float));
    }
  });
}

void NormSpec::apply(const Step& step, const float* x, float* y, int64_t n) const {
  const float* w = weight.present() ? step.floats(weight) : nullptr;
  const float* b = bias.present() ? step.floats(bias) : nullptr;
  if (kind == Kind::rms) {
    step.kernels->rms_norm(x, w, eps, offset, y, n);
  } else {
    step.kernels->layer_norm(x, w, b, eps, y, n);
  }
}

void Norm::run(const Step& step, Worker& worker) {
  const float* x = step.floats(x_);
  const float* other = other_.present() ? step.floats(other_) : nullptr;
  float* sum = other_.present() ? step.floats(sum_) : nullptr;
  float* y = step.floats(y_);
  share_rows(worker, shares[0], step.count(rows_), row_grain(n_), [&](int64_t r) {
    const float* row = x + r * n_;
    if (other != nullptr) {
      step.kernels->add(row, other + r * n_, sum + r * n_, n_);
      row = sum + r * n_;
    }
    norm_.apply(step, row, y + r * n_, n_);
    if (residual.present()) step.kernels->add(step.floats(residual) + r * n_, y + r * n_, y + r * n_, n_);
  });
}

void Embedding::run(const Step& step, Worker& worker) {
  const int32_t* ids = step.ints(ids_);
  float* y = step.floats(y_);
  const int64_t n = table_.in;
  share_rows(worker, shares[0], step.count(rows_), row_grain(n), [&](int64_t t) {
    linear::unpack_row(table_, ids[t], y + t * n);
    if (factor_ != 1) step.kernels->scale(y + t * n, factor_, y + t * n, n);
  });
}

void RopeTable::run(const Step& step, Worker& worker) {
  const int32_t* positions = step.ints(positions_);
  const float* inv_freq = step.floats(inv_freq_);
  float* y = step.floats(y_);
  share_rows(worker, shares[0], step.count(tokens_), 8, [&](int64_t t) {
    float* row = y + t * 2 * half_;
    const float position = static_cast<float>(positions[t]);
    for (int64_t i = 0; i < half_; ++i) {
      const float angle = position * inv_freq[i];
      row[i] = std::cos(angle) * scale_;
      row[half_ + i] = std::sin(angle) * scale_;
    }
  });
}

void Rope::run(const Step& step, Worker& worker) {
  const float* x = step.floats(x_);
  const float* table = step.floats(table_);
  float* y = step.floats(y_);
  share_rows(worker, shares[0], step.count(tokens_) * heads_, row_grain(dim_), [&](int64_t i) {
    const float* row = table + i / heads_ * 2 * half_;
    step.kernels->rope(x + i * dim_, row, row + half_, half_, interleaved_, y + i * dim_, dim_);
  });
}

void PositionScale::run(const Step& step, Worker& worker) {
  const float* x = step.floats(x_);
  const int32_t* positions = step.ints(positions_);
  float* y = step.floats(y_);
  share_rows(worker, shares[0], step.count(tokens_), row_grain(n_), [&](int64_t t) {
    const int64_t at = positions[t] + offset, steps = (at - (at < 0 ? period - 1 : 0)) / period;  // floor
    step.kernels->scale(x + t * n_, 1 + beta * std::log1p(static_cast<float>(steps)), y + t * n_, n_);
  });
}

void CopyColumns::run(const Step& step, Worker& worker) {
  const float* x = step.floats(x_) + x_start_;
  float* y = step.floats(y_) + y_start_;
  share_rows(worker, shares[0], step.count(rows_), row_grain(n_), [&](int64_t r) {
    std::memcpy(y + r * y_width_, x + r * x_width_, static_cast<size_t>(n_) * sizeof(float));
  });
}

void GatherRows::run(const Step& step, Worker& worker) {
  const float* x = step.floats(x_);
  const int32_t* index = step.ints(index_);
  float* y = step.floats(y_);
  share_rows(worker, shares[0], step.count(count_), row_grain(n_), [&](int64_t r) {
    std::memcpy(y + r * n_, x + index[r] * n_, static_cast<size_t>(n_) * sizeof(float));
  });
}

}  // namespace trivium
