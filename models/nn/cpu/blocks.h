// Weights in blocks of few bits, as GGUF files have them, and their products.
//
// An output has its inputs in blocks of 128 or 256. A block is some words of 32
// bits: the fields of the file, where smaller fields share a word. A packed
// matrix [out, in] has groups of 32 outputs, each one stream of memory:
//
//   words [out / 32, in / block, 2, words of a block, 16]
//
// so that a register holds the same word of 16 outputs. A group of 16 or 32
// inputs is integers q without sign, a scale f and a minimum o, or an offset c:
//
//   weight = f q - o    or    weight = f (q - c)
//
// Activations are rounded to eight bits in parts of 128. Sums of a group are
// exact integers. Groups and parts are added in their order, whatever the number
// of rows, so a row has the same bits alone.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "formats.h"

namespace specdec {

// Like kFar and kNear of formats.h.
constexpr int64_t kBlocksFar = kIsZen5 ? 4096 : 8192;
constexpr int64_t kBlocksNear = kIsZen5 ? 6144 : 2048;

// The parts of a row: 128 values, the terms taken from sums, the scale, and the
// sums of the values of groups 0 and 2, 1 and 3 of 32, in halves of words.
constexpr int64_t kPart = 128;
constexpr int64_t kTaken = kPart / 4 * ByteProducts::kFactors;
constexpr int64_t kScale = kTaken + 24;
constexpr int64_t kPairs = kScale + 1;
constexpr int64_t kPartWords = kTaken + 32;

// Sums begin at the bits of this float, so that they are floats, too: 1.5 * 2^23
// plus an integer, exactly, while that is below 2^22.
constexpr float kStart = 12582912.0f;

// The term taken from a sum of a kind with the offset c: kStart plus c times the
// sum of the values; for 0, the sum of the values, which minima are for.
constexpr int kOffsets[] = {0, 8, 16, 128, 32};
constexpr int64_t TakenOf(int offset) {
  int64_t at = kTaken;
  for (int i = 0; kOffsets[i] != offset; ++i) at += 4;
  return at;  // For 32 by 16 inputs, so eight numbers.
}

// The float16 in the lower halves, without the flush of denormal numbers, which
// XLA's threads have.
inline Floats HalfToFloat(const Words& words) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)words));
#elif defined(__F16C__) && defined(__AVX2__)
  const auto lower = (__m256i)(words & 0xffff);
  return (Floats)_mm256_cvtph_ps(_mm_packus_epi32(
      _mm256_castsi256_si128(lower), _mm256_extracti128_si256(lower, 1)));
#else
  const Words bits = words & 0x7fff;
  const Floats tiny =
      __builtin_convertvector(BitCast<Ints>(bits), Floats) * 0x1p-24f;
  const Words large = (bits << 13) + (112u << 23);
  const Words size = bits < 0x400 ? BitCast<Words>(tiny) : large;
  return BitCast<Floats>(size | (words & 0x8000) << 16);
#endif
}

inline Floats ToFloats(const Words& words) {
  return __builtin_convertvector(BitCast<Ints>(words), Floats);
}

inline Words Line(const uint32_t* lines, int64_t index) {
  return Load<Words>(lines + index * kBlock);
}

// A kind of blocks says
//
//   kWords, kParts    words of a block, and its parts of 128 inputs
//   kGroupWords       words of four inputs in a group
//   kOffset           c, 0 if it has minima
//   kMost             the largest number of `Weights`
//
// and is made of the words of kLanes outputs and the number of a part. It
// gives, for constant arguments,
//
//   Weights           four q of a group, a byte each
//   Scale             f of a group
//
// and, if it has minima, `Minima` of the same words and part. `Minima::Times`
// is the sum of o times the sums of a row's values in the groups.
// Weights may be larger than q by a factor; then the scale is smaller by it.

struct NoMinima {
  NoMinima(const uint32_t*, int) {}
};

