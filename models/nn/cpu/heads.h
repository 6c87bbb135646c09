// Attention to the slots of a key-value cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "formats.h"
#include "rows.h"
#include "threads.h"
#include "vectors.h"

namespace specdec {

// Attention of one layer, from projections [B, L, (Hq + 2 H) Dh]: queries, keys
// and values. Each head gets the norm, if there is one, and one of queries or
// keys then the rotation, if there is one. Keys and values are written to the
// caches, which have them already if projections are of queries only, and the
// queries attend to the slots that they see. A head of keys has the
// queries of Hq / H query heads, one after another.
struct Attention {
  const float* projections;
  int64_t batch, length, query_heads, heads, width, slots;
  bool writes;
  Norm query_norm, key_norm, value_norm;
  const float *cos, *sin;  // [B, L, pairs], or null.
  int64_t pairs;  // A head rotates the values i and i + pairs.
  const bool* mask;  // [B, L, S]
  const int32_t* start;  // [B], the slots of the first new entries.
  void *keys, *values;  // [B, H, S, Dh]
  float scale;
  float* out;  // [B, L, Hq Dh]

  // Projection of a position: of a query head, a head of keys or of values.
  const float* projection(int64_t row, int64_t position, int64_t head) const {
    const int64_t heads_in_all = query_heads + (writes ? 2 * heads : 0);
    return projections + ((row * length + position) * heads_in_all + head) * width;
  }
};

// A head of queries or keys at a position as it is multiplied, [Dh].
inline void PrepareHead(const Attention& attention, int64_t row,
                        int64_t position, int64_t head, const Norm& norm,
                        float* to) {
  const int64_t width = attention.width, pairs = attention.pairs;
  const float* from = attention.projection(row, position, head);
  if (norm.scale != nullptr) {
    Normalize(norm, from, width, to);
  } else {
    std::copy(from, from + width, to);
  }
  if (attention.cos == nullptr) return;
  const int64_t at = (row * attention.length + position) * pairs;
  for (int64_t i = 0; i < pairs; i += kLanes) {
    const int64_t left = pairs - i;
    const Floats cos = LoadFloats(attention.cos + at + i, left);
    const Floats sin = LoadFloats(attention.sin + at + i, left);
    const Floats first = LoadFloats(to + i, left);
    const Floats second = LoadFloats(to + pairs + i, left);
    StoreFirst(to + i, first * cos - second * sin, left);
    StoreFirst(to + pairs + i, second * cos + first * sin, left);
  }
}

// Writes the keys and values of a head and position to the caches.
template <typename Value>
void WriteEntry(const Attention& attention, int64_t row, int64_t position,
                int64_t head, float* scratch) {
  const int64_t slots = attention.slots, width = attention.width;
  const int64_t start =
      std::clamp<int64_t>(attention.start[row], 0, slots - attention.length);
  const int64_t at =
      ((row * attention.heads + head) * slots + start + position) * width;
  const int64_t of_keys = attention.query_heads + head;
  PrepareHead(attention, row, position, of_keys, attention.key_norm, scratch);
  CopyFinite(scratch, width, static_cast<Value*>(attention.keys) + at);
  const float* value =
      attention.projection(row, position, of_keys + attention.heads);
  if (attention.value_norm.scale != nullptr) {
    Normalize(attention.value_norm, value, width, scratch);
    value = scratch;
  }
  CopyFinite(value, width, static_cast<Value*>(attention.values) + at);
}

// The format of keys, which are multiplied as weights are.
template <typename Value>
using FormatOf = std::conditional_t<sizeof(Value) == 2, BFloat16, Float32>;

// Queries of one head of keys that are computed together. A thread keeps the
// memory for its next ones.
struct Queries {
  int64_t count;
  int64_t width, words;  // Values of a query; words of a key.
  std::vector<uint32_t> factors;  // [count, words, kFactors] as `Round` says.
  std::vector<const bool*> masks;  // [slots] of each query
  std::vector<float> weights;  // [count, stride], scores, then exponentials
  std::vector<uint32_t> packed;  // [count, stride], weights as `Round` says
  std::vector<float*> outs;  // [width] of each query
  std::vector<float> query;  // [width], one of them
  std::vector<uint32_t> transposed;  // [words, kLanes], see `Transpose`
  int64_t slots, stride;  // `stride` has room for a register more.
};

constexpr int kQueries = 32;  // At most, of Queries.
constexpr int kScoreQueries = 8;  // Queries that share a register of keys.
constexpr int kValueQueries = 4;  // Queries that share registers of values.
constexpr int kValueParts = kLanes == 16 ? 4 : 2;  // Those registers.

// Swaps the halves of blocks of 2 kHalf rows and columns, and so on down to 1.
// Compilers make two shuffles of the lists of lanes.
template <int kHalf, int... kLane>
void SwapBlocks(Words* rows, std::integer_sequence<int, kLane...> lanes) {
  for (int row = 0; row < kLanes; ++row) {
    if (row & kHalf) continue;
    const Words one = rows[row], other = rows[row + kHalf];
    rows[row] = Words{(kLane & kHalf ? other : one)[kLane & ~kHalf]...};
    rows[row + kHalf] = Words{(kLane & kHalf ? other : one)[kLane | kHalf]...};
  }
  if constexpr (kHalf > 1) SwapBlocks<kHalf / 2>(rows, lanes);
}

// The keys of up to kLanes slots, [count, width], as [words, kLanes] words of
// one or two values.
template <typename Value>
void Transpose(const Value* keys, int64_t count, int64_t width, uint32_t* to) {
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(Value);
  int64_t start = 0;
  if (count >= kLanes) {
    for (; start + kLanes * kPerWord <= width; start += kLanes * kPerWord) {
      Words rows[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        rows[i] = Load<Words>(keys + i * width + start);
      }
      SwapBlocks<kLanes / 2>(rows, std::make_integer_sequence<int, kLanes>());
      std::memcpy(to + start / kPerWord * kLanes, rows, sizeof(rows));
    }
  }
  for (int64_t i = 0; i < std::min<int64_t>(count, kLanes); ++i) {
    for (int64_t d = start; d < width; ++d) {
      uint32_t* const word = to + d / kPerWord * kLanes + i;
      std::memcpy(reinterpret_cast<Value*>(word) + d % kPerWord,
                  keys + i * width + d, sizeof(Value));
    }
  }
}

// Scores of R queries from `first` on at kLanes slots from `slot` on; minus
// infinity where slots are masked. The keys are transposed.
template <typename Value, int R>
void Score(Queries& queries, int64_t first, const uint32_t* keys, int64_t slot,
           float scale) {
  using Format = FormatOf<Value>;
  const int64_t stride = queries.words * Format::kFactors;
  Floats sums[R] = {};
  const uint32_t* x = queries.factors.data() + first * stride;
  for (int64_t word = 0; word < queries.words; ++word, x += Format::kFactors) {
    const auto key = Load<Words>(keys + word * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sums[r] = Format::Step(sums[r], key, x + r * stride);
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

// Words of a value at `from`, or of two; the second one is `distance` away.
inline Words LoadWords(const float* from, int64_t, int64_t count) {
  return LoadFirst<Words>(from, count);
}

inline Words LoadWords(const uint16_t* from, int64_t distance, int64_t count) {
  return BitCast<Words>(LoadFloats(from, count)) >> 16 |
         BitCast<Words>(LoadFloats(from + distance, count));
}

// Sums of the values of slots from `start` on, weighted for R queries from
// `first` on, over the sum of the weights. A masked slot has weight zero, which
// changes no bit, as `Step` adds the slots one after another, here from the last
// to the first.
template <typename Value, int R>
void WeighValues(const Queries& queries, int64_t first, const Value* values,
                 int64_t start, int64_t end) {
  using Format = FormatOf<Value>;
  constexpr int kSlots = Format::kPerWord;  // For a word of values.
  const float* const weights = queries.weights.data() + first * queries.stride;
  const uint32_t* const packed = queries.packed.data() + first * queries.stride;
  const int64_t words = (end - start + kSlots - 1) / kSlots;
  const int64_t width = queries.width;
  for (int64_t d = 0; d < width; d += kValueParts * kLanes) {
    Floats sums[R][kValueParts] = {};
    float totals[R] = {};
    for (int64_t word = words - 1; word >= 0; --word) {
      const int64_t slot = start + word * kSlots;
      // The weight after the last one is zero, whichever values it has.
      const int64_t distance = slot + 1 < end ? width : 0;
      Words value[kValueParts] = {};
      for (int i = 0; i < kValueParts && d + i * kLanes < width; ++i) {
        const int64_t at = d + i * kLanes;
        value[i] = LoadWords(values + slot * width + at, distance, width - at);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int i = kSlots - 1; i >= 0; --i) {
          totals[r] += weights[r * queries.stride + slot + i];
        }
        const uint32_t* const x =
            packed + r * queries.stride + word * Format::kFactors;
#pragma GCC unroll 4
        for (int i = 0; i < kValueParts; ++i) {
          sums[r][i] = Format::Step(sums[r][i], value[i], x);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      // A query that sees nothing (padding) gets zeros.
      const float inverse = totals[r] == 0.0f ? 0.0f : 1.0f / totals[r];
      for (int i = 0; i < kValueParts && d + i * kLanes < width; ++i) {
        const int64_t at = d + i * kLanes;
        StoreFirst(queries.outs[first + r] + at, sums[r][i] * inverse,
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
inline int64_t EndOfSeen(const bool* mask, int64_t slots) {
  while (slots >= 8 && Load<uint64_t>(mask + slots - 8) == 0) slots -= 8;
  while (slots > 0 && !mask[slots - 1]) --slots;
  return slots;
}

// Attention of queries to the slots of one head; some slots are masked.
template <typename Value>
void AttendHead(Queries& queries, const Value* keys, const Value* values,
                float scale) {
  int64_t start = queries.slots, end = 0;
  for (const bool* mask : queries.masks) {
    const void* const seen = std::memchr(mask, 1, start);
    if (seen != nullptr) start = static_cast<const bool*>(seen) - mask;
    end = std::max(end, EndOfSeen(mask, queries.slots));
  }
  start = std::min(start, end);  // Where nothing is seen.
  using Format = FormatOf<Value>;
  constexpr int kSlots = Format::kPerWord;
  queries.transposed.assign(queries.words * kLanes, 0);
  for (int64_t slot = start; slot < end; slot += kLanes) {
    Transpose(keys + slot * queries.width, end - slot, queries.width,
              queries.transposed.data());
    ForQueries<kScoreQueries>(0, queries.count, [&](auto r, int64_t first) {
      Score<Value, r>(queries, first, queries.transposed.data(), slot, scale);
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
      const Floats weight = Exp(Load<Floats>(weights + i) - peak);
      // Rounded here, too, so that the totals add up the same factors.
      const bool is_exact = sizeof(Value) == sizeof(float);
      Store(weights + i,
            is_exact ? weight : BitCast<Floats>(RoundToBFloat16(weight)));
    }
    const int64_t slots = (end - start + kSlots - 1) / kSlots * kSlots;
    Format::Round(weights + start, slots,
                  queries.packed.data() + query * queries.stride, nullptr);
  }
  ForQueries<kValueQueries>(0, queries.count, [&](auto r, int64_t first) {
    WeighValues<Value, r>(queries, first, values, start, end);
  });
}

// The queries of a head of keys from `first` on, at most kQueries of them.
template <typename Value>
void AttendSome(const Attention& attention, int64_t row, int64_t head,
                int64_t first) {
  const int64_t length = attention.length, width = attention.width;
  const int64_t group = attention.query_heads / attention.heads;
  using Format = FormatOf<Value>;
  thread_local Queries queries;
  queries.count = std::min<int64_t>(kQueries, group * length - first);
  queries.width = width;
  queries.words = (width + Format::kPerWord - 1) / Format::kPerWord;
  queries.slots = attention.slots;
  queries.stride = attention.slots + kLanes;
  queries.weights.resize(queries.count * queries.stride);
  queries.packed.resize(queries.count * queries.stride);
  const int64_t factors = queries.words * Format::kFactors;
  queries.factors.assign(queries.count * factors, 0);
  queries.query.resize(width);
  queries.masks.clear();
  queries.outs.clear();
  for (int64_t i = 0; i < queries.count; ++i) {
    const int64_t of_queries = head * group + (first + i) / length;
    const int64_t position = (first + i) % length;
    const int64_t place = row * length + position;
    PrepareHead(attention, row, position, of_queries, attention.query_norm,
                queries.query.data());
    Format::Round(queries.query.data(), width,
                  queries.factors.data() + i * factors, nullptr);
    queries.masks.push_back(attention.mask + place * attention.slots);
    queries.outs.push_back(attention.out +
                           (place * attention.query_heads + of_queries) * width);
  }
  const int64_t at =
      (row * attention.heads + head) * attention.slots * attention.width;
  AttendHead(queries, static_cast<const Value*>(attention.keys) + at,
             static_cast<const Value*>(attention.values) + at, attention.scale);
}

template <typename Value, typename Pool>
void AttendAll(Pool& pool, const Attention& attention) {
  const int64_t per_head =
      attention.query_heads / attention.heads * attention.length;
  const int64_t parts = (per_head + kQueries - 1) / kQueries;
  const int64_t rows = attention.batch * attention.heads;
  // Products, about as slow as bytes that are read.
  const int64_t work = rows * attention.slots * attention.width * per_head;
  Team team(pool, rows * parts, work);
  const int64_t entries =
      attention.writes ? attention.batch * attention.length : 0;
  auto write = [&](int64_t index) {
    thread_local std::vector<float> scratch;
    scratch.resize(attention.width);
    for (int64_t head = 0; head < attention.heads; ++head) {
      WriteEntry<Value>(attention, index / attention.length,
                        index % attention.length, head, scratch.data());
    }
  };
  // A few are written sooner than another thread wakes up.
  if (entries <= 8) {
    for (int64_t i = 0; i < entries; ++i) write(i);
  } else {
    team.For(entries, write);
  }
  team.For(rows * parts, [&](int64_t index) {
    const int64_t head = index / parts;
    AttendSome<Value>(attention, head / attention.heads, head % attention.heads,
                      index % parts * kQueries);
  });
}

}  // namespace specdec
