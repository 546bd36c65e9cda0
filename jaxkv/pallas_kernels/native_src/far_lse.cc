// Log-sum-exp of a root's own attention to distant tokens, by which PoD predicts what is skipped.

#include <cmath>
#include <vector>

#include "common.h"
#include "shared.h"

namespace jaxkv {
namespace {

// See `far_lse` in decode_shared.py.
ffi::Error FarLse(ffi::ThreadPool pool, Floats queries, Floats keys, Int32s positions,
                  Int32s position, ffi::Result<Floats> out, int64_t part, int64_t window,
                  int64_t sinks, int64_t recent) {
  const auto k = keys.dimensions();
  const int64_t kv_heads = k[1], slots = k[2], dim = k[3], rows = k[0] * kv_heads;
  const int64_t group = queries.dimensions()[1] / kv_heads, count = ceil_div(slots, part);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  std::vector<float> far(rows * group * count * 2);

  parallel(pool, rows * count, [&](int64_t unit) {
    const int64_t row = unit / count, c = unit % count, first = c * part;
    const int64_t length = std::min(part, slots - first);
    const View view(position.typed_data()[row / kv_heads], window, sinks, recent);
    std::vector<float> logits(group * length);
    products(keys.typed_data() + (row * slots + first) * dim, dim, length,
             queries.typed_data() + row * group * dim, dim, group, dim, logits.data(), length);
    for (int64_t g = 0; g < group; ++g)
      far_sum(view, logits.data() + g * length, positions.typed_data() + row * slots + first,
              length, scale, far.data() + ((row * group + g) * count + c) * 2);
  });
  for (int64_t i = 0; i < rows * group; ++i)
    out->typed_data()[i] = far_log_sum(far.data() + i * count * 2, count);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_far_lse, FarLse,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()  // queries
                                  .Arg<Floats>()  // keys
                                  .Arg<Int32s>()  // positions
                                  .Arg<Int32s>()  // position
                                  .Ret<Floats>()
                                  .Attr<int64_t>("part")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("sinks")
                                  .Attr<int64_t>("recent"));

}  // namespace jaxkv