// Four groups of 32 with scales in float16; a word has two scales.
template <int kOffsetOfKind, int kWordsOfKind>
struct Halves32 {
  static constexpr int kWords = kWordsOfKind, kParts = 1, kGroupWords = 8;
  static constexpr int kHead = 2;  // Words of factors.
  static constexpr int kMost = 2 * kOffsetOfKind - 1;
  static constexpr int kOffset = kOffsetOfKind;
  static constexpr bool kHasMinima = false;
  using Minima = NoMinima;

  const uint32_t* lines;

  Halves32(const uint32_t* lines, int) : lines(lines) {}

  Floats Scale(int group) const {
    return HalfToFloat(Line(lines, group / 2) >> 16 * (group % 2));
  }
};

// Four groups of 32, each with a scale and the negative minimum in a word.
template <int kWordsOfKind>
struct Pairs32 {
  static constexpr int kWords = kWordsOfKind, kParts = 1, kGroupWords = 8;
  static constexpr int kHead = 4;
  static constexpr int kOffset = 0;
  static constexpr int kMost = kWordsOfKind == 20 ? 15 : 31;
  static constexpr bool kHasMinima = true;

  const uint32_t* lines;

  Pairs32(const uint32_t* lines, int) : lines(lines) {}

  Floats Scale(int group) const {
    return HalfToFloat(Line(lines, group));
  }

  struct Minima {
    Floats minima[4];

    Minima(const uint32_t* lines, int) {
      for (int i = 0; i < 4; ++i) {
        minima[i] = -HalfToFloat(Line(lines, i) >> 16);
      }
    }

    Floats Times(const uint32_t* row) const {
      Floats sum = {};
      for (int i = 0; i < 4; ++i) {
        sum += minima[i] * BitCast<float>(row[TakenOf(0) + i]);
      }
      return sum;
    }
  };
};

// Words whose bits are moved up, or down.
inline Words Shift(const Words& words, int by) {
  return by > 0 ? words << by : words >> -by;
}

// Inputs 16 to 31 of a group are the upper halves of bytes.
inline Words Nibbles(const uint32_t* lines, int group, int word) {
  return Line(lines, 4 * group + word % 4) >> 4 * (word / 4) & 0x0f0f0f0f;
}

// A word has the upper bits of a group: bit j of byte b belongs to byte b of
// word j.
inline Words FifthBits(const uint32_t* lines, int group, int word) {
  return Shift(Line(lines, group), 4 - word) & 0x10101010;
}

// The kinds of four and of five bits; the fifth bits come after the factors.
template <typename Factors>
struct WithNibbles : Factors {
  using Factors::Factors;
  Words Weights(int group, int word) const {
    const uint32_t* const at = this->lines + Factors::kHead * kBlock;
    if constexpr (Factors::kWords == Factors::kHead + 16) {
      return Nibbles(at, group, word);
    }
    return Nibbles(at + 4 * kBlock, group, word) | FifthBits(at, group, word);
  }
};

using Q4_0 = WithNibbles<Halves32<8, 18>>;
using Q4_1 = WithNibbles<Pairs32<20>>;
using Q5_0 = WithNibbles<Halves32<16, 22>>;
using Q5_1 = WithNibbles<Pairs32<24>>;

struct Q8_0 : Halves32<128, 34> {
  using Halves32::Halves32;
  static constexpr int kMost = 127 + kExcess;
  Words Weights(int group, int word) const {
    return WithExcess(Line(lines, 2 + 8 * group + word));
  }
};

// Sixteen more than twice the floats of four bits that bytes are the numbers of.
inline Words Float4(const Words& numbers) {
#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
  const __m128i values = _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28,  //
                                       16, 15, 14, 13, 12, 10, 8, 4);
#if defined(__AVX512BW__)
  return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values),
                                    (__m512i)numbers);
#else
  return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values),
                                    (__m256i)numbers);
