"""A process that speaks the engine's wire without a model: it echoes prompts, and misbehaves when asked to.

The output is the prompt's tokens in order (an adapter "reverse" reverses them), then an end-of-sequence token.
Adapters with names of their own misbehave: "slow" (50 ms a token), "gated" (its last token, and its end, wait
for the gate), "die" (the process ends after two tokens),
"refuse" (429 for prompts over two tokens, else no answer), "fail" (Failed after two tokens), "silent" (no answer at
all), "burst" (all tokens at once), "say" (the output is the last message of a user: what stands between
"<|im_start|>user\n" and "<|im_end|>", tokens 1 and 2 of the tests' tokenizer), "garbage" (a frame that is no message),
"hang" (a step that never ends).
FAKE_ENGINE holds JSON: {"log": path of an NDJSON file of all messages received, "fatal": message, "start_gate",
"load_gate", "gate" and "tuning_gate": paths of files that a start, loads of adapters, "gated" and the fourth step of
each tuning run wait for, "vocab_size", "max_model_len", "eos"}. A tuning run learns nothing: its loss falls with its
steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import msgspec
import zmq

from engine import messages as m
from engine.heartbeat import Heartbeat
from engine.tuning import Batch, OpenRun, OptimStep, SaveRun, Tuned

STEP_S = 0.0003  # long enough for a client to go away before a long answer has ended


def last_message(prompt: list[int]) -> list[int]:
    start, end = ([i for i, token in enumerate(prompt) if token == mark] for mark in (1, 2))
    return prompt[start[-2] + 1 + len("user\n") : end[-1]]


class Running:
    def __init__(self, submit: m.Submit, eos: int) -> None:
        self.submit = submit
        tokens = list(reversed(submit.prompt)) if submit.adapter == "reverse" else list(submit.prompt)
        if submit.adapter == "say":
            tokens = last_message(submit.prompt)
        if submit.sampling.ignore_eos:
            tokens = (tokens * (submit.sampling.max_tokens // len(tokens) + 1))[: submit.sampling.max_tokens]
        self.tokens = tokens
        self.position = 0
        self.next_s = time.monotonic()

    @property
    def at_last(self) -> bool:
        return self.position >= min(len(self.tokens), self.submit.sampling.max_tokens) - 1


class FakeEngine:
    def __init__(self, config: dict, address: str, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self.config = config
        self.options = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
        self.vocab_size = self.options.get("vocab_size", 400)
        self.max_model_len = self.options.get("max_model_len", 2048)
        self.eos = self.options.get("eos", 0)
        self.log = open(self.options["log"], "a") if "log" in self.options else None  # noqa: SIM115
        self.socket = zmq.Context().socket(zmq.DEALER)
        self.socket.bind(address)
        self.running: dict[str, Running] = {}
        self.adapters: dict[str, m.AdapterInfo] = {}
        self.draining: tuple[int, float] | None = None
        self.steps = 0
        self.tuned: dict[str, int] = {}  # steps of each tuning run
        self.held: list[m.Tune] = []  # for the tuning gate

    def send(self, message: m.FromEngine) -> None:
        self.socket.send(m.encode(message))

    def is_open(self, gate: str) -> bool:
        return gate in self.options and Path(self.options[gate]).exists()

    def note(self, message: object) -> None:
        if self.log is not None:
            line = {"pid": os.getpid(), "t": time.monotonic(), "type": type(message).__name__}
            print(json.dumps({**line, **msgspec.to_builtins(message, str_keys=True)}), file=self.log, flush=True)

    def add_adapter(self, name: str, path: str, version: int = 1, pinned: bool = False) -> m.AdapterInfo:
        uid = len(self.adapters) + 1
        info = m.AdapterInfo(name, path, uid, version, "fake", 8, 1000, [], pinned)
        self.adapters[name] = info
        return info

    def serve(self) -> None:
        self.send(m.Planned(lines=["memory plan: fake"]))
        for done in range(3):
            self.send(m.Loading(stage="weights", done=done + 1, total=3))
        while "start_gate" in self.options and not self.is_open("start_gate"):
            time.sleep(0.01)
        if "fatal" in self.options:
            self.send(m.FatalError(message=self.options["fatal"], user=True))
            sys.exit(1)
        self.send(
            m.Ready(
                model_name=self.config.get("served_model_name") or Path(self.config["model"]).name,
                vocab_size=self.vocab_size,
                max_model_len=self.max_model_len,
                bos_token_id=None,
                eos_token_ids=[self.eos],
                lines=["memory plan: fake", "note: fake"],
                memory=[
                    m.PlannedMemory(
                        "CPU",
                        limit_bytes=16 << 30,
                        free_bytes=12 << 30,
                        items=[
                            m.PlannedItem("experts", "experts <b>", 6 << 30),
                            m.PlannedItem("kv_cache", "KV cache", 2 << 30),
                        ],
                    )
                ],
            )
        )
        advanced = False
        while True:
            if self.socket.poll(0 if advanced else 2 if self.running or self.draining or self.held else 1000):
                while self.socket.poll(0):
                    self.receive(m.decode_to_engine(self.socket.recv()))
            with self.heartbeat.working():
                advanced = self.step()
            if advanced:
                time.sleep(STEP_S)

    def receive(self, message: m.ToEngine) -> None:
        self.note(message)
        match message:
            case m.Submit(adapter="refuse") if len(message.prompt) > 2:
                self.send(
                    m.Refused(
                        request_id=message.request_id,
                        status=429,
                        code="queue_full",
                        message="the queue is full",
                        retry_after_s=3,
                    )
                )
            case m.Submit(adapter="garbage"):
                self.socket.send(b"no message")
            case m.Submit() if message.adapter is not None and message.adapter not in self.adapters:
                self.send(
                    m.Refused(request_id=message.request_id, status=404, code="unknown_adapter", message="no adapter")
                )
            case m.Submit():
                self.running[message.request_id] = Running(message, self.eos)
            case m.Abort():
                if self.running.pop(message.request_id, None):
                    self.send(m.Cancelled(request_id=message.request_id, reason="client"))
            case m.StopFound():
                if running := self.running.pop(message.request_id, None):
                    self.finish(running, "stop", message.num_tokens)
            case m.LoadAdapter():
                self.load(message)
            case m.UnloadAdapter():
                self.adapters.pop(message.name)
                self.send(m.Reply(call_id=message.call_id, ok=True))
            case m.GetStats():
                stats = {"running": len(self.running), "waiting": 0, "blocks": {"total": 10, "free": 9}}
                self.send(m.Reply(call_id=message.call_id, ok=True, stats=stats))
            case m.GetLive():
                self.send(m.Reply(call_id=message.call_id, ok=True, live=self.live()))
            case m.Tune(order=OptimStep()) if "tuning_gate" in self.options and self.tuned[message.run] == 3:
                self.held.append(message)
            case m.Tune():
                self.tune(message)
            case m.Drain():
                self.draining = (message.call_id, time.monotonic() + message.timeout_s)
            case m.Shutdown():
                sys.exit(0)

    def live(self) -> m.Live:
        rows = [
            m.LiveRow(
                request_id=request_id,
                tenant=running.submit.tenant,
                adapter=running.submit.adapter,
                prompt_tokens=len(running.submit.prompt),
                cached_tokens=0,
                computed_tokens=len(running.submit.prompt) + running.position,
                output_tokens=running.position,
                max_tokens=running.submit.sampling.max_tokens,
                blocks=1,
            )
            for request_id, running in self.running.items()
        ]
        return m.Live(
            time_s=time.monotonic(),
            waiting=0,
            steps=self.steps,
            prefill_tokens=0,
            decode_tokens=self.steps,
            block_tokens=16,
            blocks_total=10,
            blocks_used=len(rows),
            blocks_cached=1,
            rows=rows,
            tenant_service={row.tenant: float(row.output_tokens) for row in rows},
            weight_bytes_read=self.steps << 24 if "read_bandwidth" in self.options else None,
            read_bandwidth=self.options.get("read_bandwidth"),
            experts_touched=3 * self.steps,
            expert_layers=2 * self.steps,
            expert_choices={0: [self.steps, 0, 1], 1: [0, 0, self.steps]},
        )

    def tune(self, message: m.Tune) -> None:
        metrics: dict[str, float] = {}
        match message.order:
            case OpenRun():
                self.tuned[message.run] = 0
                metrics = {"hidden_size": 64.0}
            case Batch(samples=samples):
                targets = float(sum(len(sample.targets) for sample in samples))
                metrics = {"loss": targets * 3 / (1 + self.tuned[message.run]), "hits": targets / 2, "targets": targets}
            case OptimStep():
                self.tuned[message.run] += 1
            case SaveRun(state=state, adapter=adapter):
                for folder in filter(None, (state, adapter)):
                    os.makedirs(folder, exist_ok=True)
        self.send(m.Reply(call_id=message.call_id, ok=True, tuned=Tuned(metrics)))

    def load(self, message: m.LoadAdapter) -> None:
        call = message.call_id
        while "load_gate" in self.options and not self.is_open("load_gate"):
            time.sleep(0.01)
        made_up = len(message.path) == 2 or message.path.startswith("/fake/")
        if not made_up and not os.path.exists(message.path):  # False, whatever the path holds
            error = f"{message.path[-200:]}: no such folder"
            self.send(m.Reply(call_id=call, ok=False, error=error, field="lora_path", status=400))
        elif message.name in self.adapters and not message.replace:
            self.send(m.Reply(call_id=call, ok=False, error="already loaded", field="lora_name", status=409))
        else:
            old = self.adapters.get(message.name)
            info = self.add_adapter(message.name, message.path, old.version + 1 if old else 1, message.pinned)
            self.send(m.Reply(call_id=call, ok=True, adapter=info))
            self.send(m.AdapterMoved(name=message.name, residency="host"))

    def step(self) -> bool:
        """Whether any request came further."""
        self.steps += 1
        if self.held and self.is_open("tuning_gate"):
            for order in self.held:
                self.tune(order)
            self.held.clear()
        advanced = False
        now = time.monotonic()
        for request_id, running in list(self.running.items()):
            adapter = running.submit.adapter
            if adapter in ("silent", "refuse") or now < running.next_s:
                continue
            if adapter == "gated" and running.at_last and not self.is_open("gate"):
                continue
            if adapter == "slow":
                running.next_s = now + 0.05
            while adapter == "hang":
                time.sleep(0.1)
            advanced = True
            if running.position == 2 and adapter == "die":
                os._exit(3)
            if running.position == 2 and adapter == "fail":
                del self.running[request_id]
                self.send(m.Failed(request_id=request_id, message="a fault of the fake"))
                continue
            self.advance(running)
            while adapter == "burst" and request_id in self.running:
                self.advance(running)
        if self.draining and (not self.running or now > self.draining[1]):
            for request_id in self.running:
                self.send(m.Cancelled(request_id=request_id, reason="shutdown"))
            self.running.clear()
            self.send(m.Reply(call_id=self.draining[0], ok=True))
            self.draining = None
        return advanced

    def advance(self, running: Running) -> None:
        submit, sampling = running.submit, running.submit.sampling
        first = running.position == 0
        prompt_logprobs = None
        if first and sampling.prompt_logprobs is not None:
            scored = [self.logprobs(token, sampling.prompt_logprobs) for token in submit.prompt[1:]]
            prompt_logprobs = [None, *scored]
        token = running.tokens[running.position] if running.position < len(running.tokens) else self.eos
        ended = token == self.eos and not sampling.ignore_eos
        if ended or token in sampling.stop_token_ids:
            self.running.pop(submit.request_id)
            if prompt_logprobs is not None:
                self.send(m.Tokens(request_id=submit.request_id, tokens=[], prompt_logprobs=prompt_logprobs))
            self.finish(running, "stop", running.position, token)
            return
        running.position += 1
        logprobs = None if sampling.logprobs is None else [self.logprobs(token, sampling.logprobs)]
        self.send(
            m.Tokens(
                request_id=submit.request_id,
                tokens=[token],
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                cached_tokens=len(submit.prompt) // 16 * 16 if first else 0,
            )
        )
        if running.position == sampling.max_tokens:
            self.running.pop(submit.request_id)
            self.finish(running, "length", running.position)

    def logprobs(self, token: int, count: int) -> m.TokenLogprobs:
        top = [m.Logprob((token + i) % self.vocab_size, -0.25 * (i + 1), i + 1) for i in range(count)]
        return m.TokenLogprobs(m.Logprob(token, -0.25, 1), top)

    def finish(self, running: Running, reason: str, output_tokens: int, stop_token: int | None = None) -> None:
        scored = running.submit.sampling.logprobs
        self.send(
            m.Finished(
                request_id=running.submit.request_id,
                reason=reason,
                prompt_tokens=len(running.submit.prompt),
                output_tokens=output_tokens,
                cached_tokens=len(running.submit.prompt) // 16 * 16,
                stop_token=stop_token,
                stop_logprobs=None if scored is None or stop_token is None else self.logprobs(stop_token, scored),
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("path", nargs="?")
    parser.add_argument("--config-json", required=True)
    parser.add_argument("--address")
    parser.add_argument("--heartbeat")
    args, more = parser.parse_known_args()
    config = json.loads(args.config_json)
    if args.command == "serve":
        heartbeat = Heartbeat(Path(args.heartbeat))
        heartbeat.start()
        FakeEngine(config, args.address, heartbeat).serve()
    else:
        print(json.dumps({"command": args.command, "path": args.path, "config": config, "more": more}))
        sys.exit(7 if args.path == "bad" else 0)


if __name__ == "__main__":
    main()
