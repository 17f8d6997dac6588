#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "delta/delta.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

using test::draw;
using test::Random;

// A layer's weights and sequences, and what the delta rule gives of them in double, one position after another.
struct Layer {
  DeltaShape shape;
  int64_t channels, values, heads;  // heads: values' of a head of keys
  std::vector<float> conv, decay, dt_bias, norm;

  Layer(const DeltaShape& shape, Random& random)
      : shape(shape),
        channels(shape.channels()),
        values(shape.value_heads * shape.value_dim),
        heads(shape.value_heads / shape.key_heads),
        conv(draw(shape.kernel * channels, random)),
        decay(draw(shape.value_heads, random, 3)),
        dt_bias(draw(shape.value_heads, random)),
        norm(draw(shape.value_dim, random)) {
    for (float& each : decay) each = -std::fabs(each);
  }
};

struct Sequence {
  int64_t tokens;
  std::vector<float> qkv, z, b, a;  // [tokens]: channels, values, value heads

  Sequence(const Layer& layer, int64_t tokens, Random& random)
      : tokens(tokens),
        qkv(draw(tokens * layer.channels, random, 2)),
        z(draw(tokens * layer.values, random, 2)),
        b(draw(tokens * layer.shape.value_heads, random, 3)),
        a(draw(tokens * layer.shape.value_heads, random, 3)) {}
};

double silu(double x) {
  return x / (1 + std::exp(-x));
}

std::vector<double> expected(const Layer& layer, const Sequence& given) {
  const DeltaShape& s = layer.shape;
  const int64_t keys = s.key_heads * s.key_dim;
  std::vector<double> out(static_cast<size_t>(given.tokens * layer.values));
  std::vector<double> states(static_cast<size_t>(s.value_heads * s.key_dim * s.value_dim));
  std::vector<double> x(static_cast<size_t>(layer.channels));
  for (int64_t t = 0; t < given.tokens; ++t) {
    for (int64_t c = 0; c < layer.channels; ++c) {
      double sum = 0;
      for (int64_t j = 0; j < s.kernel; ++j) {
        const int64_t at = t - s.kernel + 1 + j;
        if (at >= 0) sum += double{given.qkv[at * layer.channels + c]} * layer.conv[j * layer.channels + c];
      }
      x[c] = silu(sum);
    }
    for (int64_t h = 0; h < 2 * s.key_heads; ++h) {  // queries, then keys
      double squares = 0;
      for (int64_t d = 0; d < s.key_dim; ++d) squares += x[h * s.key_dim + d] * x[h * s.key_dim + d];
      const double by = 1 / std::sqrt(squares + 1e-6) / (h < s.key_heads ? std::sqrt(double(s.key_dim)) : 1);
      for (int64_t d = 0; d < s.key_dim; ++d) x[h * s.key_dim + d] *= by;
    }
    for (int64_t h = 0; h < s.value_heads; ++h) {
      const int64_t key = s.tiled ? h % s.key_heads : h / layer.heads;
      const double* q = &x[key * s.key_dim];
      const double* k = &x[keys + key * s.key_dim];
      const double* v = &x[2 * keys + h * s.value_dim];
      const double rate = 1 / (1 + std::exp(-double{given.b[t * s.value_heads + h]}));
      const double a = double{given.a[t * s.value_heads + h]} + layer.dt_bias[h];
      const double g = std::exp(layer.decay[h] * std::log1p(std::exp(a)));
      double squares = 0;
      std::vector<double> got(static_cast<size_t>(s.value_dim));
      for (int64_t e = 0; e < s.value_dim; ++e) {
        double* state = &states[h * s.key_dim * s.value_dim + e];
        double seen = 0;
        for (int64_t d = 0; d < s.key_dim; ++d) seen += (state[d * s.value_dim] *= g) * k[d];
        for (int64_t d = 0; d < s.key_dim; ++d) {
          state[d * s.value_dim] += k[d] * rate * (v[e] - seen);
          got[e] += q[d] * state[d * s.value_dim];
        }
        squares += got[e] * got[e];
      }
      const double scale = 1 / std::sqrt(squares / s.value_dim + 1e-6);
      for (int64_t e = 0; e < s.value_dim; ++e) {
        const int64_t at = t * layer.values + h * s.value_dim + e;
        out[at] = got[e] * scale * layer.norm[e] * silu(given.z[at]);
      }
    }
  }
  return out;
}

