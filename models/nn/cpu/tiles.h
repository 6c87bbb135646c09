// Formats that are multiplied by Intel's matrix unit (AMX).
//
// A tile has up to 16 rows of 64 bytes. One instruction adds the products of 16
// rows and 16 words of a block of outputs to 16 by 16 sums. Rows do not meet, so
// a row has the same bits alone; one row is multiplied by the same instruction,
// which adds the even and the odd inputs of 16 words of bfloat16 on their own.

#pragma once

#include "formats.h"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace specdec {

// Whether Linux lets this process use the unit; it asks once.
inline bool CanUseTiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool can =
      syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return can;
}

// The tiles of a thread while it multiplies. 0 to 3 are sums of 16 rows, then of
// 16 more, and two blocks each; 4 and 5 are these rows; 6 and 7 are words of the
// two blocks.
struct alignas(64) TilesInUse {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  explicit TilesInUse(int64_t count) {
    const auto first = std::min<int64_t>(count, 16);
    const auto second = std::max<int64_t>(count - first, 1);
    for (int tile : {0, 1, 4}) rows[tile] = first;
    for (int tile : {2, 3, 5}) rows[tile] = second;
    for (int tile : {6, 7}) rows[tile] = 16;
    asm volatile("ldtilecfg %0" ::"m"(*this));
  }
  ~TilesInUse() { _tile_release(); }
};

struct Tiles {
  template <typename Format>
  static void Multiply(const Rows& rows, int64_t first, int64_t count,
                       const Group& group, Sums<Format>& sums) {
    const TilesInUse tiles(count);
    constexpr int64_t kBytes = 4 * kGroup, kStride = kBytes;
    const auto* weights = reinterpret_cast<const char*>(group.words);
    const auto* x = reinterpret_cast<const char*>(rows.row(first));
    const int64_t stride = 4 * rows.stride;
    const bool is_second = count > 16;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t word = 0; word < group.num_words; word += 16) {
      for (int64_t i = 0; i < 16 * kBytes; i += 64) {
        __builtin_prefetch(weights + kFar + i, 0, 2);
        __builtin_prefetch(weights + kNear + i);
      }
      _tile_loadd(4, x, stride);
      _tile_loadd(6, weights, kStride);
      Format::template MultiplyAdd<0, 4, 6>();
      _tile_loadd(7, weights + 64, kStride);
      Format::template MultiplyAdd<1, 4, 7>();
      if (is_second) {
        _tile_loadd(5, x + 16 * stride, stride);
        Format::template MultiplyAdd<2, 5, 6>();
        Format::template MultiplyAdd<3, 5, 7>();
      }
      weights += 16 * kBytes;
      x += 64;
    }
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + kBlock, kStride);
    if (is_second) {
      _tile_stored(2, sums + 16 * kGroup, kStride);
      _tile_stored(3, sums + 16 * kGroup + kBlock, kStride);
    }
  }
};

struct BFloat16Tiles : Tiles {
  using Sum = float;
  static constexpr int64_t kFewRows = 0;
  static constexpr int kPerWord = 2, kFactors = 1;

  static float Round(const float* row, int64_t width, uint32_t* to, int32_t*) {
    auto* const values = reinterpret_cast<uint16_t*>(to);
    for (int64_t i = 0; i < width; i += kLanes) {
      StoreFloats(values + i, LoadFloats(row + i, width - i), width - i);
    }
    return 1.0f;
  }

  template <int kSums, int kX, int kWeights>
  static void MultiplyAdd() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX),
                 "i"(kWeights));
  }
};

struct Int8Tiles : Tiles {
  using Sum = int32_t;
  // Sums are exact, so few rows may be multiplied by vectors, a little sooner.
  static constexpr int64_t kFewRows = 8;
  static constexpr int kPerWord = 4, kFactors = 1;

  static float Round(const float* row, int64_t width, uint32_t* to,
                     int32_t* start) {
    return RoundToIntegers(row, width, reinterpret_cast<int8_t*>(to), start);
  }

  template <int kSums, int kX, int kWeights>
  static void MultiplyAdd() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX),
                 "i"(kWeights));
  }
};

}  // namespace specdec

#else

namespace specdec {

inline bool CanUseTiles() { return false; }

using BFloat16Tiles = BFloat16;
using Int8Tiles = Int8;

}  // namespace specdec

#endif
