// A decode step: keys and values pass by once, cut into parts for all cores.

#include <cmath>
#include <vector>

#include "common.h"
#include "shared.h"
#include "softmax.h"

namespace jaxkv {
namespace {

struct Shape {
  int64_t batch, heads, kv_heads, group, slots, dim;
};

// See `decode` in decode.py. `weights` and `parts` are scratch: raw exponentials [batch, heads,
// slots], and per part of the slots a maximum, a sum and an output [.., parts, 2 + dim].
ffi::Error Decode(ffi::ThreadPool pool, Floats queries, Floats key, Floats value, Floats keys_in,
                  Floats values_in, Int32s positions, Int32s free, Int32s position, Floats onto,
                  ffi::Result<Floats> out, ffi::Result<Floats> keys, ffi::Result<Floats> values,
                  ffi::Result<Floats> received, ffi::Result<Floats> told,
                  ffi::Result<Floats> weights, ffi::Result<Floats> parts, int64_t part,
                  int64_t window, int64_t sinks, int64_t recent, int64_t reduction, float power) {
  if (keys_in.typed_data() != keys->typed_data() || values_in.typed_data() != values->typed_data())
    return ffi::Error::Internal("keys and values must be changed in place");
  const auto q = queries.dimensions(), k = keys->dimensions();
  const Shape n{q[0], q[1], k[1], q[1] / k[1], k[2], k[3]};
  const int64_t count = ceil_div(n.slots, part);
  const Parts sums(parts->typed_data(), n.group, count, n.dim);
  const bool collects = received->element_count() > 0, adds = onto.element_count() > 0;
  // Of distant logits, per query head and part: the highest, and the sum of exponentials.
  std::vector<float> far(told->element_count() * count * 2);
  const float scale = 1.0f / std::sqrt(static_cast<float>(n.dim));

  // Puts the parts of a row together.
  auto finish = [&](int64_t row) {
    sums.join(row, out->typed_data() + row * n.group * n.dim);
    if (!far.empty())
      for (int64_t i = row * n.group; i < (row + 1) * n.group; ++i)
        told->typed_data()[i] = far_log_sum(far.data() + i * count * 2, count);
    if (!collects) return;
    const float* W = weights->typed_data() + row * n.group * n.slots;
    float* to = received->typed_data() + row * n.slots;
    const float* from = adds ? onto.typed_data() + row * n.slots : nullptr;
    const float mean = reduction == 1 ? 1.0f / n.group : 1.0f;
    for (int64_t c = 0; c < count; ++c) {
      const int64_t first = c * part;
      for_vectors(std::min(part, n.slots - first), [&](int64_t i, auto lanes) {
        Vec got = {};
        for (int64_t g = 0; g < n.group; ++g) {
          Vec share = lanes.load(W + g * n.slots + first + i) * *sums.at(row, g, c);
          if (power != 1.0f)
            for (int lane = 0; lane < kLanes; ++lane) share[lane] = std::pow(share[lane], power);
          got = reduction == 2 ? (got > share ? got : share) : got + share;
        }
        got *= mean;
        if (adds) got += lanes.load(from + first + i);
        lanes.store(to + first + i, got);
      });
    }
  };
  std::vector<Left> left(n.batch * n.kv_heads);
  for (Left& parts_left : left) parts_left = count;

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
    products(K, n.dim, length, queries.typed_data() + row * n.group * n.dim, n.dim, n.group, n.dim,
             W, n.slots);
    const int32_t oldest = window > 0 ? now - static_cast<int32_t>(window) : -1;
    for (int64_t g = 0; g < n.group; ++g) {
      float* w = W + g * n.slots;
      Vec top = all(kMasked);
      for_vectors(length, [&](int64_t s, auto lanes) {
        // Values come next.
        if (g == 0)
          for (int d = 0; d < kRows; ++d) __builtin_prefetch(V + d * n.slots + s);
        Ints where = lanes.template load<Ints>(at + s);
        Ints seen = (where >= 0) & (where <= now) & (where > oldest);
        Vec logits = lanes.others(seen ? lanes.load(w + s) * scale : all(kMasked), kMasked);
        top = top > logits ? top : logits;
        lanes.store(w + s, logits);
      });
      if (!far.empty())
        far_sum(View(now, window, sinks, recent), w, at, length, 1.0f,
                far.data() + ((row * n.group + g) * count + unit % count) * 2);
      float* p = sums.at(row, g, unit % count);
      p[0] = highest(top);
      p[1] = soften(w, length, p[0]);
    }
    products(V, n.slots, n.dim, W, n.slots, n.group, length, sums.at(row, 0, unit % count) + 2,
             sums.stride());
    if (last_of(left[row])) finish(row);
  });
  return ffi::Error::Success();
}

}  // namespace

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
                                  .Ret<Floats>()  // far log-sum-exp
                                  .Ret<Floats>()  // weights
                                  .Ret<Floats>()  // parts
                                  .Attr<int64_t>("part")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("sinks")
                                  .Attr<int64_t>("recent")
                                  .Attr<int64_t>("reduction")
                                  .Attr<float>("power"));

}  // namespace jaxkv
