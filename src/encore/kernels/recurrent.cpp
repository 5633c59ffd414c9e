// The steps of recurrent layers: a product with the recurrent weight and the cell behind it, in one pass over tiles.
//
// A step is G = h W^T followed by pointwise work on all gates of a unit. The weight is packed once a call into panels
// that hold all gates of a few units side by side, so that its tiles end with everything the units' cells need still in the
// nearest cache. Tiles are dealt out to threads in runs that keep a panel in its core's cache, and threads meet once a step. The large products (inputs, weight gradients) are PyTorch's and happen outside of this file.
//
// Compute type `real` is float or double; `store` is how sequences lie in memory (bfloat16 and half are computed in
// float); `operand` is what products read: `real`, or bfloat16 where the processor multiplies pairs of such numbers and
// adds them up in float. Nothing is allocated here: every buffer is the caller's, whose bytes are therefore known.

#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

template <typename real>
using Vec = at::vec::Vectorized<real>;

template <typename real>
constexpr int64_t lanes = Vec<real>::size();

// A tile is this many vectors wide, and so many rows high that its sums, a row of the weight and one broadcast value fill
// the vector registers. Of the shapes that do, three vectors by eight rows came out fastest at every batch on an Ice Lake
// core: 99 GFLOP/s at 8 rows of 512 units and 153 at 32 rows, where four by six gave 75 and 139.
constexpr int STRIP = 3;
#if defined(CPU_CAPABILITY_AVX512) || defined(__aarch64__)
constexpr int TILE_ROWS = 8;
#else
constexpr int TILE_ROWS = 4;
#endif

// A thread is worth waking for about this many multiplications.
constexpr int64_t WORK_PER_THREAD = 1 << 16;

// What products of these numbers are added up in, and how many of them a lane of a vector holds.
template <typename number>
struct Multiplied {
  using sum = number;
  static constexpr int64_t pack = 1;
};
template <>
struct Multiplied<c10::BFloat16> {
  using sum = float;
  static constexpr int64_t pack = 2;
};
template <typename number>
using sum_of = typename Multiplied<number>::sum;

// ---- loads and stores of up to a vector --------------------------------------------------------------------------

template <typename real, typename store>
inline Vec<real> load(const store* from, int64_t count) {
  if constexpr (std::is_same_v<real, store>) {
    return count == lanes<real> ? Vec<real>::loadu(from) : Vec<real>::loadu(from, count);
#if defined(CPU_CAPABILITY_AVX512)
  } else if constexpr (std::is_same_v<store, c10::BFloat16>) {
    const __mmask16 wanted = count == lanes<real> ? 0xffff : (1 << count) - 1;
    return Vec<real>(_mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wanted, from)), 16)));
#endif
  } else {
    alignas(64) real wide[lanes<real>] = {};
    if (count == lanes<real>) {
      for (int64_t i = 0; i < lanes<real>; ++i) wide[i] = static_cast<real>(from[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<real>(from[i]);
    }
    return Vec<real>::loadu(wide);
  }
}

template <typename real, typename store>
inline void save(store* to, Vec<real> value, int64_t count) {
  if constexpr (std::is_same_v<real, store>) {
    if (count == lanes<real>) value.store(to);
    else value.store(to, count);
#if defined(CPU_CAPABILITY_AVX512)
  } else if constexpr (std::is_same_v<store, c10::BFloat16>) {
    const __mmask16 wanted = count == lanes<real> ? 0xffff : (1 << count) - 1;
    _mm256_mask_storeu_epi16(to, wanted, at::vec::cvtfp32_bf16(value));
#endif
  } else {
    alignas(64) real wide[lanes<real>];
    value.store(wide);
    if (count == lanes<real>) {
      for (int64_t i = 0; i < lanes<real>; ++i) to[i] = static_cast<store>(wide[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<store>(wide[i]);
    }
  }
}

// The value as it will be read back from memory.
template <typename real, typename store>
inline Vec<real> rounded(Vec<real> value) {
  if constexpr (std::is_same_v<real, store>) {
    return value;
  } else {
    alignas(64) store narrow[lanes<real>];
    save<real, store>(narrow, value, lanes<real>);
    return load<real, store>(narrow, lanes<real>);
  }
}

// Sigmoid and tanh. In float on AVX-512 they are written out, since the vector library's are calls: recomputing gates
// takes 7.7 ms with these where it took 12.5 with those. Both are within 2 units in the last place; NaN stays NaN.
#if defined(CPU_CAPABILITY_AVX512)
inline __m512 reciprocal(__m512 x) { // x >= 1
  const __m512 y = _mm512_rcp14_ps(x);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(x, y, _mm512_set1_ps(1)), y, y);
}

// e^x for |x| <= 88: 2^n times a polynomial on half an octave either side of 0.
inline __m512 exponential(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147182f), x); // ln 2, and what float leaves of it
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-1.90465421e-9f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
  return _mm512_scalef_ps(p, n);
}

// The operand order of min and max lets a NaN through.
inline __m512 clamped(__m512 x, float limit) {
  return _mm512_min_ps(_mm512_set1_ps(limit), _mm512_max_ps(_mm512_set1_ps(-limit), x));
}

inline Vec<float> sigmoid(Vec<float> x) {
  const __m512 e = exponential(clamped(_mm512_sub_ps(_mm512_setzero_ps(), x), 87));
  return reciprocal(_mm512_add_ps(_mm512_set1_ps(1), e));
}

// Near 0 an odd polynomial, fitted at Chebyshev's points, since 1 - 2 / (e^2x + 1) would lose the last digits there.
inline Vec<float> tanh(Vec<float> x) {
  const __m512 size = _mm512_abs_ps(x), square = _mm512_mul_ps(x, x);
  __m512 p = _mm512_set1_ps(-0.00610494567f);
  for (const float term : {0.0210036393f, -0.0538524985f, 0.133327827f, -0.333333284f})
    p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(term));
  const __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(p, square), x, x);
  const __m512 e = exponential(clamped(_mm512_add_ps(size, size), 87));
  const __m512 large = _mm512_fnmadd_ps(
      _mm512_set1_ps(2), reciprocal(_mm512_add_ps(_mm512_set1_ps(1), e)), _mm512_set1_ps(1));
  const __mmask16 far = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.625f), _CMP_GT_OQ);
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
  return _mm512_mask_or_ps(small, far, large, sign);
}
#endif

template <typename real>
inline Vec<real> sigmoid(Vec<real> x) {
  const Vec<real> one(1);
  return one / (one + x.neg().exp());
}

template <typename real>
inline Vec<real> tanh(Vec<real> x) {
  return x.tanh();
}

// ---- work for threads ----------------------------------------------------------------------------------------------

struct Share {
  int64_t begin, end;
};

inline Share share_of(int64_t tasks, int thread, int threads) {
  return {tasks * thread / threads, tasks * (thread + 1) / threads};
}

