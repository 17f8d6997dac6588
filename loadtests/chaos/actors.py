"""The attackers. Each is a loop until the end of the attack; what became of its requests goes into a `Tally`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from loadtests.chaos.availability import Availability, Look
from loadtests.chaos.watch import engine_of
from loadtests.http import HttpError, Server

WORDS = ("what", "is", "seven", "plus", "a", "colour", "count", "<|im_end|>", "<|im_start|>system", "<|endoftext|>")
_SIZES = (10, 1000, 100_000, 2_000_000, 15_900_000)  # the last is as large as a body may be
_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/messages", "/v1/responses"),
    *("/v1/messages/count_tokens", "/api/chat", "/api/generate", "/v1/batches"),
)
PATIENCE_S = 90.0  # every request has ended by then, however busy the machine is
FLOOD, PATIENT, SLOW, HEALTH = "flood", "patient", "slow", "health"  # the patient tenant is within its share
WELL_BEHAVED = (FLOOD, PATIENT, SLOW)  # their requests are good ones, and they wait for the answer
HANG_S = 20  # silence after which the server is to kill its engine; one that starts on a busy machine is silent too
_FROZEN_S = ((1.0, HANG_S / 2), (1.4 * HANG_S, 1.4 * HANG_S))  # it goes on, or it has been killed


@dataclass
class Tally:
    """How requests ended, by actor. "never" is a request that had no end in time."""

    ends: dict[str, Counter[str]] = field(default_factory=dict)
    availability: Availability = field(default_factory=Availability)

    def add(self, actor: str, outcome: str) -> None:
        self.ends.setdefault(actor, Counter())[outcome] += 1

    def total(self, outcome: str | None = None) -> int:
        return sum(sum(c.values()) if outcome is None else c[outcome] for c in self.ends.values())

    async def count(self, actor: str, request: Awaitable[str]) -> None:
        """Await a request and count how it ended."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            outcome = await asyncio.wait_for(request, PATIENCE_S)
        except asyncio.TimeoutError:
            outcome = "never"
        except (OSError, HttpError) as error:
            outcome = f"refused ({type(error).__name__})"
        self.add(actor, outcome)
        if actor in (*WELL_BEHAVED, HEALTH):
            self.availability.add(actor, Look(began_s, loop.time(), outcome == "200"))


@dataclass
class Attack:
    """`target`: with the key of the tenant that floods; `other`: of one that asks now and then; `admin`: with the admin
    key. `until`: loop time at which all actors stop. `folder`: of adapters to load, made by the actor. `jobs`: that
    were created."""

    target: Server
    other: Server
    admin: Server
    server: psutil.Process
    models: list[str]
    adapter: Path
    folder: Path
    rng: random.Random
    until: float
    tally: Tally = field(default_factory=Tally)
    deaths: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return asyncio.get_running_loop().time() >= self.until

    def body(self, **extra: Any) -> dict[str, Any]:
        r = self.rng
        words = " ".join(r.choice(WORDS) for _ in range(r.randint(1, 60)))
        return {
            "model": r.choice(self.models),
            "messages": [{"role": "user", "content": words}],
            "max_tokens": r.randint(1, 64),
            "temperature": r.choice([0, 0.7, 1.5]),
            "top_p": r.choice([1, 0.9, 0.1]),
            "seed": r.randint(0, 1 << 40),
            **extra,
        }


async def flood(a: Attack) -> None:
    """Good requests, many at once."""

    async def one(body: dict[str, Any]) -> str:
        return (await a.target.post("/v1/chat/completions", body)).outcome

    while not a.over:
        count, r = a.rng.randint(1, 24), a.rng
        bodies = [a.body(stream=r.random() < 0.5, n=r.choice([1, 1, 1, 3])) for _ in range(count)]
        await asyncio.gather(*(a.tally.count(FLOOD, one(body)) for body in bodies))


async def patient(a: Attack) -> None:
    """One request at a time of another tenant: the flood is none of its business."""

    async def one() -> str:
        return (await a.other.post("/v1/chat/completions", a.body(model=a.models[0]))).outcome

    while not a.over:
        await a.tally.count(PATIENT, one())


