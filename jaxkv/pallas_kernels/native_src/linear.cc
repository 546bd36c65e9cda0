// Products of weights with few rows: weights pass by once.

#include "common.h"

namespace jaxkv {
namespace {

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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_linear, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>());

}  // namespace jaxkv
