// Work for threads: runs of elements dealt out to as many threads as the work deserves.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace encore {

// A thread is worth waking for about this many bytes.
constexpr int64_t BYTES_PER_THREAD = 1 << 17;

inline int threads_for(int64_t bytes, int64_t most) {
  if (omp_in_parallel()) return 1;
  return static_cast<int>(std::max<int64_t>(1, std::min(most, bytes / BYTES_PER_THREAD)));
}

// `body(begin, end, thread)` for shares of `count` elements; shares begin at multiples of `unit`.
template <typename Body>
void in_shares(int64_t count, int64_t unit, int threads, const Body& body) {
  if (threads <= 1) {
    body(int64_t{0}, count, 0);
    return;
  }
  const int64_t units = (count + unit - 1) / unit;
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), used = omp_get_num_threads();
    const int64_t begin = units * thread / used * unit, end = std::min(count, units * (thread + 1) / used * unit);
    if (begin < end) body(begin, end, static_cast<int>(thread));
  }
}

}  // namespace encore
