// The slot that the next token goes to.

#include <limits>

#include "common.h"

namespace jaxkv {
namespace {

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
    for (int64_t i = 0; i < length; ++i)
      lowest = std::min(lowest, at[i] < 0 ? -infinity : value[i]);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_victim, Victim,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Int32s>()  // positions
                                  .Arg<Floats>()  // priority
                                  .Arg<Int32s>()  // first
                                  .Arg<Int32s>()  // last
                                  .Ret<Int32s>());

}  // namespace jaxkv
