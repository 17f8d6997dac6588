"""Files and batches through the openai client, over the fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import openai
import pytest

from testing.waiting import eventually
from tests.api.conftest import Running, serving
from tests.batches.conftest import ADAPTERS, answers, ended, ids, jsonl, line, start, upload


def test_a_batch_from_upload_to_answers(server: Running) -> None:
    client = server.openai
    lines = [line(f"r{number}", text=f"text {number}") for number in range(40)]
    batch = ended(client, start(client, jsonl(*lines)))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (40, 40, 0)
    output, errors = answers(client, batch)
    assert ids(output) == [f"r{number}" for number in range(40)] and not errors and batch.error_file_id is None
    for request, answered in zip(lines, output, strict=True):
        body = answered["response"]["body"]
        live = client.chat.completions.create(**request["body"])
        assert answered["error"] is None and answered["response"]["status_code"] == 200
        assert body["choices"][0]["message"] == live.choices[0].message.model_dump(exclude_unset=True)
    assert all(m["background"] for m in server.received("Submit") if not m.get("timeout_s") and m.get("background"))
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times) and batch.expires_at == batch.created_at + 86_400


def test_text_completions(server: Running) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 3}
    data = jsonl({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    batch = ended(server.openai, start(server.openai, data, "/v1/completions"))
    output, _ = answers(server.openai, batch)
    assert output[0]["response"]["body"]["choices"][0]["text"] == "abc"


def test_responses(server: Running) -> None:
    body = {"model": "tiny", "input": "abc", "max_output_tokens": 30}
    data = jsonl({"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body})
    batch = ended(server.openai, start(server.openai, data, "/v1/responses"))
    output, _ = answers(server.openai, batch)
    assert output[0]["response"]["body"]["object"] == "response"


def test_lines_that_an_endpoint_refuses_have_error_lines(server: Running) -> None:
    wrong = [
        line("model", model="nobody"),
        line("range", temperature=7),
        line("stream", stream=True),
        line("long", text="x" * 5000),
        line("fails", model="fail"),
        {**line("no body"), "body": {}},
    ]
    batch = ended(server.openai, start(server.openai, jsonl(line("good"), *wrong)))
    output, errors = answers(server.openai, batch)
    assert batch.status == "completed" and ids(output) == ["good"]
    assert ids(errors) == [each["custom_id"] for each in wrong]
    status = [each["response"] and each["response"]["status_code"] for each in errors]
    assert status == [404, 400, None, 400, 500, 400]
    assert errors[2]["error"]["code"] == "stream_not_supported"
    assert batch.request_counts.failed == len(wrong) and batch.request_counts.completed == 1


@pytest.mark.parametrize(
    ("data", "code", "where"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (jsonl(line("a")) + b"{not json\n", "invalid_json_line", 2),
        (jsonl(line("a")) + b"\xff\xfe\n", "invalid_json_line", 2),
        (b"[" * 100_000, "invalid_request_line", 1),
        (jsonl(line("a"), line("b"), line("a")), "duplicate_custom_id", 3),
        (jsonl({**line("a"), "method": "GET"}), "invalid_method", 1),
        (jsonl({**line("a"), "url": "/v1/completions"}), "mismatched_url", 1),
        (jsonl({**line("a"), "custom_id": ""}), "invalid_custom_id", 1),
        (jsonl({**line("a"), "body": []}), "invalid_body", 1),
        (jsonl({"custom_id": "a"}), "invalid_request_line", 1),
        (jsonl(7), "invalid_request_line", 1),
    ],
)
def test_a_wrong_line_fails_the_batch(server: Running, data: bytes, code: str, where: int | None) -> None:
    batch = ended(server.openai, start(server.openai, data))
    assert batch.status == "failed" and batch.output_file_id is None
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, where)


def test_lists_have_pages(server: Running) -> None:
    client = server.openai
    made = [start(client, jsonl(line("a"))) for _ in range(5)]
    newest = list(client.batches.list(limit=2))
    assert [batch.id for batch in newest[:5]] == made[::-1]
    files = [batch.input_file_id for batch in newest[:5]]
    assert [file.id for file in client.files.list(purpose="batch", limit=2, order="desc") if file.id in files] == files
    assert all(file.purpose == "batch_output" for file in client.files.list(purpose="batch_output"))
    assert server.http.get("/v1/files", params={"limit": 0}).status_code == 400


def test_files_are_retrieved_downloaded_and_deleted(server: Running) -> None:
    client, data = server.openai, jsonl(line("a"))
    file = client.files.create(file=("näme.jsonl", data), purpose="batch")
    assert client.files.retrieve(file.id) == file and file.bytes == len(data) and file.filename == "näme.jsonl"
    assert client.files.content(file.id).read() == data
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    expiring = client.files.create(
        file=("a", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert expiring.expires_at == expiring.created_at + 3600


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"data": {"purpose": "vision"}, "files": {"file": b"x"}}, "purpose"),
        ({"data": {}, "files": {"file": b"x"}}, "purpose"),
        ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, "other"),
        ({"data": {"purpose": "batch" * 1000}, "files": {"file": b"x"}}, "purpose"),
        (
            {"data": {"purpose": "batch", "expires_after[seconds]": "5"}, "files": {"file": b"x"}},
            "expires_after.anchor",
        ),
        ({"content": b"--b\r\n\r\nnothing", "headers": {"content-type": "multipart/form-data; boundary=b"}}, ""),
        ({"content": b"--b", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "file"),
        ({"content": b"\0" * 100, "headers": {"content-type": "multipart/form-data; boundary=b"}}, "file"),
    ],
)
def test_a_wrong_form_is_refused_and_leaves_nothing(server: Running, form: dict, param: str) -> None:
    before = server.http.get("/v1/files").json()
    answer = server.http.post("/v1/files", **form)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert server.http.get("/v1/files").json() == before


def test_another_type_of_body_is_refused(server: Running) -> None:
    assert server.http.post("/v1/files", json={"purpose": "batch"}).status_code == 415


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "forever"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"input_file_id": "file-0"}, "file_id"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_a_wrong_batch_is_refused(server: Running, changes: dict, param: str) -> None:
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **changes}
    body.setdefault("input_file_id", upload(server.openai, jsonl(line("a"))))
    answer = server.http.post("/v1/batches", json=body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param


def test_a_cancelled_batch_ends_with_what_it_has(server: Running) -> None:
    client = server.openai
    lines = [line("quick"), line("stuck", model="silent"), *(line(f"r{n}", model="silent") for n in range(40))]
    batch_id = start(client, jsonl(*lines))
    eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed == 1)
    with pytest.raises(openai.ConflictError, match="needs the file"):
        client.files.delete(client.batches.retrieve(batch_id).input_file_id)
    assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
    batch = ended(client, batch_id)
    output, errors = answers(client, batch)
    assert batch.status == "cancelled" and ids(output) == ["quick"]
    assert ids(errors) == ids(lines)[1:] and {e["error"]["code"] for e in errors} == {"batch_cancelled"}
    submitted = {m["request_id"] for m in server.received("Submit") if m.get("adapter") == "silent"}
    eventually(lambda: submitted <= {m["request_id"] for m in server.received("Abort")})
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch_id)


def test_a_batch_that_is_late_expires(server: Running) -> None:
    client = server.openai
    batch = ended(client, start(client, jsonl(line("quick"), line("stuck", model="silent")), window="2s"))
    output, errors = answers(client, batch)
    assert batch.status == "expired" and ids(output) + ids(errors) == ["quick", "stuck"]
    assert errors[0]["error"]["code"] == "batch_expired"


def test_without_a_data_folder_the_setting_is_named(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, tmp_path) as running:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("POST", "/v1/batches")):
            answer = running.http.request(method, path)
            assert answer.status_code == 404 and "--data-dir" in answer.json()["error"]["message"]


def test_tenants_see_their_own_alone_and_have_quotas(model_dir: Path, tmp_path: Path) -> None:
    flags = ["--data-dir", str(tmp_path / "data"), "--max-files", "4", "--max-stored-bytes", "5000"]
    flags += ["--max-file-bytes", "4000", "--api-key", "ka=a::tiny,reverse", "--api-key", "kb=b::tiny"]
    with serving(model_dir, tmp_path, *flags, *ADAPTERS, key="ka") as running:
        a, b = running.openai, running.openai.with_options(api_key="kb")
        batch = ended(a, start(a, jsonl(line("x", model="reverse"))))
        assert batch.status == "completed" and batch.request_counts.completed == 1
        for see in (
            lambda: b.files.retrieve(batch.input_file_id),
            lambda: b.files.content(batch.output_file_id),
            lambda: b.files.delete(batch.output_file_id),
            lambda: b.batches.retrieve(batch.id),
            lambda: b.batches.cancel(batch.id),
            lambda: b.batches.list(after=batch.id),
            lambda: b.files.list(after=batch.input_file_id),
            lambda: b.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                see()
        assert not b.batches.list().data and not b.files.list().data
        hidden = ended(b, start(b, jsonl(line("x", model="reverse"))))
        assert answers(b, hidden)[1][0]["response"]["status_code"] == 404
        with pytest.raises(openai.APIStatusError, match="larger than 4000"):
            upload(a, b"x" * 4001)
        with pytest.raises(openai.BadRequestError, match="5000 bytes"):
            upload(a, b"x" * 3000), upload(a, b"x" * 3000)
        upload(a, b"x")
        with pytest.raises(openai.BadRequestError, match="4 are allowed"):
            upload(a, b"x")
        a.files.delete(batch.output_file_id)
        upload(a, b"x")


def test_the_data_folder_has_one_server(server: Running, model_dir: Path, tmp_path: Path) -> None:
    data = server.log.parent / "data"
    with (
        pytest.raises(AssertionError, match="another server uses it"),
        serving(model_dir, tmp_path, "--data-dir", str(data)),
    ):
        pass


def test_the_output_is_json_lines(server: Running) -> None:
    """Whatever characters a text has: one line an answer."""
    text = 'a\nb\r\u2028\u0085\x00 \U0001f600 \\ "'
    batch = ended(server.openai, start(server.openai, jsonl(line(text, text=text))))
    raw = httpx.get(
        f"{server.url}/v1/files/{batch.output_file_id}/content", headers={"Authorization": "Bearer none"}
    ).content
    assert raw.count(b"\n") == 1 and json.loads(raw)["custom_id"] == text
