// Rows of activations: their norms, and what products read of them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "byte_products.h"
#include "vectors.h"

namespace specdec {

// A row is divided by the root of its mean square plus epsilon, less its mean
// before if `center`. Then it is multiplied with `scale`, if there is one, and
// `bias` is added, if there is one.
struct Norm {
  const float* scale = nullptr;  // [width]; without one, rows stay as they are.
  const float* bias = nullptr;  // [width] or null.
  float epsilon = 0.0f;
  bool center = false;
};

// The norm of a row of `width` values; `to` may be `from`.
inline void Normalize(const Norm& norm, const float* from, int64_t width,
                      float* to) {
  float mean = 0.0f;
  if (norm.center) {
    LaneSums sum;
    for (int64_t i = 0; i < width; i += kLanes) {
      sum.At(i) += LoadFloats(from + i, width - i);
    }
    mean = sum.Total() / width;
  }
  LaneSums squares;
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats shifted = LoadFloats(from + i, width - i) - mean;
    StoreFirst(to + i, shifted, width - i);
    const Floats kept = LoadFloats(to + i, width - i);
    squares.At(i) += kept * kept;
  }
  const float factor = 1.0f / std::sqrt(squares.Total() / width + norm.epsilon);
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    Floats scaled =
        LoadFloats(to + i, left) * factor * LoadFloats(norm.scale + i, left);
    if (norm.bias != nullptr) scaled += LoadFloats(norm.bias + i, left);
    StoreFirst(to + i, scaled, left);
  }
}

// Rows as products read them, rounded to the dtype of the weights. Each begins a
// cache line, and is followed by zeros up to whole words and to `stride`.
struct Rows {
  static constexpr int64_t kLine = 16;  // Words of a cache line.

  int64_t count;
  int64_t stride;  // In words of 32 bits.
  std::vector<float> scale;  // By row.
  std::vector<int32_t> start;  // By row, see `Int8`.
  std::unique_ptr<uint32_t[]> memory;
  uint32_t* words;

  // Strides are odd numbers of cache lines, so that rows share no place there.
  Rows(int64_t count, int64_t words_per_row)
      : count(count),
        stride(((words_per_row + kLine - 1) / kLine | 1) * kLine),
        scale(count),
        start(count),
        memory(new uint32_t[count * stride + kLine]) {
    const auto address = reinterpret_cast<uintptr_t>(memory.get());
    words = memory.get() + (-address / 4) % kLine;
  }

  uint32_t* row(int64_t index) const { return words + index * stride; }
};

// The largest absolute value; NaN is larger than all others.
inline float Peak(const float* row, int64_t width) {
  Words peaks = {};  // Bits are in the order of non-negative numbers.
  for (int64_t i = 0; i < width; i += kLanes) {
    const Words bits = LoadFirst<Words>(row + i, width - i) & 0x7fffffff;
    peaks = bits > peaks ? bits : peaks;
  }
  uint32_t peak = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    peak = std::max<uint32_t>(peak, peaks[lane]);
  }
  return BitCast<float>(peak);
}

// Rounds a row to integers times a scale, which is returned. `start` becomes
// minus kExcess times the sum of the integers.
inline float RoundToIntegers(const float* row, int64_t width, int8_t* to,
                             int32_t* start) {
  const float peak = Peak(row, width);
  *start = 0;
  if (!(peak <= std::numeric_limits<float>::max())) {
    // The products of a row that is not finite are not finite either.
    std::memset(to, 0, width);
    return std::numeric_limits<float>::quiet_NaN();
  }
  // The scale of a tiny row may be 0, as denormal numbers are.
  const float scale = peak / 127.0f > 0.0f ? peak / 127.0f : 1.0f;
  using SignedBytes = int8_t __attribute__((vector_size(kLanes)));
  const Floats magic = Floats{} + 12582912.0f;  // See `Exp`.
  Ints sums = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats quotient = LoadFloats(row + i, width - i) / scale;
    const Ints rounded =
        __builtin_convertvector((quotient + magic) - magic, Ints);
    sums += rounded;
    StoreFirst(to + i, __builtin_convertvector(rounded, SignedBytes),
               width - i);
  }
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  *start = -kExcess * sum;
  return scale;
}

}  // namespace specdec
