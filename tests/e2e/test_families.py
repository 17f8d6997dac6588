"""A tiny model of every family over HTTP: it knows one chat by heart, in its vendor's template, tool calls and
reasoning, and OpenAI's client reads it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from api.text.bytelevel import KIMI, byte_level_tokenizer, byte_of_char
from api.text.tokenizer import load_tokenizer
from testing.models.mxfp4 import save_mxfp4
from testing.models.tiny import save_hf, tiny_model
from tests.e2e.conftest import Server, serving
from tests.e2e.vendors import CALLS, RESULTS, TOOLS, VENDORS, Vendor

_HIDDEN = 192  # as many states as there are tokens to write can be told apart
_RIDGE = 1e-3  # rounding changes states a little
_LOGIT = 20.0  # of the next token, where others have none
_QUESTION = {"role": "user", "content": "Ulm?"}


def save_tokenizer(vendor: Vendor, folder: Path) -> None:
    """In the vendor's kind of file. Each word of what is said is a token."""
    settings: dict[str, Any] = {"chat_template": vendor.template, "eos_token": vendor.eos[-1]}
    settings["bos_token"] = next(
        (token for token in vendor.control if token in ("<s>", "<｜begin▁of▁sentence｜>")), None
    )
    texts = vendor.said + vendor.last
    for token in vendor.tokens:
        texts = texts.replace(token, "\n")
    added = [AddedToken(token, special=token in vendor.control, normalized=False) for token in vendor.tokens]
    if vendor.pre is None:
        _sentencepiece(vendor, texts, added).save(str(folder / "tokenizer.json"))
    else:
        chars = list(byte_of_char())
        plain = byte_level_tokenizer(chars, [], [], pre=vendor.pre)
        parts = [part for part, _ in plain.pre_tokenizer.pre_tokenize_str(texts)]
        words = [*chars, *dict.fromkeys(part for part in parts if len(part) > 1)]
        if vendor.pre == KIMI:
            settings["tokenizer_class"] = "TikTokenTokenizer"
            settings["added_tokens_decoder"] = {
                len(words) + i: {"content": token, "special": True} for i, token in enumerate(vendor.control)
            }
            ranks = (bytes(byte_of_char()[char] for char in word) for word in words)
            lines = (f"{base64.b64encode(rank).decode()} {i}\n" for i, rank in enumerate(ranks))
            (folder / "tiktoken.model").write_text("".join(lines))
        else:
            made = byte_level_tokenizer([*vendor.tokens, *words], [], added, pre=vendor.pre, whole_words=True)
            made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _sentencepiece(vendor: Vendor, texts: str, added: list[AddedToken]) -> Tokenizer:
    """Characters, and bytes where there is none."""
    known = dict.fromkeys([*vendor.tokens, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *texts.replace(" ", "")])
    vocab = {token: i for i, token in enumerate(known)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_tokens(added)
    return made


@torch.no_grad()
def taught(vendor: Vendor, folder: Path) -> None:
    """A random model whose last matrix makes of the state behind each token of a lesson the token that follows: least
    squares, as that takes no training."""
    folder.mkdir()
    save_tokenizer(vendor, folder)
    words = load_tokenizer(folder)
    ends = [words.encode(token, add_special_tokens=False)[0] for token in vendor.eos]
    shape = {"hidden_size": _HIDDEN, "vocab_size": words.vocab_size, "max_position_embeddings": 2048, **vendor.shape}
    model = tiny_model(family=vendor.family, eos_token_id=ends, **shape)
    mxfp4 = vendor.family == "gpt_oss"  # as its vendor's files are; the values stay when it is saved again
    if mxfp4:
        model = save_mxfp4(model, folder)
    states, targets = [], []
    for given, said in ((vendor.asked, vendor.said), (vendor.again, vendor.last)):
        before, after = (words.encode(text, add_special_tokens=False) for text in (given, said))
        found = model.model(input_ids=torch.tensor([before + after])).last_hidden_state[0]
        states.append(found[len(before) - 1 : -1])
        targets += after
    x = torch.cat(states).double() / _HIDDEN**0.5
    y = _LOGIT * torch.nn.functional.one_hot(torch.tensor(targets), words.vocab_size).double()
    weight = torch.linalg.solve(x @ x.T + _RIDGE * torch.eye(len(x)), y).T @ x
    model.lm_head.weight.copy_(weight / _HIDDEN**0.5)
    (save_mxfp4 if mxfp4 else save_hf)(model.requires_grad_(False), folder)
    if vendor.stored:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | vendor.stored))


