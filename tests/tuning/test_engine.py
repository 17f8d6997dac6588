"""Training in the engine: the gradients of stock PEFT, the log-probabilities of the sampler, and live requests."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import training.service.room as room_module
from engine.folders import replace_folder, settle
from engine.memory.costs import training_bytes, training_run_bytes
from engine.tuning import GONE, NO_ROOM, Batch, CloseRun, LoadRun, OpenRun, OptimStep, PublishRun, Sample, SaveRun
from tests.tuning.conftest import Tuning, sample
from training.service.losses import loss_of
from training.service.runs import TunedRun, Turns

RUNS = iter(range(10**6))


def opened(tuning: Tuning, **settings) -> str:
    name = f"run-{next(RUNS)}"
    tuning.ask(OpenRun(**{"rank": 4, "alpha": 8.0, **settings}), name)
    return name


def learn(tuning: Tuning, run: str, steps: int = 3, rate: float = 1e-2) -> float:
    loss = 0.0
    for number in range(steps):
        loss = tuning.ask(Batch([sample(number % 2)]), run).metrics["loss"]
        tuning.ask(OptimStep(rate), run)
    return loss


def masters(tuning: Tuning, run: str) -> dict[str, torch.Tensor]:
    adapter = tuning.engine.core.tuner._runs[run].adapter
    return {name: parameter.detach().clone() for name, parameter in adapter.parameters.items()}


def test_a_run_learns_and_sampling_follows_it_without_a_file(tuning: Tuning):
    run = opened(tuning)
    prompt = sample(0).tokens[:6]
    tuning.ask(PublishRun("live"), run)
    before = tuning.engine.generate([prompt], ["live"])
    assert before == tuning.engine.generate([prompt], [None]), "B is zero: the base"
    first = learn(tuning, run, 1)
    assert learn(tuning, run, 30) < first / 2
    tuning.ask(PublishRun("live"), run)
    after = tuning.engine.generate([prompt], ["live"], max_tokens=6)
    assert after != before
    assert after[0] == sample(0).targets[5:11], "what it has learnt"


def test_sampler_and_trainer_have_the_same_logprobs(tuning: Tuning):
    """float32: what sampling says of its own tokens, and what training says of them."""
    run = opened(tuning, rank=8)
    learn(tuning, run, 5)
    tuning.ask(PublishRun("same"), run)
    for name, base in (("same", False), (None, True)):
        prompt = sample(7, 20).tokens
        rid = tuning.engine.submit(prompt, name, max_tokens=10, temperature=1.0, seed=3, logprobs=0)
        tuning.engine.run()
        result = tuning.engine.results[rid]
        text = prompt + result.tokens
        wanted = [entry.chosen.logprob for entry in result.logprobs]
        found = tuning.logprobs([Sample(text[:-1], text[1:], {"weights": [1.0] * (len(text) - 1)})], run, base)
        np.testing.assert_allclose(found[0][len(prompt) - 1 :], wanted, rtol=1e-4, atol=2e-5)


def test_runs_in_one_micro_batch_are_what_they_are_alone(model_folder: Path):
    """Of different ranks, targets and losses; and so is a batch that takes several micro-batches."""
    ways = [
        {"rank": 2, "targets": ("attention",), "seed": 1},
        {"rank": 5, "targets": ("mlp",), "seed": 2},
        {"rank": 3, "seed": 3, "alpha": 3.0},
    ]

    def trained(tokens: int, *, together: bool) -> list[dict[str, torch.Tensor]]:
        tuning = Tuning(model_folder, training_tokens=tokens)
        runs = [opened(tuning, **way) for way in ways]
        for step in range(3):
            orders = [Batch([sample(10 * step + n, 8 + n) for _ in range(3)]) for n in range(len(runs))]
            for group in [(orders, runs)] if together else [([o], [r]) for o, r in zip(orders, runs, strict=True)]:
                calls = [tuning.send(order, run) for order, run in zip(*group, strict=True)]
                assert all(tuning.reply(call).ok for call in calls)
            for run in runs:
                tuning.ask(OptimStep(1e-2, scale=1 / 12, clip=1.0), run)
        found = [masters(tuning, run) for run in runs]
        tuning.engine.close()
        return found

    alone = trained(512, together=False)
    for found in (trained(512, together=True), trained(20, together=True)):
        for one, other in zip(alone, found, strict=True):
            for name in one:
                torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_no_number_ends_its_run_alone(tuning: Tuning):
    bad, good = opened(tuning), opened(tuning)
    order = Batch([sample(1)])
    numbers = {"weights": [float("nan")] * 12}
    calls = [
        tuning.send(Batch([replace(sample(1), numbers=numbers)]), bad),
        tuning.send(order, good),
        tuning.send(OptimStep(1e-3), bad),
    ]
    replies = [tuning.reply(call) for call in calls]
    assert [reply.ok for reply in replies] == [False, True, False]
    assert "finite" in (replies[0].error or "")
    assert tuning.reply(tuning.send(order, bad)).error == f"there is no tuning run {bad!r}"
    tuning.ask(OptimStep(1e-3), good)
    assert all(bool(values.isfinite().all()) for values in masters(tuning, good).values())


def test_states_go_to_disk_and_come_back(tuning: Tuning, tmp_path: Path):
    run = opened(tuning)
    learn(tuning, run)
    tuning.ask(SaveRun(str(tmp_path / "state"), str(tmp_path / "adapter")), run)
    learn(tuning, run, 2)
    again = opened(tuning, state=str(tmp_path / "state"))
    learn(tuning, again, 2)
    for name, values in masters(tuning, run).items():
        assert torch.equal(values, masters(tuning, again)[name]), name
    tuning.engine.adapter("from-file", tmp_path / "adapter")
    tuning.ask(LoadRun(str(tmp_path / "state"), optimizer=False), again)
    tuning.ask(PublishRun("in-memory"), again)
    prompt = sample(0).tokens[:6]
    one, other = tuning.engine.generate([prompt, prompt], ["from-file", "in-memory"])
    assert one == other
    wrong = tuning.reply(tuning.send(OpenRun(rank=3, alpha=8.0, state=str(tmp_path / "state")), "wrong"))
    assert not wrong.ok and "another rank" in (wrong.error or "")


def test_requests_keep_their_version(tuning: Tuning):
    run = opened(tuning)
    tuning.ask(PublishRun("kept"), run)
    prompt = sample(0).tokens[:6]
    wanted = tuning.engine.generate([prompt], ["kept"], max_tokens=40)[0]
    rid = tuning.engine.submit(prompt, "kept", max_tokens=40)
    tuning.engine.until(lambda: tuning.engine.results[rid].tokens)
    calls = [tuning.send(order, run) for _ in range(5) for order in (Batch([sample(0)]), OptimStep(5e-2))]
    calls.append(tuning.send(PublishRun("kept"), run))
    tuning.engine.run()
    assert tuning.engine.results[rid].tokens == wanted
    assert all(tuning.reply(call).ok for call in calls)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_live_requests_come_first(model_folder: Path, share: float):
    """Without a share nothing is trained while a live request runs; with one both get on."""
    tuning = Tuning(model_folder, training_share=share)
    run = opened(tuning)
    rid = tuning.engine.submit(sample(0).tokens, max_tokens=60)
    call = tuning.send(Batch([sample(n) for n in range(64)]), run)
    tuning.engine.until(lambda: tuning.engine.results[rid].end)
    assert (tuning.engine.core.tuner.stats()["tuning_s"] > 0) is (share > 0)
    assert tuning.reply(call).ok
    tuning.engine.close()


def test_preferences_are_learnt(tuning: Tuning):
    """The chosen text becomes more likely than the rejected one, against the base."""
    run = opened(tuning)
    texts = [sample(3), sample(4)]
    reference = [[float(x) for x in values] for values in tuning.logprobs(texts, run, base=True)]
    pair = [
        replace(text, numbers={**text.numbers, "reference": values})
        for text, values in zip(texts, reference, strict=True)
    ]
    losses = []
    for _ in range(15):
        losses.append(tuning.ask(Batch(pair, "dpo", {"beta": 0.5}), run).metrics["loss"])
        tuning.ask(OptimStep(1e-2), run)
    assert losses[0] == pytest.approx(np.log(2), abs=1e-4)
    assert losses[-1] < 0.1


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_policy_gradients_follow_advantages(tuning: Tuning, loss: str):
    run = opened(tuning)
    text = sample(5)
    was = tuning.logprobs([text], run)[0]
    numbers = {"logprobs": [float(x) for x in was], "advantages": [1.0] * 6 + [-1.0] * 6}
    for _ in range(3):
        tuning.ask(Batch([Sample(text.tokens, text.targets, numbers)], loss), run)
        tuning.ask(OptimStep(3e-3), run)
    changed = tuning.logprobs([text], run)[0] - was
    assert changed[:6].sum() > 0 > changed[6:].sum()


def test_policy_losses_are_their_formulas():
    """And ppo's gradient is zero where a ratio is past its clip on the side of its advantage, cispo's is not."""
    lp = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    numbers = {"logprobs": torch.tensor([-1.0, -2.0, -2.0]), "advantages": torch.tensor([2.0, 1.0, -1.0])}
    e = float(np.e)
    for loss, value, slope in (
        ("importance_sampling", -2 - e + e, [-2, -e, e]),
        ("ppo", -2 - 1.2 + e, [-2, 0, e]),
        ("cispo", 2 + 1.2 - 1.2, [-2, -1.2, 1.2]),
        ("dro", 2 + 1 - 1 + 0.05, [-2, -1 + 0.05, 1 + 0.05]),
    ):
        found = loss_of(loss, {}, [lp], [numbers])
        assert float(found.detach()) == pytest.approx(value, rel=1e-5, abs=1e-5), loss
        np.testing.assert_allclose(torch.autograd.grad(found, lp)[0].numpy(), slope, rtol=1e-5, err_msg=loss)


def test_wrong_orders_are_answered(tuning: Tuning):
    run = opened(tuning)
    good = sample(0)
    wrong: list[tuple[object, str]] = [
        (Batch([good], "sft"), "loss"),
        (Batch([]), "samples"),
        (Batch([good], settings={"beta": 1.0}), "setting"),
        (Batch([good], "dpo"), "2 by 1"),
        (Batch([replace(good, targets=[1])]), "as many"),
        (Batch([replace(good, numbers={})]), "weights"),
        (Batch([replace(good, tokens=[10**9] * 12)]), "token ids"),
        (Batch([sample(0, 5000)]), "--training-tokens"),
        (OptimStep(1e-3), "no gradients"),
        (LoadRun("/nowhere"), "no state"),
        (OpenRun(rank=1000, alpha=1.0), "rank"),
        (OpenRun(rank=1, alpha=1.0, targets=("head",)), "targets"),
    ]
    for order, said in wrong:
        name = f"new-{next(RUNS)}" if isinstance(order, OpenRun) else run
        reply = tuning.reply(tuning.send(order, name))
        assert not reply.ok and said in (reply.error or ""), (order, reply.error)
        assert reply.status == 400, reply.error
    learn(tuning, run, 1)
    tuning.ask(CloseRun(), run)
    assert not tuning.reply(tuning.send(Batch([good]), run)).ok


def test_a_run_opens_beside_serving(tuning: Tuning, monkeypatch: pytest.MonkeyPatch):
    """Its adapter is made on a thread: requests are answered meanwhile, its first orders wait, and others' too."""
    tuner, go = tuning.engine.core.tuner, threading.Event()
    made = tuner._made
    monkeypatch.setattr(tuner, "_made", lambda order: go.wait(60) and made(order))
    opening = tuning.send(OpenRun(rank=2, alpha=4.0), "slow")
    first = tuning.send(Batch([sample(1)]), "slow")
    closing = tuning.send(OpenRun(rank=2, alpha=4.0), "closed")
    tuning.ask(CloseRun(), "closed")
    tuning.engine.generate([sample(0).tokens[:6]], [None])
    assert not any(tuning.answered(call) for call in (opening, first, closing))
    go.set()
    assert tuning.reply(opening).ok and tuning.reply(first).ok
    assert "closed" in (tuning.reply(closing).error or "")
    refused = tuning.send(OpenRun(rank=2, alpha=4.0, state="/nowhere"), "refused")
    waits = tuning.send(Batch([sample(1)]), "refused")
    assert "no state" in (tuning.reply(refused).error or "")
    assert tuning.reply(waits).status == GONE


