"""training.config: what is read, what is refused, and that the documentation says so."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from training.config import ConfigError, TrainConfig, load_config
from training.config.fields import PER_ADAPTER
from training.config.others import NO_OPS
from training.config.reference import reference
from training.config.refused import REFUSED

_BASE = "model_name_or_path: demo\noutput_dir: out\ndataset: a, b\n"
_EVAL = "val_size: 4\neval_strategy: steps\n"


@pytest.fixture
def load(tmp_path: Path):  # type: ignore[no-untyped-def]
    def read(text: str, *overrides: str) -> TrainConfig:
        path = tmp_path / "c.yaml"
        path.write_text(_BASE + text)
        return load_config(path, overrides)

    return read


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        ("w1,w2,w3", ("gate_proj", "down_proj", "up_proj")),
        ("[q_proj, w2]", ("q_proj", "down_proj")),
        ("w1, gate_proj", "lora_target names one thing twice"),
    ],
)
def test_mixtrals_names_of_projections_are_the_others(load, targets, wanted) -> None:  # type: ignore[no-untyped-def]
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted):
            load(f"lora_target: {targets}\n")
    else:
        assert load(f"lora_target: {targets}\n").lora_target == wanted


def test_a_llama_factory_file_with_both_spellings_of_kt(load) -> None:  # type: ignore[no-untyped-def]
    config = load(
        """\
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: [q_proj, down_proj]
template: qwen3_nothink
learning_rate: 1e-4
max_steps: 20
bf16: yes
use_kt: true
kt_num_threads: 4
preprocessing_num_workers: 16
kt_config:
  kt_backend: amxint8
  kt_num_threads: 4
  kt_max_cache_depth: 2
