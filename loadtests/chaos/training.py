"""Attackers that train: jobs of OpenAI's API, of which none may be lost, and runs of Tinker's, whose requests end."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

from api.dialects.tinker.wire import field
from loadtests.chaos.actors import PATIENCE_S, WORDS, Attack
from loadtests.http import Answer, HttpError

_FORM = "multipart/form-data; boundary=b"
_PART = '--b\r\nContent-Disposition: form-data; name="'
_JOBS_AT_ONCE = 3
_OPEN = ("validating_files", "queued", "running", "paused")
JOBS, RUNS = "jobs", "runs"


async def jobs(a: Attack) -> None:
    """Starts jobs; some are paused and resumed, some cancelled. What became of each is in `a.jobs` at the end."""
    while not a.over:
        open_now = [job for job, status in (await _statuses(a)).items() if status in _OPEN]
        if len(open_now) < _JOBS_AT_ONCE:
            await _create(a)
        elif (job := a.rng.choice(open_now)) and a.rng.random() < 0.3:
            for move in a.rng.choice([("pause", "resume"), ("cancel",)]):
                await _asked(a, JOBS, "POST", f"/v1/fine_tuning/jobs/{job}/{move}", b"")
        await asyncio.sleep(a.rng.uniform(0.5, 2))


async def ended_jobs(a: Attack, patience_s: float) -> dict[str, str]:
    """Statuses by job, once all have ended or after `patience_s`."""
    until = asyncio.get_running_loop().time() + patience_s
    while True:
        found = await _statuses(a)
        left = [job for job in a.jobs if found.get(job, "lost") in _OPEN]
        if not left or asyncio.get_running_loop().time() > until:
            return {job: found.get(job, "lost") for job in a.jobs}
        for job in left:
            if found[job] == "paused":
                await _asked(a, JOBS, "POST", f"/v1/fine_tuning/jobs/{job}/resume", b"")
        await asyncio.sleep(1)


async def remove_models(a: Attack) -> None:
    """That jobs have trained: each is loaded, and holds descriptors and memory."""
    answer = await _asked(a, JOBS, "GET", "/v1/models")
    for model in answer.json()["data"] if answer.outcome == "200" else []:
        if model["id"].startswith("ft:"):
            await _asked(a, JOBS, "DELETE", f"/v1/models/{model['id']}")


async def _statuses(a: Attack) -> dict[str, str]:
    found: dict[str, str] = {}
    after = ""
    while True:
        answer = await _asked(a, JOBS, "GET", f"/v1/fine_tuning/jobs?limit=100{after}")
        if answer.outcome != "200":
            return found
        page = answer.json()
        found |= {job["id"]: job["status"] for job in page["data"]}
        if not page["has_more"]:
            return found
        after = f"&after={page['data'][-1]['id']}"


async def _create(a: Attack) -> None:
    rows = [{"messages": [_said(a, "user"), _said(a, "assistant")]} for _ in range(a.rng.randint(2, 6))]
    content = "\n".join(map(json.dumps, rows))
    head = f'{_PART}purpose"\r\n\r\nfine-tune\r\n{_PART}file"; filename="a.jsonl"\r\n\r\n'
    made = await _asked(a, JOBS, "POST", "/v1/files", f"{head}{content}\r\n--b--\r\n".encode(), _FORM)
    if made.outcome != "200":
        return
    values = {"n_epochs": a.rng.randint(1, 4), "batch_size": 2}
    wanted = {
        "model": a.models[0],
        "training_file": made.json()["id"],
        "method": {"type": "supervised", "supervised": {"hyperparameters": values}},
    }
    begun = await _asked(a, JOBS, "POST", "/v1/fine_tuning/jobs", json.dumps(wanted).encode())
    if begun.outcome == "200":
        a.jobs.append(begun.json()["id"])


def _said(a: Attack, role: str) -> dict[str, str]:
    return {"role": role, "content": " ".join(a.rng.choice(WORDS[:7]) for _ in range(a.rng.randint(1, 20)))}


async def runs(a: Attack) -> None:
    """One run after another: batches, steps, weights, samples. Each of its futures has an end; after a kill that is an
    error, and the next run begins."""
    while not a.over:
        session = await _tinker(a, "create_session")
        if session is not None:
            new = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": a.models[0]}
            made = await _future(a, await _tinker(a, "create_model", **new, lora_config={"rank": a.rng.randint(1, 8)}))
            if made is not None:
                await _run(a, made["model_id"])
            await _asked(a, RUNS, "POST", f"/api/v1/sessions/{session['session_id']}/finish", b"")
        await asyncio.sleep(a.rng.uniform(0, 1))


async def _run(a: Attack, model: str) -> None:
    for seq_id in range(1, a.rng.randint(4, 40), 2):
        began = await _batch(a, model, seq_id)
        order = {"model_id": model, "seq_id": seq_id + 1}
        rate = a.rng.choice([1e-4, 1e-2, 1e3])  # the last one diverges
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("optim_step", {"adam_params": {"learning_rate": rate}}),
            ("save_weights", {"path": "a", "overwrite": True}),
            ("save_weights_for_sampler", {"sampling_session_seq_id": seq_id}),
        ]
        name, more = a.rng.choice([kinds[0], *kinds])
        second = await _tinker(a, name, **order, **more)
        ends = [await _future(a, began), await _future(a, second)]
        if a.over or None in ends:
            return


async def _batch(a: Attack, model: str, seq_id: int) -> dict[str, Any] | None:
    tokens = array("i", [a.rng.randint(0, 300) for _ in range(a.rng.randint(1, 200))])
    targets = field(1, array("q", tokens).tobytes()) + b"\x18\x02"
    text = field(1, field(1, field(1, tokens.tobytes())))
    datum = field(3, text + field(2, field(1, b"target_tokens") + field(2, targets)))
    message = field(1, model.encode()) + b"\x10" + bytes([seq_id]) + datum
    answer = await _asked(a, RUNS, "POST", "/api/v1/forward_backward", message, "application/x-protobuf")
    return answer.json() if answer.outcome == "200" else None


async def _tinker(a: Attack, name: str, **body: Any) -> dict[str, Any] | None:
    answer = await _asked(a, RUNS, "POST", f"/api/v1/{name}", json.dumps(body).encode())
    return answer.json() if answer.outcome == "200" else None


async def _future(a: Attack, asked: dict[str, Any] | None) -> dict[str, Any] | None:
    """What came of it; None: an error, or no future of a lost request. A batch's is protobuf: {}."""
    until = asyncio.get_running_loop().time() + PATIENCE_S
    while asked is not None:
        body = json.dumps({"request_id": asked["request_id"]}).encode()
        answer = await _asked(a, RUNS, "POST", "/api/v1/retrieve_future", body)
        if answer.outcome != "200":
            return None
        try:
            found = answer.json()
        except ValueError:
            return {}
        if found.get("type") != "try_again":
            return None if "error" in found else found
        if asyncio.get_running_loop().time() > until:
            a.tally.add(RUNS, "never")
            return None
    return None


async def _asked(
    a: Attack, actor: str, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
) -> Answer:
    """Counted; an answer without an end where the server was gone."""
    try:
        answer = await asyncio.wait_for(a.target.exchange(method, path, body, kind), PATIENCE_S)
    except asyncio.TimeoutError:
        a.tally.add(actor, "never")
        return Answer(0.0)
    except (OSError, HttpError) as error:
        a.tally.add(actor, f"refused ({type(error).__name__})")
        return Answer(0.0)
    a.tally.add(actor, answer.outcome)
    return answer