// Rows of a step: (sequence, positions [first, end), state).
struct Row {
  const Sequence* sequence;
  int64_t first, end;
  DeltaState state;
};

// [tokens][values] of each row, of inputs as the shape's projections give them.
std::vector<std::vector<float>> step(DeltaNet& net, const Layer& layer, const std::vector<Row>& rows) {
  const DeltaShape& s = layer.shape;
  std::vector<int64_t> starts{0}, contexts;
  std::vector<DeltaState> states;
  std::vector<float> wide, z, gates, a;
  const auto put = [](std::vector<float>& to, const std::vector<float>& from, int64_t at, int64_t n) {
    to.insert(to.end(), from.begin() + at, from.begin() + at + n);
  };
  for (const Row& row : rows) {
    starts.push_back(starts.back() + row.end - row.first);
    contexts.push_back(row.end);
    states.push_back(row.state);
    const Sequence& from = *row.sequence;
    for (int64_t t = row.first; t < row.end; ++t) {
      const int64_t channel = t * layer.channels, keys = s.key_heads * s.key_dim, run = layer.heads * s.value_dim;
      if (!s.fused) {
        put(wide, from.qkv, channel, layer.channels);
        put(z, from.z, t * layer.values, layer.values);
      }
      if (!s.fused_gates) {
        put(gates, from.b, t * s.value_heads, s.value_heads);
        put(a, from.a, t * s.value_heads, s.value_heads);
      }
      for (int64_t h = 0; h < s.key_heads; ++h) {
        if (s.fused) {
          put(wide, from.qkv, channel + h * s.key_dim, s.key_dim);
          put(wide, from.qkv, channel + keys + h * s.key_dim, s.key_dim);
          put(wide, from.qkv, channel + 2 * keys + h * run, run);
          put(wide, from.z, t * layer.values + h * run, run);
        }
        if (!s.fused_gates) continue;
        put(gates, from.b, t * s.value_heads + h * layer.heads, layer.heads);
        put(gates, from.a, t * s.value_heads + h * layer.heads, layer.heads);
      }
    }
  }
  std::vector<float> out(static_cast<size_t>(starts.back() * layer.values));
  net.plan(starts, contexts, states);
  const int64_t width = s.fused ? layer.channels + layer.values : layer.channels;
  net.forward(0, starts.back(), {layer.conv.data(), layer.decay.data(), layer.dt_bias.data(), layer.norm.data(), 1e-6f},
              {wide.data(), width, s.fused ? wide.data() : z.data(), s.fused ? width : layer.values, gates.data(),
               s.fused_gates ? gates.data() : a.data(), s.fused_gates ? 2 * s.value_heads : s.value_heads, out.data(),
               layer.values, false});
  std::vector<std::vector<float>> found;
  for (size_t r = 0; r < rows.size(); ++r)
    found.emplace_back(out.begin() + starts[r] * layer.values, out.begin() + starts[r + 1] * layer.values);
  return found;
}

void close(const std::vector<float>& got, const std::vector<double>& want, int64_t from, const char* what) {
  for (size_t i = 0; i < got.size(); ++i) {
    const double wanted = want[static_cast<size_t>(from) + i];
    CHECK(std::fabs(got[i] - wanted) <= 2e-4 + 1e-3 * std::fabs(wanted), "%s, %zu: %g, wanted %g", what, i, got[i],
          wanted);
  }
}

DeltaShape draw_shape(Random& random) {
  const int64_t key_heads = 1 + random.below(3), shared = 1 + random.below(3);
  const int form = static_cast<int>(random.below(4));  // all fused, gates alone, neither, neither and tiled
  return {1,
          8,
          key_heads,
          key_heads * shared,
          16 * (1 + random.below(3)),
          16 * (1 + random.below(6)),
          2 + random.below(4),
          form == 0,
          form < 2,
          form == 3};
}

