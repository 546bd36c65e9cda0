// Attention of a block of new tokens, and what each key received of it.
//
// A unit of work is a KV head with some blocks of queries. A block keeps its logits for all keys that
// it may see in the core's cache: so a row's softmax is exact in one pass, and its probabilities are
// there to be summed. Both products are of one kind, `multiply`: keys and values are packed once into
// panels of two vectors' width, which a few rows at a time are multiplied with.

#include <cmath>
#include <vector>

#include "common.h"
#include "softmax.h"

namespace jaxkv {
namespace {

#if defined(__AVX512F__)
constexpr int kTile = 8;  // Rows that a panel is multiplied with at a time.
#else
constexpr int kTile = 4;
#endif
constexpr int kPanel = 2 * kLanes;
// Rows of a block, of all query heads of a KV head together.
constexpr int64_t kBlockRows = 72;
// Keys whose probabilities and values are multiplied at a time: both stay in the nearest cache.
constexpr int64_t kKeys = 256;

// out[r, :kPanel] (+)= rows[r, :length] @ panel[:length, :kPanel], for kTile rows
template <bool add>
inline void multiply(const float* rows, int64_t stride, const float* panel, int64_t length,
                     float* out, int64_t out_stride) {
  constexpr All lanes;
  Vec sum[kTile][2] = {};
  if (add)
    for (int r = 0; r < kTile; ++r)
      for (int v = 0; v < 2; ++v) sum[r][v] = lanes.load(out + r * out_stride + v * kLanes);
  for (int64_t i = 0; i < length; ++i) {
    Vec p[2] = {lanes.load(panel + i * kPanel), lanes.load(panel + i * kPanel + kLanes)};
    for (int r = 0; r < kTile; ++r) {
      Vec x = all(rows[r * stride + i]);
      for (int v = 0; v < 2; ++v) sum[r][v] += x * p[v];
    }
  }
  for (int r = 0; r < kTile; ++r)
    for (int v = 0; v < 2; ++v) lanes.store(out + r * out_stride + v * kLanes, sum[r][v]);
}

struct Sizes {
  int64_t batch, kv_heads, group, tokens, dim, keys;
  int64_t key_panels() const { return ceil_div(keys, kPanel); }
  int64_t dim_panels() const { return ceil_div(dim, kPanel); }
};

// What is known of the positions in a panel of keys.
struct Range {
  int32_t lowest, highest;  // Of keys that are there; lowest > highest if there are none.
  bool whole;               // All are there.
};

// One KV head of one sequence, packed.
struct Head {
  const Sizes& n;
  const float* keys;            // [keys, dim]
  const float* values;          // [dim, keys]
  const int32_t* positions;     // [keys]
  float* key_panels;            // [key_panels, dim, kPanel]
  float* value_panels;          // [dim_panels, keys in whole panels, kPanel]
  // Of distant tokens; null where there are none apart.
  const float* far_keys;        // [keys, dim]
  float* far_panels;            // [key_panels, dim, kPanel]
  int32_t limit, sinks;         // The distance they begin at, and how many first tokens never are.

  int64_t padded_keys() const { return n.key_panels() * kPanel; }

  Range pack(int64_t p) const {
    const int64_t first = p * kPanel, count = std::min<int64_t>(kPanel, n.keys - first);
    Range range{INT32_MAX, -1, count == kPanel};
    for (int64_t j = 0; j < count; ++j) {
      const int32_t position = positions[first + j];
      if (position < 0) {
        range.whole = false;
        continue;
      }
      range.lowest = std::min(range.lowest, position);
      range.highest = std::max(range.highest, position);
    }
    pack_keys(keys, key_panels, first, count);
    if (far_keys != nullptr) pack_keys(far_keys, far_panels, first, count);
    for (int64_t v = 0; v < n.dim_panels(); ++v)
      for (int64_t j = 0; j < kPanel; ++j) {
        float* row = value_panels + (v * padded_keys() + first + j) * kPanel;
        for (int64_t d = 0; d < kPanel; ++d) {
          const int64_t from = v * kPanel + d;
          row[d] = j < count && from < n.dim ? values[from * n.keys + first + j] : 0.0f;
        }
      }
    return range;
  }

