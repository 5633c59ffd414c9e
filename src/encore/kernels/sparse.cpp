// Non-zeros side by side, with a bitmap of where they stood. An element is zero if all of its bits are: -0.0 is not.
//
// Packing takes two passes: threads count the non-zeros of their shares, the caller allocates what they need, and each
// thread writes from where the others before it will end. Unpacking counts in the bitmap. Nothing is allocated here.

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "parallel.h"

using namespace encore;

namespace {

constexpr int64_t WORD = 64;
constexpr int MOST_THREADS = 256;

// Which of up to 64 elements are not zero.
template <typename bits>
inline uint64_t non_zeros(const bits* from, int64_t count) {
#if defined(__AVX512BW__)
  if (count == WORD) {
    uint64_t word = 0;
    constexpr int LANES = 64 / sizeof(bits);
    for (int part = 0; part < WORD / LANES; ++part) {
      const __m512i v = _mm512_loadu_si512(from + part * LANES);
      uint64_t mask;
      if constexpr (sizeof(bits) == 2) mask = _mm512_test_epi16_mask(v, v);
      else if constexpr (sizeof(bits) == 4) mask = _mm512_test_epi32_mask(v, v);
      else mask = _mm512_test_epi64_mask(v, v);
      word |= mask << (part * LANES);
    }
    return word;
  }
#endif
  uint64_t word = 0;
  for (int64_t i = 0; i < count; ++i) word |= static_cast<uint64_t>(from[i] != 0) << i;
  return word;
}

// The elements of a word whose bits are set, to `to` and no further.
template <typename bits>
inline void compress(const bits* from, uint64_t word, bits* to) {
#if defined(__AVX512F__)
  if constexpr (sizeof(bits) >= 4) {
    constexpr int LANES = 64 / sizeof(bits);
    for (int part = 0; part < WORD / LANES; ++part) {
      const uint64_t mask = word >> (part * LANES) & ((1u << LANES) - 1);
      const int found = __builtin_popcountll(mask);
      if (!found) continue;
      const uint64_t first = (1u << found) - 1;
      const bits* at = from + part * LANES;
      if constexpr (sizeof(bits) == 4) {
        _mm512_mask_storeu_epi32(to, first, _mm512_maskz_compress_epi32(mask, _mm512_maskz_loadu_epi32(mask, at)));
      } else {
        _mm512_mask_storeu_epi64(to, first, _mm512_maskz_compress_epi64(mask, _mm512_maskz_loadu_epi64(mask, at)));
      }
      to += found;
    }
    return;
  }
#endif
#if defined(__AVX512VBMI2__)
  if constexpr (sizeof(bits) == 2) {
    for (int part = 0; part < 2; ++part) {
      const __mmask32 mask = static_cast<uint32_t>(word >> (part * 32));
      const int found = __builtin_popcount(mask);
      const __mmask32 first = static_cast<uint32_t>((uint64_t{1} << found) - 1);
      const __m512i v = _mm512_maskz_loadu_epi16(mask, from + part * 32);
      _mm512_mask_storeu_epi16(to, first, _mm512_maskz_compress_epi16(mask, v));
      to += found;
    }
    return;
  }
#endif
  for (; word; word &= word - 1) *to++ = from[__builtin_ctzll(word)];
}

// The other way round: up to 64 elements, of which `count` are written and as many read as bits are set.
template <typename bits>
inline void expand(const bits* from, uint64_t word, bits* to, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(bits) >= 4) {
    if (count == WORD) {
      constexpr int LANES = 64 / sizeof(bits);
      for (int part = 0; part < WORD / LANES; ++part) {
        const uint64_t mask = word >> (part * LANES) & ((1u << LANES) - 1);
        const int found = __builtin_popcountll(mask);
        const uint64_t first = (1u << found) - 1;
        bits* at = to + part * LANES;
        if constexpr (sizeof(bits) == 4) {
          _mm512_storeu_si512(at, _mm512_maskz_expand_epi32(mask, _mm512_maskz_loadu_epi32(first, from)));
        } else {
          _mm512_storeu_si512(at, _mm512_maskz_expand_epi64(mask, _mm512_maskz_loadu_epi64(first, from)));
        }
        from += found;
      }
      return;
    }
  }
#endif
#if defined(__AVX512VBMI2__)
  if constexpr (sizeof(bits) == 2) {
    if (count == WORD) {
      for (int part = 0; part < 2; ++part) {
        const __mmask32 mask = static_cast<uint32_t>(word >> (part * 32));
        const int found = __builtin_popcount(mask);
        const __mmask32 first = static_cast<uint32_t>((uint64_t{1} << found) - 1);
        const __m512i v = _mm512_maskz_loadu_epi16(first, from);
        _mm512_storeu_si512(to + part * 32, _mm512_maskz_expand_epi16(mask, v));
        from += found;
      }
      return;
    }
  }
#endif
  std::memset(to, 0, count * sizeof(bits));
  for (; word; word &= word - 1) to[__builtin_ctzll(word)] = *from++;
}

