// Max pooling that remembers where in its window a maximum stood, in four or eight bits.
//
// A row of results is made tap by tap: one position in the window, for a run of results at a time, in loops that
// compilers vectorise. Along a run the input is walked with the window's stride; with channels last a run is a run of
// channels. As in PyTorch, the first of equal maxima wins, the last NaN does, and a window of nothing but -inf points to
// its first element that is not padding. Backward adds gradients in the order of the results, as PyTorch does.
//
// Float32 has paths of its own where there is AVX-512: sixteen results stay in registers until all of their taps are
// done, and backward collects, for sixteen inputs, what the windows over them send, instead of scattering it.
//
// Nothing is allocated here but rows of a few kilobytes on the stack.

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__BMI2__)
#include <immintrin.h>
#define ENCORE_SIXTEEN 1
#endif

#include "narrow.h"
#include "parallel.h"

using namespace encore;

namespace {

constexpr int64_t MOST_TAPS = 256;
constexpr int64_t RUN = 256;  // results at a time; even, so that runs of four-bit positions begin with a byte

// Depth, height, width. Where `channels` is not 0, the innermost dimension of memory is the channels.
struct Pool {
  int64_t planes, channels;
  int64_t in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
  int64_t narrow;  // four bits a position

  int64_t inputs() const { return in[0] * in[1] * in[2]; }
  int64_t outputs() const { return out[0] * out[1] * out[2]; }
  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
};

// Strides and dilations are 1 or 2 mostly, and a division takes longer than a tap.
inline int64_t floor_div(int64_t a, int64_t b) {
  return b == 1 ? a : b == 2 ? a >> 1 : a >= 0 ? a / b : -((-a + b - 1) / b);
}
inline int64_t ceil_div(int64_t a, int64_t b) { return floor_div(a + b - 1, b); }

// The input's coordinate under a tap.
inline int64_t under(const Pool& p, int axis, int64_t result, int64_t tap) {
  return result * p.stride[axis] - p.padding[axis] + tap * p.dilation[axis];
}

// The first tap that is not in the padding.
inline int64_t first_tap(const Pool& p, int axis, int64_t result) {
  const int64_t before = p.padding[axis] - result * p.stride[axis];
  return before <= 0 ? 0 : ceil_div(before, p.dilation[axis]);
}

// Results of a row whose tap is inside the input: [low, high).
struct Range {
  int64_t low, high;
};

inline Range inside(const Pool& p, int64_t tap, int64_t begin, int64_t end) {
  const int64_t shift = p.padding[2] - tap * p.dilation[2];
  const int64_t low = std::max(begin, ceil_div(shift, p.stride[2]));
  const int64_t high = std::min(end, ceil_div(p.in[2] + shift, p.stride[2]));
  return {low, std::max(low, high)};
}

// Pairs of positions to bytes, the first one in the lower half.
inline void join(const uint8_t* positions, int64_t pairs, uint8_t* bytes) {
  int64_t k = 0;
#if ENCORE_SIXTEEN
  for (; k < pairs; k += 32) {
    const uint64_t wanted = pairs - k >= 32 ? ~uint64_t{0} : (uint64_t{1} << 2 * (pairs - k)) - 1;
    const __m512i both = _mm512_maskz_loadu_epi8(wanted, positions + 2 * k);
    const __m256i joined = _mm512_cvtepi16_epi8(_mm512_or_si512(both, _mm512_srli_epi16(both, 4)));
    _mm256_mask_storeu_epi8(bytes + k, static_cast<__mmask32>(_pext_u64(wanted, 0x5555555555555555u)), joined);
  }
#else
  for (; k + 4 <= pairs; k += 4) {
    uint64_t both;
    std::memcpy(&both, positions + 2 * k, 8);
    both = (both | both >> 4) & 0x00ff00ff00ff00ffu;
    both = (both | both >> 8) & 0x0000ffff0000ffffu;
    both |= both >> 16;
    std::memcpy(bytes + k, &both, 4);
  }
  for (; k < pairs; ++k) bytes[k] = static_cast<uint8_t>(positions[2 * k] | positions[2 * k + 1] << 4);
#endif
}

inline void part(const uint8_t* bytes, int64_t pairs, uint8_t* positions) {
  int64_t k = 0;
#if ENCORE_SIXTEEN
  for (; k < pairs; k += 32) {
    const uint64_t wanted = pairs - k >= 32 ? ~uint64_t{0} : (uint64_t{1} << 2 * (pairs - k)) - 1;
    const __mmask32 there = static_cast<__mmask32>(_pext_u64(wanted, 0x5555555555555555u));
    const __m512i both = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(there, bytes + k));
    const __m512i apart = _mm512_and_si512(_mm512_or_si512(both, _mm512_slli_epi16(both, 4)), _mm512_set1_epi8(15));
    _mm512_mask_storeu_epi8(positions + 2 * k, wanted, apart);
  }
#else
  for (; k + 4 <= pairs; k += 4) {
    uint32_t four;
    std::memcpy(&four, bytes + k, 4);
    uint64_t both = four;
    both = (both | both << 16) & 0x0000ffff0000ffffu;
    both = (both | both << 8) & 0x00ff00ff00ff00ffu;
    both = (both | both << 4) & 0x0f0f0f0f0f0f0f0fu;
    std::memcpy(positions + 2 * k, &both, 8);
  }
  for (; k < pairs; ++k) {
    positions[2 * k] = bytes[k] & 15;
    positions[2 * k + 1] = bytes[k] >> 4;
  }
#endif
}

