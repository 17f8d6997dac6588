"""A configuration's data sets, read, rendered, cut and packed. Torch-free.

train, evaluation = build_datasets(config, load_tokenizer(config))
"""

from __future__ import annotations

import hashlib
import logging
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from api.text.tokenizer import Tokenizer
from api.text.tokenizer import load_tokenizer as load_model_tokenizer
from training.config import TrainConfig
from training.data.cutting import cut, kept
from training.data.files import Row, read_rows
from training.data.formats import Conversation, conversation, preference
from training.data.info import Source, find_sources
from training.data.packing import pack, shuffled
from training.data.render import Renderer, Tokens
from training.errors import DataError

IGNORED = -100  # a label that the loss leaves out
Item = dict[str, list[int]]
_log = logging.getLogger("training.data")


@dataclass(frozen=True)
class Sample:
    """Token ids and labels of one text; label `IGNORED` where the loss does not count."""

    ids: array[int]
    labels: array[int]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class PairSample:
    """Token ids of a prompt and of two answers to it."""

    prompt: array[int]
    chosen: array[int]
    rejected: array[int]

    def __len__(self) -> int:
        """Tokens of the longer of its two texts."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))

    @property
    def tokens(self) -> int:
        """Of both texts."""
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected)


@dataclass(frozen=True)
class Report:
    """What became of the rows. `tokens` are those of all samples, of both texts of a pair, `learnt` those that the loss
    counts; `bad` rows of all data sets could not be read."""

    rows: int
    samples: int
    tokens: int
    learnt: int
    dropped: int
    truncated: int
    bad: int = 0

    def __str__(self) -> str:
        text = f"{self.rows} rows, {self.samples} samples, {self.tokens} tokens, the loss counts {self.learnt}"
        text += f"; {self.dropped} too long, left out" if self.dropped else ""
        text += f"; {self.truncated} cut" if self.truncated else ""
        return text + (f"; {self.bad} could not be read, left out" if self.bad else "")


class SampleDataset:
    """Items {input_ids, labels}."""

    def __init__(self, samples: Sequence[Sample], report: Report) -> None:
        self._samples, self.report = samples, report

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Item:
        sample = self._samples[index]
        return {"input_ids": sample.ids.tolist(), "labels": sample.labels.tolist()}

    @property
    def lengths(self) -> list[int]:
        return [len(sample) for sample in self._samples]

    @property
    def digest(self) -> str:
        """The same for the same tokens and labels."""
        return _digest(part for sample in self._samples for part in (sample.ids, sample.labels))


class PackedDataset:
    """Items {input_ids, labels, position_ids, segments} of several samples behind one another. Positions begin at 0 in
    each; `segments` counts them from 0."""

    def __init__(self, samples: Sequence[Sample], rows: Sequence[Sequence[int]], report: Report) -> None:
        self._samples, self._rows, self.report = samples, rows, report

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Item:
        samples = [self._samples[i] for i in self._rows[index]]
        return {
            "input_ids": list(chain.from_iterable(sample.ids for sample in samples)),
            "labels": list(chain.from_iterable(sample.labels for sample in samples)),
            "position_ids": list(chain.from_iterable(range(len(sample)) for sample in samples)),
            "segments": [number for number, sample in enumerate(samples) for _ in range(len(sample))],
        }

    @property
    def lengths(self) -> list[int]:
        return [sum(len(self._samples[i]) for i in row) for row in self._rows]

    @property
    def digest(self) -> str:
        """The same for the same tokens, labels and rows."""
        samples = (part for sample in self._samples for part in (sample.ids, sample.labels))
        return _digest(chain(samples, (array("i", row) for row in self._rows)))


class PreferenceDataset:
    """Items {prompt_ids, chosen_ids, rejected_ids}."""

    def __init__(self, pairs: Sequence[PairSample], report: Report) -> None:
        self._pairs, self.report = pairs, report

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Item:
        pair = self._pairs[index]
        return {
            "prompt_ids": pair.prompt.tolist(),
            "chosen_ids": pair.chosen.tolist(),
            "rejected_ids": pair.rejected.tolist(),
        }

    @property
    def lengths(self) -> list[int]:
        return [len(pair) for pair in self._pairs]

    @property
    def digest(self) -> str:
        """The same for the same tokens."""
        return _digest(part for pair in self._pairs for part in (pair.prompt, pair.chosen, pair.rejected))


def _digest(parts: Iterable[array[int]]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.tobytes())
    return digest.hexdigest()


Dataset = SampleDataset | PackedDataset | PreferenceDataset


def load_tokenizer(config: TrainConfig) -> Tokenizer:
    """The model's tokenizer, with the chat template that `config.template` names. UserError if there is none."""
    template = None if config.template == "auto" else Path(config.template)
    if template is not None and not os.path.isfile(template):
        raise DataError(f"template {template}: no such file", "template")
    return load_model_tokenizer(Path(config.model_name_or_path), chat_template=template)


def build_datasets(config: TrainConfig, tokenizer: Tokenizer) -> tuple[Dataset, Dataset | None]:
    """The data to train on and to evaluate on, of one run (`config.runs()`). Every row is read, checked and tokenised
    now, so that a fault in the last one is found before the first step. DataError names file and line."""
    if config.adapters:
        raise DataError("each adapter has its own data: build_datasets of each of config.runs()", "adapters")
    rows = _Rows(config, tokenizer)
    samples = list(rows.read(config.dataset))
    held: list[_Samples] = []
    if config.eval_dataset:
        held = list(rows.read(config.eval_dataset))
    elif config.val_size:
        samples, held = _split(samples, config)
    train = _dataset(config, samples, packing=config.packing, bad=rows.bad)
    evaluation = _dataset(config, held, packing=False) if held else None
    for name, dataset in (("train", train), ("evaluation", evaluation)):
        if dataset is not None:
            _log.info("%s: %s data: %s", config.adapter_name, name, dataset.report)
    return train, evaluation


