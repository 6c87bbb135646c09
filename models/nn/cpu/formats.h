// The formats of weights, and how each is multiplied.
//
// A packed matrix [out, in] has groups of 32 outputs, each one stream of memory:
//
//   words [out / 32, in / g, 2, 16] of 32 bits, each with g consecutive weights
//   of one output: 1 float32, 2 bfloat16 or 4 int8 (plus 128, so unsigned)
//
// Inputs are padded with zeros to a multiple of 16 words, outputs to whole
// groups. A format says
//
//   Sum        type of a sum
//   kPerWord   weights of a word
//   kFactors   words of a row that are multiplied with one word of weights
//   Round      rounds a row to values times a scale, which is returned
//   Multiply   adds up the products of some rows and a group, all inputs in
//              their order

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "byte_products.h"
#include "rows.h"
#include "vectors.h"

namespace specdec {

constexpr int kBlock = 16;  // Outputs of a block.
constexpr int kGroup = 32;  // Outputs of a group, which has two blocks.
constexpr int kMostRows = 32;  // That are multiplied at once.

// Sums [kMostRows, kGroup] of rows and a group of outputs.
template <typename Format>
using Sums = typename Format::Sum[kMostRows * kGroup];

// The words [words, 32] of a group.
struct Group {
  const uint32_t* words;
  int64_t num_words;
  int kind;  // A kind of blocks.
};

// Vectors of 32-bit lanes, each with the sum of one output of one row.

constexpr int kRegisters = kGroup / kLanes;  // For a group's word.
// Rows whose sums are in registers at once, as many as there is room for.
constexpr int kRows = kLanes == 16 ? 8 : kLanes == 4 ? 4 : 3;
// Rows of a tile that takes a whole group at once; with more it takes halves.
constexpr int kRowsOfGroup = kLanes == 4 ? 2 : kRows;
// Words that tiles of rows take in turn, so that the processor computes with
// words in its cache while it reads the next ones.
constexpr int64_t kWords = 128;
// Prefetch distances in bytes: far goes into the second cache, near into the
// first one. The first cache alone has too few open reads to keep up with the
// memory. On Zen 5 it has enough, so all goes into the first one at once.
constexpr int64_t kFar = 8192, kNear = kIsZen5 ? 8192 : 2048;

// Words `begin` to `end` of a group, and what is prefetched meanwhile.
struct Span {
  Group group;
  int64_t begin, end;
  const char *near, *far;  // Into the first cache, into the second one.
  int64_t step;  // Bytes to what is prefetched with the next word.
};

// Adds the products of R rows from `first` on with a span to `to`, R rows of
// Sums, some registers of outputs after others.
template <typename Format, int R>
void AddProducts(const Rows& rows, int64_t first, const Span& span,
                 typename Format::Sum* to) {
  using Vector = typename Format::Vector;
  constexpr int kParts = R > kRowsOfGroup ? kRegisters / 2 : kRegisters;
  constexpr int kOutputs = kParts * kLanes;
  const uint32_t* x[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) x[r] = rows.row(first + r);
  for (int column = 0; column < kGroup; column += kOutputs, to += kOutputs) {
    Vector sums[R][kParts];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kParts; ++i) {
        sums[r][i] = Load<Vector>(to + r * kGroup + i * kLanes);
      }
    }
    const char *near = span.near + 4 * column, *far = span.far + 4 * column;
    for (int64_t word = span.begin; word < span.end; ++word) {
      for (int64_t line = 0; line < 4 * kOutputs; line += 64) {
        __builtin_prefetch(near + line);
        __builtin_prefetch(far + line, 0, 2);
      }
      near += span.step;
      far += span.step;
      const uint32_t* const words = span.group.words + word * kGroup + column;
      // Where registers have room for the weights of all outputs, a word of a row
      // is read once for them.
#pragma GCC unroll 16
      for (int n = 0; n < R * kParts; ++n) {
        const int r = kLanes == 16 ? n / kParts : n % R;
        const int i = kLanes == 16 ? n % kParts : n / R;
        const Words weights = Format::Weights(Load<Words>(words + i * kLanes));
        sums[r][i] = Format::Step(sums[r][i], weights,
                                  x[r] + word * Format::kFactors);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kParts; ++i) {
        Store(to + r * kGroup + i * kLanes, sums[r][i]);
      }
    }
  }
}

// The same for `count` rows, at most kRows.
template <typename Format, int R = kRows>
void AddProductsOf(int64_t count, const Rows& rows, int64_t first,
                   const Span& span, typename Format::Sum* to) {
  if (count >= R) {
    AddProducts<Format, R>(rows, first, span, to);
  } else if constexpr (R > 1) {
    AddProductsOf<Format, R - 1>(count, rows, first, span, to);
  }
}

// A format that is multiplied by vectors, for any number of rows.
struct Vectors {
  static constexpr int64_t kFewRows = 0;

  static Words Weights(const Words& words) { return words; }