@pytest.fixture(scope="module", params=list(VENDORS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vendor, Server]]:
    folder, vendor = tmp_path_factory.mktemp(request.param), VENDORS[request.param]
    taught(vendor, folder / "model")
    flags = ("--device", "cpu", "--dtype", "float32", "--kv-cache-tokens", "4096", "--max-num-seqs", "2")
    with serving(folder, str(folder / "model"), *flags, "--pack-cache", "off", "--check-integrity") as server:
        yield vendor, server


def answer(served: tuple[Vendor, Server], messages: list[Any], **more: Any) -> Any:
    vendor, server = served
    asked = {"model": "model", "temperature": 0, "max_tokens": 200, "tools": TOOLS, **more}
    extra = {"return_token_ids": True, **vendor.fields}
    return server.client.chat.completions.create(messages=messages, extra_body=extra, **asked)


def check_prompt(served: tuple[Vendor, Server], reply: Any, written: str) -> None:
    """Through the tokenizer both, as SentencePiece's adds spaces."""
    _, server = served
    body = {"model": "model", "prompt": written, "add_special_tokens": False}
    expected = server.http.post("/tokenize", json=body).json()["tokens"]
    found, wanted = (
        server.http.post("/detokenize", json={"model": "model", "tokens": tokens}).json()["prompt"]
        for tokens in (reply.prompt_token_ids, expected)
    )
    assert found == wanted


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def test_calls_and_the_answer_from_their_results(served: tuple[Vendor, Server]) -> None:
    vendor, server = served
    assert "experts: native" in server.output.read_text()
    first = answer(served, [_QUESTION])
    check_prompt(served, first, vendor.asked)
    (called,) = first.choices
    message = called.message
    assert (getattr(message, "reasoning_content", None), message.content) == (vendor.reasoning[0], vendor.content[0])
    assert (calls_of(message), called.finish_reason) == (CALLS[: vendor.calls], "tool_calls")
    assert len({call.id for call in message.tool_calls}) == vendor.calls
    history = message.model_dump(exclude_none=True)
    for call, own in zip(history["tool_calls"], vendor.ids, strict=False):
        assert len(call["id"]) == len(own)
        call["id"] = own
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(history["tool_calls"], RESULTS, strict=False)
    ]
    second = answer(served, [_QUESTION, history, *reversed(results)])
    check_prompt(served, second, vendor.again)
    (last,) = second.choices
    assert getattr(last.message, "reasoning_content", None) == vendor.reasoning[1]
    assert (last.message.content, last.finish_reason) == (vendor.content[1], "stop")
    assert not last.message.tool_calls


def test_streamed(served: tuple[Vendor, Server]) -> None:
    vendor, _ = served
    reasoning = content = ""
    calls: list[list[str]] = []
    reasons = []
    for chunk in answer(served, [_QUESTION], stream=True):
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (reasoning, content) == (vendor.reasoning[0] or "", vendor.content[0] or "")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS[: vendor.calls]
    assert reasons == ["tool_calls"]


def test_forced_calls_fit_their_schema(served: tuple[Vendor, Server]) -> None:
    """By a grammar in the vendor's form, whatever the model would have said; reasoning before it is free."""
    vendor, _ = served
    forced = {"type": "function", "function": {"name": "wait"}}
    if vendor.pre is None:  # what such a token says depends on the one before
        with pytest.raises(openai.BadRequestError, match="text of the tokens is not known"):
            answer(served, [_QUESTION], tool_choice=forced)
        return
    (choice,) = answer(served, [_QUESTION], tool_choice=forced).choices
    ((name, arguments),) = calls_of(choice.message)
    assert name == "wait"
    jsonschema.validate(arguments, TOOLS[1]["function"]["parameters"])
    assert getattr(choice.message, "reasoning_content", None) == vendor.reasoning[0]
