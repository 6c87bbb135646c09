// Layers with a state: convolutions and the gated delta rule along the paths of
// a token tree.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "handlers.h"
#include "rows.h"
#include "threads.h"
#include "vectors.h"

namespace specdec {
namespace {

// Nodes of token trees in windows of slots; parents come first.
struct Nodes {
  int64_t slots, length;  // T, and L of this forward.
  const int32_t *parents, *first;  // [B, T], see `Parent`; [B] slots.

  Nodes(const IntBuffer& parents, const IntBuffer& first, int64_t length)
      : slots(parents.dimensions()[1]),
        length(length),
        parents(parents.typed_data()),
        first(first.typed_data()) {}

  // The slot of the parent; -1: the text.
  int64_t Parent(int64_t row, int64_t slot) const {
    const int64_t parent = parents[row * slots + slot];
    return parent < slot ? parent : -1;
  }

  int64_t First(int64_t row) const {
    return std::clamp<int64_t>(first[row], 0, slots - length);
  }
};

// A window [B, T, width], which a kernel is given and returns.
struct Window {
  float* values;
  int64_t slots, width;

  // `length` slots of it are written.
  Window(const FloatBuffer& before, FloatResult& after, int64_t length)
      : values(after->typed_data()),
        slots(after->dimensions()[2]),
        width(after->dimensions()[3]) {
    // XLA copies it where it cannot give the same memory.
    if (values != before.typed_data() && length < slots) {
      std::memcpy(values, before.typed_data(), before.size_bytes());
    }
  }

  float* At(int64_t row, int64_t slot) const {
    return values + (row * slots + slot) * width;
  }
};

// A depthwise convolution along paths: sums of the inputs of a node and of the
// n before it, times weights [n + 1, width], the farthest first.
struct Convolution {
  Nodes nodes;
  Window window;
  int64_t before;  // n
  const float *state, *weights, *bias;  // [B, n, width]; bias may be null.
  const float* x;  // [B, L, stride], the inputs of the nodes.
  int64_t stride;

  // Computes `count` channels of a node, from `channel` on. `to` may be `x`, if
  // the nodes after this one are done.
  void Compute(int64_t row, int64_t node, int64_t channel, int64_t count,
               bool silu, float* to) const {
    constexpr int64_t kMost = 16;  // Checked in `ops.py`.
    const float* inputs[kMost];
    const int64_t first = nodes.First(row);
    int64_t slot = first + node, text = before;
    for (int64_t i = before; i >= 0; --i) {
      if (slot >= first) {
        inputs[i] = x + (row * nodes.length + slot - first) * stride + channel;
      } else if (slot >= 0) {
        inputs[i] = window.At(row, slot) + channel;
      } else {
        inputs[i] = state + (row * before + --text) * window.width + channel;
      }
      if (slot >= 0) slot = nodes.Parent(row, slot);
    }
    ForVectors(count, [&](int64_t d, auto left) {
      Floats sum = {};
      for (int64_t i = 0; i <= before; ++i) {
        sum += LoadFloats(inputs[i] + d, left) *
               LoadFloats(weights + i * window.width + channel + d, left);
      }
      if (bias != nullptr) sum += LoadFloats(bias + channel + d, left);
      if (silu) sum *= Sigmoid(sum);
      StoreFirst(to + d, sum, left);
    });
  }
};

// The convolution of LFM2, of projections [B, L, 3 width]: the first times the
// third part are its inputs, its result is multiplied with the second one.
ffi::Error MixConvolution(ffi::ThreadPool pool, FloatBuffer projected,
                          FloatBuffer state, FloatBuffer window,
                          IntBuffer parents, IntBuffer first,
                          FloatBuffer weights, FloatBuffer bias,
                          FloatResult out, FloatResult new_window) {
  constexpr int64_t kChannels = 256;  // That are computed at once.
  const auto dims = out->dimensions();
  const int64_t length = dims[1], width = dims[2];
  const Convolution convolution{Nodes(parents, first, length),
                                Window(window, new_window, length),
                                state.dimensions()[1],
                                state.typed_data(),
                                weights.typed_data(),
                                OrNull(bias),
                                out->typed_data(),
                                width};
  const int64_t parts = (width + kChannels - 1) / kChannels;
  const int64_t bytes = projected.size_bytes();
  Team(pool, dims[0] * parts, bytes).For(dims[0] * parts, [&](int64_t index) {
    const int64_t row = index / parts, channel = index % parts * kChannels;
    const int64_t count = std::min(width - channel, kChannels);
    const int64_t slot = convolution.nodes.First(row);
    const float* const gate =
        projected.typed_data() + row * length * 3 * width + channel;
    float* const to = out->typed_data() + row * length * width + channel;
    for (int64_t node = 0; node < length; ++node) {
      const float* const from = gate + node * 3 * width;
      float* const kept = convolution.window.At(row, slot + node) + channel;
      ForVectors(count, [&](int64_t d, auto left) {
        const Floats input =
            LoadFloats(from + d, left) * LoadFloats(from + 2 * width + d, left);
        StoreFirst(to + node * width + d, input, left);
        StoreFinite(kept + d, input, left);
      });
    }
    for (int64_t node = length - 1; node >= 0; --node) {
      float* const sums = to + node * width;
      convolution.Compute(row, node, channel, count, false, sums);
      const float* const factors = gate + node * 3 * width + width;
      ForVectors(count, [&](int64_t d, auto left) {
        StoreFirst(sums + d,
                   LoadFloats(sums + d, left) * LoadFloats(factors + d, left),
                   left);
      });
    }
  });
  return ffi::Error::Success();
}

// x times the sigmoid of a gate, of any equal shapes.
ffi::Error Gate(FloatBuffer x, FloatBuffer gate, FloatResult out) {
  ForVectors(x.element_count(), [&](int64_t i, auto left) {
    const Floats factor = Sigmoid(LoadFloats(gate.typed_data() + i, left));
    StoreFirst(out->typed_data() + i,
               LoadFloats(x.typed_data() + i, left) * factor, left);
  });
  return ffi::Error::Success();
}

// Columns of a state that are computed at once. Columns do not depend on one
// another, and these columns of all rows fit into the first cache.
constexpr int kParts = 4, kColumns = kParts * kLanes;

// Some columns of a row of a state. Vectors have them in whole cache lines.
struct Columns {
  Floats parts[kParts];

