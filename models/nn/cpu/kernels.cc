// Products, attention, norms and mixtures of few rows on CPU, called from XLA
// programs.
//
// Every sum is added up in an order that depends on nothing but its own terms:
// not on the number of rows, their places, the threads or masked slots. So a
// position has the same bits alone, in a batch and in a token tree.
//
// Vectors are GCC's vector extension, which Clang has, too, and which compiles
// to whatever the processor has (AVX-512, AVX2, NEON, none). Only the dot
// products of bfloat16 and int8 have instructions of their own below.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

namespace ffi = xla::ffi;

// Values of 32 bits in a register.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Bytes = uint8_t __attribute__((vector_size(kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));

template <typename To, typename From>
To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename Vector>
Vector Load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

// The first `count` values; the other lanes are zero.
template <typename Vector, typename Value>
Vector LoadFirst(const Value* from, int64_t count) {
  if (count >= kLanes) return Load<Vector>(from);
  Vector vector = {};
  std::memcpy(&vector, from, count * sizeof(Value));
  return vector;
}

void Store(float* to, const Floats& vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

void StoreFirst(float* to, const Floats& vector, int64_t count) {
  std::memcpy(to, &vector, std::min<int64_t>(count, kLanes) * sizeof(float));
}

// Values of a cache as float32.
Floats LoadFloats(const float* from, int64_t count) {
  return LoadFirst<Floats>(from, count);
}

Floats LoadFloats(const uint16_t* from, int64_t count) {
  const Halves halves = LoadFirst<Halves>(from, count);
  return BitCast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

float ToFloat(float value) { return value; }

float ToFloat(uint16_t value) {
  return BitCast<float>(static_cast<uint32_t>(value) << 16);
}

// The sum of the lanes, halves first.
float Sum(const Floats& vector) {
  float lanes[kLanes];
  std::memcpy(lanes, &vector, sizeof(lanes));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

constexpr int64_t kMinBytes = 1 << 18;  // A thread takes longer to wake up.

// Calls `body(i)` for all i below `count`, on this thread and, if `bytes` are
// many, on the pool's.
//
// This thread works, too, and waits only for indices that another thread has
// begun, so a pool that is busy or blocked delays nothing.
template <typename Body>
void ParallelFor(ffi::ThreadPool& pool, int64_t count, int64_t bytes,
                 const Body& body) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto state = std::make_shared<State>();
  auto work = [state, count, &body] {
    // A task that starts late gets no index, and does not touch `body`.
    for (int64_t i; (i = state->next.fetch_add(1)) < count;) {
      body(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t tasks =
      bytes < kMinBytes ? 0 : std::min(pool.num_threads(), count) - 1;
  for (int64_t task = 0; task < tasks; ++task) {
    pool.Schedule(decltype(work)(work));
  }
  work();
  while (state->done.load(std::memory_order_acquire) < count) {
    std::this_thread::yield();
  }
}

// Products.
//
// A packed matrix [out, in] has blocks of 16 outputs, in multiples of three:
//
//   words [out / 16, in / g, 16] of 32 bits, each with g consecutive weights of
//   one output: 1 float32, 2 bfloat16 or 4 int8 (plus 128, so unsigned)
//
// The sums of a few rows and blocks are kept in registers while going over the
// inputs in order. Rows are packed, too, so that what is multiplied with a word
// of weights is read from one place.

constexpr int kBlock = 16;
constexpr int kParts = kBlock / kLanes;  // Registers of a block.

// How each dtype is multiplied. `Round` rounds a row to values of the dtype
// times a scale, which it returns; `Put` writes kPerWord of them as kFactors
// words; `Step` adds the products of a register of weights with those words to
// sums that start at `*start`.

struct Float32 {
  using Value = float;
  using Sums = Floats;
  static constexpr int kPerWord = 1;
  static constexpr int kFactors = 1;

  static float Round(const float* row, int64_t width, float* values, int32_t*) {
    std::copy(row, row + width, values);
    return 1.0f;
  }

  static void Put(const float* value, uint32_t* words) {
    *words = BitCast<uint32_t>(*value);
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    return sums + BitCast<Floats>(weights) * BitCast<float>(*x);
  }
};

// The bits of the nearest bfloat16, ties to even.
inline uint32_t RoundToBFloat16(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return is_nan ? (bits >> 16) | 0x40 : rounded;
}

struct BFloat16 {
  using Value = uint16_t;
  using Sums = Floats;
  static constexpr int kPerWord = 2;

  static float Round(const float* row, int64_t width, uint16_t* values,
                     int32_t*) {
    for (int64_t i = 0; i < width; ++i) values[i] = RoundToBFloat16(row[i]);
    return 1.0f;
  }

// AMD multiplies pairs of bfloat16 twice as fast as float32, Intel (Sapphire
// Rapids) half as fast. GCC before 12.3 takes Zen 4 for a Zen 3 with AVX-512.
#if defined(__AVX512BF16__) && \
    (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
  static constexpr int kFactors = 1;

  static void Put(const uint16_t* values, uint32_t* words) {
    *words = values[0] | static_cast<uint32_t>(values[1]) << 16;
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    return (Sums)_mm512_dpbf16_ps((__m512)sums, BitCast<__m512bh>(weights),
                                  (__m512bh)_mm512_set1_epi32(*x));
  }
#else
  static constexpr int kFactors = 2;

  static void Put(const uint16_t* values, uint32_t* words) {
    words[0] = static_cast<uint32_t>(values[0]) << 16;
    words[1] = static_cast<uint32_t>(values[1]) << 16;
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    const Floats even = BitCast<Floats>(weights << 16);
    const Floats odd = BitCast<Floats>(weights & 0xffff0000u);
    const Floats first = sums + even * BitCast<float>(x[0]);
    return first + odd * BitCast<float>(x[1]);
  }
#endif
};

struct Int8 {
  using Value = int8_t;
  using Sums = Ints;
  static constexpr int kPerWord = 4;

#if defined(__AVX512VNNI__)
  static constexpr int kFactors = 1;

  static void Put(const int8_t* values, uint32_t* words) {
    std::memcpy(words, values, 4);
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights,
                                     _mm512_set1_epi32(*x));
  }
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
  // Pairs of 16 bits: the weights at even places, then those at odd ones.
  static constexpr int kFactors = 2;

  static void Put(const int8_t* values, uint32_t* words) {
    for (int i = 0; i < 2; ++i) {
      words[i] = static_cast<uint16_t>(values[i]) |
                 static_cast<uint32_t>(values[i + 2]) << 16;
    }
  }

  static Ints MultiplyPairs(const Words& weights, uint32_t x) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(x));
#else
    return (Ints)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(x));
#endif
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    return sums + MultiplyPairs(weights & 0x00ff00ffu, x[0]) +
           MultiplyPairs(weights >> 8 & 0x00ff00ffu, x[1]);
  }
#else
  static constexpr int kFactors = 4;

  static void Put(const int8_t* values, uint32_t* words) {
    std::copy(values, values + 4, words);
  }

  static Sums Step(const Sums& sums, const Words& weights, const uint32_t* x) {
    Sums result = sums;
    for (int place = 0; place < 4; ++place) {
      const Words bytes = weights >> 8 * place & 0xffu;
      result += BitCast<Ints>(bytes) * static_cast<int32_t>(x[place]);
    }
    return result;
  }
#endif

  // Rounds a row to integers times a scale. Since the weights are 128 too
  // large, the sums start at minus 128 times the sum of the row.
  static float Round(const float* row, int64_t width, int8_t* values,
                     int32_t* start) {
    uint32_t bits = 0;  // Of the largest; in the order of non-negative floats.
    for (int64_t i = 0; i < width; ++i) {
      bits = std::max(bits, BitCast<uint32_t>(row[i]) & 0x7fffffff);
    }
    // The products of a row that is not finite are not finite either.
    if (bits >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
    const float peak = BitCast<float>(bits);
    // The scale of a tiny row may be 0, as denormal numbers are.
    const float scale = peak / 127.0f > 0.0f ? peak / 127.0f : 1.0f;
    int32_t sum = 0;
    for (int64_t i = 0; i < width; ++i) {
      const auto value = static_cast<int32_t>(std::nearbyint(row[i] / scale));
      sum += value;
      values[i] = value;
    }
    *start = -128 * sum;
    return scale;
  }
};

// Rows and blocks that are multiplied at once, as many as registers hold.
#if defined(__AVX512F__)
constexpr int kRows = 8, kBlocks = 3;  // 24 sums of 32 registers.
#elif defined(__AVX__)
constexpr int kRows = 6, kBlocks = 1;  // 12 of 16.
#else
constexpr int kRows = 4, kBlocks = 1;  // 16 of 32 (Arm).
#endif
constexpr int kTiles = 4;  // Whose sums are in registers and the first cache.
// That tiles take in turn, and that are prefetched ahead.
constexpr int64_t kWords = 48;

// Packed rows: tiles of kRows rows (the last of fewer), each
// [words of weights, rows, kFactors].
struct Rows {
  int64_t count;
  int64_t words;  // Of the weights of an output.
  std::vector<uint32_t> packed;
  std::vector<float> scale;
  std::vector<int32_t> start;
};

template <typename Kind>
Rows PackRows(const float* x, int64_t count, int64_t width) {
  const int64_t words = (width + Kind::kPerWord - 1) / Kind::kPerWord;
  Rows rows{count, words, std::vector<uint32_t>(count * words * Kind::kFactors),
            std::vector<float>(count), std::vector<int32_t>(count)};
  std::vector<typename Kind::Value> values(words * Kind::kPerWord);
  for (int64_t row = 0; row < count; ++row) {
    const int64_t first = row / kRows * kRows;
    const int64_t stride =
        std::min<int64_t>(kRows, count - first) * Kind::kFactors;
    uint32_t* const to =
        rows.packed.data() + (first * words + row - first) * Kind::kFactors;
    rows.scale[row] =
        Kind::Round(x + row * width, width, values.data(), &rows.start[row]);
    for (int64_t word = 0; word < words; ++word) {
      Kind::Put(values.data() + word * Kind::kPerWord, to + word * stride);
    }
  }
  return rows;
}

struct Columns {  // Outputs that are multiplied at once.
  const uint32_t* blocks;
  const float* scale;  // Of int8.
  int64_t count;  // Of outputs from here to the end.
  float* out;
  int64_t stride;  // Of `out`, from row to row.
};

constexpr int kRegisters = kBlocks * kParts;

// The sums of a row.
template <typename Kind>
using RowSums = typename Kind::Sums[kRegisters];

// Some of the weights of kBlocks blocks, and those to prefetch meanwhile.
struct Span {
  const uint32_t* blocks;
  int64_t begin, end;  // Words.
  int64_t ahead;  // Bytes from the first of the words to what is prefetched.
  int64_t step;  // Bytes to what is prefetched with the next word.
};

// Adds the products of R rows from `first` on with a span of weights to `to`.
template <typename Kind, int R>
void AddProducts(const Rows& rows, int64_t first, const Span& span,
                 RowSums<Kind>* to) {
  typename Kind::Sums sums[R][kRegisters];
  std::memcpy(sums, to, sizeof(sums));
  const uint32_t* x = rows.packed.data() +
                      (first * rows.words + span.begin * R) * Kind::kFactors;
  const uint32_t* from = span.blocks + span.begin * kBlock;
  const char* next = reinterpret_cast<const char*>(from) + span.ahead;
  for (int64_t word = span.begin; word < span.end; ++word) {
    Words weights[kRegisters];
    for (int c = 0; c < kBlocks; ++c) {
      for (int part = 0; part < kParts; ++part) {
        weights[c * kParts + part] =
            Load<Words>(from + c * rows.words * kBlock + part * kLanes);
      }
      __builtin_prefetch(next + c * rows.words * kBlock * 4);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        sums[r][i] = Kind::Step(sums[r][i], weights[i], x + r * Kind::kFactors);
      }
    }
    x += R * Kind::kFactors;
    from += kBlock;
    next += span.step;
  }
  std::memcpy(to, sums, sizeof(sums));
}

// The same for `count` rows, at most kRows.
template <typename Kind, int R = kRows>
void AddProductsOf(int64_t count, const Rows& rows, int64_t first,
                   const Span& span, RowSums<Kind>* to) {
  if (count >= R) {
    AddProducts<Kind, R>(rows, first, span, to);
  } else if constexpr (R > 1) {
    AddProductsOf<Kind, R - 1>(count, rows, first, span, to);
  }
}

// Multiplies `count` rows from `first` on, at most kTiles * kRows, with the
// outputs of kBlocks blocks.
//
// All tiles take some words in turn, so that the processor computes with those
// in its cache while it reads the next ones.
template <typename Kind>
void MultiplyColumns(const Rows& rows, int64_t first, int64_t count,
                     const Columns& columns) {
  RowSums<Kind> sums[kTiles * kRows];
  for (int64_t row = 0; row < count; ++row) {
    typename Kind::Sums start = {};
    if constexpr (Kind::kPerWord == 4) start += rows.start[first + row];
    std::fill_n(sums[row], kRegisters, start);
  }
  constexpr int64_t kBytes = 4 * kBlock;  // Of a word of every output.
  const int64_t tiles = (count + kRows - 1) / kRows;
  // One tile has no turns; only what it prefetches changes near the end.
  const int64_t length =
      tiles == 1 ? std::max(rows.words - kWords, kWords) : kWords;
  for (int64_t begin = 0; begin < rows.words; begin += length) {
    const int64_t end = std::min(begin + length, rows.words);
    // After the last words come the first ones of the next blocks.
    const int64_t next =
        end < rows.words ? begin + kWords : kBlocks * rows.words;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = tile * kRows;
      const int64_t ahead = next - begin + kWords * tile / tiles;
      AddProductsOf<Kind>(
          count - row, rows, first + row,
          {columns.blocks, begin, end, kBytes * ahead, kBytes / tiles},
          sums + row);
    }
  }
  for (int64_t row = 0; row < count; ++row) {
    for (int i = 0; i < kRegisters && i * kLanes < columns.count; ++i) {
      const int64_t left = columns.count - i * kLanes;
      float* const to =
          columns.out + (first + row) * columns.stride + i * kLanes;
      if constexpr (Kind::kPerWord == 4) {
        const Floats scale = LoadFloats(columns.scale + i * kLanes, left);
        const Floats product = __builtin_convertvector(sums[row][i], Floats);
        StoreFirst(to, product * (scale * rows.scale[first + row]), left);
      } else {
        StoreFirst(to, sums[row][i], left);
      }
    }
  }
}

// x [rows, in] times a packed matrix; scale [out] of int8, [0] of floats.
template <typename Kind>
ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                    ffi::Buffer<ffi::U32> packed, ffi::Buffer<ffi::F32> scale,
                    ffi::ResultBuffer<ffi::F32> out) {
  const auto dims = packed.dimensions();
  const int64_t num_blocks = dims[0], words = dims[1];
  const int64_t width = x.dimensions()[1], outputs = out->dimensions()[1];
  const Rows rows = PackRows<Kind>(x.typed_data(), x.dimensions()[0], width);
  if (rows.words != words || outputs > num_blocks * kBlock) {
    return ffi::Error::InvalidArgument("shapes of a packed product differ");
  }
  const int64_t tiles = (rows.count + kRows - 1) / kRows;
  const int64_t bytes = tiles * packed.size_bytes();
  // A thread takes some neighbours, and prefetches from one to the next.
  const int64_t count = num_blocks / kBlocks;
  // XLA reports 0 threads where it does not know the number.
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t taken = std::clamp<int64_t>(count / (8 * threads), 1, 8);
  ParallelFor(pool, (count + taken - 1) / taken, bytes, [&](int64_t part) {
    const int64_t end = std::min(count, (part + 1) * taken);
    for (int64_t index = part * taken; index < end; ++index) {
      const int64_t block = index * kBlocks, start = block * kBlock;
      const Columns columns{packed.typed_data() + block * words * kBlock,
                            scale.typed_data() + start, outputs - start,
                            out->typed_data() + start, outputs};
      // The blocks stay in the processor's second cache.
      constexpr int64_t kMost = kTiles * kRows;
      for (int64_t row = 0; row < rows.count; row += kMost) {
        const int64_t left = std::min(kMost, rows.count - row);
        MultiplyColumns<Kind>(rows, row, left, columns);
      }
    }
  });
  return ffi::Error::Success();
}