void store_positions(const Pool& p, const uint8_t* positions, int64_t count, uint8_t* map, int64_t at) {
  if (!p.narrow) {
    std::memcpy(map + at, positions, count);
    return;
  }
  int64_t i = 0;
  if (at % 2 && count) map[at / 2] |= static_cast<uint8_t>(positions[i++] << 4);
  uint8_t* bytes = map + (at + i) / 2;
  const int64_t pairs = (count - i) / 2;
  join(positions + i, pairs, bytes);
  i += 2 * pairs;
  if (i < count) bytes[pairs] = positions[i];
}

void load_positions(const Pool& p, const uint8_t* map, int64_t at, int64_t count, uint8_t* positions) {
  if (!p.narrow) {
    std::memcpy(positions, map + at, count);
    return;
  }
  int64_t i = 0;
  if (at % 2 && count) positions[i++] = map[at / 2] >> 4;
  const uint8_t* bytes = map + (at + i) / 2;
  const int64_t pairs = (count - i) / 2;
  part(bytes, pairs, positions + i);
  i += 2 * pairs;
  if (i < count) positions[i] = bytes[pairs] & 15;
}

#if ENCORE_SIXTEEN

constexpr int64_t LANES = 16;
constexpr int64_t LONGEST_ROW = 1024;
constexpr int64_t MOST_SENDERS = 32;

