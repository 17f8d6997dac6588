"""Whole models with KTransformers' calls: our kernels below its names.

Arguments are read by attribute, so that LLaMA-Factory's objects and a TrainConfig do: of `model_args`
bf16, model_name_or_path and the kt_ settings; of `finetuning_args` lora_rank, lora_alpha and lora_dropout. What is
missing, or None, has the default that a file's has; what is outside its limits, or cannot be here, is refused.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Sparse
from engine.architectures.parts.rotation import Rotation
from engine.errors import UserError
from engine.experts.native import NativeExperts
from engine.weights.store import ExpertStore, WeightTensor
from training.config import ConfigError, TrainConfig
from training.config.load import read_values
from training.experts.base import TrainableExperts
from training.experts.native import trainable_layers
from training.kernels import expert_maker, packing, threads_note, worker_pool
from training.kt.errors import KTAMXConfigError, KTAMXModelNotSupportedError, KTAMXNotAvailableError
from training.kt.families import Family, family_of, get_moe_arch_config
from training.kt.wrapper import LoraSize, MOELayerWrapper
from training.layer import BatchRows, ExpertsLoraLayer, RoutedExperts
from training.model import load_model, mark_packed

if TYPE_CHECKING:
    from native import _native

_log = logging.getLogger("training.kt")
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_OF_MODEL = (
    "model_name_or_path", "bf16", "kt_backend", "kt_num_threads", "kt_tp_enabled", "kt_cpu_activation",
    "kt_weight_path", "kt_num_gpu_experts", "kt_optimize_rule", "kt_train_mode",
)  # fmt: skip
_OF_LORA = ("lora_rank", "lora_alpha", "lora_dropout")
_OURS = ("qwen3_moe", "qwen2_moe", "mixtral")  # read into their packed form, from a folder or a GGUF file


def init_cpu_infer(model_args: Any = None) -> _native.WorkerPool:
    """The threads that compute experts. KTAMXConfigError, KTAMXNotAvailableError."""
    settings = _settings(model_args)
    if (lowered := threads_note(settings.kt_num_threads)) is not None:
        _log.warning("%s", lowered)
    try:
        return worker_pool(settings.kt_num_threads, per_node=settings.kt_tp_enabled)
    except ImportError as error:
        raise KTAMXNotAvailableError(f"the native extension is not built: {error}; install ktserve again") from error
    except UserError as error:
        raise KTAMXConfigError(str(error), error.field) from error


def wrap_moe_layers_with_amx(
    model: PreTrainedModel, model_args: Any = None, finetuning_args: Any = None, cpu_infer: Any = None
) -> list[MOELayerWrapper]:
    """Replaces a model's mixture-of-experts blocks, frees their experts' weights and gives the model `_kt_wrappers`,
    `_kt_cpu_infer`, `_kt_tp_enabled` and `_kt_moe_lora_params` (by layer, the six matrices by name: those that
    are there now, which PEFT replaces if an adapter has another rank). KTAMXModelNotSupportedError, KTAMXConfigError,
    KTAMXNotAvailableError; the model is then as it was."""
    family = family_of(model.config)
    settings = _settings(model_args, finetuning_args)
    pool = init_cpu_infer(model_args) if cpu_infer is None else cpu_infer
    blocks = _blocks(model, family)
    if not blocks:
        raise KTAMXModelNotSupportedError("the model has no layer with routed experts", "model")
    arch = get_moe_arch_config(model.config)
    sizes = [arch.expert_num, model.config.hidden_size, arch.intermediate_size]
    experts = _experts(blocks, sizes, settings, pool)
    rows = next((m.rows for m in model.modules() if isinstance(m, RoutedExperts)), BatchRows())
    lora = LoraSize(settings.lora_rank, settings.lora_alpha)
    wrappers = []
    for index, (layer, block) in blocks.items():
        wrapper = MOELayerWrapper(block, experts[index], lora, index, moe_config=arch, cpu_infer=pool, rows=rows)
        setattr(layer, family.block, wrapper)
        wrappers.append(wrapper)
    mark_packed(model)
    attributes: Any = model
    attributes._kt_wrappers, attributes._kt_cpu_infer = wrappers, pool
    attributes._kt_tp_enabled = settings.kt_tp_enabled
    attributes._kt_moe_lora_params = {wrapper.layer_idx: wrapper.lora_params for wrapper in wrappers}
    return wrappers


def load_kt_model(config: PreTrainedConfig | None, model_args: Any, finetuning_args: Any = None) -> PreTrainedModel:
    """The model of `model_args.model_name_or_path`, its experts on the CPU pool with LoRA, everything else frozen, in
    bfloat16 if `model_args.bf16`, else float32. `config`: its transformers config, None: as the files say.
    KTAMXModelNotSupportedError, KTAMXConfigError, KTAMXNotAvailableError; ModelFileError for the files."""
    settings = _settings(model_args, finetuning_args)
    path, experts_from = settings.model_name_or_path, settings.kt_weight_path
    if not path:
        raise KTAMXConfigError("model_name_or_path is missing", "model_name_or_path")
    if config is None and (Path(path).expanduser() / "config.json").is_file():
        config = AutoConfig.from_pretrained(path)
    if config is not None:
        family_of(config)
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    if config is None or config.model_type in _OURS:
        model = load_model(path, expert_maker(settings), dtype=dtype, experts_from=experts_from)
    elif experts_from:
        raise KTAMXConfigError(f"kt_weight_path is read for {', '.join(_OURS)} alone", "kt_weight_path")
    else:
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
    model.requires_grad_(False)
    wrap_moe_layers_with_amx(model, model_args, finetuning_args)
    return model


def _settings(model_args: Any, finetuning_args: Any = None) -> TrainConfig:
    """KTAMXConfigError for a value outside its limits, and for what is refused."""
    values: dict[str, Any] = {}
    for source, arguments, names in (
        ("model_args", model_args, _OF_MODEL), ("finetuning_args", finetuning_args, _OF_LORA)
    ):  # fmt: skip
        try:
            values |= read_values({name: getattr(arguments, name, None) for name in names}, source)
        except ConfigError as error:
            raise KTAMXConfigError(str(error), error.field) from error
    if values.get("lora_dropout"):
        raise KTAMXConfigError("lora_dropout: LoRA on experts has no dropout; set it to 0", "lora_dropout")
    if "lora_rank" in values:
        values.setdefault("lora_alpha", 2.0 * values["lora_rank"])
    return TrainConfig(**values)


def _blocks(model: PreTrainedModel, family: Family) -> dict[int, tuple[nn.Module, nn.Module]]:
    """By layer: (decoder layer, block with routed experts)."""
    found = {}
    layers: Any = model.get_submodule("model.layers")
    for index, layer in enumerate(layers):
        block = getattr(layer, family.block)
        if isinstance(block, MOELayerWrapper):
            raise KTAMXConfigError(f"layer {index} is wrapped already: load the model again", "model")
        if hasattr(block, "experts"):
            found[index] = (layer, block)
    return found


def _experts(
    blocks: dict[int, tuple[nn.Module, nn.Module]], sizes: list[int], settings: TrainConfig, pool: Any
) -> dict[int, TrainableExperts]:
    """Packed from the modules' own weights, unless they are our kernels' already."""
    held: dict[int, Any] = {index: block.experts for index, (_, block) in blocks.items()}
    layers = {index: module for index, module in held.items() if isinstance(module, ExpertsLoraLayer)}
    packed = {index: layer.base_layer.experts for index, layer in layers.items()}
    if packed:
        return packed
    dtype = next(iter(held.values())).down_proj.dtype
    if dtype not in _TYPES:
        raise KTAMXConfigError(f"the experts' weights are {dtype}; supported are float32, bfloat16, float16", "dtype")
    shape, rows = _config(sizes), torch.float32 if dtype == torch.float32 else torch.bfloat16
    try:
        backend = NativeExperts(shape, rows, pool, **packing(settings, rows))
    except UserError as error:
        raise KTAMXNotAvailableError(str(error), error.field) from error
    try:
        for index, module in held.items():
            backend.load_layer(index, _store(index, module))
    except UserError as error:
        raise KTAMXConfigError(str(error), error.field) from error
    return dict(trainable_layers(backend, shape, keep=settings.kt_cpu_activation == "retain"))


def _store(index: int, module: Any) -> ExpertStore:
    """A layer's weights as if they lay in a file."""
    gate, up = module.gate_up_proj.detach().chunk(2, dim=1)
    parts = {"gate": gate, "up": up, "down": module.down_proj.detach()}

    def tensor(name: str, value: torch.Tensor) -> WeightTensor:
        data = value.cpu().contiguous().view(torch.uint8).reshape(-1).numpy()
        return WeightTensor(f"layers.{index}.experts.{name}", tuple(value.shape), _TYPES[value.dtype], data)

    return ExpertStore(index, *(tensor(name, parts[name]) for name in ("gate", "up", "down")))


def _config(sizes: list[int]) -> ModelConfig:
    """The experts' sizes; the rest is not theirs."""
    experts, hidden, inner = sizes
    attention = GroupedQuery(1, 1, 2, Rotation(2, 1.0, 1))
    return ModelConfig(
        architecture="", vocab_size=0, hidden_size=hidden, layers=(LayerSpec(attention, Sparse(experts, 1, inner)),),
        rms_norm_eps=0.0, max_position_embeddings=0, tie_word_embeddings=False, bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip
