"""Tinker's own client against the demo model: supervised steps, samples, policy gradients, weights that stay."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from api.dialects.tinker.wire import field as wire_field
from tests.e2e.conftest import Server, serving
from tests.training.conftest import save_chat_model
from tests.tuning.test_jobs import KEYS

try:
    import tinker
    from tinker import types
except ModuleNotFoundError:  # its client's tests are skipped, by the fixture `service`
    tinker = types = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of float32 weights, so that sampler and trainer say the same numbers."""
    folder = tmp_path_factory.mktemp("tinker")
    model = str(save_chat_model(folder / "model"))
    flags = [model, "--served-model-name", "demo", "--fine-tuning", "--data-dir", str(folder / "data")]
    flags += ["--dtype", "float32", "--pack-cache", "off", *KEYS]
    with serving(folder, *flags) as running:
        yield running


def connected(server: Server, key: str = "key-a") -> Any:
    return tinker.ServiceClient(base_url=server.url, api_key=f"tml-{key}")


def saved(server: Server, key: str = "key-a") -> Any:
    return tinker.RestClient(base_url=server.url, api_key=f"tml-{key}")


@pytest.fixture(scope="module")
def service(server: Server) -> Any:
    pytest.importorskip("tinker")
    return connected(server)


@pytest.fixture(scope="module")
def training(service: Any) -> Any:
    return service.create_lora_training_client(base_model="demo", rank=8, seed=1).result()


def tokens(server: Server, text: str) -> list[int]:
    answer = server.http.post("/tokenize", json={"prompt": text}, headers={"authorization": "Bearer key-a"})
    return answer.raise_for_status().json()["tokens"]


def datum(text: list[int], **inputs: list[float]) -> Any:
    found = {"target_tokens": text[1:], **(inputs or {"weights": [1.0] * (len(text) - 1)})}
    return types.Datum(model_input=types.ModelInput.from_ints(text[:-1]), loss_fn_inputs=found)


def params(**more: Any) -> Any:
    return types.SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **more})


def test_what_is_learnt_is_sampled(server: Server, service: Any, training: Any):
    text = tokens(server, "The harbour bell rings eleven times.")
    losses = []
    for _ in range(50):
        step = training.forward_backward([datum(text)] * 2, "cross_entropy")
        update = training.optim_step(types.AdamParams(learning_rate=3e-3))
        losses.append(step.result().metrics["loss:sum"])
        assert update.result().metrics["grad_norm:mean"] > 0
    assert losses[-1] < losses[0] / 10
    sampler = training.save_weights_and_get_sampling_client().result()
    found = sampler.sample(
        prompt=types.ModelInput.from_ints(text[:3]), num_samples=2, sampling_params=params(max_tokens=len(text) - 3)
    ).result()
    assert [sequence.tokens for sequence in found.sequences] == [text[3:]] * 2
    assert found.sequences[0].stop_reason == "length"
    assert training.get_info().model_data.model_name == "demo"
    base = service.create_sampling_client(base_model="demo").result()
    other = base.sample(prompt=types.ModelInput.from_ints(text[:3]), num_samples=1, sampling_params=params()).result()
    assert other.sequences[0].tokens[: len(text) - 3] != text[3:]


