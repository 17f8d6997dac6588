"""A fine-tuning file of OpenAI's form, checked whole and made into the samples of a run. Torch-free.

`python -m ktserve tuning-data JSON`, started by the api: a line of JSON on stdout says what became of the file. Samples
go into OUT.samples, each example's one behind the other as msgpack, and where each begins into OUT.index.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from api.text.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.tuning import Sample
from training.data.files import Row, read_rows
from training.data.formats import conversation, preference
from training.data.info import Source
from training.data.render import Renderer
from training.errors import DataError

_MOST_ERRORS = 20
_FIELDS = {
    "supervised": ({"messages", "tools"}, {"messages"}),
    "dpo": ({"input", "preferred_output", "non_preferred_output"},) * 2,
}
_INPUT = {"messages", "tools"}


class DataJob(msgspec.Struct, frozen=True):
    """`path`: of a .jsonl file; `longest`: tokens of a text; `method`: "supervised" or "dpo"."""

    model: str
    path: str
    out: str
    method: str
    longest: int
    gguf: str | None = None
    chat_template: str | None = None
    trust_control_tokens: bool = False


class DataReport(msgspec.Struct, frozen=True):
    """`tokens`: of all texts; `learnt`: of those that the loss counts. `errors` begin with the line; nothing is written
    if there is one."""

    examples: int = 0
    tokens: int = 0
    learnt: int = 0
    errors: list[str] = []


def main(arguments: list[str]) -> int:
    """Prints a DataReport."""
    job = msgspec.json.decode(arguments[0], type=DataJob)
    os.nice(10)  # requests come first
    try:
        report = build(job)
    except UserError as error:
        report = DataReport(errors=[_named(str(error), job.path)])
    print(msgspec.json.encode(report).decode(), flush=True)
    return 0


def build(job: DataJob) -> DataReport:
    """UserError for a tokenizer or a file that cannot be read."""
    template = Path(job.chat_template) if job.chat_template else None
    tokenizer = load_tokenizer(Path(job.model), Path(job.gguf) if job.gguf else None, template)
    renderer = Renderer(tokenizer, {}, trust_control_tokens=job.trust_control_tokens)
    errors: list[str] = []

    def bad(error: UserError) -> None:
        errors.append(_named(str(error), job.path))

    index, tokens, learnt = array("Q", [0]), 0, 0
    partial = Path(f"{job.out}.samples")
    with partial.open("wb") as file:
        for row in read_rows(Path(job.path), bad):
            try:
                for example in _examples(row, job, renderer):
                    file.write(msgspec.msgpack.encode(example))
                    index.append(file.tell())
                    tokens += sum(len(sample.tokens) for sample in example)
                    learnt += sum(sum(map(bool, sample.numbers["weights"])) for sample in example)
            except DataError as error:
                bad(error)
            if len(errors) >= _MOST_ERRORS:
                break
        os.fsync(file.fileno())
    if not errors and len(index) == 1:
        errors.append("the file has no examples")
    if errors:
        partial.unlink()
        return DataReport(errors=errors)
    with Path(f"{job.out}.index").open("wb") as file:
        index.tofile(file)
        os.fsync(file.fileno())
    return DataReport(len(index) - 1, tokens, learnt)


def _examples(row: Row, job: DataJob, renderer: Renderer) -> Iterator[list[Sample]]:
    known, needed = _FIELDS[job.method]
    _check_fields(row.data, known, needed, row.error)
    if job.method == "supervised":
        for text in renderer.conversation(conversation(row, Source("file", Path(job.path), "openai"))):
            yield [_sample(text.ids, text.learnt, job.longest, row)]
        return
    given = row.data["input"]
    if not isinstance(given, dict):
        raise row.error("input: an object with messages is expected")
    _check_fields(given, _INPUT, {"messages"}, lambda message: row.error(f"input: {message}"))
    answers = {"chosen": row.data["preferred_output"], "rejected": row.data["non_preferred_output"]}
    flat = Row({**given, **answers}, row.where)
    pair = renderer.pair(preference(flat, Source("file", Path(job.path), "openai", ranking=True)))
    yield [
        _sample(pair.prompt + answer, [False] * len(pair.prompt) + [True] * len(answer), job.longest, row)
        for answer in (pair.chosen, pair.rejected)
    ]


def _check_fields(data: dict[str, Any], known: set[str], needed: set[str], error: Callable[[str], DataError]) -> None:
    if unknown := sorted(set(data) - known):
        raise error(f"unknown field {unknown[0][:80]!r}; fields: {', '.join(sorted(known))}")
    if missing := sorted(needed - set(data)):
        raise error(f"the field {missing[0]!r} is missing")


def _sample(ids: list[int], learnt: list[bool], longest: int, row: Row) -> Sample:
    """Of a text: each token's target is the next one."""
    if len(ids) - 1 > longest:
        raise row.error(f"messages: {len(ids) - 1} tokens; at most {longest} can be trained on (--training-tokens)")
    return Sample(ids[:-1], ids[1:], {"weights": [float(counts) for counts in learnt[1:]]})


def _named(message: str, path: str) -> str:
    """With the line alone, not the file's place on this machine."""
    return message.replace(f"{path}:", "line ", 1) if message.startswith(f"{path}:") else message.replace(path, "file")
