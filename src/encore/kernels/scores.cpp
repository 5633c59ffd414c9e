// Additive attention's scores and their gradients, with nothing of the middle in memory.
//
// A score is weight . tanh(n(query + key)), n being a LayerNorm or nothing. Of B x Tq x Tk x H sums under the tanh, this
// file holds a vector register at a time; with a LayerNorm, a row. Backward recomputes them and adds their gradients up.
//
// Key rows of all sequences, one after the other, are dealt out to threads in equal runs. The gradient of a key then
// belongs to one thread, and that of a sequence's queries to one or, where a run ends inside a sequence, to a few, whose
// parts are added up when all have come to their end. Sums are taken in stages, so that long ones round little.
//
// A LayerNorm's mean costs nothing: queries and keys are centred when they are fetched, and so is every sum of them.
//
// Compute type `real` is float or double; `store` is how tensors lie in memory (bfloat16 and half are computed in
// float). Nothing is allocated here: the workspace comes from the caller, who asks `workspace_rows` for its size.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

template <typename real>
using Vec = at::vec::Vectorized<real>;

template <typename real>
constexpr int64_t lanes = Vec<real>::size();

// Keys that are gone through with a tile of queries before the next tile.
constexpr int64_t KEYS = 32;
// Queries of a tile: each key is fetched once for all of them.
constexpr int64_t TILE = 4;

// ---- tanh ----------------------------------------------------------------------------------------------------------

inline Vec<double> squash(Vec<double> x) { return x.tanh(); }

// A quotient of polynomials of degrees 13 and 6, fitted to the least relative error (4e-9) up to where tanh rounds to 1;
// with roundings, under 1 unit in the last place on average and 5 at most. NaN stays NaN.
inline Vec<float> squash(Vec<float> x) {
  constexpr float END = 8.6f;
  constexpr float ABOVE[] = {5.694527488e-11f, -2.105594987e-08f, 1.135321781e-05f, 3.122684546e-03f, 1.310070306e-01f, 1};
  constexpr float BELOW[] = {2.456952259e-02f, 4.643403292e-01f, 1};
  x = at::vec::clamp(x, Vec<float>(-END), Vec<float>(END));
  const Vec<float> u = x * x;
  Vec<float> above(-9.611496982e-14f), below(2.573581005e-04f);
#pragma GCC unroll 8
  for (const float c : ABOVE) above = at::vec::fmadd(above, u, Vec<float>(c));
#pragma GCC unroll 8
  for (const float c : BELOW) below = at::vec::fmadd(below, u, Vec<float>(c));
  above = above * x;
#if defined(CPU_CAPABILITY_AVX512)
  // A division takes as long as all of the above: an estimate and one correction are as good.
  const __m512 estimate = _mm512_rcp14_ps(below);
  const __m512 quotient = _mm512_mul_ps(above, estimate);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(quotient, below, above), estimate, quotient);
#else
  return above / below;
#endif
}

// The derivative of tanh where it is `t`. Rounding must not turn its sign.
template <typename real>
inline Vec<real> slope(Vec<real> t) {
  return at::vec::clamp_min(Vec<real>(1) - t * t, Vec<real>(0));
}

template <typename real>
inline real total(Vec<real> x) {
  return at::vec::vec_reduce_all<real>([](Vec<real> a, Vec<real> b) { return a + b; }, x);
}

// ---- a call --------------------------------------------------------------------------------------------------------

template <typename store>
struct Tensor3 {
  store* data;
  int64_t strides[3];

  store* row(int64_t i, int64_t j) const { return data + i * strides[0] + j * strides[1]; }
};

template <typename store>
struct Vector {
  const store* data;
  int64_t stride;
};

template <typename real, typename store>
struct Scores {
  int64_t batch, queries, keys, hidden, threads, normalised;
  double eps;
  real* workspace;
  Tensor3<const store> query, key;
  Vector<store> weight, bias, norm_weight, norm_bias; // no data where there is none
  store* scores;                                      // [batch, queries, keys]
  // Backward only. Results without data are not needed.
  Tensor3<const store> grad;
  store *grad_keys, *grad_query, *grad_weight, *grad_bias, *grad_norm_weight, *grad_norm_bias;
  int64_t add_keys; // to what `grad_keys` holds
};

