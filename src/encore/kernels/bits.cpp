// One bit an element: masks packed and unpacked, and operators that read packed masks where they are.
//
// Bit i of a code is bit i % 8 of its byte i / 8. Sixty-four elements become one word: a loop that compilers vectorise
// decides about each, in a byte; the bytes' lowest bits are then gathered. Nothing is allocated here.

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512BW__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "narrow.h"
#include "parallel.h"

using namespace encore;

namespace {

constexpr int64_t WORD = 64;

// Bytes that are 0 or 1 to bits.
inline uint64_t gathered(const uint8_t* flags) {
#if defined(__AVX512BW__)
  const __m512i bytes = _mm512_loadu_si512(flags);
  return _mm512_test_epi8_mask(bytes, bytes);
#elif defined(__AVX2__)
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(flags));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(flags + 32));
  const uint32_t first = _mm256_movemask_epi8(_mm256_slli_epi16(low, 7));
  const uint32_t second = _mm256_movemask_epi8(_mm256_slli_epi16(high, 7));
  return first | static_cast<uint64_t>(second) << 32;
#else
  uint64_t word = 0;
  for (int byte = 0; byte < 8; ++byte) {
    uint64_t eight;
    std::memcpy(&eight, flags + 8 * byte, 8);
    word |= (eight * 0x0102040810204080u >> 56) << (8 * byte);
  }
  return word;
#endif
}

// `flag(i)`, 0 or 1, for every element.
template <typename Flag>
void pack(int64_t count, int64_t bytes, uint8_t* code, int64_t threads, const Flag& flag) {
  in_shares(count, WORD, threads_for(bytes, threads), [&](int64_t begin, int64_t end, int) {
    alignas(64) uint8_t flags[WORD];
    int64_t at = begin;
    for (; at + WORD <= end; at += WORD) {
#pragma omp simd
      for (int64_t i = 0; i < WORD; ++i) flags[i] = flag(at + i);
      const uint64_t word = gathered(flags);
      std::memcpy(code + at / 8, &word, 8);
    }
    if (at < end) {
      std::memset(flags, 0, sizeof flags);
      for (int64_t i = 0; i < end - at; ++i) flags[i] = flag(at + i);
      const uint64_t word = gathered(flags);
      std::memcpy(code + at / 8, &word, (end - at + 7) / 8);
    }
  });
}

template <typename bits>
struct Places {  // the bits of a run of sixteen, each in a lane as wide as an element
  alignas(64) bits at[16];
  constexpr Places() : at() {
    for (int i = 0; i < 16; ++i) at[i] = static_cast<bits>(uint64_t{1} << (sizeof(bits) == 1 ? i % 8 : i));
  }
};

// `make(element, is_set)` for every element, into `out`.
template <typename bits, typename Make>
void map(const bits* source, const uint8_t* code, int64_t count, bits* out, int64_t threads, const Make& make) {
  static constexpr Places<bits> places{};
  in_shares(count, WORD, threads_for(count * sizeof(bits), threads), [&](int64_t begin, int64_t end, int) {
    int64_t at = begin;
    for (; at + 16 <= end; at += 16) {
      uint16_t run;
      std::memcpy(&run, code + at / 8, 2);
      const bits spread = static_cast<bits>(run);
      const bits* from = source + at;
      bits* to = out + at;
#pragma omp simd
      for (int i = 0; i < 16; ++i) to[i] = make(from[i], (spread & places.at[i]) != 0);
    }
    for (; at < end; ++at) out[at] = make(source[at], code[at / 8] >> at % 8 & 1);
  });
}

template <typename bits>
void unpack(const uint8_t* code, int64_t count, bits one, bits* out, int64_t threads) {
  static constexpr Places<bits> places{};
  in_shares(count, WORD, threads_for(count * sizeof(bits), threads), [&](int64_t begin, int64_t end, int) {
    int64_t at = begin;
    for (; at + WORD <= end; at += WORD) {
#if defined(__AVX512BW__)
      if constexpr (sizeof(bits) == 1) {
        uint64_t word;
        std::memcpy(&word, code + at / 8, 8);
        _mm512_storeu_si512(out + at, _mm512_maskz_set1_epi8(word, one));
        continue;
      }
#endif
      constexpr int RUN = sizeof(bits) == 1 ? 8 : 16;
      for (int first = 0; first < WORD; first += RUN) {
        uint16_t run = code[(at + first) / 8];
        if (RUN == 16) std::memcpy(&run, code + (at + first) / 8, 2);
        const bits spread = static_cast<bits>(run);
        bits* to = out + at + first;
#pragma omp simd
        for (int i = 0; i < RUN; ++i) to[i] = (spread & places.at[i]) != 0 ? one : bits{0};
      }
    }
    for (; at < end; ++at) out[at] = code[at / 8] >> at % 8 & 1 ? one : bits{0};
  });
}

