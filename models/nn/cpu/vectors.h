// Vectors of 32-bit values, as many as a register has.
//
// They are of GCC's vector extension, which Clang has, too, and which compiles
// to whatever the processor has (AVX-512, AVX2, NEON, none).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace specdec {

// GCC before 14 takes a Zen 5 for an older one; Zen 4 has no AVX-VNNI.
#if defined(__AVXVNNI__) && \
    (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
constexpr bool kIsZen5 = true;
#else
constexpr bool kIsZen5 = false;
#endif

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

template <typename Vector>
void Store(void* to, const Vector& vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

// The first `count` values of a vector.
template <typename Value, typename Vector>
void StoreFirst(Value* to, const Vector& vector, int64_t count) {
  if (count >= kLanes) return Store(to, vector);
  std::memcpy(to, &vector, count * sizeof(Value));
}

// Calls `body(index, left)` for every vector of `count` values. In all calls
// except the last one the compiler knows that a whole vector is left.
template <typename Body>
inline void ForVectors(int64_t count, const Body& body) {
  int64_t index = 0;
  for (; index + kLanes <= count; index += kLanes) {
    body(index, std::integral_constant<int64_t, kLanes>());
  }
  if (index < count) body(index, count - index);
}

// Values of a cache as float32.
inline Floats LoadFloats(const float* from, int64_t count) {
  return LoadFirst<Floats>(from, count);
}

inline Floats LoadFloats(const uint16_t* from, int64_t count) {
  const Halves halves = LoadFirst<Halves>(from, count);
  return BitCast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

// The bits of the nearest bfloat16, ties to even, in the upper halves.
inline Words RoundToBFloat16(const Floats& values) {
  const Words bits = BitCast<Words>(values);
  const Words rounded = bits + (0x7fff + ((bits >> 16) & 1));
  const Words is_nan = BitCast<Words>((bits & 0x7fffffff) > 0x7f800000);
  return (is_nan ? bits | 0x400000 : rounded) & 0xffff0000;
}

// Stores values as a cache has them.
inline void StoreFloats(float* to, const Floats& values, int64_t count) {
  StoreFirst(to, values, count);
}

inline void StoreFloats(uint16_t* to, const Floats& values, int64_t count) {
  const Words rounded = RoundToBFloat16(values) >> 16;
  StoreFirst(to, __builtin_convertvector(rounded, Halves), count);
}

// Stores finite values as a cache has them, and others as zeros: a masked NaN
// would still spread, since 0 x NaN is NaN.
template <typename Value>
void StoreFinite(Value* to, const Floats& values, int64_t count) {
  constexpr uint32_t kInfinity = 0x7f800000;
  // Rounding may make infinity of a large number.
  const Words rounded = sizeof(Value) == 2 ? RoundToBFloat16(values)
                                           : BitCast<Words>(values);
  const Ints is_finite = (rounded & kInfinity) != kInfinity;
  StoreFloats(to, is_finite ? values : Floats{}, count);
}

template <typename Value>
void CopyFinite(const float* from, int64_t width, Value* to) {
  ForVectors(width, [&](int64_t i, auto left) {
    StoreFinite(to + i, LoadFloats(from + i, left), left);
  });
}

// A sum of values in sixteen lanes, which every processor adds up alike: value i
// belongs to lane i % 16.
struct LaneSums {
  Floats parts[16 / kLanes] = {};

  Floats& At(int64_t index) { return parts[index / kLanes % (16 / kLanes)]; }

  // Halves first.
  float Total() const {
    float lanes[16];
    std::memcpy(lanes, parts, sizeof(lanes));
    for (int half = 8; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
  }
};

// e to the power of x <= 0, and 0 below -87 (a polynomial after Cephes' expf).
inline Floats Exp(Floats x) {
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

// 1 / (1 + e^-x).
inline Floats Sigmoid(const Floats& x) {
  const Floats power = Exp(x < 0.0f ? x : -x);
  const Floats larger = 1.0f / (1.0f + power);
  return x < 0.0f ? power * larger : larger;
}

}  // namespace specdec
