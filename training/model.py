"""A stock transformers model whose routed experts are the kernels' packed weights.

The model is laid out without memory, its experts are replaced, and only then the other tensors are read: the experts'
weights exist once, in the form they are computed in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as _CAUSAL

from engine.architectures.config import ModelConfig
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import FLOAT32_MODULES, ROUTER, Dense
from engine.architectures.registry import architecture_of
from engine.errors import ModelFileError
from engine.files.json_file import read_json
from engine.weights.layout import tensors
from engine.weights.open import open_model
from engine.weights.store import WeightSource
from training.attention import SINK_ATTENTION, within_windows
from training.delta import refuse_delta, transformers_tensor
from training.experts.base import TrainableExperts
from training.layer import BatchRows, RoutedExperts, place_experts
from training.names import GATE_MODULES, transformers_name

_OTHER_ROUTER = "mlp.router"  # what some families call `ROUTER`
_FLOAT32 = (*FLOAT32_MODULES, _OTHER_ROUTER, *GATE_MODULES)
_TOKENS = "tokens_not_padding"  # an argument of layers, and of their attention
ExpertMaker = Callable[[WeightSource, torch.dtype], Mapping[int, TrainableExperts]]  # by sparse layer


def load_model(
    model: str,
    make_experts: ExpertMaker,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    device: str = "cpu",
    experts_from: str | None = None,
) -> PreTrainedModel:
    """`model`: a Hugging Face folder, a .gguf file, or a folder with one. Everything is frozen. `dtype`: of activations
    and of the weights beside the experts; routers stay in float32, as the server has them. `experts_from`: another
    file or folder of the same model, whose experts are used. UserError for what cannot be opened."""
    source = open_model(model)
    refuse_delta(source, model, packing=False)
    experts = source if experts_from is None else open_model(experts_from)
    if experts.config.sparse_layers != source.config.sparse_layers or _sizes(experts) != _sizes(source):
        raise ModelFileError(
            f"{experts_from}: experts {_sizes(experts)} [number, hidden, intermediate] do not fit {model}'s "
            f"{_sizes(source)}",
            "kt_weight_path",
        )
    config = transformers_config(model, source.config)
    config.use_cache, config.tie_word_embeddings = False, source.config.tie_word_embeddings
    grouped = [part for part in source.config.paged_attention if isinstance(part, GroupedQuery)]
    if attention == "sdpa" and any(part.sinks for part in grouped):
        attention = SINK_ATTENTION
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    rows = BatchRows()
    by_turns = source.config.experts is not None and source.config.experts.interleaved
    for layer, held in make_experts(experts, dtype).items():
        routed = RoutedExperts(held, _sizes(source), rows, by_turns=by_turns)
        place_experts(made.get_submodule(f"model.layers.{layer}.mlp"), routed)
    mark_packed(made)
    _read_tensors(made, source, dtype, torch.device(device))
    base: Any = made.get_submodule("model")
    base.register_forward_pre_hook(_find_padding, with_kwargs=True)
    if any(part.window is not None for part in grouped):
        base.register_forward_pre_hook(within_windows, with_kwargs=True)
    for block in base.layers:
        mixer = block.self_attn if hasattr(block, "self_attn") else block.linear_attn
        mixer.register_forward_pre_hook(_note_padding(rows), with_kwargs=True)
    _route_in_float32(made, dtype)
    made.name_or_path = config.name_or_path = str(Path(os.path.expanduser(model)))
    return made.eval()


def mark_packed(model: PreTrainedModel) -> None:
    """By their model_type PEFT knows models whose experts transformers 5 has stacked, and rewrites configurations and
    tensors of adapters for those: here there are no such weights, so the model's type is another one."""
    model.config.model_type = f"{type(model.config).model_type}_packed"


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let backward compute each layer again from its input."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def batch_rows(model: nn.Module) -> BatchRows:
    """The record that all layers of a loaded model (or of PEFT's wrapper around it) share."""
    return next(module.rows for module in model.modules() if isinstance(module, RoutedExperts))


def routed_experts(model: nn.Module) -> list[TrainableExperts]:
    """Of each sparse layer."""
    return [module.experts for module in model.modules() if isinstance(module, RoutedExperts)]


