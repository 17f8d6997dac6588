"""What config.json says of quantised safetensors: FP8, GPTQ, AWQ, packed int4, MXFP4. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from engine.architectures.config import Quantisation
from engine.architectures.fields import Fields
from engine.errors import shown

METHODS = ("fp8", "gptq", "awq", "mxfp4", "compressed-tensors")
_STEP = 32  # values that share a scale come in multiples of it


def read_quantisation(fields: Fields) -> Quantisation | None:
    """`quantization_config`, None if there is none. Raises ModelFileError for what cannot be read."""
    held = fields.get("quantization_config")
    if held is None:
        return None
    method = held.get("quant_method") if isinstance(held, Mapping) else held
    if not isinstance(held, Mapping) or method not in METHODS:
        raise fields.error(
            "quantization_config",
            f"is {shown(method)}; of safetensors plain weights and those of {', '.join(METHODS)} are read "
            "(GGUF files may be quantised)",
        )
    own = Fields(held, f"{fields.where}: quantization_config")
    if method == "compressed-tensors":
        return _compressed(own)
    if method == "mxfp4":
        return Quantisation("mxfp4", group=_STEP)
    return _fp8(own) if method == "fp8" else _int4(own, str(method))


def _fp8(own: Fields) -> Quantisation:
    _allow(own, "fmt", own.text("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    _allow(own, "activation_scheme", own.text("activation_scheme", "dynamic"), ("dynamic",))
    rows, group = _block(own, "weight_block_size")
    return Quantisation("fp8", group=group, rows=rows)


def _block(own: Fields, name: str) -> tuple[int, int]:
    """Rows and columns of a block that shares a scale."""
    block = own.get(name)
    if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
        raise own.error(name, f"is {shown(block)}; allowed is a pair of sizes, such as [128, 128]")
    if block[1] % 128:
        raise own.error(name, f"is {block}; the second must be a multiple of 128")
    return block[0], block[1]


def _compressed(own: Fields) -> Quantisation:
    """Of compressed-tensors the symmetric int4 of groups, packed, and e4m3 with scales of rows, blocks or tensors.
    Which modules have it, their tensors say."""
    layout = own.text("format", "pack-quantized")
    _allow(own, "format", layout, ("pack-quantized", "float-quantized"))
    groups = own.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise own.error("config_groups", f"is {shown(groups)}; allowed is one group")
    (name, group), *_ = groups.items()
    held = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(held, Mapping):
        raise own.error("config_groups", f"has no weights in {shown(name)}")
    weights = Fields(held, f"{own.where}: config_groups: {name}: weights")
    floats = layout == "float-quantized"
    if (bits := weights.integer("num_bits")) != (8 if floats else 4):
        raise weights.error("num_bits", f"is {bits}; of {layout} {8 if floats else 4} are read")
    kind = "float" if floats else "int"
    _allow(weights, "type", weights.text("type", kind), (kind,))
    if not weights.boolean("symmetric", True):
        raise weights.error("symmetric", "is false; weights without zero points are read")
    if floats:
        inputs = group.get("input_activations")
        if isinstance(inputs, Mapping):
            _dynamic(Fields(inputs, f"{own.where}: config_groups: {name}: input_activations"))
        return _float_quantised(weights)
    _allow(weights, "strategy", weights.text("strategy", "group"), ("group",))
    if (size := weights.integer("group_size")) % _STEP:
        raise weights.error("group_size", f"is {size}; allowed are multiples of {_STEP}")
    return Quantisation(layout, group=size)


def _dynamic(inputs: Fields) -> None:
    if not inputs.boolean("dynamic", False):
        raise inputs.error("dynamic", "is false; scales of activations that files hold are not read")


def _float_quantised(weights: Fields) -> Quantisation:
    strategy = weights.text("strategy", "tensor")
    _allow(weights, "strategy", strategy, ("channel", "tensor", "block"))
    if strategy != "block":
        return Quantisation("float-quantized", group=-1, rows=1 if strategy == "channel" else -1)
    rows, group = _block(weights, "block_structure")
    return Quantisation("float-quantized", group=group, rows=rows)


def _int4(own: Fields, method: str) -> Quantisation:
    name = "w_bit" if own.get("bits") is None and own.get("w_bit") is not None else "bits"
    if (bits := own.integer(name)) != 4:
        raise own.error(name, f"is {bits}; of {method} 4 bits are read")
    name = "q_group_size" if own.get("group_size") is None and own.get("q_group_size") is not None else "group_size"
    group = own.integer(name, least=-1)
    if group != -1 and (group < 1 or group % _STEP):
        raise own.error(name, f"is {group}; allowed are multiples of {_STEP}, and -1 for whole rows")
    if own.boolean("desc_act", False):
        raise own.error("desc_act", "is true; groups in the order of activations (act-order) cannot be read")
    if method == "awq":
        _allow(own, "version", own.text("version", "gemm").lower(), ("gemm",))
        if not own.boolean("zero_point", True):
            raise own.error("zero_point", "is false; of awq weights with zero points are read")
        return Quantisation("awq", group=group)
    layout = own.text("checkpoint_format", "gptq")
    _allow(own, "checkpoint_format", layout, ("gptq", "gptq_v2"))
    return Quantisation("gptq", group=group, zeros_minus_one=layout == "gptq")


def _allow(own: Fields, name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise own.error(name, f"is {shown(value)}; allowed is {' or '.join(allowed)}")