  float* values() { return reinterpret_cast<float*>(this); }
};

// A state [rows, width] as columns: all rows of the first ones, then of the
// next. It is read in the order of memory, and ahead, which the processor does
// not do from page to page.
void Split(const float* state, int64_t rows, int64_t width,
           std::vector<Columns>* columns) {
  constexpr int64_t kLine = 16, kAhead = 2048;
  columns->resize((width + kColumns - 1) / kColumns * rows);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < width; d += kLine) {
      __builtin_prefetch(state + i * width + d + kAhead);
    }
    for (int64_t d = 0; d < width; d += kColumns) {
      std::copy_n(state + i * width + d, std::min<int64_t>(width - d, kColumns),
                  (*columns)[d / kColumns * rows + i].values());
    }
  }
}

// Some columns of a state after a token: decay * state + key * `count` values
// of delta. It is not inlined, so that folding and walking a tree compute the
// same bits. `to` may be `from`.
__attribute__((noinline)) void Update(const Columns* from, int64_t rows,
                                      float decay, const float* key,
                                      const float* delta, int64_t count,
                                      Columns* to) {
  Columns added = {};
  std::copy_n(delta, count, added.values());
  for (int64_t i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      to[i].parts[p] = from[i].parts[p] * decay + added.parts[p] * key[i];
    }
  }
}

// The sizes of a layer of the gated delta rule. A head of values has a state
// [key_width, width]; `heads / key_heads` of them share a head of keys, side by
// side or, if `tiled`, in turns.
struct Heads {
  int64_t key_heads, heads, key_width, width;
  bool tiled;

  Heads(const FloatBuffer& states, const FloatBuffer& keys, bool tiled)
      : key_heads(keys.dimensions()[3] / states.dimensions()[2]),
        heads(states.dimensions()[1]),
        key_width(states.dimensions()[2]),
        width(states.dimensions()[3]),
        tiled(tiled) {}

  // The head of keys of a head of values, and whether that is its first one.
  int64_t KeyHead(int64_t head) const {
    return tiled ? head % key_heads : head / (heads / key_heads);
  }
  bool IsFirst(int64_t head) const {
    return tiled ? head < key_heads : head % (heads / key_heads) == 0;
  }
};