// `body(thread, threads)` on as many threads as the work deserves; `barrier(threads)` inside lets them meet.
template <typename Body>
void together(int64_t work, int64_t most, const Body& body) {
  const int threads = static_cast<int>(std::max<int64_t>(1, std::min(most, work / WORK_PER_THREAD)));
  if (threads == 1 || omp_in_parallel()) {
    body(0, 1);
    return;
  }
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads());
}

inline void barrier(int threads) {
  if (threads > 1) {
#pragma omp barrier
  }
}

// ---- a packed weight and its tiles ---------------------------------------------------------------------------------

// `gates` matrices of `units` columns each, `depth` rows. Units go by vectors of them, and up to `width` vectors with all
// their gates make a panel. A panel lies in memory as strips of up to `STRIP` vectors, each with all its rows; of narrow
// numbers, a lane holds those of two rows.
template <typename number, int gates, int width>
struct Panels {
  using real = sum_of<number>;
  static constexpr int vectors = gates * width; // at most, in a panel
  static constexpr int64_t pack = Multiplied<number>::pack;

  const number* packed;
  int64_t units, depth;

  int64_t unit_vectors() const { return (units + lanes<real> - 1) / lanes<real>; }
  int64_t count() const { return (unit_vectors() + width - 1) / width; }
  // The first vector of units of a panel: panels differ by one vector at most, so that threads get equal shares.
  int64_t first(int64_t panel) const { return unit_vectors() * panel / count(); }
  // Numbers of a vector with all its rows.
  int64_t column() const { return (depth + pack - 1) / pack * pack * lanes<real>; }
  const number* strip(int64_t panel, int64_t vector) const { return packed + (first(panel) * gates + vector) * column(); }
};

// In every lane one number of `a`, or as many as a lane holds; and `sum + value * column`, lane by lane.
template <typename number>
struct Lane {
  static Vec<number> spread(const number* from) { return Vec<number>(*from); }
  static Vec<number> multiply_add(Vec<number> value, Vec<number> column, Vec<number> sum) {
    return at::vec::fmadd(value, column, sum);
  }
};

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
#define MULTIPLIES_BF16
template <>
struct Lane<c10::BFloat16> {
  static Vec<float> spread(const c10::BFloat16* from) {
    float pair;
    std::memcpy(&pair, from, sizeof pair);
    return Vec<float>(_mm512_set1_ps(pair));
  }
  static Vec<float> multiply_add(Vec<float> value, Vec<float> column, Vec<float> sum) {
    return Vec<float>(_mm512_dpbf16_ps(sum, (__m512bh)(__m512)value, (__m512bh)(__m512)column));
  }
};
#endif

// `rows` rows of `a` times a strip of `vectors`, into `sums[row * sums_stride]`. Meanwhile `depth` vectors that lie `ahead`
// are brought nearer: a weight is larger than a core's cache, so that each step reads it from afar. `gathered` rows lie
// side by side, `TILE_ROWS` of them.
template <typename number, int rows, int vectors, bool gathered = false>
void multiply(const number* __restrict a, int64_t stride, const number* __restrict strip, int64_t depth,
              sum_of<number>* __restrict sums, int64_t sums_stride, const number* ahead) {
  using real = sum_of<number>;
  constexpr int64_t pack = Multiplied<number>::pack, across = lanes<real> * pack;
  Vec<real> sum[rows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sum[r][v] = Vec<real>(0);
  const auto row_of_strip = [&](int64_t k, const number* from, int64_t from_stride) __attribute__((always_inline)) {
    __builtin_prefetch(ahead + k * across, 0, 2);
    Vec<real> column[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) column[v] = Vec<real>::loadu(strip + (k * vectors + v) * across);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const Vec<real> value = Lane<number>::spread(from + r * from_stride);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sum[r][v] = Lane<number>::multiply_add(value, column[v], sum[r][v]);
    }
  };
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth / pack; ++k) {
    if constexpr (gathered) row_of_strip(k, a + k * pack * TILE_ROWS, pack);
    else row_of_strip(k, a + k * pack, stride);
  }
  if constexpr (!gathered)
  if (depth % pack) { // the last number stands alone: what lies behind it is not the matrix's
    number last[rows * pack] = {};
    for (int r = 0; r < rows; ++r) last[r * pack] = a[r * stride + depth - 1];
    row_of_strip(depth / pack, last, pack);
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sum[r][v].store(sums + r * sums_stride + v * lanes<real>);
}

template <typename number, int rows, int vectors>
void multiply_tile(int64_t wanted_rows, int64_t wanted_vectors, const number* a, int64_t stride, const number* strip,
                   int64_t depth, sum_of<number>* sums, int64_t sums_stride, const number* ahead) {
  if (wanted_rows == rows && wanted_vectors == vectors) {
    multiply<number, rows, vectors>(a, stride, strip, depth, sums, sums_stride, ahead);
  } else if (wanted_rows < rows) {
    if constexpr (rows > 1)
      multiply_tile<number, rows - 1, vectors>(wanted_rows, wanted_vectors, a, stride, strip, depth, sums, sums_stride,
                                             ahead);
  } else {
    if constexpr (vectors > 1)
      multiply_tile<number, rows, vectors - 1>(wanted_rows, wanted_vectors, a, stride, strip, depth, sums, sums_stride,
                                             ahead);
  }
}

// This thread's tiles of `a[0:rows] @ weight`: `finish(row, unit, count, gates)` for each vector of units, then
// `rest(first row, last row, first unit, last unit)` for each tile, over rows up to `most`, of which the product only
// covers the first `rows`.
template <typename number, int gates, int width, typename Fetch, typename Finish, typename Rest>
inline void product(const Panels<number, gates, width>& weight, const number* a, int64_t stride, int64_t rows,
                    int64_t most, int thread, int threads, const Fetch& fetch, const Finish& finish, const Rest& rest) {
  using real = sum_of<number>;
  constexpr int64_t across = Panels<number, gates, width>::vectors * lanes<real>;
  alignas(64) real sums[TILE_ROWS * across];
  const int64_t blocks = (most + TILE_ROWS - 1) / TILE_ROWS;
  const Share mine = share_of(weight.count() * blocks, thread, threads);
  for (int64_t task = mine.begin; task < mine.end; ++task) {
    const int64_t panel = task / blocks, block = task % blocks;
    const int64_t begin = most * block / blocks, end = most * (block + 1) / blocks;
    const int64_t covered = std::min(end, rows);
    const int64_t vectors = (weight.first(panel + 1) - weight.first(panel)) * gates;
    const int64_t first = weight.first(panel) * lanes<real>,
                  last = std::min(weight.first(panel + 1) * lanes<real>, weight.units);
    for (int64_t row = begin; row < end; ++row)
      for (int64_t unit = first; unit < last; unit += lanes<real>) fetch(row, unit);
    if (begin < covered)
      for (int64_t v = 0, strips = (vectors + STRIP - 1) / STRIP; v < vectors; v += STRIP) {
        const number* strip = weight.strip(panel, v);
        const int64_t next = block * strips + v / STRIP; // which vector of the next panel to bring nearer
        const bool more = next < vectors && panel + 1 < weight.count();
        multiply_tile<number, TILE_ROWS, STRIP>(
            covered - begin, std::min<int64_t>(STRIP, vectors - v), a + begin * stride, stride, strip, weight.depth,
            sums + v * lanes<real>, across, more ? weight.strip(panel + 1, next) : strip);
      }
    for (int64_t row = begin; row < covered; ++row)
      for (int64_t unit = first, w = 0; unit < last; unit += lanes<real>, ++w) {
        Vec<real> gate[gates];
        for (int g = 0; g < gates; ++g)
          gate[g] = Vec<real>::loadu(sums + (row - begin) * across + (w * gates + g) * lanes<real>);
        finish(row, unit, std::min<int64_t>(lanes<real>, last - unit), gate);
      }
    rest(begin, end, first, last);
  }
}