#endif
#else
  const Words ones = Words{} + 0x01010101;
  const Words first = numbers >> 1 & ones, second = numbers >> 2 & ones;
  Words value = (numbers & ones) | (first | second) << 1;
  value += value & second * 3;
  value += value & (first & second) * 15;
  const Words sign = numbers >> 3 & ones;
  return (value ^ sign * 31) + ones * 16 - sign * 31;
#endif
}

// Four groups of 32; one word has the exponents of the four scales.
struct MXFP4 {
  static constexpr int kWords = 17, kParts = 1, kGroupWords = 8, kOffset = 16;
  static constexpr int kMost = 28;
  static constexpr bool kHasMinima = false;
  using Minima = NoMinima;

  const uint32_t* lines;

  MXFP4(const uint32_t* lines, int) : lines(lines) {}

  Words Weights(int group, int word) const {
    return Float4(Nibbles(lines + kBlock, group, word));
  }
  Floats Scale(int group) const {
    const Words exponents = Line(lines, 0) >> 8 * group & 0xff;
    const Words is_zero = BitCast<Words>(exponents < 2);
    return BitCast<Floats>((exponents - 1) << 23 & ~is_zero);
  }
};

// Eight groups of 32: two factors in float16, three words with scales and minima
// of six bits. Neighbouring groups are the halves of the same bytes.
template <int kBits>
struct K32 {
  static constexpr int kWords = kBits == 5 ? 44 : 36, kParts = 2;
  static constexpr int kGroupWords = 8, kOffset = 0;
  static constexpr bool kHasMinima = true;
  // In every second group weights of four bits may be 16 times as large.
  static constexpr bool kIsUpper = kBits == 4 && ByteProducts::Fits(240) > 0;
  static constexpr int kMost = kIsUpper ? 240 : kBits == 4 ? 15 : 31;

  const uint32_t* weights;
  const uint32_t* fifth;
  Words shift;
  Words scales;  // A byte for each group of the part.
  Floats factor;

  K32(const uint32_t* lines, int part)
      : weights(lines + (kWords - 32 + 16 * part) * kBlock),
        fifth(lines + 4 * kBlock),
        shift(Words{} + 4 * part),
        scales(SixBits(Line(lines, 1), Line(lines, 3), part)),
        factor(HalfToFloat(Line(lines, 0)) * (kIsUpper ? 0.0625f : 1.0f)) {}

  // The lower bits of the second part's are in other words.
  static Words SixBits(const Words& words, const Words& lower, int part) {
    return part == 0 ? words & 0x3f3f3f3f
                     : (lower & 0x0f0f0f0f) | (words >> 2 & 0x30303030);
  }

  Words Weights(int group, int word) const {
    const Words bytes = Line(weights, 8 * (group / 2) + word);
    if (kIsUpper && group % 2) return bytes & 0xf0f0f0f0;
    const Words low = bytes >> 4 * (group % 2) & 0x0f0f0f0f;
    if constexpr (kBits == 4) return low;
    const Words high = Line(fifth, word) >> shift;
    return low | (Shift(high, 4 - group) & 0x10101010);
  }
  Floats Scale(int group) const {
    if (kIsUpper && group % 2 == 0) {
      return factor * ToFloats(Shift(scales, 4 - 8 * group) & 0xff0);
    }
    return factor * ToFloats(scales >> 8 * group & 0xff);
  }

  struct Minima {
    Words even, odd;  // Minima of groups, two in a word.
    Floats factor;

    Minima(const uint32_t* lines, int part)
        : factor(HalfToFloat(Line(lines, 0) >> 16)) {
      const Words minima = SixBits(Line(lines, 2), Line(lines, 3) >> 4, part);
      even = minima & 0x00ff00ff;
      odd = minima >> 8 & 0x00ff00ff;
    }

    Floats Times(const uint32_t* row) const {
      const Ints sum = AddPairs(AddPairs(Ints{}, even, row[kPairs]), odd,
                                row[kPairs + 1]);
      return factor * __builtin_convertvector(sum, Floats);
    }
  };
};

