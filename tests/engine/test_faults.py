"""What goes wrong ends the requests it concerns, with a reason, and nothing else."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ExpertBackendError
from engine.messages import Abort, Cancelled, Drain, Failed, Finished, Refused, Reply, StopFound
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(5), path)
    return path


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["launch_forward", "launch_sample", "tokens"])
def test_a_step_that_raises_fails_its_requests_only(folder, monkeypatch, overlap, where):
    engine = Harness(folder, overlap=overlap)
    original = getattr(engine.core.runner, where)
    calls = 0

    def breaks(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ExpertBackendError("expert 5 caught fire")
        return original(*args, **kwargs)

    monkeypatch.setattr(engine.core.runner, where, breaks)
    doomed = [engine.submit(p, max_tokens=10) for p in prompts(1, [4, 6])]
    engine.run()
    for rid in doomed:
        end = engine.results[rid].end
        assert isinstance(end, Failed) and "expert 5 caught fire" in end.message
    after = engine.submit(prompts(2, [5])[0], max_tokens=4)
    engine.run()
    assert isinstance(engine.results[after].end, Finished)
    assert engine.core.stats()["failed_steps"] == 1
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_cancel_leaves_within_one_step(folder, overlap):
    engine = Harness(folder, overlap=overlap)
    rid = engine.submit(prompts(1, [4])[0], max_tokens=100)
    other = engine.submit(prompts(1, [4])[0], max_tokens=12)
    engine.until(lambda: engine.results[rid].tokens)
    engine.core.handle(Abort(request_id=rid))
    before = len(engine.results[rid].tokens)
    engine.core.step()
    assert isinstance(engine.results[rid].end, Cancelled)
    assert len(engine.results[rid].tokens) == before
    engine.run()
    assert isinstance(engine.results[other].end, Finished) and len(engine.results[other].tokens) == 12
    engine.close()


def test_stop_found_by_the_api_counts_what_was_delivered(folder):
    engine = Harness(folder)
    rid = engine.submit(prompts(1, [4])[0], max_tokens=100)
    engine.until(lambda: len(engine.results[rid].tokens) >= 3)
    engine.core.handle(StopFound(request_id=rid, num_tokens=3))
    engine.run()
    end = engine.results[rid].end
    assert isinstance(end, Finished) and end.reason == "stop" and end.output_tokens == 3
    engine.close()


def test_end_of_sequence(folder):
    """Without ignore_eos the end token ends the request and is not delivered."""
    engine = Harness(folder)
    prompt = prompts(1, [8])[0]
    free = engine.generate([prompt], max_tokens=20)[0]
    stop = free[5]
    rid = engine.submit(prompt, max_tokens=20, stop_token_ids=(stop,), logprobs=2)
    biased = engine.submit(prompt, max_tokens=20, ignore_eos=False, logit_bias={1: 100.0}, prompt_logprobs=0)
    engine.run()
    end = engine.results[rid].end
    assert engine.results[rid].tokens == free[: free.index(stop)]
    assert end.reason == "stop" and end.stop_token == end.stop_logprobs.chosen.token == stop
    assert end.stop_logprobs.chosen.rank == 1 and len(end.stop_logprobs.top) == 2
    at_once = engine.results[biased]
    assert at_once.tokens == [] and at_once.end.stop_token == 1 and len(at_once.prompt_logprobs) == 8
    assert at_once.end.stop_logprobs is None
    engine.close()


def test_refusals_name_what_to_change(folder):
    engine = Harness(folder, max_model_len=64, max_queue=2, max_num_seqs=2)
    long = engine.submit(list(range(2, 80)))
    wrong = engine.submit([5, 1000])
    negative = engine.submit([5], logit_bias={-3: 1.0})
    empty = engine.submit([])
    flood = [engine.submit([2, 3, 4]) for _ in range(6)]
    engine.run()
    ends = {rid: engine.results[rid].end for rid in engine.results}
    assert ends[long].status == 400 and "64" in ends[long].message
    assert ends[wrong].status == 400 and "1000" in ends[wrong].message and "127" in ends[wrong].message
    assert ends[negative].status == 400 and ends[empty].status == 400
    refused = [ends[rid] for rid in flood if isinstance(ends[rid], Refused)]
    assert refused and all(r.status == 429 and r.retry_after_s for r in refused)
    assert sum(isinstance(ends[rid], Finished) for rid in flood) + len(refused) == 6
    engine.close()


def test_timeout_cancels(folder):
    engine = Harness(folder)
    rid = engine.submit([2, 3, 4], max_tokens=400, timeout_s=0.05)
    engine.run()
    assert isinstance(engine.results[rid].end, Cancelled) and engine.results[rid].end.reason == "timeout"
    engine.close()


def test_drain_finishes_and_refuses(folder):
    engine = Harness(folder)
    running = engine.submit([2, 3, 4], max_tokens=10)
    engine.core.step()
    engine.core.handle(Drain(call_id=9, timeout_s=60))
    late = engine.submit([2, 3])
    engine.run()
    engine.core.step()
    assert isinstance(engine.results[running].end, Finished)
    assert engine.results[late].end.status == 503
    assert [m for m in engine.messages if isinstance(m, Reply)][-1].call_id == 9
    engine.close()


def test_two_engines_in_one_process(folder):
    first, second = Harness(folder), Harness(folder, overlap=True)
    prompt = prompts(3, [11])[0]
    a, b = first.submit(prompt), second.submit(prompt)
    while not (first.results[a].end and second.results[b].end):  # turn by turn
        first.core.step()
        second.core.step()
    assert first.results[a].tokens == second.results[b].tokens
    first.close()
    second.close()


def test_sampled_tokens_do_not_depend_on_company_or_overlap(folder):
    """Seeded sampling with penalties: alone, in a crowd, preempted, overlapped, always the same."""
    options = {
        "temperature": 1.1,
        "top_p": 0.9,
        "seed": 42,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "max_tokens": 20,
    }
    prompt = prompts(4, [18])[0]
    runs = []
    for overlap in (False, True):
        for crowd in (0, 3):
            engine = Harness(folder, overlap=overlap, kv_cache_tokens=112, max_model_len=100, max_num_seqs=4)
            rid = engine.submit(prompt, **options)
            for p in prompts(6, [15] * crowd):
                engine.submit(p, max_tokens=20)
            engine.run()
            runs.append(engine.results[rid].tokens)
            engine.close()
    assert len({tuple(r) for r in runs}) == 1 and len(runs[0]) == 20


def test_random_traffic_keeps_every_promise(folder):
    """Random arrivals, cancels and cache pressure; the harness checks integrity each step and one end each."""
    g = torch.Generator().manual_seed(8)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    engine = Harness(
        folder, kv_cache_tokens=160, max_model_len=120, max_num_batched_tokens=24, max_num_seqs=6, overlap=True
    )
    for _ in range(150):
        action = draw(0, 4)
        if action == 0:
            engine.submit(prompts(draw(0, 50), [draw(1, 60)])[0], max_tokens=draw(1, 30), tenant=f"t{draw(0, 3)}")
        elif action == 1 and engine.results:
            engine.core.handle(Abort(request_id=f"r{draw(0, len(engine.results))}"))
        engine.core.step()
    engine.run()
    stats = engine.core.stats()
    assert stats["running"] == 0 and stats["waiting"] == 0
    engine.close()