constexpr auto nothing = [](int64_t, int64_t, int64_t, int64_t) {};
constexpr auto no_fetch = [](int64_t, int64_t) {};

// The vectors of all gates of a unit.
template <typename number>
inline void fetch_gates(const number* gates, int64_t hidden) {
  for (int g = 0; g < 4; ++g) __builtin_prefetch(gates + g * hidden);
}

// ---- which rows a step has -----------------------------------------------------------------------------------------

// The steps of a chunk in the order in which time runs through the layer. Rows count from the first row of the chunk.
struct Steps {
  int64_t count;
  const int64_t* row;    // where a step's rows begin
  const int64_t* active; // how many rows it has
  int64_t threads;
};

template <typename real>
struct Entering {
  const real* state;   // what the chunk's first step finds, rows `[0, known)`
  int64_t known;
  const real* initial; // what rows find that no step before has touched
};

// Where step `i` finds the state of row `b` that the step before left in `states` (rows as in the chunk).
template <typename real>
inline const real* previous(const Steps& steps, const Entering<real>& enter, const real* states, int64_t i, int64_t b,
                            int64_t hidden) {
  if (i > 0 && b < steps.active[i - 1]) return states + (steps.row[i - 1] + b) * hidden;
  if (i == 0 && b < enter.known) return enter.state + b * hidden;
  return enter.initial + b * hidden;
}

// Whether a row (as in the chunk) begins a sequence of its own: it finds states of zero, and hands no gradient back.
inline bool begins(const bool* resets, int64_t row) { return resets && resets[row]; }

// ---- LSTM ----------------------------------------------------------------------------------------------------------

template <typename real, typename store, typename operand>
struct LstmForward {
  Steps steps;
  int64_t hidden, width; // of c, and of h: they differ where h is projected
  const real* inputs;    // [rows, 4 * hidden]: products with the inputs, without bias
  const real* bias;      // [4 * hidden]
  const operand* weight; // packed, four gates; null where the inputs hold its products already
  const real* projection; // packed, or null
  operand* state[2];     // [batch, width] each: h, read from one and written to the other, alternately
  real* cell;            // [batch, hidden]: c, in place
  real* raw;             // [batch, hidden]: h before its projection, or null
  store* output;         // [rows, width]
  store* gates;          // [rows, 4 * hidden] or null: i, f, g, o as the cell used them; may be `inputs`
  real* cells;           // [rows, hidden] or null: c
  const bool* resets;    // [rows] or null
};

template <typename real, typename store, typename operand>
void lstm_forward(const LstmForward<real, store, operand>& call) {
  const int64_t hidden = call.hidden, width = call.width;
  const Panels<operand, 4, 3> weight{call.weight, hidden, call.weight ? width : 0};
  const Panels<real, 1, 3> projection{call.projection, width, hidden};
  const int64_t work = call.steps.active[0] * 4 * hidden * width;
  together(work, call.steps.threads, [&](int thread, int threads) {
    for (int64_t i = 0; i < call.steps.count; ++i) {
      const int64_t rows = call.steps.active[i], first = call.steps.row[i];
      const operand* before = call.state[i % 2];
      operand* after = call.state[(i + 1) % 2];
      const auto cell = [&](int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[4]) {
        const int64_t row = first + b;
        const bool reset = begins(call.resets, row);
        const real* in = call.inputs + row * 4 * hidden + u;
        const auto gate = [&](int g) {
          const Vec<real> input = load<real>(in + g * hidden, n);
          return (reset ? input : sum[g] + input) + load<real>(call.bias + g * hidden + u, n);
        };
        const Vec<real> i_ = sigmoid(gate(0)), f = sigmoid(gate(1)), g = tanh(gate(2)), o = sigmoid(gate(3));
        const Vec<real> found = reset ? Vec<real>(0) : load<real>(call.cell + b * hidden + u, n);
        const Vec<real> c = at::vec::fmadd(f, found, i_ * g);
        const Vec<real> h = o * tanh(c);
        save<real>(call.cell + b * hidden + u, c, n);
        if (call.gates) {
          store* out = call.gates + row * 4 * hidden + u;
          save<real>(out, i_, n);
          save<real>(out + hidden, f, n);
          save<real>(out + 2 * hidden, g, n);
          save<real>(out + 3 * hidden, o, n);
        }
        if (call.cells) save<real>(call.cells + row * hidden + u, c, n);
        if (call.raw) {
          save<real>(call.raw + b * hidden + u, h, n);
        } else {
          save<real>(call.output + row * width + u, h, n);
          save<real>(after + b * width + u, rounded<real, store>(h), n);
        }
      };
      const auto fetch = [&](int64_t b, int64_t u) { fetch_gates(call.inputs + (first + b) * 4 * hidden + u, hidden); };
      product(weight, before, width, rows, rows, thread, threads, fetch, cell, nothing);
      barrier(threads);
      if (call.raw) {
        const auto project = [&](int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[1]) {
          save<real>(call.output + (first + b) * width + u, sum[0], n);
          save<real>(after + b * width + u, rounded<real, store>(sum[0]), n);
        };
        product(projection, static_cast<const real*>(call.raw), hidden, rows, rows, thread, threads, no_fetch,
                project, nothing);
        barrier(threads);
      }
    }
  });
}

template <typename real>
struct LstmRebuild {
  Steps steps;
  int64_t hidden;
  const real* bias;
  Entering<real> enter; // c
  real* gates;          // [rows, 4 * hidden]: products in, gates out
  real* cells;          // [rows, hidden]: c out
  real* raw;            // [rows, hidden] or null: h before its projection, out
  const bool* resets;   // [rows] or null
};