struct Run {
  int64_t begin, end;
};

inline Run run_of(int64_t rows, int64_t thread, int64_t threads) {
  return {rows * thread / threads, rows * (thread + 1) / threads};
}

// Where a thread keeps what, in rows of whole vectors.
enum Sum { WEIGHT, SCALE, SHIFT, BIAS, SUMS };

template <typename real>
struct Room {
  int64_t width; // of a row
  real* begin;

  Room(real* workspace, int64_t hidden, int64_t queries, bool backward, int64_t thread)
      : width(padded(hidden)), begin(workspace + thread * rows(queries, backward) * padded(hidden)), queries_(queries) {}

  static int64_t padded(int64_t hidden) { return (hidden + lanes<real> - 1) / lanes<real> * lanes<real>; }
  static int64_t rows(int64_t queries, bool backward) {
    return 3 + KEYS + queries + (backward ? KEYS + 2 * TILE + 3 * SUMS + 2 * queries : 0);
  }

  real* weight() const { return row(0); }
  real* scale() const { return row(1); }
  real* shift() const { return row(2); }
  real* keys() const { return row(3); }
  real* query() const { return row(3 + KEYS); }
  real* grad_keys() const { return after(0); }
  real* stage() const { return after(KEYS); }
  real* scratch() const { return after(KEYS + TILE); }
  // Three stages of every sum over all pairs: of a tile and its keys, of a sequence, of all that the thread does.
  real* sums(int level, int sum) const { return after(KEYS + 2 * TILE + level * SUMS + sum); }
  // Gradients of the queries of a sequence that begins before this thread's run (`late`), or inside of it.
  real* grad_query(bool late) const { return after(KEYS + 2 * TILE + 3 * SUMS + (late ? queries_ : 0)); }

  void clear(real* rows, int64_t count) const { std::memset(rows, 0, count * width * sizeof(real)); }

 private:
  real* row(int64_t index) const { return begin + index * width; }
  real* after(int64_t index) const { return row(3 + KEYS + queries_ + index); }
  int64_t queries_;
};

// A row in the compute type, padded with zeros.
template <typename real, typename store>
inline void fetch(real* to, const store* from, int64_t stride, int64_t count, int64_t width) {
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<real>(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<real>(from[i * stride]);
  }
  for (int64_t i = count; i < width; ++i) to[i] = 0;
}

template <typename real, typename store>
inline void write(store* to, const real* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<store>(from[i]);
}

template <typename real>
inline void add(real* to, const real* from, int64_t width) {
  for (int64_t i = 0; i < width; i += lanes<real>) (Vec<real>::loadu(to + i) + Vec<real>::loadu(from + i)).store(to + i);
}

// Less its mean. The padding stays zero.
template <typename real>
inline void centre(real* row, int64_t count, int64_t width) {
  Vec<real> sum(0);
  for (int64_t i = 0; i < width; i += lanes<real>) sum = sum + Vec<real>::loadu(row + i);
  const real mean = total(sum) / count;
  for (int64_t i = 0; i < count; ++i) row[i] -= mean;
}

template <typename real, typename store>
void fetch_weights(const Scores<real, store>& call, const Room<real>& room) {
  fetch(room.weight(), call.weight.data, call.weight.stride, call.hidden, room.width);
  const auto optional = [&](real* to, const Vector<store>& from, real otherwise) {
    if (from.data) {
      fetch(to, from.data, from.stride, call.hidden, room.width);
    } else {
      for (int64_t i = 0; i < room.width; ++i) to[i] = i < call.hidden ? otherwise : 0;
    }
  };
  optional(room.scale(), call.norm_weight, 1);
  optional(room.shift(), call.norm_bias, 0);
}