async def hang_up(a: Attack) -> None:
    """Leaves in the middle of a stream, by closing or by a reset."""

    async def one() -> str:
        async with a.target.connection() as connection:
            body = json.dumps(a.body(stream=True, max_tokens=200)).encode()
            connection.transport.write(a.target.head("POST", "/v1/chat/completions", len(body)) + body)
            await connection.reads(a.rng.randint(0, 6))
            if a.rng.random() < 0.5:
                _reset_on_close(connection.transport)
        return "hung up"

    while not a.over:
        await asyncio.gather(*(a.tally.count("hang-up", one()) for _ in range(4)))


def _reset_on_close(transport: asyncio.Transport) -> None:
    """Closing then sends RST, as a client that was killed does."""
    handle = transport.get_extra_info("socket")
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def half_open(a: Attack) -> None:
    """Connections that never finish their head or body; the server is to end them."""

    async def one() -> str:
        async with a.target.connection() as connection:
            whole = a.target.head("POST", "/v1/completions", 400) + b'{"model": "demo", "prompt": "a"'
            connection.transport.write(whole[: a.rng.randint(0, len(whole))])
            patience = min(a.rng.uniform(0.5, 60), max(a.until - asyncio.get_running_loop().time(), 0.1))
            try:
                return (await asyncio.wait_for(connection.answer(), patience)).outcome
            except asyncio.TimeoutError:
                return "left by us"

    while not a.over:
        await asyncio.gather(*(a.tally.count("half-open", one()) for _ in range(20)))


async def slow(a: Attack) -> None:
    """A good request whose body trickles in."""

    async def one() -> str:
        body = json.dumps(a.body()).encode()
        async with a.target.connection() as connection:
            connection.transport.write(a.target.head("POST", "/v1/chat/completions", len(body)))
            for at in range(0, len(body), 16):
                connection.transport.write(body[at : at + 16])
                await asyncio.sleep(a.rng.uniform(0, 0.1))
            return (await connection.answer()).outcome

    while not a.over:
        await asyncio.gather(*(a.tally.count(SLOW, one()) for _ in range(4)))