// Attention.

// e to the power of x <= 0, and 0 below -87 (a polynomial after Cephes' expf).
Floats Exp(Floats x) {
  const Floats lowest = Floats{} - 87.0f;
  const Ints is_low = x < lowest;
  x = is_low ? lowest : x;
  // 1.5 * 2^23 rounds to integers.
  const Floats magic = Floats{} + 12582912.0f;
  const Floats n = (x * 1.44269504f + magic) - magic;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Floats result = p * BitCast<Floats>(exponent);
  return is_low ? Floats{} : result;
}

// Queries [B, Hq, L, Dh], keys and values [B, H, S, Dh]. The queries of a head
// of keys are those of its Hq / H query heads, one after another.
struct Heads {
  int64_t batch, query_heads, length, width, heads, slots;
};

// Queries of one head of keys that are computed together, as float32.
struct Queries {
  int64_t count;
  int64_t width, words;  // Values of a query; words of a key.
  std::vector<float> values;  // [count, width], padded to whole words
  std::vector<const bool*> masks;  // [slots] of each query
  std::vector<float> weights;  // [count, stride], scores, then exponentials
  int64_t slots, stride;  // `stride` has room for a register more.
};

constexpr int kQueries = 32;  // At most, of Queries.
constexpr int kScoreQueries = 8;  // Queries that share a register of keys.
constexpr int kValueQueries = 4;  // Queries that share registers of values.
constexpr int kValueParts = kLanes == 16 ? 4 : 2;  // Those registers.

