"""The keys of adapter_config.json, of PEFT and of trainers that add their own: what each does to the function.

A key is obeyed (`OBEYED`; `settings.py` reads it), passed over because the function is the same whatever it says
(`PASSED`), or refused when it is set (`REFUSED`). A key that is in none of them is refused too, when it is set.
"""

from __future__ import annotations

from typing import Any

from engine.errors import AdapterError
from engine.lora.files.folder import CONFIG_FILE, brief

OBEYED = frozenset(
    [
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "peft_version",
        "auto_mapping",  # Unsloth's mark in it leaves the layout of lora_B open
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "target_parameters",
        "bias",
        "init_lora_weights",
        "lora_B_layout",  # Unsloth
        "unsloth_fused_expert_lora",  # Unsloth
    ]
)

PASSED = {
    # which modules have LoRA: the tensors say so themselves
    "target_modules": "the tensors say it",
    "exclude_modules": "the tensors say it",
    "layers_to_transform": "the tensors say it",
    "layers_pattern": "the tensors say it",
    # of training alone
    "lora_dropout": "of training",
    "inference_mode": "of training",
    "velora_config": "of the backward pass",
    "lora_dtype": "of training (ms-swift)",
    "lorap_lr_ratio": "a learning rate (ms-swift)",
    "lorap_emb_lr": "a learning rate (ms-swift)",
    # of initialisations, which `init_lora_weights` chooses
    "loftq_config": "of an initialisation",
    "eva_config": "of an initialisation",
    "corda_config": "of an initialisation",
    "lora_ga_config": "of an initialisation",
    # of what is refused when it is used
    "megatron_core": "of megatron_config",
    "qalora_group_size": "of use_qalora",
    "ensure_weight_tying": "of LoRA and whole modules on tied embeddings, which are refused",
    # of the program that runs it
    "fan_in_fan_out": "PEFT takes it as false for linear modules",
    "merge_weights": "of the program that runs it (PEFT before 0.3)",
    "revision": "of the base's repository",
    "runtime_config": "of the program that runs it",
}

REFUSED = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole modules trained beside the LoRA are not supported",
    "lora_bias": "LoRA biases are not supported",
    "trainable_token_indices": "trained embeddings are not supported",
    "layer_replication": "replicated layers are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "kasa_config": "KaSA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "megatron_config": "Megatron layers are not supported",
    "enable_lora": "LoRA on parts of a merged linear (PEFT before 0.3) is not supported",
}

# These initialisations change the base's weights, so the file alone is not the difference to the base.
_ALTERED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_SAME_BASE = ("gaussian", "eva", "orthogonal", "mica")
_TABLES = ("embed_tokens", "lm_head")
_TASKS = ("CAUSAL_LM", "FEATURE_EXTRACTION")


def check_keys(content: dict[str, Any]) -> None:
    """AdapterError for a key or value that changes, or may change, the function in a way that is not served."""
    kind = content.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"{CONFIG_FILE}: peft_type is {brief(kind)}, only 'LORA' is supported", ["peft_type"])
    task = content.get("task_type")
    if task is not None and task not in _TASKS:
        allowed = " and ".join(map(repr, _TASKS))
        raise AdapterError(f"{CONFIG_FILE}: task_type is {brief(task)}, only {allowed} are supported", ["task_type"])
    if (content.get("bias") or "none") != "none":
        raise AdapterError(f"{CONFIG_FILE}: bias is {brief(content['bias'])}, only 'none' is supported", ["bias"])
    for key, reason in REFUSED.items():
        if content.get(key) and not (key == "modules_to_save" and _tables(content[key])):
            raise AdapterError(f"{CONFIG_FILE}: {key} is {brief(content[key])}: {reason}", [key])
    _check_initialisation(content.get("init_lora_weights"))
    unknown = sorted(key for key, value in content.items() if _is_unknown(key) and not _unset(value))
    if unknown:
        said = ", ".join(f"{brief(key)} is {brief(content[key])}" for key in unknown[:4])
        raise AdapterError(
            f"{CONFIG_FILE}: {said}: not known here, so it may change what the adapter computes; "
            "remove it from the file if it does not",
            unknown,
        )


def _check_initialisation(value: object) -> None:
    if value is None or isinstance(value, bool):
        return
    name = value.lower() if isinstance(value, str) else ""
    if name.startswith(_ALTERED_BASE):
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights is {brief(value)}: it changes the base's weights too; "
            "save the adapter converted to plain LoRA",
            ["init_lora_weights"],
        )
    if name not in _SAME_BASE:
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights is {brief(value)}, which is not known here and may change the base's "
            "weights",
            ["init_lora_weights"],
        )


def _tables(names: object) -> bool:
    """Of the embedding and the head the tensors decide (`engine.lora.files.whole`)."""
    return isinstance(names, list) and all(
        isinstance(name, str) and name.rpartition(".")[2] in _TABLES for name in names
    )


def _is_unknown(key: str) -> bool:
    return key not in OBEYED and key not in PASSED and key not in REFUSED


def _unset(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})
