"""A tiny gpt-oss that has learnt two answers by heart, experts in MXFP4 on the native kernels, and OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from api.text.bytelevel import byte_level_tokenizer, byte_of_char
from api.text.calls.formats import CALL, HARMONY_MARKERS, RETURN
from testing.models.mxfp4 import save_mxfp4
from testing.models.tiny import tiny_model
from tests.e2e.conftest import Server, serving

TEMPLATE = """
{%- for tool in tools or [] %}<|start|>developer<|message|>{{ tool.function.name }}<|end|>{%- endfor %}
{%- for m in messages %}
{%- if m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions.{{ m.tool_calls[0].function.name }}
{{- ' ' }}<|constrain|>json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"""
WEATHER = {"type": "function", "function": {"name": "sky", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"],
}}}  # fmt: skip
QUESTION = {"role": "user", "content": "Ulm?"}
ASKED = "<|start|>developer<|message|>sky<|end|><|start|>user<|message|>Ulm?<|end|>"
CALLED = '<|channel|>commentary to=functions.sky <|constrain|>json<|message|>{"at": "Ulm"}<|call|>'
RESULT = "<|start|>tool<|message|>wet<|end|>"
# what is given, and what is to be said
LESSONS = [
    (f"{ASKED}<|start|>assistant", f"<|channel|>analysis<|message|>I look.<|end|><|start|>assistant{CALLED}"),
    (
        f"{ASKED}<|start|>assistant{CALLED}{RESULT}<|start|>assistant",
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>",
    ),
]


def tokenizer() -> Tokenizer:
    added = [AddedToken(token, special=True, normalized=False) for token in HARMONY_MARKERS]
    return byte_level_tokenizer([*HARMONY_MARKERS, *byte_of_char()], [], added)


def taught(folder: Path) -> None:
    """Experts stay as they were drawn, in values that MXFP4 has; all else learns."""
    words = tokenizer()
    ends = [words.token_to_id(CALL), words.token_to_id(RETURN)]
    model = tiny_model(family="gpt_oss", vocab_size=words.get_vocab_size(), eos_token_id=ends)
    model = save_mxfp4(model, folder)
    learnt = [parameter for name, parameter in model.named_parameters() if ".experts." not in name]
    optimiser = torch.optim.Adam(learnt, lr=3e-3)
    rows = [(words.encode(given).ids, words.encode(said).ids) for given, said in LESSONS]
    length = max(len(given) + len(said) for given, said in rows)
    ids = torch.tensor([given + said + [0] * (length - len(given) - len(said)) for given, said in rows])
    labels = torch.full_like(ids, -100)
    for row, (given, said) in enumerate(rows):
        labels[row, len(given) : len(given) + len(said)] = torch.tensor(said)
    loss = torch.tensor(torch.inf)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in learnt:
        parameter.requires_grad_(True)
    for _ in range(300):
        loss = model(input_ids=ids, labels=labels).loss
        if loss < 0.01:
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.01
    save_mxfp4(model.requires_grad_(False), folder)
    words.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": RETURN}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    taught(folder / "model")
    flags = ("--device", "cpu", "--kv-cache-tokens", "2048", "--max-num-seqs", "2", "--check-integrity")
    with serving(folder, str(folder / "model"), *flags) as server:
        yield server


def answer(server: Server, messages: list[Any], **more: Any) -> Any:
    asked = {"model": "model", "temperature": 0, "max_tokens": 150, "tools": [WEATHER], **more}
    return server.client.chat.completions.create(messages=messages, **asked)


def test_reasoning_a_call_and_an_answer(server: Server) -> None:
    assert "experts: native" in server.output.read_text()
    (called,) = answer(server, [QUESTION]).choices
    (call,) = called.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("sky", {"at": "Ulm"})
    assert (called.finish_reason, called.message.reasoning_content) == ("tool_calls", "I look.")
    result = {"role": "tool", "tool_call_id": call.id, "content": "wet"}
    (last,) = answer(server, [QUESTION, called.message.model_dump(exclude_none=True), result]).choices
    assert (last.message.reasoning_content, last.message.content) == ("So.", "It rains.")
    assert last.finish_reason == "stop"


def test_streamed(server: Server) -> None:
    reasoning = name = arguments = ""
    reasons = []
    for chunk in answer(server, [QUESTION], stream=True):
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        assert not choice.delta.content
        for call in choice.delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (reasoning, name, json.loads(arguments)) == ("I look.", "sky", {"at": "Ulm"})
    assert reasons == ["tool_calls"]


def test_forced_calls_fit_their_schema(server: Server) -> None:
    """By a grammar of channels."""
    (choice,) = answer(server, [QUESTION], tool_choice="required").choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("sky", {"at": "Ulm"})
