"""The native engine in every format on every instruction set: near a float32 model, adapters of one batch included,
and nobody changes a bit of another's logits."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from benchmarks.accuracy.table import recording
from native import available
from testing.harness import Harness, full_logits
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import tiny_model
from tests.engine.parity import prompts
from tests.lora.make import config_of, linear_keys, lora_config, per_expert_keys, random_adapter, write
from tests.lora.merge import merge
from tests.native.isas import ISAS

pytestmark = pytest.mark.skipif(not available()[0], reason="the native kernels are not built here")
NAMES = [None, "one", "two", None, "one"]
# Each shape of format.
KINDS = ["Q8_0", "Q4_1", "Q5_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "IQ2_XS", "MXFP4", "BF16", "F16"]


class Family:
    """A GGUF file of one type, two adapters, and each of them merged into the file's values."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.path, self.adapters = folder / "m.gguf", {}
        self.bound = {"BF16": 0.02, "F16": 0.01}.get(kind, 0.05)  # activations become int8 under quantised weights
        model = tiny_model(31, hidden_size=256, moe_intermediate_size=256, num_experts=8, head_dim=64)
        with torch.no_grad():  # a trained router is sure of itself; a random one would flip at every other token
            for layer in model.model.layers:
                layer.mlp.gate.weight *= 6
        base = save_gguf(model, self.path, expert_type=kind, dense_type=kind)
        self.merged: dict[str | None, torch.nn.Module] = {None: base}
        for i, name in enumerate(["one", "two"]):
            weights = random_adapter(config_of(base), rank=4 + 4 * i, alpha=8.0, seed=i, scale=0.1)
            keys = {**linear_keys(weights), **per_expert_keys(weights)}
            self.adapters[name] = write(folder / name, keys, lora_config(4 + 4 * i, 8.0))
            self.merged[name] = merge(copy.deepcopy(base), weights)

    def run(
        self, isa: str, names: list[str | None], asked: list[list[int]], **settings
    ) -> list[tuple[list[int], torch.Tensor]]:
        """Asked for at once: each one's tokens, four new ones included, and its logits [tokens - 1, V]."""
        engine = Harness(self.path, rules=None, dtype="auto", isa=isa, pack_cache="off", **settings)
        for name in self.adapters:
            engine.adapter(name, self.adapters[name])
        with recording(engine) as seen:
            engine.generate(asked, names, max_tokens=4)
        engine.close()
        all_tokens = {rid: engine.prompts[rid] + result.tokens for rid, result in engine.results.items()}
        return [
            (tokens, torch.stack([seen[rid, i] for i in range(len(tokens) - 1)])) for rid, tokens in all_tokens.items()
        ]


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("family"), request.param)


@pytest.mark.parametrize("isa", ISAS)
def test_adapters_in_one_batch(family, isa):
    ran = family.run(isa, NAMES, prompts(8, [30, 25, 40, 20, 9]))
    for (tokens, got), name in zip(ran, NAMES, strict=True):
        want = full_logits(family.merged[name], tokens)[:-1]
        error = (got - want).abs().mean(-1) / want.abs().mean(-1)
        assert float(error.median()) < family.bound


@pytest.mark.parametrize("isa", ISAS)
def test_neighbours_change_no_bit(family, isa):
    asked = prompts(9, [30, 25, 40, 20, 9])
    settings = {"deterministic": True, "prefix_caching": False}
    together = family.run(isa, NAMES, asked, **settings)
    for i in (0, 4):
        ((tokens, logits),) = family.run(isa, NAMES[i : i + 1], asked[i : i + 1], **settings)
        assert tokens == together[i][0]
        assert torch.equal(logits, together[i][1])
