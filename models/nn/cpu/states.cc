// Layers with a state: convolutions and the gated delta rule along the paths of
// a token tree.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "handlers.h"
#include "rows.h"
#include "threads.h"
#include "vectors.h"

namespace specdec {
namespace {

using IntBuffer = ffi::Buffer<ffi::S32>;

// Sums of x [B, L, width] and of the n inputs before it, times weights
// [n + 1, width], the farthest first. `index` [B, L, n] says where those before
// are, nearest first: in the state [B, n, width], and behind it in the window
// [B, 1, T, width].
ffi::Error Convolve(ffi::ThreadPool pool, FloatBuffer x, FloatBuffer state,
                    FloatBuffer window, IntBuffer index, FloatBuffer weights,
                    FloatBuffer bias, FloatResult out, bool silu) {
  const int64_t length = x.dimensions()[1], width = x.dimensions()[2];
  const int64_t count = state.dimensions()[1], slots = window.dimensions()[2];
  const int64_t nodes = x.dimensions()[0] * length;
  const float* const added = OrNull(bias);
  Team(pool, nodes, nodes * (count + 1) * width * 4).For(nodes, [&](int64_t at) {
    const int64_t row = at / length;
    thread_local std::vector<const float*> inputs;
    inputs.assign(count + 1, x.typed_data() + at * width);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = std::clamp<int64_t>(
          index.typed_data()[at * count + i], 0, count + slots - 1);
      inputs[count - 1 - i] =
          place < count
              ? state.typed_data() + (row * count + place) * width
              : window.typed_data() + (row * slots + place - count) * width;
    }
    for (int64_t d = 0; d < width; d += kLanes) {
      const int64_t left = width - d;
      Floats sum = {};
      for (int64_t i = 0; i <= count; ++i) {
        sum += LoadFloats(inputs[i] + d, left) *
               LoadFloats(weights.typed_data() + i * width + d, left);
      }
      if (added != nullptr) sum += LoadFloats(added + d, left);
      if (silu) sum *= Sigmoid(sum);
      StoreFirst(out->typed_data() + at * width + d, sum, left);
    }
  });
  return ffi::Error::Success();
}

// x times the sigmoid of a gate, or its SiLU, of any equal shapes.
ffi::Error Gate(FloatBuffer x, FloatBuffer gate, FloatResult out, bool silu) {
  const int64_t count = x.element_count();
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i;
    const Floats values = LoadFloats(gate.typed_data() + i, left);
    Floats factor = Sigmoid(values);
    if (silu) factor *= values;
    StoreFirst(out->typed_data() + i,
               LoadFloats(x.typed_data() + i, left) * factor, left);
  }
  return ffi::Error::Success();
}

// A row of a state [width] after a token: decay * row + key * delta. It is not
// inlined, so that folding and walking a tree compute the same bits.
__attribute__((noinline)) void UpdateRow(const float* from, float decay,
                                         float key, const float* delta,
                                         int64_t width, float* to) {
  for (int64_t d = 0; d < width; d += kLanes) {
    const int64_t left = width - d;
    StoreFirst(to + d,
               LoadFloats(from + d, left) * decay +
                   LoadFloats(delta + d, left) * key,
               left);
  }
}

// The sizes of a layer of the gated delta rule. A head of values has a state
// [key_width, width]; `heads / key_heads` of them share a head of keys, side by
// side or, if `tiled`, in turns.
struct Heads {
  int64_t key_heads, heads, key_width, width;
  bool tiled;

  int64_t key_at(int64_t token, int64_t head) const {
    const int64_t own = tiled ? head % key_heads : head / (heads / key_heads);
    return (token * key_heads + own) * key_width;
  }
};

// Tokens change a state S to `decay * S + key delta^T`.
struct Added {
  const float *keys, *deltas, *decays;

  void Update(const Heads& heads, int64_t token, int64_t head, int64_t i,
              const float* from, float* to) const {
    const int64_t at = token * heads.heads + head;
    UpdateRow(from, decays[at], keys[heads.key_at(token, head) + i],
              deltas + at * heads.width, heads.width, to);
  }
};

