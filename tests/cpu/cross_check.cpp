// The linear kernels of every instruction set of the machine it runs on: right within what rounding the inputs costs, equal bits
// alone and in a batch, and close to the portable twin; and that checksums have the published value. Prints the names of the sets; see cross.sh.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "checksum.h"
#include "linear/linear.h"

using namespace trivium::linear;

namespace {

constexpr int64_t kIn = 352, kOut = 41, kRows = 29;  // inputs end within a part

// Numbers in [-1, 1) without a pattern.
std::vector<float> noise(int64_t count, uint32_t seed) {
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& x : numbers) {
    seed = seed * 1664525u + 1013904223u;
    x = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f;
  }
  return numbers;
}

std::vector<float> product(const LinearKernels& kernels, const MatrixView& matrix, const std::vector<float>& x, int64_t rows) {
  const Records records = records_of(matrix.layout);
  std::vector<uint8_t> memory(static_cast<size_t>(rows * QuantisedRows::row_bytes(kIn, records) + kAlign));
  auto* aligned = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + kAlign - 1) / kAlign * kAlign);
  const QuantisedRows quantised(aligned, kIn, records);
  for (int64_t row = 0; row < rows && records != Records::none; ++row) kernels.quantise_row(x.data() + row * kIn, quantised, row);
  std::vector<float> y(static_cast<size_t>(rows * kOut));
  kernels.multiply(matrix, {x.data(), kIn, quantised}, {0, rows}, {0, kOut}, {y.data(), kOut});
  return y;
}

// Largest difference over the root mean square of what is expected.
double error(const std::vector<float>& actual, const std::vector<float>& expected) {
  double largest = 0, squares = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(actual[i]) - expected[i]));
    squares += static_cast<double>(expected[i]) * expected[i];
  }
  return largest / std::sqrt(squares / static_cast<double>(expected.size()));
}

void require(bool holds, const char* what, const LinearKernels& kernels, Format format) {
  if (holds) return;
  std::fprintf(stderr, "%s, format %d: %s\n", kernels.name, static_cast<int>(format), what);
  std::exit(1);
}

void check(const LinearKernels& table, Format format) {
  const std::vector<float> weights = noise(kOut * kIn, 1), x = noise(kRows * kIn, 2);
  Arena arena(1 << 20);
  PackedMatrix matrix(arena, choose_layout(format, Storage::float32), kOut, kIn);
  pack_tiles(matrix, {Storage::float32, reinterpret_cast<const uint8_t*>(weights.data()), kIn * 4}, 0, matrix.tiles());
  std::vector<float> expected(static_cast<size_t>(kRows * kOut)), row(static_cast<size_t>(kIn));
  for (int64_t o = 0; o < kOut; ++o) {
    unpack_row(matrix.view(), o, row.data());
    for (int64_t r = 0; r < kRows; ++r) {
      double sum = 0;
      for (int64_t i = 0; i < kIn; ++i) sum += static_cast<double>(row[static_cast<size_t>(i)]) * x[static_cast<size_t>(r * kIn + i)];
      expected[static_cast<size_t>(r * kOut + o)] = static_cast<float>(sum);
    }
  }
  const std::vector<float> y = product(table, matrix.view(), x, kRows);
  require(error(y, expected) < (needs_quantised(matrix.view().layout) ? 0.05 : 1e-5), "the product is wrong", table, format);
  require(error(y, product(kernels(Isa::portable), matrix.view(), x, kRows)) < 2e-6, "the portable twin differs", table, format);
  for (int64_t r = 0; r < kRows; ++r) {
    const std::vector<float> own(x.begin() + r * kIn, x.begin() + (r + 1) * kIn);
    const bool same = std::memcmp(product(table, matrix.view(), own, 1).data(), y.data() + r * kOut, kOut * sizeof(float)) == 0;
    require(same, "a row alone has other bits", table, format);
  }
}

// The check value of CRC-32C, and equality with the portable twin over lengths with and without stretches that are joined.
void check_checksum(const trivium::Checksum& checksum) {
  const std::vector<float> numbers = noise(5000, 3);
  const auto* bytes = reinterpret_cast<const uint8_t*>(numbers.data());
  bool right = checksum.extend(0, reinterpret_cast<const uint8_t*>("123456789"), 9) == 0xe3069283u;
  for (const size_t count : {size_t{0}, size_t{13}, size_t{8192}, size_t{19999}}) {
    right = right && checksum.extend(7, bytes + 1, count) == trivium::checksums().back()->extend(7, bytes + 1, count);
  }
  if (right) return;
  std::fprintf(stderr, "%s: the checksum is wrong\n", checksum.name);
  std::exit(1);
}

}  // namespace

int main() {
  for (const trivium::Checksum* checksum : trivium::checksums()) {
    check_checksum(*checksum);
    std::printf("%s ", checksum->name);
  }
  for (const Isa isa : available_isas()) {
    for (const Format format : {Format::float32, Format::bfloat16, Format::float16, Format::int8, Format::int4, Format::int4_i8}) {
      check(kernels(isa), format);
    }
    std::printf("%s ", kernels(isa).name);
  }
  std::puts("ok");
}
