// A decode step of heads that meet distant tokens by another layer's keys (PoD): all groups of a
// layer in one call, since each by itself is too little work for all cores.
//
// First the logits of the ring of near keys, then those of the root's keys in parts for all cores, and
// values: of heads whose far part is skipped only the near ones. Each waits for what it needs of the
// same row only: to wait for all rows between one and the next would cost as much as the ring.

#include <cmath>
#include <memory>
#include <vector>

#include "common.h"
#include "shared.h"
#include "softmax.h"

namespace jaxkv {
namespace {

enum Skip : int64_t { kNever = 0, kExact = 1, kPredicted = 2 };

// Slots between two near tokens whose values are read with theirs.
constexpr int64_t kGap = 32;

// What is the same for all groups of a layer.
struct Layer {
  const float *queries, *far_queries, *key, *value;
  const int32_t* position;
  float* out;
  // KV heads that are given, and those of all groups, which are in `out`.
  int64_t given, all, group, dim;
  int64_t window, sinks, recent, skip;
  float tau, scale;
};

// Of a row: what is left of its logits and of its values.
struct Progress {
  Left near{1}, far, values;
  // Whether its far part is skipped is known.
  Left open{1};
};

// KV heads that share with the same layers. A row is one of them in one sequence. `ring` is the slot
// of every place of the ring. Scratch: `weights` [rows, group, slots], `near` [rows, group, places],
// `parts` as in decode.cc.
struct Group {
  const Layer& layer;
  const int64_t* heads;
  // Of its first head in `out`.
  int64_t first_head;
  int64_t rows, kv_heads, slots, places, part, count;
  const float* keys;
  const int32_t *positions, *ring, *free;
  const float* root_far;
  float *near_keys, *values;
  int32_t* counts;
  float *weights, *near;
  Parts sums;
  std::vector<char> skipped, there;
  // Of distant logits, per query head and part: the highest, and the sum of exponentials.
  std::vector<float> far;
  std::unique_ptr<Progress[]> progress;

  int64_t given(int64_t row) const {
    return row / kv_heads * layer.given + heads[row % kv_heads];
  }
  const float* of_head(const float* array, int64_t row) const {
    return array + given(row) * layer.dim;
  }
  const float* of_group(const float* array, int64_t row) const {
    return array + given(row) * layer.group * layer.dim;
  }
  View view(int64_t row) const {
    return View(layer.position[row / kv_heads], layer.window, layer.sinks, layer.recent);
  }
  float* near_of(int64_t row, int64_t g) const { return near + (row * layer.group + g) * places; }

  // Calls f(place, slot) for the tokens in the ring that the new one sees as near, in some slots.
  template <typename F>
  void for_ring(int64_t row, int64_t first, int64_t length, const F& f) const {
    const float* logits = near_of(row, 0);
    for (int64_t j = 0; j < places; ++j) {
      const int64_t slot = ring[row * places + j] - first;
      if (slot >= 0 && slot < length && logits[j] > kMasked) f(j, slot);
    }
  }

  // Whether the near part is enough in every query head, given the far one's log-sum-exp.
  template <typename F>
  bool enough(int64_t row, const F& far_of) const {
    for (int64_t g = 0; g < layer.group; ++g) {
      const float* logits = near_of(row, g);
      const float top = highest(logits, places);
      Vec total = {};
      for_vectors(places, [&](int64_t j, auto lanes) {
        Vec x = lanes.others(lanes.load(logits + j), kMasked);
        total += x > all(kMasked) ? exp_negative(x - top) : Vec{};
      });
      const float gate = 1.0f / (1.0f + std::exp(far_of(g) - log_sum(top, sum(total))));
      if (!(gate >= layer.tau)) return false;
    }
    return true;
  }

  // Logits of the ring, kMasked where nothing is seen; and what is known from them.
  void meet_near(int64_t row) {
    const View seen = view(row);
    const int64_t dim = layer.dim, group = layer.group, sinks = layer.sinks;
    const int32_t* at = positions + row * slots;
    float* own = near_keys + row * places * dim;
    const int64_t seat = seen.now < sinks
                             ? seen.now
                             : sinks + (seen.now - sinks) % std::max<int64_t>(layer.recent, 1);
    // A sequence that has ended writes nowhere.
    if (seen.now >= 0 && seat < places)
      std::memcpy(own + seat * dim, of_head(layer.key, row), dim * sizeof(float));
    products(own, dim, places, of_group(layer.queries, row), dim, group, dim, near_of(row, 0),
             places);
    for (int64_t j = 0; j < places; ++j) {
      const int32_t slot = ring[row * places + j];
      const bool met = slot < slots && seen.sees(at[slot]) && seen.is_near(at[slot]);
      for (int64_t g = 0; g < group; ++g) {
        float& logit = near_of(row, g)[j];
        logit = met ? logit * layer.scale : kMasked;
      }
    }
    if (layer.skip == kNever) return;
    Ints distant = {};
    for_vectors(slots, [&](int64_t s, auto lanes) {
      Ints where = lanes.template load<Ints>(at + s);
      // Of no token.
      where = lanes.others(where, -1);
      distant |= seen.sees(where) & ~seen.is_near(where);
    });
    for (int i = 0; i < kLanes; ++i) there[row] |= distant[i] != 0;
    if (layer.skip == kPredicted && there[row])
      skipped[row] = enough(row, [&](int64_t g) { return root_far[row * group + g]; });
  }