using Q4_K = K32<4>;
using Q5_K = K32<5>;

// Sixteen groups of 16 with signed scales, and a factor in float16. Inputs 64
// to 127 of a part are the upper halves of the bytes.
struct Q6_K {
  static constexpr int kWords = 53, kParts = 2, kGroupWords = 4, kOffset = 32;
  static constexpr int kMost = 63;
  static constexpr bool kHasMinima = false;
  using Minima = NoMinima;

  const uint32_t* low;
  const uint32_t* high;
  const uint32_t* scales;
  Floats factor;

  Q6_K(const uint32_t* lines, int part)
      : low(lines + 16 * part * kBlock),
        high(lines + (32 + 8 * part) * kBlock),
        scales(lines + (48 + 2 * part) * kBlock),
        factor(HalfToFloat(Line(lines, 52))) {}

  Words Weights(int group, int word) const {
    const int index = 4 * group + word, quarter = index / 8;
    const Words bytes = Line(low, index % 16) >> 4 * (index / 16);
    const Words upper = Shift(Line(high, index % 8), 4 - 2 * quarter);
    return (bytes & 0x0f0f0f0f) | (upper & 0x30303030);
  }
  Floats Scale(int group) const {
    const Ints word = BitCast<Ints>(Line(scales, group / 4));
    return factor *
           __builtin_convertvector(word << 8 * (3 - group % 4) >> 24, Floats);
  }
};

// Rows of a tile; their sums are in registers at once.
constexpr int kBlockRows = 8;
// Rows for which weights are unpacked in registers; for more, in memory. AVX-512
// has registers for the sums of eight.
constexpr int kDirectRows = kLanes == kBlock ? 8 : 4;
static_assert(kDirectRows >= kBlockRows / 2);

// Lines that are prefetched with each group of kLanes outputs, so that all of a
// block's are.
template <typename Kind>
constexpr int kAhead = [] {
  constexpr int kSets =
      kPart / 4 / Kind::kGroupWords * Kind::kParts * kBlock / kLanes;
  return (Kind::kWords + kSets - 1) / kSets;
}();

// Where the memory is read next.
struct Ahead {
  const char* at;

  // GCC unrolls the loop over groups only if it unrolls this one. With AVX-512
  // that is faster, but takes twice as long to compile, so it is done for the
  // kinds that most files have.
  template <typename Kind>
  void Prefetch() {
    if constexpr (Kind::kParts == 2 && kLanes == kBlock) {
#pragma GCC unroll 32
      for (int i = 0; i < kAhead<Kind>; ++i) PrefetchLine();
    } else {
      for (int i = 0; i < kAhead<Kind>; ++i) PrefetchLine();
    }
  }

  void PrefetchLine() {
    __builtin_prefetch(at + kBlocksFar, 0, 2);
    __builtin_prefetch(at + kBlocksNear);
    at += 64;
  }
};

// A part of a block of kLanes outputs as it is in memory.
template <typename Kind>
struct Packed : Kind {
  typename Kind::Minima minima;

  Packed(const uint32_t* lines, int part, Ahead*)
      : Kind(lines, part), minima(lines, part) {}
};

// The same, unpacked once for several tiles of rows.
template <typename Kind>
struct Unpacked {
  static constexpr int kGroupWords = Kind::kGroupWords, kOffset = Kind::kOffset;
  static constexpr int kMost = Kind::kMost;
  static constexpr bool kHasMinima = Kind::kHasMinima;
  static constexpr int kGroups = kPart / 4 / kGroupWords;

  typename Kind::Minima minima;
  Words weights[kGroups][kGroupWords];
  Floats scales[kGroups];

  Unpacked(const uint32_t* lines, int part, Ahead* ahead)
      : minima(lines, part) {
    const Kind kind(lines, part);
#pragma GCC unroll 8
    for (int group = 0; group < kGroups; ++group) {
      ahead->template Prefetch<Kind>();
      scales[group] = kind.Scale(group);
#pragma GCC unroll 8
      for (int word = 0; word < kGroupWords; ++word) {
        weights[group][word] = kind.Weights(group, word);
      }
    }
  }

  Words Weights(int group, int word) const { return weights[group][word]; }
  Floats Scale(int group) const { return scales[group]; }
};

// For ARM, GCC would read later words before it multiplies, and keep them in
// memory meanwhile.
inline void EndWords() {
#if defined(__aarch64__)
  asm volatile("" ::: "memory");
#endif
}

// Adds the products of a group of R rows with kLanes outputs.
template <typename Source, int R>
__attribute__((always_inline)) inline void AddGroup(const Source& source,
                                                    const uint32_t* const* row,
                                                    int group,
                                                    Floats* results) {
  // Weights of eight bits for which sums have no room are multiplied as two of
  // four bits.
  constexpr int kHalves = ByteProducts::Fits(Source::kMost) > 0 ? 1 : 2;
  constexpr int kRun =
      std::min(ByteProducts::Fits(kHalves == 1 ? Source::kMost : 15),
               Source::kGroupWords);
  constexpr int kRuns = Source::kGroupWords / kRun * kHalves;
  // Sums of 16 bits are added to integers, which then become floats as soon as
  // others that begin at kStart, if nothing is taken from them.
  constexpr bool kConverts = Source::kHasMinima &&
                             !std::is_same_v<ByteProducts::Sums, Ints>;
  const Ints start = kConverts ? Ints{} : BitCast<Ints>(Floats{} + kStart);
  Ints sums[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r] = start;
#pragma GCC unroll 8
  for (int run = 0; run < kRuns; ++run) {
    const int half = run % kHalves;
    ByteProducts::Sums added[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) added[r] = ByteProducts::Start(sums[r]);
#pragma GCC unroll 8
    for (int i = 0; i < kRun; ++i) {
      const int word = run / kHalves * kRun + i;
      Words weights = source.Weights(group, word);
      if (kHalves == 2) weights = weights >> 4 * half & 0x0f0f0f0f;
      const int index = group * Source::kGroupWords + word;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        added[r] = AddWord(added[r], weights, row[r], index);
      }
      if (i % 2 == 1) EndWords();
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sums[r] = ByteProducts::Finish(sums[r], added[r], half == 0 ? 1 : 16);
    }
  }
  const Floats scale = source.Scale(group);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if constexpr (kConverts) {
      results[r] += scale * __builtin_convertvector(sums[r], Floats);
      continue;
    }
    float taken = kStart;
    if (!Source::kHasMinima) {
      taken = BitCast<float>(row[r][TakenOf(Source::kOffset) + group]);
    }
    results[r] += scale * (BitCast<Floats>(sums[r]) - taken);
  }
}

