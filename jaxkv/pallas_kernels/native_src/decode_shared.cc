// A decode step of heads that meet distant tokens by another layer's keys (PoD).
//
// First the logits: of the ring of near keys, and of the root's keys in parts for all cores. Then it
// is known which far parts are skipped; and then values pass by, of skipped heads only the near ones.

#include <cmath>
#include <vector>

#include "common.h"
#include "shared.h"
#include "softmax.h"

namespace jaxkv {
namespace {

enum Skip : int64_t { kNever = 0, kExact = 1, kPredicted = 2 };

// See `decode_shared` in decode_shared.py. `ring` is the slot of every place of the ring. Scratch:
// `weights` [batch, heads, slots], `near` [batch, heads, places], `parts` as in decode.cc.
ffi::Error DecodeShared(ffi::ThreadPool pool, Floats queries, Floats far_queries, Floats key,
                        Floats value, Floats near_in, Floats values_in, Floats keys,
                        Int32s positions, Int32s ring, Int32s free, Int32s position,
                        Floats root_far, ffi::Result<Floats> out, ffi::Result<Floats> near_keys,
                        ffi::Result<Floats> values, ffi::Result<Int32s> counts,
                        ffi::Result<Floats> weights, ffi::Result<Floats> near,
                        ffi::Result<Floats> parts, int64_t part, int64_t window, int64_t sinks,
                        int64_t recent, int64_t skip, float tau) {
  if (near_in.typed_data() != near_keys->typed_data() ||
      values_in.typed_data() != values->typed_data())
    return ffi::Error::Internal("near keys and values must be changed in place");
  const auto k = keys.dimensions();
  const int64_t kv_heads = k[1], slots = k[2], dim = k[3], rows = k[0] * kv_heads;
  const int64_t group = queries.dimensions()[1] / kv_heads, places = ring.dimensions()[2];
  const int64_t count = ceil_div(slots, part);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const Parts sums(parts->typed_data(), group, count, dim);
  std::vector<char> skipped(rows), there(rows);
  // Of distant logits, per query head and part: the highest, and the sum of exponentials.
  std::vector<float> far(skip == kExact ? rows * group * count * 2 : 0);

  auto view_of = [&](int64_t row) {
    return View(position.typed_data()[row / kv_heads], window, sinks, recent);
  };
  // Calls f(place, slot) for the tokens in the ring that the new one sees as near, in some slots.
  auto for_ring = [&](int64_t row, int64_t first, int64_t length, const auto& f) {
    const View view = view_of(row);
    for (int64_t j = 0; j < places; ++j) {
      const int64_t slot = ring.typed_data()[row * places + j] - first;
      if (slot < 0 || slot >= length) continue;
      const int32_t where = positions.typed_data()[row * slots + first + slot];
      if (view.sees(where) && view.is_near(where)) f(j, slot);
    }
  };
  auto near_of = [&](int64_t row, int64_t g) {
    return near->typed_data() + (row * group + g) * places;
  };
  // Whether the near part is enough in every query head, given the far one's log-sum-exp.
  auto enough = [&](int64_t row, const auto& far_of) {
    for (int64_t g = 0; g < group; ++g) {
      const float* logits = near_of(row, g);
      float top = kMasked, total = 0;
      for_ring(row, 0, slots, [&](int64_t j, int64_t) { top = std::max(top, logits[j]); });
      for_ring(row, 0, slots, [&](int64_t j, int64_t) { total += std::exp(logits[j] - top); });
      const float gate = 1.0f / (1.0f + std::exp(far_of(g) - log_sum(top, total)));
      if (!(gate >= tau)) return false;
    }
    return true;
  };

  parallel(pool, rows, [&](int64_t row) {
    const View view = view_of(row);
    float* own = near_keys->typed_data() + row * places * dim;
    const int64_t seat =
        view.now < sinks ? view.now : sinks + (view.now - sinks) % std::max<int64_t>(recent, 1);
    // A sequence that has ended writes nowhere.
    if (view.now >= 0 && seat < places)
      std::memcpy(own + seat * dim, key.typed_data() + row * dim, dim * sizeof(float));
    products(own, dim, places, queries.typed_data() + row * group * dim, dim, group, dim,
             near_of(row, 0), places);
    for (int64_t i = 0; i < group * places; ++i) near_of(row, 0)[i] *= scale;
    if (skip == kNever) return;
    const int32_t* at = positions.typed_data() + row * slots;
    bool distant = false;
    for (int64_t s = 0; s < slots; ++s) distant |= view.sees(at[s]) & !view.is_near(at[s]);
    there[row] = distant;
    if (skip == kPredicted && distant)
      skipped[row] = enough(row, [&](int64_t g) { return root_far.typed_data()[row * group + g]; });
  });

  parallel(pool, rows * count, [&](int64_t unit) {
    const int64_t row = unit / count, c = unit % count, first = c * part;
    const int64_t length = std::min(part, slots - first);
    const int64_t slot = free.typed_data()[row] - first;
    if (slot >= 0 && slot < length)
      for (int64_t d = 0; d < dim; ++d)
        values->typed_data()[(row * dim + d) * slots + first + slot] =
            value.typed_data()[row * dim + d];
    if (skipped[row]) return;
    const View view = view_of(row);
    const int32_t* at = positions.typed_data() + row * slots + first;
    float* W = weights->typed_data() + row * group * slots + first;
    products(keys.typed_data() + (row * slots + first) * dim, dim, length,
             far_queries.typed_data() + row * group * dim, dim, group, dim, W, slots);
    for (int64_t g = 0; g < group; ++g) {
      float* w = W + g * slots;
      if (skip == kExact)
        far_sum(view, w, at, length, scale, far.data() + ((row * group + g) * count + c) * 2);
      for_vectors(length, [&](int64_t s, auto lanes) {
        auto seen = view.sees(lanes.template load<Ints>(at + s));
        lanes.store(w + s, seen ? lanes.load(w + s) * scale : all(kMasked));
      });
    }
    for_ring(row, first, length, [&](int64_t j, int64_t slot) {
      for (int64_t g = 0; g < group; ++g) W[g * slots + slot] = near_of(row, g)[j];
    });
  });

  if (skip == kExact)
    for (int64_t row = 0; row < rows; ++row)
      skipped[row] = there[row] && enough(row, [&](int64_t g) {
        return far_log_sum(far.data() + (row * group + g) * count * 2, count);
      });

  parallel(pool, rows * count, [&](int64_t unit) {
    const int64_t row = unit / count, c = unit % count, first = c * part;
    const int64_t length = std::min(part, slots - first);
    float* W = weights->typed_data() + row * group * slots + first;
    int64_t begin = 0, end = length;
    if (skipped[row]) {
      begin = length, end = 0;
      for_ring(row, first, length, [&](int64_t, int64_t slot) {
        begin = std::min(begin, slot);
        end = std::max(end, slot + 1);
      });
      begin = std::min(begin, end);
      for (int64_t g = 0; g < group; ++g)
        std::fill(W + g * slots + begin, W + g * slots + end, kMasked);
      for_ring(row, first, length, [&](int64_t j, int64_t slot) {
        for (int64_t g = 0; g < group; ++g) W[g * slots + slot] = near_of(row, g)[j];
      });
    }
    for (int64_t g = 0; g < group; ++g) {
      float* w = W + g * slots + begin;
      float* p = sums.at(row, g, c);
      p[0] = highest(w, end - begin);
      p[1] = soften(w, end - begin, p[0]);
    }
    products(values->typed_data() + row * dim * slots + first + begin, slots, dim, W + begin, slots,
             group, end - begin, sums.at(row, 0, c) + 2, sums.stride());
  });

  parallel(pool, rows, [&](int64_t row) {
    sums.join(row, out->typed_data() + row * group * dim);
    if (skip == kNever) return;
    counts->typed_data()[2 * row] = skipped[row];
    counts->typed_data()[2 * row + 1] = there[row];
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_decode_shared, DecodeShared,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()  // queries
                                  .Arg<Floats>()  // far queries
                                  .Arg<Floats>()  // key
                                  .Arg<Floats>()  // value
                                  .Arg<Floats>()  // near keys
                                  .Arg<Floats>()  // values
                                  .Arg<Floats>()  // keys of the root
                                  .Arg<Int32s>()  // positions
                                  .Arg<Int32s>()  // ring
                                  .Arg<Int32s>()  // free
                                  .Arg<Int32s>()  // position
                                  .Arg<Floats>()  // far log-sum-exp of the root
                                  .Ret<Floats>()  // out
                                  .Ret<Floats>()  // near keys
                                  .Ret<Floats>()  // values
                                  .Ret<Int32s>()  // counts
                                  .Ret<Floats>()  // weights
                                  .Ret<Floats>()  // near
                                  .Ret<Floats>()  // parts
                                  .Attr<int64_t>("part")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("sinks")
                                  .Attr<int64_t>("recent")
                                  .Attr<int64_t>("skip")
                                  .Attr<float>("tau"));

}  // namespace jaxkv
