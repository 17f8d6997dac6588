"""`--speculate mtp:K`: drafts are what the model's layer of multi-token prediction says; tokens are those without."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

from engine.messages import Failed, Finished, StopFound
from engine.model.mtp import MtpLayer as MtpLayerOfEngine
from testing.harness import Harness
from testing.models.mtp import TorchMtp, add_mtp, save_mtp_gguf, save_mtp_quantised
from testing.models.quantised import FP8_CONFIG, int4_config
from testing.models.tiny import save_hf, tiny_model
from tests.architectures.test_qwen3_5 import as_published
from tests.engine.family import Family
from tests.engine.parity import BACKENDS, CLEAR, SETTINGS, prompts
from tests.engine.test_row_faults import poison, submit_fault
from tests.engine.test_speculation import requests

NAMES = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text")
each = pytest.mark.parametrize("name", NAMES)


def made(name: str, folder: Path) -> TorchMtp:
    """A model with a layer that predicts, in `folder`."""
    layer = TorchMtp(tiny_model(3, family=name), 5)
    save(layer, folder)
    return layer


def save(layer: TorchMtp, folder: Path, *, fused: bool = False) -> None:
    save_hf(layer.model[0], folder, fused=fused)
    add_mtp(layer, folder, fused=fused)


@pytest.fixture(scope="module", params=NAMES)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchMtp, Path]:
    """A model of each family, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    return made(request.param, folder), folder


@functools.cache
def proposal(layer: TorchMtp, text: tuple[int, ...], count: int) -> tuple[list[int], float]:
    """Most of these tests' time, and the same for every backend."""
    return layer.propose(list(text), count)


def watched(engine: Harness) -> list[tuple[list[int], list[int]]]:
    """Grows by each text and what was proposed behind it."""
    seen: list[tuple[list[int], list[int]]] = []
    scheduler = engine.core.scheduler
    take = scheduler.take_proposals

    def watch(proposals: dict[str, list[int]]) -> None:
        for request_id, tokens in proposals.items():
            if (request := scheduler.request(request_id)) is not None:
                seen.append((request.prompt + request.output, tokens))
        take(proposals)

    scheduler.take_proposals = watch  # type: ignore[method-assign]
    return seen


def expect(layer: TorchMtp, seen: list[tuple[list[int], list[int]]]) -> None:
    for text, tokens in seen:
        expected, gap = proposal(layer, tuple(text), len(tokens))
        assert tokens == expected or gap < CLEAR, len(text)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_the_layer_is_that_of_transformers(name: str) -> None:
    model = tiny_model(3, family=name)
    own = TorchMtp(model, 5)
    with torch.inference_mode():
        other = MtpLayer(model.config, type(own.block), type(own.norm), 1)
        state = {name.replace("block.", "mtp_block."): value for name, value in own.state_dict().items()}
        state["post_norm.weight"] = state.pop("norm.weight")
        other.load_state_dict(state)
        hidden, ids = torch.randn(7, 64), torch.arange(2, 9)
        embedded, positions = model.model.embed_tokens(ids)[None], torch.arange(7)[None]
        mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
        rotation = model.model.rotary_emb(embedded, positions)
        expected = other.eval()(embedded, hidden[None], rotation, mask, positions, None)
        assert torch.allclose(own(hidden, ids), expected[0], atol=1e-5)


@pytest.mark.parametrize(  # the reader's matter: each backend gets the same tensors of it
    ("backend", "fused"), [*((backend, False) for backend in SETTINGS), (SETTINGS[0], True)], ids=str
)
def test_each_proposal_is_what_the_layer_says(
    shared: tuple[TorchMtp, Path], tmp_path: Path, backend: dict[str, Any], fused: bool
) -> None:
    """Behind prompts in chunks, beside others, behind cached prefixes, behind wrong drafts and right ones."""
    layer, folder = shared
    if fused:
        folder = tmp_path
        save(layer, folder, fused=True)
    engine = Harness(folder, speculate="mtp:3:always", max_num_seqs=4, max_num_batched_tokens=24, **backend)
    seen, asked = watched(engine), prompts(1, [3, 40, 30, 20, 1])
    first = engine.generate(asked, max_tokens=20)
    assert {len(tokens) for _, tokens in seen} == {1, 2, 3}, "the last ones are as many as are of use"
    assert engine.generate(asked, max_tokens=20) == first
    assert engine.core.stats()["prefix_hit_tokens"] > 0 and engine.core.stats()["drafted_tokens"] > 100
    engine.close()
    expect(layer, seen)


