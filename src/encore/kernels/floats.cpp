// Floating-point numbers in fewer bits: sixteen, ten, eight; and groups of small integers with a scale.
//
// Conversions are those of narrow.h, in loops that compilers vectorise. Sources and results are float32, bfloat16 or
// float16; blocks go through float32 on the stack. Nothing is allocated here.

#include <cfloat>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "narrow.h"
#include "parallel.h"

using namespace encore;

namespace {

constexpr int64_t BLOCK = 768;  // a multiple of 3, of 64 and of 8
constexpr int64_t GROUP = 64;

template <typename type>
inline void read_block(const typename type::bits* from, int64_t count, uint32_t* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = bits_of(type::read(from[i]));
}

template <typename type>
inline void write_block(const uint32_t* from, int64_t count, typename type::bits* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = type::write(float_of(from[i]));
}

template <>
inline void read_block<F32>(const uint32_t* from, int64_t count, uint32_t* to) {
  std::memcpy(to, from, count * 4);
}

template <>
inline void write_block<F32>(const uint32_t* from, int64_t count, uint32_t* to) {
  std::memcpy(to, from, count * 4);
}

// `body(block of float32, elements, first element)` over all blocks.
template <typename Body>
void blocks(int64_t count, int64_t threads, const Body& body) {
  in_shares(count, BLOCK, threads_for(count * 4, threads), [&](int64_t begin, int64_t end, int) {
    alignas(64) uint32_t block[BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) body(block, std::min(BLOCK, end - at), at);
  });
}

// ---- one code an element ---------------------------------------------------------------------------------------------

template <int E, int M, typename code, typename type>
void encode(const typename type::bits* source, int64_t count, code* codes, int64_t threads) {
  blocks(count, threads, [&](uint32_t* block, int64_t elements, int64_t at) {
    const uint32_t* numbers = block;
    if constexpr (std::is_same_v<type, F32>) numbers = source + at;
    else read_block<type>(source + at, elements, block);
    code* to = codes + at;
#pragma omp simd
    for (int64_t i = 0; i < elements; ++i) to[i] = static_cast<code>(narrowed<E, M, true>(numbers[i]));
  });
}

template <int E, int M, typename code, typename type>
void decode(const code* codes, int64_t count, typename type::bits* out, int64_t threads) {
  blocks(count, threads, [&](uint32_t* block, int64_t elements, int64_t at) {
    const code* from = codes + at;
    auto* to = out + at;
#pragma omp simd
    for (int64_t i = 0; i < elements; ++i) to[i] = type::write(float_of(widened<E, M>(from[i])));
  });
}

// ---- three to a word -------------------------------------------------------------------------------------------------

template <typename type>
void encode_ten(const typename type::bits* source, int64_t count, uint32_t* words, int64_t threads) {
  blocks(count, threads, [&](uint32_t* block, int64_t elements, int64_t at) {
    uint32_t codes[BLOCK];
    read_block<type>(source + at, elements, block);
    for (int64_t i = elements; i % 3; ++i) block[i] = 0;
    const int64_t whole = (elements + 2) / 3;
#pragma omp simd
    for (int64_t i = 0; i < 3 * whole; ++i) codes[i] = narrowed<5, 4, true>(block[i]);
    uint32_t* to = words + at / 3;
#pragma omp simd
    for (int64_t i = 0; i < whole; ++i) to[i] = codes[3 * i] | codes[3 * i + 1] << 10 | codes[3 * i + 2] << 20;
  });
}

template <typename type>
void decode_ten(const uint32_t* words, int64_t count, typename type::bits* out, int64_t threads) {
  blocks(count, threads, [&](uint32_t* block, int64_t elements, int64_t at) {
    const uint32_t* from = words + at / 3;
    const int64_t whole = (elements + 2) / 3;
    for (int64_t i = 0; i < whole; ++i) {
      block[3 * i] = from[i] & 1023;
      block[3 * i + 1] = from[i] >> 10 & 1023;
      block[3 * i + 2] = from[i] >> 20 & 1023;
    }
    auto* to = out + at;
#pragma omp simd
    for (int64_t i = 0; i < elements; ++i) to[i] = type::write(float_of(widened<5, 4>(block[i])));
  });
}

// ---- groups of small integers ----------------------------------------------------------------------------------------

// `most` is the largest integer. A negative scale says that the group has numbers that are not finite: `most` and
// `-most` are the infinities then, and `-most - 1` is NaN.
template <int most>
inline float quantised(const uint32_t* block, int64_t count, int8_t* to) {
  uint32_t largest = 0, any = 0;
#pragma omp simd reduction(max : largest, any)
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t size = block[i] & 0x7fffffffu;
    const uint32_t finite = size < 0x7f800000u ? size : 0u;
    largest = finite > largest ? finite : largest;
    any = size > any ? size : any;
  }
  const bool special = any >= 0x7f800000u;
  float scale = float_of(largest) / static_cast<float>(special ? most - 1 : most);
  if (scale < FLT_MIN) scale = 0;  // so small: zeros
  const float safe = scale == 0 ? 1.0f : scale;
  constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: the last bit of a sum is worth 1
  const float top = static_cast<float>(special ? most - 1 : most) * (scale == 0 ? 0.0f : 1.0f);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = float_of(block[i]) / safe;
    const float in = value > top ? top : (value < -top ? -top : value);
    to[i] = static_cast<int8_t>(bits_of(in + MAGIC) - bits_of(MAGIC));
  }
  if (special) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t size = block[i] & 0x7fffffffu;
      if (size == 0x7f800000u) to[i] = block[i] >> 31 ? -most : most;
      if (size > 0x7f800000u) to[i] = -most - 1;
    }
    scale = -scale;
  }
  return scale;
}