inline __mmask16 first_lanes(int64_t count) {
  return count >= LANES ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

// Those of `count` consecutive places from `first` on that are in [0, size).
inline uint32_t places_inside(int64_t first, int64_t size, int64_t count) {
  const int64_t low = std::min(count, std::max<int64_t>(0, -first));
  const int64_t high = std::min(count, std::max<int64_t>(0, size - first));
  return static_cast<uint32_t>(((uint64_t{1} << high) - 1) & ~((uint64_t{1} << low) - 1));
}

// Sixteen maxima in the making. Without `exact`, NaN is only noticed: sums of everything seen are NaN then (or where
// infinities of both signs meet), and the sixteen are recomputed.
template <bool exact>
struct Best {
  __m512 value = _mm512_set1_ps(-std::numeric_limits<float>::infinity()), seen = _mm512_setzero_ps();
  __m512i position;

  inline void take(__m512 other, __m512i tap) {
    __mmask16 better = _mm512_cmp_ps_mask(other, value, _CMP_GT_OQ);
    if constexpr (exact) {
      better |= _mm512_cmp_ps_mask(other, other, _CMP_UNORD_Q);
      value = _mm512_mask_mov_ps(value, better, other);
    } else {
      seen = _mm512_add_ps(seen, other);
      value = _mm512_max_ps(other, value);  // the second where they are equal
    }
    position = _mm512_mask_mov_epi32(position, better, tap);
  }

  bool is_sure() const { return exact || !_mm512_cmp_ps_mask(seen, seen, _CMP_UNORD_Q); }
};

// Sixteen inputs, one or two apart; -inf where they are outside.
template <int64_t step>
inline __m512 loaded(const float* from, uint32_t inside, __m512i even) {
  const __m512 least = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  if constexpr (step == 1) {
    if (inside == 0xffffu) return _mm512_loadu_ps(from);
    return _mm512_mask_loadu_ps(least, static_cast<__mmask16>(inside), from);
  } else {
    if (inside == 0xffffffffu)
      return _mm512_permutex2var_ps(_mm512_loadu_ps(from), even, _mm512_loadu_ps(from + LANES));
    const __m512 low = _mm512_mask_loadu_ps(least, static_cast<__mmask16>(inside), from);
    const __m512 high = _mm512_mask_loadu_ps(least, static_cast<__mmask16>(inside >> 16), from + LANES);
    return _mm512_permutex2var_ps(low, even, high);
  }
}

// Strides 1 and 2. Which lanes of a tap are inside the input is the same for all rows.
template <int64_t step>
void pool_rows_sixteen(const Pool& p, const float* x, float* y, uint8_t* map, int64_t first_plane, int64_t last_plane) {
  uint8_t positions[RUN];
  alignas(64) int32_t starts[RUN];
  uint32_t inside[RUN / LANES][MOST_TAPS];
  int64_t known = -1;
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const int64_t lines = p.out[0] * p.out[1];
  int64_t plane = first_plane, od = 0, oh = 0;
  for (int64_t line = first_plane * lines; line < last_plane * lines; ++line) {
    const float* source = x + plane * p.inputs();
    const int64_t d0 = first_tap(p, 0, od), h0 = first_tap(p, 1, oh);
    const __m512i row0 = _mm512_set1_epi32(static_cast<int32_t>((d0 * p.kernel[1] + h0) * p.kernel[2]));
    for (int64_t begin = 0; begin < p.out[2]; begin += RUN) {
      const int64_t end = std::min(p.out[2], begin + RUN);
      if (begin != known) {
        for (int64_t i = 0; i < RUN; ++i) starts[i] = static_cast<int32_t>(first_tap(p, 2, begin + i));
        for (int64_t v = 0; v * LANES < end - begin; ++v)
          for (int64_t kw = 0; kw < p.kernel[2]; ++kw)
            inside[v][kw] = places_inside(under(p, 2, begin + v * LANES, kw), p.in[2], step * LANES);
        known = begin;
      }
      for (int64_t ow = begin, v = 0; ow < end; ow += LANES, ++v) {
        const __m512i start = _mm512_add_epi32(row0, _mm512_load_si512(starts + v * LANES));
        const auto taken = [&]<bool exact>(Best<exact> best) {
          best.position = start;
          for (int64_t kd = d0; kd < p.kernel[0]; ++kd) {
            const int64_t d = under(p, 0, od, kd);
            if (d >= p.in[0]) break;
            for (int64_t kh = h0; kh < p.kernel[1]; ++kh) {
              const int64_t h = under(p, 1, oh, kh);
              if (h >= p.in[1]) break;
              const float* from = source + (d * p.in[1] + h) * p.in[2] + under(p, 2, ow, 0);
              __m512i tap = _mm512_set1_epi32(static_cast<int32_t>((kd * p.kernel[1] + kh) * p.kernel[2]));
              for (int64_t kw = 0; kw < p.kernel[2]; ++kw, from += p.dilation[2]) {
                best.take(loaded<step>(from, inside[v][kw], even), tap);
                tap = _mm512_add_epi32(tap, one);
              }
            }
          }
          return best;
        };
        const Best<false> quick = taken(Best<false>());
        __m512 value = quick.value;
        __m512i position = quick.position;
        if (!quick.is_sure()) {
          const Best<true> slow = taken(Best<true>());
          value = slow.value;
          position = slow.position;
        }
        const __mmask16 wanted = first_lanes(end - ow);
        _mm512_mask_storeu_ps(y + line * p.out[2] + ow, wanted, value);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(positions + (ow - begin)), _mm512_cvtepi32_epi8(position));
      }
      store_positions(p, positions, end - begin, map, line * p.out[2] + begin);
    }
    if (++oh < p.out[1]) continue;
    oh = 0;
    if (++od < p.out[0]) continue;
    od = 0;
    ++plane;
  }
}

#endif

// One tap for a run of results. `step` is known while compiling for the usual strides.
template <typename type, int64_t step>
inline void take(const typename type::bits* from, int64_t any_step, int64_t count, int32_t tap,
                 typename type::real* __restrict best, int32_t* __restrict positions) {
  const int64_t by = step ? step : any_step;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const auto value = type::read(from[i * by]);
    const bool better = (value > best[i]) | (value != value);
    best[i] = better ? value : best[i];
    positions[i] = better ? tap : positions[i];
  }
}

template <typename type>
inline void take_by(const typename type::bits* from, int64_t step, int64_t count, int32_t tap,
                    typename type::real* best, int32_t* positions) {
  if (step == 1) take<type, 1>(from, step, count, tap, best, positions);
  else if (step == 2) take<type, 2>(from, step, count, tap, best, positions);
  else take<type, 0>(from, step, count, tap, best, positions);
}

