"""The classes that a rule's `replace` may name: ours (ktserve.*), and KTransformers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rules.choice import Backend
from rules.family import KINDS, Family
from rules.reader import Kwargs

QUANTISED = ("int8", "int4")
KT_METHODS = ("auto", "AMXBF16", "AMXInt8", "AMXInt4", "GGUF")
EVERY_KIND = frozenset(KINDS)


@dataclass(frozen=True)
class Built:
    """What an operator's kwargs amount to."""

    backend: Backend
    device: str
    prefill_device: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Operator:
    kinds: frozenset[str]  # module kinds that it can replace
    keys: tuple[str, ...]  # kwargs that it reads or notes
    build: Callable[[Kwargs], Built]


def _op(kinds: str, keys: str, build: Callable[[Kwargs], Built]) -> Operator:
    return Operator(frozenset(kinds.split()), tuple(keys.split()), build)


# ---- KTransformers: two phases, each with a device and a kernel class

_CPU_OPS = ("KExpertsCPU", "KSFTExpertsCPU")
_GPU_OPS = ("KExpertsMarlin", "KExpertsTorch")
_LINEAR_OPS = ("KLinearTorch", "KLinearMarlin", "VLinearMarlin", "KLinearQ8", "KLinearFP8", "KLinearCPUInfer")
_KT_BACKENDS = {"AMXBF16": "AMXBF16", "AMXInt8": "AMXInt8", "AMXInt4": "AMXInt4", "llamafile": "GGUF"}
_SAME_PRECISION = {"AMXInt8": "int8", "AMXInt4": "int4"}  # the others hold weights as the file does, or as bf16
_PHASES = "generate_device prefill_device"
_ABSORB = "absorb_for_prefill"
_THRESHOLD = "per_layer_prefill_intput_threshold"  # spelt so in KTransformers


def _one_device(kwargs: Kwargs) -> str:
    """generate_device, where prefill cannot be elsewhere."""
    device = kwargs.device("generate_device", "cuda")
    prefill = kwargs.device("prefill_device", device)
    if prefill != device:
        raise kwargs.error(
            "prefill_device", f"{prefill}, but decode is on {device}: only experts can differ", (device,)
        )
    return device


def _kt_experts(kwargs: Kwargs) -> Built:
    ops = (*_CPU_OPS, *_GPU_OPS)
    op = kwargs.word("generate_op", ops, "KExpertsCPU")
    prefill_op = kwargs.word("prefill_op", ops, "KExpertsTorch")
    device = kwargs.device("generate_device", "cpu" if op in _CPU_OPS else "cuda")
    prefill = kwargs.device("prefill_device", "cuda")
    method = _KT_BACKENDS.get(kwargs.word("backend", tuple(_KT_BACKENDS), ""), "auto")
    kwargs.device("out_device", "cuda")
    kwargs.note("out_device", "an expert's output always goes where its layer's hidden states are")
    for key, name, place in (("generate_op", op, device), ("prefill_op", prefill_op, prefill)):
        if name in _CPU_OPS and place != "cpu":
            raise kwargs.error(key, f"{name} runs on the CPU, not on {place}", _GPU_OPS)
        if name == "KExpertsMarlin" and place == "cpu":
            raise kwargs.error(key, "KExpertsMarlin runs on a GPU, not on the CPU", (*_CPU_OPS, "KExpertsTorch"))
        if name == "KExpertsMarlin":
            kwargs.note(key, "experts on a GPU are bf16 here, not Marlin's int4")
    if op == "KSFTExpertsCPU":
        kwargs.note("generate_op", "the same class as KExpertsCPU here: nothing is trained")
    if device != "cpu":
        kwargs.note("backend", "belongs to experts on the CPU; these are on a GPU")
        if prefill == "cpu":
            raise kwargs.error("prefill_device", f"experts on {device} are not copied back to prefill", (device,))
        if prefill != device:
            raise kwargs.error("prefill_device", f"{prefill}, but the experts live on {device}", (device,))
        return Built("gpu", device, device)
    if op == "KExpertsTorch":
        kwargs.note("backend", "belongs to KExpertsCPU")
        if prefill != device:
            kwargs.note("prefill_device", "KExpertsTorch on the CPU is the reference backend, which prefills there too")
        return Built("reference", device, device)
    quantise = _SAME_PRECISION.get(method)
    precision = f"{quantise} where the file is not quantised" if quantise else "the file's own types"
    kwargs.note_class(
        f"native here, in {precision}: it serves expert adapters; --expert-backend kt is kt_kernel's class"
    )
    options: dict[str, Any] = {"method": method, "prefill_threshold": 0}
    return Built("native", "cpu", prefill, options | ({"quantise": quantise} if quantise else {}))


def _kt_linear(kwargs: Kwargs) -> Built:
    device = _one_device(kwargs)
    op = kwargs.word("generate_op", _LINEAR_OPS, "KLinearMarlin" if device != "cpu" else "KLinearTorch")
    prefill_op = kwargs.word("prefill_op", _LINEAR_OPS, "KLinearTorch")
    for key, name in (("generate_op", op), ("prefill_op", prefill_op)):
        if name == "KLinearCPUInfer" and device != "cpu":
            raise kwargs.error(key, f"KLinearCPUInfer runs on the CPU, not on {device}", _LINEAR_OPS[:-1])
        if name.endswith("Marlin") and device == "cpu":
            raise kwargs.error(key, f"{name} runs on a GPU, not on the CPU", ("KLinearTorch", "KLinearCPUInfer"))
        if name not in ("KLinearTorch", "KLinearCPUInfer"):
            kwargs.note(key, f"projections keep the model's dtype here, {name} would quantise them")
    if prefill_op != op:
        kwargs.note("prefill_op", "decode and prefill share one projection, generate_op decides")
    own: Backend = "native" if op == "KLinearCPUInfer" else "reference"
    return Built(own if device == "cpu" else "gpu", device, device)


def _kt_attention(kwargs: Kwargs) -> Built:
    device = _one_device(kwargs)
    if kwargs.has(_ABSORB):
        kwargs.note(_ABSORB, "latents are expanded where this is less work: sequences with many tokens in a step")
    return Built("reference" if device == "cpu" else "flashinfer", device, device)


def _kt_model(kwargs: Kwargs) -> Built:
    device = kwargs.device("device", "auto")
    options: dict[str, Any] = {"prefill_threshold": kwargs.count(_THRESHOLD, 30000)}
    if layers := kwargs.transfer_map("transfer_map"):
        options["transfer_map"] = layers
    return Built("reference", device, device, options)


def _kt_plain(kwargs: Kwargs) -> Built:
    device = _one_device(kwargs)
    return Built("reference", device, device)


# ---- ours: one backend, one device

_EXPERT_KEYS = "device prefill_device prefill_threshold quantise"
_PREFILLS = ("auto", "fa2", "fa3")


def _own(backend: Backend, device: str) -> Callable[[Kwargs], Built]:
    def build(kwargs: Kwargs) -> Built:
        chosen = kwargs.device("device", device, auto=backend == "reference")
        if device == "cpu" and chosen != "cpu":
            raise kwargs.error("device", f"{backend} runs on the CPU, not on {chosen}", ("cpu",))
        if device == "cuda" and chosen == "cpu":
            raise kwargs.error("device", f"{backend} runs on a GPU", ("cuda", "cuda:N"))
        return Built(backend, chosen, chosen)

    return build


def _own_flashinfer(kwargs: Kwargs) -> Built:
    built = _own("flashinfer", "cuda")(kwargs)
    return Built(built.backend, built.device, built.device, {"prefill": kwargs.word("prefill", _PREFILLS, "auto")})


def _own_kt(kwargs: Kwargs) -> Built:
    built = _own("kt", "cpu")(kwargs)
    return Built("kt", "cpu", built.device, {"method": kwargs.word("method", KT_METHODS, "auto")})


