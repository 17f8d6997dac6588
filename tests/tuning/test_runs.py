"""Tinker's runs without an engine: the order of orders, runs that go to disk, and bodies that are no messages."""

from __future__ import annotations

import asyncio
import struct
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.client.calls import CallRefused
from api.dialects.tinker.run import _EARLY as EARLY
from api.dialects.tinker.runs import _RUNS_EVER as RUNS_EVER
from api.dialects.tinker.runs import _TOKENS as TOKENS
from api.dialects.tinker.runs import Runs, publish_order
from api.dialects.tinker.saved import Note
from api.dialects.tinker.wire import (
    Sampled,
    field,
    forward_backward_output,
    model_of,
    read_forward_backward,
    sample_response,
)
from api.errors import ApiError
from api.tenants.record import Tenant
from api.tuning.service import Tuning as JobTuning
from engine.tuning import GONE, Batch, CloseRun, OpenRun, OptimStep, Order, PublishRun, Sample, SaveRun, Tuned

TENANT = Tenant("team")
BATCH = Batch([Sample([1], [2], {"weights": [1.0]})])


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.restarts = 0
        self.told: list[tuple[str, Order]] = []
        self.refused: dict[tuple[str, type[Order]], CallRefused] = {}
        self.serves = asyncio.Event()
        self.serves.set()
        self.adapters: dict[str, str] = {}

    async def tune(self, run: str, order: Order) -> Tuned:
        self.told.append((run.rpartition(":")[2], order))
        number = float(len(self.told))
        await asyncio.sleep(0)
        await self.serves.wait()
        if (error := self.refused.get((run.rpartition(":")[2], type(order)))) is not None:
            raise error
        if isinstance(order, PublishRun):
            self.adapters[order.name] = run
        return Tuned({"number": number})

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> None:
        raise CallRefused("no room", 400, "adapter")


class Folder:
    """What Runs ask of the server's files."""

    def __init__(self, folder: Path) -> None:
        self.batches, self.folder, self.owners = self, folder, dict[str, str]()

    async def in_thread(self, function: Any, *args: Any) -> Any:
        return function(*args)


async def opened(runs: Runs, number: int) -> Any:
    record = runs.new(TENANT, "s-0123456789abcdef", number, "demo", 4, ("mlp",))
    await runs.open(TENANT, record, 0, None)
    return runs.run(TENANT, record.id)


async def done(tuned: Tuned) -> dict[str, Any]:
    return {"number": tuned.metrics["number"]}


def test_orders_are_worked_by_their_numbers(tmp_path: Path):
    async def check() -> None:
        engine = Engine()
        runs = Runs(engine, Folder(tmp_path))  # type: ignore[arg-type]
        run = await opened(runs, 0)
        steps = [OptimStep(float(n)) for n in range(1, 6)]
        keys = {n: runs.order(TENANT, run, n, steps[n - 1], done) for n in (3, 2, 5, 1, 4)}
        assert runs.order(TENANT, run, 3, steps[2], done) == keys[3], "the same request again"
        answers = [await runs.futures.fetch(TENANT, keys[n]) for n in range(1, 6)]
        assert answers == [{"number": n + 1.0} for n in range(1, 6)]
        assert [order for _, order in engine.told[1:]] == steps
        with pytest.raises(ApiError, match="seq_id"):
            runs.order(TENANT, run, 10**6, steps[0], done)
        with pytest.raises(ApiError):
            await runs.futures.fetch(Tenant("other"), keys[1])

    asyncio.run(check())


def test_idle_runs_go_to_disk_and_come_back(tmp_path: Path):
    """But for one with gradients that no step has used."""

    async def check() -> None:
        engine = Engine()
        runs = Runs(engine, Folder(tmp_path), idle_s=-1.0)  # type: ignore[arg-type]
        idle, learning = await opened(runs, 0), await opened(runs, 1)
        assert [type(order) for run, order in engine.told if run == "0"] == [OpenRun, SaveRun, CloseRun]
        await runs.futures.fetch(TENANT, runs.order(TENANT, learning, 1, BATCH, done))
        await opened(runs, 2)
        assert not learning.on_disk and idle.on_disk
        keys = [runs.order(TENANT, idle, n, order, done) for n, order in ((1, BATCH), (2, OptimStep(1.0)))]
        answers = [await runs.futures.fetch(TENANT, key) for key in keys]
        assert all("number" in (answer or {}) for answer in answers)
        told = [order for run, order in engine.told if run == "0"][3:]
        assert [type(order) for order in told] == [OpenRun, Batch, OptimStep]
        assert told[0].state == engine.told[1][1].state

    asyncio.run(check())