  template <typename Format>
  static void Multiply(const Rows& rows, int64_t first, int64_t count,
                       const Group& group, Sums<Format>& sums) {
    std::fill_n(sums, count * kGroup, 0);
    constexpr int64_t kBytes = 4 * kGroup;  // A word of every output.
    const int64_t tiles = (count + kRows - 1) / kRows;
    const int64_t length = count <= kRowsOfGroup ? group.num_words : kWords;
    const auto* const bytes = reinterpret_cast<const char*>(group.words);
    for (int64_t begin = 0; begin < group.num_words; begin += length) {
      const int64_t end = std::min(begin + length, group.num_words);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t row = tile * kRows;
        const char *near = bytes + begin * kBytes + kNear;
        const char* far = bytes + begin * kBytes + kFar;
        if (tiles > 1) {  // The next turn reads it, and the one after.
          near = bytes + (end + kWords * tile / tiles) * kBytes;
          far = near + kWords * kBytes;
        }
        const Span span{group, begin, end, near, far, kBytes / tiles};
        AddProductsOf<Format>(count - row, rows, first + row, span,
                              sums + row * kGroup);
      }
    }
  }
};

struct Float32 : Vectors {
  using Sum = float;
  using Vector = Floats;
  static constexpr int kPerWord = 1;
  static constexpr int kFactors = 1;

  static float Round(const float* row, int64_t width, uint32_t* to, int32_t*) {
    std::memcpy(to, row, width * sizeof(float));
    return 1.0f;
  }

  static Vector Step(const Vector& sums, const Words& weights,
                     const uint32_t* x) {
    return sums + BitCast<Floats>(weights) * BitCast<float>(*x);
  }
};

struct BFloat16 : Vectors {
  using Sum = float;
  using Vector = Floats;
  static constexpr int kPerWord = 2;

// AMD multiplies pairs of bfloat16 twice as fast as float32, Intel (Sapphire
// Rapids) half as fast. GCC before 12.3 takes Zen 4 for a Zen 3 with AVX-512.
// As by AMD's instruction, the second product of a pair is added first, and each
// sum is rounded: attention relies on the order, see `WeighValues`.
#if defined(__AVX512BF16__) && \
    (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
  static constexpr int kFactors = 1;
  using Factor = uint16_t;

  static Vector Step(const Vector& sums, const Words& weights,
                     const uint32_t* x) {
    return (Vector)_mm512_dpbf16_ps((__m512)sums, BitCast<__m512bh>(weights),
                                    (__m512bh)_mm512_set1_epi32(*x));
  }
#else
  static constexpr int kFactors = 2;
  using Factor = float;

  static Vector Step(const Vector& sums, const Words& weights,
                     const uint32_t* x) {
    const Floats even = BitCast<Floats>(weights << 16);
    const Floats odd = BitCast<Floats>(weights & 0xffff0000u);
    const Floats first = sums + odd * BitCast<float>(x[1]);
    return first + even * BitCast<float>(x[0]);
  }
#endif

  static float Round(const float* row, int64_t width, uint32_t* to, int32_t*) {
    auto* const factors = reinterpret_cast<Factor*>(to);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Words rounded = RoundToBFloat16(LoadFloats(row + i, width - i));
      StoreFloats(factors + i, BitCast<Floats>(rounded), width - i);
    }
    return 1.0f;
  }
};

// Sums are exact. Since the weights are kExcess too large, what is missing of a
// sum is minus kExcess times the sum of the row.
struct Int8 : Vectors {
  using Sum = int32_t;
  using Vector = Ints;
  static constexpr int kPerWord = 4;

  static Words Weights(const Words& words) { return WithExcess(words); }

#if defined(SPECDEC_HAS_PAIRS)
  // Pairs of 16 bits: the weights at even places, then at odd ones.
  static constexpr int kFactors = 2;

  static void Spread(const int8_t* values, uint32_t* words) {
    for (int i = 0; i < 2; ++i) {
      words[i] = static_cast<uint16_t>(values[i]) |
                 static_cast<uint32_t>(values[i + 2]) << 16;
    }
  }

  static Vector Step(const Vector& sums, const Words& weights,
                     const uint32_t* x) {
    using Shorts = uint16_t __attribute__((vector_size(4 * kLanes)));
    Ints result = sums + MultiplyPairs(weights & 0x00ff00ffu, x[0]);
    ComputeNow(result);
    result += MultiplyPairs((Words)((Shorts)weights >> 8), x[1]);
    ComputeNow(result);
    return result;
  }
#else
  static constexpr int kFactors = ByteProducts::kFactors;

  static void Spread(const int8_t* values, uint32_t* words) {
    ByteProducts::Spread(values, words);
  }

  static Vector Step(const Vector& sums, const Words& weights,
                     const uint32_t* x) {
    return ByteProducts::Add(sums, weights, x);
  }
#endif

  static float Round(const float* row, int64_t width, uint32_t* to,
                     int32_t* start) {
    if constexpr (kFactors == 1) {
      return RoundToIntegers(row, width, reinterpret_cast<int8_t*>(to), start);
    }
    thread_local std::vector<int8_t> values;
    values.assign((width + 3) / 4 * 4, 0);
    const float scale = RoundToIntegers(row, width, values.data(), start);
    for (size_t i = 0; i < values.size() / 4; ++i) {
      Spread(values.data() + 4 * i, to + kFactors * i);
    }
    return scale;
  }
};

}  // namespace specdec