  void pack_keys(const float* from, float* panels, int64_t first, int64_t count) const {
    float* to = panels + first * n.dim;
    for (int64_t d = 0; d < n.dim; ++d)
      for (int64_t j = 0; j < kPanel; ++j)
        to[d * kPanel + j] = j < count ? from[(first + j) * n.dim + d] : 0.0f;
  }
};

// Attention of one block of queries; kept from block to block.
class Block {
 public:
  Block(const Sizes& n, int64_t window) : n_(n), window_(window) {
    tokens_ = std::max<int64_t>(1, kBlockRows / n.group);
    rows_ = ceil_div(tokens_ * n.group, kTile) * kTile;
    // Rows a little apart, so that they do not fall into the same lines of the cache.
    stride_ = n.key_panels() * kPanel + kLanes;
    width_ = n.dim_panels() * kPanel;
    queries_.resize(rows_ * n.dim);
    far_queries_.resize(rows_ * n.dim);
    near_.resize(rows_ * kPanel);
    logits_.resize(rows_ * stride_);
    out_.resize(rows_ * width_);
    share_.resize(rows_);
  }

  static int64_t tokens(const Sizes& n) { return std::max<int64_t>(1, kBlockRows / n.group); }

  // Queries [group, tokens, dim] from `first` on, with their positions, against a head.
  void attend(const Head& head, const Range* ranges, const float* queries, const float* far_queries,
              const int32_t* positions, int64_t first, float* out) {
    count_ = std::min(tokens_, n_.tokens - first);
    lowest_ = INT32_MAX, highest_ = -1;
    for (int64_t i = 0; i < count_; ++i) {
      lowest_ = std::min(lowest_, positions[first + i]);
      highest_ = std::max(highest_, positions[first + i]);
    }
    take(queries, first, queries_);
    if (head.far_keys != nullptr) take(far_queries, first, far_queries_);
    used_ = n_.group * count_;
    begin_ = 0, end_ = n_.key_panels();
    while (begin_ < end_ && !sees(ranges[begin_])) ++begin_;
    while (begin_ < end_ && !sees(ranges[end_ - 1])) --end_;
    const int64_t length = (end_ - begin_) * kPanel;

    for (int64_t p = begin_; p < end_; ++p) {
      float* logits = logits_.data() + (p - begin_) * kPanel;
      const bool some = head.far_keys != nullptr && any_distant(head, ranges[p]);
      const bool all_of_them = some && all_distant(head, ranges[p]);
      if (!all_of_them) meet(queries_, head.key_panels, p, logits, stride_);
      if (some) {
        if (!all_of_them) keep_near(logits);
        meet(far_queries_, head.far_panels, p, logits, stride_);
        if (!all_of_them) put_near(head, p, positions + first, logits);
      }
      if (!sees_all(ranges[p])) mask(head, p, positions + first, logits);
    }
    for (int64_t r = 0; r < used_; ++r) {
      float* row = logits_.data() + r * stride_;
      const float top = highest(row, length);
      const float total = soften(row, length, top);
      share_[r] = top > kMasked ? 1.0f / total : 0.0f;
    }
    weigh(head, length);
    for (int64_t g = 0; g < n_.group; ++g)
      for (int64_t i = 0; i < count_; ++i)
        for (int64_t d = 0; d < n_.dim; ++d)
          out[(g * n_.tokens + first + i) * n_.dim + d] =
              out_[(g * count_ + i) * width_ + d] * share_[g * count_ + i];
  }

  // Adds probabilities to `sums` [keys], of rows of positions above `after`.
  void collect(const int32_t* positions, int32_t after, int64_t reduction, float power,
               float* sums) {
    for (int64_t r = 0; r < used_; ++r) {
      const int32_t position = positions[r % count_];
      if (position <= after) share_[r] = 0.0f;
    }
    const float mean = reduction == 1 ? 1.0f / n_.group : 1.0f;
    const int64_t start = begin_ * kPanel, length = std::min(end_ * kPanel, n_.keys) - start;
    for_vectors(length, [&](int64_t s, auto lanes) {
      Vec got = {};
      for (int64_t i = 0; i < count_; ++i) {
        Vec of_token = {};
        for (int64_t g = 0; g < n_.group; ++g) {
          const int64_t r = g * count_ + i;
          Vec p = All().load(logits_.data() + r * stride_ + s) * share_[r];
          if (power != 1.0f)
            for (int lane = 0; lane < kLanes; ++lane) p[lane] = std::pow(p[lane], power);
          of_token = reduction == 2 ? (of_token > p ? of_token : p) : of_token + p;
        }
        got += of_token;
      }
      lanes.store(sums + start + s, lanes.load(sums + start + s) + got * mean);
    });
  }