template <typename type>
void finish(const Pool& p, const typename type::real* best, const int32_t* positions, int64_t count,
            typename type::bits* results, uint8_t* map, int64_t at) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) results[at + i] = type::write(best[i]);
  uint8_t small[RUN];
  for (int64_t i = 0; i < count; ++i) small[i] = static_cast<uint8_t>(positions[i]);
  store_positions(p, small, count, map, at);
}

template <typename type>
void pool_rows(const Pool& p, const typename type::bits* x, typename type::bits* y, uint8_t* map, int64_t plane) {
  using real = typename type::real;
  real best[RUN];
  int32_t positions[RUN];
  const auto* source = x + plane * p.inputs();
  for (int64_t od = 0; od < p.out[0]; ++od)
    for (int64_t oh = 0; oh < p.out[1]; ++oh) {
      const int64_t d0 = first_tap(p, 0, od), h0 = first_tap(p, 1, oh);
      for (int64_t begin = 0; begin < p.out[2]; begin += RUN) {
        const int64_t end = std::min(p.out[2], begin + RUN);
        const int32_t row0 = static_cast<int32_t>((d0 * p.kernel[1] + h0) * p.kernel[2]);
        for (int64_t i = 0; i < end - begin; ++i) {
          best[i] = -std::numeric_limits<real>::infinity();
          positions[i] = row0 + static_cast<int32_t>(first_tap(p, 2, begin + i));
        }
        for (int64_t kd = d0; kd < p.kernel[0]; ++kd) {
          const int64_t d = under(p, 0, od, kd);
          if (d >= p.in[0]) break;
          for (int64_t kh = h0; kh < p.kernel[1]; ++kh) {
            const int64_t h = under(p, 1, oh, kh);
            if (h >= p.in[1]) break;
            const auto* row = source + (d * p.in[1] + h) * p.in[2];
            for (int64_t kw = 0; kw < p.kernel[2]; ++kw) {
              const Range r = inside(p, kw, begin, end);
              const int32_t tap = static_cast<int32_t>((kd * p.kernel[1] + kh) * p.kernel[2] + kw);
              take_by<type>(row + under(p, 2, r.low, kw), p.stride[2], r.high - r.low, tap, best + (r.low - begin),
                            positions + (r.low - begin));
            }
          }
        }
        const int64_t at = plane * p.outputs() + (od * p.out[1] + oh) * p.out[2] + begin;
        finish<type>(p, best, positions, end - begin, y, map, at);
      }
    }
}

// Calls `body(tap, input pixel)` for the taps of a result that are inside the input, in order.
template <typename Body>
inline void each_tap(const Pool& p, int64_t od, int64_t oh, int64_t ow, const Body& body) {
  for (int64_t kd = first_tap(p, 0, od); kd < p.kernel[0]; ++kd) {
    const int64_t d = under(p, 0, od, kd);
    if (d >= p.in[0]) break;
    for (int64_t kh = first_tap(p, 1, oh); kh < p.kernel[1]; ++kh) {
      const int64_t h = under(p, 1, oh, kh);
      if (h >= p.in[1]) break;
      for (int64_t kw = first_tap(p, 2, ow); kw < p.kernel[2]; ++kw) {
        const int64_t w = under(p, 2, ow, kw);
        if (w >= p.in[2]) break;
        body(static_cast<int32_t>((kd * p.kernel[1] + kh) * p.kernel[2] + kw), (d * p.in[1] + h) * p.in[2] + w);
      }
    }
  }
}

// Batch, depth, height, width, counted on without a division.
struct Pixel {
  struct {
    int64_t batch, d, h, w;
  } place;
  const int64_t* size;

  Pixel(int64_t index, const int64_t* sizes) : size(sizes) {
    place.w = index % size[2];
    place.h = index / size[2] % size[1];
    place.d = index / size[2] / size[1] % size[0];
    place.batch = index / size[2] / size[1] / size[0];
  }

  void step() {
    if (++place.w < size[2]) return;
    place.w = 0;
    if (++place.h < size[1]) return;
    place.h = 0;
    if (++place.d < size[0]) return;
    place.d = 0;
    ++place.batch;
  }
};

