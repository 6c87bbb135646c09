// Products of bytes, by instruction set.
//
// `ByteProducts` adds up, in each lane of 32 bits, the products of four weights,
// which are 0 or larger, and four values from -127 to 127. It has
//
//   kFactors   words of a row that are multiplied with one word of weights
//   Spread     makes them of four values
//   Sums       the type of sums, in which only `Fits(most)` words of weights up
//              to `most` have room; 0 if there is none for a single one
//   Start      sums that go on from integers, if they are as wide
//   Add        adds the products of a word
//   Finish     integers plus `factor` times sums that were started with them
//
// Integers are exact, so all instruction sets have the same bits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace specdec {

// Packed bytes with a sign are too large by this number when they are
// multiplied. ARM's older instruction takes them with their sign.
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kExcess = 0;
#else
constexpr int kExcess = 128;
#endif

// Makes bytes that are kExcess too large of those that are 128 too large.
inline Words WithExcess(const Words& words) {
  return kExcess == 0 ? words ^ 0x80808080u : words;
}

// Has the compiler compute sums before it goes on. GCC would reorder them, and
// keep the terms in memory until then.
template <typename Sums>
void ComputeNow(Sums& sums) {
#if defined(__AVX512F__)
  asm("" : "+v"(sums));
#elif defined(__x86_64__)
  asm("" : "+x"(sums));
#endif
}

// Four values in a word.
struct InOneWord {
  static constexpr int kFactors = 1;

  static void Spread(const int8_t* values, uint32_t* words) {
    std::memcpy(words, values, 4);
  }
};

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))

struct ByteProducts : InOneWord {
  using Sums = Ints;

  static constexpr int Fits(int) { return 1 << 16; }

  static Sums Start(const Ints& sums) { return sums; }

  static Sums Add(const Sums& sums, const Words& weights, const uint32_t* x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights,
                                     _mm512_set1_epi32(*x));
#else
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights,
                                         _mm256_set1_epi32(*x));
#endif
  }

  static Ints Finish(const Ints&, const Sums& sums, int) { return sums; }
};

// Adds the products of both halves of words, 0 or larger, and both halves of x.
inline Ints AddPairs(const Ints& sums, const Words& pairs, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)pairs,
                                   _mm512_set1_epi32(x));
#else
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)pairs,
                                       _mm256_set1_epi32(x));
#endif
}

#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define SPECDEC_HAS_PAIRS 1

// The products of both halves of words and both halves of x, added up.
inline Ints MultiplyPairs(const Words& pairs, uint32_t x) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi32(x));
#else
  return (Ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(x));
#endif
}

// Sums of 16 bits, two in a lane.
struct ByteProducts : InOneWord {
  using Sums = int16_t __attribute__((vector_size(4 * kLanes)));

  static constexpr int Fits(int most) { return 32767 / (2 * 127 * most); }

  static Sums Start(const Ints&) { return Sums{}; }

  static Sums Add(const Sums& sums, const Words& weights, const uint32_t* x) {
#if defined(__AVX512BW__)
    Sums result = sums + (Sums)_mm512_maddubs_epi16((__m512i)weights,
                                                    _mm512_set1_epi32(*x));
#else
    Sums result = sums + (Sums)_mm256_maddubs_epi16((__m256i)weights,
                                                    _mm256_set1_epi32(*x));
#endif
    ComputeNow(result);
    return result;
  }

  static Ints Finish(const Ints& sums, const Sums& pairs, int factor) {
    return sums + MultiplyPairs((Words)pairs, factor << 16 | factor);
  }
};

inline Ints AddPairs(const Ints& sums, const Words& pairs, uint32_t x) {
  return sums + MultiplyPairs(pairs, x);
}

#else

struct ByteProducts : InOneWord {
  using Sums = Ints;

  static constexpr int Fits(int most) {
    return most <= 127 + kExcess ? 1 << 16 : 0;
  }

  static Sums Start(const Ints& sums) { return sums; }

#if defined(__ARM_FEATURE_DOTPROD)
  // The instructions take word kLane of a register for all lanes.
  template <int kLane>
  static Sums AddLane(const Sums& sums, const Words& weights, int8x8_t x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return (Ints)vusdotq_lane_s32((int32x4_t)sums, (uint8x16_t)weights, x,
                                  kLane);
#else
    return (Ints)vdotq_lane_s32((int32x4_t)sums, (int8x16_t)weights, x, kLane);
#endif
  }

  static Sums Add(const Sums& sums, const Words& weights, const uint32_t* x) {
    return AddLane<0>(sums, weights, vcreate_s8(*x));
  }
#else
  static constexpr int kFactors = 4;

  static void Spread(const int8_t* values, uint32_t* words) {
    std::copy(values, values + 4, words);
  }

  static Sums Add(const Sums& sums, const Words& weights, const uint32_t* x) {
    Sums result = sums;
    for (int place = 0; place < 4; ++place) {
      const Words bytes = weights >> 8 * place & 0xffu;
      result += BitCast<Ints>(bytes) * static_cast<int32_t>(x[place]);
    }
    return result;
  }
#endif

  static Ints Finish(const Ints&, const Sums& sums, int) { return sums; }
};

inline Ints AddPairs(const Ints& sums, const Words& pairs, uint32_t x) {
  return sums + BitCast<Ints>(pairs & 0xffff) * static_cast<int16_t>(x) +
         BitCast<Ints>(pairs >> 16) * static_cast<int16_t>(x >> 16);
}

#endif

// Adds the products of a word of weights and the values of word `index` of a row.
inline ByteProducts::Sums AddWord(const ByteProducts::Sums& sums,
                                  const Words& weights, const uint32_t* row,
                                  int index) {
#if defined(__ARM_FEATURE_DOTPROD)
  const auto two = Load<int8x8_t>(row + index / 2 * 2);  // Once for both words.
  return index % 2 == 0 ? ByteProducts::AddLane<0>(sums, weights, two)
                        : ByteProducts::AddLane<1>(sums, weights, two);
#else
  return ByteProducts::Add(sums, weights, row + index * ByteProducts::kFactors);
#endif
}

}  // namespace specdec