@pytest.mark.parametrize("targets", [("attention",), ("mlp",), ("attention", "mlp")])
def test_a_run_takes_what_is_planned_for_it(tuning: Tuning, monkeypatch: pytest.MonkeyPatch, targets: tuple[str, ...]):
    """And the next one is refused where the gradients of the first, or a micro-batch, would not fit any more."""
    run, tuner = opened(tuning, targets=targets), tuning.engine.core.tuner
    values = masters(tuning, run).values()
    wanted = training_run_bytes(tuner._config, 4, targets)
    assert wanted == 4 * sum(each.nbytes for each in values)
    held = sum(each.unallocated("cpu") for each in tuner._runs.values())
    assert held >= wanted // 4
    held += training_bytes(tuner._config, tuner._micro_batch, tuner._room.kept)

    class Memory:
        free_bytes = room_module.LEFT_FREE + wanted + held - 1

    monkeypatch.setattr(room_module, "cpu_memory", Memory)
    reply = tuning.reply(tuning.send(OpenRun(rank=4, alpha=8.0, targets=targets), "more"))
    assert not reply.ok and reply.status == NO_ROOM
    Memory.free_bytes += 1
    tuning.ask(OpenRun(rank=4, alpha=8.0, targets=targets), "more")
    tuning.ask(CloseRun(), "more")
    tuning.ask(CloseRun(), run)


