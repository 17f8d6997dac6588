"""Models, adapters at run time, keys, health, metrics, version."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.client.stream import Inbox, OpenRequest
from api.errors import ApiError
from api.http.answers.generation import Answers, Choice
from api.http.answers.meter import Meter
from api.http.metrics import UNLOADED, Metrics
from api.text.output import Output
from engine import messages as m
from testing.waiting import PATIENCE_S
from tests.api.conftest import BUILT_IN, Running, serving


def admin(server: Running, path: str, key: str = "admin", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S)


def test_models(server: Running) -> None:
    models = {model.id: model for model in server.openai.models.list()}
    assert set(models) >= {"tiny", *BUILT_IN}
    assert models["tiny"].parent is None and models["tiny"].max_model_len == 2048
    assert models["reverse"].parent == "tiny" and models["reverse"].root == "/fake/reverse"
    assert server.openai.models.retrieve("reverse").id == "reverse"
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("nope")


def test_an_adapters_life(server: Running, tmp_path: Path) -> None:
    loaded = admin(server, "/v1/load_lora_adapter", lora_name="org/new", lora_path=str(tmp_path))
    assert loaded.status_code == 200 and loaded.json()["version"] == 1
    assert server.openai.models.retrieve("org/new").parent == "tiny"
    answer = server.openai.completions.create(model="org/new", prompt="a")
    assert answer.choices[0].text == "a"
    assert 'model_name="org/new"' in server.http.get("/metrics").text
    again = admin(server, "/v1/load_lora_adapter", lora_name="org/new", lora_path=str(tmp_path))
    assert again.status_code == 409 and again.json()["error"]["param"] == "lora_name"
    call = {"lora_name": "org/new", "lora_path": str(tmp_path), "replace": True, "pinned": True}
    replaced = admin(server, "/v1/load_lora_adapter", **call)
    assert replaced.json()["version"] == 2 and replaced.json()["pinned"] is True
    shown = server.http.get("/v1/models/org/new").json()
    assert (shown["residency"], shown["pinned"]) == ("host", True)
    assert "residency" not in server.http.get("/v1/models/tiny").json()
    assert admin(server, "/v1/unload_lora_adapter", lora_name="org/new").status_code == 200
    assert admin(server, "/v1/unload_lora_adapter", lora_name="org/new").status_code == 404
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="org/new", prompt="a")
    metrics = server.http.get("/metrics").text
    assert 'model_name="org/new"' not in metrics
    assert f'ktserve_requests_total{{model_name="{UNLOADED}",outcome="stop",tenant="default"}} 1.0' in metrics


def test_adapters_that_cannot_be_loaded(server: Running, tmp_path: Path) -> None:
    missing = admin(server, "/v1/load_lora_adapter", lora_name="x", lora_path=str(tmp_path / "nope"))
    assert missing.status_code == 400 and "no such folder" in missing.json()["error"]["message"]
    base = admin(server, "/v1/load_lora_adapter", lora_name="tiny", lora_path=str(tmp_path))
    assert base.status_code == 400 and "base model" in base.json()["error"]["message"]
    typo = admin(server, "/v1/load_lora_adapter", lora_name="x", lora_path=str(tmp_path), expert_scaling="r")
    assert typo.status_code == 400 and typo.json()["error"]["param"] == "expert_scaling"


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_the_admin_key_is_asked(server: Running, path: str) -> None:
    assert admin(server, path, key="wrong", lora_name="reverse").status_code == 401
    assert httpx.post(f"{server.url}{path}", json={"lora_name": "reverse"}).status_code == 401


def test_health_and_version(server: Running) -> None:
    assert server.http.get("/health").json() == {"status": "ready", "restarts": 0}
    assert server.http.get("/version").json()["version"]


def test_the_schema_describes_the_bodies(server: Running) -> None:
    schema = server.http.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "stream_options"} <= set(body["properties"])
    for reference in re.findall(r"'\$ref': '#/([^']+)'", str(body)):
        found: Any = schema
        for name in reference.split("/"):
            found = found[name]
        assert {"type", "anyOf", "oneOf", "const", "enum"} & set(found), reference


def test_metrics(server: Running) -> None:
    def values() -> dict[str, float]:
        text = server.http.get("/metrics").text
        return {
            sample.name + "".join(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    before = values()
    server.openai.completions.create(model="tiny", prompt="abcd")
    with pytest.raises(openai.RateLimitError):
        server.openai.completions.create(model="refuse", prompt="abcd")
    after = values()

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert gained("ktserve_requests_totaltinystopdefault") == 1
    assert gained("ktserve_requests_totalrefuserefuseddefault") == 1
    assert (
        gained("ktserve_prompt_tokens_totaltinydefault")
        == gained("ktserve_generation_tokens_totaltinydefault") - 1
        == 4
    )
    assert gained("ktserve_time_to_first_token_seconds_countdefault") == 1
    assert gained("ktserve_inter_token_latency_seconds_countdefault") == 3
    assert gained("ktserve_e2e_request_latency_seconds_countdefault") == 2
    assert after["ktserve_engine_up"] == 1
    assert after["ktserve_engine_blocksfree"] == 9 and after["ktserve_engine_running"] == 0


def test_the_serving_process_has_no_torch(server: Running) -> None:
    server.openai.completions.create(model="tiny", prompt="abcd")
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "tokenizers" in maps, "the maps are not those of the serving process"
    assert "libtorch" not in maps


@pytest.fixture(scope="module")
def guarded(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = ["--adapters", "reverse=/x", "--adapters", "slow=/y"]
    flags += ["--api-key", "k1=red:2.5", "--api-key", "k2=blue:1:tiny,reverse"]
    with serving(model_dir, tmp_path_factory.mktemp("guarded"), *flags, key="k2") as running:
        yield running


def test_keys_are_asked(guarded: Running) -> None:
    for path in ("/v1/models", "/v1/models/tiny"):
        response = httpx.get(guarded.url + path)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert httpx.post(guarded.url + path, json={}).status_code == 401
    for path in ("/health", "/version"):
        assert httpx.get(guarded.url + path).status_code == 200


def test_a_tenant_sees_its_models_only(guarded: Running) -> None:
    assert {model.id for model in guarded.openai.models.list()} == {"tiny", "reverse"}
    with pytest.raises(openai.NotFoundError) as caught:
        guarded.openai.completions.create(model="slow", prompt="a")
    assert "'slow'" in caught.value.message.split(";")[0] and "slow" not in caught.value.message.split(";")[1]
    with pytest.raises(openai.NotFoundError):
        guarded.openai.models.retrieve("slow")


def test_tenant_and_weight_reach_the_engine(guarded: Running) -> None:
    guarded.openai.completions.create(model="tiny", prompt="a", extra_body={"priority": -3})
    guarded.openai.with_options(api_key="k1").completions.create(model="slow", prompt="a")
    first, second = guarded.received("Submit")[-2:]
    assert (first["tenant"], first.get("tenant_weight", 1.0), first["priority"]) == ("blue", 1.0, -3)
    assert (second["tenant"], second["tenant_weight"], second["adapter"]) == ("red", 2.5, "slow")


def test_metrics_of_tenants_are_the_admins(model_dir: Path, tmp_path: Path) -> None:
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("k1=team a\nk2=team_a\nschlüssel\n")
    admin.write_text("root\n")
    flags = ["--api-keys-file", str(keys), "--admin-key-file", str(admin)]
    with serving(model_dir, tmp_path, *flags, key="k1") as server:
        for key, status in (("k1", 401), ("wrong", 401), ("root", 200)):
            answer = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status
        header = {"Authorization": "Bearer schlüssel".encode()}
        assert httpx.get(f"{server.url}/v1/models", headers=header).status_code == 200
        assert "list of processes" not in server.stderr


def test_metrics_without_an_admin_key_are_off(guarded: Running, server: Running) -> None:
    assert 'name="free"' in server.http.get("/metrics").text
    assert guarded.http.get("/metrics").status_code == 403
    assert "--api-key: others can read the key" in guarded.stderr


def test_an_engines_list_of_adapters_is_not_shown() -> None:
    """It names all of them; an adapter may be unloaded while a request for it is on its way."""
    refusal = m.Refused(request_id="r", status=404, code="unknown_adapter", message="no 'a'; models: secret")
    answers = Answers(Inbox(), 1)
    request = OpenRequest("r", answers.inbox, lambda request_id, message: None)
    answers.add(Choice(request, Output(None), Meter(Metrics()), prompt_tokens=1))
    answers.inbox.put(refusal)
    with pytest.raises(ApiError) as caught:
        asyncio.run(answers.whole())
    assert caught.value.status == 404 and "secret" not in str(caught.value.body())


def test_names_are_labels() -> None:
    """Whatever tenants are called, no two of them share a metric."""
    metrics = Metrics()
    names = ["team a", "team_a", "team/a", 'a"b', "a\nb", "é"]
    metrics.stats = {**{f"tenant_service/{name}": i for i, name in enumerate(names)}, "running": 1}
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    samples = families["ktserve_engine_tenant_service"].samples
    assert {sample.labels["name"]: sample.value for sample in samples} == {name: i for i, name in enumerate(names)}
    assert families["ktserve_engine_running"].samples[0].labels == {}


def test_without_an_admin_key_loading_is_off(guarded: Running) -> None:
    response = guarded.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/"})
    assert response.status_code == 403 and "--admin-key" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def wordless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("wordless")
    model = folder / "bare"
    model.mkdir()
    with serving(model, folder, "--skip-tokenizer") as running:
        yield running


def test_without_a_tokenizer_tokens_are_served(wordless: Running) -> None:
    answer = wordless.openai.completions.create(
        model="bare", prompt=[5, 6, 7], logprobs=1, echo=True, extra_body={"return_token_ids": True}
    )
    (choice,) = answer.choices
    assert choice.text == "" and choice.token_ids == [5, 6, 7, 0] and choice.finish_reason == "stop"
    assert choice.logprobs.tokens == [f"token_id:{i}" for i in (5, 6, 7, 5, 6, 7, 0)]


def test_without_a_tokenizer_text_is_refused(wordless: Running) -> None:
    for call in (
        lambda: wordless.openai.completions.create(model="bare", prompt="text"),
        lambda: wordless.openai.chat.completions.create(model="bare", messages=[{"role": "user", "content": "x"}]),
        lambda: wordless.openai.completions.create(model="bare", prompt=[1], stop="x"),
    ):
        with pytest.raises(openai.BadRequestError, match="skip-tokenizer"):
            call()


def test_a_tokenizer_with_more_tokens_than_the_model_is_said(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, tmp_path, vocab_size=100) as server:
        assert "tokens, the model 100: prompts with one of the others are refused" in server.stderr
