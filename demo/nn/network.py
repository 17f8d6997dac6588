"""The demo model's numbers, its parameters, and a training forward that equals transformers' Qwen3MoE.

Parameters are a flat dict under transformers' names, except that a layer's experts are stacked:
`model.layers.N.mlp.experts.gate_up_proj` [E, 2I, H] (gate rows first) and `...down_proj` [E, H, I].
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from demo.tokenizer import VOCAB_SIZE

State = dict[str, torch.Tensor]
LORA_ALPHA: Final = 16.0


@dataclass(frozen=True)
class Shape:
    """The numbers of a Qwen3MoE under the names of its config. Every expert backend accepts the defaults."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 256
    intermediate_size: int = 512
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def config(self, eos: int, pad: int, dtype: str = "bfloat16") -> dict[str, Any]:
        """config.json; eos and pad are token ids."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **asdict(self),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "decoder_sparse_step": 1,
            "dtype": dtype,
            "eos_token_id": eos,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "output_router_logits": False,
            "pad_token_id": pad,
            "rope_scaling": None,
            "router_aux_loss_coef": 0.01,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Shape:
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


def linear_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    """(out, in) of the attention projections of one layer, by the last parts of their names."""
    h, q, kv = (
        shape.hidden_size,
        shape.num_attention_heads * shape.head_dim,
        shape.num_key_value_heads * shape.head_dim,
    )
    return {
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
    }


def init_state(shape: Shape, device: str, seed: int = 0) -> State:
    """Fresh float32 parameters: normal, deviation 0.02 (embedding, head) or 1/sqrt(in); output projections smaller."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * std

    h, i, e, v = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts, shape.vocab_size
    small = (2 * shape.num_hidden_layers) ** -0.5
    state: State = {"model.embed_tokens.weight": normal(v, h, std=0.02), "model.norm.weight": torch.ones(h)}
    state["lm_head.weight"] = normal(v, h, std=0.02)
    for layer in range(shape.num_hidden_layers):
        at = f"model.layers.{layer}"
        for name, (rows, columns) in linear_shapes(shape).items():
            std = columns**-0.5 * (small if name.endswith("o_proj") else 1.0)
            state[f"{at}.{name}.weight"] = normal(rows, columns, std=std)
        for name, size in (("self_attn.q_norm", shape.head_dim), ("self_attn.k_norm", shape.head_dim)):
            state[f"{at}.{name}.weight"] = torch.ones(size)
        state[f"{at}.input_layernorm.weight"] = torch.ones(h)
        state[f"{at}.post_attention_layernorm.weight"] = torch.ones(h)
        state[f"{at}.mlp.gate.weight"] = normal(e, h, std=0.02)
        state[f"{at}.mlp.experts.gate_up_proj"] = normal(e, 2 * i, h, std=h**-0.5)
        state[f"{at}.mlp.experts.down_proj"] = normal(e, h, i, std=i**-0.5 * small)
    return {name: tensor.to(device) for name, tensor in state.items()}


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Forward:
    """The forward over a parameter dict, with an optional LoRA dict (see demo.nn.lora) beside it."""

    def __init__(self, shape: Shape, state: State, lora: State | None = None, alpha: float = LORA_ALPHA) -> None:
        self.shape, self.state, self.lora, self.alpha = shape, state, lora, alpha

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = F.linear(x, self.state[f"{name}.weight"])
        if self.lora is not None:
            a, b = self.lora[f"{name}.lora_A"], self.lora[f"{name}.lora_B"]
            y = y + F.linear(F.linear(x, a), b) * (self.alpha / a.shape[0])
        return y

    def _attention(
        self, x: torch.Tensor, at: str, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        s = self.shape
        batch, length, _ = x.shape
        q = self._linear(x, f"{at}.q_proj").view(batch, length, s.num_attention_heads, s.head_dim)
        k = self._linear(x, f"{at}.k_proj").view(batch, length, s.num_key_value_heads, s.head_dim)
        v = self._linear(x, f"{at}.v_proj").view(batch, length, s.num_key_value_heads, s.head_dim)
        q = _rope(_norm(q, self.state[f"{at}.q_norm.weight"], s.rms_norm_eps).transpose(1, 2), cos, sin)
        k = _rope(_norm(k, self.state[f"{at}.k_norm.weight"], s.rms_norm_eps).transpose(1, 2), cos, sin)
        group = s.num_attention_heads // s.num_key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.transpose(1, 2).repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
        return self._linear(y.transpose(1, 2).reshape(batch, length, -1), f"{at}.o_proj")

    def _experts(self, x: torch.Tensor, at: str) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> (the layer's output [T, H], the load-balancing loss)."""
        s = self.shape
        with torch.autocast(x.device.type, enabled=False):  # float32: near-ties decide which experts learn
            probabilities = F.linear(x.float(), self.state[f"{at}.gate.weight"].float()).softmax(-1)
        top, chosen = probabilities.topk(s.num_experts_per_tok, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        load = (weights > 0).float().mean(0) / s.num_experts_per_tok  # share of the slots; Switch Transformers' loss
        balance = s.num_experts * (load * probabilities.mean(0)).sum()
        run = self._all_experts if x.is_cuda else self._routed_experts
        return run(x, f"{at}.experts", weights), balance

    def _all_experts(self, x: torch.Tensor, at: str, weights: torch.Tensor) -> torch.Tensor:
        """Every expert on every row: two large products keep a GPU busy where gathering rows would not, and the weights
        [T, E] of the unchosen are exactly zero."""
        gate_up, down = self.state[f"{at}.gate_up_proj"], self.state[f"{at}.down_proj"]
        e, i = gate_up.shape[0], down.shape[2]
        gate, up = F.linear(x, gate_up.flatten(0, 1)).view(-1, e, 2 * i).chunk(2, dim=-1)  # [T, E, I] each
        if self.lora is not None:
            gate, up = gate + self._low_rank(x, self.lora, f"{at}.gate"), up + self._low_rank(x, self.lora, f"{at}.up")
        inner = F.silu(gate) * up * weights.to(gate.dtype).unsqueeze(-1)  # scaled here: down is linear
        y = F.linear(inner.flatten(1), down.permute(1, 0, 2).flatten(1))
        if self.lora is not None:
            a, b = self.lora[f"{at}.down.lora_A"], self.lora[f"{at}.down.lora_B"]  # [E, r, I], [E, H, r]
            low = torch.einsum("tei,eri->ter", inner, a.to(inner.dtype))
            y = y + F.linear(low.flatten(1), b.permute(1, 0, 2).flatten(1)) * (self.alpha / a.shape[1])
        return y

    def _low_rank(self, x: torch.Tensor, lora: State, name: str) -> torch.Tensor:
        """x [T, H] -> [T, E, I]"""
        a, b = lora[f"{name}.lora_A"], lora[f"{name}.lora_B"]  # [E, r, H], [E, I, r]
        low = F.linear(x, a.flatten(0, 1)).view(-1, a.shape[0], a.shape[1])
        return torch.einsum("ter,eir->tei", low, b.to(low.dtype)) * (self.alpha / a.shape[1])

    def _routed_experts(self, x: torch.Tensor, at: str, weights: torch.Tensor) -> torch.Tensor:
        """The same, expert by expert on its own rows: a quarter of the arithmetic, for a CPU."""
        gate_up, down = self.state[f"{at}.gate_up_proj"], self.state[f"{at}.down_proj"]
        y = torch.zeros_like(x)
        for k in range(gate_up.shape[0]):
            rows = weights[:, k].nonzero().squeeze(1)
            z = x[rows]
            gate, up = F.linear(z, gate_up[k]).chunk(2, dim=-1)
            if self.lora is not None:
                gate, up = gate + self._one(z, self.lora, f"{at}.gate", k), up + self._one(z, self.lora, f"{at}.up", k)
            inner = F.silu(gate) * up
            out = F.linear(inner, down[k])
            if self.lora is not None:
                out = out + self._one(inner, self.lora, f"{at}.down", k)
            y = y.index_add(0, rows, (out * weights[rows, k].unsqueeze(-1)).to(y.dtype))
        return y

    def _one(self, x: torch.Tensor, lora: State, name: str, k: int) -> torch.Tensor:
        """One expert's LoRA product."""
        a, b = lora[f"{name}.lora_A"][k], lora[f"{name}.lora_B"][k]
        return F.linear(F.linear(x, a), b) * (self.alpha / a.shape[0])

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [B, L]; mask bool [B, 1, L, L], True = may be seen. Returns the last hidden states [B, L, H],
        normed (the head is left to the caller, who may need few rows), and the mean load-balancing loss (1 = even)."""
        s, state = self.shape, self.state
        x = state["model.embed_tokens.weight"][ids]
        half = torch.arange(0, s.head_dim, 2, device=ids.device).float() / s.head_dim
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(), s.rope_theta**-half)
        cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
        balance = torch.zeros((), device=ids.device)
        for layer in range(s.num_hidden_layers):
            at = f"model.layers.{layer}"
            y = _norm(x, state[f"{at}.input_layernorm.weight"], s.rms_norm_eps)
            x = x + self._attention(y, f"{at}.self_attn", mask, cos, sin)
            y = _norm(x, state[f"{at}.post_attention_layernorm.weight"], s.rms_norm_eps)
            moved, loss = self._experts(y.flatten(0, 1), f"{at}.mlp")
            x = x + moved.view_as(x)
            balance = balance + loss / s.num_hidden_layers
        return _norm(x, state["model.norm.weight"], s.rms_norm_eps), balance


def to_hf(state: State) -> State:
    """The stacked experts under transformers' published names, one tensor per expert and projection."""
    out: State = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            at, half = name.removesuffix(".gate_up_proj"), tensor.shape[1] // 2
            for k in range(tensor.shape[0]):
                out[f"{at}.{k}.gate_proj.weight"], out[f"{at}.{k}.up_proj.weight"] = tensor[k, :half], tensor[k, half:]
        elif name.endswith("experts.down_proj"):
            at = name.removesuffix(".down_proj")
            for k in range(tensor.shape[0]):
                out[f"{at}.{k}.down_proj.weight"] = tensor[k]
        else:
            out[name] = tensor
    return out


def from_hf(tensors: State, shape: Shape) -> State:
    """The inverse of to_hf."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(shape.num_hidden_layers):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{at}.{k}.{p}_proj.weight"] for k in range(shape.num_experts)])
            for p in ("gate", "up", "down")
        )
        out[f"{at}.gate_up_proj"], out[f"{at}.down_proj"] = torch.cat((gate, up), dim=1), down
    return out


def save_model(folder: Path, shape: Shape, state: State, eos: int, pad: int, dtype: torch.dtype) -> None:
    """model.safetensors, config.json and generation_config.json in the published Hugging Face form."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.detach().to("cpu", dtype).contiguous().clone() for n, t in to_hf(state).items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = shape.config(eos, pad, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_model(folder: Path) -> tuple[Shape, State]:
    """The shape and the float32 parameters of a folder that save_model wrote."""
    shape = Shape.from_config(json.loads((folder / "config.json").read_text()))
    tensors = {name: tensor.float() for name, tensor in load_file(str(folder / "model.safetensors")).items()}
    return shape, from_hf(tensors, shape)