// Swaps the halves of blocks of 2 kHalf rows and columns, and so on down to 1.
template <int kHalf>
void SwapBlocks(Words* rows) {
#if defined(__clang__)
  static_assert(kHalf == 0);
#else
  Ints low, high;  // Lanes of the first row, then of the second one.
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = lane & kHalf ? kLanes + lane - kHalf : lane;
    high[lane] = lane & kHalf ? kLanes + lane : lane + kHalf;
  }
  for (int row = 0; row < kLanes; ++row) {
    if (row & kHalf) continue;
    const Words one = rows[row], other = rows[row + kHalf];
    rows[row] = __builtin_shuffle(one, other, low);
    rows[row + kHalf] = __builtin_shuffle(one, other, high);
  }
  if constexpr (kHalf > 1) SwapBlocks<kHalf / 2>(rows);
#endif
}

// The keys of up to kLanes slots, [count, width], as [words, kLanes] words of
// one or two values.
template <typename Value>
void Transpose(const Value* keys, int64_t count, int64_t width, uint32_t* to) {
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(Value);
  int64_t start = 0;
#if !defined(__clang__)
  if (count >= kLanes) {
    for (; start + kLanes * kPerWord <= width; start += kLanes * kPerWord) {
      Words rows[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        rows[i] = Load<Words>(keys + i * width + start);
      }
      SwapBlocks<kLanes / 2>(rows);
      std::memcpy(to + start / kPerWord * kLanes, rows, sizeof(rows));
    }
  }
#endif
  for (int64_t i = 0; i < std::min<int64_t>(count, kLanes); ++i) {
    for (int64_t d = start; d < width; ++d) {
      uint32_t* const word = to + d / kPerWord * kLanes + i;
      std::memcpy(reinterpret_cast<Value*>(word) + d % kPerWord,
                  keys + i * width + d, sizeof(Value));
    }
  }
}

