// Products of rows with matrices, and what is done to rows before and to results
// after, in one go.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "formats.h"
#include "rows.h"
#include "threads.h"
#include "vectors.h"

namespace specdec {

struct Bias {
  const void* values;  // [outputs], or null.
  bool is_float32;  // Otherwise bfloat16.
};

struct Matrix {
  const uint32_t* words;  // See formats.h and blocks.h.
  int64_t num_words;  // Per output.
  int kind;  // A kind of blocks.
  int64_t outputs;
  const float* scale;  // [outputs] of int8, otherwise null.
  Bias bias;

  int64_t groups() const { return (outputs + kGroup - 1) / kGroup; }
};

enum class Activation {
  kNone,
  kSilu,
  kGeluTanh,
  kQuickGelu,
  kRelu,
  kClampedSwiglu,  // gpt-oss, if `gated`: quick GELU, then times y_1 + 1.
};

// The largest values that gpt-oss multiplies.
constexpr float kMost = 7.0f;

inline Floats AtMost(float most, const Floats& x) {
  const Floats limit = Floats{} + most;
  return x > limit ? limit : x;
}

inline Floats Activate(Activation activation, const Floats& x) {
  switch (activation) {
    case Activation::kSilu:
      return x * Sigmoid(x);
    case Activation::kGeluTanh:
      return x * Sigmoid(x * 1.59576912f * (1.0f + 0.044715f * (x * x)));
    case Activation::kQuickGelu:
    case Activation::kClampedSwiglu:
      return x * Sigmoid(x * 1.702f);
    case Activation::kRelu:
      return x > 0.0f ? x : Floats{};
    default:
      return x;
  }
}

// Products: for each matrix m the product y_m = norm(x) m + bias, and from
// these [rows, outputs]
//
//   activation(y_0), activation(y_1), ... next to one another, plus residual
//   activation(y_0) * y_1 if `gated`
struct Products {
  const float* x;  // [rows, width]
  int64_t rows, width;
  Norm norm;
  std::vector<Matrix> matrices;
  Activation activation;
  bool gated;
  const float* residual;  // Like `out`, or null.
  float* out;
  int64_t outputs;  // In a row of `out`.
};

// The words of a row of `width` inputs.
template <typename Format>
int64_t RowWords(int64_t width) {
  if constexpr (std::is_same_v<Format, Blocks>) return Blocks::RowWords(width);
  const int64_t size = 16 * Format::kPerWord;
  return (width + size - 1) / size * 16 * Format::kFactors;
}

// The words of an output of `width` inputs, see `Matrix`.
template <typename Format>
int64_t NumWords(int kind, int64_t width) {
  if constexpr (std::is_same_v<Format, Blocks>) {
    return Blocks::NumWords(kind, width);
  }
  return RowWords<Format>(width) / Format::kFactors;
}

template <typename Format>
Rows RoundRows(const Products& products, Team& team) {
  Rows rows(products.rows, RowWords<Format>(products.width));
  auto round = [&](int64_t index) {
    const float* x = products.x + index * products.width;
    if (products.norm.scale != nullptr) {
      thread_local std::vector<float> normalized;
      normalized.resize(products.width);
      Normalize(products.norm, x, products.width, normalized.data());
      x = normalized.data();
    }
    // Blocks fill their rows themselves, in another order.
    const int64_t filled =
        std::is_same_v<Format, Blocks>
            ? 0
            : products.width / Format::kPerWord * Format::kFactors;
    std::fill(rows.row(index) + filled, rows.row(index) + rows.stride, 0);
    rows.scale[index] = Format::Round(x, products.width, rows.row(index),
                                      &rows.start[index]);
  };
  if (products.rows == 1) {
    round(0);  // Sooner than another thread could do it.
  } else {
    team.For(products.rows, round);
  }
  return rows;
}

// Some rows of the outputs of a group.
struct Part {
  int64_t first_row, rows;
  int64_t first, outputs;
};

// From sums to products plus bias, `values`.
template <typename Format>
void Finish(const Rows& rows, const Matrix& matrix, const Part& part,
            const Sums<Format>& sums, float* values) {
  for (int64_t i = 0; i < part.outputs; i += kLanes) {
    const int64_t left = part.outputs - i, at = part.first + i;
    Floats scale = {}, bias = {};
    if constexpr (Format::kPerWord == 4) {
      scale = LoadFloats(matrix.scale + at, left);
    }
    if (matrix.bias.values != nullptr) {
      bias = matrix.bias.is_float32
                 ? LoadFloats(
                       static_cast<const float*>(matrix.bias.values) + at, left)
                 : LoadFloats(
                       static_cast<const uint16_t*>(matrix.bias.values) + at,
                       left);
    }
    for (int64_t row = 0; row < part.rows; ++row) {
      const auto* const sum = sums + row * kGroup + i;
      Floats product;
      if constexpr (Format::kPerWord == 4) {
        const int64_t index = part.first_row + row;
        const Ints whole = Load<Ints>(sum) + rows.start[index];
        product = __builtin_convertvector(whole, Floats) *
                  (scale * rows.scale[index]);
      } else {
        product = Load<Floats>(sum);
      }
      Store(values + row * kGroup + i, product + bias);
    }
  }
}

// The activations of some products, times other products or plus a residual.
inline void Emit(const Products& products, const Part& part, int64_t column,
                 const float* values, const float* factors) {
  for (int64_t row = 0; row < part.rows; ++row) {
    const int64_t at = (part.first_row + row) * products.outputs + column;
    for (int64_t i = 0; i < part.outputs; i += kLanes) {
      const int64_t left = part.outputs - i;
      auto value = Load<Floats>(values + row * kGroup + i);
      const bool clamped =
          products.activation == Activation::kClampedSwiglu;
      if (clamped) value = AtMost(kMost, value);
      Floats result = Activate(products.activation, value);
      if (factors != nullptr) {
        auto factor = Load<Floats>(factors + row * kGroup + i);
        if (clamped) {
          factor = 1.0f - AtMost(kMost, -AtMost(kMost, factor));
        }
        result *= factor;
      }
      if (products.residual != nullptr) {
        result += LoadFloats(products.residual + at + i, left);
      }
      StoreFirst(products.out + at + i, result, left);
    }
  }
}

// Groups of outputs that are computed for some rows.
struct Task {
  int64_t matrix, group;
  int64_t column;  // The matrix's first output.
};

template <typename Format>
void MultiplyTask(const Products& products, const Rows& rows, const Task& task,
                  int64_t begin, int64_t end) {
  alignas(64) Sums<Format> sums;
  alignas(64) float values[2][kMostRows * kGroup];
  const int64_t start = task.group * kGroup;
  for (int64_t row = begin; row < end; row += kMostRows) {
    const Matrix* matrix = &products.matrices[task.matrix];
    const Part part{row, std::min<int64_t>(end - row, kMostRows), start,
                    std::min<int64_t>(matrix->outputs - start, kGroup)};
    for (int i = 0; i < (products.gated ? 2 : 1); ++i, ++matrix) {
      const Group group{matrix->words + start * matrix->num_words,
                        matrix->num_words, matrix->kind};
      Format::template Multiply<Format>(rows, row, part.rows, group, sums);
      Finish<Format>(rows, *matrix, part, sums, values[i]);
    }
    Emit(products, part, task.column + start, values[0],
         products.gated ? values[1] : nullptr);
  }
}

// Rows that are multiplied with all matrices before others are, so that they
// stay in the second cache of the processor.
constexpr int64_t kRowBytes = 1 << 20;

template <typename Format, typename Pool>
void Compute(Pool& pool, const Products& products) {
  std::vector<Task> tasks;
  int64_t column = 0, bytes = 0;
  for (size_t i = 0; i < products.matrices.size(); ++i) {
    const Matrix& matrix = products.matrices[i];
    bytes += matrix.groups() * kGroup * matrix.num_words * 4;
    if (products.gated && i > 0) continue;
    for (int64_t group = 0; group < matrix.groups(); ++group) {
      tasks.push_back({static_cast<int64_t>(i), group, column});
    }
    column += matrix.outputs;
  }
  const int64_t tiles = (products.rows + 7) / 8;
  Team team(pool, tasks.size(), bytes * tiles);
  const Rows rows = RoundRows<Format>(products, team);
  const int64_t most =
      std::max<int64_t>(kRowBytes / (4 * rows.stride) / kMostRows, 2) *
      kMostRows;
  const int64_t parts = (rows.count + most - 1) / most;
  const int64_t num_tasks = tasks.size();
  team.For(parts * num_tasks, [&](int64_t index) {
    const int64_t begin = index / num_tasks * most;
    MultiplyTask<Format>(products, rows, tasks[index % num_tasks], begin,
                         std::min(begin + most, rows.count));
  });
}

}  // namespace specdec