// Two sequences in pieces of any size, in one step or apart; one begins again from a copy of its state.
KTSERVE_TEST(delta_rule_equals_double_however_it_is_cut) {
  WorkerPool pool(PoolOptions{{{0, 1, 0}}});
  for (Isa isa : test::isas()) {
    Random random(21);
    for (int round = 0; round < 12; ++round) {
      const Layer layer(draw_shape(random), random);
      DeltaNet net(pool, layer.shape, isa);
      const Sequence first(layer, 1 + random.below(200), random), second(layer, 1 + random.below(90), random);
      const std::vector<double> want[] = {expected(layer, first), expected(layer, second)};
      const int64_t copied = 1 + random.below(first.tokens);
      int64_t done[] = {0, 0};
      while (done[0] < first.tokens || done[1] < second.tokens) {
        std::vector<Row> rows;
        std::vector<int> of;
        for (int s : {0, 1}) {
          const Sequence& sequence = s == 0 ? first : second;
          const int64_t left = sequence.tokens - done[s];
          if (left == 0) continue;
          const int64_t n = random.below(3) == 0 ? 1 : 1 + random.below(left);
          DeltaState state{s, done[s] == 0 ? -1 : s, {}};
          if (s == 0 && done[s] < copied && copied <= done[s] + n) state.saves = {{copied, 5}};
          rows.push_back({&sequence, done[s], done[s] + n, state});
          of.push_back(s);
        }
        const auto found = step(net, layer, rows);
        for (size_t r = 0; r < rows.size(); ++r) {
          close(found[r], want[of[r]], rows[r].first * layer.values, isa_name(isa));
          done[of[r]] = rows[r].end;
        }
      }
      if (copied == first.tokens) continue;
      const auto again = step(net, layer, {{&first, copied, first.tokens, {3, 5, {}}}});
      close(again[0], want[0], copied * layer.values, "from a copy");
    }
  }
}

// Rows of drafts of which any number is right, beside a sequence that has none: the bits of one position after another.
KTSERVE_TEST(delta_states_are_rolled_back_to_any_draft) {
  WorkerPool pool(PoolOptions{{{0, 1, 0}}});
  for (Isa isa : test::isas()) {
    Random random(5);
    for (int round = 0; round < 12; ++round) {
      DeltaShape shape = draw_shape(random);
      shape.one_by_one = round % 2 == 0;
      shape.keeping = 2;
      shape.kept = 1 + random.below(6);
      const Layer layer(shape, random);
      DeltaNet net(pool, layer.shape, isa), plain(pool, layer.shape, isa);
      const Sequence right(layer, 60, random), other(layer, 60, random);
      const std::vector<double> want = expected(layer, right);
      step(net, layer, {{&right, 0, 7, {6, -1, {}}}});
      step(plain, layer, {{&right, 0, 7, {0, -1, {}}}});
      int64_t done = 7, at = 7, beside = 0;  // `at`: where the slot's state is
      while (done < 50) {
        // the right beginning of the row, behind which it goes on as the other sequence does
        const int64_t n = 1 + random.below(std::min<int64_t>(shape.kept, 50 - done)), good = 1 + random.below(n);
        Sequence drafted = right;
        const auto wrong = [&](std::vector<float>& to, const std::vector<float>& from, int64_t width) {
          std::copy(from.begin() + (done + good) * width, from.begin() + (done + n) * width,
                    to.begin() + (done + good) * width);
        };
        wrong(drafted.qkv, other.qkv, layer.channels);
        wrong(drafted.z, other.z, layer.values);
        wrong(drafted.b, other.b, shape.value_heads);
        wrong(drafted.a, other.a, shape.value_heads);
        DeltaState state{0, done == 7 ? 6 : 0, {}, done - at, n > 1 || random.below(2) == 0};
        const bool saves = at < done && random.below(3) == 0;
        if (saves) state.saves = {{done, 7}};
        const int64_t more = std::min<int64_t>(60 - beside, 1 + random.below(3));
        std::vector<Row> rows{{&drafted, done, done + n, state}};
        if (more > 0) rows.push_back({&other, beside, beside + more, {4, beside == 0 ? -1 : 4, {}}});
        beside += more;
        auto found = step(net, layer, rows)[0];
        found.resize(static_cast<size_t>(good * layer.values));
        close(found, want, done * layer.values, "drafts");
        for (int64_t t = 0; t < good; ++t) {
          const auto one = step(plain, layer, {{&right, done + t, done + t + 1, {0, 0, {}}}})[0];
          const bool same = std::equal(one.begin(), one.end(), found.begin() + t * layer.values);
          CHECK(!shape.one_by_one || same, "position %d: other bits than without drafts", static_cast<int>(done + t));
        }
        if (saves)
          close(step(net, layer, {{&right, done, done + 1, {5, 7, {}}}})[0], want, done * layer.values, "saved");
        at = state.keeps ? done : done + n;
        done += good;
        if (!state.keeps) CHECK(at == done, "%d positions are in the state", static_cast<int>(at));
      }
    }
  }
}