// Channels last: results [begin, end) of all batches, counted in pixels.
template <typename type>
void pool_pixels(const Pool& p, const typename type::bits* x, typename type::bits* y, uint8_t* map, int64_t begin,
                 int64_t end) {
  using real = typename type::real;
  real best[RUN];
  int32_t positions[RUN];
  Pixel at(begin, p.out);
  for (int64_t pixel = begin; pixel < end; ++pixel, at.step()) {
    const auto [batch, od, oh, ow] = at.place;
    const auto* source = x + batch * p.inputs() * p.channels;
    const int32_t tap0 = static_cast<int32_t>(
        (first_tap(p, 0, od) * p.kernel[1] + first_tap(p, 1, oh)) * p.kernel[2] + first_tap(p, 2, ow));
#if ENCORE_SIXTEEN
    if constexpr (std::is_same_v<type, F32>) {
      int32_t taps[MOST_TAPS];
      int64_t places[MOST_TAPS];
      int64_t found = 0;
      each_tap(p, od, oh, ow, [&](int32_t tap, int64_t from) {
        taps[found] = tap;
        places[found++] = from * p.channels;
      });
      uint8_t small[RUN];
      for (int64_t c = 0; c < p.channels; c += RUN) {
        const int64_t count = std::min(RUN, p.channels - c);
        for (int64_t i = 0; i < count; i += LANES) {
          const __mmask16 wanted = first_lanes(count - i);
          const auto taken = [&]<bool exact>(Best<exact> best) {
            best.position = _mm512_set1_epi32(tap0);
            for (int64_t k = 0; k < found; ++k) {
              const auto* from = reinterpret_cast<const float*>(source) + places[k] + c + i;
              const __m512 other = wanted == 0xffff ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(wanted, from);
              best.take(other, _mm512_set1_epi32(taps[k]));
            }
            return best;
          };
          const Best<false> quick = taken(Best<false>());
          __m512 value = quick.value;
          __m512i position = quick.position;
          if (!quick.is_sure()) {
            const Best<true> slow = taken(Best<true>());
            value = slow.value;
            position = slow.position;
          }
          _mm512_mask_storeu_ps(y + pixel * p.channels + c + i, wanted, value);
          _mm_storeu_si128(reinterpret_cast<__m128i*>(small + i), _mm512_cvtepi32_epi8(position));
        }
        store_positions(p, small, count, map, pixel * p.channels + c);
      }
      continue;
    }
#endif
    for (int64_t c = 0; c < p.channels; c += RUN) {
      const int64_t count = std::min(RUN, p.channels - c);
      for (int64_t i = 0; i < count; ++i) {
        best[i] = -std::numeric_limits<real>::infinity();
        positions[i] = tap0;
      }
      each_tap(p, od, oh, ow, [&](int32_t tap, int64_t from) {
        take<type, 1>(source + from * p.channels + c, 1, count, tap, best, positions);
      });
      finish<type>(p, best, positions, count, y, map, pixel * p.channels + c);
    }
  }
}

template <typename type>
void forward(const Pool& p, const typename type::bits* x, typename type::bits* y, uint8_t* map, int64_t threads) {
  const int64_t channels = std::max<int64_t>(p.channels, 1);
  const int used = threads_for(p.planes * p.inputs() * channels * sizeof(*x), threads);
  // Threads must not share a byte of the map: where a plane (a pixel) has an odd number of positions, two go together.
  if (p.channels) {
    in_shares(p.planes * p.outputs(), 2, used,
              [&](int64_t begin, int64_t end, int) { pool_pixels<type>(p, x, y, map, begin, end); });
  } else {
    in_shares(p.planes, 2, used, [&](int64_t begin, int64_t end, int) {
#if ENCORE_SIXTEEN
      if constexpr (std::is_same_v<type, F32>) {
        const auto* from = reinterpret_cast<const float*>(x);
        auto* to = reinterpret_cast<float*>(y);
        if (p.stride[2] == 1) return pool_rows_sixteen<1>(p, from, to, map, begin, end);
        if (p.stride[2] == 2) return pool_rows_sixteen<2>(p, from, to, map, begin, end);
      }
#endif
      for (int64_t plane = begin; plane < end; ++plane) pool_rows<type>(p, x, y, map, plane);
    });
  }
}

// ---- backward --------------------------------------------------------------------------------------------------------

template <typename type>
inline void add(typename type::bits* sum, typename type::bits gradient) {
  *sum = type::write(type::read(*sum) + type::read(gradient));
}