template <typename real, typename store>
void fetch_queries(const Scores<real, store>& call, const Room<real>& room, int64_t b) {
  for (int64_t q = 0; q < call.queries; ++q) {
    real* to = room.query() + q * room.width;
    fetch(to, call.query.row(b, q), call.query.strides[2], call.hidden, room.width);
    if (call.bias.data)
      for (int64_t i = 0; i < call.hidden; ++i) to[i] += static_cast<real>(call.bias.data[i * call.bias.stride]);
    if (call.normalised) centre(to, call.hidden, room.width);
  }
}

template <typename real>
struct Rows {
  real* data;
  int64_t stride;
  real* operator[](int64_t i) const { return data + i * stride; }
};

// Some keys of a sequence: where they are, if they can be read there.
template <typename real, typename store>
Rows<const real> fetch_keys(const Scores<real, store>& call, const Room<real>& room, int64_t b, int64_t k, int64_t n) {
  if constexpr (std::is_same_v<real, store>) {
    if (!call.normalised && call.key.strides[2] == 1 && room.width == call.hidden)
      return {call.key.row(b, k), call.key.strides[1]};
  }
  for (int64_t i = 0; i < n; ++i) {
    real* to = room.keys() + i * room.width;
    fetch(to, call.key.row(b, k + i), call.key.strides[2], call.hidden, room.width);
    if (call.normalised) centre(to, call.hidden, room.width);
  }
  return {room.keys(), room.width};
}

// ---- tiles: some queries and one key -------------------------------------------------------------------------------

// What turns a centred sum into one of variance 1.
template <typename real, int queries>
inline void rates(const real* query, const real* key, int64_t width, int64_t hidden, double eps, real* rate) {
  Vec<real> squares[queries];
  for (auto& sum : squares) sum = Vec<real>(0);
  for (int64_t i = 0; i < width; i += lanes<real>) {
    const Vec<real> k = Vec<real>::loadu(key + i);
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
      const Vec<real> x = Vec<real>::loadu(query + r * width + i) + k;
      squares[r] = at::vec::fmadd(x, x, squares[r]);
    }
  }
  for (int r = 0; r < queries; ++r)
    rate[r] = 1 / std::sqrt(total(squares[r]) / hidden + static_cast<real>(eps));
}

template <typename real, int queries, bool normalised>
inline void score(const Room<real>& room, const real* query, const real* key, int64_t hidden, double eps, real* scores) {
  real rate[queries];
  if constexpr (normalised) rates<real, queries>(query, key, room.width, hidden, eps, rate);
  Vec<real> sum[queries];
  for (auto& s : sum) s = Vec<real>(0);
  for (int64_t i = 0; i < room.width; i += lanes<real>) {
    const Vec<real> k = Vec<real>::loadu(key + i), weight = Vec<real>::loadu(room.weight() + i);
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
      Vec<real> x = Vec<real>::loadu(query + r * room.width + i) + k;
      if constexpr (normalised)
        x = at::vec::fmadd(x * Vec<real>(rate[r]), Vec<real>::loadu(room.scale() + i), Vec<real>::loadu(room.shift() + i));
      sum[r] = at::vec::fmadd(weight, squash(x), sum[r]);
    }
  }
  for (int r = 0; r < queries; ++r) scores[r] = total(sum[r]);
}

// Adds to the gradients of queries (`room.stage()`) and key, and to the sums of the first level.
template <typename real, int queries>
inline void differentiate(const Room<real>& room, const real* query, const real* key, const real* grad, real* grad_key) {
  real *stage = room.stage(), *for_weight = room.sums(0, WEIGHT);
  for (int64_t i = 0; i < room.width; i += lanes<real>) {
    const Vec<real> k = Vec<real>::loadu(key + i), weight = Vec<real>::loadu(room.weight() + i);
    Vec<real> to_key = Vec<real>::loadu(grad_key + i), to_weight = Vec<real>::loadu(for_weight + i);
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
      const Vec<real> t = squash(Vec<real>::loadu(query + r * room.width + i) + k), g(grad[r]);
      const Vec<real> found = g * weight * slope(t);
      to_weight = at::vec::fmadd(g, t, to_weight);
      to_key = to_key + found;
      (Vec<real>::loadu(stage + r * room.width + i) + found).store(stage + r * room.width + i);
    }
    to_key.store(grad_key + i);
    to_weight.store(for_weight + i);
  }
}

