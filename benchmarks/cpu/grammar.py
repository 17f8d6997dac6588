"""Grammar libraries at a vocabulary of real size: compile time, masks, and schemas that explode.

    python -m benchmarks.cpu.grammar [--library llguidance|xgrammar] [--rows 32] [--vocabulary 151936]

Each case runs in a child process with limits (10 s of CPU, 2 GiB): what a library has no bound for ends there. A row
writes tokens drawn from its own mask. `step` is the time of all rows' masks, on as many threads as there are CPUs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages import GrammarSpec
from testing.models.vocabulary import vocabulary_of

_CPU_S, _MEMORY_BYTES = 10, 2 << 30
_TOKENS = 100

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string"}}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[str, Any]] = {
    "any object": ("json_schema", {"type": "object"}),
    "person": ("json_schema", _PERSON),
    "list of persons": ("json_schema", {"type": "array", "items": _PERSON, "minItems": 3}),
    "regex": ("regex", r"[0-9]{3}-[0-9]{4}-[a-z]+( [a-zA-Z]{2,12})*"),
    "enum of 50,000": ("json_schema", {"enum": [f"value {i}" for i in range(50_000)]}),
    "3,000 properties": ("json_schema", {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}),
    "8 allOf of 6 anyOf": (
        "json_schema",
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(8)]},
    ),
    "(a?){5000}a{5000}": ("regex", "(a?){5000}a{5000}"),
    "nested {1,100} x 4": ("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    "[ab]*a[ab]{200}": ("regex", "[ab]*a[ab]{200}"),
    "minLength 100,000": ("json_schema", {"type": "string", "minLength": 100_000}),
}


class Library(Protocol):
    """`start` makes a matcher at the beginning. `masks` fills uint32 [rows, ceil(V / 32)], `accept` takes one token."""

    def compile(self, kind: str, text: str) -> Any: ...

    def start(self, compiled: Any) -> Any: ...

    def masks(self, matchers: list[Any], words: NDArray[np.uint32]) -> None: ...

    def accept(self, matcher: Any, token: int) -> None: ...


class LlGuidance:
    """As the engine uses it."""

    def __init__(self, tokens: list[bytes], end: int) -> None:
        from llguidance import LLExecutor

        from engine.grammar.compile import tokenizer_of

        self._tokenizer = tokenizer_of(vocabulary_of(tokens, [end]), [end], len(tokens))
        self._executor = LLExecutor(os.cpu_count())

    def compile(self, kind: Any, text: str) -> Any:
        from engine.grammar.compile import matcher_of

        return matcher_of(GrammarSpec(kind, text), self._tokenizer)

    def start(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def masks(self, matchers: list[Any], words: NDArray[np.uint32]) -> None:
        rows = [(matcher, i) for i, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(rows, words.ctypes.data, words.shape[1] * 4, len(words))
        for matcher in matchers:
            self._check(matcher)

    def accept(self, matcher: Any, token: int) -> None:
        matcher.consume_token(token)
        self._check(matcher)

    @staticmethod
    def _check(matcher: Any) -> None:
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])


class XGrammar:
    def __init__(self, tokens: list[bytes], end: int) -> None:
        import torch
        import xgrammar

        self._torch, self._lib = torch, xgrammar
        info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[end])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=os.cpu_count() or 1, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher()

    def compile(self, kind: str, text: str) -> Any:
        make = {"json_schema": self._compiler.compile_json_schema, "regex": self._compiler.compile_regex}[kind]
        return make(text)

    def start(self, compiled: Any) -> Any:
        return self._lib.GrammarMatcher(compiled)

    def masks(self, matchers: list[Any], words: NDArray[np.uint32]) -> None:
        self._batch.batch_fill_next_token_bitmask(matchers, self._torch.from_numpy(words.view(np.int32)))

    def accept(self, matcher: Any, token: int) -> None:
        if not matcher.accept_token(token):
            raise ValueError("the token was not accepted")


LIBRARIES: dict[str, Callable[[list[bytes], int], Library]] = {"llguidance": LlGuidance, "xgrammar": XGrammar}


def vocabulary(size: int) -> list[bytes]:
    """Every byte, then words, pieces of words with a space, punctuation, digits and other scripts; the end last."""
    rng = random.Random(0)
    tokens = {bytes([byte]): None for byte in range(256)}
    while len(tokens) < size - 1:
        word = "".join(rng.choice("etaoinshrdlucmfwygpbvkxqjz") for _ in range(rng.randint(2, 10)))
        kind = rng.random()
        if kind < 0.5:
            word = " " + word
        elif kind < 0.6:
            word = word.capitalize()
        elif kind < 0.7:
            word = "".join(rng.choice("!\"#$%&'()*+,-./:;<=>?[]^_{|}~ \n") for _ in range(rng.randint(2, 5)))
        elif kind < 0.8:
            word = "".join(chr(rng.choice((0x4E00, 0x400, 0x3040)) + rng.randrange(80)) for _ in range(3))
        tokens[word.encode()] = None
    return [*tokens, b"<|end|>"]


def run_case(name: str, kind: str, value: Any, library: Library, rows: int, words: int, end: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + _CPU_S,) * 2)
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    compiled = library.compile(kind, text)
    compile_s = time.perf_counter() - start
    matchers = [library.start(compiled) for _ in range(rows)]
    mask: NDArray[np.uint32] = np.zeros((len(matchers), words), np.uint32)
    rng, seconds = np.random.default_rng(0), []
    for _ in range(_TOKENS):
        start = time.perf_counter()
        library.masks(matchers, mask)
        seconds.append(time.perf_counter() - start)
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
        drawn = [int(rng.choice(np.flatnonzero(row))) for row in bits]
        going = [(matcher, token) for matcher, token in zip(matchers, drawn, strict=True) if token != end]
        if not going:
            break
        for matcher, token in going:
            library.accept(matcher, token)
        matchers = [matcher for matcher, _ in going]
        mask = mask[: len(matchers)].copy()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) / 1024
    return (
        f"{name:22} compile {1e3 * compile_s:8.1f} ms   step: median "
        f"{1e3 * statistics.median(seconds):7.2f} ms, worst {1e3 * max(seconds):7.1f} ms   +{grown:5.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, default="llguidance")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    args = parser.parse_args()
    tokens = vocabulary(args.vocabulary)
    forks = multiprocessing.get_context("fork")
    for name, (kind, value) in CASES.items():
        receive, send = forks.Pipe(duplex=False)

        def work(name: str = name, kind: str = kind, value: Any = value, send: Any = send) -> None:
            library = LIBRARIES[args.library](tokens, len(tokens) - 1)
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES + _mapped_bytes(),) * 2)
            try:
                send.send(run_case(name, kind, value, library, args.rows, -(-len(tokens) // 32), len(tokens) - 1))
            except Exception as error:  # noqa: BLE001 - a library's errors are what is measured
                send.send(f"{name:22} {type(error).__name__}: {str(error)[:80]!r}")

        child = forks.Process(target=work)
        start = time.perf_counter()
        child.start()
        send.close()
        try:
            line = receive.recv()
        except EOFError:
            line = f"{name:22} killed after {time.perf_counter() - start:.1f} s"
        child.join()
        print(line, flush=True)


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