def test_a_publication_without_room_lets_others_go_on(tuning: Tuning, monkeypatch: pytest.MonkeyPatch):
    """It is copied once, and comes when there is room."""
    adapters = tuning.engine.core.adapters
    adopt, tried, room = adapters.adopt, [], []
    monkeypatch.setattr(adapters, "adopt", lambda name, copy: tried.append(copy) or (bool(room) and adopt(name, copy)))
    full, other = opened(tuning), opened(tuning)
    waits = tuning.send(PublishRun("later"), full)
    learn(tuning, other, 2)
    assert tuning.answered(waits) is None
    room.append(True)
    assert tuning.reply(waits).ok and len(set(map(id, tried))) == 1 < len(tried)


def test_a_loaded_run_has_nothing_to_step_by(tuning: Tuning, tmp_path: Path):
    run = opened(tuning)
    tuning.ask(SaveRun(str(tmp_path / "state")), run)
    tuning.ask(Batch([sample(1)]), run)
    tuning.ask(LoadRun(str(tmp_path / "state")), run)
    assert "no gradients" in (tuning.reply(tuning.send(OptimStep(1e-3), run)).error or "")


def test_an_order_that_fails_within_ends_its_run_alone(tuning: Tuning, monkeypatch: pytest.MonkeyPatch):
    bad, good = opened(tuning), opened(tuning)
    for run in (bad, good):
        tuning.ask(Batch([sample(1)]), run)

    def fails(order: OptimStep) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(tuning.engine.core.tuner._runs[bad].adapter, "step", fails)
    assert "MemoryError" in (tuning.reply(tuning.send(OptimStep(1e-3), bad)).error or "")
    assert tuning.reply(tuning.send(OptimStep(1e-3), bad)).status == GONE
    tuning.ask(OptimStep(1e-3), good)


