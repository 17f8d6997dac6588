#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "decoder/decoder.hpp"
#include "decoder/gqa.hpp"
#include "decoder/mlp.hpp"
#include "tests/check.hpp"
#include "tests/world.hpp"

namespace ktserve {
namespace {

using test::draw;
using test::Forward;
using test::Random;
using test::World;

constexpr int64_t kHidden = 64, kInner = 32, kExperts = 6, kTopK = 2, kVocabulary = 50, kRows = 40;

struct Sequence {
  int64_t tokens;
  int32_t slot;
  std::vector<float> embeddings;
};

// An attention and what it is made of: its heads, its rotation and its norm.
struct Heads {
  int heads, kv_heads, head_dim, rotated;
  QkNorm norm;
  std::vector<float> cos, sin, q_norm, k_norm;
  const PackedLinear *q, *k, *v, *o;
};

struct Mlp {
  const PackedLinear *gate, *up, *down;
};

// Three layers that differ in all that layers may: heads, rotation, QK-norm, router; the first dense, the second with a
// gated shared expert, the third with one that is not. Adapters in slots 1 and 3 of the experts. Float32 rows over bf16
// KV.
struct Model {
  World world;
  const char* format;
  Random& random;
  std::vector<std::unique_ptr<PackedLinear>> linears;
  std::vector<float> norm_weights, bias;
  std::vector<Heads> attentions;
  Mlp dense, shared;
  const PackedLinear *router, *shared_gate, *head;

  Model(const char* format, Format expert_format, Random& random)
      : world(kExperts, kHidden, kInner, expert_format, 2, random),
        format(format),
        random(random),
        norm_weights(draw(kHidden, random)),
        bias(draw(kExperts, random)) {
    for (const auto& [heads, kv_heads, head_dim, rotated, norm] :
         {std::tuple{4, 2, 32, 32, QkNorm::head}, {2, 1, 48, 16, QkNorm::whole}, {4, 4, 16, 8, QkNorm::none}}) {
      const int64_t q = heads * head_dim, kv = kv_heads * head_dim;
      const bool whole = norm == QkNorm::whole;
      attentions.push_back({heads, kv_heads, head_dim, rotated, norm, draw(kRows * rotated / 2, random),
                            draw(kRows * rotated / 2, random), draw(whole ? q : head_dim, random),
                            draw(whole ? kv : head_dim, random), make(q, kHidden), make(kv, kHidden), make(kv, kHidden),
                            make(kHidden, q)});
    }
    dense = {make(kInner, kHidden), make(kInner, kHidden), make(kHidden, kInner)};
    shared = {make(2 * kInner, kHidden), make(2 * kInner, kHidden), make(kHidden, 2 * kInner)};
    router = make(kExperts, kHidden, "f32");
    shared_gate = make(1, kHidden, "f32");
    head = make(kVocabulary, kHidden);
  }

  const PackedLinear* make(int64_t n, int64_t inner, const char* as = nullptr) {
    const std::vector<float> w = draw(n * inner, random, 0.2f);
    linears.push_back(std::make_unique<PackedLinear>(as == nullptr ? format : as, n, inner, 2, nullptr));
    linears.back()->load(world.pool, "F32", SourceRows(reinterpret_cast<const uint8_t*>(w.data())), n * inner * 4);
    return linears.back().get();
  }

