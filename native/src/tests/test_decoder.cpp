#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "decoder/decoder.hpp"
#include "tests/check.hpp"
#include "tests/world.hpp"

namespace ktserve {
namespace {

using test::draw;
using test::Forward;
using test::Random;
using test::World;

constexpr int64_t kHidden = 64, kInner = 32, kExperts = 5, kTopK = 2, kVocabulary = 50, kRows = 40;
constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 32;

struct Sequence {
  int64_t tokens;
  int32_t slot;
  std::vector<float> embeddings;
};

// Two layers, the second dense, and adapters in slots 1 and 3 of the experts. Float32 rows over bf16 KV.
struct Model {
  World world;
  std::vector<std::unique_ptr<PackedLinear>> linears;
  std::vector<float> norm_weights, cos, sin;
  const PackedLinear *q, *k, *v, *o, *router, *gate, *up, *down, *head;

  Model(const char* format, Format expert_format, Random& random)
      : world(kExperts, kHidden, kInner, expert_format, 2, random),
        norm_weights(draw(kHidden, random)),
        cos(draw(kRows * kHeadDim / 2, random)),
        sin(draw(kRows * kHeadDim / 2, random)) {
    const auto make = [&](const char* as, int64_t n, int64_t inner) {
      const std::vector<float> w = draw(n * inner, random, 0.2f);
      linears.push_back(std::make_unique<PackedLinear>(as, n, inner, 2, nullptr));
      linears.back()->load(world.pool, "F32", SourceRows(reinterpret_cast<const uint8_t*>(w.data())), n * inner * 4);
      return linears.back().get();
    };
    q = make(format, kHeads * kHeadDim, kHidden);
    k = make(format, kKvHeads * kHeadDim, kHidden);
    v = make(format, kKvHeads * kHeadDim, kHidden);
    o = make(format, kHidden, kHeads * kHeadDim);
    router = make("f32", kExperts, kHidden);
    gate = make(format, kInner, kHidden);
    up = make(format, kInner, kHidden);
    down = make(format, kHidden, kInner);
    head = make(format, kVocabulary, kHidden);
  }

  // The final hidden state of each token, then its greedy token; one step, a fresh cache.
  std::vector<float> run(Isa isa, const std::vector<const Sequence*>& sequences) {
    const Ops ops(world.pool, isa);
    LinearRunner linear(world.pool, isa, true);
    MoeRunner experts(world.pool, isa, true);
    PagedAttention attention(world.pool, AttentionShape{2, 16, kHeads, kKvHeads, kHeadDim, KvType::bf16, true}, isa);
    Decoder decoder(ops, linear, attention, {cos.data(), sin.data(), kRows},
                    {kHidden, kHeads, kKvHeads, kHeadDim, kTopK, true, 1e-6f, false, false});
    const void* norm = norm_weights.data();
    decoder.add_layer({norm, norm, norm, norm, q, k, v, o, router});
    decoder.add_layer({norm, norm, norm, norm, q, k, v, o, nullptr});

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
    const int64_t tokens = starts.back();
    const auto count = static_cast<size_t>(tokens);
    int32_t bsz = 0;
    std::vector<int64_t> ids(count * kTopK), greedy(count);
    std::vector<int32_t> expert_slots(count);
    std::vector<float> weights(count * kTopK), in(count * kHidden), out(count * kHidden), hidden(count * kHidden);
    const Forward task(
        experts, world.layer,
        {&bsz, ids.data(), weights.data(), expert_slots.data(), in.data(), out.data(), tokens, kTopK, false});
    decoder.set_experts(0, task);
    decoder.set_dense(1, {gate, up, down});
    decoder.set_head(norm, *head,
                     {&bsz, ids.data(), weights.data(), expert_slots.data(), in.data(), out.data(), tokens});
    attention.plan(starts, contexts, tables);
    decoder.run({tokens, residual.data(), positions.data(), slots.data(), nullptr, tokens, hidden.data(), greedy.data(),
                 nullptr});
    std::vector<float> all;
    for (size_t t = 0; t < count; ++t) {
      all.insert(all.end(), hidden.begin() + static_cast<int64_t>(t * kHidden),
                 hidden.begin() + static_cast<int64_t>((t + 1) * kHidden));
      CHECK(greedy[t] >= 0 && greedy[t] < kVocabulary);
      all.push_back(static_cast<float>(greedy[t]));
    }
    return all;
  }
};

KTSERVE_TEST(decoder_rows_are_independent) {
  Random random(12);
  for (const auto& [format, experts] : {std::pair{"bf16", Format::bf16}, {"i8", Format::i8}, {"i4m", Format::i4m}}) {
    Model model(format, experts, random);
    std::vector<Sequence> sequences;
    for (const auto& [tokens, slot] : {std::pair{5, 0}, {1, 3}, {kRows - 15, 1}, {9, 1}}) {
      sequences.push_back({tokens, slot, draw(tokens * kHidden, random)});
    }
    for (Isa isa : test::isas()) {
      const std::vector<float> together = model.run(isa, {&sequences[0], &sequences[1], &sequences[2], &sequences[3]});
      auto at = together.begin();
      for (const Sequence& s : sequences) {
        const std::vector<float> alone = model.run(isa, {&s});
        CHECK(std::equal(alone.begin(), alone.end(), at), "%s %s", isa_name(isa), format);
        at += static_cast<int64_t>(alone.size());
      }
      CHECK(at == together.end());
    }
  }
}

}  // namespace
}  // namespace ktserve
