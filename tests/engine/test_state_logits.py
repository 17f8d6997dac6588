"""Logits and states of delta nets beside those of transformers, however sequences are cut, lost or drafted."""

from __future__ import annotations

import tempfile
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from engine.attention.base import BatchLayout
from engine.attention.delta import DeltaBackend, ReferenceDeltaNet
from engine.model.step import OutputKind, StepInput
from scheduler.drafts import Drafter
from scheduler.plan import NO_STATE, RowState
from testing.harness import Harness, greedy
from testing.models.tiny import STATEFUL, save_hf, tiny_model
from tests.engine.knowing import Knowing
from tests.engine.parity import BACKENDS, CLEAR, prompts
from tests.native.isas import ISAS

KEPT = 8  # drafts of a row


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, object]:
    """Every expert is chosen: which are is another test's matter, and may depend on rounding."""
    heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.sampled_from([16, 32])),
        "linear_value_head_dim": draw(st.sampled_from([16, 48])),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers + 1,
        "layer_types": draw(st.permutations(["full_attention", *["linear_attention"] * layers])),
    }


def states_of(backend: DeltaBackend, layer: int, slot: int, spec) -> tuple[torch.Tensor, torch.Tensor]:
    """S of each head, and the inputs of the last positions."""
    if isinstance(backend, ReferenceDeltaNet):
        return backend.states[layer][slot], backend.past[layer][slot]
    held = torch.from_numpy(backend.host_planes()[0][backend.places_of[layer], slot].copy()).view(torch.float32)
    heads = (spec.value_heads, spec.key_dim, spec.value_dim)
    sizes = [spec.value_width * spec.key_dim, (spec.kernel - 1) * spec.channels]
    s, past = held[: sum(sizes)].split(sizes)
    return s.view(heads), past.view(spec.kernel - 1, spec.channels)