template <typename real, int queries>
inline void differentiate_normalised(const Room<real>& room, const real* query, const real* key, const real* grad,
                                     real* grad_key, int64_t hidden, double eps) {
  real rate[queries];
  rates<real, queries>(query, key, room.width, hidden, eps, rate);
  real *stage = room.stage(), *scratch = room.scratch();
  Vec<real> sum[queries], along[queries];
  for (int r = 0; r < queries; ++r) sum[r] = along[r] = Vec<real>(0);
  for (int64_t i = 0; i < room.width; i += lanes<real>) {
    const Vec<real> k = Vec<real>::loadu(key + i), weight = Vec<real>::loadu(room.weight() + i);
    const Vec<real> scale = Vec<real>::loadu(room.scale() + i), shift = Vec<real>::loadu(room.shift() + i);
    Vec<real> to[3];
    for (int s : {WEIGHT, SCALE, SHIFT}) to[s] = Vec<real>::loadu(room.sums(0, s) + i);
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
      const Vec<real> x = (Vec<real>::loadu(query + r * room.width + i) + k) * Vec<real>(rate[r]), g(grad[r]);
      const Vec<real> t = squash(at::vec::fmadd(x, scale, shift));
      const Vec<real> found = g * weight * slope(t), inner = found * scale;
      to[WEIGHT] = at::vec::fmadd(g, t, to[WEIGHT]);
      to[SCALE] = at::vec::fmadd(found, x, to[SCALE]);
      to[SHIFT] = to[SHIFT] + found;
      sum[r] = sum[r] + inner;
      along[r] = at::vec::fmadd(inner, x, along[r]);
      inner.store(scratch + r * room.width + i);
    }
    for (int s : {WEIGHT, SCALE, SHIFT}) to[s].store(room.sums(0, s) + i);
  }
  Vec<real> mean[queries], slant[queries];
  for (int r = 0; r < queries; ++r) {
    mean[r] = Vec<real>(total(sum[r]) / hidden);
    slant[r] = Vec<real>(total(along[r]) / hidden * rate[r]);
  }
  for (int64_t i = 0; i < room.width; i += lanes<real>) {
    const Vec<real> k = Vec<real>::loadu(key + i);
    Vec<real> to_key = Vec<real>::loadu(grad_key + i);
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
      const Vec<real> x = Vec<real>::loadu(query + r * room.width + i) + k;
      const Vec<real> inner = Vec<real>::loadu(scratch + r * room.width + i);
      const Vec<real> found = (inner - mean[r] - x * slant[r]) * Vec<real>(rate[r]);
      to_key = to_key + found;
      (Vec<real>::loadu(stage + r * room.width + i) + found).store(stage + r * room.width + i);
    }
    to_key.store(grad_key + i);
  }
}

// `body(first, std::integral_constant<int, n>)` for tiles of 4 queries, then for what is left of them.
template <typename Body>
inline void tiles(int64_t queries, const Body& body) {
  int64_t q = 0;
  for (; q + TILE <= queries; q += TILE) body(q, std::integral_constant<int, TILE>{});
  if (queries - q >= 2) {
    body(q, std::integral_constant<int, 2>{});
    q += 2;
  }
  if (queries - q == 1) body(q, std::integral_constant<int, 1>{});
}