def test_sampler_and_trainer_agree(server: Server, training: Any):
    """Of samples at temperature 1, with the token that ended them, and of prompts; then their gradient's direction."""
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tokens(server, "The harbour")
    found = sampler.sample(
        prompt=types.ModelInput.from_ints(prompt), num_samples=4, sampling_params=params(temperature=1.0, seed=5)
    ).result()
    assert len({tuple(sequence.tokens) for sequence in found.sequences}) > 1
    data = []
    for sequence in found.sequences:
        ids, before = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
        reward = 1.0 if sequence is found.sequences[0] else -1.0
        data.append(
            datum(
                ids,
                logprobs=before + list(sequence.logprobs),
                advantages=before + [reward] * len(sequence.tokens),
            )
        )
        scores = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
        np.testing.assert_allclose(scores[len(prompt) :], sequence.logprobs, rtol=1e-4, atol=1e-4)
    for loss in ("importance_sampling", "ppo"):
        step = training.forward_backward(data, loss).result()
        for sequence, output in zip(found.sequences, step.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(
                output["logprobs"].data[len(prompt) - 1 :], sequence.logprobs, rtol=1e-4, atol=1e-4
            )
    training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    again = training.forward(data, "importance_sampling").result()
    assert sum(again.loss_fn_outputs[0]["logprobs"].data[len(prompt) - 1 :]) > sum(found.sequences[0].logprobs)


def test_custom_losses_work(server: Server, training: Any):
    """Made by the client of two calls, with weights of any sign."""
    text = tokens(server, "The harbour bell")

    def loss(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return sum((each**2).sum() for each in logprobs), {"count": float(len(data))}

    result = training.forward_backward_custom([datum(text)], loss).result()
    assert any(name.startswith("count") for name in result.metrics)
    training.optim_step(types.AdamParams(learning_rate=1e-5)).result()


def test_weights_stay_and_are_their_tenants(server: Server, service: Any, training: Any):
    text = tokens(server, "The harbour bell rings")
    state = training.save_state("kept").result().path
    path = training.save_weights_for_sampler("served").result().path
    wanted = training.forward([datum(text)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    again = service.create_training_client_from_state_with_optimizer(state).result()
    found = again.forward([datum(text)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    sampler = service.create_sampling_client(model_path=path).result()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(text)).result()
    np.testing.assert_allclose(scores[1:], wanted, rtol=1e-4, atol=1e-4)

    rest = saved(server)
    run = state.removeprefix("tinker://").split("/")[0]
    shown = rest.get_training_run(run).result()
    assert shown.base_model == "demo" and shown.lora_rank == 8
    assert {point.checkpoint_id for point in rest.list_checkpoints(run).result().checkpoints} == {
        "weights/kept", "sampler_weights/served",
    }  # fmt: skip

    other = connected(server, "key-b")
    assert run not in {
        each.training_run_id for each in saved(server, "key-b").list_training_runs().result().training_runs
    }
    for call in (
        lambda: other.create_training_client_from_state(state).result(),
        lambda: other.create_sampling_client(model_path=path).result(),
        lambda: saved(server, "key-b").get_training_run(run).result(),
    ):
        with pytest.raises(tinker.APIStatusError) as error:
            call()
        assert error.value.status_code == 404


def test_what_is_wrong_is_said(server: Server, service: Any):
    training = service.create_lora_training_client(base_model="demo", rank=4, train_mlp=False).result()
    with pytest.raises(Exception, match="as many as"):
        training.forward_backward([datum([1, 2, 3], weights=[1.0])], "cross_entropy").result()
    with pytest.raises(tinker.APIStatusError, match="demo"):
        service.create_lora_training_client(base_model="other", rank=4).result()
    with pytest.raises(Exception, match="max-adapter-rank"):
        service.create_lora_training_client(base_model="demo", rank=1000).result()


@pytest.mark.parametrize(
    ("path", "body", "kind", "status"),
    [
        ("forward_backward", b"\xff" * 40, "application/x-protobuf", 400),
        ("forward_backward", b"\x0a\x01x", "application/x-protobuf", 404),
        ("forward_backward", b"\x10\x01" * 2**20, "application/x-protobuf", 400),
        ("forward_backward", b"\0" * (6 * 2**20 + 1), "application/x-protobuf", 413),
        ("forward_backward", b"\x0a\xff\xff\xff\xff\x0f", "application/x-protobuf", 400),
        ("forward_backward", b"{}", "application/json", 415),
        ("optim_step", b'{"model_id": "x", "seq_id": 1, "adam_params": {"lr": 1}}', "application/json", 400),
        ("optim_step", b'{"model_id": "x", "seq_id": 1, "adam_params": {}}', "application/json", 404),
        ("retrieve_future", b'{"request_id": "nobody"}', "application/json", 410),
        ("create_session", b'{"tags": ' + b"[" * 5000, "application/json", 400),
        ("save_weights", b'{"model_id": "x", "seq_id": 1, "path": "../../a"}', "application/json", 404),
        ("asample", b'{"prompt": {"chunks": []}, "sampling_params": {"max_tokens": 0}}', "application/json", 400),
        ("create_session", b'{"tags": ["' + b"a" * 2**17 + b'"]}', "application/json", 413),
    ],
)
def test_broken_bodies_are_refused(server: Server, path: str, body: bytes, kind: str, status: int):
    headers = {"content-type": kind, "x-api-key": "tml-key-a"}
    answer: httpx.Response = server.http.post(f"/api/v1/{path}", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_a_run_over_http(server: Server):
    """Without its client: a batch, a step, weights that are not overwritten unasked, and what base they are of."""
    headers = {"x-api-key": "tml-key-a"}

    def ask(path: str, status: int = 200, /, **body: Any) -> Any:
        answer = server.http.post(f"/api/v1/{path}", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    def end(asked: dict[str, Any]) -> httpx.Response:
        body = {"request_id": asked["request_id"]}
        return server.http.post("/api/v1/retrieve_future", json=body, headers=headers).raise_for_status()

    session = ask("create_session")["session_id"]
    new = {"session_id": session, "model_seq_id": 0, "base_model": "demo", "lora_config": {"rank": 4}}
    model = end(ask("create_model", **new)).json()["model_id"]
    ids, places = array("i", [1, 2, 3]).tobytes(), array("q", [2, 3, 4]).tobytes()
    text = wire_field(1, wire_field(1, wire_field(1, ids)))
    tensor = wire_field(2, wire_field(1, b"target_tokens") + wire_field(2, tensor_of(places)))
    message = wire_field(1, model.encode()) + b"\x10\x01" + wire_field(3, text + tensor)
    protobuf = {**headers, "content-type": "application/x-protobuf"}
    answer = server.http.post("/api/v1/forward_backward", content=message, headers=protobuf)
    assert answer.status_code == 200, answer.text
    assert b"logprobs" in end(answer.json()).content
    stepped = end(ask("optim_step", model_id=model, seq_id=2, adam_params={})).json()
    assert stepped["metrics"]["grad_norm:mean"] > 0
    for number, kind in enumerate(("save_weights", "save_weights_for_sampler")):
        save = {"model_id": model, "path": "kept"}
        first = ask(kind, seq_id=3 + number, **save)
        path = end(first).json()["path"]
        assert ask(kind, seq_id=3 + number, **save) == first, "the same request again"
        ask(kind, 409, seq_id=5, **save)
    kept = f"/api/v1/training_runs/{model}/checkpoints/weights/kept/ttl"
    for seconds, status in ((3600, 204), (None, 204), (5, 400)):
        assert server.http.put(kept, json={"ttl_seconds": seconds}, headers=headers).status_code == status
    again = {"path": path.replace("sampler_weights", "weights"), "optimizer": True}
    more = {"session_id": session, "model_seq_id": 1}
    ask("load_weights", 404, base_model="other", **again, **more)
    assert "model_id" in end(ask("load_weights", base_model="demo", **again, **more)).json()
    ask("load_weights", 404, **{**again, "path": again["path"] + ".old"}, **more)


def tensor_of(values: bytes) -> bytes:
    """Of int64."""
    return wire_field(1, values) + b"\x18\x02"


def test_a_compressed_body_is_refused(server: Server):
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd", "x-api-key": "tml-key-a"}
    assert server.http.post("/api/v1/forward_backward", content=b"a", headers=headers).status_code == 415
