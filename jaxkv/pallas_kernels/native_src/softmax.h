// Softmax of rows of logits, whole or in parts that are put together later.

#ifndef JAXKV_SOFTMAX_H_
#define JAXKV_SOFTMAX_H_

#include <cmath>

#include "common.h"

namespace jaxkv {

// The highest lane.
inline float highest(Vec v) {
  float found = v[0];
  for (int i = 1; i < kLanes; ++i) found = std::max(found, v[i]);
  return found;
}

// The highest logit of a row; kMasked if nothing is seen.
inline float highest(const float* row, int64_t length) {
  Vec top = all(kMasked);
  for_vectors(length, [&](int64_t s, auto lanes) {
    Vec x = lanes.others(lanes.load(row + s), kMasked);
    top = top > x ? top : x;
  });
  return highest(top);
}

// Logits become exponentials, those of masked ones 0; gives their sum.
inline float soften(float* row, int64_t length, float highest) {
  Vec total = {};
  for_vectors(length, [&](int64_t s, auto lanes) {
    Vec x = lanes.others(lanes.load(row + s), kMasked);
    Vec raised = x > all(kMasked) ? exp_negative(x - highest) : Vec{};
    total += raised;
    lanes.store(row + s, raised);
  });
  return sum(total);
}

// Slots of a KV head, cut into parts: of each query head and part the highest logit, the sum of
// exponentials and what these give of the values.
class Parts {
 public:
  Parts(float* data, int64_t group, int64_t count, int64_t dim)
      : data_(data), group_(group), count_(count), dim_(dim) {}

  int64_t stride() const { return count_ * (2 + dim_); }
  float* at(int64_t row, int64_t g, int64_t part) const {
    return data_ + ((row * group_ + g) * count_ + part) * (2 + dim_);
  }

  // The output of one head [group, dim]. From then on the first number of a part is what its
  // exponentials are to be multiplied by.
  void join(int64_t row, float* out) const {
    for (int64_t g = 0; g < group_; ++g, out += dim_) {
      float top = kMasked, total = 0;
      for (int64_t c = 0; c < count_; ++c) top = std::max(top, *at(row, g, c));
      for (int64_t c = 0; c < count_; ++c) {
        float* part = at(row, g, c);
        part[0] = std::exp(part[0] - top);
        total += part[0] * part[1];
      }
      std::fill(out, out + dim_, 0.0f);
      for (int64_t c = 0; c < count_; ++c) {
        float* part = at(row, g, c);
        part[0] = top > kMasked ? part[0] / total : 0.0f;
        for (int64_t d = 0; d < dim_; ++d) out[d] += part[0] * part[2 + d];
      }
    }
  }

 private:
  float* data_;
  int64_t group_, count_, dim_;
};

}  // namespace jaxkv

#endif  // JAXKV_SOFTMAX_H_