// Scores of R queries from `first` on at kLanes slots from `slot` on, whose
// keys are transposed; minus infinity where they are masked.
template <typename Value, int R>
void Score(Queries& queries, int64_t first, const uint32_t* keys, int64_t slot,
           float scale) {
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(Value);
  const int64_t stride = queries.words * kPerWord;
  Floats sums[R] = {};
  const float* x = queries.values.data() + first * stride;
  for (int64_t word = 0; word < queries.words; ++word, x += kPerWord) {
    const auto key = Load<Words>(keys + word * kLanes);
    if constexpr (kPerWord == 1) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sums[r] += BitCast<Floats>(key) * x[r * stride];
      }
    } else {
      const Floats even = BitCast<Floats>(key << 16);
      const Floats odd = BitCast<Floats>(key & 0xffff0000u);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sums[r] += even * x[r * stride];
        sums[r] += odd * x[r * stride + 1];
      }
    }
  }
  const int64_t left = queries.slots - slot;
  for (int r = 0; r < R; ++r) {
    const auto seen = LoadFirst<Bytes>(queries.masks[first + r] + slot, left);
    const Ints is_seen = __builtin_convertvector(seen, Ints) != 0;
    const Floats lowest = Floats{} - std::numeric_limits<float>::infinity();
    Store(queries.weights.data() + (first + r) * queries.stride + slot,
          is_seen ? sums[r] * scale : lowest);
  }
}