// Above zero, by the bits of a number alone; NaN counts as `nan_passes` says.
template <typename bits>
void pack_signs(const bits* source, int64_t count, uint64_t infinity, bool nan_passes, uint8_t* code, int64_t threads) {
  using number = std::make_signed_t<bits>;
  const number inf = static_cast<number>(infinity);
  constexpr number SIZE = static_cast<number>(static_cast<bits>(~bits{0}) >> 1);
  const auto* numbers = reinterpret_cast<const number*>(source);
  const int64_t bytes = count * sizeof(bits);
  if (nan_passes) {
    pack(count, bytes, code, threads, [=](int64_t i) -> uint8_t {
      return (numbers[i] > 0) | (static_cast<number>(numbers[i] & SIZE) > inf);
    });
  } else {
    pack(count, bytes, code, threads, [=](int64_t i) -> uint8_t { return (numbers[i] > 0) & (numbers[i] <= inf); });
  }
}

template <typename type>
void pack_inside(const typename type::bits* source, int64_t count, double low, double high, bool nan_passes,
                 uint8_t* code, int64_t threads) {
  using real = typename type::real;
  const real above = static_cast<real>(low), below = static_cast<real>(high);
  pack(count, count * sizeof(typename type::bits), code, threads, [=](int64_t i) -> uint8_t {
    const real value = type::read(source[i]);
    const bool in = (value > above) & (value < below), nan = value != value;
    return in | (nan & nan_passes);
  });
}

}  // namespace

extern "C" void pack_bools(const uint8_t* source, int64_t count, uint8_t* code, int64_t threads) {
  pack(count, count, code, threads, [=](int64_t i) -> uint8_t { return source[i] != 0; });
}

#define FOR_BITS(SUFFIX, BITS)                                                                                     \
  extern "C" void pack_signs_##SUFFIX(const BITS* source, int64_t count, uint64_t infinity, bool nan_passes,       \
                                      uint8_t* code, int64_t threads) {                                            \
    pack_signs<BITS>(source, count, infinity, nan_passes, code, threads);                                          \
  }                                                                                                                \
  extern "C" void masked_##SUFFIX(const BITS* source, const uint8_t* code, int64_t count, BITS* out,               \
                                  int64_t threads) {                                                               \
    map<BITS>(source, code, count, out, threads, [](BITS x, bool set) { return set ? x : BITS{0}; });              \
  }

#define FOR_UNPACK(SUFFIX, BITS)                                                                                   \
  extern "C" void unpack_##SUFFIX(const uint8_t* code, int64_t count, uint64_t one, BITS* out, int64_t threads) {  \
    unpack<BITS>(code, count, static_cast<BITS>(one), out, threads);                                               \
  }

#define FOR_TYPE(SUFFIX, TYPE)                                                                                     \
  extern "C" void pack_inside_##SUFFIX(const TYPE::bits* source, int64_t count, double low, double high,           \
                                       bool nan_passes, uint8_t* code, int64_t threads) {                          \
    pack_inside<TYPE>(source, count, low, high, nan_passes, code, threads);                                        \
  }                                                                                                                \
  /* Elements times `one` where their bit is set, times `other` elsewhere. */                                      \
  extern "C" void scaled_##SUFFIX(const TYPE::bits* source, const uint8_t* code, int64_t count, double one,        \
                                  double other, TYPE::bits* out, int64_t threads) {                                \
    const TYPE::real first = one, second = other;                                                                  \
    map<TYPE::bits>(source, code, count, out, threads, [=](TYPE::bits x, bool set) {                               \
      return TYPE::write(TYPE::read(x) * (set ? first : second));                                                  \
    });                                                                                                            \
  }

FOR_BITS(16, uint16_t)
FOR_BITS(32, uint32_t)
FOR_BITS(64, uint64_t)
FOR_UNPACK(8, uint8_t)
FOR_UNPACK(16, uint16_t)
FOR_UNPACK(32, uint32_t)
FOR_UNPACK(64, uint64_t)
FOR_TYPE(f32, F32)
FOR_TYPE(f64, F64)
FOR_TYPE(bf16, BF16)
FOR_TYPE(f16, F16)