// Adds the products of R rows and a part of kLanes outputs to `to`, R rows of
// Sums.
template <typename Kind, typename Source, int R>
__attribute__((always_inline)) inline void AddPart(const Source& source,
                                                   const uint32_t* x,
                                                   int64_t stride, Ahead* ahead,
                                                   float* to) {
  constexpr int kGroups = kPart / 4 / Kind::kGroupWords;
  const uint32_t* row[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) row[r] = x + r * stride;
  Floats results[R] = {};
  if constexpr (std::is_same_v<Source, Packed<Kind>>) {
#pragma GCC unroll 8
    for (int group = 0; group < kGroups; ++group) {
      ahead->template Prefetch<Kind>();
      AddGroup<Source, R>(source, row, group, results);
    }
  } else {
    for (int group = 0; group < kGroups; ++group) {
      AddGroup<Source, R>(source, row, group, results);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if constexpr (Kind::kHasMinima) results[r] -= source.minima.Times(row[r]);
    const float factor = BitCast<float>(row[r][kScale]);
    float* const sum = to + r * kGroup;
    Store(sum, Load<Floats>(sum) + results[r] * factor);
  }
}

// The same for `count` rows, at most R, and at least half of a tile: only 9 or
// more rows are divided.
template <typename Kind, int R = kBlockRows>
__attribute__((noinline)) void AddPartOf(int64_t count,
                                         const Unpacked<Kind>& source,
                                         const uint32_t* x, int64_t stride,
                                         float* to) {
  if (count >= R) {
    AddPart<Kind, Unpacked<Kind>, R>(source, x, stride, nullptr, to);
  } else if constexpr (R > kBlockRows / 2) {
    AddPartOf<Kind, R - 1>(count, source, x, stride, to);
  }
}

struct Blocks {
  using Sum = float;
  static constexpr int64_t kFewRows = 0;
  static constexpr int kPerWord = 1, kFactors = 1;

  static int64_t RowWords(int64_t width) {
    return (width + 2 * kPart - 1) / (2 * kPart) * 2 * kPartWords;
  }

  static float Round(const float* row, int64_t width, uint32_t* to, int32_t*) {
    for (; width > 0; width -= kPart, row += kPart, to += kPartWords) {
      int8_t values[kPart] = {};
      int32_t start;
      const float scale =
          RoundToIntegers(row, std::min(width, kPart), values, &start);
      for (int64_t i = 0; i < kPart / 4; ++i) {
        ByteProducts::Spread(values + 4 * i, to + ByteProducts::kFactors * i);
      }
      int32_t by_16[kPart / 16], by_32[kPart / 32] = {};
      for (int64_t i = 0; i < kPart / 16; ++i) {
        int32_t sum = 0;
        for (int64_t j = 0; j < 16; ++j) sum += values[16 * i + j];
        by_16[i] = sum;
        by_32[i / 2] += sum;
      }
      for (const int offset : kOffsets) {
        const int32_t* const sums = offset == 32 ? by_16 : by_32;
        const int excess = offset == 128 ? kExcess : offset;
        for (int64_t i = 0; i < (offset == 32 ? 8 : 4); ++i) {
          const float taken = offset == 0 ? sums[i] : kStart + excess * sums[i];
          to[TakenOf(offset) + i] = BitCast<uint32_t>(taken);
        }
      }
      for (int64_t i = 0; i < 2; ++i) {
        to[kPairs + i] = static_cast<uint16_t>(by_32[i]) |
                         static_cast<uint32_t>(by_32[i + 2]) << 16;
      }
      to[kScale] = BitCast<uint32_t>(scale);
    }
    return 1.0f;
  }

  // Calls `visit` with a null pointer to the kind that has this number in GGUF.
  template <typename Visit>
  static void Of(int kind, const Visit& visit) {
    switch (kind) {
      case 2: return visit(static_cast<Q4_0*>(nullptr));
      case 3: return visit(static_cast<Q4_1*>(nullptr));
      case 6: return visit(static_cast<Q5_0*>(nullptr));
      case 7: return visit(static_cast<Q5_1*>(nullptr));
      case 8: return visit(static_cast<Q8_0*>(nullptr));
      case 12: return visit(static_cast<Q4_K*>(nullptr));
      case 13: return visit(static_cast<Q5_K*>(nullptr));
      case 14: return visit(static_cast<Q6_K*>(nullptr));
      case 39: return visit(static_cast<MXFP4*>(nullptr));
    }
  }

  // The words of an output; 0 if the kind is unknown.
  static int64_t NumWords(int kind, int64_t width) {
    int64_t words = 0;
    Of(kind, [&](auto* kind) {
      using Kind = std::remove_pointer_t<decltype(kind)>;
      const int64_t inputs = Kind::kParts * kPart;
      words = (width + inputs - 1) / inputs * Kind::kWords;
    });
    return words;
  }

  template <typename>
  static void Multiply(const Rows& rows, int64_t first, int64_t count,
                       const Group& group, Sums<Blocks>& sums) {
    std::fill_n(sums, count * kGroup, 0);
    Of(group.kind, [&](auto* kind) {
      using Kind = std::remove_pointer_t<decltype(kind)>;
      MultiplyKind<Kind>(rows, first, count, group, sums);
    });
  }

  template <typename Kind>
  static void MultiplyKind(const Rows& rows, int64_t first, int64_t count,
                           const Group& group, float* sums);

 private:
  // Calls `add(source, x, to)` for each part of kLanes outputs.
  template <typename Kind, typename Source, typename Add>
  static void ForParts(const Rows& rows, int64_t first, const Group& group,
                       float* sums, const Add& add) {
    const uint32_t* lines = group.words;
    for (int64_t block = 0; block < group.num_words / Kind::kWords; ++block) {
      const uint32_t* const x =
          rows.row(first) + block * Kind::kParts * kPartWords;
      for (int64_t column = 0; column < kGroup; column += kLanes) {
        const auto* const words =
            lines + column / kBlock * Kind::kWords * kBlock;
        Ahead ahead{reinterpret_cast<const char*>(
            words + column % kBlock * Kind::kWords)};
        for (int part = 0; part < Kind::kParts; ++part) {
          const Source source(words + column % kBlock, part, &ahead);
          add(source, x + part * kPartWords, &ahead, sums + column);
        }
      }
      lines += 2 * Kind::kWords * kBlock;
    }
  }

  template <typename Kind, int R = kDirectRows>
  static void MultiplyFew(const Rows& rows, int64_t first, int64_t count,
                          const Group& group, float* sums) {
    if (count == R) {
      ForParts<Kind, Packed<Kind>>(
          rows, first, group, sums,
          [&](const Packed<Kind>& source, const uint32_t* x, Ahead* ahead,
              float* to) {
            AddPart<Kind, Packed<Kind>, R>(source, x, rows.stride, ahead, to);
          });
    } else if constexpr (R > 1) {
      MultiplyFew<Kind, R - 1>(rows, first, count, group, sums);
    }
  }

  template <typename Kind>
  static void MultiplyMany(const Rows& rows, int64_t first, int64_t count,
                           const Group& group, float* sums) {
    const int64_t tiles = (count + kBlockRows - 1) / kBlockRows;
    const int64_t least = count / tiles, larger = count % tiles;
    ForParts<Kind, Unpacked<Kind>>(
        rows, first, group, sums,
        [&](const Unpacked<Kind>& source, const uint32_t* x, Ahead*,
            float* to) {
          for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t size = least + (tile < larger);
            AddPartOf<Kind>(size, source, x, rows.stride, to);
            x += size * rows.stride;
            to += size * kGroup;
          }
        });
  }
};

template <typename Kind>
void Blocks::MultiplyKind(const Rows& rows, int64_t first, int64_t count,
                          const Group& group, float* sums) {
  if (count <= kDirectRows) {
    MultiplyFew<Kind>(rows, first, count, group, sums);
  } else {
    MultiplyMany<Kind>(rows, first, count, group, sums);
  }
}

// Two units share the kinds out, and are compiled at the same time.
#define SPECDEC_MULTIPLY_KIND(Kind)                                      \
  void Blocks::MultiplyKind<Kind>(const Rows&, int64_t, int64_t, const Group&, \
                                  float*)
extern template SPECDEC_MULTIPLY_KIND(Q4_0);
extern template SPECDEC_MULTIPLY_KIND(Q4_1);
extern template SPECDEC_MULTIPLY_KIND(Q5_0);
extern template SPECDEC_MULTIPLY_KIND(Q5_1);
extern template SPECDEC_MULTIPLY_KIND(Q8_0);
extern template SPECDEC_MULTIPLY_KIND(MXFP4);
extern template SPECDEC_MULTIPLY_KIND(Q4_K);
extern template SPECDEC_MULTIPLY_KIND(Q5_K);
extern template SPECDEC_MULTIPLY_KIND(Q6_K);

}  // namespace specdec