// Sums of the values, weighted for R queries from `first` on, over the sum of
// the weights. A masked slot has weight zero, which changes no bit.
template <typename Value, int R>
void WeighValues(const Queries& queries, int64_t first, const Value* values,
                 int64_t start, int64_t end, float* out) {
  const float* const weights = queries.weights.data() + first * queries.stride;
  const int64_t width = queries.width;
  for (int64_t d = 0; d < width; d += kValueParts * kLanes) {
    Floats sums[R][kValueParts] = {};
    float totals[R] = {};
    for (int64_t slot = start; slot < end; ++slot) {
      Floats value[kValueParts] = {};
      for (int i = 0; i < kValueParts && d + i * kLanes < width; ++i) {
        const int64_t at = d + i * kLanes;
        value[i] = LoadFloats(values + slot * width + at, width - at);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const float weight = weights[r * queries.stride + slot];
        totals[r] += weight;
#pragma GCC unroll 4
        for (int i = 0; i < kValueParts; ++i) sums[r][i] += value[i] * weight;
      }
    }
    for (int r = 0; r < R; ++r) {
      // A query that sees nothing (padding) gets zeros.
      const float inverse = totals[r] == 0.0f ? 0.0f : 1.0f / totals[r];
      for (int i = 0; i < kValueParts && d + i * kLanes < width; ++i) {
        const int64_t at = d + i * kLanes;
        StoreFirst(out + (first + r) * width + at, sums[r][i] * inverse,
                   width - at);
      }
    }
  }
}

