"""KV blocks and snapshots of states that go from a GPU's memory to disk and come back as they were."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.architectures.parts.delta import DeltaNet
from engine.attention.delta import DeltaBackend, StateSlots
from engine.attention.gpu_delta import GpuDeltaNet
from engine.kv_disk.files import Bytes
from engine.kv_disk.units import DeviceUnits
from engine.messages import Finished
from scheduler.memory.disk import DiskBlocks
from testing.harness import Harness
from testing.models.tiny import STATEFUL, save_hf, tiny_model
from tests.engine.parity import prompts
from tests.gpu.test_serving import agree

pytestmark = pytest.mark.gpu
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
# Every expert of every token: a random router's choice would flip between bf16 and float32, and tokens with it.
SHAPE: dict[str, Any] = {
    "head_dim": 256, "hidden_size": 128, "num_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 128,
}  # fmt: skip
GPU: dict[str, Any] = {"device": "cuda", "rules": None, "dtype": "bfloat16", "expert_backend": "native"}
IN_TORCH: dict[str, Any] = {"device": "cuda", "rules": "reference", "dtype": "float32"}
SYSTEM = prompts(1, [150])[0]
ASKED = [SYSTEM + tail for tail in prompts(2, [5, 17])]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[torch.nn.Module, Path]]:
    """By family: one of attention alone, and those that keep states, too."""
    made = {}
    for family in ("qwen3_moe", *STATEFUL):
        own = {"shared_expert_intermediate_size": 64} if family in STATEFUL else {}
        model, folder = tiny_model(4, family=family, **SHAPE, **own), tmp_path_factory.mktemp(family)
        save_hf(model, folder)
        made[family] = model, folder
    return made


class Copies:
    """What was read from units and written to them, by content."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: set[bytes] = set()  # from the device
        self.written: set[bytes] = set()
        self.wrong: list[int] = []  # units that hold something else than was written to them
        get, put = DeviceUnits.get, DeviceUnits.put

        def noted_get(units: DeviceUnits, unit: int, content: Bytes) -> None:
            get(units, unit, content)
            self.read.add(blake2b(content).digest())

        def noted_put(units: DeviceUnits, unit: int, content: Bytes) -> None:
            put(units, unit, content)
            self.written.add(blake2b(content).digest())
            again = np.empty_like(content)
            get(units, unit, again)
            if not np.array_equal(again, content):
                self.wrong.append(unit)

        monkeypatch.setattr(DeviceUnits, "get", noted_get)
        monkeypatch.setattr(DeviceUnits, "put", noted_put)


def settle(engine: Harness) -> None:
    engine.until(lambda: not engine.core.waiting_for_threads)


def started(folder: Path, disk: Path | None, **config) -> Harness:
    kept = {} if disk is None else {"kv_disk": "64MiB", "kv_disk_dir": str(disk)}
    return Harness(folder, **({"pack_cache": "off", "kv_cache_tokens": 512, "max_num_seqs": 2} | kept | config))


def conversation(engine: Harness) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """(prompts, answers, how many tokens of each were not computed): two with one beginning, and a second turn of
    fixed words. Between them prompts that take memory away, beside the steps of which blocks are written."""
    asked, found, cached = [*ASKED, [*ASKED[1], *prompts(5, [40])[0]]], [], []
    for seed, prompt in enumerate(asked):
        rid = engine.submit(prompt, max_tokens=20)
        result = engine.run()[rid]
        assert isinstance(result.end, Finished), result.end
        found.append(result.tokens)
        cached.append(result.end.cached_tokens)
        settle(engine)  # what is not written yet when its memory is wanted is lost to the disk
        engine.generate(prompts(20 + seed, [300, 120]), max_tokens=24)
        settle(engine)
    return asked, found, cached


KINDS = {
    "bfloat16": GPU,
    "fp8": GPU | {"kv_cache_dtype": "fp8"},
    "no-overlap": GPU | {"overlap": False},
    "in-torch": IN_TORCH,
}


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3_moe", *STATEFUL])
def test_what_was_evicted_or_of_another_process_is_read(models, tmp_path, monkeypatch, family, kind) -> None:
    monkeypatch.setattr(DiskBlocks, "observe", lambda self, plan, seconds: None)  # however fast computing is, they wait
    model, folder = models[family]
    plain = started(folder, None, **KINDS[kind])
    asked, expected, _ = conversation(plain)
    plain.close()
    for process in range(2):
        copies = Copies(monkeypatch)
        engine = started(folder, tmp_path, **KINDS[kind])
        _, found, cached = conversation(engine)
        stats = engine.core.stats()
        engine.core.scheduler.check_integrity()
        engine.close()
        monkeypatch.undo()
        monkeypatch.setattr(DiskBlocks, "observe", lambda self, plan, seconds: None)
        assert stats["disk_damaged_blocks"] == 0 and not copies.wrong
        if process == 0:
            saved = copies.read
        else:
            assert copies.written and copies.written <= saved | copies.read, "what comes back is not what was written"
            assert stats["disk_hit_tokens"] > 0 and min(cached) >= 128, (cached, stats)
            assert bool(stats["disk_read_snapshots"]) == (family in STATEFUL)
        for prompt, one, other in zip(asked, expected, found, strict=True):
            assert one == other or agree(model, prompt, one, other), (process, kind)


@on_gpu
def test_streams_of_copies_do_not_wait_for_one_another(kernel_device) -> None:
    """Units go to host memory and back, from several threads, while others are being computed."""
    planes = [torch.zeros(64, size, dtype=torch.uint8, device=kernel_device) for size in (4096, 1 << 20)]
    units = DeviceUnits(planes, 3)
    busy = torch.randn(2048, 2048, device=kernel_device)
    for unit in range(64):
        busy = (busy @ busy).clamp(-1, 1)
        with units.buffer() as content, units.buffer() as other:
            content[:] = unit + 1
            units.put(unit, content)
            units.get(unit, other)
            assert np.array_equal(content, other)
    torch.cuda.synchronize()
    assert all(bool((plane == torch.arange(1, 65, device=kernel_device)[:, None]).all()) for plane in planes)


def test_planes_of_the_kernels_states_are_the_slots(kernel_device) -> None:
    """But that of padding rows; in the order of layers, S before the inputs of the convolution."""
    pytest.importorskip("triton")
    spec = DeltaNet(2, 4, 16, 32, 4, fused=True, fused_gates=True)
    backend = GpuDeltaNet(spec, [0, 2], StateSlots(5, 2, 3), kernel_device, 4)
    held: Sequence[torch.Tensor] = [part for each in backend.slots.values() for part in (each.states, each.past)]
    for part in held:
        part.copy_(torch.randn(part.shape))
    before = [part.clone() for part in held]
    assert (
        isinstance(backend, DeltaBackend)
        and spec.cache.state_bytes * 2 == DeviceUnits(backend.device_planes(), 1).num_bytes
    )
    units = DeviceUnits(backend.device_planes(), 1)
    with units.buffer() as content:
        units.get(1, content)
        assert content.tobytes() == b"".join(part[1].cpu().numpy().tobytes() for part in before)
        units.put(4, content)
    for part, old in zip(held, before, strict=True):
        assert torch.equal(part[4], old[1]) and torch.equal(part[5], old[5]) and torch.equal(part[:4], old[:4])