template <typename real>
void lstm_rebuild(const LstmRebuild<real>& call) {
  const int64_t hidden = call.hidden, vectors = (hidden + lanes<real> - 1) / lanes<real>;
  const int64_t batch = *std::max_element(call.steps.active, call.steps.active + call.steps.count);
  together(batch * hidden * call.steps.count * 64, call.steps.threads, [&](int thread, int threads) {
    const Share mine = share_of(batch * vectors, thread, threads);
    for (int64_t i = 0; i < call.steps.count; ++i) {
      for (int64_t task = mine.begin; task < mine.end; ++task) {
        const int64_t b = task / vectors, u = task % vectors * lanes<real>;
        if (b >= call.steps.active[i]) break;
        const int64_t n = std::min<int64_t>(lanes<real>, hidden - u), row = call.steps.row[i] + b;
        real* gates = call.gates + row * 4 * hidden + u;
        const auto gate = [&](int g) {
          return load<real>(gates + g * hidden, n) + load<real>(call.bias + g * hidden + u, n);
        };
        const Vec<real> i_ = sigmoid(gate(0)), f = sigmoid(gate(1)), g = tanh(gate(2)), o = sigmoid(gate(3));
        const real* before = previous(call.steps, call.enter, static_cast<const real*>(call.cells), i, b, hidden);
        const Vec<real> found = begins(call.resets, row) ? Vec<real>(0) : load<real>(before + u, n);
        const Vec<real> c = at::vec::fmadd(f, found, i_ * g);
        save<real>(gates, i_, n);
        save<real>(gates + hidden, f, n);
        save<real>(gates + 2 * hidden, g, n);
        save<real>(gates + 3 * hidden, o, n);
        save<real>(call.cells + row * hidden + u, c, n);
        if (call.raw) save<real>(call.raw + row * hidden + u, o * tanh(c), n);
      }
    }
  });
}

template <typename real, typename store, typename kept, typename operand>
struct LstmBackward {
  Steps steps;
  int64_t hidden, width;
  const operand* weight;       // packed for products with gradients of gates
  const real* projection;      // packed for products with gradients of h, or null
  const store* grad_output;    // or null
  const int64_t* grad_row;     // where a step's gradients begin
  int64_t grad_stride;         // from row to row
  const kept* gates;           // [rows, 4 * hidden]
  const real* cells;           // [rows, hidden]
  Entering<real> enter;        // c
  operand* grad_gates;         // [rows, 4 * hidden]; may be `gates`
  real* grad_state;            // [batch, width], in place
  real* grad_cell;             // [batch, hidden], in place
  real* grad_projected;        // [rows, width] or null: gradients of h behind its projection, out
  const bool* resets;          // [rows] or null
};

template <typename real, typename store, typename kept, typename operand>
inline void lstm_cell_backward(const LstmBackward<real, store, kept, operand>& call, int64_t i, int64_t b, int64_t u, int64_t n,
                               Vec<real> grad_h) {
  const int64_t hidden = call.hidden, row = call.steps.row[i] + b;
  const kept* gates = call.gates + row * 4 * hidden + u;
  const Vec<real> one(1);
  const Vec<real> i_ = load<real>(gates, n), f = load<real>(gates + hidden, n), g = load<real>(gates + 2 * hidden, n),
                  o = load<real>(gates + 3 * hidden, n);
  const Vec<real> tanh_c = tanh(load<real>(call.cells + row * hidden + u, n));
  const bool reset = begins(call.resets, row);
  const Vec<real> before =
      reset ? Vec<real>(0) : load<real>(previous(call.steps, call.enter, call.cells, i, b, hidden) + u, n);
  real* grad_cell = call.grad_cell + b * hidden + u;
  const Vec<real> grad_c = load<real>(grad_cell, n) + grad_h * o * (one - tanh_c * tanh_c);
  operand* out = call.grad_gates + row * 4 * hidden + u;
  save<real>(out, grad_c * g * i_ * (one - i_), n);
  save<real>(out + hidden, grad_c * before * f * (one - f), n);
  save<real>(out + 2 * hidden, grad_c * i_ * (one - g * g), n);
  save<real>(out + 3 * hidden, grad_h * tanh_c * o * (one - o), n);
  save<real>(grad_cell, reset ? Vec<real>(0) : grad_c * f, n);
}

// What reaches h of row `b` at step `i`: from later steps and from the output.
template <typename real, typename Call>
inline Vec<real> incoming(const Call& call, int64_t i, int64_t b, int64_t u, int64_t n, int64_t width) {
  Vec<real> grad = load<real>(call.grad_state + b * width + u, n);
  if (call.grad_output) grad = grad + load<real>(call.grad_output + call.grad_row[i] + b * call.grad_stride + u, n);
  return grad;
}

// Walk the steps of a chunk backwards. Without a weight (there is one step only), the product with it is the caller's.
// `cell(i, b, u, n)` writes the gates' gradients of one vector of units;
// `carry(i, b, u, n, sum)` takes their product with the weight. The tile of a product and the cells of the step before
// cover the same units and rows, so that threads need not meet in between.
template <typename operand, typename Fetch, typename Cell, typename Carry>
void walk_back(const Steps& steps, const Panels<operand, 1, 3>& weight, const operand* grad_gates, int64_t stride,
               int thread, int threads, const Fetch& fetch, const Cell& cell, const Carry& carry) {
  using real = sum_of<operand>;
  for (int64_t i = steps.count; i >= 0; --i) {
    const int64_t rows = i < steps.count && weight.packed ? steps.active[i] : 0, next = i > 0 ? steps.active[i - 1] : 0;
    const operand* a = rows ? grad_gates + steps.row[i] * stride : nullptr;
    const auto fetch_next = [&](int64_t b, int64_t u) {
      if (b < next) fetch(i - 1, b, u);
    };
    const auto carry_from = [&](int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[1]) { carry(i, b, u, n, sum); };
    product(weight, a, stride, rows, std::max(rows, next), thread, threads, fetch_next, carry_from,
            [&](int64_t begin, int64_t end, int64_t unit, int64_t last) {
              for (int64_t b = begin; b < std::min(end, next); ++b)
                for (int64_t u = unit; u < last; u += lanes<real>)
                  cell(i - 1, b, u, std::min<int64_t>(lanes<real>, last - u));
            });
    barrier(threads);
  }
}

