// Decode steps and products with few rows on CPU, for XLA's foreign function interface.
//
// Both are bound by memory: what counts is that weights, keys and values pass by once, in order, in
// long rows, on all cores. One inner loop does all three: `products`, dot products of rows of a
// large matrix with a few vectors.
//
// Vectors are those of GCC and Clang (`vector_size`), so the same source serves AVX-512, AVX2 and
// NEON. Work is cut into units that any thread of XLA's pool may take.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRows = 4, kColumns = 4;  // Accumulators of one tile: half of the registers.
#else
constexpr int kLanes = 8;
constexpr int kRows = 4, kColumns = 2;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

constexpr float kMasked = -1e30f;

// Reads and writes all lanes of a vector, or the first few: the others are zeros.
struct All {
  template <typename V = Vec>
  V load(const void* from) const {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  void store(void* to, Vec v) const { std::memcpy(to, &v, sizeof v); }
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
  Ints exponent;
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
  Ints bits;
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

// Calls work(unit) for every unit. The calling thread works too and never waits for a task that
// has not started: all threads of the pool may be inside of calls like this one.
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
  while (state->done.load(std::memory_order_acquire) < units) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

using Floats = ffi::Buffer<ffi::F32>;
using Int32s = ffi::Buffer<ffi::S32>;

// x [rows, in], weight [out, in] -> [rows, out]
ffi::Error Linear(ffi::ThreadPool pool, Floats x, Floats weight, ffi::Result<Floats> y) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = weight.dimensions()[0];
  const float* w = weight.typed_data();
  // Units of at least 64 KB, so that handing them out costs little.
  const int64_t least = std::max<int64_t>(1, 16384 / std::max<int64_t>(in, 1));
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  int64_t each = std::max(least, ceil_div(out, 8 * threads));
  each = ceil_div(each, kRows) * kRows;
  parallel(pool, ceil_div(out, each), [&](int64_t unit) {
    const int64_t start = unit * each, count = std::min(each, out - start);
    products(w + start * in, in, count, x.typed_data(), in, rows, in, y->typed_data() + start, out);
  });
  return ffi::Error::Success();
}

struct Shape {
  int64_t batch, heads, kv_heads, group, slots, dim;
};

// See `decode` in decode.py. `weights` and `parts` are scratch: raw exponentials [batch, heads,
// slots], and per part of the slots a maximum, a sum and an output [.., parts, 2 + dim].
ffi::Error Decode(ffi::ThreadPool pool, Floats queries, Floats key, Floats value, Floats keys_in,
                  Floats values_in, Int32s positions, Int32s free, Int32s position, Floats onto,
                  ffi::Result<Floats> out, ffi::Result<Floats> keys, ffi::Result<Floats> values,
                  ffi::Result<Floats> received, ffi::Result<Floats> weights,
                  ffi::Result<Floats> parts, int64_t part, int64_t window, int64_t reduction,
                  float power) {
  if (keys_in.typed_data() != keys->typed_data() || values_in.typed_data() != values->typed_data())
    return ffi::Error::Internal("keys and values must be changed in place");
  const auto q = queries.dimensions(), k = keys->dimensions();
  const Shape n{q[0], q[1], k[1], q[1] / k[1], k[2], k[3]};
  const int64_t count = ceil_div(n.slots, part), record = 2 + n.dim;
  const bool collects = received->element_count() > 0, adds = onto.element_count() > 0;
  const float scale = 1.0f / std::sqrt(static_cast<float>(n.dim));

  parallel(pool, n.batch * n.kv_heads * count, [&](int64_t unit) {
    const int64_t row = unit / count, b = row / n.kv_heads, first = (unit % count) * part;
    const int64_t length = std::min(part, n.slots - first);
    float* K = keys->typed_data() + (row * n.slots + first) * n.dim;
    float* V = values->typed_data() + row * n.dim * n.slots + first;
    const int64_t slot = free.typed_data()[row] - first;
    if (slot >= 0 && slot < length) {
      std::memcpy(K + slot * n.dim, key.typed_data() + row * n.dim, n.dim * sizeof(float));
      for (int64_t d = 0; d < n.dim; ++d)
        V[d * n.slots + slot] = value.typed_data()[row * n.dim + d];
    }
    const int32_t now = position.typed_data()[b];
    const int32_t* at = positions.typed_data() + row * n.slots + first;
    float* W = weights->typed_data() + row * n.group * n.slots + first;
    float* P = parts->typed_data() + (row * n.group * count + unit % count) * record;
    products(K, n.dim, length, queries.typed_data() + row * n.group * n.dim, n.dim, n.group, n.dim,
             W, n.slots);
    const int32_t oldest = window > 0 ? now - static_cast<int32_t>(window) : -1;
    for (int64_t g = 0; g < n.group; ++g) {
      float* w = W + g * n.slots;
      float* p = P + g * count * record;
      Vec top = all(kMasked);
      for_vectors(length, [&](int64_t s, auto lanes) {
        // Values come next.
        if (g == 0)
          for (int d = 0; d < kRows; ++d) __builtin_prefetch(V + d * n.slots + s);
        Ints where = lanes.template load<Ints>(at + s);
        Ints seen = (where >= 0) & (where <= now) & (where > oldest);
        Vec logits = seen ? lanes.load(w + s) * scale : all(kMasked);
        if constexpr (std::is_same_v<decltype(lanes), Some>)
          for (int64_t i = lanes.count; i < kLanes; ++i) logits[i] = kMasked;
        top = top > logits ? top : logits;
        lanes.store(w + s, logits);
      });
      float highest = kMasked;
      for (int i = 0; i < kLanes; ++i) highest = std::max(highest, top[i]);
      Vec total = {};
      for_vectors(length, [&](int64_t s, auto lanes) {
        Vec logits = lanes.load(w + s);
        Vec raised = logits > all(kMasked) ? exp_negative(logits - highest) : Vec{};
        if constexpr (std::is_same_v<decltype(lanes), Some>)
          for (int64_t i = lanes.count; i < kLanes; ++i) raised[i] = 0;
        total += raised;
        lanes.store(w + s, raised);
      });
      p[0] = highest;
      p[1] = sum(total);
    }
    products(V, n.slots, n.dim, W, n.slots, n.group, length, P + 2, count * record);
  });

  parallel(pool, n.batch * n.kv_heads, [&](int64_t row) {
    float* P = parts->typed_data() + row * n.group * count * record;
    float* o = out->typed_data() + row * n.group * n.dim;
    for (int64_t g = 0; g < n.group; ++g, P += count * record, o += n.dim) {
      float highest = kMasked, total = 0;
      for (int64_t c = 0; c < count; ++c) highest = std::max(highest, P[c * record]);
      for (int64_t c = 0; c < count; ++c) {
        P[c * record] = std::exp(P[c * record] - highest);
        total += P[c * record] * P[c * record + 1];
      }
      std::fill(o, o + n.dim, 0.0f);
      for (int64_t c = 0; c < count; ++c) {
        // From here on the first number of a part is what its exponentials are multiplied by.
        float& factor = P[c * record];
        factor = highest > kMasked ? factor / total : 0.0f;
        for (int64_t d = 0; d < n.dim; ++d) o[d] += factor * P[c * record + 2 + d];
      }
    }
    if (!collects) return;
    P = parts->typed_data() + row * n.group * count * record;
    const float* W = weights->typed_data() + row * n.group * n.slots;
    float* to = received->typed_data() + row * n.slots;
    const float* from = adds ? onto.typed_data() + row * n.slots : nullptr;
    const float mean = reduction == 1 ? 1.0f / n.group : 1.0f;
    for (int64_t c = 0; c < count; ++c) {
      const int64_t first = c * part;
      for_vectors(std::min(part, n.slots - first), [&](int64_t i, auto lanes) {
        Vec got = {};
        for (int64_t g = 0; g < n.group; ++g) {
          Vec share = lanes.load(W + g * n.slots + first + i) * P[(g * count + c) * record];
          if (power != 1.0f)
            for (int lane = 0; lane < kLanes; ++lane) share[lane] = std::pow(share[lane], power);
          got = reduction == 2 ? (got > share ? got : share) : got + share;
        }
        got *= mean;
        if (adds) got += lanes.load(from + first + i);
        lanes.store(to + first + i, got);
      });
    }
  });
  return ffi::Error::Success();
}

// See `victim` in victim.py.
ffi::Error Victim(ffi::ThreadPool pool, Int32s positions, Floats priority, Int32s first,
                  Int32s last, ffi::Result<Int32s> free) {
  const int64_t slots = positions.dimensions()[2];
  parallel(pool, free->element_count(), [&](int64_t row) {
    const int64_t start = first.typed_data()[row];
    const int64_t length = std::min<int64_t>(last.typed_data()[row] + 1, slots) - start;
    const int32_t* at = positions.typed_data() + row * slots + start;
    const float* value = priority.typed_data() + row * slots + start;
    const float infinity = std::numeric_limits<float>::infinity();
    float lowest = infinity;
    for (int64_t i = 0; i < length; ++i) lowest = std::min(lowest, at[i] < 0 ? -infinity : value[i]);
    int64_t found = 0;
    int32_t youngest = -2;
    for (int64_t i = 0; i < length; ++i)
      if ((at[i] < 0 ? -infinity : value[i]) == lowest && at[i] > youngest) {
        youngest = at[i];
        found = i;
      }
    free->typed_data()[row] = static_cast<int32_t>(start + found);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_linear, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_decode, Decode,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()  // queries
                                  .Arg<Floats>()  // key
                                  .Arg<Floats>()  // value
                                  .Arg<Floats>()  // keys
                                  .Arg<Floats>()  // values
                                  .Arg<Int32s>()  // positions
                                  .Arg<Int32s>()  // free
                                  .Arg<Int32s>()  // position
                                  .Arg<Floats>()  // onto
                                  .Ret<Floats>()  // out
                                  .Ret<Floats>()  // keys
                                  .Ret<Floats>()  // values
                                  .Ret<Floats>()  // received
                                  .Ret<Floats>()  // weights
                                  .Ret<Floats>()  // parts
                                  .Attr<int64_t>("part")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("reduction")
                                  .Attr<float>("power"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_victim, Victim,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Int32s>()  // positions
                                  .Arg<Floats>()  // priority
                                  .Arg<Int32s>()  // first
                                  .Arg<Int32s>()  // last
                                  .Ret<Int32s>());
