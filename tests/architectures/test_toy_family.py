"""A family in a folder of its own, outside of the engine: it is found, planned, checked and served, and nothing else
knows of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from engine.architectures import registry
from engine.weights.open import open_model
from testing.harness import Harness
from tests.e2e.conftest import serving

TOY = Path(__file__).parent / "toy"
H, HEADS, KV, DIM, EXPERTS, CHOSEN, INNER, DENSE, DEPTH = 64, 4, 2, 32, 8, 3, 32, 96, 3
ROTATED, GROUPS, EPS = DIM // 2, 4, 1e-5


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(TOY))
    registry.architectures.cache_clear()
    yield
    registry.architectures.cache_clear()


def write(folder: Path, vocabulary: int = 128, seed: int = 0) -> dict[str, torch.Tensor]:
    """The folder of a random toy model; its tensors by the names in the file."""
    g, tensors = torch.Generator().manual_seed(seed), {}

    def draw(name: str, *shape: int) -> None:
        tensors[name] = torch.randn(*shape, generator=g) * 1.5 / shape[-1] ** 0.5

    def gain(name: str, size: int) -> None:
        tensors[name] = 1 + 0.1 * torch.randn(size, generator=g)

    draw("model.embed_tokens.weight", vocabulary, H)
    tensors["model.embed_tokens.weight"] *= H**0.5
    draw("lm_head.weight", vocabulary, H)
    gain("model.norm.weight", H)
    for layer in range(DEPTH):
        at = f"blocks.{layer}"
        gain(f"{at}.input_layernorm.weight", H)
        gain(f"{at}.post_attention_layernorm.weight", H)
        gain(f"{at}.mix.q_gain.weight", HEADS * DIM)
        gain(f"{at}.mix.k_gain.weight", KV * DIM)
        draw(f"{at}.mix.q.weight", HEADS * DIM, H)
        draw(f"{at}.mix.k.weight", KV * DIM, H)
        draw(f"{at}.mix.v.weight", KV * DIM, H)
        draw(f"{at}.mix.o.weight", H, HEADS * DIM)
        mlps = {"mlp": DENSE} if layer == 0 else {"mlp.shared_expert": 2 * INNER}
        if layer:
            draw(f"{at}.mlp.gate.weight", EXPERTS, H)
            tensors[f"{at}.mlp.gate.e_score_correction_bias"] = 0.2 * torch.randn(EXPERTS, generator=g)
            mlps |= {f"mlp.experts.{expert}": INNER for expert in range(EXPERTS)}
        for name, width in mlps.items():
            draw(f"{at}.{name}.gate_proj.weight", width, H)
            draw(f"{at}.{name}.up_proj.weight", width, H)
            draw(f"{at}.{name}.down_proj.weight", H, width)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "toy_moe", "architectures": ["ToyForCausalLM"], "width": H, "heads": HEADS, "kv_heads": KV,
        "head_width": DIM, "positions": 512, "theta": 10000.0, "experts": EXPERTS, "chosen": CHOSEN,
        "expert_width": INNER, "dense_width": DENSE, "depth": DEPTH, "vocabulary": vocabulary,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def logits(t: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Of every position, float32 [T, V]: the family's formulas, written down once more."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], t[f"{name}.weight"], EPS)

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [heads, T, DIM]
        angles = torch.arange(x.shape[1])[:, None] / 10000 ** (torch.arange(0, ROTATED, 2) / ROTATED)
        cos, sin = angles.cos(), angles.sin()
        a, b, rest = x[..., : ROTATED // 2], x[..., ROTATED // 2 : ROTATED], x[..., ROTATED:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        inner = F.silu(x @ t[f"{name}.gate_proj.weight"].T) * (x @ t[f"{name}.up_proj.weight"].T)
        return inner @ t[f"{name}.down_proj.weight"].T

    def experts(x: torch.Tensor, name: str) -> torch.Tensor:
        score = torch.sigmoid(x @ t[f"{name}.gate.weight"].T)
        choice = (score + t[f"{name}.gate.e_score_correction_bias"]).view(len(x), GROUPS, -1)
        best = choice.topk(2, -1).values.sum(-1).topk(2, -1).indices
        kept = torch.zeros(len(x), GROUPS).scatter(1, best, 1.0).bool()
        chosen = choice.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(CHOSEN, -1).indices
        weights = score.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
        out = mlp(x, f"{name}.shared_expert")
        for row in range(len(x)):
            for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
                out[row] += weight * mlp(x[row], f"{name}.experts.{expert}")
        return out

    x = t["model.embed_tokens.weight"][ids]
    for layer in range(DEPTH):
        at = f"blocks.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        q = norm(h @ t[f"{at}.mix.q.weight"].T, f"{at}.mix.q_gain").view(-1, HEADS, DIM).transpose(0, 1)
        k = norm(h @ t[f"{at}.mix.k.weight"].T, f"{at}.mix.k_gain").view(-1, KV, DIM).transpose(0, 1)
        v = (h @ t[f"{at}.mix.v.weight"].T).view(-1, KV, DIM).transpose(0, 1)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(0, 1).flatten(1) @ t[f"{at}.mix.o.weight"].T
        h = norm(x, f"{at}.post_attention_layernorm")
        x = x + (experts(h, f"{at}.mlp") if layer else mlp(h, f"{at}.mlp"))
    return norm(x, "model.norm") @ t["lm_head.weight"].T


BACKENDS = {"torch": {}, "native": {"rules": None}, "mixed": {"rules": None, "attention_backend": "reference"}}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_it_is_served(tmp_path: Path, installed: None, backend: dict[str, str | None]) -> None:
    tensors = write(tmp_path)
    prompts = [[3, 14, 15, 92, 65, 35], [2, 7, 1, 8], list(range(40, 90))]
    engine = Harness(tmp_path, max_num_batched_tokens=16, max_num_seqs=4, **backend)
    got = engine.generate(prompts, max_tokens=8)
    engine.close()
    for prompt, tokens in zip(prompts, got, strict=True):
        ids = list(prompt)
        for token in tokens:
            top = logits(tensors, ids)[-1].topk(2)
            if float(top.values[0] - top.values[1]) < 1e-3:
                break
            assert token == int(top.indices[0])
            ids.append(token)


def test_its_files_are_read_by_its_names(tmp_path: Path, installed: None) -> None:
    tensors = write(tmp_path)
    source = open_model(str(tmp_path))
    stored = source.tensor("model.layers.1.self_attn.q_proj.weight").dequantise()
    assert torch.equal(stored, tensors["blocks.1.mix.q.weight"])
    assert source.config.sparse_layers == [1, 2] and len(source.config.layers) == DEPTH


def test_a_server_answers_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its user starts it: the package is on the path."""
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), os.environ.get("PYTHONPATH", "")]))
    flags = ("--dtype", "float32", "--pack-cache", "off", "--skip-tokenizer")
    with serving(tmp_path, "--model", str(folder), *flags) as server:
        answer = server.client.completions.create(model="model", prompt=[3, 14, 15], max_tokens=5, temperature=0)
        assert answer.usage is not None and answer.usage.completion_tokens == 5
