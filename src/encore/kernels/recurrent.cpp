// The steps of recurrent layers: a product with the recurrent weight and the cell behind it, in one pass over tiles.
//
// A step is G = h W^T followed by pointwise work on all gates of a unit. The weight is packed once a call into panels
// that hold all gates of a few units side by side, so that a tile of the product ends with everything its units' cell
// needs still in registers. Tiles are dealt out to threads in runs that keep a panel in its core's cache, and threads
// meet once a step. The large products (inputs, weight gradients) are PyTorch's and happen outside of this file.
//
// Compute type `real` is float or double; `store` is how sequences lie in memory (bfloat16 and half are computed in
// float). Nothing is allocated here: every buffer comes from the caller, who can therefore tell its bytes.

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

// Accumulators of a tile, beside a row of the panel and one broadcast value, fill the vector registers.
#if defined(CPU_CAPABILITY_AVX512) || defined(__aarch64__)
constexpr int ACCUMULATORS = 24;
#else
constexpr int ACCUMULATORS = 12;
#endif

// How far ahead of its use a row of a panel is fetched.
constexpr int64_t PREFETCH = 16;

// A thread is worth waking for about this many multiplications.
constexpr int64_t WORK_PER_THREAD = 1 << 16;

// ---- loads and stores of up to a vector --------------------------------------------------------------------------

