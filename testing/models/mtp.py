"""Layers of multi-token prediction for tiny models: random ones, their files, and what they propose, in torch."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from testing.models.gguf_writer import GGUF_NAMES, save_gguf
from testing.models.quantised import save_quantised

_FILE = "model.safetensors"
_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}  # fields with a word for each layer
_QWEN = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


class TorchMtp(nn.Module):
    """norm(block(eh_proj([enorm(embedding), hnorm(hidden)]))) by transformers' layers of `model`'s family."""

    def __init__(self, model: PreTrainedModel, seed: int = 0) -> None:
        super().__init__()
        config = model.config
        self.model = [model]  # whose parameters are not this one's
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        index = max(i for i, kind in enumerate(kinds) if kind == "full_attention")
        norm = type(model.model.norm)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.block = type(model.model.layers[index])(config, index)
            self.enorm, self.hnorm, self.norm = (norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
            self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            self.qwen = hasattr(config, "linear_num_key_heads")
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    if name.endswith("norm.weight"):
                        parameter.normal_(0.0 if self.qwen else 1.0, 0.1)
                    elif name.endswith("bias"):
                        parameter.normal_(0.0, 0.1)
                    else:
                        parameter.normal_(0.0, 1.5 / math.sqrt(parameter.shape[-1]))
                for name, buffer in self.named_buffers():
                    if name.endswith("e_score_correction_bias"):
                        buffer.normal_(0.0, 0.2)
        self.eval()

    def tensors(self, *, fused: bool = False) -> dict[str, torch.Tensor]:
        """By their names in a layer of the family's files; experts one by one, or stacked."""
        found = {}
        for name, value in self.state_dict().items():
            name = {"norm.weight": "shared_head.norm.weight"}.get(name, name.removeprefix("block."))
            at, _, projection = name.rpartition("mlp.experts.")
            if fused or projection not in ("gate_up_proj", "down_proj"):
                found[name] = value.clone()
                continue
            for expert, matrix in enumerate(value):
                parts = {"down_proj": matrix}
                if projection == "gate_up_proj":
                    parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
                found |= {f"{at}mlp.experts.{expert}.{part}.weight": w.clone() for part, w in parts.items()}
        return found

    @torch.inference_mode()
    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """`hidden` [T, H] of positions 0 ...; `ids` [T]: the tokens after them. Returns [T, H]."""
        model = self.model[0].model
        positions = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        parts = self.enorm(model.embed_tokens(ids)), self.hnorm(hidden)
        x = self.eh_proj(torch.cat(parts, -1))[None]
        sections = hasattr(model.rotary_emb, "mrope_section")  # a position each in time, height and width
        rotation = model.rotary_emb(x, positions.expand(3, 1, -1) if sections else positions)
        x = self.block(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        out: torch.Tensor = self.norm(x)[0]
        return out

    @torch.inference_mode()
    def propose(self, tokens: list[int], count: int) -> tuple[list[int], float]:
        """What may follow `tokens`, at least two, and the smallest gap between the best two logits on the way."""
        model, gap, found = self.model[0], math.inf, list[int]()
        hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        ids = tokens[1:]
        for _ in range(count):
            out = self.forward(hidden, torch.tensor(ids))
            logits = model.lm_head(out[-1]).float()
            best = logits.topk(2).values
            gap = min(gap, float(best[0] - best[1]))
            found.append(int(logits.argmax()))
            hidden, ids = torch.cat((hidden, out[-1:])), [*ids, found[-1]]
        return found, gap


def add_mtp(layer: TorchMtp, folder: Path, *, fused: bool = False) -> None:
    """To the files of its model, as the family's vendor stores it."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / _FILE) | _stored(layer, layer.tensors(fused=fused), config["num_hidden_layers"])
    _rewrite(folder, tensors, config, layer.qwen)


def _stored(layer: TorchMtp, tensors: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """`tensors` by their names in a layer -> by their names in the files; with copies that vendors store."""
    if layer.qwen:
        return {_qwen(name): value for name, value in tensors.items()}
    at, model = f"model.layers.{index}", layer.model[0]
    stored = {f"{at}.{name}": value for name, value in tensors.items()}
    stored[f"{at}.embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    stored[f"{at}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    return stored


def _qwen(name: str) -> str:
    module = name.removesuffix(".weight")
    return f"mtp.{_QWEN[module]}.weight" if module in _QWEN else f"mtp.layers.0.{name}"


def _rewrite(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], qwen: bool) -> None:
    config["mtp_num_hidden_layers" if qwen else "num_nextn_predict_layers"] = 1
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def save_mtp_quantised(layer: TorchMtp, folder: Path, quantisation: dict[str, Any]) -> TorchMtp:
    """The model and the layer in a quantised form, what joins embedding and hidden state as it is; returns the layer
    that the files hold, over the model that they hold."""
    own, longer, count = _behind(layer)
    held, _ = save_quantised(longer, folder, quantisation)
    config, at = json.loads((folder / "config.json").read_text()), f"model.layers.{count}."
    config["num_hidden_layers"] = count
    config |= {name: config[name][:count] for name in _KINDS if config.get(name) is not None}
    found = load_file(folder / _FILE)
    block = {name.removeprefix(at): found.pop(name) for name in list(found) if name.startswith(at)}
    more = {name: value for name, value in layer.tensors().items() if name.removesuffix(".weight") in _QWEN}
    _rewrite(folder, found | _stored(layer, block | more, count), config, layer.qwen)
    return _apart(own, held, count)


def save_mtp_gguf(layer: TorchMtp, path: Path, kind: str = "F32") -> TorchMtp:
    """The model and the layer as llama.cpp's converter would write them; returns the layer that the file holds, over
    the model that it holds."""
    own, longer, count = _behind(layer)
    names = {"eh_proj": own.eh_proj, "enorm": own.enorm, "hnorm": own.hnorm, "shared_head_norm": own.norm}
    more = {
        f"blk.{count}.nextn.{name}.weight": module.weight.detach() + (layer.qwen and name != "eh_proj")
        for name, module in names.items()
    }
    metadata = {f"{GGUF_NAMES[longer.config.model_type]}.nextn_predict_layers": 1}
    return _apart(own, save_gguf(longer, path, kind, kind, metadata=metadata, more=more), count)


def _behind(layer: TorchMtp) -> tuple[TorchMtp, PreTrainedModel, int]:
    """A copy of the layer, one of the model with its block behind the others, and the number of the others."""
    own, model = copy.deepcopy(layer), copy.deepcopy(layer.model[0])
    count = model.config.num_hidden_layers
    model.model.layers.append(own.block)
    model.config.num_hidden_layers, model.config.num_nextn_predict_layers = count + 1, 0
    for name, kind in _KINDS.items():
        if getattr(model.config, name, None) is not None:
            setattr(model.config, name, [*getattr(model.config, name), kind])
    return own, model, count


def _apart(own: TorchMtp, held: PreTrainedModel, count: int) -> TorchMtp:
    """Over the model `held`, of which the last block is the layer's."""
    own.block = held.model.layers[count]
    del held.model.layers[count]
    held.config.num_hidden_layers = count
    own.model = [held]
    return own