// Each result adds its gradient where its maximum stood. A map that points outside of the input adds nothing.
template <typename type>
void scatter_rows(const Pool& p, const typename type::bits* grad, const uint8_t* map, typename type::bits* out,
                  int64_t plane) {
  uint8_t positions[RUN];
  int32_t depth[256], height[256], width[256];
  for (int64_t tap = 0; tap < p.taps(); ++tap) {
    width[tap] = static_cast<int32_t>(tap % p.kernel[2] * p.dilation[2]);
    height[tap] = static_cast<int32_t>(tap / p.kernel[2] % p.kernel[1] * p.dilation[1]);
    depth[tap] = static_cast<int32_t>(tap / p.kernel[2] / p.kernel[1] * p.dilation[0]);
  }
  auto* target = out + plane * p.inputs();
  std::memset(target, 0, p.inputs() * sizeof(*target));
  for (int64_t od = 0; od < p.out[0]; ++od)
    for (int64_t oh = 0; oh < p.out[1]; ++oh)
      for (int64_t begin = 0; begin < p.out[2]; begin += RUN) {
        const int64_t end = std::min(p.out[2], begin + RUN);
        const int64_t at = plane * p.outputs() + (od * p.out[1] + oh) * p.out[2] + begin;
        load_positions(p, map, at, end - begin, positions);
        for (int64_t i = 0; i < end - begin; ++i) {
          const int64_t tap = positions[i];
          if (tap >= p.taps()) continue;
          const int64_t d = od * p.stride[0] - p.padding[0] + depth[tap];
          const int64_t h = oh * p.stride[1] - p.padding[1] + height[tap];
          const int64_t w = (begin + i) * p.stride[2] - p.padding[2] + width[tap];
          const bool is_inside = (static_cast<uint64_t>(d) < static_cast<uint64_t>(p.in[0])) &
                                 (static_cast<uint64_t>(h) < static_cast<uint64_t>(p.in[1])) &
                                 (static_cast<uint64_t>(w) < static_cast<uint64_t>(p.in[2]));
          if (is_inside) add<type>(target + (d * p.in[1] + h) * p.in[2] + w, grad[at + i]);
        }
      }
}

template <typename type>
void scatter_pixels(const Pool& p, const typename type::bits* grad, const uint8_t* map, typename type::bits* out,
                    int64_t batch, int64_t first, int64_t last) {
  uint8_t positions[RUN];
  auto* target = out + batch * p.inputs() * p.channels;
  for (int64_t pixel = 0; pixel < p.inputs(); ++pixel)
    std::memset(target + pixel * p.channels + first, 0, (last - first) * sizeof(*target));
  for (int64_t od = 0; od < p.out[0]; ++od)
    for (int64_t oh = 0; oh < p.out[1]; ++oh)
      for (int64_t ow = 0; ow < p.out[2]; ++ow) {
        const int64_t pixel = batch * p.outputs() + (od * p.out[1] + oh) * p.out[2] + ow;
        for (int64_t c = first; c < last; c += RUN) {
          const int64_t count = std::min(RUN, last - c), at = pixel * p.channels + c;
          load_positions(p, map, at, count, positions);
          each_tap(p, od, oh, ow, [&](int32_t tap, int64_t to) {
            auto* sums = target + to * p.channels + c;
            const auto* gradients = grad + at;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) {
              const auto sum = type::read(sums[i]) + type::read(gradients[i]);
              sums[i] = positions[i] == tap ? type::write(sum) : sums[i];
            }
          });
        }
      }
}

#if ENCORE_SIXTEEN

// What a window of results sends to an input, in the order of the results: taps from the last to the first.
struct Senders {
  int64_t first, last;  // results, along one axis
};

inline Senders senders(const Pool& p, int axis, int64_t input) {
  const int64_t reach = (p.kernel[axis] - 1) * p.dilation[axis], place = input + p.padding[axis];
  return {std::max<int64_t>(0, ceil_div(place - reach, p.stride[axis])),
          std::min(p.out[axis] - 1, floor_div(place, p.stride[axis]))};
}

// The tap of a result's window that lies over an input; -1 where dilation passes it by.
inline int64_t tap_over(const Pool& p, int axis, int64_t input, int64_t result) {
  const int64_t place = input + p.padding[axis] - result * p.stride[axis];
  const int64_t tap = floor_div(place, p.dilation[axis]);
  return tap * p.dilation[axis] == place ? tap : -1;
}

inline int32_t everywhere(int64_t byte) { return static_cast<int32_t>(static_cast<uint32_t>(byte) * 0x01010101u); }