  void meet_far(int64_t row, int64_t c) {
    const int64_t dim = layer.dim, group = layer.group, first = c * part;
    const int64_t length = std::min(part, slots - first), slot = free[row] - first;
    if (slot >= 0 && slot < length)
      for (int64_t d = 0; d < dim; ++d)
        values[(row * dim + d) * slots + first + slot] = of_head(layer.value, row)[d];
    if (skipped[row]) return;
    const View seen = view(row);
    const int32_t* at = positions + row * slots + first;
    float* W = weights + row * group * slots + first;
    // Keys before the first distant token and after the last are not read.
    auto distant = [&](int64_t s) { return seen.sees(at[s]) & !seen.is_near(at[s]); };
    int64_t begin = 0, end = length;
    while (begin < end && !distant(begin)) ++begin;
    while (end > begin && !distant(end - 1)) --end;
    products(keys + (row * slots + first + begin) * dim, dim, end - begin,
             of_group(layer.far_queries, row), dim, group, dim, W + begin, slots);
    for (int64_t g = 0; g < group; ++g) {
      float* w = W + g * slots;
      std::fill(w, w + begin, kMasked);
      std::fill(w + end, w + length, kMasked);
      if (layer.skip == kExact)
        far_sum(seen, w + begin, at + begin, end - begin, layer.scale,
                far.data() + ((row * group + g) * count + c) * 2);
      for_vectors(end - begin, [&](int64_t i, auto lanes) {
        const int64_t s = begin + i;
        // Values come next.
        if (g == 0)
          for (int64_t d = 0; d < kRows; ++d)
            __builtin_prefetch(values + (row * dim + d) * slots + first + s);
        auto visible = seen.sees(lanes.template load<Ints>(at + s));
        lanes.store(w + s, visible ? lanes.load(w + s) * layer.scale : all(kMasked));
      });
    }
    for_ring(row, first, length, [&](int64_t j, int64_t slot) {
      for (int64_t g = 0; g < group; ++g) W[g * slots + slot] = near_of(row, g)[j];
    });
  }

  void decide(int64_t row) {
    skipped[row] = there[row] && enough(row, [&](int64_t g) {
      return far_log_sum(far.data() + (row * layer.group + g) * count * 2, count);
    });
  }

  void read_values(int64_t row, int64_t c) {
    const int64_t dim = layer.dim, group = layer.group, first = c * part;
    const int64_t length = std::min(part, slots - first);
    float* W = weights + row * group * slots + first;
    if (skipped[row]) return read_near_values(row, c, first, length);
    for (int64_t g = 0; g < group; ++g) {
      float* p = sums.at(row, g, c);
      p[0] = highest(W + g * slots, length);
      p[1] = soften(W + g * slots, length, p[0]);
    }
    products(values + row * dim * slots + first, slots, dim, W, slots, group, length,
             sums.at(row, 0, c) + 2, sums.stride());
  }

  // Values of near tokens, which lie in few runs of slots: the sinks and the latest.
  void read_near_values(int64_t row, int64_t c, int64_t first, int64_t length) {
    const int64_t dim = layer.dim, group = layer.group;
    float* W = weights + row * group * slots + first;
    std::vector<std::pair<int64_t, int64_t>> found;
    for_ring(row, first, length, [&](int64_t j, int64_t slot) { found.emplace_back(slot, j); });
    std::sort(found.begin(), found.end());
    std::vector<float> some(group * dim);
    for (int64_t g = 0; g < group; ++g) {
      float* p = sums.at(row, g, c);
      std::fill(p, p + 2 + dim, 0.0f);
      p[0] = kMasked;
      for (auto [slot, j] : found) p[0] = std::max(p[0], near_of(row, g)[j]);
    }
    for (size_t i = 0; i < found.size();) {
      const int64_t begin = found[i].first;
      int64_t end = begin;
      size_t next = i;
      while (next < found.size() && found[next].first < end + kGap) end = found[next++].first + 1;
      for (int64_t g = 0; g < group; ++g) {
        float* w = W + g * slots;
        std::fill(w + begin, w + end, kMasked);
        for (size_t n = i; n < next; ++n) w[found[n].first] = near_of(row, g)[found[n].second];
        float* p = sums.at(row, g, c);
        p[1] += soften(w + begin, end - begin, p[0]);
      }
      products(values + row * dim * slots + first + begin, slots, dim, W + begin, slots, group,
               end - begin, some.data(), dim);
      for (int64_t g = 0; g < group; ++g)
        for (int64_t d = 0; d < dim; ++d) sums.at(row, g, c)[2 + d] += some[g * dim + d];
      i = next;
    }
  }