// Calls `call(integral_constant<int, R>, first)` for runs of R queries.
template <int R, typename Call>
void ForQueries(int64_t first, int64_t count, const Call& call) {
  for (; count - first >= R; first += R) {
    call(std::integral_constant<int, R>(), first);
  }
  if constexpr (R > 1) ForQueries<R - 1>(first, count, call);
}

// The number of slots up to the last one that is seen.
int64_t EndOfSeen(const bool* mask, int64_t slots) {
  while (slots >= 8 && Load<uint64_t>(mask + slots - 8) == 0) slots -= 8;
  while (slots > 0 && !mask[slots - 1]) --slots;
  return slots;
}

// Attention of queries to the slots of one head, of which some are masked.
template <typename Value>
void AttendHead(Queries& queries, const Value* keys, const Value* values,
                float scale, float* out) {
  int64_t start = queries.slots, end = 0;
  for (const bool* mask : queries.masks) {
    const void* const seen = std::memchr(mask, 1, start);
    if (seen != nullptr) start = static_cast<const bool*>(seen) - mask;
    end = std::max(end, EndOfSeen(mask, queries.slots));
  }
  std::vector<uint32_t> transposed(queries.words * kLanes);
  for (int64_t slot = start; slot < end; slot += kLanes) {
    Transpose(keys + slot * queries.width, end - slot, queries.width,
              transposed.data());
    ForQueries<kScoreQueries>(0, queries.count, [&](auto r, int64_t first) {
      Score<Value, r>(queries, first, transposed.data(), slot, scale);
    });
  }
  for (int64_t query = 0; query < queries.count; ++query) {
    float* const weights = queries.weights.data() + query * queries.stride;
    Floats peaks = Floats{} - std::numeric_limits<float>::max();
    for (int64_t i = start; i < end; i += kLanes) {
      const auto score = Load<Floats>(weights + i);
      peaks = score > peaks ? score : peaks;
    }
    float peak = peaks[0];
    for (int lane = 1; lane < kLanes; ++lane) {
      peak = std::max(peak, peaks[lane]);
    }
    for (int64_t i = start; i < end; i += kLanes) {
      Store(weights + i, Exp(Load<Floats>(weights + i) - peak));
    }
  }
  ForQueries<kValueQueries>(0, queries.count, [&](auto r, int64_t first) {
    WeighValues<Value, r>(queries, first, values, start, end, out);
  });
}

