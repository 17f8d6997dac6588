"""Whatever a folder holds: its load works or is refused with a reason, requests go on, a good load beside it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import UserError
from engine.launch.assemble import build
from engine.messages import Finished, LoadAdapter, Reply, UnloadAdapter
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import prompts
from tests.lora.make import config_of, extra_keys, linear_keys, lora_config, per_expert_keys, random_adapter, write

CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"
Change = Callable[[Path], object]

values = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        1 << 70,
        10**400,
        1e308,
        1e-320,
        float("nan"),
        "",
        "x" * 10_000,
        "\ud800",
        [],
        {},
        [[]],
        {"": {}},
    ]
)
names = st.sampled_from(
    ["r", "lora_alpha", "peft_type", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "novel"]
)


def field(name: str, value: Any) -> Change:
    def change(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(lora_config(2, 4.0) | {name: value}))

    return change


def cut(name: str, share: float) -> Change:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def kind(name: str, what: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if what == "fifo":
            os.mkfifo(folder / name)
        elif what == "folder":
            (folder / name).mkdir()
        else:
            (folder / name).symlink_to(what)

    return change


def header(edit: Callable[[dict[str, Any]], object]) -> Change:
    def change(folder: Path) -> None:
        content = (folder / MODEL).read_bytes()
        size = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + size])
        edit(entries)
        new = json.dumps(entries).encode()
        (folder / MODEL).write_bytes(len(new).to_bytes(8, "little") + new + content[8 + size :])

    return change


def bad_value(value: float, share: float) -> Change:
    """One number of the tensors."""

    def change(folder: Path) -> None:
        content = bytearray((folder / MODEL).read_bytes())
        begin = 8 + int.from_bytes(content[:8], "little")
        at = begin + 4 * int((len(content) - begin - 4) // 4 * share)
        content[at : at + 4] = torch.tensor(value).numpy().tobytes()
        (folder / MODEL).write_bytes(content)

    return change


files, shares = st.sampled_from([CONFIG, MODEL]), st.floats(0, 0.999)
changes = st.one_of(
    st.builds(field, names, values),
    st.builds(cut, files, shares),
    st.builds(kind, files, st.sampled_from(["fifo", "folder", "/dev/zero", "/dev/null", "/nowhere", CONFIG, MODEL])),
    st.builds(bad_value, st.sampled_from([float("nan"), float("inf"), -float("inf")]), shares),
    st.builds(
        lambda key, part, value: header(lambda e: e[sorted(e)[key % len(e)]].update({part: value})),
        st.integers(0, 1000),
        st.sampled_from(["dtype", "shape", "data_offsets"]),
        st.sampled_from(["F64", [], [0], [1 << 61, 1 << 61], [-1, 2], [3, 3], None, {}, "x"]),
    ),
    st.builds(
        lambda count: header(lambda e: e.update({f"k{i}": {"dtype": "F32"} for i in range(count)})),
        st.sampled_from([1, 1000, 50_000]),
    ),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Harness, Callable[[Path], Path]]]:
    model = tiny_model(3)
    folder = tmp_path_factory.mktemp("model")
    save_hf(model, folder)
    weights = random_adapter(config_of(model), rank=2, alpha=4.0, extra=1)
    keys = {**linear_keys(weights), **per_expert_keys(weights), **extra_keys(weights)}
    engine = Harness(folder)
    yield engine, lambda path: write(path, keys, lora_config(2, 4.0))
    engine.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(changes, min_size=1, max_size=2))
def test_a_hostile_folder_hurts_nobody(
    served: tuple[Harness, Callable[[Path], Path]], tmp_path_factory: pytest.TempPathFactory, found: list[Change]
) -> None:
    engine, make = served
    folder = tmp_path_factory.mktemp("adapters")
    bad, good = make(folder / "bad"), make(folder / "good")
    for change in found:
        try:
            if not all((bad / name).is_file() for name in (CONFIG, MODEL)):
                break  # this test must not read a device either
            change(bad)
        except (OSError, ValueError, KeyError, AttributeError):  # the changes before left nothing to change
            break
    engine.messages.clear()
    running = engine.submit(prompts(1, [6])[0], max_tokens=30)
    engine.core.handle(LoadAdapter(call_id=1, name="bad", path=str(bad)))
    engine.core.handle(LoadAdapter(call_id=2, name="good", path=str(good)))
    replies: dict[int, Reply] = {}

    def answered() -> bool:
        replies.update({m.call_id: m for m in engine.messages if isinstance(m, Reply)})
        return {1, 2} <= replies.keys()

    engine.until(answered)
    refused = replies[1]
    assert refused.ok or (
        refused.status == 400 and refused.field == "lora_path" and 10 < len(refused.error or "") < 5000
    )
    assert replies[2].ok, replies[2].error
    rid = engine.submit([2, 3, 4], "good", max_tokens=2)
    engine.run()
    assert isinstance(engine.results[rid].end, Finished) and isinstance(engine.results[running].end, Finished)
    for name in ("good", *(["bad"] if refused.ok else [])):
        engine.core.handle(UnloadAdapter(call_id=3, name=name))
    engine.until(lambda: engine.core.adapters.stats()["adapter_host_bytes"] == 0)


@pytest.mark.parametrize("kind", ["missing", "a file", "empty", "a FIFO", "a dangling link", "long", "no user"])
def test_a_start_up_adapter_is_looked_at_before_the_model(tmp_path: Path, kind: str) -> None:
    """The model is missing too, and named later."""
    folder = tmp_path / "adapter"
    if kind == "a file":
        folder.write_text("{}")
    elif kind not in ("missing", "long", "no user"):
        folder.mkdir()
        if kind == "a FIFO":
            os.mkfifo(folder / MODEL)
        elif kind == "a dangling link":
            (folder / MODEL).symlink_to("nowhere")
    path = {"long": f"/{'x' * 4096}", "no user": "~nobody-of-that-name/x"}.get(kind, str(folder))
    config = EngineConfig(model=str(tmp_path / "no model"), adapters=[f"mine={path}"])
    with pytest.raises(UserError, match="adapter 'mine'") as caught:
        build(config, lambda _: None, lambda *_: None)
    assert "\n" not in str(caught.value)
