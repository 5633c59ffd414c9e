// Integers in the fewest bytes that their range allows: the range, and one pass to make them narrow or wide again.

#include <cstdint>
#include <limits>

#include "parallel.h"

using namespace encore;

namespace {

template <typename wide>
void range(const wide* source, int64_t count, int64_t* least, int64_t* most, int64_t threads) {
  wide low = std::numeric_limits<wide>::max(), high = std::numeric_limits<wide>::min();
#pragma omp parallel for simd reduction(min : low) reduction(max : high) num_threads(threads_for(count * sizeof(wide), threads))
  for (int64_t i = 0; i < count; ++i) {
    low = source[i] < low ? source[i] : low;
    high = source[i] > high ? source[i] : high;
  }
  *least = low;
  *most = high;
}

template <typename wide, typename small>
void narrow(const wide* source, int64_t count, int64_t base, small* out, int64_t threads) {
  const auto from = static_cast<uint64_t>(base);
  in_shares(count, 64, threads_for(count * sizeof(wide), threads), [&](int64_t begin, int64_t end, int) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) out[i] = static_cast<small>(static_cast<uint64_t>(source[i]) - from);
  });
}

template <typename wide, typename small>
void widen(const small* source, int64_t count, int64_t base, wide* out, int64_t threads) {
  const auto from = static_cast<uint64_t>(base);
  in_shares(count, 64, threads_for(count * sizeof(wide), threads), [&](int64_t begin, int64_t end, int) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) out[i] = static_cast<wide>(static_cast<uint64_t>(source[i]) + from);
  });
}

}  // namespace

#define FOR_BOTH(WIDE_BITS, WIDE, SMALL_BITS, SMALL)                                                                 \
  extern "C" void narrow_##WIDE_BITS##_##SMALL_BITS(const WIDE* source, int64_t count, int64_t base, SMALL* out,     \
                                                    int64_t threads) {                                               \
    narrow<WIDE, SMALL>(source, count, base, out, threads);                                                          \
  }                                                                                                                  \
  extern "C" void widen_##WIDE_BITS##_##SMALL_BITS(const SMALL* source, int64_t count, int64_t base, WIDE* out,      \
                                                   int64_t threads) {                                                \
    widen<WIDE, SMALL>(source, count, base, out, threads);                                                           \
  }

#define FOR_WIDE(WIDE_BITS, WIDE)                                                                                    \
  extern "C" void range_##WIDE_BITS(const WIDE* source, int64_t count, int64_t* least, int64_t* most,                \
                                    int64_t threads) {                                                               \
    range<WIDE>(source, count, least, most, threads);                                                                \
  }                                                                                                                  \
  FOR_BOTH(WIDE_BITS, WIDE, 8, uint8_t)                                                                              \
  FOR_BOTH(WIDE_BITS, WIDE, 16, uint16_t)                                                                            \
  FOR_BOTH(WIDE_BITS, WIDE, 32, uint32_t)                                                                            \
  FOR_BOTH(WIDE_BITS, WIDE, 64, uint64_t)

FOR_WIDE(64, int64_t)
FOR_WIDE(32, int32_t)
FOR_WIDE(16, int16_t)