template <typename real, typename store, typename kept, typename operand>
void lstm_backward(const LstmBackward<real, store, kept, operand>& call) {
  const int64_t hidden = call.hidden, width = call.width;
  const Panels<operand, 1, 3> weight{call.weight, width, 4 * hidden};
  const int64_t batch = *std::max_element(call.steps.active, call.steps.active + call.steps.count);
  together(batch * 4 * hidden * width, call.steps.threads, [&](int thread, int threads) {
    const auto carry = [&](int64_t i, int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[1]) {
      save<real>(call.grad_state + b * width + u, begins(call.resets, call.steps.row[i] + b) ? Vec<real>(0) : sum[0], n);
    };
    if (!call.projection) {
      const auto cell = [&](int64_t i, int64_t b, int64_t u, int64_t n) {
        lstm_cell_backward(call, i, b, u, n, incoming<real>(call, i, b, u, n, width));
      };
      const auto fetch = [&](int64_t i, int64_t b, int64_t u) {
        const int64_t row = call.steps.row[i] + b;
        fetch_gates(call.gates + row * 4 * hidden + u, hidden);
        __builtin_prefetch(call.cells + row * hidden + u);
        __builtin_prefetch(previous(call.steps, call.enter, call.cells, i, b, hidden) + u);
        if (call.grad_output) __builtin_prefetch(call.grad_output + call.grad_row[i] + b * call.grad_stride + u);
      };
      walk_back(call.steps, weight, static_cast<const operand*>(call.grad_gates), 4 * hidden, thread, threads, fetch, cell,
                carry);
      return;
    }
    // With a projection the cell needs all of h's gradient, so that a step is two products and two meetings.
    const Panels<real, 1, 3> projection{call.projection, hidden, width};
    for (int64_t i = call.steps.count - 1; i >= 0; --i) {
      const int64_t rows = call.steps.active[i], first = call.steps.row[i];
      const auto total = [&](int64_t begin, int64_t end, int64_t unit, int64_t last) {
        for (int64_t b = begin; b < end; ++b)
          for (int64_t u = unit; u < last; u += lanes<real>) {
            const int64_t n = std::min<int64_t>(lanes<real>, last - u);
            save<real>(call.grad_projected + (first + b) * width + u, incoming<real>(call, i, b, u, n, width), n);
          }
      };
      const auto carry_from = [&](int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[1]) { carry(i, b, u, n, sum); };
      product(weight, static_cast<const operand*>(nullptr), 0, 0, rows, thread, threads, no_fetch, carry_from, total);
      barrier(threads);
      const auto cell = [&](int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[1]) {
        lstm_cell_backward(call, i, b, u, n, sum[0]);
      };
      product(projection, static_cast<const real*>(call.grad_projected + first * width), width, rows, rows, thread,
              threads, no_fetch, cell, nothing);
      barrier(threads);
      if (!call.weight) continue;
      product(weight, static_cast<const operand*>(call.grad_gates + first * 4 * hidden), 4 * hidden, rows, rows, thread,
              threads, no_fetch, carry_from, nothing);
      barrier(threads);
    }
  });
}

// ---- GRU: gates lie as n, r, z and the recurrent part of n -------------------------------------------------------

template <typename real, typename store, typename operand>
struct GruForward {
  Steps steps;
  int64_t hidden;
  const real* inputs; // [rows, 4 * hidden]: products with the inputs for n, r, z, without bias; the last part unused
  const real* bias;   // [4 * hidden]
  const operand* weight; // packed, three gates: r, z, n; null where the inputs hold its products already
  operand* state[2];
  store* output;
  store* gates; // [rows, 4 * hidden] or null; may be `inputs`
  const bool* resets; // [rows] or null
};

template <typename real, typename store, typename operand>
void gru_forward(const GruForward<real, store, operand>& call) {
  const int64_t hidden = call.hidden;
  const Panels<operand, 3, 1> weight{call.weight, hidden, call.weight ? hidden : 0};
  together(call.steps.active[0] * 3 * hidden * hidden, call.steps.threads, [&](int thread, int threads) {
    for (int64_t i = 0; i < call.steps.count; ++i) {
      const int64_t rows = call.steps.active[i], first = call.steps.row[i];
      const operand* before = call.state[i % 2];
      operand* after = call.state[(i + 1) % 2];
      const auto cell = [&](int64_t b, int64_t u, int64_t count, const Vec<real>(&sum)[3]) {
        const int64_t row = first + b;
        const bool reset = begins(call.resets, row);
        const auto from_state = [&](int g) { return reset ? Vec<real>(0) : sum[g]; };
        const real* in = call.inputs + row * 4 * hidden + u;
        const auto at = [&](int g) { return load<real>(in + g * hidden, count); };
        const auto bias = [&](int g) { return load<real>(call.bias + g * hidden + u, count); };
        const Vec<real> r = sigmoid(from_state(0) + at(1) + bias(1)), z = sigmoid(from_state(1) + at(2) + bias(2));
        const Vec<real> recurrent = (call.weight ? from_state(2) : at(3)) + bias(3);
        const Vec<real> n = tanh(at::vec::fmadd(r, recurrent, at(0) + bias(0)));
        const Vec<real> found = reset ? Vec<real>(0) : load<real>(before + b * hidden + u, count);
        const Vec<real> h = at::vec::fmadd(z, found - n, n);
        if (call.gates) {
          store* out = call.gates + row * 4 * hidden + u;
          save<real>(out, n, count);
          save<real>(out + hidden, r, count);
          save<real>(out + 2 * hidden, z, count);
          save<real>(out + 3 * hidden, recurrent, count);
        }
        save<real>(call.output + row * hidden + u, h, count);
        save<real>(after + b * hidden + u, rounded<real, store>(h), count);
      };
      const auto fetch = [&](int64_t b, int64_t u) { fetch_gates(call.inputs + (first + b) * 4 * hidden + u, hidden); };
      product(weight, before, hidden, rows, rows, thread, threads, fetch, cell, nothing);
      barrier(threads);
    }
  });
}

template <typename real>
struct GruRebuild {
  int64_t rows, hidden, threads;
  const real* bias;
  real* gates; // [rows, 4 * hidden]: products in, gates out
};

template <typename real>
void gru_rebuild(const GruRebuild<real>& call) {
  const int64_t hidden = call.hidden;
  together(call.rows * hidden * 64, call.threads, [&](int thread, int threads) {
    const Share mine = share_of(call.rows, thread, threads);
    for (int64_t row = mine.begin; row < mine.end; ++row)
      for (int64_t u = 0; u < hidden; u += lanes<real>) {
        const int64_t count = std::min<int64_t>(lanes<real>, hidden - u);
        real* gates = call.gates + row * 4 * hidden + u;
        const auto gate = [&](int g) {
          return load<real>(gates + g * hidden, count) + load<real>(call.bias + g * hidden + u, count);
        };
        const Vec<real> r = sigmoid(gate(1)), z = sigmoid(gate(2)), recurrent = gate(3);
        save<real>(gates, tanh(at::vec::fmadd(r, recurrent, gate(0))), count);
        save<real>(gates + hidden, r, count);
        save<real>(gates + 2 * hidden, z, count);
        save<real>(gates + 3 * hidden, recurrent, count);
      }
  });
}

template <typename real, typename store, typename kept, typename operand>
struct GruBackward {
  Steps steps;
  int64_t hidden;
  const operand* weight; // packed for products with gradients of r, z, n
  const store* grad_output;
  const int64_t* grad_row;
  int64_t grad_stride;
  const kept* gates;     // [rows, 4 * hidden]
  const operand* previous; // [rows, hidden]: h that each row found
  operand* grad_gates;   // [rows, 4 * hidden]; may be `gates`
  real* grad_state;      // [batch, hidden], in place
  const bool* resets;    // [rows] or null
};