def _own_host_experts(backend: Backend, device: str) -> Callable[[Kwargs], Built]:
    plain = _own(backend, device)

    def build(kwargs: Kwargs) -> Built:
        built = plain(kwargs)
        prefill = kwargs.device("prefill_device", built.device)
        options: dict[str, Any] = {}
        if quantise := kwargs.word("quantise", QUANTISED, ""):
            options["quantise"] = quantise
        if backend == "hybrid":
            options["cpu"] = kwargs.word("cpu", ("native",), "native")  # others do not follow the GPU's stream
            options["gpu_memory"] = kwargs.size("gpu_memory", "auto")
        if backend == "hybrid":
            if prefill == "cpu":
                raise kwargs.error("prefill_device", "is a GPU, or left out", ("cuda", "cuda:N"))
            if prefill != built.device or kwargs.has("prefill_threshold"):
                options["prefill_threshold"] = kwargs.count("prefill_threshold", "auto", auto=True)
        elif prefill == built.device:
            if kwargs.has("prefill_threshold"):
                raise kwargs.error("prefill_threshold", "needs a prefill_device other than device")
        elif built.device != "cpu":
            raise kwargs.error("prefill_device", f"experts on {built.device} prefill there", (built.device,))
        elif prefill == "cpu":
            raise kwargs.error("prefill_device", "is a GPU, or left out", ("cuda", "cuda:N"))
        else:
            options["prefill_threshold"] = kwargs.count("prefill_threshold", "auto", auto=True)
        return Built(backend, built.device, prefill, options)

    return build


OWN: dict[str, Operator] = {
    "ktserve.experts.reference": _op("experts", "device", _own("reference", "auto")),
    "ktserve.experts.native": _op("experts", _EXPERT_KEYS, _own_host_experts("native", "cpu")),
    "ktserve.experts.kt": _op("experts", "device method", _own_kt),
    "ktserve.experts.gpu": _op("experts", "device", _own("gpu", "cuda")),
    "ktserve.experts.hybrid": _op("experts", f"{_EXPERT_KEYS} cpu gpu_memory", _own_host_experts("hybrid", "cuda")),
    "ktserve.attention.reference": _op("attention", "device", _own("reference", "auto")),
    "ktserve.attention.native": _op("attention", "device", _own("native", "cpu")),
    "ktserve.attention.flashinfer": _op("attention", "device prefill", _own_flashinfer),
    "ktserve.linear.reference": _op("linear router", "device", _own("reference", "auto")),
    "ktserve.linear.native": _op("linear router", "device", _own("native", "cpu")),
    "ktserve.linear.gpu": _op("linear router", "device", _own("gpu", "cuda")),
    "ktserve.torch": Operator(EVERY_KIND, ("device",), _own("reference", "auto")),
}

_KT = "ktransformers.operators."
_KT_EXPERTS = _op("experts", f"{_PHASES} generate_op prefill_op out_device backend", _kt_experts)
KTRANSFORMERS: dict[str, Operator] = {
    "default": Operator(EVERY_KIND, tuple(_PHASES.split()), _kt_plain),
    f"{_KT}experts.KTransformersExperts": _KT_EXPERTS,
    f"{_KT}experts.KTransformersExpertsV2": _KT_EXPERTS,
    f"{_KT}linear.KTransformersLinear": _op("linear router", f"{_PHASES} generate_op prefill_op", _kt_linear),
    f"{_KT}layernorm.RMSNorm": _op("norm", _PHASES, _kt_plain),
    f"{_KT}RoPE.RotaryEmbedding": _op("rope", _PHASES, _kt_plain),
}
# What a class that KTransformers has for one family alone does, by the kind that it replaces
_OF_FAMILY: dict[str, Operator] = {
    "model": _op("model", f"device {_THRESHOLD} transfer_map", _kt_model),
    "moe_block": _op("moe_block mlp", _PHASES, _kt_plain),  # a rule by name meets dense layers' MLPs too
    "attention": _op("attention", f"{_PHASES} {_ABSORB}", _kt_attention),
    **{kind: _op(kind, _PHASES, _kt_plain) for kind in ("mlp", "norm", "rope", "router")},
}


def operators_of(family: Family) -> dict[str, Operator]:
    """Every class that a rule for a model of this family may name in `replace`."""
    return {**OWN, **KTRANSFORMERS, **{name: _OF_FAMILY[kind] for name, kind in family.operators.items()}}