// Takes states [B, H, K, V] on by the first count [B] of slots [B, n]; the
// window has keys, deltas and decays [B, 1, T, ...].
ffi::Error FoldDelta(ffi::ThreadPool pool, FloatBuffer states, FloatBuffer keys,
                     FloatBuffer deltas, FloatBuffer decays, IntBuffer slots,
                     IntBuffer count, FloatResult out, bool tiled) {
  const auto dims = states.dimensions();
  const Heads heads{keys.dimensions()[3] / dims[2], dims[1], dims[2], dims[3],
                    tiled};
  const Added added{keys.typed_data(), deltas.typed_data(),
                    decays.typed_data()};
  const int64_t length = keys.dimensions()[2], most = slots.dimensions()[1];
  float* const result = out->typed_data();
  if (result != states.typed_data()) {
    std::memcpy(result, states.typed_data(), states.size_bytes());
  }
  const int64_t number = dims[0] * heads.heads;
  Team(pool, number, states.size_bytes()).For(number, [&](int64_t index) {
    const int64_t row = index / heads.heads, head = index % heads.heads;
    const int64_t last = std::min<int64_t>(count.typed_data()[row], most);
    for (int64_t i = 0; i < heads.key_width; ++i) {
      float* const to = result + (index * heads.key_width + i) * heads.width;
      for (int64_t j = 0; j < last; ++j) {
        const int64_t slot = std::clamp<int64_t>(
            slots.typed_data()[row * most + j], 0, length - 1);
        added.Update(heads, row * length + slot, head, i, to, to);
      }
    }
  });
  return ffi::Error::Success();
}

// A forward over a token tree; see `state_ops.walk_delta`.
struct Walk {
  Heads heads;
  int64_t slots, length;
  const float *states, *mixed, *alpha, *beta, *rate, *bias;
  Added window;
  const int32_t *parents, *first;
  float *out, *keys, *deltas, *decays;
};

// The unit vector of a head, times `factor`.
inline void Direction(const float* from, int64_t width, float factor, float* to) {
  Floats squares = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats values = LoadFloats(from + i, width - i);
    squares += values * values;
  }
  const float scale = factor / std::sqrt(Sum(squares) + 1e-6f);
  for (int64_t i = 0; i < width; i += kLanes) {
    StoreFirst(to + i, LoadFloats(from + i, width - i) * scale, width - i);
  }
}

// Computes what a node adds to the state S of its parent, and what is read from
// its own: `S' q = decay (S q) + (k q) delta`. So a state is read once, and only
// nodes with children have one.
inline void VisitNode(const Walk& walk, int64_t token, int64_t head,
                      const float* state, float* query) {
  const Heads& heads = walk.heads;
  const int64_t width = heads.width, key_width = heads.key_width;
  const int64_t all_keys = heads.key_heads * key_width;
  const float* const mixed =
      walk.mixed + token * (2 * all_keys + heads.heads * width);
  const int64_t at = token * heads.heads + head;
  const int64_t key_at = heads.key_at(token, head);
  const int64_t in_token = key_at - token * all_keys;
  // All heads that share a key write the same values.
  float* const key = query + key_width;
  Direction(mixed + in_token, key_width, 1.0f / std::sqrt(float(key_width)),
            query);
  Direction(mixed + all_keys + in_token, key_width, 1.0f, key);
  const float step = walk.alpha[at] + walk.bias[head];
  const float softplus = step > 20.0f ? step : std::log1p(std::exp(step));
  const float decay = std::exp(walk.rate[head] * softplus);
  const float strength = 1.0f / (1.0f + std::exp(-walk.beta[at]));
  walk.decays[at] = decay;
  Floats products = {};
  for (int64_t i = 0; i < key_width; i += kLanes) {
    products += LoadFloats(query + i, key_width - i) *
                LoadFloats(key + i, key_width - i);
  }
  const float both = Sum(products);
  const float* const value = mixed + 2 * all_keys + head * width;
  constexpr int kParts = 4;
  for (int64_t d = 0; d < width; d += kParts * kLanes) {
    Floats of_key[kParts] = {}, of_query[kParts] = {};
    for (int64_t i = 0; i < key_width; ++i) {
      const float* const from = state + i * width + d;
      for (int p = 0; p < kParts && d + p * kLanes < width; ++p) {
        const Floats values =
            LoadFloats(from + p * kLanes, width - d - p * kLanes);
        of_key[p] += values * key[i];
        of_query[p] += values * query[i];
      }
    }
    for (int p = 0; p < kParts && d + p * kLanes < width; ++p) {
      const int64_t place = d + p * kLanes, left = width - place;
      const Floats delta =
          (LoadFloats(value + place, left) - of_key[p] * decay) * strength;
      StoreFirst(walk.deltas + at * width + place, delta, left);
      StoreFirst(walk.out + at * width + place,
                 of_query[p] * decay + delta * both, left);
    }
  }
  if (head == (heads.tiled ? in_token / key_width
                           : in_token / key_width * (heads.heads / heads.key_heads))) {
    std::copy(key, key + key_width, walk.keys + key_at);
  }
}