"""
    )
    assert (config.lora_rank, config.lora_alpha, config.scaling) == (16, 32.0, 2.0)
    assert config.lora_target == ("q_proj", "down_proj") and config.dataset == ("a", "b")
    assert (config.template, config.enable_thinking) == ("auto", False)
    assert (config.learning_rate, config.max_steps, config.num_train_epochs) == (1e-4, 20, None)
    assert config.bf16 and (config.kt_backend, config.kt_num_threads) == ("AMXInt8", 4)
    assert config.runs() == (config,)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("lora_rnk: 8\n", 4, "unknown key lora_rnk; did you mean lora_rank?"),
        ("kt_config:\n  kt_bakend: x\n", 5, "did you mean kt_backend"),
        ("\nlora_rank: 0\n", 5, "allowed is 1 to 512"),
        ("learning_rate: fast\n", 4, "a number is expected"),
        ("stage: kto\n", 4, "allowed is sft, dpo"),
        ("max_steps: 5\nnum_train_epochs: 2\n", 5, "contradicts max_steps"),
        ("warmup_steps: 5\nwarmup_ratio: 0.1\n", 5, "contradicts warmup_steps"),
        ("kt_num_threads: 2\nkt_config: {kt_num_threads: 3}\n", 5, "write it once"),
        ("pure_bf16: true\n", 4, "refused: LoRA masters, gradients"),
        ("packing: true\nneat_packing: false\n", 5, "contradicts packing"),
        ("stage: dpo\npacking: true\n", 5, "contradicts stage: dpo"),
        ("device: cpu\nstream_min_tokens: 64\n", 5, "contradicts device: cpu"),
        ("pref_beta: 0.2\n", 4, "means something only with stage: dpo"),
        ("eval_strategy: steps\n", 4, "needs eval_dataset or val_size"),
        ("val_size: 0.1\n", 4, "never used with eval_strategy: no"),
        ("use_kt: false\n", 4, "cannot be"),
        ("template: llama3\n", 4, "or a .jinja file"),
        (
            "gradient_checkpointing: true\ndisable_gradient_checkpointing: true\n",
            5,
            "contradicts gradient_checkpointing",
        ),
        ("lora_rank: 8\nlora_rank: 8\n", 5, "written twice"),
        ("lora_rank: &x 8\n", 4, "anchors"),
        ("fp16: false\nfp16: true\n", 5, "written twice"),
        ("fp16: true\n", 4, "fp16 is refused: float16 overflows"),
        ("lora_target: q_proj, x_proj\n", 4, "lora_target: x_proj; allowed are all, or some of q_proj"),
        ("seed: 1\nlora_dropout: 0.1\n", 5, "LoRA on experts has no dropout"),
        ("lora_dropout: 0.1\nlora_target: q_proj, up_proj\n", 4, "attention's q_proj,k_proj,v_proj,o_proj"),
        ("lr_scheduler_type: constant\nwarmup_steps: 3\n", 5, "constant_with_warmup has one"),
        ("warmup_ratio: 1\n", 4, "allowed is 0 to 0.99"),
        (f"{_EVAL}early_stopping_steps: 2\nsave_strategy: epoch\n", 6, "has to be eval_strategy's steps, not epoch"),
        (f"{_EVAL}early_stopping_steps: 2\neval_steps: 7\n", 7, "a multiple of eval_steps, 7; it is 500"),
        ("adapters:\n  - {lora_rank: 4}\n", 5, "needs a name"),
        ("adapters:\n  - {name: a, bf16: true}\n", 5, "the same for all adapters"),
        ("adapters:\n  - {name: a}\n  - {name: a}\n", 4, "two adapters are named a"),
        ("adapters:\n  - {name: checkpoint-3}\n", 4, "where a checkpoint does"),
        ("adapter_name: b\nadapters:\n  - {name: a}\n", 4, "adapter_name means nothing beside adapters"),
        ("adam_beta1: 1\n", 4, "allowed is 0 to 0.999999"),
        ("adam_epsilon: 0\n", 4, "allowed is 1e-16 to 1"),
        ("report_to: [none, wandb]\n", 4, "report_to: none stands alone"),
        ("stage: dpo\nadapters:\n  - {name: a}\n", 4, "stage: dpo contradicts adapters"),
        ("save_strategy: epoch\nadapters:\n  - {name: a}\n", 4, "save_strategy: epoch contradicts adapters"),
        ("val_size: 4\neval_strategy: steps\nadapters:\n  - {name: a}\n", 5, "eval_strategy: steps contradicts"),
        ("lora_target: q_proj\nadapters:\n  - {name: a, lora_dropout: 0.1}\n", 5, "lora_dropout: 0.1 contradicts"),
    ],
)
def test_errors_name_file_and_line(load, text: str, line: int, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as error:
        load(text)
    place, _, message = str(error.value).partition(": ")
    assert place.endswith(f"c.yaml:{line}") and said in message, str(error.value)


@pytest.mark.parametrize("key", [*REFUSED, *NO_OPS])
def test_refused_keys_say_what_to_do_and_no_ops_change_nothing(load, key: str) -> None:  # type: ignore[no-untyped-def]
    if key in REFUSED:
        with pytest.raises(ConfigError, match=f"{key} is refused"):
            load(f"{key}: 1\n")
        return
    row = NO_OPS[key]
    assert load(f"{key}: {row.allowed[0] if row.allowed else 7}\n") == load("")
    if row.allowed:
        with pytest.raises(ConfigError, match=f"{key}: other cannot be"):
            load(f"{key}: other\n")


def test_an_override_takes_the_place_of_what_it_contradicts(load) -> None:  # type: ignore[no-untyped-def]
    text = "num_train_epochs: 3\nkt_config: {kt_num_threads: 4}\n"
    config = load(text, "max_steps=5", "kt_num_threads=2", "lora_target=[q_proj]", "resume_from_checkpoint=true")
    assert (config.max_steps, config.num_train_epochs, config.kt_num_threads) == (5, None, 2)
    assert config.lora_target == ("q_proj",) and config.resume_from_checkpoint == "true"
    for wrong in ("max_steps", "lora_rnk=2", "a.b.c=2", "adapters.0.lora_rank=2"):
        with pytest.raises(ConfigError, match=f"override {wrong}"):
            load(text, wrong)


def test_a_list_of_one_word_is_that_word(load) -> None:  # type: ignore[no-untyped-def]
    assert load("report_to: [none]\n") == load("report_to: none\n") == load("")


def test_adapters_inherit_and_differ(load) -> None:  # type: ignore[no-untyped-def]
    text = """\
max_steps: 9
lora_rank: 4
adapters:
  - {name: first, dataset: x, learning_rate: 1e-3}
  - name: second
    lora_rank: 32
    num_train_epochs: 2
"""
    first, second = load(text, "adapters.0.lora_alpha=7").runs()
    assert (first.adapter_name, first.dataset, first.lora_rank, first.lora_alpha) == ("first", ("x",), 4, 7.0)
    assert (first.max_steps, second.max_steps, second.num_train_epochs) == (9, None, 2.0)
    assert (second.lora_rank, second.lora_alpha, second.dataset) == (32, 64.0, ("a", "b"))
    assert {"dataset", "lora_rank", "lora_alpha", "learning_rate", "lr_scheduler_type"} <= set(PER_ADAPTER)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([f.name for f in fields(TrainConfig)] + ["x", "kt_config"]),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
            max_leaves=4,
        ),
        max_size=5,
    )
)
def test_any_yaml_is_a_configuration_or_a_named_error(tmp_path_factory: pytest.TempPathFactory, values) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(values))
    try:
        config = load_config(path)
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        assert config.model_name_or_path and config.output_dir


def test_the_page_of_settings_is_made_from_the_fields() -> None:
    page = Path(__file__).parents[2] / "docs" / "training-config.md"
    assert page.read_text() == reference(), "python -m training.config.reference writes it"
    assert all(f"`{f.name}`" in page.read_text() for f in fields(TrainConfig))