  void finish(int64_t row) {
    const int64_t head = row / kv_heads * layer.all + first_head + row % kv_heads;
    sums.join(row, layer.out + head * layer.group * layer.dim);
    if (layer.skip == kNever) return;
    counts[2 * row] = skipped[row];
    counts[2 * row + 1] = there[row];
  }

  // The units of work, of which those of an earlier kind come first.
  void near_unit(int64_t row) {
    meet_near(row);
    last_of(progress[row].near);
  }

  void far_unit(int64_t row, int64_t c) {
    wait_for(progress[row].near);
    meet_far(row, c);
    // Weights are still in the processor's cache when values are read, unless all parts must be known.
    if (layer.skip != kExact) return meet_values(row, c);
    if (!last_of(progress[row].far)) return;
    decide(row);
    last_of(progress[row].open);
  }

  void value_unit(int64_t row, int64_t c) {
    wait_for(progress[row].open);
    meet_values(row, c);
  }

  void meet_values(int64_t row, int64_t c) {
    read_values(row, c);
    if (last_of(progress[row].values)) finish(row);
  }
};

constexpr int64_t kArguments = 7, kResults = 6;

// See `decode_groups` in decode_shared.py. For every group there are the seven arrays of `Pieces`,
// and six results: near keys, values, counts, and scratch.
ffi::Error DecodeShared(ffi::ThreadPool pool, Floats queries, Floats far_queries, Floats key,
                        Floats value, Int32s position, ffi::RemainingArgs arguments,
                        ffi::Result<Floats> out, ffi::RemainingRets results,
                        ffi::Span<const int64_t> heads, ffi::Span<const int64_t> part,
                        int64_t window, int64_t sinks, int64_t recent, int64_t skip, float tau) {
  const auto q = queries.dimensions();
  const Layer layer{queries.typed_data(),
                    far_queries.typed_data(),
                    key.typed_data(),
                    value.typed_data(),
                    position.typed_data(),
                    out->typed_data(),
                    q[1],
                    out->dimensions()[1],
                    q[2],
                    q[3],
                    window,
                    sinks,
                    recent,
                    skip,
                    tau,
                    1.0f / std::sqrt(static_cast<float>(q[3]))};
  const int64_t batch = q[0];
  std::vector<Group> groups;
  groups.reserve(part.size());
  int64_t first_head = 0;
  for (size_t i = 0; i < part.size(); ++i) {
    auto floats = [&](int64_t n) { return *arguments.get<Floats>(i * kArguments + n); };
    auto ints = [&](int64_t n) { return *arguments.get<Int32s>(i * kArguments + n); };
    auto made = [&](int64_t n) { return *results.get<Floats>(i * kResults + n); };
    const Floats keys = floats(2);
    const int64_t kv_heads = keys.dimensions()[1], slots = keys.dimensions()[2];
    const int64_t rows = batch * kv_heads, count = ceil_div(slots, part[i]);
    if (floats(0).typed_data() != made(0)->typed_data() ||
        floats(1).typed_data() != made(1)->typed_data())
      return ffi::Error::Internal("near keys and values must be changed in place");
    groups.push_back(
        {layer,
         heads.begin() + first_head,
         first_head,
         rows,
         kv_heads,
         slots,
         floats(0).dimensions()[2],
         part[i],
         count,
         keys.typed_data(),
         ints(3).typed_data(),
         ints(4).typed_data(),
         ints(5).typed_data(),
         floats(6).typed_data(),
         made(0)->typed_data(),
         made(1)->typed_data(),
         (*results.get<Int32s>(i * kResults + 2))->typed_data(),
         made(3)->typed_data(),
         made(4)->typed_data(),
         Parts(made(5)->typed_data(), layer.group, count, layer.dim),
         std::vector<char>(rows),
         std::vector<char>(rows),
         std::vector<float>(skip == kExact ? rows * layer.group * count * 2 : 0),
         std::make_unique<Progress[]>(rows)});
    for (int64_t row = 0; row < rows; ++row) {
      groups.back().progress[row].far = count;
      groups.back().progress[row].values = count;
    }
    first_head += kv_heads;
  }

  int64_t all_rows = 0, all_parts = 0;
  for (const Group& group : groups) {
    all_rows += group.rows;
    all_parts += group.rows * group.count;
  }
  parallel(pool, all_rows + (skip == kExact ? 2 : 1) * all_parts, [&](int64_t unit) {
    for (Group& group : groups) {
      if (unit < group.rows) return group.near_unit(unit);
      unit -= group.rows;
    }
    const bool values = unit >= all_parts;
    if (values) unit -= all_parts;
    for (Group& group : groups) {
      const int64_t row = unit / group.count, c = unit % group.count;
      if (row < group.rows) return values ? group.value_unit(row, c) : group.far_unit(row, c);
      unit -= group.rows * group.count;
    }
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
                                  .Arg<Int32s>()  // position
                                  .RemainingArgs()
                                  .Ret<Floats>()  // out
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("heads")
                                  .Attr<ffi::Span<const int64_t>>("part")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("sinks")
                                  .Attr<int64_t>("recent")
                                  .Attr<int64_t>("skip")
                                  .Attr<float>("tau"));

}  // namespace jaxkv
