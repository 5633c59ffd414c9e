// Floating-point numbers of few bits as integers: a sign, E bits of exponent, M bits of mantissa, in loops that compilers
// vectorise. Rounding is to nearest, ties to even.

#pragma once

#include <cstdint>
#include <cstring>

// Floating-point exceptions are not read; to keep them exact, GCC would not vectorise choices between two sums.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

namespace encore {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The largest code of a finite number, and those of infinity and NaN, without sign.
template <int E, int M>
struct Codes {
  static constexpr uint32_t infinity = ((1u << E) - 1) << M, nan = infinity | (1u << (M - 1)), largest = infinity - 1;
};

// As float8_e4m3fn, which spends no exponent on infinity, with 448 given up for it.
template <>
struct Codes<4, 3> {
  static constexpr uint32_t infinity = 0x7e, nan = 0x7f, largest = 0x7d;
};

template <int E>
constexpr int BIAS = (1 << (E - 1)) - 1;

// `saturate`: finite numbers stay finite.
template <int E, int M, bool saturate>
inline uint32_t narrowed(uint32_t bits) {
  using C = Codes<E, M>;
  constexpr int SHIFT = 23 - M;
  constexpr uint32_t LEAST_NORMAL = uint32_t(128 - BIAS<E>) << 23;
  const uint32_t size = bits & 0x7fffffffu;
  uint32_t code = (size + ((1u << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT;
  if constexpr (BIAS<E> != 127) {
    code -= uint32_t(127 - BIAS<E>) << M;
    constexpr uint32_t MAGIC = uint32_t(127 + 1 - BIAS<E> - M + 23) << 23;  // its last bit is that of the least numbers
    const uint32_t small = bits_of(float_of(size) + float_of(MAGIC)) - MAGIC;
    code = size < LEAST_NORMAL ? small : code;
  }
  code = code > C::largest ? (saturate ? C::largest : C::infinity) : code;
  code = size == 0x7f800000u ? C::infinity : code;
  code = size > 0x7f800000u ? C::nan : code;
  return code | (bits >> 31) << (E + M);
}

template <int E, int M>
inline uint32_t widened(uint32_t code) {
  using C = Codes<E, M>;
  constexpr int SHIFT = 23 - M;
  const uint32_t size = code & ((1u << (E + M)) - 1);
  uint32_t bits = size << SHIFT;
  if constexpr (BIAS<E> != 127) {
    bits += uint32_t(127 - BIAS<E>) << 23;
    constexpr uint32_t LEAST = uint32_t(127 + 1 - BIAS<E> - M) << 23;
    const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(size)) * float_of(LEAST));
    bits = size < (1u << M) ? small : bits;
  }
  bits = size == C::infinity ? 0x7f800000u : bits;
  bits = size > C::infinity ? 0x7fc00000u : bits;
  return bits | (code >> (E + M)) << 31;
}

// How tensors hold numbers: `bits` as they lie in memory, `real` what is computed in.
struct F32 {
  using bits = uint32_t;
  using real = float;
  static inline float read(uint32_t b) { return float_of(b); }
  static inline uint32_t write(float v) { return bits_of(v); }
};

struct F64 {
  using bits = uint64_t;
  using real = double;
  static inline double read(uint64_t b) {
    double value;
    std::memcpy(&value, &b, sizeof value);
    return value;
  }
  static inline uint64_t write(double v) {
    uint64_t b;
    std::memcpy(&b, &v, sizeof b);
    return b;
  }
};

template <int E, int M>
struct Small {
  using bits = uint16_t;
  using real = float;
  static inline float read(uint16_t b) { return float_of(widened<E, M>(b)); }
  static inline uint16_t write(float v) { return static_cast<uint16_t>(narrowed<E, M, false>(bits_of(v))); }
};

using BF16 = Small<8, 7>;
using F16 = Small<5, 10>;

}  // namespace encore