// Takes states [B, H, K, V] on by the first count [B] of slots [B, n]; the
// window has keys, deltas and decays [B, 1, T, ...].
ffi::Error FoldDelta(ffi::ThreadPool pool, FloatBuffer states, FloatBuffer keys,
                     FloatBuffer deltas, FloatBuffer decays, IntBuffer slots,
                     IntBuffer count, FloatResult out, attr::Tiled tiled) {
  const Heads heads(states, keys, *tiled);
  const int64_t length = keys.dimensions()[2], most = slots.dimensions()[1];
  float* const result = out->typed_data();
  if (result != states.typed_data()) {
    std::memcpy(result, states.typed_data(), states.size_bytes());
  }
  const int64_t number = states.dimensions()[0] * heads.heads;
  Team(pool, number, states.size_bytes()).For(number, [&](int64_t index) {
    const int64_t row = index / heads.heads, head = index % heads.heads;
    const int64_t last = std::min<int64_t>(count.typed_data()[row], most);
    const int64_t key_width = heads.key_width, width = heads.width;
    float* const state = result + index * key_width * width;
    if (last <= 0) return;
    thread_local std::vector<Columns> columns;
    Split(state, key_width, width, &columns);
    for (int64_t d = 0; d < width; d += kColumns) {
      Columns* const some = columns.data() + d / kColumns * key_width;
      const int64_t size = std::min<int64_t>(width - d, kColumns);
      for (int64_t j = 0; j < last; ++j) {
        const int64_t slot = std::clamp<int64_t>(
            slots.typed_data()[row * most + j], 0, length - 1);
        const int64_t token = row * length + slot;
        const int64_t at = token * heads.heads + head;
        const int64_t key = token * heads.key_heads + heads.KeyHead(head);
        Update(some, key_width, decays.typed_data()[at],
               keys.typed_data() + key * key_width,
               deltas.typed_data() + at * width + d, size, some);
      }
      for (int64_t i = 0; i < key_width; ++i) {
        std::copy_n(some[i].values(), size, state + i * width + d);
      }
    }
  });
  return ffi::Error::Success();
}

// The unit vector of a head, times `factor`; `to` may be `from`.
inline void Direction(const float* from, int64_t width, float factor,
                      float* to) {
  LaneSums squares;
  ForVectors(width, [&](int64_t i, auto left) {
    const Floats values = LoadFloats(from + i, left);
    squares.At(i) += values * values;
  });
  const float scale = factor / std::sqrt(squares.Total() + 1e-6f);
  ForVectors(width, [&](int64_t i, auto left) {
    StoreFirst(to + i, LoadFloats(from + i, left) * scale, left);
  });
}

// A forward over token trees; see `mix_delta` in ops.py.
struct Walk {
  Heads heads;
  Convolution convolution;  // Its `x` are all projections.
  Window keys, deltas, decays;
  const float *states, *rate, *bias;
  Norm norm;
  float* out;
};

// Memory of a walk, which a thread keeps for its next ones.
struct Scratch {
  // Query, key and value of each node, after convolution and norms.
  std::vector<float> vectors;
  std::vector<float> both, strength;  // Query times key; the step size.
  // The first child of each slot and, last, of the text; the next siblings.
  std::vector<int64_t> child, next;
  std::vector<Columns> text;  // The state of the text, see `Split`.
  std::vector<Columns> stack;  // States of the open path, some columns of each.
  std::vector<std::pair<int64_t, int64_t>> waiting;  // Siblings, their levels.
};

// A head at the nodes of a row.
struct HeadWalk {
  const Walk& walk;
  int64_t row, head, first;
  Scratch& scratch;

  const Nodes& nodes() const { return walk.convolution.nodes; }
  int64_t end() const { return first + nodes().length; }

  float* Query(int64_t node) const {
    const Heads& heads = walk.heads;
    return scratch.vectors.data() + node * (2 * heads.key_width + heads.width);
  }
  float* Key(int64_t node) const { return Query(node) + walk.heads.key_width; }
  float* Value(int64_t node) const {
    return Query(node) + 2 * walk.heads.key_width;
  }

  float* KeptKey(int64_t slot) const {
    return walk.keys.At(row, slot) +
           walk.heads.KeyHead(head) * walk.heads.key_width;
  }
  float* Delta(int64_t slot) const {
    return walk.deltas.At(row, slot) + head * walk.heads.width;
  }
  float& Decay(int64_t slot) const { return walk.decays.At(row, slot)[head]; }