def transformers_config(model: str, config: ModelConfig) -> PreTrainedConfig:
    """The folder's own config.json, or what a GGUF file says, or a folder whose model is another family's in all but
    name. ModelFileError for a family that transformers does not have."""
    path = Path(os.path.expanduser(model))
    if (path / "config.json").is_file() and read_json(path / "config.json").get("model_type") in _CAUSAL:
        whole = AutoConfig.from_pretrained(path)
        return whole.get_text_config() if config.state_bytes else whole
    family = architecture_of(config).language_model
    if family not in _CAUSAL:
        raise ModelFileError(f"{model}: {family} is no family of transformers; it cannot be trained", "model")
    attention, layers = config.paged_attention[0], config.layers
    rotation = attention.rotation
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": rotation.theta}
    if isinstance(attention, GroupedQuery) and rotation.dim != attention.head_dim:
        rope["partial_rotary_factor"] = rotation.dim / attention.head_dim
    if (scaling := rotation.scaling) is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor, **scaling.extra}
        original = scaling.original_max_position_embeddings
        rope |= {} if original is None else {"original_max_position_embeddings": original}
        if scaling.kind == "yarn":
            rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            rope |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    dense = [index for index, layer in enumerate(layers) if isinstance(layer.mlp, Dense)]
    widths = [layer.mlp.intermediate for layer in layers if isinstance(layer.mlp, Dense)]
    fields = {**config.numbers(), **architecture_of(config).own_fields(config)}
    fields.pop("rope_theta")
    return AutoConfig.for_model(
        family,
        **fields,
        intermediate_size=widths[0] if widths else config.moe_intermediate_size,
        norm_topk_prob=config.experts is not None and config.experts.router.normalise is not None,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        mlp_only_layers=dense,
        attention_bias=attention.bias,
        qkv_bias=attention.bias,
        bos_token_id=config.bos_token_id,
        eos_token_id=list(config.eos_token_ids) or None,
        rope_parameters=rope,
    )


def _sizes(source: WeightSource) -> tuple[int, int, int]:
    return source.config.num_experts, source.config.hidden_size, source.config.moe_intermediate_size


def _read_tensors(model: PreTrainedModel, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
    """Fills every parameter; a tied head is the embedding itself."""
    held_as = tensors(source.config)
    for name in source.names():
        module, _, last = transformers_name(name).rpartition(".")
        if module.endswith(ROUTER) and not hasattr(model.get_submodule(module.removesuffix(".gate")), "gate"):
            module = module.removesuffix(ROUTER) + _OTHER_ROUTER
        owner = model.get_submodule(module)
        held = last in owner._buffers  # a router's bias, in float32 as its scores
        wide = held or module.endswith(_FLOAT32) or held_as[name].negative_log
        values = source.tensor(name).dequantise(torch.float32 if wide or source.config.norms_minus_one else dtype)
        values = transformers_tensor(held_as[name], values, source.config.norms_minus_one)
        tensor = values.to(device, torch.float32 if wide else dtype)
        if held:
            owner.register_buffer(last, tensor)
        else:
            owner.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    base: Any = model.get_submodule("model")
    base.rotary_emb = type(base.rotary_emb)(config=model.config).to(device)
    if source.config.tie_word_embeddings:
        model.lm_head.weight = base.embed_tokens.weight
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise ModelFileError(f"transformers' model has tensors that the file lacks: {', '.join(left[:4])}", "model")


def _find_padding(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tells every layer which tokens are not padding, bool [rows] or None for all: padding is where `segments` [B, S]
    of packed rows are negative, or where a mask [B, S] is 0; of a longer mask the tokens before S are in a cache. A
    layer hands its arguments to its attention: so one that backward computes again is told again, whatever other batch
    was computed in between."""
    segments, mask = kwargs.pop("segments", None), kwargs.get("attention_mask")
    found = None
    if segments is not None:
        found = segments >= 0
    elif isinstance(mask, torch.Tensor) and mask.dim() == 2:
        ids = args[0] if args else kwargs.get("input_ids")
        length = (kwargs["inputs_embeds"] if ids is None else ids).shape[1]
        found = mask[:, -length:].bool()
    return args, {**kwargs, _TOKENS: None if found is None else found.reshape(-1)}


def _note_padding(rows: BatchRows) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    """Of an attention, behind which come the layer's experts."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows.mask = kwargs.pop(_TOKENS, None)
        return args, kwargs

    return hook


def _route_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        return
    for name, module in model.named_modules():
        if name.endswith(_FLOAT32):
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            # a shared expert's gate multiplies activations; routing weights stay, and so do the gates of delta nets
            if isinstance(module, nn.Linear) and not name.endswith(GATE_MODULES):
                module.register_forward_hook(lambda _, args, out: out.to(dtype))