@dataclass(frozen=True)
class _Samples:
    """What one row became, within cutoff_len."""

    samples: list[Sample] | list[PairSample]
    dropped: int = 0
    truncated: int = 0


class _Rows:
    """Reads and renders by one configuration."""

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer) -> None:
        variables = {} if config.enable_thinking is None else {"enable_thinking": config.enable_thinking}
        self._config = config
        self.bad = 0  # rows that were left out
        self._renderer = Renderer(tokenizer, variables, trust_control_tokens=not config.split_special_tokens)

    def read(self, names: tuple[str, ...]) -> Iterator[_Samples]:
        """Of each row of the data sets. DataError for one without rows, or if nothing is left of it."""
        for source in find_sources(self._config, names):
            rows = left = 0
            for row in islice(read_rows(source.path, self._leave_out), source.limit):
                try:
                    found = self._pair(row, source) if self._config.stage == "dpo" else self._texts(row, source)
                except DataError as error:
                    self._leave_out(error)
                    continue
                rows, left = rows + 1, left + len(found.samples)
                yield found
            if not rows:
                raise DataError(f"{source.path}: the data set {source.name} is empty", "dataset")
            if not left:
                limit = self._config.cutoff_len
                message = f"all of its {rows} rows are too long for cutoff_len {limit}: raise it"
                raise DataError(f"{source.path}: nothing is left of {source.name}: {message}", "cutoff_len")

    def _leave_out(self, error: DataError) -> None:
        """A row that cannot be read; raises the error if there are more than may be."""
        if self.bad >= self._config.skip_bad_rows:
            raise error
        self.bad += 1
        _log.warning("left out: %s", error)

    def _texts(self, row: Row, source: Source) -> _Samples:
        if source.ranking:
            raise row.error(f"{source.name} has preferences (ranking: true): stage: dpo trains on them")
        read = conversation(row, source)
        tokens = [self._renderer.whole(read)] if self._config.train_on_prompt else list(self._conversation(read))
        kept, dropped, truncated = [], 0, 0
        for sample in tokens:
            ids, learnt = sample.ids, sample.learnt
            if len(ids) > (limit := self._config.cutoff_len):
                self._refuse(row, len(ids))
                ids, learnt = cut(ids, learnt, limit)
                if self._config.overlong == "drop" or not any(learnt[1:]):
                    dropped += 1
                    continue
                truncated += 1
            labels = [token if counts else IGNORED for token, counts in zip(ids, learnt, strict=True)]
            kept.append(Sample(array("i", ids), array("i", labels)))
        return _Samples(kept, dropped, truncated)

    def _conversation(self, read: Conversation) -> Iterator[Tokens]:
        return self._renderer.conversation(read, last_only=self._config.mask_history)

    def _pair(self, row: Row, source: Source) -> _Samples:
        if source.ranking is False and source.formatting is not None:
            raise row.error(f"{source.name} has no preferences (ranking: true is not set): stage: sft trains on it")
        pair = self._renderer.pair(preference(row, source))
        longest = len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))
        prompt, room, truncated = len(pair.prompt), longest, 0
        if longest > self._config.cutoff_len:
            self._refuse(row, longest)
            prompt, room = kept(prompt, longest - prompt, self._config.cutoff_len)
            if self._config.overlong == "drop" or room < 1 or pair.chosen[:room] == pair.rejected[:room]:
                return _Samples([], dropped=1)
            truncated = 1
        parts = pair.prompt[:prompt], pair.chosen[:room], pair.rejected[:room]
        return _Samples([PairSample(*(array("i", ids) for ids in parts))], truncated=truncated)

    def _refuse(self, row: Row, length: int) -> None:
        if self._config.overlong == "error":
            raise row.error(
                f"{length} tokens are more than cutoff_len {self._config.cutoff_len}: raise it, or set overlong: "
                "drop or truncate"
            )


def _split(rows: list[_Samples], config: TrainConfig) -> tuple[list[_Samples], list[_Samples]]:
    """(rest, held out), in the order of the files; all samples of a row are on one side."""
    usable = [row for row in rows if row.samples]
    count = int(config.val_size) if config.val_size >= 1 else max(1, round(config.val_size * len(usable)))
    if count >= len(usable):
        message = f"val_size {config.val_size:g} takes {count} of {len(usable)} rows: none is left to train on"
        raise DataError(message, "val_size")
    held = set(shuffled(len(usable), config.order_seed, 1)[:count])
    sides: tuple[list[_Samples], list[_Samples]] = ([], [])
    for i, row in enumerate(usable):
        sides[i in held].append(row)
    return sides


def _dataset(config: TrainConfig, rows: Sequence[_Samples], *, packing: bool, bad: int = 0) -> Dataset:
    samples = [sample for row in rows for sample in row.samples]
    texts = [sample for sample in samples if isinstance(sample, Sample)]
    pairs = [sample for sample in samples if isinstance(sample, PairSample)]
    learnt = sum(sum(label != IGNORED for label in sample.labels[1:]) for sample in texts)
    learnt += sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
    report = Report(
        rows=len(rows),
        samples=len(samples),
        tokens=sum(map(len, texts)) + sum(pair.tokens for pair in pairs),
        learnt=learnt,
        dropped=sum(row.dropped for row in rows),
        truncated=sum(row.truncated for row in rows),
        bad=bad,
    )
    if config.stage == "dpo":
        return PreferenceDataset(pairs, report)
    if packing:
        return PackedDataset(texts, pack([len(text) for text in texts], config.cutoff_len, config.order_seed), report)
    return SampleDataset(texts, report)
