// What the kernels share: vectors, dot products of a large matrix with a few vectors, and work for all
// cores.
//
// Vectors are those of GCC and Clang (`vector_size`), so the same source serves AVX-512, AVX2 and
// NEON. What these kernels are bound by is memory: weights, keys and values must pass by once, in
// order, in long rows, on all cores.

#ifndef JAXKV_COMMON_H_
#define JAXKV_COMMON_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxkv {

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;
using Int32s = ffi::Buffer<ffi::S32>;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
// Accumulators of one tile of dot products: half of the registers.
constexpr int kRows = 4, kColumns = 4;
#else
constexpr int kLanes = 8;
constexpr int kRows = 4, kColumns = 2;
#endif

// The logit of what a query does not see.
constexpr float kMasked = -1e30f;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));

// Reads and writes all lanes of a vector, or the first few: the others are zeros.
struct All {
  template <typename V = Vec>
  V load(const void* from) const {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  void store(void* to, Vec v) const { std::memcpy(to, &v, sizeof v); }
  template <typename V>
  V others(V v, float) const {
    return v;
  }
};

struct Some {
  int64_t count;
  template <typename V = Vec>
  V load(const void* from) const {
    V v = {};
    std::memcpy(&v, from, count * 4);
    return v;
  }
  void store(void* to, Vec v) const { std::memcpy(to, &v, count * 4); }
  // The vector with `x` in the other lanes.
  template <typename V>
  V others(V v, float x) const {
    for (int64_t i = count; i < kLanes; ++i) v[i] = x;
    return v;
  }
};

// Calls f(i, lanes) for every vector of a row.
template <typename F>
inline void for_vectors(int64_t length, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) f(i, All());
  if (i < length) f(i, Some{length - i});
}

inline Vec all(float x) { return x - Vec{}; }

// Adds up lanes in `N` vectors at once; lane i of the result is the sum of vector i. A stage pairs
// two vectors, and adds neighbouring groups of `width` lanes in each.
template <int width, int... I>
inline Vec fold(Vec a, Vec b, std::integer_sequence<int, I...>) {
  constexpr Ints first = {(I / width % 2 == 0 ? -1 : 0)...};
  Vec other = first ? b : a;
  return (first ? a : b) + __builtin_shufflevector(other, other, (I ^ width)...);
}

template <int N, int width = 1>
inline Vec sums(Vec* v) {
  if constexpr (width == kLanes) {
    return v[0];
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
    for (int i = 0; i < N; i += 2) v[i / 2] = fold<width>(v[i], v[N > 1 ? i + 1 : i], lanes);
    return sums<(N > 1 ? N / 2 : 1), 2 * width>(v);
  }
}

inline float sum(Vec v) { return sums<1>(&v)[0]; }

// exp for arguments that are not positive: 2^n e^r, |r| <= ln 2 / 2. Relative error below 2e-7.
inline Vec exp_negative(Vec x) {
  const Vec least = all(-87.0f);
  x = x < least ? least : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer.
  Vec shifted = x * 1.44269504f + magic;
  Bits exponent;
  std::memcpy(&exponent, &shifted, sizeof shifted);
  Vec n = shifted - magic;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  Bits bits;
  std::memcpy(&bits, &y, sizeof y);
  bits += exponent << 23;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// out[c * out_stride + r] = sum_i matrix[r * stride + i] * vectors[c * vector_stride + i]
//
// Meanwhile `ahead` rows from `next` are fetched: hardware does not look ahead over short rows.
template <int R, int C, int ahead>
inline void tile(const float* matrix, int64_t stride, const float* vectors, int64_t vector_stride,
                 int64_t length, const float* next, float* out, int64_t out_stride) {
  constexpr int kSums = R * C > kLanes / 2 ? kLanes : R * C > 4 ? 8 : R * C > 1 ? 4 : 1;
  Vec sum[kSums] = {};
  for_vectors(length, [&](int64_t i, auto lanes) {
    for (int r = 0; r < ahead; ++r) __builtin_prefetch(next + r * stride + i);
    Vec m[R];
    for (int r = 0; r < R; ++r) m[r] = lanes.load(matrix + r * stride + i);
    for (int c = 0; c < C; ++c) {
      Vec v = lanes.load(vectors + c * vector_stride + i);
      for (int r = 0; r < R; ++r) sum[c * R + r] += m[r] * v;
    }
  });
  Vec all = sums<kSums>(sum);
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) out[c * out_stride + r] = all[c * R + r];
}

template <int C>
using Count = std::integral_constant<int, C>;

// Calls f with a number from 1 to kColumns as a constant.
template <typename F>
inline void with_columns(int64_t columns, const F& f) {
  switch (columns) {
    case 1: return f(Count<1>());
    case 2: return f(Count<2>());
    case 3: return f(Count<3>());
    default: return f(Count<kColumns>());
  }
}

// `R` rows with any number of vectors, in passes. The rows that are `next` further on are fetched in
// the first two.
template <int R>
inline void tiles(const float* matrix, int64_t stride, const float* vectors, int64_t vector_stride,
                  int64_t columns, int64_t length, int64_t next, float* out, int64_t out_stride) {
  auto pass = [&](int64_t c, int64_t skip, auto ahead) {
    with_columns(std::min<int64_t>(columns - c, kColumns), [&](auto count) {
      tile<R, count, ahead>(matrix, stride, vectors + c * vector_stride, vector_stride, length,
                            matrix + (next + skip) * stride, out + c * out_stride, out_stride);
    });
  };
  if (columns <= kColumns) return pass(0, 0, Count<R>());
  pass(0, 0, Count<(R + 1) / 2>());
  pass(kColumns, R / 2, Count<(R + 1) / 2>());
  for (int64_t c = 2 * kColumns; c < columns; c += kColumns) pass(c, 0, Count<0>());
}

// Products of `rows` rows of a matrix with `columns` vectors.
inline void products(const float* matrix, int64_t stride, int64_t rows, const float* vectors,
                     int64_t vector_stride, int64_t columns, int64_t length, float* out,
                     int64_t out_stride) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows)
    tiles<kRows>(matrix + r * stride, stride, vectors, vector_stride, columns, length,
                 r + 2 * kRows <= rows ? kRows : 0, out + r, out_stride);
  for (; r < rows; ++r)
    tiles<1>(matrix + r * stride, stride, vectors, vector_stride, columns, length, 0, out + r,
             out_stride);
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// What several units of work do together, counted down.
using Left = std::atomic<int64_t>;

// Whether this unit was the last; then it sees what the others did.
inline bool last_of(Left& left) { return left.fetch_sub(1, std::memory_order_acq_rel) == 1; }

// Waits for units with lower numbers: these have been taken, and wait for lower ones at most.
inline void wait_for(const Left& left) {
  while (left.load(std::memory_order_acquire) > 0) relax();
}

// Calls work(unit) for every unit; they are taken in order. The calling thread works too and never
// waits for a task that has not started: all threads of the pool may be inside of calls like this.
template <typename Work>
void parallel(ffi::ThreadPool& pool, int64_t units, const Work& work) {
  const int64_t helpers = std::min(pool.num_threads(), units) - 1;
  if (helpers <= 0) {
    for (int64_t unit = 0; unit < units; ++unit) work(unit);
    return;
  }
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  // A task that starts late finds no unit left, and does not touch `work`, which is gone by then.
  auto run = [state, units, &work] {
    for (int64_t unit; (unit = state->next.fetch_add(1)) < units;) {
      work(unit);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(run)(run));
  run();
  while (state->done.load(std::memory_order_acquire) < units) relax();
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jaxkv

#endif  // JAXKV_COMMON_H_