template <typename bits>
int64_t count_shares(const bits* source, int64_t count, int64_t* counts, int64_t threads) {
  const int used = std::min(MOST_THREADS, threads_for(count * sizeof(bits), threads));
  std::fill(counts, counts + MOST_THREADS, 0);
  in_shares(count, WORD, used, [&](int64_t begin, int64_t end, int thread) {
    int64_t found = 0;
    for (int64_t at = begin; at < end; at += WORD)
      found += __builtin_popcountll(non_zeros(source + at, std::min(WORD, end - at)));
    counts[thread] = found;
  });
  int64_t total = 0;
  for (int i = 0; i < MOST_THREADS; ++i) total += counts[i];
  return total;
}

// With the counts of `count_shares`, made for as many threads.
template <typename bits>
void pack(const bits* source, int64_t count, const int64_t* counts, uint8_t* bitmap, bits* values, int64_t threads) {
  const int used = std::min(MOST_THREADS, threads_for(count * sizeof(bits), threads));
  in_shares(count, WORD, used, [&](int64_t begin, int64_t end, int thread) {
    bits* to = values;
    for (int i = 0; i < thread; ++i) to += counts[i];
    for (int64_t at = begin; at < end; at += WORD) {
      const int64_t elements = std::min(WORD, end - at);
      const uint64_t word = non_zeros(source + at, elements);
      std::memcpy(bitmap + at / 8, &word, 8);  // bitmaps are whole words
      compress(source + at, word, to);
      to += __builtin_popcountll(word);
    }
  });
}

// Fails, with -1, where the bitmap does not have `non_zero` bits.
template <typename bits>
int64_t unpack(const uint8_t* bitmap, const bits* values, int64_t count, int64_t non_zero, bits* out, int64_t threads) {
  int64_t counts[MOST_THREADS] = {};
  const int used = std::min(MOST_THREADS, threads_for(count * sizeof(bits), threads));
  in_shares(count, WORD, used, [&](int64_t begin, int64_t end, int thread) {
    int64_t found = 0;
    for (int64_t at = begin; at < end; at += WORD) {
      uint64_t word;
      std::memcpy(&word, bitmap + at / 8, 8);
      found += __builtin_popcountll(word);
    }
    counts[thread] = found;
  });
  int64_t total = 0;
  for (const int64_t found : counts) total += found;
  if (total != non_zero) return -1;
  in_shares(count, WORD, used, [&](int64_t begin, int64_t end, int thread) {
    const bits* from = values;
    for (int i = 0; i < thread; ++i) from += counts[i];
    for (int64_t at = begin; at < end; at += WORD) {
      uint64_t word;
      std::memcpy(&word, bitmap + at / 8, 8);
      const int64_t elements = std::min(WORD, end - at);
      if (elements < WORD) word &= (uint64_t{1} << elements) - 1;
      expand(from, word, out + at, elements);
      from += __builtin_popcountll(word);
    }
  });
  return 0;
}

}  // namespace

#define FOR_BITS(SUFFIX, BITS)                                                                                     \
  extern "C" int64_t count_##SUFFIX(const BITS* source, int64_t count, int64_t* counts, int64_t threads) {         \
    return count_shares<BITS>(source, count, counts, threads);                                                     \
  }                                                                                                                \
  extern "C" int64_t pack_##SUFFIX(const BITS* source, int64_t count, const int64_t* counts, uint8_t* bitmap,      \
                                   BITS* values, int64_t threads) {                                                \
    pack<BITS>(source, count, counts, bitmap, values, threads);                                                    \
    return 0;                                                                                                      \
  }                                                                                                                \
  extern "C" int64_t unpack_##SUFFIX(const uint8_t* bitmap, const BITS* values, int64_t count, int64_t non_zero,   \
                                     BITS* out, int64_t threads) {                                                 \
    return unpack<BITS>(bitmap, values, count, non_zero, out, threads);                                            \
  }

// Bits that are set in the whole words of a bitmap.
extern "C" int64_t count_bits(const uint8_t* bitmap, int64_t words, int64_t) {
  int64_t found = 0;
  for (int64_t i = 0; i < words; ++i) {
    uint64_t word;
    std::memcpy(&word, bitmap + 8 * i, 8);
    found += __builtin_popcountll(word);
  }
  return found;
}

FOR_BITS(16, uint16_t)
FOR_BITS(32, uint32_t)
FOR_BITS(64, uint64_t)