template <typename real, typename store, typename kept, typename operand>
void gru_backward(const GruBackward<real, store, kept, operand>& call) {
  const int64_t hidden = call.hidden;
  const Panels<operand, 1, 3> weight{call.weight, hidden, 3 * hidden};
  const int64_t batch = *std::max_element(call.steps.active, call.steps.active + call.steps.count);
  together(batch * 3 * hidden * hidden, call.steps.threads, [&](int thread, int threads) {
    const auto cell = [&](int64_t i, int64_t b, int64_t u, int64_t count) {
      const int64_t row = call.steps.row[i] + b;
      const Vec<real> one(1), grad = incoming<real>(call, i, b, u, count, hidden);
      const kept* gates = call.gates + row * 4 * hidden + u;
      const Vec<real> n = load<real>(gates, count), r = load<real>(gates + hidden, count),
                      z = load<real>(gates + 2 * hidden, count), recurrent = load<real>(gates + 3 * hidden, count);
      const Vec<real> before = load<real>(call.previous + row * hidden + u, count);
      const Vec<real> grad_n = grad * (one - z) * (one - n * n);
      operand* out = call.grad_gates + row * 4 * hidden + u;
      save<real>(out, grad_n, count);
      save<real>(out + hidden, grad_n * recurrent * r * (one - r), count);
      save<real>(out + 2 * hidden, grad * (before - n) * z * (one - z), count);
      save<real>(out + 3 * hidden, grad_n * r, count);
      save<real>(call.grad_state + b * hidden + u, grad * z, count);
    };
    const auto carry = [&](int64_t i, int64_t b, int64_t u, int64_t count, const Vec<real>(&sum)[1]) {
      real* grad = call.grad_state + b * hidden + u;
      const bool reset = begins(call.resets, call.steps.row[i] + b);
      save<real>(grad, reset ? Vec<real>(0) : load<real>(grad, count) + sum[0], count);
    };
    const auto fetch = [&](int64_t i, int64_t b, int64_t u) {
      const int64_t row = call.steps.row[i] + b;
      fetch_gates(call.gates + row * 4 * hidden + u, hidden);
      __builtin_prefetch(call.previous + row * hidden + u);
      if (call.grad_output) __builtin_prefetch(call.grad_output + call.grad_row[i] + b * call.grad_stride + u);
    };
    walk_back(call.steps, weight, static_cast<const operand*>(call.grad_gates + hidden), 4 * hidden, thread, threads,
              fetch, cell, carry);
  });
}

// ---- the plain recurrent layer -------------------------------------------------------------------------------------

template <typename real, typename store, typename operand>
struct ElmanForward {
  Steps steps;
  int64_t hidden, relu;
  const real* inputs; // [rows, hidden]
  const real* bias;   // [hidden]
  const operand* weight; // packed; null where the inputs hold its products already
  operand* state[2];
  store* output;
  const bool* resets; // [rows] or null
};

template <typename real, typename store, typename operand>
void elman_forward(const ElmanForward<real, store, operand>& call) {
  const int64_t hidden = call.hidden;
  const Panels<operand, 1, 3> weight{call.weight, hidden, call.weight ? hidden : 0};
  together(call.steps.active[0] * hidden * hidden, call.steps.threads, [&](int thread, int threads) {
    for (int64_t i = 0; i < call.steps.count; ++i) {
      const int64_t rows = call.steps.active[i], first = call.steps.row[i];
      operand* after = call.state[(i + 1) % 2];
      const auto cell = [&](int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[1]) {
        const int64_t row = first + b;
        const Vec<real> input = load<real>(call.inputs + row * hidden + u, n);
        const Vec<real> x = (begins(call.resets, row) ? input : sum[0] + input) + load<real>(call.bias + u, n);
        const Vec<real> h = call.relu ? at::vec::maximum(x, Vec<real>(0)) : tanh(x);
        save<real>(call.output + row * hidden + u, h, n);
        save<real>(after + b * hidden + u, rounded<real, store>(h), n);
      };
      const auto fetch = [&](int64_t b, int64_t u) { __builtin_prefetch(call.inputs + (first + b) * hidden + u); };
      product(weight, static_cast<const operand*>(call.state[i % 2]), hidden, rows, rows, thread, threads, fetch, cell,
              nothing);
      barrier(threads);
    }
  });
}

template <typename real, typename store, typename operand>
struct ElmanBackward {
  Steps steps;
  int64_t hidden, relu;
  const operand* weight;
  const store* grad_output;
  const int64_t* grad_row;
  int64_t grad_stride;
  const store* output; // [rows, hidden]
  operand* grad_gates; // [rows, hidden]
  real* grad_state;    // [batch, hidden], in place
  const bool* resets;  // [rows] or null
};

template <typename real, typename store, typename operand>
void elman_backward(const ElmanBackward<real, store, operand>& call) {
  const int64_t hidden = call.hidden;
  const Panels<operand, 1, 3> weight{call.weight, hidden, hidden};
  const int64_t batch = *std::max_element(call.steps.active, call.steps.active + call.steps.count);
  together(batch * hidden * hidden, call.steps.threads, [&](int thread, int threads) {
    const auto cell = [&](int64_t i, int64_t b, int64_t u, int64_t n) {
      const int64_t at = (call.steps.row[i] + b) * hidden + u;
      const Vec<real> grad = incoming<real>(call, i, b, u, n, hidden), h = load<real>(call.output + at, n);
      // A gradient passes unless h <= 0: through NaN it does, as in PyTorch.
      const Vec<real> out = call.relu ? Vec<real>::blendv(grad, Vec<real>(0), h <= Vec<real>(0))
                                      : grad * (Vec<real>(1) - h * h);
      save<real>(call.grad_gates + at, out, n);
    };
    const auto carry = [&](int64_t i, int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[1]) {
      save<real>(call.grad_state + b * hidden + u, begins(call.resets, call.steps.row[i] + b) ? Vec<real>(0) : sum[0],
                 n);
    };
    const auto fetch = [&](int64_t i, int64_t b, int64_t u) {
      __builtin_prefetch(call.output + (call.steps.row[i] + b) * hidden + u);
      if (call.grad_output) __builtin_prefetch(call.grad_output + call.grad_row[i] + b * call.grad_stride + u);
    };
    walk_back(call.steps, weight, static_cast<const operand*>(call.grad_gates), hidden, thread, threads, fetch, cell,
              carry);
  });
}

// ---- packing and sums ----------------------------------------------------------------------------------------------

// Element (k, unit of gate) of the weight is `weight[(gate * units + unit) * unit_stride + k * depth_stride]`.
template <typename number, int gates, int width>
void pack(const number* weight, int64_t units, int64_t depth, int64_t unit_stride, int64_t depth_stride, number* packed,
          int64_t threads) {
  constexpr int64_t LANES = lanes<sum_of<number>>, BLOCK = 16; // rows that are filled together
  constexpr int64_t PACK = Multiplied<number>::pack;
  const Panels<number, gates, width> panels{packed, units, depth};
  together(units * gates * depth, threads, [&](int thread, int used) {
    const Share mine = share_of(panels.count(), thread, used);
    for (int64_t panel = mine.begin; panel < mine.end; ++panel) {
      const int64_t vectors = (panels.first(panel + 1) - panels.first(panel)) * gates;
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t unit = (panels.first(panel) + v / gates) * LANES, count = std::min(LANES, units - unit);
        const int64_t before = v / STRIP * STRIP, across = std::min<int64_t>(STRIP, vectors - before) * LANES * PACK;
        const number* from = weight + (v % gates * units + unit) * unit_stride;
        number* to = packed + (panels.first(panel) * gates + before) * panels.column() + (v - before) * LANES * PACK;
        for (int64_t begin = 0; begin < depth; begin += BLOCK) {
          const int64_t end = std::min(begin + BLOCK, depth);
          if (count < LANES || (end - begin) % PACK)
            for (int64_t k = begin; k < end; k += PACK)
              std::memset(to + k / PACK * across, 0, LANES * PACK * sizeof(number));
          if (PACK == 1 && unit_stride == 1) {
            for (int64_t k = begin; k < end; ++k)
              std::memcpy(to + k * across, from + k * depth_stride, count * sizeof(number));
          } else if (unit_stride == 1) {
            for (int64_t k = begin; k < end; ++k)
              for (int64_t u = 0; u < count; ++u)
                to[k / PACK * across + u * PACK + k % PACK] = from[u + k * depth_stride];
          } else {
            for (int64_t u = 0; u < count; ++u)
              for (int64_t k = begin; k < end; ++k)
                to[k / PACK * across + u * PACK + k % PACK] = from[u * unit_stride + k * depth_stride];
          }
        }
      }
    }
  });
}

