// What heads that share keys call near and distant.

#ifndef JAXKV_SHARED_H_
#define JAXKV_SHARED_H_

#include <cmath>

#include "common.h"
#include "softmax.h"

namespace jaxkv {

// What the new token sees, and what is near to it.
struct View {
  View(int32_t position, int64_t window, int64_t sinks, int64_t recent)
      : now(position),
        oldest(window > 0 ? position - static_cast<int32_t>(window) : -1),
        sinks(static_cast<int32_t>(sinks)),
        recent(static_cast<int32_t>(recent)) {}

  int32_t now, oldest, sinks, recent;

  template <typename I>
  auto sees(I where) const {
    return (where >= 0) & (where <= now) & (where > oldest);
  }
  template <typename I>
  auto is_near(I where) const {
    return (where < sinks) | (now - where < recent);
  }
};

// log(sum of e^x) of what has been gathered as a highest logit and a sum.
inline float log_sum(float top, float total) { return total > 0 ? top + std::log(total) : kMasked; }

// Of the distant ones among logits that are to be scaled: the highest, and the sum of exponentials.
inline void far_sum(const View& view, const float* logits, const int32_t* positions, int64_t length,
                    float scale, float* out) {
  auto distant = [&](int64_t s, auto lanes) {
    Ints where = lanes.template load<Ints>(positions + s);
    Ints there = view.sees(where) & ~view.is_near(where);
    return lanes.others(there ? lanes.load(logits + s) * scale : all(kMasked), kMasked);
  };
  Vec top = all(kMasked), total = {};
  for_vectors(length, [&](int64_t s, auto lanes) {
    Vec x = distant(s, lanes);
    top = top > x ? top : x;
  });
  out[0] = highest(top);
  for_vectors(length, [&](int64_t s, auto lanes) {
    Vec x = distant(s, lanes);
    total += x > all(kMasked) ? exp_negative(x - out[0]) : Vec{};
  });
  out[1] = sum(total);
}

// The log-sum-exp of what `far_sum` has found in several parts.
inline float far_log_sum(const float* parts, int64_t count) {
  float top = kMasked, total = 0;
  for (int64_t c = 0; c < count; ++c) top = std::max(top, parts[2 * c]);
  for (int64_t c = 0; c < count; ++c) total += parts[2 * c + 1] * std::exp(parts[2 * c] - top);
  return log_sum(top, total);
}

}  // namespace jaxkv

#endif  // JAXKV_SHARED_H_