  // The final hidden state of each token (of those in `keep`, if any), then its greedy token and, of the last layer,
  // its experts; one step, a fresh cache.
  std::vector<std::vector<float>> run(Isa isa, const std::vector<const Sequence*>& sequences,
                                      const std::vector<int64_t>& keep = {}) {
    std::vector<int64_t> starts{0}, contexts, positions;
    std::vector<std::vector<int32_t>> tables;
    std::vector<int32_t> slots;
    std::vector<float> residual;
    int32_t block = 0;
    for (const Sequence* s : sequences) {
      starts.push_back(starts.back() + s->tokens);
      contexts.push_back(s->tokens);
      tables.emplace_back();
      for (int64_t held = 0; held < s->tokens; held += 16) tables.back().push_back(block++);
      for (int64_t p = 0; p < s->tokens; ++p) positions.push_back(p);
      slots.insert(slots.end(), static_cast<size_t>(s->tokens), s->slot);
      residual.insert(residual.end(), s->embeddings.begin(), s->embeddings.end());
    }
    const int64_t tokens = starts.back(), kept = keep.empty() ? tokens : static_cast<int64_t>(keep.size());
    const auto count = static_cast<size_t>(tokens);
    int32_t bsz = 0;
    std::vector<int64_t> ids(count * kTopK), greedy(count), seen(2 * count * kTopK);
    std::vector<int32_t> expert_slots(count);
    std::vector<float> weights(count * kTopK), in(count * kHidden), out(count * kHidden), hidden(count * kHidden);

    const Ops ops(world.pool, isa);
    LinearRunner linear(world.pool, isa, true);
    MoeRunner experts(world.pool, isa, true);
    const Forward task(
        experts, world.layer,
        {&bsz, ids.data(), weights.data(), expert_slots.data(), in.data(), out.data(), tokens, kTopK, false});
    const ExpertMemory memory{&bsz, ids.data(), weights.data(), expert_slots.data(), in.data(), out.data(), tokens};
    Router softmax{kTopK}, sigmoid{kTopK, Score::sigmoid, bias.data(), 3, 2, GroupScore::top2, 1e-20f, 2.5f};
    softmax.normalise = 0.0f;
    const DensePart first(*dense.gate, *dense.up, *dense.down), beside(*shared.gate, *shared.up, *shared.down);
    const SparsePart second(*router, softmax, memory, &task, {&beside, shared_gate});
    const SparsePart third(*router, sigmoid, memory, &task, {&beside, nullptr});

    Decoder decoder(ops, linear, kHidden, 1e-6f, false, false);
    const void* norm = norm_weights.data();
    std::vector<std::unique_ptr<PagedAttention>> paged;
    std::vector<std::unique_ptr<GroupedQueryPart>> parts;
    const MlpPart* mlps[] = {&first, &second, &third};
    for (const Heads& h : attentions) {
      const AttentionShape shape{1, 16, h.heads, h.kv_heads, h.head_dim, KvType::bf16, true};
      paged.push_back(std::make_unique<PagedAttention>(world.pool, shape, isa));
      paged.back()->plan(starts, contexts, tables);
      const bool normed = h.norm != QkNorm::none;
      parts.push_back(std::make_unique<GroupedQueryPart>(
          *paged.back(), 0, Rotation{h.cos.data(), h.sin.data(), kRows, h.rotated},
          GroupedQueryWeights{h.q, h.k, h.v, h.o, h.norm, normed ? h.q_norm.data() : nullptr,
                              normed ? h.k_norm.data() : nullptr}));
      decoder.add_layer({norm, parts.back().get(), norm, mlps[parts.size() - 1]});
    }
    decoder.set_head(norm, *head);
    decoder.run({tokens, residual.data(), positions.data(), slots.data(), keep.empty() ? nullptr : keep.data(), kept,
                 hidden.data(), greedy.data(), seen.data()});

    std::vector<std::vector<float>> rows;
    for (int64_t t = 0; t < kept; ++t) {
      rows.emplace_back(hidden.begin() + t * kHidden, hidden.begin() + (t + 1) * kHidden);
      CHECK(greedy[static_cast<size_t>(t)] >= 0 && greedy[static_cast<size_t>(t)] < kVocabulary);
      rows.back().push_back(static_cast<float>(greedy[static_cast<size_t>(t)]));
      for (int64_t j = 0; j < kTopK; ++j)
        rows.back().push_back(static_cast<float>(seen[static_cast<size_t>((tokens + t) * kTopK + j)]));
    }
    return rows;
  }
};

std::vector<Sequence> sequences_of(Random& random) {
  std::vector<Sequence> sequences;
  for (const auto& [tokens, slot] : {std::pair{5, 0}, {1, 3}, {kRows - 15, 1}, {9, 1}})
    sequences.push_back({tokens, slot, draw(tokens * kHidden, random)});
  return sequences;
}

KTSERVE_TEST(decoder_rows_are_independent) {
  Random random(12);
  for (const auto& [format, experts] : {std::pair{"bf16", Format::bf16}, {"i8", Format::i8}, {"i4m", Format::i4m}}) {
    Model model(format, experts, random);
    const std::vector<Sequence> sequences = sequences_of(random);
    for (Isa isa : test::isas()) {
      const auto together = model.run(isa, {&sequences[0], &sequences[1], &sequences[2], &sequences[3]});
      auto at = together.begin();
      for (const Sequence& s : sequences) {
        const auto alone = model.run(isa, {&s});
        CHECK(std::equal(alone.begin(), alone.end(), at), "%s %s", isa_name(isa), format);
        at += static_cast<int64_t>(alone.size());
      }
      CHECK(at == together.end());
    }
  }
}

KTSERVE_TEST(decoder_kept_rows_are_those_of_all) {
  Random random(5);
  Model model("bf16", Format::bf16, random);
  const std::vector<Sequence> sequences = sequences_of(random);
  const std::vector<int64_t> keep{4, 5, 6, 39};
  for (Isa isa : test::isas()) {
    const auto all = model.run(isa, {&sequences[0], &sequences[1], &sequences[2], &sequences[3]});
    const auto kept = model.run(isa, {&sequences[0], &sequences[1], &sequences[2], &sequences[3]}, keep);
    CHECK(kept.size() == keep.size());
    for (size_t i = 0; i < keep.size(); ++i) CHECK(kept[i] == all[static_cast<size_t>(keep[i])], "%s", isa_name(isa));
  }
}

template <class F>
void refused(const std::string& message, const F& body) {
  std::string found = "nothing";
  try {
    body();
  } catch (const std::invalid_argument& error) {
    found = error.what();
  }
  CHECK(found.find(message) != std::string::npos, "%s, wanted %s", found.c_str(), message.c_str());
}

KTSERVE_TEST(parts_that_do_not_fit_are_refused) {
  Random random(6);
  Model model("bf16", Format::bf16, random);
  const Ops ops(model.world.pool, test::isas()[0]);
  LinearRunner linear(model.world.pool, test::isas()[0], true);
  PagedAttention paged(model.world.pool, {1, 16, 4, 2, 32, KvType::bf16, true}, test::isas()[0]);
  const Heads& h = model.attentions[0];
  const Rotation rotation{h.cos.data(), h.sin.data(), kRows, 32};
  const auto attention = [&](const Rotation& turned, const PackedLinear* k, QkNorm norm, int layer = 0) {
    return GroupedQueryPart(paged, layer, turned, {h.q, k, h.v, h.o, norm, nullptr, nullptr});
  };
  refused("layer: 1; allowed is 0 to 0", [&] { attention(rotation, h.k, QkNorm::none, 1); });
  refused("k_proj: [128, 64]; allowed is [64, 64]", [&] { attention(rotation, h.q, QkNorm::none); });
  refused("q_norm, k_norm", [&] { attention(rotation, h.k, QkNorm::whole); });
  refused("rotation's dim: 34", [&] { attention({h.cos.data(), h.sin.data(), 1, 34}, h.k, QkNorm::none); });
  const Mlp& m = model.dense;
  refused("up_proj", [&] { DensePart(*m.gate, *model.shared.up, *m.down); });
  const ExpertMemory memory{};
  const DensePart beside(*m.gate, *m.up, *m.down);
  refused("shared_gate", [&] { SparsePart(*model.router, {}, memory, nullptr, {nullptr, model.shared_gate}); });
  refused("shared_expert_gate: [50, 64]; allowed is [1, 64]",
          [&] { SparsePart(*model.router, {}, memory, nullptr, {&beside, model.head}); });
  const auto routed = [&](const Router& router_of) { SparsePart(*model.router, router_of, memory, nullptr, {}); };
  Router router;
  refused("top_k: 7", [&] { routed(Router{7}); });
  router.groups = 4;
  refused("groups: 4; allowed is a divisor of the number of experts", [&] { routed(router); });
  router.groups = 3;
  router.top_k = 3;
  refused("top_k: 3; allowed is 1 to the 2 experts of top_groups groups", [&] { routed(router); });
  router.top_groups = 4;
  refused("top_groups: 4; allowed is 1 to the number of groups", [&] { routed(router); });
  router.top_groups = 2;
  router.normalise = -1.0f;
  refused("normalise: -1", [&] { routed(router); });
  router.normalise.reset();
  router.scale = INFINITY;
  refused("scale: inf", [&] { routed(router); });

  const GroupedQueryPart good = attention(rotation, h.k, QkNorm::none);
  const SparsePart elsewhere(*model.router, {}, memory, nullptr, {});
  Decoder wide(ops, linear, 96, 1e-6f, false, false), narrow(ops, linear, kHidden, 1e-6f, true, false);
  refused("q_proj: [128, 64]; allowed is [128, 96]", [&] { wide.add_layer({nullptr, &good, nullptr, nullptr}); });
  refused("is_bf16: true", [&] { narrow.add_layer({nullptr, &good, nullptr, nullptr}); });
  Decoder decoder(ops, linear, kHidden, 1e-6f, false, false);
  refused("run: allowed behind set_head", [&] { decoder.run({}); });
  decoder.set_head(nullptr, *model.head);
  decoder.add_layer({nullptr, &good, nullptr, &elsewhere});
  refused("layer 0: no MLP", [&] { decoder.run({}); });
  refused("layer: 1; allowed is 0 to 0", [&] { decoder.attend(1, {}); });
}

}  // namespace
}  // namespace ktserve
