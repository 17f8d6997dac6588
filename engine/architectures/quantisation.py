"""What config.json says of quantised safetensors: FP8 in blocks, GPTQ, AWQ, MXFP4. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from engine.architectures.config import Quantisation
from engine.architectures.fields import Fields
from engine.errors import shown

METHODS = ("fp8", "gptq", "awq", "mxfp4")
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
    if method == "mxfp4":
        return Quantisation("mxfp4", group=_STEP)
    return _fp8(own) if method == "fp8" else _int4(own, str(method))


def _fp8(own: Fields) -> Quantisation:
    _allow(own, "fmt", own.text("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    _allow(own, "activation_scheme", own.text("activation_scheme", "dynamic"), ("dynamic",))
    block = own.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
        raise own.error("weight_block_size", f"is {shown(block)}; allowed is a pair of sizes, such as [128, 128]")
    if block[1] % 128:
        raise own.error("weight_block_size", f"is {block}; the second must be a multiple of 128")
    return Quantisation("fp8", group=block[1], rows=block[0])


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
    return Quantisation("gptq", group=group, zeros_less_one=layout == "gptq")


def _allow(own: Fields, name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise own.error(name, f"is {shown(value)}; allowed is {' or '.join(allowed)}")