  const float* Projected(int64_t node) const {
    const Convolution& convolution = walk.convolution;
    return convolution.x + (row * nodes().length + node) * convolution.stride;
  }
  float* Out(int64_t node) const {
    const int64_t at = row * nodes().length + node;
    return walk.out + (at * walk.heads.heads + head) * walk.heads.width;
  }

  // Keeps `count` values of a node, at `channel` of the slot's.
  void Keep(const Window& window, int64_t node, int64_t channel,
            const float* from, int64_t count) const {
    CopyFinite(from, count, window.At(row, first + node) + channel);
  }

  // Convolves what is projected for a node, and keeps what is the same for all
  // columns.
  void Prepare(int64_t node) const {
    const Heads& heads = walk.heads;
    const Convolution& convolution = walk.convolution;
    const int64_t key_width = heads.key_width, width = heads.width;
    const int64_t keys = heads.key_heads * key_width;
    const int64_t query_at = heads.KeyHead(head) * key_width;
    const float* const x = Projected(node);
    float *const query = Query(node), *const key = Key(node);
    // All heads that share a key would keep the same.
    const bool is_first = heads.IsFirst(head);
    const auto convolve = [&](int64_t channel, int64_t count, bool keeps,
                              float* to) {
      convolution.Compute(row, node, channel, count, true, to);
      if (keeps) Keep(convolution.window, node, channel, x + channel, count);
    };
    convolve(query_at, key_width, is_first, query);
    convolve(keys + query_at, key_width, is_first, key);
    convolve(2 * keys + head * width, width, true, Value(node));
    Direction(query, key_width, 1.0f / std::sqrt(float(key_width)), query);
    Direction(key, key_width, 1.0f, key);
    LaneSums products;
    ForVectors(key_width, [&](int64_t i, auto left) {
      products.At(i) += LoadFloats(query + i, left) * LoadFloats(key + i, left);
    });
    scratch.both[node] = products.Total();
    if (is_first) Keep(walk.keys, node, query_at, key, key_width);
    // Behind the gates, a number per head each.
    const float* const beta =
        x + convolution.window.width + heads.heads * width + head;
    scratch.strength[node] = 1.0f / (1.0f + std::exp(-*beta));
    const float step = beta[heads.heads] + walk.bias[head];
    const float softplus = step > 20.0f ? step : std::log1p(std::exp(step));
    const float decay = std::exp(walk.rate[head] * softplus);
    Keep(walk.decays, node, head, &decay, 1);
  }