// One tap's part in the gradients of a row of inputs.
struct Sender {
  const uint8_t* positions;
  const float* grad;
  int64_t behind;  // the result that sends to lane i is i - behind
  bool odd;        // with a stride of 2: to which half of the inputs
  int32_t tap;     // in every byte
};

// Strides 1 and 2, rows of results no longer than LONGEST_ROW, windows of at most MOST_SENDERS taps.
template <int64_t step>
void collect_rows(const Pool& p, const float* grad, const uint8_t* map, float* out, int64_t plane) {
  constexpr int64_t MARGIN = 64;
  uint8_t rows[MOST_SENDERS][MARGIN + LONGEST_ROW + MARGIN];
  Sender list[MOST_SENDERS];
  for (auto& row : rows) {  // no tap: results beyond either end send nothing
    std::memset(row, 0xff, MARGIN);
    std::memset(row + MARGIN + p.out[2], 0xff, MARGIN);
  }
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  for (int64_t d = 0; d < p.in[0]; ++d)
    for (int64_t h = 0; h < p.in[1]; ++h) {
      const Senders deep = senders(p, 0, d), tall = senders(p, 1, h);
      int64_t found = 0, row = 0;
      for (int64_t od = deep.first; od <= deep.last; ++od)
        for (int64_t oh = tall.first; oh <= tall.last; ++oh) {
          const int64_t kd = tap_over(p, 0, d, od), kh = tap_over(p, 1, h, oh);
          if (kd < 0 || kh < 0) continue;
          const int64_t at = plane * p.outputs() + (od * p.out[1] + oh) * p.out[2];
          load_positions(p, map, at, p.out[2], rows[row] + MARGIN);
          for (int64_t kw = p.kernel[2] - 1; kw >= 0; --kw) {
            const int64_t shift = kw * p.dilation[2] - p.padding[2], odd = step == 1 ? 0 : shift & 1;
            const int32_t tap = everywhere((kd * p.kernel[1] + kh) * p.kernel[2] + kw);
            list[found++] = {rows[row] + MARGIN, grad + at, (shift - odd) / step, odd != 0, tap};
          }
          ++row;
        }
      float* target = out + plane * p.inputs() + (d * p.in[1] + h) * p.in[2];
      for (int64_t first = 0; first * step < p.in[2]; first += LANES) {
        __m512 sum = _mm512_setzero_ps(), other = _mm512_setzero_ps();
        for (int64_t k = 0; k < found; ++k) {
          const int64_t ow = first - list[k].behind;
          if (ow <= -LANES || ow >= p.out[2]) continue;
          const __m128i there = _mm_loadu_si128(reinterpret_cast<const __m128i*>(list[k].positions + ow));
          const __mmask16 mine = _mm_cmpeq_epi8_mask(there, _mm_set1_epi32(list[k].tap));
          const __m512 sent = _mm512_maskz_loadu_ps(mine, list[k].grad + ow);
          if (step == 1 || !list[k].odd) sum = _mm512_mask_add_ps(sum, mine, sum, sent);
          else other = _mm512_mask_add_ps(other, mine, other, sent);
        }
        float* to = target + first * step;
        const int64_t left = p.in[2] - first * step;
        if constexpr (step == 1) {
          _mm512_mask_storeu_ps(to, first_lanes(left), sum);
        } else {
          _mm512_mask_storeu_ps(to, first_lanes(left), _mm512_permutex2var_ps(sum, low, other));
          if (left > LANES)
            _mm512_mask_storeu_ps(to + LANES, first_lanes(left - LANES), _mm512_permutex2var_ps(sum, high, other));
        }
      }
    }
}

// Sixteen positions from a map; where they are halves of bytes, the first one must be the lower half.
inline __m128i sixteen_positions(const Pool& p, const uint8_t* map, int64_t at, __mmask16 wanted) {
  if (!p.narrow) return _mm_maskz_loadu_epi8(wanted, map + at);
  const __mmask16 bytes = static_cast<__mmask16>(_pext_u32(wanted, 0x5555u));
  const __m128i wide = _mm_cvtepu8_epi16(_mm_maskz_loadu_epi8(bytes, map + at / 2));
  return _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)), _mm_set1_epi8(15));
}

