"""`ktserve engine` that is told what to answer: all of it is real, and the model computes every token, but may choose
only the next one of a script.

SCRIPT is the path of a JSON file: texts by the mark that stands in the prompt. The last mark of a prompt counts; the
answer is its text number N after N turns of the assistant behind it, then its last one again. Requests without tools
(a client's own, for a title or a summary) get the text of WITHOUT_TOOLS; they and prompts without a mark get TITLE if
there is none. PROMPTS is the path of a file that gets each prompt,
a JSON text a line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from api.text.tokenizer import Tokenizer, load_tokenizer
from engine.config import EngineConfig
from engine.launch.assemble import build
from engine.launch.process import EngineProcess
from engine.main import main as engine
from engine.messages import Submit, ToEngine
from scheduler.request import ThinkingBudget

TITLE = "A short title"
WITHOUT_TOOLS = "(no tools)"
TURN = "<|im_start|>assistant\n"
END = "<|im_end|>"
TOOLS = "<tools>"


def answer_to(prompt: str, script: dict[str, list[str]]) -> str:
    """The text that a prompt is answered with."""
    if TOOLS not in prompt:
        return script.get(WITHOUT_TOOLS, [TITLE])[0]
    place, mark = max((prompt.rfind(mark), mark) for mark in script)
    if place < 0:
        return TITLE
    texts, done = script[mark], prompt.count(TURN, place) - 1
    return texts[min(done, len(texts) - 1)]


class ScriptedEngine(EngineProcess):
    """Every request's tokens are forced, as those that close reasoning are."""

    def __init__(self, address: str, heartbeat: str, tokenizer: Tokenizer, script: Path, prompts: Path) -> None:
        super().__init__(address, heartbeat)
        self._tokenizer = tokenizer
        self._script, self._prompts = script, prompts

    def _receive(self, timeout_s: float) -> list[ToEngine]:
        received = super()._receive(timeout_s)
        return [self._scripted(each) if isinstance(each, Submit) else each for each in received]

    def _scripted(self, submit: Submit) -> Submit:
        script: dict[str, list[str]] = json.loads(self._script.read_text())
        prompt = self._tokenizer.decode(submit.prompt, skip_special_tokens=False)
        with self._prompts.open("a") as file:
            print(json.dumps(prompt), file=file)
        text = answer_to(prompt, script)
        end = self._end()
        closing = (*self._tokenizer.encode(text, add_special_tokens=False), end)
        forced = msgspec.structs.replace(submit.sampling, thinking=ThinkingBudget(0, None, end, closing))
        return msgspec.structs.replace(submit, sampling=forced, grammar=None)

    def _end(self) -> int:
        return next(token for token, text in self._tokenizer.control_tokens.items() if text == END)


def main(argv: Sequence[str]) -> int:
    if argv[0] != "serve":
        return engine(list(argv))
    parser = argparse.ArgumentParser()
    for name in ("--config-json", "--address", "--heartbeat"):
        parser.add_argument(name, required=True)
    args = parser.parse_args(argv[1:])
    config = msgspec.json.decode(args.config_json, type=EngineConfig)
    tokenizer = load_tokenizer(Path(config.model))
    files = Path(os.environ["SCRIPT"]), Path(os.environ["PROMPTS"])
    return ScriptedEngine(args.address, args.heartbeat, tokenizer, *files).serve(config, build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