  // Computes columns of what a node adds to the state S of its parent, and of
  // what is read from its own: `S' q = decay (S q) + (k q) delta`. So a state
  // is read once, and only nodes with children have one.
  void Visit(int64_t node, int64_t column, const Columns* state) const {
    const int64_t key_width = walk.heads.key_width;
    const float *const query = Query(node), *const key = Key(node);
    Floats of_key[kParts] = {}, of_query[kParts] = {};
    for (int64_t i = 0; i < key_width; ++i) {
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        of_key[p] += state[i].parts[p] * key[i];
        of_query[p] += state[i].parts[p] * query[i];
      }
    }
    const float decay = Decay(first + node);
    for (int p = 0; p < kParts; ++p) {
      const int64_t at = column + p * kLanes, left = walk.heads.width - at;
      if (left <= 0) break;
      const Floats value = LoadFloats(Value(node) + at, left);
      const Floats delta = (value - of_key[p] * decay) * scratch.strength[node];
      StoreFinite(Delta(first + node) + at, delta, left);
      StoreFirst(Out(node) + at,
                 of_query[p] * decay + delta * scratch.both[node], left);
    }
  }

  // Goes through the tree depth first. A state is written over the parent's
  // state, unless a sibling still needs the latter.
  void WalkColumns(int64_t column) const {
    const std::vector<int64_t>&child = scratch.child, &next = scratch.next;
    const int64_t size = walk.heads.key_width;
    const int64_t count =
        std::min<int64_t>(walk.heads.width - column, kColumns);
    const auto state = [&](int64_t level) {
      return level == 0 ? scratch.text.data() + column / kColumns * size
                        : scratch.stack.data() + (level - 1) * size;
    };
    int64_t slot = child[end()], level = 0;
    while (true) {
      if (slot >= first) Visit(slot - first, column, state(level));
      if (child[slot] >= 0) {
        const int64_t from = level;
        if (next[slot] >= 0) {
          scratch.waiting.push_back({next[slot], level++});
          if (static_cast<int64_t>(scratch.stack.size()) < level * size) {
            scratch.stack.resize(level * size);
          }
        }
        const float* const key =
            slot >= first ? Key(slot - first) : KeptKey(slot);
        Update(state(from), size, Decay(slot), key, Delta(slot) + column, count,
               state(level));
        slot = child[slot];
      } else if (next[slot] >= 0) {
        slot = next[slot];
      } else if (!scratch.waiting.empty()) {
        std::tie(slot, level) = scratch.waiting.back();
        scratch.waiting.pop_back();
      } else {
        return;
      }
    }
  }

  // The norm of what is read, times the SiLU of its gate.
  void Finish(int64_t node) const {
    const int64_t width = walk.heads.width;
    float* const values = Out(node);
    Normalize(walk.norm, values, width, values);
    const float* const gate =
        Projected(node) + walk.convolution.window.width + head * width;
    ForVectors(width, [&](int64_t d, auto left) {
      const Floats factor = LoadFloats(gate + d, left);
      StoreFirst(values + d,
                 LoadFloats(values + d, left) * (factor * Sigmoid(factor)),
                 left);
    });
  }

  void Run() const {
    const Heads& heads = walk.heads;
    const int64_t length = nodes().length;
    scratch.vectors.resize(length * (2 * heads.key_width + heads.width));
    scratch.both.resize(length);
    scratch.strength.resize(length);
    for (int64_t node = 0; node < length; ++node) Prepare(node);
    scratch.child.assign(end() + 1, -1);
    scratch.next.assign(end() + 1, -1);
    for (int64_t slot = end() - 1; slot >= 0; --slot) {
      const int64_t parent = nodes().Parent(row, slot);
      int64_t& head_of = scratch.child[parent < 0 ? end() : parent];
      scratch.next[slot] = head_of;
      head_of = slot;
    }
    const int64_t size = heads.key_width * heads.width;
    Split(walk.states + (row * heads.heads + head) * size, heads.key_width,
          heads.width, &scratch.text);
    for (int64_t d = 0; d < heads.width; d += kColumns) WalkColumns(d);
    for (int64_t node = 0; node < length; ++node) Finish(node);
  }
};

ffi::Error MixDelta(ffi::ThreadPool pool, FloatBuffer projected,
                    FloatBuffer conv_state, FloatBuffer states,
                    FloatBuffer inputs, FloatBuffer keys, FloatBuffer deltas,
                    FloatBuffer decays, IntBuffer parents, IntBuffer first,
                    FloatBuffer weights, FloatBuffer rate, FloatBuffer bias,
                    FloatBuffer norm_scale, FloatResult out,
                    FloatResult new_inputs, FloatResult new_keys,
                    FloatResult new_deltas, FloatResult new_decays,
                    attr::Epsilon epsilon, attr::Tiled tiled) {
  const auto dims = projected.dimensions();
  const int64_t length = dims[1];
  const Walk walk{
      Heads(states, keys, *tiled),
      {Nodes(parents, first, length), Window(inputs, new_inputs, length),
       conv_state.dimensions()[1], conv_state.typed_data(),
       weights.typed_data(), nullptr, projected.typed_data(), dims[2]},
      Window(keys, new_keys, length),
      Window(deltas, new_deltas, length),
      Window(decays, new_decays, length),
      states.typed_data(),
      rate.typed_data(),
      bias.typed_data(),
      {norm_scale.typed_data(), nullptr, *epsilon, false},
      out->typed_data()};
  const int64_t heads = walk.heads.heads, number = dims[0] * heads;
  Team(pool, number, states.size_bytes()).For(number, [&](int64_t index) {
    thread_local Scratch scratch;
    const int64_t row = index / heads;
    const int64_t first = walk.convolution.nodes.First(row);
    HeadWalk{walk, row, index % heads, first, scratch}.Run();
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specdec

XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_mix_convolution, specdec::MixConvolution);
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_gate, specdec::Gate);
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_fold_delta, specdec::FoldDelta);
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_mix_delta, specdec::MixDelta);