// `into = a @ weight`, or `into += a @ weight`, for many rows at once.
template <typename number, typename store>
void multiply_rows(const number* a, int64_t stride, int64_t rows, const number* packed, int64_t units, int64_t depth,
                   store* into, int64_t into_stride, bool adds, int64_t threads) {
  using real = sum_of<number>;
  const Panels<number, 1, 3> weight{packed, units, depth};
  together(rows * units * depth, threads, [&](int thread, int used) {
    const auto finish = [&](int64_t row, int64_t u, int64_t n, const Vec<real>(&sum)[1]) {
      store* to = into + row * into_stride + u;
      save<real>(to, adds ? load<real>(to, n) + sum[0] : sum[0], n);
    };
    product(weight, a, stride, rows, rows, thread, used, no_fetch, finish, nothing);
  });
}

// `count` numbers of a row, and of narrow ones those of the next row between them (zeros where there is none).
template <typename number>
inline void interleave(const number* row, const number* next, number* to, int64_t count) {
  if constexpr (Multiplied<number>::pack == 1) {
    std::memcpy(to, row, count * sizeof(number));
  } else {
    static const number zeros[64] = {};
    const auto* low = reinterpret_cast<const uint16_t*>(row);
    const auto* high = reinterpret_cast<const uint16_t*>(next ? next : zeros);
    auto* pairs = reinterpret_cast<uint32_t*>(to);
    for (int64_t i = 0; i < count; ++i) pairs[i] = low[i] | static_cast<uint32_t>(high[i]) << 16;
  }
}

// `into = a^T b`, or added to it: gradients of weights, sums over a chunk's rows. Blocks of `a` and `b` are copied to the
// stack, `a` so that rows of a tile lie side by side. Every sum is one thread's, in an order that does not depend on
// how many there are.
template <typename number>
void multiply_columns(const number* a, int64_t a_stride, const number* b, int64_t b_stride, int64_t depth, int64_t rows,
                      int64_t columns, sum_of<number>* into, bool adds, int64_t threads) {
  using real = sum_of<number>;
  constexpr int64_t PACK = Multiplied<number>::pack, DEPTH = 512 / sizeof(real), ROWS = 128;
  constexpr int64_t WIDTH = STRIP * lanes<real>;
  together(rows * columns * depth, threads, [&](int thread, int used) {
    alignas(64) number left[ROWS * DEPTH * PACK];
    alignas(64) number right[WIDTH * DEPTH * PACK];
    alignas(64) real sums[TILE_ROWS * WIDTH];
    const Share tiles = share_of((rows + TILE_ROWS - 1) / TILE_ROWS, thread, used);
    const int64_t first = tiles.begin * TILE_ROWS, last = std::min(rows, tiles.end * TILE_ROWS);
    for (int64_t k = 0; k < depth; k += DEPTH * PACK) {
      const int64_t deep = std::min(DEPTH * PACK, depth - k), deep_packs = (deep + PACK - 1) / PACK;
      for (int64_t row = first; row < last; row += ROWS) {
        const int64_t high = std::min(ROWS, last - row), blocks = (high + TILE_ROWS - 1) / TILE_ROWS;
        if (high % TILE_ROWS) std::memset(left, 0, sizeof left);
        for (int64_t d = 0; d < deep; d += PACK) {
          const number* from = a + (k + d) * a_stride + row;
          const number* next = d + 1 < deep ? from + a_stride : nullptr;
          number* to = left + d * TILE_ROWS;
          for (int64_t block = 0; block < blocks; ++block, to += deep_packs * PACK * TILE_ROWS) {
            const int64_t at = block * TILE_ROWS;
            const number* below = next ? next + at : nullptr;
            if (high - at >= TILE_ROWS) interleave<number>(from + at, below, to, TILE_ROWS);
            else interleave<number>(from + at, below, to, high - at);
          }
        }
        for (int64_t column = 0; column < columns; column += WIDTH) {
          const int64_t wide = std::min(WIDTH, columns - column);
          if (wide < WIDTH) std::memset(right, 0, sizeof right);
          for (int64_t d = 0; d < deep; d += PACK) {
            const number* from = b + (k + d) * b_stride + column;
            const number* next = d + 1 < deep ? from + b_stride : nullptr;
            if (wide == WIDTH) interleave<number>(from, next, right + d * WIDTH, WIDTH);
            else interleave<number>(from, next, right + d * WIDTH, wide);
          }
          for (int64_t block = 0; block < blocks; ++block) {
            real* to = into + (row + block * TILE_ROWS) * columns + column;
            const int64_t height = std::min<int64_t>(TILE_ROWS, high - block * TILE_ROWS);
            for (int64_t r = 0; r < height; ++r)
              for (int64_t c = 0; c < wide; c += lanes<real>) __builtin_prefetch(to + r * columns + c, 1);
            const number* tile = left + block * deep_packs * PACK * TILE_ROWS;
            multiply<number, TILE_ROWS, STRIP, true>(tile, 0, right, deep_packs * PACK, sums, WIDTH, right);
            for (int64_t r = 0; r < height; ++r)
              for (int64_t c = 0; c < wide; c += lanes<real>) {
                const int64_t n = std::min<int64_t>(lanes<real>, wide - c);
                const Vec<real> sum = Vec<real>::loadu(sums + r * WIDTH + c);
                real* at = to + r * columns + c;
                save<real>(at, adds || k ? load<real>(at, n) + sum : sum, n);
              }
          }
        }
      }
    }
  });
}