template <typename real, typename store>
inline Vec<real> load(const store* from, int64_t count) {
  if constexpr (std::is_same_v<real, store>) {
    return count == lanes<real> ? Vec<real>::loadu(from) : Vec<real>::loadu(from, count);
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

template <typename real>
inline Vec<real> sigmoid(Vec<real> x) {
  const Vec<real> one(1);
  return one / (one + x.neg().exp());
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

// `gates` matrices of `units` columns each, `depth` rows, cut into panels of `width` vectors of units with all gates.
template <typename real, int gates, int width>
struct Panels {
  static constexpr int vectors = gates * width;
  static constexpr int most_rows = ACCUMULATORS / vectors;
  static constexpr int64_t units_a_panel = width * lanes<real>;

  const real* packed;
  int64_t units, depth;

  int64_t count() const { return (units + units_a_panel - 1) / units_a_panel; }
  int64_t blocks(int64_t rows) const { return (rows + most_rows - 1) / most_rows; }
};

// `rows` rows of `a` times a panel, into `sums[rows][vectors]`.
template <typename real, int rows, int vectors>
void multiply(const real* __restrict a, int64_t stride, const real* __restrict panel, int64_t depth,
              real* __restrict sums, const real* ahead) {
  Vec<real> sum[rows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sum[r][v] = Vec<real>(0);
  for (int64_t k = 0; k < depth; ++k) {
    __builtin_prefetch(ahead + k * lanes<real>, 0, 2);
    Vec<real> column[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      __builtin_prefetch(panel + ((k + PREFETCH) * vectors + v) * lanes<real>);
      column[v] = Vec<real>::loadu(panel + (k * vectors + v) * lanes<real>);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const Vec<real> value(a[r * stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sum[r][v] = at::vec::fmadd(value, column[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sum[r][v].store(sums + (r * vectors + v) * lanes<real>);
}

template <typename real, int rows, int vectors>
void multiply_rows(int64_t wanted, const real* a, int64_t stride, const real* panel, int64_t depth, real* sums,
                   const real* ahead) {
  if (wanted == rows) {
    multiply<real, rows, vectors>(a, stride, panel, depth, sums, ahead);
  } else if constexpr (rows > 1) {
    multiply_rows<real, rows - 1, vectors>(wanted, a, stride, panel, depth, sums, ahead);
  }
}

// This thread's tiles of `a[0:rows] @ weight`: `finish(row, unit, count, gates)` for each vector of units, then
// `rest(first row, last row, first unit, last unit)` for each tile, over rows up to `most`, of which the product only
// covers the first `rows`.
template <typename real, int gates, int width, typename Fetch, typename Finish, typename Rest>
inline void product(const Panels<real, gates, width>& weight, const real* a, int64_t stride, int64_t rows, int64_t most,
                    int thread, int threads, const Fetch& fetch, const Finish& finish, const Rest& rest) {
  using Weight = Panels<real, gates, width>;
  constexpr int vectors = Weight::vectors;
  alignas(64) real sums[Weight::most_rows * vectors * lanes<real>];
  const int64_t blocks = weight.blocks(most);
  const Share mine = share_of(weight.count() * blocks, thread, threads);
  for (int64_t task = mine.begin; task < mine.end; ++task) {
    const int64_t panel = task / blocks, block = task % blocks;
    const int64_t begin = most * block / blocks, end = most * (block + 1) / blocks;
    const int64_t covered = std::min(end, rows);
    const int64_t first = panel * Weight::units_a_panel, last = std::min(first + Weight::units_a_panel, weight.units);
    for (int64_t row = begin; row < end; ++row)
      for (int64_t unit = first; unit < last; unit += lanes<real>) fetch(row, unit);
    if (begin < covered) {
      const real* columns = weight.packed + panel * weight.depth * vectors * lanes<real>;
      const bool more = block < vectors && panel + 1 < weight.count();
      multiply_rows<real, Weight::most_rows, vectors>(
          covered - begin, a + begin * stride, stride, columns, weight.depth, sums,
          more ? columns + (vectors + block) * weight.depth * lanes<real> : columns);
    }
    for (int64_t row = begin; row < covered; ++row)
      for (int64_t unit = first, w = 0; unit < last; unit += lanes<real>, ++w) {
        Vec<real> gate[gates];
        for (int g = 0; g < gates; ++g)
          gate[g] = Vec<real>::loadu(sums + (((row - begin) * gates + g) * width + w) * lanes<real>);
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

// ---- LSTM ----------------------------------------------------------------------------------------------------------

template <typename real, typename store>
struct LstmForward {
  Steps steps;
  int64_t hidden, width; // of c, and of h: they differ where h is projected
  const real* inputs;    // [rows, 4 * hidden]: products with the inputs, without bias
  const real* bias;      // [4 * hidden]
  const real* weight;    // packed, four gates; null where the inputs hold its products already
  const real* projection; // packed, or null
  real* state[2];        // [batch, width] each: h, read from one and written to the other in turns
  real* cell;            // [batch, hidden]: c, in place
  real* raw;             // [batch, hidden]: h before its projection, or null
  store* output;         // [rows, width]
  store* gates;          // [rows, 4 * hidden] or null: i, f, g, o as the cell used them; may be `inputs`
  real* cells;           // [rows, hidden] or null: c
};

template <typename real, typename store>
void lstm_forward(const LstmForward<real, store>& call) {
  const int64_t hidden = call.hidden, width = call.width;
  const Panels<real, 4, 1> weight{call.weight, hidden, call.weight ? width : 0};
  const Panels<real, 1, 4> projection{call.projection, width, hidden};
  const int64_t work = call.steps.active[0] * 4 * hidden * width;
  together(work, call.steps.threads, [&](int thread, int threads) {
    for (int64_t i = 0; i < call.steps.count; ++i) {
      const int64_t rows = call.steps.active[i], first = call.steps.row[i];
      const real* before = call.state[i % 2];
      real* after = call.state[(i + 1) % 2];
      const auto cell = [&](int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[4]) {
        const int64_t row = first + b;
        const real* in = call.inputs + row * 4 * hidden + u;
        const auto gate = [&](int g) {
          return sum[g] + load<real>(in + g * hidden, n) + load<real>(call.bias + g * hidden + u, n);
        };
        const Vec<real> i_ = sigmoid(gate(0)), f = sigmoid(gate(1)), g = gate(2).tanh(), o = sigmoid(gate(3));
        const Vec<real> c = at::vec::fmadd(f, load<real>(call.cell + b * hidden + u, n), i_ * g);
        const Vec<real> h = o * c.tanh();
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
        const Vec<real> i_ = sigmoid(gate(0)), f = sigmoid(gate(1)), g = gate(2).tanh(), o = sigmoid(gate(3));
        const real* before = previous(call.steps, call.enter, static_cast<const real*>(call.cells), i, b, hidden);
        const Vec<real> c = at::vec::fmadd(f, load<real>(before + u, n), i_ * g);
        save<real>(gates, i_, n);
        save<real>(gates + hidden, f, n);
        save<real>(gates + 2 * hidden, g, n);
        save<real>(gates + 3 * hidden, o, n);
        save<real>(call.cells + row * hidden + u, c, n);
        if (call.raw) save<real>(call.raw + row * hidden + u, o * c.tanh(), n);
      }
    }
  });
}

template <typename real, typename store, typename kept>
struct LstmBackward {
  Steps steps;
  int64_t hidden, width;
  const real* weight;          // packed for products with gradients of gates
  const real* projection;      // packed for products with gradients of h, or null
  const store* grad_output;    // or null
  const int64_t* grad_row;     // where a step's gradients begin
  int64_t grad_stride;         // from row to row
  const kept* gates;           // [rows, 4 * hidden]
  const real* cells;           // [rows, hidden]
  Entering<real> enter;        // c
  real* grad_gates;            // [rows, 4 * hidden]; may be `gates`
  real* grad_state;            // [batch, width], in place
  real* grad_cell;             // [batch, hidden], in place
  real* grad_projected;        // [rows, width] or null: gradients of h behind its projection, out
};

template <typename real, typename store, typename kept>
inline void lstm_cell_backward(const LstmBackward<real, store, kept>& call, int64_t i, int64_t b, int64_t u, int64_t n,
                               Vec<real> grad_h) {
  const int64_t hidden = call.hidden, row = call.steps.row[i] + b;
  const kept* gates = call.gates + row * 4 * hidden + u;
  const Vec<real> one(1);
  const Vec<real> i_ = load<real>(gates, n), f = load<real>(gates + hidden, n), g = load<real>(gates + 2 * hidden, n),
                  o = load<real>(gates + 3 * hidden, n);
  const Vec<real> tanh_c = load<real>(call.cells + row * hidden + u, n).tanh();
  const Vec<real> before = load<real>(previous(call.steps, call.enter, call.cells, i, b, hidden) + u, n);
  real* grad_cell = call.grad_cell + b * hidden + u;
  const Vec<real> grad_c = load<real>(grad_cell, n) + grad_h * o * (one - tanh_c * tanh_c);
  real* out = call.grad_gates + row * 4 * hidden + u;
  save<real>(out, grad_c * g * i_ * (one - i_), n);
  save<real>(out + hidden, grad_c * before * f * (one - f), n);
  save<real>(out + 2 * hidden, grad_c * i_ * (one - g * g), n);
  save<real>(out + 3 * hidden, grad_h * tanh_c * o * (one - o), n);
  save<real>(grad_cell, grad_c * f, n);
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
// `carry(b, u, n, sum)` takes their product with the weight. The tile of a product and the cells of the step before
// cover the same units and rows, so that threads need not meet in between.
template <typename real, typename Fetch, typename Cell, typename Carry>
void walk_back(const Steps& steps, const Panels<real, 1, 4>& weight, const real* grad_gates, int64_t stride, int thread,
               int threads, const Fetch& fetch, const Cell& cell, const Carry& carry) {
  for (int64_t i = steps.count; i >= 0; --i) {
    const int64_t rows = i < steps.count && weight.packed ? steps.active[i] : 0, next = i > 0 ? steps.active[i - 1] : 0;
    const real* a = rows ? grad_gates + steps.row[i] * stride : nullptr;
    const auto fetch_next = [&](int64_t b, int64_t u) {
      if (b < next) fetch(i - 1, b, u);
    };
    product(weight, a, stride, rows, std::max(rows, next), thread, threads, fetch_next, carry,
            [&](int64_t begin, int64_t end, int64_t unit, int64_t last) {
              for (int64_t b = begin; b < std::min(end, next); ++b)
                for (int64_t u = unit; u < last; u += lanes<real>)
                  cell(i - 1, b, u, std::min<int64_t>(lanes<real>, last - u));
            });
    barrier(threads);
  }
}

template <typename real, typename store, typename kept>
void lstm_backward(const LstmBackward<real, store, kept>& call) {
  const int64_t hidden = call.hidden, width = call.width;
  const Panels<real, 1, 4> weight{call.weight, width, 4 * hidden};
  const int64_t batch = *std::max_element(call.steps.active, call.steps.active + call.steps.count);
  together(batch * 4 * hidden * width, call.steps.threads, [&](int thread, int threads) {
    const auto carry = [&](int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[1]) {
      save<real>(call.grad_state + b * width + u, sum[0], n);
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
      walk_back(call.steps, weight, static_cast<const real*>(call.grad_gates), 4 * hidden, thread, threads, fetch, cell,
                carry);
      return;
    }
    // With a projection the cell needs all of h's gradient, so that a step is two products and two meetings.
    const Panels<real, 1, 4> projection{call.projection, hidden, width};
    for (int64_t i = call.steps.count - 1; i >= 0; --i) {
      const int64_t rows = call.steps.active[i], first = call.steps.row[i];
      const auto total = [&](int64_t begin, int64_t end, int64_t unit, int64_t last) {
        for (int64_t b = begin; b < end; ++b)
          for (int64_t u = unit; u < last; u += lanes<real>) {
            const int64_t n = std::min<int64_t>(lanes<real>, last - u);
            save<real>(call.grad_projected + (first + b) * width + u, incoming<real>(call, i, b, u, n, width), n);
          }
      };
      product(weight, static_cast<const real*>(nullptr), 0, 0, rows, thread, threads, no_fetch, carry, total);
      barrier(threads);
      const auto cell = [&](int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[1]) {
        lstm_cell_backward(call, i, b, u, n, sum[0]);
      };
      product(projection, static_cast<const real*>(call.grad_projected + first * width), width, rows, rows, thread,
              threads, no_fetch, cell, nothing);
      barrier(threads);
      if (!call.weight) continue;
      product(weight, static_cast<const real*>(call.grad_gates + first * 4 * hidden), 4 * hidden, rows, rows, thread,
              threads, no_fetch, carry, nothing);
      barrier(threads);
    }
  });
}

// ---- GRU: gates lie as n, r, z and the recurrent part of n -------------------------------------------------------

template <typename real, typename store>
struct GruForward {
  Steps steps;
  int64_t hidden;
  const real* inputs; // [rows, 4 * hidden]: products with the inputs for n, r, z, without bias; the last part unused
  const real* bias;   // [4 * hidden]
  const real* weight; // packed, three gates: r, z, n; null where the inputs hold its products already
  real* state[2];
  store* output;
  store* gates; // [rows, 4 * hidden] or null; may be `inputs`
};

template <typename real, typename store>
void gru_forward(const GruForward<real, store>& call) {
  const int64_t hidden = call.hidden;
  const Panels<real, 3, 1> weight{call.weight, hidden, call.weight ? hidden : 0};
  together(call.steps.active[0] * 3 * hidden * hidden, call.steps.threads, [&](int thread, int threads) {
    for (int64_t i = 0; i < call.steps.count; ++i) {
      const int64_t rows = call.steps.active[i], first = call.steps.row[i];
      const real* before = call.state[i % 2];
      real* after = call.state[(i + 1) % 2];
      const auto cell = [&](int64_t b, int64_t u, int64_t count, const Vec<real>(&sum)[3]) {
        const int64_t row = first + b;
        const real* in = call.inputs + row * 4 * hidden + u;
        const auto at = [&](int g) { return load<real>(in + g * hidden, count); };
        const auto bias = [&](int g) { return load<real>(call.bias + g * hidden + u, count); };
        const Vec<real> r = sigmoid(sum[0] + at(1) + bias(1)), z = sigmoid(sum[1] + at(2) + bias(2));
        const Vec<real> recurrent = (call.weight ? sum[2] : at(3)) + bias(3);
        const Vec<real> n = at::vec::fmadd(r, recurrent, at(0) + bias(0)).tanh();
        const Vec<real> h = at::vec::fmadd(z, load<real>(before + b * hidden + u, count) - n, n);
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
        save<real>(gates, at::vec::fmadd(r, recurrent, gate(0)).tanh(), count);
        save<real>(gates + hidden, r, count);
        save<real>(gates + 2 * hidden, z, count);
        save<real>(gates + 3 * hidden, recurrent, count);
      }
  });
}

template <typename real, typename store, typename kept>
struct GruBackward {
  Steps steps;
  int64_t hidden;
  const real* weight; // packed for products with gradients of r, z, n
  const store* grad_output;
  const int64_t* grad_row;
  int64_t grad_stride;
  const kept* gates;     // [rows, 4 * hidden]
  const real* previous;  // [rows, hidden]: h that each row found
  real* grad_gates;      // [rows, 4 * hidden]; may be `gates`
  real* grad_state;      // [batch, hidden], in place
};

template <typename real, typename store, typename kept>
void gru_backward(const GruBackward<real, store, kept>& call) {
  const int64_t hidden = call.hidden;
  const Panels<real, 1, 4> weight{call.weight, hidden, 3 * hidden};
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
      real* out = call.grad_gates + row * 4 * hidden + u;
      save<real>(out, grad_n, count);
      save<real>(out + hidden, grad_n * recurrent * r * (one - r), count);
      save<real>(out + 2 * hidden, grad * (before - n) * z * (one - z), count);
      save<real>(out + 3 * hidden, grad_n * r, count);
      save<real>(call.grad_state + b * hidden + u, grad * z, count);
    };
    const auto carry = [&](int64_t b, int64_t u, int64_t count, const Vec<real>(&sum)[1]) {
      real* grad = call.grad_state + b * hidden + u;
      save<real>(grad, load<real>(grad, count) + sum[0], count);
    };
    const auto fetch = [&](int64_t i, int64_t b, int64_t u) {
      const int64_t row = call.steps.row[i] + b;
      fetch_gates(call.gates + row * 4 * hidden + u, hidden);
      __builtin_prefetch(call.previous + row * hidden + u);
      if (call.grad_output) __builtin_prefetch(call.grad_output + call.grad_row[i] + b * call.grad_stride + u);
    };
    walk_back(call.steps, weight, static_cast<const real*>(call.grad_gates + hidden), 4 * hidden, thread, threads,
              fetch, cell, carry);
  });
}

// ---- the plain recurrent layer -------------------------------------------------------------------------------------

template <typename real, typename store>
struct ElmanForward {
  Steps steps;
  int64_t hidden, relu;
  const real* inputs; // [rows, hidden]
  const real* bias;   // [hidden]
  const real* weight; // packed; null where the inputs hold its products already
  real* state[2];
  store* output;
};

template <typename real, typename store>
void elman_forward(const ElmanForward<real, store>& call) {
  const int64_t hidden = call.hidden;
  const Panels<real, 1, 4> weight{call.weight, hidden, call.weight ? hidden : 0};
  together(call.steps.active[0] * hidden * hidden, call.steps.threads, [&](int thread, int threads) {
    for (int64_t i = 0; i < call.steps.count; ++i) {
      const int64_t rows = call.steps.active[i], first = call.steps.row[i];
      real* after = call.state[(i + 1) % 2];
      const auto cell = [&](int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[1]) {
        const int64_t row = first + b;
        const Vec<real> x = sum[0] + load<real>(call.inputs + row * hidden + u, n) + load<real>(call.bias + u, n);
        const Vec<real> h = call.relu ? at::vec::maximum(x, Vec<real>(0)) : x.tanh();
        save<real>(call.output + row * hidden + u, h, n);
        save<real>(after + b * hidden + u, rounded<real, store>(h), n);
      };
      const auto fetch = [&](int64_t b, int64_t u) { __builtin_prefetch(call.inputs + (first + b) * hidden + u); };
      product(weight, static_cast<const real*>(call.state[i % 2]), hidden, rows, rows, thread, threads, fetch, cell,
              nothing);
      barrier(threads);
    }
  });
}

template <typename real, typename store>
struct ElmanBackward {
  Steps steps;
  int64_t hidden, relu;
  const real* weight;
  const store* grad_output;
  const int64_t* grad_row;
  int64_t grad_stride;
  const store* output; // [rows, hidden]
  real* grad_gates;    // [rows, hidden]
  real* grad_state;    // [batch, hidden], in place
};

template <typename real, typename store>
void elman_backward(const ElmanBackward<real, store>& call) {
  const int64_t hidden = call.hidden;
  const Panels<real, 1, 4> weight{call.weight, hidden, hidden};
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
    const auto carry = [&](int64_t b, int64_t u, int64_t n, const Vec<real>(&sum)[1]) {
      save<real>(call.grad_state + b * hidden + u, sum[0], n);
    };
    const auto fetch = [&](int64_t i, int64_t b, int64_t u) {
      __builtin_prefetch(call.output + (call.steps.row[i] + b) * hidden + u);
      if (call.grad_output) __builtin_prefetch(call.grad_output + call.grad_row[i] + b * call.grad_stride + u);
    };
    walk_back(call.steps, weight, static_cast<const real*>(call.grad_gates), hidden, thread, threads, fetch, cell,
              carry);
  });
}

// ---- packing and sums ----------------------------------------------------------------------------------------------

// Element (k, unit of gate) of the weight is `weight[(gate * units + unit) * unit_stride + k * depth_stride]`.
template <typename real, int gates, int width>
void pack(const real* weight, int64_t units, int64_t depth, int64_t unit_stride, int64_t depth_stride, real* packed,
          int64_t threads) {
  using Weight = Panels<real, gates, width>;
  constexpr int64_t PANEL = Weight::units_a_panel, BLOCK = 16; // rows of a panel that are filled together
  const Weight panels{packed, units, depth};
  together(units * gates * depth, threads, [&](int thread, int used) {
    const Share mine = share_of(panels.count(), thread, used);
    for (int64_t panel = mine.begin; panel < mine.end; ++panel) {
      const int64_t first = panel * PANEL, count = std::min(PANEL, units - first);
      for (int64_t begin = 0; begin < depth; begin += BLOCK) {
        const int64_t end = std::min(begin + BLOCK, depth);
        real* block = packed + panel * depth * gates * PANEL;
        if (count < PANEL) std::memset(block + begin * gates * PANEL, 0, (end - begin) * gates * PANEL * sizeof(real));
        for (int g = 0; g < gates; ++g) {
          const real* from = weight + (g * units + first) * unit_stride;
          real* to = block + g * PANEL;
          if (unit_stride == 1) {
            for (int64_t k = begin; k < end; ++k)
              std::memcpy(to + k * gates * PANEL, from + k * depth_stride, count * sizeof(real));
          } else {
            for (int64_t u = 0; u < count; ++u)
              for (int64_t k = begin; k < end; ++k) to[k * gates * PANEL + u] = from[u * unit_stride + k * depth_stride];
          }
        }
      }
    }
  });
}

template <typename real>
void add_column_sums(const real* matrix, int64_t rows, int64_t columns, real* sums, int64_t threads) {
  together(rows * columns, threads, [&](int thread, int used) {
    const int64_t vectors = (columns + lanes<real> - 1) / lanes<real>;
    const Share mine = share_of(vectors, thread, used);
    constexpr int64_t STRIP = 8;
    for (int64_t v = mine.begin; v < mine.end; v += STRIP) {
      const int64_t begin = v * lanes<real>, end = std::min(columns, std::min(v + STRIP, mine.end) * lanes<real>);
      Vec<real> sum[STRIP];
      for (auto& s : sum) s = Vec<real>(0);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t u = begin, s = 0; u < end; u += lanes<real>, ++s)
          sum[s] = sum[s] + load<real>(matrix + row * columns + u, std::min<int64_t>(lanes<real>, end - u));
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
  extern "C" void NAME##_f32(const STRUCT<float, float>* call) { NAME(*call); }                              \
  extern "C" void NAME##_f64(const STRUCT<double, double>* call) { NAME(*call); }                            \
  extern "C" void NAME##_bf16(const STRUCT<float, c10::BFloat16>* call) { NAME(*call); }                     \
  extern "C" void NAME##_f16(const STRUCT<float, c10::Half>* call) { NAME(*call); }

// Gates that were kept lie in the type of the sequences, those that were built again in the compute type (`wide`).
#define FOR_KEPT(NAME, STRUCT)                                                                               \
  extern "C" void NAME##_f32(const STRUCT<float, float, float>* call) { NAME(*call); }                       \
  extern "C" void NAME##_f64(const STRUCT<double, double, double>* call) { NAME(*call); }                    \
  extern "C" void NAME##_bf16(const STRUCT<float, c10::BFloat16, c10::BFloat16>* call) { NAME(*call); }      \
  extern "C" void NAME##_f16(const STRUCT<float, c10::Half, c10::Half>* call) { NAME(*call); }               \
  extern "C" void NAME##_wide_bf16(const STRUCT<float, c10::BFloat16, float>* call) { NAME(*call); }         \
  extern "C" void NAME##_wide_f16(const STRUCT<float, c10::Half, float>* call) { NAME(*call); }

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

template <typename real>
static void pack_gates(int64_t gates, const real* weight, int64_t units, int64_t depth, int64_t unit_stride,
                       int64_t depth_stride, real* packed, int64_t threads) {
  if (gates == 4) pack<real, 4, 1>(weight, units, depth, unit_stride, depth_stride, packed, threads);
  if (gates == 3) pack<real, 3, 1>(weight, units, depth, unit_stride, depth_stride, packed, threads);
  if (gates == 1) pack<real, 1, 4>(weight, units, depth, unit_stride, depth_stride, packed, threads);
}

#define FOR_PACK(SUFFIX, REAL)                                                                                    \
  extern "C" void pack_##SUFFIX(int64_t gates, const REAL* weight, int64_t units, int64_t depth,                  \
                                int64_t unit_stride, int64_t depth_stride, REAL* packed, int64_t threads) {       \
    pack_gates<REAL>(gates, weight, units, depth, unit_stride, depth_stride, packed, threads);                    \
  }                                                                                                               \
  extern "C" void add_column_sums_##SUFFIX(const REAL* matrix, int64_t rows, int64_t columns, REAL* sums,         \
                                           int64_t threads) {                                                     \
    add_column_sums<REAL>(matrix, rows, columns, sums, threads);                                                  \
  }                                                                                                               \
  extern "C" int64_t lanes_##SUFFIX() { return lanes<REAL>; }

FOR_PACK(f32, float)
FOR_PACK(f64, double)