// Goes through a tree depth first, with a stack of the states above a node.
inline void WalkHead(const Walk& walk, int64_t row, int64_t head) {
  const Heads& heads = walk.heads;
  const int64_t size = heads.key_width * heads.width;
  const int64_t first = walk.first[row];
  const int64_t end = std::min(first + walk.length, walk.slots);
  const int32_t* const parents = walk.parents + row * walk.slots;
  thread_local std::vector<int64_t> child, next, above;
  thread_local std::vector<float> stack, query;
  // The first child of each slot, behind it that of the text; and its siblings.
  child.assign(end + 1, -1);
  next.assign(end + 1, -1);
  for (int64_t slot = end - 1; slot >= 0; --slot) {
    const bool known = parents[slot] >= 0 && parents[slot] < slot;
    int64_t& head_of = child[known ? parents[slot] : end];
    next[slot] = head_of;
    head_of = slot;
  }
  query.resize(2 * heads.key_width);
  const float* const state = walk.states + (row * heads.heads + head) * size;
  above.clear();
  for (int64_t slot = child[end]; slot >= 0;) {
    const int64_t depth = above.size();
    const float* const from =
        depth == 0 ? state : stack.data() + (depth - 1) * size;
    const bool is_new = slot >= first;
    const int64_t token =
        is_new ? row * walk.length + slot - first : row * walk.slots + slot;
    if (is_new) VisitNode(walk, token, head, from, query.data());
    if (child[slot] >= 0) {
      if (static_cast<int64_t>(stack.size()) < (depth + 1) * size) {
        stack.resize((depth + 1) * size);
      }
      const float* const parent =
          depth == 0 ? state : stack.data() + (depth - 1) * size;
      float* const to = stack.data() + depth * size;
      for (int64_t i = 0; i < heads.key_width; ++i) {
        if (is_new) {
          UpdateRow(parent + i * heads.width,
                    walk.decays[token * heads.heads + head],
                    query[heads.key_width + i],
                    walk.deltas + (token * heads.heads + head) * heads.width,
                    heads.width, to + i * heads.width);
        } else {
          walk.window.Update(heads, token, head, i, parent + i * heads.width,
                             to + i * heads.width);
        }
      }
      above.push_back(slot);
      slot = child[slot];
      continue;
    }
    while (next[slot] < 0 && !above.empty()) {
      slot = above.back();
      above.pop_back();
    }
    slot = next[slot];
  }
}

ffi::Error WalkDelta(ffi::ThreadPool pool, FloatBuffer states, FloatBuffer keys,
                     FloatBuffer deltas, FloatBuffer decays, IntBuffer parents,
                     IntBuffer first, FloatBuffer mixed, FloatBuffer alpha,
                     FloatBuffer beta, FloatBuffer rate, FloatBuffer bias,
                     FloatResult out, FloatResult new_keys,
                     FloatResult new_deltas, FloatResult new_decays,
                     bool tiled) {
  const auto dims = states.dimensions();
  Walk walk;
  walk.heads = {keys.dimensions()[3] / dims[2], dims[1], dims[2], dims[3],
                tiled};
  walk.slots = keys.dimensions()[2];
  walk.length = mixed.dimensions()[1];
  walk.states = states.typed_data();
  walk.mixed = mixed.typed_data();
  walk.alpha = alpha.typed_data();
  walk.beta = beta.typed_data();
  walk.rate = rate.typed_data();
  walk.bias = bias.typed_data();
  walk.window = {keys.typed_data(), deltas.typed_data(), decays.typed_data()};
  walk.parents = parents.typed_data();
  walk.first = first.typed_data();
  walk.out = out->typed_data();
  walk.keys = new_keys->typed_data();
  walk.deltas = new_deltas->typed_data();
  walk.decays = new_decays->typed_data();
  const int64_t number = dims[0] * dims[1];
  Team(pool, number, states.size_bytes()).For(number, [&](int64_t index) {
    WalkHead(walk, index / dims[1], index % dims[1]);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specdec

namespace ffi = xla::ffi;
using specdec::FloatBuffer;
using IntBuffer = ffi::Buffer<ffi::S32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_convolve, specdec::Convolve,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Ret<FloatBuffer>()
                                  .Attr<bool>("silu"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_gate, specdec::Gate,
                              ffi::Ffi::Bind()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Ret<FloatBuffer>()
                                  .Attr<bool>("silu"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_fold_delta, specdec::FoldDelta,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<IntBuffer>()
                                  .Ret<FloatBuffer>()
                                  .Attr<bool>("tiled"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_walk_delta, specdec::WalkDelta,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Ret<FloatBuffer>()
                                  .Ret<FloatBuffer>()
                                  .Ret<FloatBuffer>()
                                  .Ret<FloatBuffer>()
                                  .Attr<bool>("tiled"));