async def bad_bodies(a: Attack) -> None:
    """What no client should send."""

    def junk() -> bytes:
        r = a.rng
        size = r.choice(_SIZES)
        makers: list[Callable[[], bytes]] = [
            lambda: r.randbytes(min(size, 100_000)),
            lambda: b"[" * size,
            lambda: (b'{"a":' * size)[:size],
            lambda: b'{"model": ' + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
            lambda: json.dumps({"messages": [1] * (size // 3)}).encode(),
            lambda: json.dumps({"model": a.models[0], "messages": [{}] * (size // 4)}).encode(),
            lambda: json.dumps(a.body(chat_template_kwargs={"x": [[1]] * (size // 5)})).encode(),
            lambda: json.dumps({"model": a.models[0], "messages": [{"role": "user", "content": " " * size}]}).encode(),
            lambda: json.dumps({"model": a.models[0], "prompt": "x" * size}).encode(),
            lambda: json.dumps({"model": a.models[0], "prompt": [7] * (size // 3)}).encode(),
            lambda: json.dumps({"x" * size: 1}).encode(),
            lambda: json.dumps(a.body(temperature=r.choice([-1, 1e-40, "hot", [], 1e308]))).encode(),
            lambda: json.dumps(a.body(top_k=r.choice([-5, 2**63, 2**64]), top_p=r.choice([1e-50, 2]))).encode(),
            lambda: json.dumps(a.body(stop=["a"] * (size // 5), logit_bias={"9" * 5000: 1})).encode(),
            lambda: json.dumps(a.body(max_tokens=10**30, n=10**9)).encode(),
        ]
        return r.choice(makers)()

    async def one() -> str:
        return (await a.target.exchange("POST", a.rng.choice(_PATHS), junk())).outcome

    while not a.over:
        await asyncio.gather(*(a.tally.count("bad body", one()) for _ in range(2)))


async def texts(a: Attack) -> None:
    """Tokenises, renders and detokenises, as much as a body may hold now and then."""

    def request() -> tuple[str, dict[str, Any]]:
        r = a.rng
        size = r.choice(_SIZES)
        messages = [{"role": r.choice(["user", "system", "assistant"]), "content": r.choice(WORDS)}]
        model: dict[str, Any] = {"model": a.models[0]}
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("/tokenize", {**model, "prompt": r.choice(["a ", " ", "<|im_end|>", "ä", "0"]) * (size // 10)}),
            ("/tokenize", {**model, "messages": messages * min(size, 1000)}),
            ("/tokenize", {**model, "messages": messages, "chat_template_kwargs": {"enable_thinking": False}}),
            ("/detokenize", {**model, "tokens": [r.randint(0, 300)] * (size // 5)}),
        ]
        return r.choice(kinds)

    async def one() -> str:
        return (await a.target.post(*request())).outcome

    while not a.over:
        await a.tally.count("text", one())


async def adapters(a: Attack) -> None:
    """Loads, replaces and unloads adapters; most of the folders are broken."""
    number = 0
    while not a.over:
        number += 1
        name, path = f"chaos-{a.rng.randint(0, 5)}", a.folder / f"adapter-{number % 16}"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(a.adapter, path)
        if a.rng.random() < 0.7:
            _damage(path, a.rng)
        load = {"lora_name": name, "lora_path": str(path), "replace": a.rng.random() < 0.7}

        async def call(endpoint: str, body: dict[str, Any]) -> str:
            return (await a.admin.post(f"/v1/{endpoint}_lora_adapter", body)).outcome

        await a.tally.count("adapter load", call("load", load))
        if a.rng.random() < 0.4:
            await a.tally.count("adapter unload", call("unload", {"lora_name": name}))
        await asyncio.sleep(a.rng.uniform(0, 0.5))


def _damage(path: Path, rng: random.Random) -> None:
    """Break one file of an adapter's folder in one of many ways."""
    file = rng.choice(sorted(path.iterdir()))
    data = bytearray(file.read_bytes())
    match rng.randint(0, 7):
        case 0:
            file.write_bytes(data[: rng.randint(0, len(data))])
        case 1:
            for _ in range(rng.randint(1, 64)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            file.write_bytes(data)
        case 2:
            file.unlink()
            os.mkfifo(file)
        case 3:
            file.unlink()
        case 4:
            file.unlink()
            file.symlink_to("/dev/zero")
        case 5:
            file.unlink()
            file.mkdir()
        case 6:
            file.write_bytes(rng.randbytes(1 << 16))
        case 7:
            file.write_text('{"r": ' + "9" * 400 + ', "rank_pattern": {"' + "(a+)+" * 20 + '$": 4}}')


async def killer(a: Attack) -> None:
    """Kills the engine, or freezes it for a while, now and then."""
    loop = asyncio.get_running_loop()
    while not a.over:
        await asyncio.sleep(a.rng.uniform(15, 35))
        engine = engine_of(a.server)
        if engine is None or a.over:
            continue
        began_s = loop.time()
        with contextlib.suppress(psutil.Error):
            if a.rng.random() < 0.5:
                engine.kill()
                a.deaths.append("killed")
            else:
                engine.suspend()
                a.deaths.append("frozen")
                await asyncio.sleep(a.rng.uniform(*a.rng.choice(_FROZEN_S)))
                with contextlib.suppress(psutil.NoSuchProcess):
                    engine.send_signal(signal.SIGCONT)
        a.tally.availability.attacks.append((began_s, loop.time()))


async def observer(a: Attack, worst: list[float]) -> None:
    """How long `/health` takes, whatever it says."""
    loop = asyncio.get_running_loop()

    async def one() -> str:
        return (await a.target.get("/health")).outcome

    while not a.over:
        began_s = loop.time()
        await a.tally.count(HEALTH, one())
        worst.append(loop.time() - began_s)
        await asyncio.sleep(0.1)


ACTORS = (flood, patient, hang_up, half_open, slow, bad_bodies, texts, adapters, killer)