// `body(thread, threads)`, on several of them.
template <typename Body>
void together(int64_t threads, const Body& body) {
  if (threads == 1 || omp_in_parallel()) {
    body(0, 1);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  body(omp_get_thread_num(), omp_get_num_threads());
}

inline void barrier(int64_t threads) {
  if (threads > 1) {
#pragma omp barrier
  }
}

// `body(sequence, first key, last key)` for each sequence of a run of key rows.
template <typename Body>
inline void sequences(Run run, int64_t keys, const Body& body) {
  for (int64_t row = run.begin; row < run.end;) {
    const int64_t b = row / keys, first = row % keys, last = std::min(keys, first + run.end - row);
    body(b, first, last);
    row += last - first;
  }
}

// ---- forward and backward ------------------------------------------------------------------------------------------

template <typename real, typename store>
void forward(const Scores<real, store>& call) {
  together(call.threads, [&](int64_t thread, int64_t threads) {
    const Room<real> room(call.workspace, call.hidden, call.queries, false, thread);
    fetch_weights(call, room);
    sequences(run_of(call.batch * call.keys, thread, threads), call.keys, [&](int64_t b, int64_t first, int64_t last) {
      fetch_queries(call, room, b);
      for (int64_t k = first; k < last; k += KEYS) {
        const int64_t n = std::min(KEYS, last - k);
        const Rows<const real> keys = fetch_keys(call, room, b, k, n);
        tiles(call.queries, [&](int64_t q, auto count) {
          const real* query = room.query() + q * room.width;
          real found[count];
          for (int64_t i = 0; i < n; ++i) {
            if (call.normalised) score<real, count, true>(room, query, keys[i], call.hidden, call.eps, found);
            else score<real, count, false>(room, query, keys[i], call.hidden, call.eps, found);
            for (int r = 0; r < count; ++r)
              call.scores[(b * call.queries + q + r) * call.keys + k + i] = static_cast<store>(found[r]);
          }
        });
      }
    });
  });
}

// Gradients of keys some rows at a time: added up where they will lie, if that can be, or else in the room.
template <typename real, typename store>
struct KeyGradients {
  const Scores<real, store>& call;
  const Room<real>& room;
  Rows<real> rows;
  store* result;
  int64_t count;

  KeyGradients(const Scores<real, store>& call, const Room<real>& room, int64_t first, int64_t count)
      : call(call), room(room), rows{room.grad_keys(), room.width},
        result(call.grad_keys ? call.grad_keys + first * call.hidden : nullptr), count(count) {
    if constexpr (std::is_same_v<real, store>) {
      if (result && room.width == call.hidden) rows.data = result;
    }
    if (!call.add_keys) {
      room.clear(rows.data, count);
    } else if (rows.data == room.grad_keys()) {
      for (int64_t i = 0; i < count; ++i) fetch(rows[i], result + i * call.hidden, 1, call.hidden, room.width);
    }
  }

  ~KeyGradients() {
    if (!result || rows.data != room.grad_keys()) return;
    for (int64_t i = 0; i < count; ++i) write(result + i * call.hidden, rows[i], call.hidden);
  }
};

template <typename real, typename store>
struct Backward {
  const Scores<real, store>& call;
  const Room<real>& room;

  void keys_of_a_sequence(int64_t b, int64_t first, int64_t last) const {
    fetch_queries(call, room, b);
    real* grad_query = room.grad_query(first > 0);
    room.clear(grad_query, call.queries);
    room.clear(room.sums(1, 0), SUMS);
    for (int64_t k = first; k < last; k += KEYS) some_keys(b, k, std::min(KEYS, last - k), grad_query);
    for (int s : {WEIGHT, SCALE, SHIFT}) add(room.sums(2, s), room.sums(1, s), room.width);
    if (first == 0 && last == call.keys)
      for (int64_t q = 0; q < call.queries; ++q) finish_query(b, q, grad_query + q * room.width);
    add(room.sums(2, BIAS), room.sums(1, BIAS), room.width);
  }

  void finish_query(int64_t b, int64_t q, const real* gradient) const {
    add(room.sums(1, BIAS), gradient, room.width);
    if (call.grad_query) write(call.grad_query + (b * call.queries + q) * call.hidden, gradient, call.hidden);
  }

 private:
  void some_keys(int64_t b, int64_t k, int64_t n, real* grad_query) const {
    const Rows<const real> keys = fetch_keys(call, room, b, k, n);
    const KeyGradients<real, store> grad_keys(call, room, b * call.keys + k, n);
    tiles(call.queries, [&](int64_t q, auto count) {
      room.clear(room.stage(), count);
      room.clear(room.sums(0, 0), SUMS);
      const real* query = room.query() + q * room.width;
      real grad[count];
      for (int64_t i = 0; i < n; ++i) {
        for (int r = 0; r < count; ++r)
          grad[r] = static_cast<real>(call.grad.row(b, q + r)[(k + i) * call.grad.strides[2]]);
        if (call.normalised)
          differentiate_normalised<real, count>(room, query, keys[i], grad, grad_keys.rows[i], call.hidden, call.eps);
        else
          differentiate<real, count>(room, query, keys[i], grad, grad_keys.rows[i]);
      }
      for (int r = 0; r < count; ++r) add(grad_query + (q + r) * room.width, room.stage() + r * room.width, room.width);
      for (int s : {WEIGHT, SCALE, SHIFT}) add(room.sums(1, s), room.sums(0, s), room.width);
    });
  }
};

template <typename real, typename store>
void backward(const Scores<real, store>& call) {
  const int64_t rows = call.batch * call.keys;
  together(call.threads, [&](int64_t thread, int64_t threads) {
    const auto room_of = [&](int64_t other) {
      return Room<real>(call.workspace, call.hidden, call.queries, true, other);
    };
    const Room<real> room = room_of(thread);
    fetch_weights(call, room);
    room.clear(room.sums(2, 0), SUMS);
    const Backward<real, store> walk{call, room};
    sequences(run_of(rows, thread, threads), call.keys,
              [&](int64_t b, int64_t first, int64_t last) { walk.keys_of_a_sequence(b, first, last); });
    barrier(threads);
    // Sequences that several threads had a part in: their queries are dealt out anew.
    room.clear(room.sums(1, BIAS), 1);
    const Run mine = run_of(call.queries, thread, threads);
    for (int64_t owner = 0; owner < threads; ++owner) {
      const Run run = run_of(rows, owner, threads);
      const int64_t b = (run.end - 1) / call.keys;
      const bool whole = run.end % call.keys == 0;
      if (run.begin == run.end || whole || b * call.keys < run.begin) continue;
      for (int64_t q = mine.begin; q < mine.end; ++q) {
        real* gradient = room_of(owner).grad_query(false) + q * room.width;
        for (int64_t other = owner + 1; other < threads; ++other) {
          const Run theirs = run_of(rows, other, threads);
          if (theirs.begin < theirs.end && theirs.begin < (b + 1) * call.keys)
            add(gradient, room_of(other).grad_query(true) + q * room.width, room.width);
        }
        walk.finish_query(b, q, gradient);
      }
    }
    add(room.sums(2, BIAS), room.sums(1, BIAS), room.width);
    barrier(threads);
    if (thread > 0) return;
    store* results[SUMS] = {call.grad_weight, call.grad_norm_weight, call.grad_norm_bias, call.grad_bias};
    for (int s = 0; s < SUMS; ++s) {
      for (int64_t other = 1; other < threads; ++other) add(room.sums(2, s), room_of(other).sums(2, s), room.width);
      if (results[s]) write(results[s], room.sums(2, s), call.hidden);
    }
  });
}

} // namespace

// ---- the names Python calls ----------------------------------------------------------------------------------------

#define FOR_STORE(SUFFIX, REAL, STORE)                                                                         \
  extern "C" void scores_forward_##SUFFIX(const Scores<REAL, STORE>* call) { forward(*call); }                \
  extern "C" void scores_backward_##SUFFIX(const Scores<REAL, STORE>* call) { backward(*call); }              \
  extern "C" int64_t workspace_bytes_##SUFFIX(int64_t hidden, int64_t queries, int64_t threads, int64_t back) { \
    return threads * Room<REAL>::rows(queries, back) * Room<REAL>::padded(hidden) * sizeof(REAL);             \
  }

FOR_STORE(f32, float, float)
FOR_STORE(f64, double, double)
FOR_STORE(bf16, float, c10::BFloat16)
FOR_STORE(f16, float, c10::Half)