template <typename real, typename store>
void add_column_sums(const store* matrix, int64_t rows, int64_t columns, real* sums, int64_t threads) {
  together(rows * columns, threads, [&](int thread, int used) {
    const int64_t vectors = (columns + lanes<real> - 1) / lanes<real>;
    const Share mine = share_of(vectors, thread, used);
    constexpr int64_t STRIP = 8, BLOCK = 32;
    for (int64_t v = mine.begin; v < mine.end; v += STRIP) {
      const int64_t begin = v * lanes<real>, end = std::min(columns, std::min(v + STRIP, mine.end) * lanes<real>);
      Vec<real> sum[STRIP];
      for (auto& s : sum) s = Vec<real>(0);
      for (int64_t first = 0; first < rows; first += BLOCK) { // sums of sums round less than one long sum
        Vec<real> part[STRIP];
        for (auto& p : part) p = Vec<real>(0);
        for (int64_t row = first, last = std::min(rows, first + BLOCK); row < last; ++row)
          for (int64_t u = begin, s = 0; u < end; u += lanes<real>, ++s)
            part[s] = part[s] + load<real>(matrix + row * columns + u, std::min<int64_t>(lanes<real>, end - u));
        for (int64_t s = 0; s < STRIP; ++s) sum[s] = sum[s] + part[s];
      }
      for (int64_t u = begin, s = 0; u < end; u += lanes<real>, ++s) {
        const int64_t n = std::min<int64_t>(lanes<real>, end - u);
        save<real>(sums + u, load<real>(sums + u, n) + sum[s], n);
      }
    }
  });
}

} // namespace

// ---- the names Python calls ----------------------------------------------------------------------------------------

#define FOR_STORE(NAME, STRUCT)                                                                              \
  extern "C" void NAME##_f32(const STRUCT<float, float, float>* call) { NAME(*call); }                       \
  extern "C" void NAME##_f64(const STRUCT<double, double, double>* call) { NAME(*call); }                    \
  extern "C" void NAME##_bf16(const STRUCT<float, c10::BFloat16, float>* call) { NAME(*call); }              \
  extern "C" void NAME##_f16(const STRUCT<float, c10::Half, float>* call) { NAME(*call); }

// Gates that were kept lie in the type of the sequences, those that were recomputed in the compute type (`wide`).
#define FOR_KEPT(NAME, STRUCT)                                                                               \
  extern "C" void NAME##_f32(const STRUCT<float, float, float, float>* call) { NAME(*call); }                \
  extern "C" void NAME##_f64(const STRUCT<double, double, double, double>* call) { NAME(*call); }            \
  extern "C" void NAME##_bf16(const STRUCT<float, c10::BFloat16, c10::BFloat16, float>* call) { NAME(*call); } \
  extern "C" void NAME##_f16(const STRUCT<float, c10::Half, c10::Half, float>* call) { NAME(*call); }        \
  extern "C" void NAME##_wide_bf16(const STRUCT<float, c10::BFloat16, float, float>* call) { NAME(*call); }  \
  extern "C" void NAME##_wide_f16(const STRUCT<float, c10::Half, float, float>* call) { NAME(*call); }

#define FOR_REAL(NAME, STRUCT)                                                         \
  extern "C" void NAME##_f32(const STRUCT<float>* call) { NAME(*call); }               \
  extern "C" void NAME##_f64(const STRUCT<double>* call) { NAME(*call); }

FOR_STORE(lstm_forward, LstmForward)
FOR_REAL(lstm_rebuild, LstmRebuild)
FOR_KEPT(lstm_backward, LstmBackward)
FOR_STORE(gru_forward, GruForward)
FOR_REAL(gru_rebuild, GruRebuild)
FOR_KEPT(gru_backward, GruBackward)
FOR_STORE(elman_forward, ElmanForward)
FOR_STORE(elman_backward, ElmanBackward)

template <typename number>
static void pack_gates(int64_t gates, const number* weight, int64_t units, int64_t depth, int64_t unit_stride,
                       int64_t depth_stride, number* packed, int64_t threads) {
  if (gates == 4) pack<number, 4, 3>(weight, units, depth, unit_stride, depth_stride, packed, threads);
  if (gates == 3) pack<number, 3, 1>(weight, units, depth, unit_stride, depth_stride, packed, threads);
  if (gates == 1) pack<number, 1, 3>(weight, units, depth, unit_stride, depth_stride, packed, threads);
}

#define FOR_PACK(SUFFIX, NUMBER)                                                                                  \
  extern "C" void pack_##SUFFIX(int64_t gates, const NUMBER* weight, int64_t units, int64_t depth,                \
                                int64_t unit_stride, int64_t depth_stride, NUMBER* packed, int64_t threads) {     \
    pack_gates<NUMBER>(gates, weight, units, depth, unit_stride, depth_stride, packed, threads);                  \
  }                                                                                                               \
  extern "C" void add_column_sums_##SUFFIX(const NUMBER* matrix, int64_t rows, int64_t columns,                   \
                                           sum_of<NUMBER>* sums, int64_t threads) {                               \
    add_column_sums<sum_of<NUMBER>>(matrix, rows, columns, sums, threads);                                        \
  }                                                                                                               \
  extern "C" int64_t lanes_##SUFFIX() { return lanes<sum_of<NUMBER>>; }

FOR_PACK(f32, float)
FOR_PACK(f64, double)

// Products that read bfloat16 as it is, where the processor has them.
#if defined(MULTIPLIES_BF16)
using bf16 = c10::BFloat16;

FOR_PACK(bf16, bf16)

extern "C" void multiply_columns_bf16(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride, int64_t depth,
                                      int64_t rows, int64_t columns, float* into, int64_t adds, int64_t threads) {
  multiply_columns(a, a_stride, b, b_stride, depth, rows, columns, into, adds != 0, threads);
}

extern "C" void lstm_forward_narrow_bf16(const LstmForward<float, bf16, bf16>* call) { lstm_forward(*call); }
extern "C" void gru_forward_narrow_bf16(const GruForward<float, bf16, bf16>* call) { gru_forward(*call); }
extern "C" void elman_forward_narrow_bf16(const ElmanForward<float, bf16, bf16>* call) { elman_forward(*call); }
extern "C" void lstm_backward_narrow_bf16(const LstmBackward<float, bf16, bf16, bf16>* call) { lstm_backward(*call); }
extern "C" void gru_backward_narrow_bf16(const GruBackward<float, bf16, bf16, bf16>* call) { gru_backward(*call); }
extern "C" void elman_backward_narrow_bf16(const ElmanBackward<float, bf16, bf16>* call) { elman_backward(*call); }
extern "C" void lstm_backward_wide_narrow_bf16(const LstmBackward<float, bf16, float, bf16>* call) {
  lstm_backward(*call);
}
extern "C" void gru_backward_wide_narrow_bf16(const GruBackward<float, bf16, float, bf16>* call) {
  gru_backward(*call);
}
extern "C" void multiply_rows_bf16(const bf16* a, int64_t stride, int64_t rows, const bf16* packed, int64_t units,
                                   int64_t depth, float* into, int64_t into_stride, int64_t adds, int64_t threads) {
  multiply_rows(a, stride, rows, packed, units, depth, into, into_stride, adds != 0, threads);
}
extern "C" void multiply_rows_narrow_bf16(const bf16* a, int64_t stride, int64_t rows, const bf16* packed,
                                          int64_t units, int64_t depth, bf16* into, int64_t into_stride, int64_t adds,
                                          int64_t threads) {
  multiply_rows(a, stride, rows, packed, units, depth, into, into_stride, adds != 0, threads);
}
#endif