template <typename Value>
void AttendAll(ffi::ThreadPool& pool, const Heads& heads, const void* query,
               const void* keys, const void* values, const bool* mask,
               float scale, float* out) {
  const int64_t size = heads.slots * heads.width;
  const int64_t per_head = heads.query_heads / heads.heads * heads.length;
  const int64_t parts = (per_head + kQueries - 1) / kQueries;
  const int64_t count = heads.batch * heads.heads * parts;
  // Products, about as slow as bytes that are read.
  const int64_t work = count * size * std::min<int64_t>(kQueries, per_head);
  ParallelFor(pool, count, work, [&](int64_t index) {
    const int64_t head = index / parts, first = index % parts * kQueries;
    Queries queries;
    queries.count = std::min<int64_t>(kQueries, per_head - first);
    queries.width = heads.width;
    constexpr int kPerWord = sizeof(uint32_t) / sizeof(Value);
    queries.words = (heads.width + kPerWord - 1) / kPerWord;
    queries.slots = heads.slots;
    queries.stride = heads.slots + kLanes;
    queries.weights.resize(queries.count * queries.stride);
    const int64_t at = (head * per_head + first) * heads.width;
    const Value* const from = static_cast<const Value*>(query) + at;
    for (int64_t i = 0; i < queries.count * heads.width; ++i) {
      queries.values.push_back(ToFloat(from[i]));
      const bool is_last = i % heads.width == heads.width - 1;
      if (is_last && heads.width % kPerWord) queries.values.push_back(0.0f);
    }
    for (int64_t i = first; i < first + queries.count; ++i) {
      const int64_t row = head / heads.heads * heads.length + i % heads.length;
      queries.masks.push_back(mask + row * heads.slots);
    }
    AttendHead(queries, static_cast<const Value*>(keys) + head * size,
               static_cast<const Value*>(values) + head * size, scale,
               out + at);
  });
}

// Caches of float32 or bfloat16, and a mask [B, L, S].
ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer query,
                  ffi::AnyBuffer keys, ffi::AnyBuffer values,
                  ffi::Buffer<ffi::PRED> mask, float scale,
                  ffi::ResultBuffer<ffi::F32> out) {
  const auto dims = query.dimensions(), of_keys = keys.dimensions();
  const Heads heads{dims[0], dims[1], dims[2], dims[3], of_keys[1], of_keys[2]};
  const auto attend =
      keys.element_type() == ffi::F32 ? AttendAll<float> : AttendAll<uint16_t>;
  attend(pool, heads, query.untyped_data(), keys.untyped_data(),
         values.untyped_data(), mask.typed_data(), scale, out->typed_data());
  return ffi::Error::Success();
}

// Writes new entries [B, H, L, Dh] to the slots of a cache [B, H, S, Dh] from
// start [B] on. The result is the cache itself.
ffi::Error WriteSlots(ffi::AnyBuffer slots, ffi::AnyBuffer entries,
                      ffi::Buffer<ffi::S32> start,
                      ffi::Result<ffi::AnyBuffer> out) {
  const auto dims = slots.dimensions();
  const int64_t count = entries.dimensions()[2];
  if (count > dims[2]) {
    return ffi::Error::InvalidArgument("more entries than slots");
  }
  const int64_t bytes = dims[3] * ffi::ByteWidth(slots.element_type());
  const char* from = static_cast<const char*>(entries.untyped_data());
  char* const to = static_cast<char*>(out->untyped_data());
  if (to != slots.untyped_data()) {
    std::memcpy(to, slots.untyped_data(), slots.size_bytes());
  }
  for (int64_t head = 0; head < dims[0] * dims[1]; ++head) {
    const int64_t wanted = start.typed_data()[head / dims[1]];
    const int64_t first =
        std::clamp<int64_t>(wanted, 0, dims[2] - count) + head * dims[2];
    std::memcpy(to + first * bytes, from, count * bytes);
    from += count * bytes;
  }
  return ffi::Error::Success();
}

// Norms.