@BACKENDS
def test_long_proposals_of_rows_that_end_apart(tmp_path: Path, backend: dict[str, Any]) -> None:
    """Guesses of guesses lie in a row's own blocks as far as they reach, and in scratch blocks of the row."""
    layer = made("glm4_moe", tmp_path)
    engine = Harness(tmp_path, speculate="mtp:20:always", max_num_seqs=4, max_num_batched_tokens=100, **backend)
    seen = watched(engine)
    for prompt, most in zip(prompts(1, [13, 14, 15, 30]), (3, 9, 22, 12), strict=True):
        engine.submit(prompt, max_tokens=most)
    engine.run()
    engine.close()
    assert {2, 8, 20, 11} <= {len(tokens) for _, tokens in seen}
    expect(layer, seen)


@each
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_layer_in_gguf(tmp_path: Path, name: str, kind: str) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
    layer = save_mtp_gguf(TorchMtp(tiny_model(3, family=name, **sizes), 5), tmp_path / "m.gguf", kind)
    engine = Harness(tmp_path / "m.gguf", speculate="mtp:2:always", max_num_seqs=4, max_num_batched_tokens=24)
    seen = watched(engine)
    engine.generate(prompts(1, [3, 40]), max_tokens=8)
    engine.close()
    assert len(seen) > 8
    expect(layer, seen)


@each
@pytest.mark.parametrize("config", [FP8_CONFIG, int4_config("gptq", 32)], ids=lambda config: config["quant_method"])
def test_the_layer_in_quantised_safetensors(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
    latent = name in ("deepseek_v3", "glm4_moe_lite")
    sizes |= {"kv_lora_rank": 128, "q_lora_rank": 128} if latent else {}
    sizes |= {"shared_expert_intermediate_size": 128} if "qwen" in name else {}
    layer = save_mtp_quantised(TorchMtp(tiny_model(3, family=name, **sizes), 5), tmp_path, config)
    engine = Harness(tmp_path, speculate="mtp:2:always", max_num_seqs=4, max_num_batched_tokens=24)
    seen = watched(engine)
    engine.generate(prompts(1, [3, 40]), max_tokens=8)
    engine.close()
    assert len(seen) > 8
    expect(layer, seen)


def test_gguf_beside_a_folder_of_configuration(tmp_path: Path) -> None:
    layer = made("glm4_moe", tmp_path / "hf")
    held = save_mtp_gguf(layer, tmp_path / "m.gguf")
    engine = Harness(tmp_path / "hf", gguf=str(tmp_path / "m.gguf"), speculate="mtp:2:always")
    seen = watched(engine)
    engine.generate(prompts(1, [9]), max_tokens=6)
    engine.close()
    assert seen
    expect(held, seen)


def always_right(folder: Path, name: str, **shape: Any) -> None:
    """A model whose next token follows from the last one alone, and a layer that knows it."""
    model = tiny_model(3, family=name, **shape)
    layer = TorchMtp(model, 5)
    width = model.config.hidden_size
    with torch.no_grad():
        for key, parameter in [*model.named_parameters(), *layer.named_parameters()]:
            if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
        layer.eh_proj.weight.copy_(torch.cat((torch.eye(width), torch.zeros(width, width)), 1))
        for norm, value in ((layer.enorm, torch.ones(width)), (layer.norm, model.model.norm.weight)):
            norm.weight.copy_(torch.zeros(width) if norm is layer.enorm and "qwen" in name else value)
    save_hf(model, folder)
    add_mtp(layer, folder)


@each
@BACKENDS
def test_drafts_that_are_always_right_are_all_accepted(tmp_path: Path, backend: dict[str, Any], name: str) -> None:
    always_right(tmp_path, name)
    runs = []
    for speculate in (None, "mtp:20:always", "mtp:1:always"):
        engine = Harness(tmp_path, speculate=speculate, **backend)
        tokens, stats = engine.generate([[3, 4, 5]], max_tokens=43), engine.core.stats()
        runs.append((tokens, stats["steps"]))
        assert stats["accepted_tokens"] == stats["drafted_tokens"]
        engine.close()
    # the prompt's step gives one token, the others one each beside their drafts
    assert [steps for _, steps in runs] == [43, 3, 22]
    assert runs[0][0] == runs[1][0] == runs[2][0]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    found = {}
    for name in ("glm4_moe", "deepseek_v3", "qwen3_5_moe_text"):
        dense = [] if "qwen" in name else [0]
        found[name] = Family(
            tmp_path_factory.mktemp("family"), count=1, merged=False, family=name, mlp_only_layers=dense
        )
        add_mtp(TorchMtp(found[name].base, 5), found[name].model_path)
    return found


def answers(engine: Harness, asked: list[tuple[list[int], dict[str, Any]]], stops: dict[int, int]) -> list[Any]:
    """Each twice, the second time behind what is cached of the first; `stops`: after how many tokens of some requests a
    stop string is found."""
    found = []
    for _ in range(2):
        rids = [engine.submit(prompt, **options) for prompt, options in asked]
        while not all(engine.results[rid].end for rid in rids) or engine.core.busy:
            engine.core.step()
            for place, after in stops.items():
                result = engine.results[rids[place % len(rids)]]
                if result.end is None and len(result.tokens) >= after:
                    rid = rids[place % len(rids)]
                    engine.core.handle(StopFound(request_id=rid, num_tokens=after))
        for rid in rids:
            end = engine.results[rid].end
            assert isinstance(end, Finished), end
            found.append((engine.results[rid].tokens[: end.output_tokens], end.reason, end.output_tokens))
    return found


@BACKENDS
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    name=st.sampled_from(["glm4_moe", "deepseek_v3", "qwen3_5_moe_text"]),
    k=st.sampled_from([1, 2, 4, 19]),
    budget=st.sampled_from([8, 64]),
    stops=st.dictionaries(st.integers(0, 3), st.integers(1, 12), max_size=2),
    small=st.booleans(),
)
def test_tokens_are_those_without_drafts(families, backend, data, name, k, budget, stops, small) -> None:
    """Of greedy, drawn, penalised and masked rows with and without an adapter, in chunks, preempted, behind cached
    prefixes, to a stop string."""
    asked = requests(data.draw)
    limits = {"kv_cache_tokens": 112, "max_model_len": 96} if small else {}
    runs = []
    for speculate in (None, f"mtp:{k}:always", f"mtp:{k}"):
        engine = families[name].engine(
            speculate=speculate, max_num_seqs=4, max_num_batched_tokens=budget, **limits, **backend
        )
        runs.append(answers(engine, asked, stops))
        stats = engine.core.stats()
        assert stats["accepted_tokens"] <= stats["drafted_tokens"]
        engine.close()
    assert runs[0] == runs[1] == runs[2]