KTSERVE_TEST(delta_states_that_do_not_fit_are_refused) {
  WorkerPool pool(PoolOptions{{{0, 1}}});
  const Isa isa = test::isas()[0];
  const auto refused = [](const std::string& message, const auto& body) {
    std::string found = "nothing";
    try {
      body();
    } catch (const std::invalid_argument& error) {
      found = error.what();
    }
    CHECK(found.find(message) != std::string::npos, "%s, wanted %s", found.c_str(), message.c_str());
  };
  const DeltaShape good{1, 4, 2, 4, 16, 32, 4, false, false, false};
  const auto with = [&](auto member, auto value) {
    DeltaShape shape = good;
    shape.*member = value;
    return [&pool, isa, shape] { DeltaNet(pool, shape, isa); };
  };
  refused("value_heads: 3; allowed is a multiple of key_heads", with(&DeltaShape::value_heads, 3));
  refused("key_dim: 24; allowed is a multiple of 16", with(&DeltaShape::key_dim, 24));
  refused("value_dim: 8", with(&DeltaShape::value_dim, 8));
  refused("kernel: 9; allowed is 2 to 8", with(&DeltaShape::kernel, 9));
  refused("slots: 0", with(&DeltaShape::slots, 0));
  DeltaNet net(pool, good, isa);
  refused("states: 0; allowed is one per row", [&] { net.plan({0, 1}, {1}, {}); });
  refused("slot of a state: 4; allowed is 0 to 3", [&] { net.plan({0, 1}, {1}, {{4, -1, {}}}); });
  refused("source of a state: -2", [&] { net.plan({0, 1}, {1}, {{0, -2, {}}}); });
  refused("position of a saved state: 1; allowed is 2 to 3", [&] { net.plan({0, 2}, {3}, {{0, 1, {{1, 2}}}}); });
  refused("slot of a saved state: 9", [&] { net.plan({0, 2}, {3}, {{0, 1, {{2, 9}}}}); });
  refused("slot 0 is written by rows 0 and 1", [&] { net.plan({0, 1, 2}, {1, 1}, {{0, -1, {}}, {0, -1, {}}}); });
  refused("slot 3 is written by rows 0 and 1",
          [&] { net.plan({0, 1, 2}, {1, 1}, {{0, -1, {{1, 3}}}, {1, -1, {{1, 3}}}}); });
  refused("slot 0 is written by rows 0 and 0", [&] { net.plan({0, 2}, {2}, {{0, -1, {{1, 0}}}}); });
  refused("row 1 begins from slot 0, which row 0 writes",
          [&] { net.plan({0, 1, 2}, {1, 2}, {{0, -1, {}}, {1, 0, {}}}); });
  refused("replayed positions: 1; allowed is 0 to 0", [&] { net.plan({0, 1}, {3}, {{0, 0, {}, 1}}); });
  refused("slot that keeps inputs: 0; allowed is below 0", [&] { net.plan({0, 1}, {3}, {{0, 0, {}, 0, true}}); });
  refused("keeping: 5; allowed is 0 to 4", with(&DeltaShape::keeping, 5));
  refused("kept: -1; allowed is 0 or more", with(&DeltaShape::kept, -1));
  net.plan({0, 2}, {3}, {{0, 1, {{2, 3}}}});
  refused("tokens: 3; allowed is the plan's 2", [&] { net.forward(0, 3, {}, {}); });
  refused("layer: 1; allowed is 0 to 0", [&] { net.forward(1, 2, {}, {}); });
}

}  // namespace
}  // namespace ktserve