def test_a_run_that_cannot_go_to_disk_is_not_another_ones_error(tmp_path: Path):
    """One that the engine has ended is forgotten; one whose disk is full stays."""

    async def check() -> None:
        engine = Engine()
        runs = Runs(engine, Folder(tmp_path), idle_s=-1.0)  # type: ignore[arg-type]
        gone, full = await opened(runs, 0), await opened(runs, 1)
        gone.on_disk = False
        engine.refused = {
            ("0", SaveRun): CallRefused("there is no tuning run '0'", GONE, "run"),
            ("1", SaveRun): CallRefused("no space", 400, "state"),
        }
        await opened(runs, 2)
        assert runs.run(TENANT, full.record.id) is full and not full.on_disk
        with pytest.raises(ApiError, match="no run"):
            runs.run(TENANT, gone.record.id)

    asyncio.run(check())


@pytest.mark.parametrize("how", ["finish", "diverged", "restart"])
def test_the_end_of_a_run_answers_its_requests_and_takes_its_snapshots(tmp_path: Path, how: str):
    """A request whose predecessors never came too, and with the session all runs end whatever the engine says."""

    async def check() -> None:
        engine, folder = Engine(), Folder(tmp_path)
        runs = Runs(engine, folder)  # type: ignore[arg-type]
        session = runs.open_session(TENANT)
        made = []
        for number in range(2):
            record = runs.new(TENANT, session, number, "demo", 4, ("mlp",))
            await runs.open(TENANT, record, 0, None)
            made.append(runs.run(TENANT, record.id))
        run = made[0]
        publish = publish_order(run)

        async def published(tuned: Tuned) -> dict[str, Any]:
            await runs.snapshot(run, publish.name)
            return {}

        await runs.futures.fetch(TENANT, runs.order(TENANT, run, 1, publish, published))
        assert folder.owners == {publish.name: TENANT.name}
        waits = runs.order(TENANT, run, 3, BATCH, done)
        engine.refused = {("0", kind): CallRefused("there is no run", GONE, "run") for kind in (Batch, CloseRun)}
        if how == "finish":
            await runs.finish(TENANT, session)
            assert [number for number, order in engine.told if isinstance(order, CloseRun)] == ["0", "1"]
        elif how == "diverged":
            await runs.futures.fetch(TENANT, runs.order(TENANT, run, 2, BATCH, done))
        else:
            engine.restarts += 1
            with pytest.raises(ApiError, match="no run"):
                runs.run(TENANT, run.record.id)
        answer = await runs.futures.fetch(TENANT, waits)
        assert isinstance(answer, dict) and answer["category"] == "user", answer
        assert folder.owners == {}
        with pytest.raises(ApiError, match="no run"):
            runs.order(TENANT, run, 4, BATCH, done)

    asyncio.run(check())


def test_requests_of_a_run_are_bounded_and_the_next_one_is_always_taken(tmp_path: Path):
    async def check() -> None:
        engine = Engine()
        runs = Runs(engine, Folder(tmp_path))  # type: ignore[arg-type]
        run = await opened(runs, 0)
        for seq_id in range(2, 2 + EARLY):
            runs.order(TENANT, run, seq_id, BATCH, done)
        with pytest.raises(ApiError, match="next one"):
            runs.order(TENANT, run, 2 + EARLY, BATCH, done)
        engine.serves.clear()
        last = runs.order(TENANT, run, 1, BATCH, done)
        with pytest.raises(ApiError) as error:
            runs.order(TENANT, run, 2 + EARLY, BATCH, done)
        assert error.value.status == 429 and error.value.retry_after_s
        engine.serves.set()
        assert "number" in (await runs.futures.fetch(TENANT, last) or {})

    asyncio.run(check())