void collect_pixels(const Pool& p, const float* grad, const uint8_t* map, float* out, int64_t begin, int64_t end) {
  int32_t taps[MOST_TAPS];
  int64_t places[MOST_TAPS];
  Pixel at(begin, p.in);
  for (int64_t pixel = begin; pixel < end; ++pixel, at.step()) {
    const auto [batch, d, h, w] = at.place;
    const Senders deep = senders(p, 0, d), tall = senders(p, 1, h), wide = senders(p, 2, w);
    int64_t found = 0;
    for (int64_t od = deep.first; od <= deep.last; ++od)
      for (int64_t oh = tall.first; oh <= tall.last; ++oh)
        for (int64_t ow = wide.first; ow <= wide.last; ++ow) {
          const int64_t kd = tap_over(p, 0, d, od), kh = tap_over(p, 1, h, oh), kw = tap_over(p, 2, w, ow);
          if (kd < 0 || kh < 0 || kw < 0) continue;
          taps[found] = everywhere((kd * p.kernel[1] + kh) * p.kernel[2] + kw);
          places[found++] = (batch * p.outputs() + (od * p.out[1] + oh) * p.out[2] + ow) * p.channels;
        }
    for (int64_t c = 0; c < p.channels; c += LANES) {
      const __mmask16 wanted = first_lanes(p.channels - c);
      __m512 sum = _mm512_setzero_ps();
      for (int64_t k = 0; k < found; ++k) {
        const __m128i there = sixteen_positions(p, map, places[k] + c, wanted);
        const __mmask16 mine = wanted & _mm_cmpeq_epi8_mask(there, _mm_set1_epi32(taps[k]));
        sum = _mm512_mask_add_ps(sum, mine, sum, _mm512_maskz_loadu_ps(mine, grad + places[k] + c));
      }
      _mm512_mask_storeu_ps(out + pixel * p.channels + c, wanted, sum);
    }
  }
}

// Does it? Where windows are large and far apart, scattering is less work.
bool collects(const Pool& p) {
  if (p.channels) return p.channels % 2 == 0 || !p.narrow;
  return (p.stride[2] == 1 || p.stride[2] == 2) && p.out[2] <= LONGEST_ROW && p.taps() <= MOST_SENDERS;
}

void collect(const Pool& p, const float* grad, const uint8_t* map, float* out, int threads) {
  if (p.channels) {
    in_shares(p.planes * p.inputs(), 1, threads,
              [&](int64_t begin, int64_t end, int) { collect_pixels(p, grad, map, out, begin, end); });
    return;
  }
  in_shares(p.planes, 1, threads, [&](int64_t begin, int64_t end, int) {
    for (int64_t plane = begin; plane < end; ++plane) {
      if (p.stride[2] == 1) collect_rows<1>(p, grad, map, out, plane);
      else collect_rows<2>(p, grad, map, out, plane);
    }
  });
}

#endif

template <typename type>
void backward(const Pool& p, const typename type::bits* grad, const uint8_t* map, typename type::bits* out,
              int64_t threads) {
  const int64_t channels = std::max<int64_t>(p.channels, 1);
  const int used = threads_for(p.planes * p.inputs() * channels * sizeof(*out), threads);
#if ENCORE_SIXTEEN
  if constexpr (std::is_same_v<type, F32>) {
    if (collects(p)) {
      return collect(p, reinterpret_cast<const float*>(grad), map, reinterpret_cast<float*>(out), used);
    }
  }
#endif
  if (!p.channels) {
    in_shares(p.planes, 1, used, [&](int64_t begin, int64_t end, int) {
      for (int64_t plane = begin; plane < end; ++plane) scatter_rows<type>(p, grad, map, out, plane);
    });
    return;
  }
  const int64_t blocks = (p.channels + RUN - 1) / RUN;
  in_shares(p.planes * blocks, 1, used, [&](int64_t begin, int64_t end, int) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block % blocks * RUN;
      scatter_pixels<type>(p, grad, map, out, block / blocks, first, std::min(p.channels, first + RUN));
    }
  });
}

}  // namespace

#define FOR_TYPE(SUFFIX, TYPE)                                                                                     \
  extern "C" void pool_##SUFFIX(const Pool* pool, const TYPE::bits* x, TYPE::bits* y, uint8_t* map,                \
                                int64_t threads) {                                                                 \
    forward<TYPE>(*pool, x, y, map, threads);                                                                      \
  }                                                                                                                \
  extern "C" void pool_backward_##SUFFIX(const Pool* pool, const TYPE::bits* grad, const uint8_t* map,             \
                                         TYPE::bits* out, int64_t threads) {                                       \
    backward<TYPE>(*pool, grad, map, out, threads);                                                                \
  }

FOR_TYPE(f32, F32)
FOR_TYPE(f64, F64)
FOR_TYPE(bf16, BF16)
FOR_TYPE(f16, F16)