 private:
  // Whether any query may see any key of a panel, and whether all see all.
  bool sees(const Range& keys) const {
    return keys.lowest <= highest_ && (window_ <= 0 || keys.highest > lowest_ - window_);
  }
  bool sees_all(const Range& keys) const {
    return keys.whole && lowest_ >= 0 && keys.highest <= lowest_ &&
           (window_ <= 0 || keys.lowest > highest_ - window_);
  }

  // Whether any key of a panel is distant to any query, and whether all are to all.
  bool any_distant(const Head& head, const Range& keys) const {
    return highest_ - keys.lowest >= head.limit && keys.highest >= head.sinks;
  }
  bool all_distant(const Head& head, const Range& keys) const {
    return lowest_ - keys.highest >= head.limit && keys.lowest >= head.sinks;
  }

  // Scaled queries of the block, row by row.
  void take(const float* queries, int64_t first, std::vector<float>& to) const {
    const float scale = 1.0f / std::sqrt(static_cast<float>(n_.dim));
    std::fill(to.begin(), to.end(), 0.0f);
    for (int64_t g = 0; g < n_.group; ++g)
      for (int64_t i = 0; i < count_; ++i)
        for (int64_t d = 0; d < n_.dim; ++d)
          to[(g * count_ + i) * n_.dim + d] =
              queries[(g * n_.tokens + first + i) * n_.dim + d] * scale;
  }

  void meet(const std::vector<float>& queries, const float* panels, int64_t p, float* logits,
            int64_t stride) const {
    for (int64_t r = 0; r < used_; r += kTile)
      multiply<false>(queries.data() + r * n_.dim, n_.dim, panels + p * kPanel * n_.dim, n_.dim,
                      logits + r * stride, stride);
  }

  void keep_near(const float* logits) {
    for (int64_t r = 0; r < used_; ++r)
      std::memcpy(near_.data() + r * kPanel, logits + r * stride_, kPanel * sizeof(float));
  }

  void put_near(const Head& head, int64_t p, const int32_t* positions, float* logits) const {
    const int64_t count = std::min<int64_t>(kPanel, n_.keys - p * kPanel);
    for (int64_t r = 0; r < used_; ++r)
      for (int64_t j = 0; j < count; ++j) {
        const int32_t where = head.positions[p * kPanel + j];
        if (positions[r % count_] - where < head.limit || where < head.sinks)
          logits[r * stride_ + j] = near_[r * kPanel + j];
      }
  }

  void mask(const Head& head, int64_t p, const int32_t* positions, float* logits) {
    int32_t at[kPanel];
    for (int64_t j = 0; j < kPanel; ++j)
      at[j] = p * kPanel + j < n_.keys ? head.positions[p * kPanel + j] : -1;
    for (int64_t r = 0; r < used_; ++r) {
      const int32_t now = positions[r % count_];
      const int32_t oldest = window_ > 0 ? now - static_cast<int32_t>(window_) : -1;
      float* row = logits + r * stride_;
      for (int64_t j = 0; j < kPanel; ++j)
        row[j] = at[j] >= 0 && at[j] <= now && at[j] > oldest ? row[j] : kMasked;
    }
  }

  void weigh(const Head& head, int64_t length) {
    std::fill(out_.begin(), out_.end(), 0.0f);
    for (int64_t v = 0; v < n_.dim_panels(); ++v)
      for (int64_t s = 0; s < length; s += kKeys) {
        const float* values =
            head.value_panels + (v * head.padded_keys() + begin_ * kPanel + s) * kPanel;
        for (int64_t r = 0; r < used_; r += kTile)
          multiply<true>(logits_.data() + r * stride_ + s, stride_, values,
                                std::min(kKeys, length - s), out_.data() + r * width_ + v * kPanel,
                                width_);
      }
  }