@torch.inference_mode()
def step(engine: Harness, ids: list[int], first: int, state: RowState) -> torch.Tensor:
    """Logits of positions from `first` on; block b of the cache has the sequence's block b."""
    end, model = first + len(ids), engine.runner.model
    at = torch.arange(first, end)
    batch = BatchLayout([0, len(ids)], [end], [array("i", range(-(-end // 16)))], at, at.clone(), states=[state])
    model.plan(batch)
    given = StepInput(torch.tensor(ids), batch, None, output_kind=OutputKind.LOGITS)
    logits = engine.runner.executor.forward(given).logits
    assert logits is not None
    return logits.clone()


@BACKENDS
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])  # to shrink takes minutes
@given(
    family=st.sampled_from(sorted(STATEFUL)),
    shape=shapes(),
    seed=st.integers(0, 99),
    length=st.integers(1, 150),
    moves=st.lists(
        st.tuples(
            st.one_of(st.integers(1, 8), st.integers(1, 150)),  # positions
            st.integers(0, KEPT),  # wrong drafts behind them
            st.booleans(),  # a snapshot is taken on the way
            st.sampled_from(["on", "on", "on", "snapshot", "beginning"]),  # where the next one goes on
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_logits_and_states_are_those_of_transformers(backend, family, shape, seed, length, moves) -> None:
    model, ids = tiny_model(seed, family=family, **shape), prompts(seed, [length])[0]
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, Path(folder))
        engine = Harness(Path(folder), speculate=f"ngram:{KEPT}", max_num_seqs=2, pack_cache="off", **backend)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    own, spare = 0, [engine.plan.memory.num_states, engine.plan.memory.num_states + 1]
    done, kept, snapshot = 0, 0, 0  # `snapshot`: the position before which the copy in the last of `spare` is
    source = NO_STATE
    for count, drafts, saves, then in [*moves, (length, 0, False, "on")]:
        count = min(count, length - done)
        if not count:
            break
        drafted = done > 0 and drafts and count + drafts <= KEPT + 1
        wrong = [(token + 1) % 128 for token in ids[:1]] * drafts if drafted else []
        at = done + 1 - kept if kept else done + count  # of a copy: in what is replayed, or at the end
        saving = saves and (not kept or at <= done) and (not drafted or at <= done + 1)
        state = RowState(own, source, ((at, spare[0]),) if saving else (), kept, keeps=bool(wrong))
        got = step(engine, [*ids[done : done + count], *wrong], done, state)[:count]
        torch.testing.assert_close(got, expected[done : done + count], atol=1e-4, rtol=1e-4)
        if saving:
            snapshot, spare = at, spare[::-1]
        source, kept, done = own, count if wrong else 0, done + count
        if then == "beginning" or (then == "snapshot" and not snapshot):
            source, kept, done = NO_STATE, 0, 0
        elif then == "snapshot":
            source, kept, done = spare[1], 0, snapshot
    if not kept and done:
        compare_states(engine, model, ids[:done], source)
    engine.close()


def compare_states(engine: Harness, model: torch.nn.Module, ids: list[int], slot: int) -> None:
    with torch.inference_mode():
        held = model(torch.tensor([ids]), use_cache=True).past_key_values
    config = engine.plan.source.config
    backend = next(each for each in engine.runner.model.attention_backends if isinstance(each, DeltaBackend))
    for layer, kind in enumerate(model.config.layer_types):
        if kind == "linear_attention":
            spec = config.layers[layer].attention
            s, past = states_of(backend, layer, slot, spec)
            torch.testing.assert_close(s, held.layers[layer].recurrent_states[0][0], atol=1e-4, rtol=1e-4)
            inputs = held.layers[layer].conv_states[0][0].T[1:]  # the first is not looked at again
            torch.testing.assert_close(past, inputs, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", STATEFUL)
def test_deterministic_bits_depend_on_no_cut(tmp_path, family, dtype) -> None:
    """Log-probabilities of prompts in chunks of any size, with others in a batch, from snapshots, with drafts."""
    save_hf(tiny_model(4, family=family), tmp_path)
    asked = prompts(3, [66, 140, 18])
    seen: list[list[tuple[list[int], object]]] = []
    for changes in ({}, {"max_num_batched_tokens": 23}, {"max_num_seqs": 1}, {"speculate": f"ngram:{KEPT}:always"}):
        engine = Harness(
            tmp_path, **({"max_num_seqs": 4} | changes), rules=None, dtype=dtype, deterministic=True, pack_cache="off"
        )
        if "speculate" in changes:
            texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(asked, seen[0], strict=True)]
            engine.core.scheduler._core.drafter = Drafter(Knowing(texts, 2), KEPT, always=True)
        for _ in range(2):  # the second time from snapshots
            rids = [engine.submit(prompt, logprobs=2, max_tokens=24) for prompt in asked]
            results = engine.run()
            seen.append([(results[rid].tokens, results[rid].logprobs) for rid in rids])
        assert engine.core.stats()["prefix_hit_tokens"] > 0
        assert "speculate" not in changes or engine.core.stats()["accepted_tokens"] > 24
        engine.close()
    assert all(each == seen[0] for each in seen)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path, dict[tuple[int, ...], Any]]:
    """A model, its folder, and transformers' greedy tokens behind prompts."""
    model, folder = tiny_model(6, family="qwen3_next"), tmp_path_factory.mktemp("known")
    save_hf(model, folder)
    return model, folder, {tuple(prompt): greedy(model, prompt, 30) for prompt in prompts(6, [30, 41, 7, 60])}


@BACKENDS
@pytest.mark.parametrize("tight", [False, True])
def test_drafts_change_no_tokens(known, backend, tight) -> None:
    """Beside chunks of prompts and where memory is so tight that requests are preempted; then a second turn."""
    model, folder, answers = known
    asked, expected = [list(prompt) for prompt in answers], list(answers.values())
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(asked, expected, strict=True)]
    engine = Harness(
        folder, speculate=f"ngram:{KEPT}:always", max_num_seqs=4, max_num_batched_tokens=40, max_model_len=200,
        kv_cache_tokens=208 if tight else 2048, **backend,
    )  # fmt: skip
    engine.core.scheduler._core.drafter = Drafter(Knowing(texts, 2), KEPT, always=True)
    got = engine.generate(asked, max_tokens=30)
    stats = engine.core.stats()
    for (tokens, gap), found in zip(expected, got, strict=True):
        assert found == tokens or gap < CLEAR
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"] and bool(stats["preemptions"]) == tight
    if not tight:
        turns = [[*text, *prompts(9, [5])[0]] for text in texts]
        engine.core.scheduler._core.drafter = None
        again = engine.generate(turns, max_tokens=8)
        for turn, tokens in zip(turns, again, strict=True):
            wanted, gap = greedy(model, turn, 8, tokens)
            assert tokens == wanted or gap < CLEAR
        cached = [engine.results[f"r{4 + i}"].end.cached_tokens for i in range(4)]
        assert all(count > len(prompt) for count, prompt in zip(cached, asked, strict=True)), "behind its answer"
    engine.close()
