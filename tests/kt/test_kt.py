"""kt_kernel's classes against plain float32, replayed, and behind guards."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from engine.errors import ModelFileError, UserError
from engine.experts.kt import guard
from engine.experts.kt.process import Cpus, kt_available, pool_threads, usable_cpus
from testing.models.tiny import PLAIN_EXPERTS
from tests.kt.conftest import CPU_HAS_AVX512, Worker
from tests.kt.stores import config, make_store

BF16, Q8_0 = ["BF16"] * 3, ["Q8_0"] * 3
# method, weights, (hidden, intermediate, experts, top-k), bound of mean |difference| / mean |reference|
FULL = [
    ("AMXBF16", BF16, [96, 160, 16, 3], 0.006),
    ("AMXInt8", BF16, [192, 64, 16, 3], 0.035),
    ("AMXInt4", BF16, [128, 256, 16, 3], 0.32),
    ("GGUF", Q8_0, [256, 512, 16, 3], 0.016),
]


def check_accuracy(answer: Any, method: str, bound: float) -> None:
    assert set(answer["methods"]) == {method}
    assert answer["untouched"], "rows past bsz were written"
    assert len(answer["errors"]) == 36
    assert max(answer["errors"].values()) < bound
    assert min(answer["errors"].values()) > 0, "kt_kernel cannot be exact: what was compared?"


@pytest.mark.parametrize(("method", "kinds", "shape", "bound"), FULL)
def test_error_against_float32(worker: Worker, method: str, kinds: list[str], shape: list[int], bound: float) -> None:
    check_accuracy(worker("full", method=method, kinds=kinds, shape=shape)["accuracy"], method, bound)


@pytest.mark.parametrize(
    ("method", "kinds", "shape", "bound"),
    [
        ("AMXBF16", BF16, [64, 32, 128, 8], 0.006),
        ("AMXBF16", ["Q4_1", "F16", "Q5_1"], [64, 32, 8, 1], 0.012),
        ("GGUF", ["Q4_K", "Q5_0", "Q6_K"], [512, 256, 8, 2], 0.03),
    ],
)
def test_other_shapes_and_mixed_types(
    worker: Worker, method: str, kinds: list[str], shape: list[int], bound: float
) -> None:
    check_accuracy(worker("accuracy", method=method, kinds=kinds, shape=shape), method, bound)


OTHER_TYPES = ["Q4_1", "Q5_1", "BF16"]


@pytest.mark.parametrize("kind", guard.BLOCK_TYPES)
def test_every_block_type(worker: Worker, kind: str) -> None:
    errors = worker("block_types", kinds=guard.BLOCK_TYPES, others=OTHER_TYPES)["errors"][kind]
    assert max(errors) < (0.003 if kind.startswith("F") else 0.025)


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_block_types_that_abort_the_process_are_refused(worker: Worker, kind: str) -> None:
    name, text = worker("block_types", kinds=guard.BLOCK_TYPES, others=OTHER_TYPES)["said"][kind]
    assert name == "ModelFileError" and f"up is {kind}; kt_method GGUF takes F32, F16, Q4_0" in text


@pytest.mark.parametrize(
    ("method", "kinds", "shape", "bound"),
    [("AMXBF16", BF16, [64, 64, 8, 2], 0.006), ("GGUF", Q8_0, [256, 256, 8, 2], 0.016)],
)
def test_float32_buffers_and_experts_held_apart(
    worker: Worker, method: str, kinds: list[str], shape: list[int], bound: float
) -> None:
    answer = worker("accuracy", method=method, kinds=kinds, shape=shape, dtype="float32", split=True)
    assert answer["untouched"] and max(answer["errors"].values()) < bound


def test_a_cpu_without_avx512(worker: Worker) -> None:
    answer = worker("accuracy", variant="avx2", method="AMXBF16", kinds=BF16, shape=[48, 80, 8, 2])
    assert answer["untouched"] and max(answer["errors"].values()) < 0.006


@pytest.mark.parametrize(("method", "kinds", "shape", "bound"), FULL)
def test_a_thousand_replays(worker: Worker, method: str, kinds: list[str], shape: list[int], bound: float) -> None:
    answer = worker("full", method=method, kinds=kinds, shape=shape)["replay"]
    assert answer["same"] and answer["different"]
    assert answer["grown_threads"] == 0
    assert answer["grown_bytes"] < 1 << 20
    assert answer["bsz_0_untouched"], "bsz 0 must compute nothing"
    assert answer["rebound"], "binding again must not make a second task: kt_kernel never frees one"


@pytest.mark.parametrize("family", PLAIN_EXPERTS)
def test_in_an_engine_its_bf16_error_is_that_of_bf16(worker: Worker, family: str) -> None:
    """Prefill, decode, preemption and recomputation: at most 1.25 times the error of transformers itself in bf16."""
    runs = [worker("engine", mix="preempted", seed=seed, family=family) for seed in (0, 1)]
    assert all(run["positions"] > 50 for run in runs)
    assert sum(run["error"] for run in runs) <= 1.25 * sum(run["transformers"] for run in runs)


@pytest.mark.parametrize(("method", "kinds", "shape", "bound"), FULL)
def test_calls_that_would_crash_or_lie_are_refused(
    worker: Worker, method: str, kinds: list[str], shape: list[int], bound: float
) -> None:
    answer = worker("full", method=method, kinds=kinds, shape=shape)["guards"]
    said = dict(answer["said"])
    reasons = {
        "too many rows": "bsz is 41, the buffers hold 0 to 40",
        "negative rows": "bsz is -1",
        "nan": "rows 3: hidden states are NaN",
        "inf": "rows 7: hidden states",
        "id too large": "rows 2: expert ids must be -1 to 15",
        "id too small": "rows 2: expert ids must be -1 to 15",
        "twice": "rows 5: an expert is chosen twice, [3, 3, 3]",
        "nan weight": "rows 4: kt_kernel's results are NaN",
        "top-k": f"it must be int64 [40, {shape[3]}]",
        "ids type": "buffer ids is torch.int32",
        "hidden size": f"buffer hidden is torch.bfloat16 [40, {shape[0] + 32}]",
        "out rows": "buffer out is torch.bfloat16 [39",
        "bsz type": "buffer bsz is torch.int64",
        "strided": "must be contiguous",
        "buffers too large": "buffers of 65 rows; this kt backend was made for 1 to 64",
        "no layer": "layer 2 has no experts loaded",
        "twice loaded": "layer 0 is loaded already",
        "stream": "driven from the CPU only",
    }
    for name, reason in reasons.items():
        kind, text, *rest = said.pop(name)
        assert kind == "ExpertBackendError" and reason in text, name
        assert rest == [] or name == "nan weight", name
    assert said.pop("nan past bsz")[0] == "nothing", "rows that do not count may hold anything"
    assert said.pop("adapter")[0] == "AdapterError"
    large = said.pop("too large")
    assert large[0] == ("ExpertBackendError" if method == "GGUF" else "nothing")
    assert said == {}
    assert len(set(answer["errors"])) == 1, "a refused call changed later ones"
    assert answer["errors"][0] < bound


def test_weights_that_would_poison_are_refused(worker: Worker) -> None:
    answer = worker("load_guards")
    for name, where in {
        "bf16 nan": "layer 0 expert 5 up (blk.0.ffn_up_exps.weight[5]): 1 values",
        "f32 inf": "layer 0 expert 0 down",
        "q8_0 nan scale": "layer 0 expert 7 gate",
        "q6_k inf scale": "layer 0 expert 3 down",
        "shape": "BF16 [512, 256], not BF16 [256, 256]",
        "experts": "layer 0 gate: 7 experts, not 8",
        "types differ": "layer 0 expert 4 up",
    }.items():
        kind, text = answer["said"][name]
        assert kind == "ModelFileError" and where in text, name


def test_auto_takes_blocks_where_kt_kernel_does(worker: Worker) -> None:
    chosen = worker("load_guards")["chosen"]
    assert {name: method for name, (method, _) in chosen.items()} == {
        "BF16/BF16/BF16": "AMXBF16",
        "F32/F32/F32": "AMXBF16",
        "Q8_0/Q8_0/Q8_0": "GGUF",
        "Q4_K/Q4_K/Q6_K": "GGUF",
        "Q4_1/Q4_1/Q4_1": "AMXBF16",
        "Q8_0/BF16/Q8_0": "AMXBF16",
    }
    assert all(error < 0.03 for _, error in chosen.values())


def test_one_backend_a_process_and_none_after_a_fork(worker: Worker) -> None:
    answer = worker("one_per_process")
    said = answer["said"]
    assert said["second"][0] == said["after close"][0] == "ExpertBackendError"
    assert "this process has a kt backend already" in said["second"][1]
    for name in ("fork", "fork bind", "fork load", "fork second"):
        assert said[name][0] == "ExpertBackendError" and "does not survive fork" in said[name][1]
    assert answer["error"] < 0.006, "the refused ones disturbed the first"
    assert said["method"] == [
        "UserError",
        "kt_method 'AMXBF17' is unknown; allowed: auto, AMXBF16, AMXInt8, AMXInt4, GGUF",
    ]
    fits = "multiples of 128; this model has 64 and 64 (methods that fit: AMXBF16, AMXInt8)"
    assert (fits if CPU_HAS_AVX512 else "AMXInt4: not on this CPU, which has") in said["size"][1]
    assert said["threads"][0] == "UserError" and "cpu_threads 10000" in said["threads"][1]
    assert said["rows"][0] == "ExpertBackendError"


ALL = ("AMXBF16_MOE", "AMXInt8_MOE", "AMXInt4_MOE", "AVX2BF16_MOE", "MOE")


@pytest.mark.parametrize(
    ("method", "hidden", "inter"),
    [
        ("AMXBF16", 48, 64), ("AMXBF16", 64, 48), ("AMXInt8", 96, 64), ("AMXInt8", 64, 32), ("AMXInt4", 64, 128),
        ("AMXInt4", 128, 192), ("GGUF", 128, 256), ("GGUF", 256, 128), ("auto", 64, 16),
    ],
)  # fmt: skip
def test_sizes_that_would_crash_are_refused(method: str, hidden: int, inter: int) -> None:
    here = guard.methods_here(ALL)
    with pytest.raises(UserError, match=rf"multiples of \d+; this model has {hidden} and {inter}"):
        guard.check_method(method, config(hidden, inter), here)


def test_methods_of_a_cpu_without_avx512() -> None:
    here = guard.methods_here(("AVX2BF16_MOE", "MOE"))
    assert set(here) == {"AMXBF16", "GGUF"} and here["AMXBF16"].multiple == 16
    with pytest.raises(UserError, match="AMXInt8: not on this CPU, which has"):
        guard.check_method("AMXInt8", config(64, 64), here)


def test_gguf_asked_for_where_sizes_fit_but_not_types() -> None:
    here = guard.methods_here(ALL)
    c = config(256, 256)
    with pytest.raises(ModelFileError, match="gate is Q4_1"):
        guard.choose_method("GGUF", make_store(c, ("Q4_1", "Q8_0", "Q8_0")), c, here)
    assert guard.choose_method("auto", make_store(config(128, 256), Q8_0), config(128, 256), here).name == "AMXBF16"  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "default", "most"), [(1, 1, 1), (2, 1, 1), (3, 1, 2), (4, 2, 3), (16, 14, 15)])
def test_threads_leave_room_for_the_queue_thread(count: int, default: int, most: int) -> None:
    cpus = Cpus(count, 0)
    assert pool_threads(None, cpus) == default
    assert pool_threads(most, cpus) == most
    for wrong in (0, most + 1):
        with pytest.raises(UserError, match=f"kt takes 1 to {most}"):
            pool_threads(wrong, cpus)


def test_cpus_of_one_numa_node_within_affinity_and_quota() -> None:
    nodes = {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
    assert usable_cpus(set(range(8)), nodes, float("inf")) == Cpus(4, 0)
    assert usable_cpus({3, 4, 5, 6}, nodes, float("inf")) == Cpus(3, 1)
    assert usable_cpus({3, 4, 5, 6}, nodes, 2.5) == Cpus(2, 1)
    assert usable_cpus({0}, nodes, 0.5) == Cpus(1, 0)
    assert usable_cpus({0, 1}, {}, float("inf")) == Cpus(2, 0)
    assert usable_cpus({9}, nodes, float("inf")) == Cpus(1, 0)


def test_kt_loads_where_it_can_be_installed(worker: Worker) -> None:
    assert kt_available() == (True, "")


def test_loading_kt_kernel_leaves_floats_alone(worker: Worker) -> None:
    code = (
        "import sys, threading; from engine.experts.kt.backend import kt_available; kt_available(); found = []\n"
        "look = lambda: found.append(sys.float_info.min / 2 > 0)\n"
        "look(); t = threading.Thread(target=look); t.start(); t.join(); print('kt_kernel' in sys.modules, found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True [True, True]"


def test_importing_the_backend_does_not_import_kt_kernel() -> None:
    code = "import engine.experts.kt.backend, sys; print('kt_kernel' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