  const Sizes& n_;
  const int64_t window_;
  int64_t tokens_, rows_, stride_, width_;
  std::vector<float> queries_, far_queries_, near_, logits_, out_, share_;
  // Of the block at hand: tokens, rows, positions, and the panels of keys that it sees.
  int64_t count_ = 0, used_ = 0, begin_ = 0, end_ = 0;
  int32_t lowest_ = 0, highest_ = 0;
};

// See `attend_block` in attention.py. Scratch: `panels` for packed keys and values, and `partial`
// [batch, kv_heads, parts, keys] for what the parts of the queries collect.
ffi::Error Prompt(ffi::ThreadPool pool, Floats queries, Int32s query_positions, Floats keys,
                  Floats values, Int32s key_positions, Floats far_queries, Floats far_keys,
                  Int32s limits, ffi::Result<Floats> out,
                  ffi::Result<Floats> received, ffi::Result<Floats> panels,
                  ffi::Result<Floats> partial, int64_t window, int64_t reduction, float power,
                  int64_t last, int64_t sinks) {
  const auto q = queries.dimensions();
  const Sizes n{q[0], q[1], q[2], q[3], q[4], keys.dimensions()[2]};
  const int64_t heads = n.batch * n.kv_heads, parts = partial->dimensions()[2];
  const int64_t blocks = ceil_div(n.tokens, Block::tokens(n));
  const bool collects = received->element_count() > 0;
  const int64_t key_floats = n.key_panels() * kPanel * n.dim;
  const int64_t value_floats = n.dim_panels() * n.key_panels() * kPanel * kPanel;

  const bool has_far = far_keys.element_count() > 0;

  auto head_of = [&](int64_t head) {
    const int64_t floats = (has_far ? 2 : 1) * key_floats + value_floats;
    float* packed = panels->typed_data() + head * floats;
    return Head{n,
                keys.typed_data() + head * n.keys * n.dim,
                values.typed_data() + head * n.keys * n.dim,
                key_positions.typed_data() + head * n.keys,
                packed,
                packed + key_floats,
                has_far ? far_keys.typed_data() + head * n.keys * n.dim : nullptr,
                packed + key_floats + value_floats,
                has_far ? limits.typed_data()[head] : 0,
                static_cast<int32_t>(sinks)};
  };
  std::vector<Range> ranges(heads * n.key_panels());
  parallel(pool, heads * n.key_panels(), [&](int64_t unit) {
    ranges[unit] = head_of(unit / n.key_panels()).pack(unit % n.key_panels());
  });

  parallel(pool, heads * parts, [&](int64_t unit) {
    // Long blocks first: what is left for the end is short.
    const int64_t head = unit % heads, part = parts - 1 - unit / heads;
    const Head packed = head_of(head);
    const int32_t* positions = query_positions.typed_data() + head / n.kv_heads * n.tokens;
    const int32_t newest = *std::max_element(positions, positions + n.tokens);
    const int32_t after =
        last > 0 ? std::max(newest - static_cast<int32_t>(last), -1) : -1;
    float* sums = partial->typed_data() + (head * parts + part) * n.keys;
    if (collects) std::fill(sums, sums + n.keys, 0.0f);
    const int64_t floats = n.group * n.tokens * n.dim;
    Block block(n, window);
    for (int64_t i = part; i < blocks; i += parts) {
      const int64_t first = i * Block::tokens(n);
      block.attend(packed, ranges.data() + head * n.key_panels(),
                   queries.typed_data() + head * floats,
                   far_queries.typed_data() + (has_far ? head * floats : 0), positions, first,
                   out->typed_data() + head * floats);
      if (collects) block.collect(positions + first, after, reduction, power, sums);
    }
  });

  if (collects)
    parallel(pool, heads, [&](int64_t head) {
      float* to = received->typed_data() + head * n.keys;
      std::fill(to, to + n.keys, 0.0f);
      for (int64_t part = 0; part < parts; ++part) {
        const float* sums = partial->typed_data() + (head * parts + part) * n.keys;
        for (int64_t s = 0; s < n.keys; ++s) to[s] += sums[s];
      }
    });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_prompt, Prompt,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()  // queries
                                  .Arg<Int32s>()  // query positions
                                  .Arg<Floats>()  // keys
                                  .Arg<Floats>()  // values
                                  .Arg<Int32s>()  // key positions
                                  .Arg<Floats>()  // far queries
                                  .Arg<Floats>()  // far keys
                                  .Arg<Int32s>()  // limits
                                  .Ret<Floats>()  // out
                                  .Ret<Floats>()  // received
                                  .Ret<Floats>()  // panels
                                  .Ret<Floats>()  // partial
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("reduction")
                                  .Attr<float>("power")
                                  .Attr<int64_t>("last")
                                  .Attr<int64_t>("sinks"));

}  // namespace jaxkv
