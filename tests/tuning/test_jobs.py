"""OpenAI's fine-tuning API over the demo model, with OpenAI's own client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from testing.waiting import PATIENCE_S, eventually
from tests.e2e.conftest import Server, serving

ENDED = ("succeeded", "failed", "cancelled")
KEYS = ["--api-key", "key-a=team-a", "--api-key", "key-b=team-b"]
SECRET = "The harbour bell rings eleven times."


def example(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


def talks(count: int = 8) -> list[dict[str, Any]]:
    return [example(f"What does the bell say, number {n}?", SECRET) for n in range(count)]


def pairs(count: int = 6) -> list[dict[str, Any]]:
    def said(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    questions = [{"messages": [{"role": "user", "content": f"Say something, number {n}."}]} for n in range(count)]
    return [{"input": q, "preferred_output": said("Yes."), "non_preferred_output": said("No.")} for q in questions]


class Tenant:
    def __init__(self, server: Server, key: str) -> None:
        self.server = server
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)
        self.jobs = self.client.fine_tuning.jobs

    def upload(self, rows: list[Any] | bytes) -> str:
        data = rows if isinstance(rows, bytes) else b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        return self.client.files.create(file=("data.jsonl", data), purpose="fine-tune").id

    def create(self, rows: list[Any] | bytes, **settings: Any) -> str:
        return self.jobs.create(**{"model": "demo", "training_file": self.upload(rows), "seed": 7, **settings}).id

    def ended(self, job_id: str) -> openai.types.fine_tuning.FineTuningJob:
        self.until(job_id, *ENDED)
        return self.jobs.retrieve(job_id)

    def until(self, job_id: str, *statuses: str) -> None:
        eventually(lambda: self.jobs.retrieve(job_id).status in statuses, f"the job is not {statuses}")

    def events(self, job_id: str) -> list[Any]:
        """Oldest first."""
        return list(self.jobs.list_events(job_id))[::-1]

    def steps(self, job_id: str) -> list[int]:
        return [each.data["step"] for each in self.events(job_id) if each.type == "metrics"]

    def models(self) -> set[str]:
        return {model.id for model in self.client.models.list()}

    def ask(self, model: str, question: str) -> str:
        messages: Any = [{"role": "user", "content": question}]
        answer = self.client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40)
        return answer.choices[0].message.content or ""


def supervised(**values: Any) -> dict[str, Any]:
    return {"type": "supervised", "supervised": {"hyperparameters": values}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tuning")
    flags = ["--fine-tuning", "--data-dir", str(folder / "data"), "--check-integrity", "--pack-cache", "off", *KEYS]
    with serving(folder, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def team(server: Server) -> Tenant:
    return Tenant(server, "key-a")


@pytest.fixture(scope="module")
def other(server: Server) -> Tenant:
    return Tenant(server, "key-b")


def test_a_job_from_its_file_to_its_model(team: Tenant, other: Tenant):
    valid = team.upload(talks(3))
    job_id = team.create(
        talks(),
        validation_file=valid,
        suffix="bell",
        metadata={"team": "sea"},
        method=supervised(n_epochs=20, batch_size=4, learning_rate_multiplier=2.0),
    )
    job = team.ended(job_id)
    assert job.status == "succeeded", team.events(job_id)
    assert job.fine_tuned_model is not None and job.fine_tuned_model.startswith("ft:demo:team-a:bell:")
    assert job.finished_at and job.trained_tokens and job.seed == 7 and job.metadata == {"team": "sea"}
    assert job.method.supervised.hyperparameters.n_epochs == 20
    assert team.ask(job.fine_tuned_model, "What does the bell say, number 3?") == SECRET
    assert team.ask("demo", "What does the bell say, number 3?") != SECRET

    metrics = [each.data for each in team.events(job_id) if each.type == "metrics"]
    assert [each["step"] for each in metrics] == list(range(1, 41))
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"] / 4
    assert metrics[-1]["train_mean_token_accuracy"] > 0.9
    assert metrics[-1]["full_valid_loss"] < metrics[1]["full_valid_loss"]
    points = list(team.jobs.checkpoints.list(job_id))
    assert [point.step_number for point in points] == [40, 38, 36]
    assert points[0].fine_tuned_model_checkpoint == job.fine_tuned_model
    assert {point.fine_tuned_model_checkpoint for point in points} <= team.models()
    table = team.client.files.content(job.result_files[0]).text.splitlines()
    assert table[0].startswith("step,train_loss") and len(table) == 41

    assert not [name for name in other.models() if name.startswith("ft:")]
    with pytest.raises(openai.NotFoundError):
        other.ask(job.fine_tuned_model, "What?")
    for call in (other.jobs.retrieve, other.jobs.cancel, other.jobs.pause, other.jobs.list_events):
        with pytest.raises(openai.NotFoundError):
            call(job_id)
    with pytest.raises(openai.NotFoundError):
        other.client.models.delete(job.fine_tuned_model)
    assert [each.id for each in team.jobs.list(metadata={"team": "sea"})] == [job_id]
    assert not list(other.jobs.list())

    team.client.models.delete(job.fine_tuned_model)
    assert job.fine_tuned_model not in team.models()
    assert team.jobs.retrieve(job_id).status == "succeeded"


def test_preferences(team: Tenant):
    method = {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 4, "batch_size": 3, "beta": 0.5}}}
    job_id = team.create(pairs(), method=method)
    job = team.ended(job_id)
    assert job.status == "succeeded", team.events(job_id)
    losses = [each.data["train_loss"] for each in team.events(job_id) if each.type == "metrics"]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < losses[0]
    assert job.method.dpo.hyperparameters.beta == 0.5


def test_a_job_stops_early_where_the_validation_loss_rises(team: Tenant):
    """Of answers that it is not trained on; its model is the best of the epochs that are kept."""
    others = [example(f"What does the bell say, number {n}?", "Nothing at all.") for n in range(8)]
    rate = supervised(learning_rate_multiplier=2.0, batch_size=8)
    job_id = team.create(talks(), validation_file=team.upload(others), method=rate)
    job = team.ended(job_id)
    assert job.status == "succeeded", team.events(job_id)
    epochs = team.steps(job_id)[-1]
    assert 3 <= epochs < job.method.supervised.hyperparameters.n_epochs == 13
    assert any("Stopped after epoch" in each.message for each in team.events(job_id))
    points = list(team.jobs.checkpoints.list(job_id))
    assert [point.step_number for point in points] == [epochs, epochs - 1, epochs - 2]
    best = min(points, key=lambda point: point.metrics.full_valid_loss)
    assert job.fine_tuned_model == best.fine_tuned_model_checkpoint
    assert {point.fine_tuned_model_checkpoint for point in points} == {m for m in team.models() if job_id[6:18] in m}


def test_a_job_begins_with_a_model_that_another_one_trained(team: Tenant, other: Tenant):
    """Of preferences that is the reference too. The model may be deleted meanwhile."""
    method = supervised(n_epochs=6, batch_size=4, learning_rate_multiplier=2.0)
    first = team.create(talks(), method=method)
    model = team.ended(first).fine_tuned_model
    assert model
    with pytest.raises(openai.NotFoundError):
        other.create(talks(1), model=model)
    more = team.create(talks(), model=model, method=method)
    dpo = {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 1, "batch_size": 3}}}
    preferred = team.create(pairs(), model=model, method=dpo)
    team.client.models.delete(model)

    def losses(job_id: str) -> list[float]:
        job = team.ended(job_id)
        assert job.status == "succeeded", team.events(job_id)
        return [each.data["train_loss"] for each in team.events(job_id) if each.type == "metrics"]

    assert team.jobs.retrieve(more).model == model
    assert losses(more)[0] < losses(first)[0] / 2
    assert losses(preferred)[0] == pytest.approx(0.6931, abs=1e-3)
    with pytest.raises(openai.NotFoundError):
        team.create(talks(1), model=model)


def test_auto_hyperparameters_are_numbers_once_the_file_is_known(team: Tenant):
    job_id = team.create(talks(10))
    team.until(job_id, "queued", "running", "succeeded")
    found = team.jobs.retrieve(job_id).hyperparameters
    assert (found.n_epochs, found.batch_size, found.learning_rate_multiplier) == (10, 4, 1.0)
    team.jobs.cancel(job_id)
    assert team.ended(job_id).status == "cancelled"


def test_pause_resume_and_streamed_events(team: Tenant):
    job_id = team.create(talks(4), method=supervised(n_epochs=30, batch_size=4))
    eventually(lambda: len(team.steps(job_id)) >= 3)
    assert team.jobs.pause(job_id).status == "paused"
    with pytest.raises(openai.ConflictError, match="paused"):
        team.jobs.pause(job_id)
    assert team.jobs.resume(job_id).status == "queued"
    streamed = []
    with team.server.http.stream(
        "GET", f"/v1/fine_tuning/jobs/{job_id}/events?stream=true", headers={"authorization": "Bearer key-a"}
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                streamed.append(json.loads(line[6:]))
    assert team.ended(job_id).status == "succeeded"
    assert [each["data"]["step"] for each in streamed if each["type"] == "metrics"] == list(range(1, 31))
    assert "successfully" in streamed[-1]["message"]
    with pytest.raises(openai.ConflictError, match="succeeded"):
        team.jobs.cancel(job_id)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([*talks(2), {"messages": []}], "line 3"),
        ([*talks(1), example("q", "a", weight=2)], r"line 2: messages\[1\].weight"),
        ([*talks(1), {**example("q", "a"), "answer": "b"}], "line 2: unknown field 'answer'"),
        ([example("q", "word " * 3000)], "line 1: messages: .*--training-tokens"),
        ([{"messages": [{"role": "robot", "content": "x"}]}], r"line 1: messages\[0\].role"),
        (b"{}\nnonsense\n", "line 1: the field 'messages' is missing"),
        (b"\n", "no examples"),
        (pairs(1), "line 1: unknown field"),
    ],
)
def test_wrong_lines_fail_the_job_before_it_is_queued(team: Tenant, rows: Any, said: str):
    job_id = team.create(rows)
    job = team.ended(job_id)
    assert job.status == "failed" and job.error is not None
    assert job.error.code == "invalid_training_file" and job.error.param == "training_file"
    assert re.search(said, job.error.message), job.error.message
    assert str(team.server.output.parent) not in job.error.message
    assert not team.steps(job_id)


def test_wrong_requests_are_refused(team: Tenant, other: Tenant):
    good = team.upload(talks(1))
    batch = team.client.files.create(file=("b.jsonl", b"{}"), purpose="batch").id
    foreign = other.upload(talks(1))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": "demo-2"}, "demo-2"),
        ({"training_file": "file-none"}, "training_file"),
        ({"training_file": foreign}, "training_file"),
        ({"training_file": batch}, "fine-tune"),
        ({"validation_file": batch}, "validation_file"),
        ({"suffix": "a b"}, "suffix"),
        ({"method": supervised(n_epochs=0)}, "n_epochs"),
        ({"method": supervised(batch_size="many")}, "batch_size"),
        ({"method": supervised(learning_rate_multiplier=-1)}, "learning_rate_multiplier"),
        ({"method": supervised(beta=0.1)}, "beta"),
        ({"method": {"type": "reinforcement"}}, "grader"),
        ({"method": {"type": "dpo", "supervised": {"hyperparameters": {"n_epochs": 1}}}}, "supervised"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations"),
        ({"extra_body": {"epochs": 3}}, "epochs"),
    ]
    for settings, said in wrong:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=said):
            team.jobs.create(**{"model": "demo", "training_file": good, **settings})


def test_files_stay_while_a_job_reads_them(team: Tenant):
    file = team.upload(talks(4))
    job = team.jobs.create(model="demo", training_file=file, method=supervised(n_epochs=50))
    with pytest.raises(openai.ConflictError, match=job.id):
        team.client.files.delete(file)
    team.jobs.cancel(job.id)
    team.client.files.delete(file)