@BACKENDS
def test_requests_are_preempted(shared: tuple[TorchMtp, Path], backend: dict[str, Any]) -> None:
    (layer, folder), asked = shared, prompts(3, [20, 25, 30, 35])
    sizes = {"kv_cache_tokens": 96, "max_model_len": 80, "max_num_seqs": 4}
    runs = []
    for speculate in (None, "mtp:2:always"):
        engine = Harness(folder, speculate=speculate, **sizes, **backend)
        seen = watched(engine)
        runs.append(engine.generate(asked, max_tokens=24))
        assert engine.core.stats()["preemptions"] > 0
        engine.close()
    assert runs[0] == runs[1]
    expect(layer, seen)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_padded_steps(tmp_path: Path, name: str) -> None:
    layer, asked = made(name, tmp_path), prompts(3, [20, 5, 30])
    runs = []
    for speculate in (None, "mtp:2:always"):
        engine = Harness(tmp_path, speculate=speculate, cuda_graphs="padded", max_num_seqs=4)
        seen = watched(engine)
        runs.append(engine.generate(asked, max_tokens=12))
        engine.close()
    assert runs[0] == runs[1]
    assert len(seen) > 20
    expect(layer, seen)


def test_what_is_kept_of_the_layer_goes_to_disk_with_the_blocks(tmp_path: Path) -> None:
    layer, asked = made("glm4_moe", tmp_path / "model"), prompts(1, [100])
    runs = []
    for _ in range(2):
        engine = Harness(
            tmp_path / "model", speculate="mtp:2:always", kv_disk="64MiB", kv_disk_dir=str(tmp_path / "kv")
        )
        seen = watched(engine)
        runs.append(engine.generate(asked, max_tokens=6))
        engine.until(lambda engine=engine: not engine.core.waiting_for_threads)
        hits = engine.core.stats()["disk_hit_tokens"]
        engine.close()
    assert runs[0] == runs[1] and hits > 0
    expect(layer, seen)
    plain = Harness(tmp_path / "model", kv_disk="64MiB", kv_disk_dir=str(tmp_path / "kv"))
    assert plain.generate(asked, max_tokens=6) == runs[0]
    assert plain.core.stats()["disk_hit_tokens"] == 0, "blocks without the layer are others"
    plain.close()