// Each row of x [rows, width], less its mean if `center`, over the root of its
// mean square plus epsilon, times scale [width].
ffi::Error Normalize(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> scale,
                     float epsilon, bool center,
                     ffi::ResultBuffer<ffi::F32> out) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const float* const scales = scale.typed_data();
  for (int64_t row = 0; row < rows; ++row) {
    const float* const from = x.typed_data() + row * width;
    float* const to = out->typed_data() + row * width;
    float mean = 0.0f;
    if (center) {
      Floats sum = {};
      for (int64_t i = 0; i < width; i += kLanes) {
        sum += LoadFloats(from + i, width - i);
      }
      mean = Sum(sum) / width;
    }
    Floats squares = {};
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats shifted = LoadFloats(from + i, width - i) - mean;
      StoreFirst(to + i, shifted, width - i);
      const Floats kept = LoadFloats(to + i, width - i);
      squares += kept * kept;
    }
    const float factor = 1.0f / std::sqrt(Sum(squares) / width + epsilon);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats scaled = LoadFloats(to + i, width - i) * factor *
                            LoadFloats(scales + i, width - i);
      StoreFirst(to + i, scaled, width - i);
    }
  }
  return ffi::Error::Success();
}

// Mixtures of experts.

// The router: of each row of logits [rows, E] the probabilities of all experts,
// and the k most probable ones (of equal ones the first) with their weights,
// which are their probabilities, over the sum of these if `renormalize`.
ffi::Error Route(ffi::Buffer<ffi::F32> logits, bool renormalize,
                 ffi::ResultBuffer<ffi::S32> experts,
                 ffi::ResultBuffer<ffi::F32> weights,
                 ffi::ResultBuffer<ffi::F32> probs) {
  const int64_t rows = logits.dimensions()[0], width = logits.dimensions()[1];
  const int64_t count = experts->dimensions()[1];
  std::vector<bool> is_taken(width);
  for (int64_t row = 0; row < rows; ++row) {
    const float* const from = logits.typed_data() + row * width;
    float* const prob = probs->typed_data() + row * width;
    int32_t* const expert = experts->typed_data() + row * count;
    float* const weight = weights->typed_data() + row * count;
    const float peak = *std::max_element(from, from + width);
    Floats sum = {};
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t left = width - i;
      StoreFirst(prob + i, Exp(LoadFloats(from + i, left) - peak), left);
      sum += LoadFloats(prob + i, left);
    }
    const float total = Sum(sum);
    for (int64_t i = 0; i < width; ++i) prob[i] /= total;
    std::fill(is_taken.begin(), is_taken.end(), false);
    float kept = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      // Not a sort, which must not meet NaN.
      int64_t best = -1;
      for (int64_t e = 0; e < width; ++e) {
        if (is_taken[e]) continue;
        if (best < 0 || prob[e] > prob[best]) best = e;
      }
      is_taken[best] = true;
      expert[i] = best;
      weight[i] = prob[best];
      kept += weight[i];
    }
    if (!renormalize) continue;
    for (int64_t i = 0; i < count; ++i) weight[i] /= kept;
  }
  return ffi::Error::Success();
}

// Each row t of the result [T, width] is the sum of k rows index [T, k] of
// `rows`, times weights [T, k], added in this order.
ffi::Error SumRows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rows,
                   ffi::Buffer<ffi::S32> index, ffi::Buffer<ffi::F32> weights,
                   ffi::ResultBuffer<ffi::F32> out) {
  const int64_t count = index.dimensions()[0], terms = index.dimensions()[1];
  const int64_t width = out->dimensions()[1];
  const int64_t bytes = count * terms * width * sizeof(float);
  ParallelFor(pool, count, bytes, [&](int64_t t) {
    const int32_t* const at = index.typed_data() + t * terms;
    const float* const weight = weights.typed_data() + t * terms;
    for (int64_t d = 0; d < width; d += kLanes) {
      Floats sum = {};
      for (int64_t i = 0; i < terms; ++i) {
        const float* const row = rows.typed_data() + at[i] * width;
        sum += LoadFloats(row + d, width - d) * weight[i];
      }
      StoreFirst(out->typed_data() + t * width + d, sum, width - d);
    }
  });
  return ffi::Error::Success();
}

auto BindMultiply() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::U32>>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Ret<ffi::Buffer<ffi::F32>>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_multiply_float32, Multiply<Float32>,
                              BindMultiply());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_multiply_bfloat16, Multiply<BFloat16>,
                              BindMultiply());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_multiply_int8, Multiply<Int8>,
                              BindMultiply());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_attend, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Attr<float>("scale")
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_write_slots, WriteSlots,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_normalize, Normalize,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("center")
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_route, Route,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("renormalize")
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_sum_rows, SumRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
