"""Every key of adapter_config.json has a fate: PEFT's by its dataclass, others by name, unknown ones refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from engine.errors import AdapterError
from engine.lora.files.keys import OBEYED, PASSED, REFUSED, check_keys
from engine.lora.files.parse import parse_adapter
from tests.lora import make
from tests.lora.refuse import CONFIG, peft_tensors, refused

KNOWN = OBEYED | PASSED.keys() | REFUSED.keys()
SET = st.one_of(
    st.just(True), st.integers(), st.text(min_size=1), st.lists(st.integers(), min_size=1), st.just({"a": None})
)


def test_each_field_of_peft_has_one_fate() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert sorted(fields - KNOWN) == []
    assert len(KNOWN) == len(OBEYED) + len(PASSED) + len(REFUSED)


def test_what_peft_writes_by_default_is_read(tmp_path: Path) -> None:
    LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    make.write(tmp_path, peft_tensors(), None)
    assert parse_adapter(tmp_path, CONFIG, name="x").warnings == []


@given(st.sampled_from(sorted(PASSED)), SET)
def test_passed_keys_may_hold_anything(key: str, value: Any) -> None:
    check_keys({key: value})


@given(st.text().filter(lambda key: key not in KNOWN), SET)
def test_unknown_keys_that_are_set_refuse(key: str, value: Any) -> None:
    with pytest.raises(AdapterError, match="not known here") as caught:
        check_keys({key: value})
    assert caught.value.keys == [key]
    for unset in (None, False, "", [], {}):
        check_keys({key: unset})


def test_unknown_zero_is_a_value() -> None:
    with pytest.raises(AdapterError, match="'lora_shift' is 0: not known here"):
        check_keys({"lora_shift": 0})


@pytest.mark.parametrize("value", ["new_way", 3, {"a": 1}])
def test_unknown_initialisations_refuse(value: Any) -> None:
    with pytest.raises(AdapterError, match=r"init_lora_weights is .* not known here"):
        check_keys({"init_lora_weights": value})


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_initialisations_that_leave_the_base(value: Any) -> None:
    check_keys({"init_lora_weights": value})


def test_other_tasks_refuse(tmp_path: Path) -> None:
    make.write(tmp_path, peft_tensors(), make.lora_config(task_type="SEQ_CLS"))
    assert refused(tmp_path, "task_type is 'SEQ_CLS'").keys == ["task_type"]