def test_a_prompt_without_output(tmp_path: Path) -> None:
    """The token behind its last one is never known."""
    made("glm4_moe", tmp_path)
    engine = Harness(tmp_path, speculate="mtp:2:always")
    rid = engine.submit(prompts(1, [20])[0], max_tokens=0, prompt_logprobs=1)
    engine.run()
    assert len(engine.results[rid].prompt_logprobs or []) == 20
    engine.close()


def test_logits_that_are_not_finite_make_no_draft(tmp_path: Path) -> None:
    layer = made("glm4_moe", tmp_path / "model")
    broken = copy.deepcopy(layer)
    with torch.no_grad():
        broken.norm.weight.fill_(3e38)
    save_hf(layer.model[0], tmp_path / "broken")
    add_mtp(broken, tmp_path / "broken")
    runs = []
    for folder, speculate in (("model", None), ("broken", "mtp:2:always")):
        engine = Harness(tmp_path / folder, speculate=speculate)
        runs.append(engine.generate(prompts(1, [9]), max_tokens=6))
        assert engine.core.stats()["drafted_tokens"] == 0
        engine.close()
    assert runs[0] == runs[1]


def test_the_layer_beside_a_vision_tower(tmp_path: Path) -> None:
    """Its names are the same where the text model's have a prefix."""
    layer = made("qwen3_5_moe_text", tmp_path / "text")
    tensors = load_file(tmp_path / "text/model.safetensors")
    (tmp_path / "whole").mkdir()
    save_file({as_published(name): value for name, value in tensors.items()}, tmp_path / "whole/model.safetensors")
    text = json.loads((tmp_path / "text/config.json").read_text())
    text.pop("architectures")
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    (tmp_path / "whole/config.json").write_text(json.dumps(config | {"text_config": text}))
    engine = Harness(tmp_path / "whole", speculate="mtp:2:always")
    seen = watched(engine)
    engine.generate(prompts(1, [9]), max_tokens=6)
    engine.close()
    assert seen
    expect(layer, seen)


# ---- faults


@BACKENDS
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(st.sampled_from(["nan", "inf", "mask", "fine"]), min_size=2, max_size=5))
def test_a_row_that_fails_is_noticed_by_no_other(families, backend, kinds) -> None:
    runs = []
    for speculate in (None, "mtp:3:always"):
        with pytest.MonkeyPatch.context() as patch:
            engine = families["glm4_moe"].engine(speculate=speculate, max_num_seqs=4, **backend)
            poison(engine, patch)
            rids = []
            for number, kind in enumerate(kinds):
                plain = kind == "fine"
                rids.append(
                    engine.submit(prompts(number, [9])[0]) if plain else submit_fault(engine, kind, number, False)
                )
            results = engine.run()
            ends = [results[rid] for rid in rids]
            engine.close()
        runs.append(
            [(type(end.end), end.tokens if kind == "fine" else []) for end, kind in zip(ends, kinds, strict=True)]
        )
    assert runs[0] == runs[1]
    assert all((end is Finished) == (kind == "fine") for (end, _), kind in zip(runs[1], kinds, strict=True))


def test_a_layer_that_fails_ends_the_requests_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("glm4_moe", tmp_path)
    engine, asked = Harness(tmp_path, speculate="mtp:2:always"), prompts(1, [9, 20])
    expected = engine.generate(asked)
    forward, calls = MtpLayerOfEngine.forward, [0]

    def fails_once(self: MtpLayerOfEngine, *given: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("no memory")
        return forward(self, *given)

    monkeypatch.setattr(MtpLayerOfEngine, "forward", fails_once)
    rids = [engine.submit(prompt) for prompt in asked]
    results = engine.run()
    assert all(isinstance(results[rid].end, Failed) for rid in rids)
    assert engine.core.stats()["failed_steps"] == 1 and engine.core.stats()["blocks_used"] == 0
    assert engine.generate(asked) == expected
    engine.close()