def test_tokens_that_wait_are_bounded_and_the_next_one_is_always_taken(tmp_path: Path):
    """Over all runs of a tenant."""

    async def check() -> None:
        engine, large = Engine(), Batch([Sample([1] * (TOKENS // 4), [2] * (TOKENS // 4))])
        runs = Runs(engine, Folder(tmp_path))  # type: ignore[arg-type]
        run, other = await opened(runs, 0), await opened(runs, 1)
        engine.serves.clear()
        keys = [runs.order(TENANT, run, seq_id, large, done) for seq_id in (2, 3, 4, 5)]
        for each, seq_id in ((run, 6), (other, 2)):
            with pytest.raises(ApiError) as error:
                runs.order(TENANT, each, seq_id, large, done)
            assert error.value.status == 429 and error.value.retry_after_s
        runs.order(TENANT, other, 2, OptimStep(1e-3), done)
        keys += [runs.order(TENANT, other, 1, large, done), runs.order(TENANT, run, 1, large, done)]
        engine.serves.set()
        assert all(["number" in (await runs.futures.fetch(TENANT, key) or {}) for key in keys])
        await runs.futures.fetch(TENANT, runs.order(TENANT, other, 3, large, done))
        assert run.tokens == other.tokens == run.early_tokens == 0

    asyncio.run(check())


def test_a_request_whose_predecessor_never_comes_fails_and_may_be_asked_again(tmp_path: Path):
    async def check() -> None:
        runs = Runs(Engine(), Folder(tmp_path), idle_s=0.05)  # type: ignore[arg-type]
        run = await opened(runs, 0)
        waits = runs.order(TENANT, run, 2, BATCH, done)
        answer = await runs.futures.fetch(TENANT, waits)
        assert isinstance(answer, dict) and "seq_id 1 has not come" in answer["error"] and not run.pending
        again, first = (runs.order(TENANT, run, seq_id, BATCH, done) for seq_id in (2, 1))
        assert again != waits
        assert all(["number" in (await runs.futures.fetch(TENANT, key) or {}) for key in (first, again)])

    asyncio.run(check())


def test_runs_of_silent_sessions_give_others_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def check() -> None:
        runs = Runs(Engine(), Folder(tmp_path))  # type: ignore[arg-type]
        session = runs.open_session(TENANT)
        made = []
        for number in range(RUNS_EVER):
            record = runs.new(TENANT, session, number, "demo", 4, ("mlp",))
            await runs.open(TENANT, record, 0, None)
            made.append(runs.run(TENANT, record.id))
            made[-1].on_disk = True
        with pytest.raises(ApiError) as error:
            await opened(runs, 0)
        assert error.value.code == "run_quota"
        await runs.open(Tenant("other"), runs.new(Tenant("other"), session, 99, "demo", 4, ("mlp",)), 0, None)
        monkeypatch.setattr("api.dialects.tinker.runs._SILENT_S", 0.0)
        made[0].started = 1
        await opened(runs, 0)
        assert made[0].ended is None and made[1].ended is not None and made[2].ended is None

    asyncio.run(check())


def test_what_no_saved_weights_need_goes_with_its_run_or_at_a_start(tmp_path: Path):
    async def check() -> None:
        runs = Runs(Engine(), Folder(tmp_path))  # type: ignore[arg-type]
        kept, bare, crashed = [await opened(runs, number) for number in range(3)]
        place = runs.saved.place(kept.record.id, "weights", "a")
        place.with_name(".a.old").mkdir(parents=True)  # its server was killed between two renames
        place.with_name(".b.part").mkdir()
        for run in (kept, bare, crashed):
            (tmp_path / "tinker" / run.record.id / "idle").mkdir(parents=True)
        await runs.close_run(bare)
        assert {path.name for path in (tmp_path / "tinker").iterdir()} == {kept.record.id, crashed.record.id}
        await runs.saved.sweep()
        assert {path.name for path in (tmp_path / "tinker").iterdir()} == {kept.record.id}
        assert {path.name for path in place.parents[1].rglob("*")} == {"run.json", "weights", "a"}

    asyncio.run(check())


def test_weights_expire(tmp_path: Path):
    """And what was noted goes with them."""

    async def check() -> None:
        runs = Runs(Engine(), Folder(tmp_path))  # type: ignore[arg-type]
        run = await opened(runs, 0)
        places = {name: runs.saved.place(run.record.id, "weights", name) for name in ("kept", "old")}
        for place in places.values():
            place.mkdir(parents=True)
            await runs.saved.note(place, Note(expires_at=time.time() + 3600, user_metadata={"a": "b"}))
        assert [each["user_metadata"] for each in runs.saved.checkpoints(run.record)] == [{"a": "b"}] * 2
        await runs.saved.note(places["old"], Note(expires_at=time.time() - 1))
        path = f"tinker://{run.record.id}/weights/"
        with pytest.raises(ApiError, match="no weights"):
            await runs.saved.find(TENANT, f"{path}old", "weights")
        assert [each["tinker_path"] for each in runs.saved.checkpoints(run.record)] == [f"{path}kept"]
        expiry = asyncio.create_task(runs.expire())
        while places["old"].exists():
            await asyncio.sleep(0)
        expiry.cancel()
        assert {each.name for each in places["kept"].parent.iterdir()} == {"kept", ".kept.note"}
        await runs.delete(TENANT, run.record, "weights", "kept")
        assert not list(places["kept"].parent.iterdir())

    asyncio.run(check())


def test_the_quota_of_runs_counts_those_that_are_being_opened(tmp_path: Path):
    async def check() -> None:
        runs = Runs(Engine(), Folder(tmp_path))  # type: ignore[arg-type]
        ends = await asyncio.gather(*(opened(runs, number) for number in range(20)), return_exceptions=True)
        refused = [end for end in ends if isinstance(end, ApiError)]
        assert len(refused) == 4 and {error.code for error in refused} == {"run_quota"}
        out, back = ends[0], ends[1]
        out.on_disk = back.on_disk = True
        await opened(runs, 30)
        keys = [runs.order(TENANT, run, 1, BATCH, done) for run in (out, back)]
        answers = [await runs.futures.fetch(TENANT, key) for key in keys]
        assert sorted("error" in (answer or {}) for answer in answers) == [False, True]

    asyncio.run(check())


def test_whatever_fails_is_an_answer_and_may_be_asked_again(tmp_path: Path):
    async def check() -> None:
        runs = Runs(Engine(), folder := Folder(tmp_path))  # type: ignore[arg-type]
        record = runs.new(TENANT, "s-0123456789abcdef", 0, "demo", 4, ("mlp",))

        async def fails() -> dict[str, Any]:
            raise OSError("no space")

        async def works() -> dict[str, Any]:
            return {}

        first = runs.creation(TENANT, record, fails())
        answer = await runs.futures.fetch(TENANT, first)
        assert isinstance(answer, dict) and answer["category"] == "server" and "OSError" in answer["error"]
        assert await runs.futures.fetch(TENANT, again := runs.creation(TENANT, record, works())) == {}
        assert runs.creation(TENANT, record, works()) == again != first
        with pytest.raises(CallRefused):
            await runs.serve("tinker://x", tmp_path, "team")
        assert folder.owners == {}

    asyncio.run(check())


def test_saved_weights_count_towards_the_tenants_models(tmp_path: Path):
    """Those that are being saved too, and a name that is overwritten once."""

    async def check() -> None:
        runs, team = Runs(Engine(), Folder(tmp_path)), Tenant("team", fine_tuned_models=2)  # type: ignore[arg-type]
        run = await opened(runs, 0)
        for kind, name in (("weights", "a"), ("sampler_weights", "b")):
            await runs.saved.reserve(team, f"tinker://{run.record.id}/{kind}/{name}")
            runs.saved.place(run.record.id, kind, name).mkdir(parents=True)
        await runs.saved.reserve(team, f"tinker://{run.record.id}/weights/a")
        for _ in range(2):
            with pytest.raises(ApiError) as error:
                await runs.saved.reserve(team, f"tinker://{run.record.id}/weights/c")
            assert error.value.code == "model_quota"
        await runs.saved.reserve(Tenant("team"), f"tinker://{run.record.id}/weights/d")
        with pytest.raises(ApiError, match="demo"):
            runs.saved.check_base(run.record, "another")

    asyncio.run(check())


def test_a_key_may_be_barred_from_tuning():
    JobTuning.check_allowed(Tenant("team", fine_tuning_jobs=1))
    with pytest.raises(ApiError) as error:
        JobTuning.check_allowed(Tenant("team", fine_tuning_jobs=0))
    assert error.value.status == 403


def message(tensors: dict[str, tuple[str, list[float]]], loss: str = "cross_entropy", setting: float = 1.0) -> bytes:
    """A forward_backward with one datum."""
    types = {"f": b"\x18\x01", "q": b"\x18\x02", "i": b"\x18\x03"}
    text = field(1, field(1, field(1, array("i", [1, 2]).tobytes())))
    for name, (kind, values) in tensors.items():
        dense = field(1, array(kind, values).tobytes()) + types[kind]  # type: ignore[call-overload]
        text += field(2, field(1, name.encode()) + field(2, dense))
    settings = field(5, field(1, b"clip_low_threshold") + field(2, struct.pack("<d", setting)))
    return field(1, b"m") + b"\x10\x01" + field(3, text) + field(4, loss.encode()) + settings


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), 1.5])
@pytest.mark.parametrize("where", ["target_tokens", "logprobs", "advantages", "setting"])
def test_numbers_that_cannot_be_trained_on_are_refused(where: str, wrong: float):
    tensors = {name: ("f", [1.0, 2.0]) for name in ("target_tokens", "logprobs", "advantages")}
    assert read_forward_backward(message(tensors, "ppo")).samples[0].targets == [1, 2]
    if where != "setting":
        tensors[where] = "f", [1.0, wrong]
    data = message(tensors, "ppo", wrong if where == "setting" else 1.0)
    if wrong == 1.5 and where != "target_tokens":
        read_forward_backward(data)
        return
    with pytest.raises(ApiError, match=r"numbers? (is|are) expected") as error:
        read_forward_backward(data)
    assert error.value.status == 400


@pytest.mark.parametrize("number", [3, 5, 7])
def test_a_body_of_very_many_fields_is_refused(number: int):
    """Wherever they are."""
    many = b"\x10\x01" * 2**17
    whole = message({"target_tokens": ("q", [1, 2])})
    assert model_of(whole) == "m"
    for data in (whole + field(number, field(2, many)), many + whole):
        with pytest.raises(ApiError):
            read_forward_backward(data)
    with pytest.raises(ApiError, match="fields"):
        model_of(many + whole)


@given(st.binary(max_size=200))
def test_what_is_no_message_is_refused(data: bytes):
    with pytest.raises(ApiError):
        read_forward_backward(data)


def test_messages_are_those_of_the_client():
    pb2 = pytest.importorskip("tinker.proto.tinker_public_pb2")
    from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

    asked = pb2.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn="ppo", forward_only=True)
    asked.loss_fn_config["clip_low_threshold"] = 0.5
    item = asked.data.add()
    for part in ([1, 2], [300]):
        item.model_input.add().encoded_text.tokens = array("i", part).tobytes()
    for name, kind, values in (
        ("target_tokens", "q", [2, 300, 5]), ("logprobs", "f", [0.5, 1, 2]), ("advantages", "f", [1, -1, 0]),
    ):  # fmt: skip
        tensor = item.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = array(kind, values).tobytes(), 2 if kind == "q" else 1
        tensor.shape.append(3)
    whole = asked.SerializeToString()
    read = read_forward_backward(whole)
    numbers = {"logprobs": [0.5, 1.0, 2.0], "advantages": [1.0, -1.0, 0.0]}
    assert (read.model_id, read.seq_id, read.loss, read.forward_only) == ("m", 7, "ppo", True)
    assert read.settings == {"clip_low_threshold": 0.5}
    assert read.samples == [Sample([1, 2, 300], [2, 300, 5], numbers)]
    for end in range(1, len(whole) - 1):
        try:
            read_forward_backward(whole[:end])
        except ApiError:
            continue

    logprobs = [array("f", values).tobytes() for values in ([-1.0, -2.0], [-3.0])]
    output = deserialize_forward_backward_output(forward_backward_output(logprobs, {"loss:sum": 2.5}))
    assert [each["logprobs"].data for each in output.loss_fn_outputs] == [[-1.0, -2.0], [-3.0]]
    assert output.metrics == {"loss:sum": 2.5}
    samples = [Sampled([1, 2], [-1.0, -2.0], True, [float("nan"), -0.5], [[], [(9, -0.5)]], 1), Sampled([3], [-3.0])]
    found = deserialize_sample_response(sample_response(samples, 2))
    assert [sequence.tokens for sequence in found.sequences] == [[1, 2], [3]]
    assert [sequence.stop_reason for sequence in found.sequences] == ["stop", "length"]
    assert found.prompt_cache_hit_tokens == 1