template <int most>
inline void restored(float scale, const int8_t* from, int64_t count, uint32_t* block) {
  const bool special = bits_of(scale) >> 31;
  const float step = special ? -scale : scale;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(from[i]) * step;
    const float in = value > FLT_MAX ? FLT_MAX : (value < -FLT_MAX ? -FLT_MAX : value);
    block[i] = bits_of(in);
  }
  if (special) {
    for (int64_t i = 0; i < count; ++i) {
      if (from[i] == most) block[i] = 0x7f800000u;
      if (from[i] == -most) block[i] = 0xff800000u;
      if (from[i] == -most - 1) block[i] = 0x7fc00000u;
    }
  }
}

template <int most, typename type>
void encode_groups(const typename type::bits* source, int64_t count, uint8_t* scales, uint8_t* integers,
                   int64_t threads) {
  blocks(count, threads, [&](uint32_t* block, int64_t elements, int64_t at) {
    alignas(64) int8_t small[BLOCK + 1] = {};
    read_block<type>(source + at, elements, block);
    for (int64_t first = 0; first < elements; first += GROUP) {
      const float scale = quantised<most>(block + first, std::min(GROUP, elements - first), small + first);
      std::memcpy(scales + (at + first) / GROUP * 4, &scale, 4);
    }
    if constexpr (most > 7) {
      std::memcpy(integers + at, small, elements);
    } else {
      if (elements % 2) small[elements] = 0;
      uint8_t* to = integers + at / 2;
      for (int64_t i = 0; i < (elements + 1) / 2; ++i)
        to[i] = static_cast<uint8_t>((small[2 * i] & 15) | (small[2 * i + 1] & 15) << 4);
    }
  });
}

template <int most, typename type>
void decode_groups(const uint8_t* scales, const uint8_t* integers, int64_t count, typename type::bits* out,
                   int64_t threads) {
  blocks(count, threads, [&](uint32_t* block, int64_t elements, int64_t at) {
    alignas(64) int8_t small[BLOCK + 1];
    if constexpr (most > 7) {
      std::memcpy(small, integers + at, elements);
    } else {
      const uint8_t* from = integers + at / 2;
      for (int64_t i = 0; i < (elements + 1) / 2; ++i) {
        small[2 * i] = static_cast<int8_t>(from[i] << 4) >> 4;
        small[2 * i + 1] = static_cast<int8_t>(from[i]) >> 4;
      }
    }
    for (int64_t first = 0; first < elements; first += GROUP) {
      float scale;
      std::memcpy(&scale, scales + (at + first) / GROUP * 4, 4);
      restored<most>(scale, small + first, std::min(GROUP, elements - first), block + first);
    }
    write_block<type>(block, elements, out + at);
  });
}

}  // namespace

#define FOR_BOTH(NAME, SUFFIX, TYPE, CODE, ENCODE, DECODE)                                                        \
  extern "C" void encode_##NAME##_##SUFFIX(const TYPE::bits* source, int64_t count, CODE* code, int64_t threads) { \
    ENCODE(source, count, code, threads);                                                                         \
  }                                                                                                               \
  extern "C" void decode_##NAME##_##SUFFIX(const CODE* code, int64_t count, TYPE::bits* out, int64_t threads) {    \
    DECODE(code, count, out, threads);                                                                            \
  }

#define FOR_GROUPS(NAME, SUFFIX, TYPE, MOST)                                                                      \
  extern "C" void encode_##NAME##_##SUFFIX(const TYPE::bits* source, int64_t count, uint8_t* scales,              \
                                           uint8_t* integers, int64_t threads) {                                  \
    encode_groups<MOST, TYPE>(source, count, scales, integers, threads);                                          \
  }                                                                                                               \
  extern "C" void decode_##NAME##_##SUFFIX(const uint8_t* scales, const uint8_t* integers, int64_t count,         \
                                           TYPE::bits* out, int64_t threads) {                                    \
    decode_groups<MOST, TYPE>(scales, integers, count, out, threads);                                             \
  }

#define FOR_SMALL(NAME, E, M, CODE, SUFFIX, TYPE)                                                                 \
  FOR_BOTH(NAME, SUFFIX, TYPE, CODE, (encode<E, M, CODE, TYPE>), (decode<E, M, CODE, TYPE>))

#define FOR_TYPE(SUFFIX, TYPE)                                                                                    \
  FOR_SMALL(fp8_e4m3, 4, 3, uint8_t, SUFFIX, TYPE)                                                                \
  FOR_SMALL(fp8_e5m2, 5, 2, uint8_t, SUFFIX, TYPE)                                                                \
  FOR_BOTH(fp10, SUFFIX, TYPE, uint32_t, (encode_ten<TYPE>), (decode_ten<TYPE>))                                  \
  FOR_GROUPS(int8, SUFFIX, TYPE, 127)                                                                             \
  FOR_GROUPS(int4, SUFFIX, TYPE, 7)

FOR_SMALL(fp16, 5, 10, uint16_t, f32, F32)
FOR_SMALL(bf16, 8, 7, uint16_t, f32, F32)
FOR_TYPE(f32, F32)
FOR_TYPE(bf16, BF16)
FOR_TYPE(f16, F16)