def test_who_comes_new_does_not_starve_the_others():
    turns = Turns()
    old, new = TunedRun("a", "old", 1.0, 0), TunedRun("b", "new", 1.0, 0)
    turns.come("old", [])
    turns.charge(old, 10**6)
    turns.come("new", ["old"])
    turns.charge(new, 1)
    assert turns.order([new, old]) == [old, new]


@pytest.mark.parametrize("left", ["nothing", "old", "part", "both"])
def test_a_replaced_folder_survives_an_end_at_any_point(tmp_path: Path, left: str):
    """And what a client calls x.old or x.part is its own."""
    folder, old, part = tmp_path / "x", tmp_path / ".x.old", tmp_path / ".x.part"

    def write(text: str, fails: bool = False):
        def writes(place: Path) -> None:
            (place / "file").write_text(text)
            if fails:
                raise OSError("no space")

        return writes

    for name in ("x.old", "x.part", "x"):
        replace_folder(tmp_path / name, write(name))
    if left in ("old", "both"):
        folder.rename(old)
    if left in ("part", "both"):
        part.mkdir()
    settle(folder)
    assert (folder / "file").read_text() == "x"
    with pytest.raises(OSError, match="no space"):
        replace_folder(folder, write("broken", fails=True))
    assert (folder / "file").read_text() == "x"
    replace_folder(folder, write("new"))
    assert {path.name: (path / "file").read_text() for path in tmp_path.iterdir()} == {
        "x": "new", "x.old": "x.old", "x.part": "x.part",
    }  # fmt: skip
