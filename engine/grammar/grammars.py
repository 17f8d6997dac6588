"""All grammars of an engine: compiled on threads, kept by text, followed by requests.

    open -> (compiled already | COMPILING -> Compiled | CompileFailed) -> prefetch, a step after the other -> close

All methods belong to the engine's thread. Steps never wait for a compiler: a request whose grammar is being compiled
waits in the queue. The masks of a step are computed on other threads while the model is.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from engine.errors import EngineError, KtserveError, UserError
from engine.grammar.compile import matcher_of, tokenizer_of
from engine.grammar.mask import Ahead, GrammarMask, all_ones, fill
from engine.messages import GrammarSpec, SetVocabulary
from scheduler.plan import StepPlan
from scheduler.request import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_COMPILERS = 2
_MASK_THREADS = 8
_CACHED = 128  # grammars
_CACHED_CHARACTERS = 2**22  # of their texts

_Key = tuple[str, str]  # kind and text


@dataclass(frozen=True)
class Compiled:
    request_id: str


@dataclass(frozen=True)
class CompileFailed:
    request_id: str
    error: KtserveError


@dataclass
class _Compiling:
    future: Future[LLMatcher]
    masks: dict[str, GrammarMask] = field(default_factory=dict)  # of the requests that wait for it


class Grammars:
    """Compiles the grammars of requests on threads, keeps those last used, and fills rows' masks ahead of sampling."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size, self._eos_token_ids = vocab_size, tuple(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._unserved = "the text of the tokens is not known"  # why there is none
        self._executor: LLExecutor | None = None
        self._spaces = frozenset[int]()
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar-compile")
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._cache: OrderedDict[_Key, LLMatcher] = OrderedDict()  # at their beginning, the last used one last
        self._compiling: dict[_Key, _Compiling] = {}
        self._ended: deque[tuple[_Key, _Compiling]] = deque()  # appended to by the compilers
        self._masks: dict[str, GrammarMask] = {}  # by request id

    def set_vocabulary(self, vocabulary: SetVocabulary) -> None:
        """Before the first grammar."""
        if not self._eos_token_ids:
            self._unserved = "the model names no end token"
            return
        if find_spec("llguidance") is None:
            self._unserved = "the package llguidance is not installed"
            return
        from llguidance import LLExecutor

        self._spaces = frozenset(i for i, token in enumerate(vocabulary.tokens) if token.isspace())
        self._tokenizer = tokenizer_of(vocabulary, self._eos_token_ids, self._vocab_size)
        self._executor = LLExecutor(min(_MASK_THREADS, len(os.sched_getaffinity(0))))

    def check(self, spec: GrammarSpec, sampling: SamplingParams) -> None:
        """Raises UserError for a request that can have no grammar, or not this one's settings."""
        if self._tokenizer is None:
            raise UserError(f"structured output is not served: {self._unserved}", spec.field)
        for token in (spec.after, spec.opens):
            if token is not None and not 0 <= token < self._vocab_size:
                raise UserError(f"token id {token} is outside 0..{self._vocab_size - 1}", spec.field)
        if spec.opens is not None and spec.after is None:
            raise UserError("reasoning that may begin has to end: `opens` needs `after`", spec.field)
        if sampling.ignore_eos:
            raise UserError("ignore_eos and a grammar exclude each other: where it ends, the output does", "ignore_eos")

    def open(self, request_id: str, spec: GrammarSpec) -> tuple[GrammarMask, bool]:
        """A mask for a new request, and whether it can be used at once; else `Compiled` or `CompileFailed` follows."""
        mask, key = GrammarMask(spec.after, spec.opens, self._spaces), (spec.kind, spec.text)
        self._masks[request_id] = mask
        if (compiled := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            mask.matcher = compiled.deep_copy()
            return mask, True
        if (compiling := self._compiling.get(key)) is None:
            assert self._tokenizer is not None  # it was checked
            future = self._compilers.submit(matcher_of, spec, self._tokenizer)
            begun = compiling = self._compiling[key] = _Compiling(future)
            future.add_done_callback(lambda _: self._ended.append((key, begun)))
        compiling.masks[request_id] = mask
        return mask, False

    def close_request(self, request_id: str) -> None:
        """The request has ended. A compilation that nobody waits for any more is not begun."""
        if self._masks.pop(request_id, None) is None:
            return
        for key, compiling in list(self._compiling.items()):
            left = compiling.masks.pop(request_id, None) is not None and not compiling.masks
            if left and compiling.future.cancel():
                del self._compiling[key]

    def events(self) -> list[Compiled | CompileFailed]:
        """What has happened since the last call. Never waits, and costs nothing if nothing has."""
        events: list[Compiled | CompileFailed] = []
        while self._ended:
            key, compiling = self._ended.popleft()
            if compiling.future.cancelled():
                continue
            del self._compiling[key]
            error = compiling.future.exception()
            if error is not None and not isinstance(error, KtserveError):
                error = EngineError(f"the grammar was not compiled: {type(error).__name__}: {error}")
            if error is not None:
                events += [CompileFailed(request_id, error) for request_id in compiling.masks]
                continue
            matcher = compiling.future.result()
            self._keep(key, matcher)
            for request_id, mask in compiling.masks.items():
                mask.matcher = matcher.deep_copy()
                events.append(Compiled(request_id))
        return events

    @property
    def busy(self) -> bool:
        """Whether compilers are at work: `events` will report it."""
        return bool(self._compiling)

    def prefetch(self, plan: StepPlan) -> None:
        """Begin the masks of a step's rows, as far as their tokens are known. Called when the step is launched and,
        for the rows whose last token the step before still had to deliver, when it is sampled."""
        if not self._masks:
            return
        asked = []
        for row in plan.rows:
            mask = self._masks.get(row.request.request_id)
            if mask is None or not row.samples:
                continue
            output = row.request.output
            num_output = row.start + row.num_tokens - len(row.drafts) - len(row.request.prompt)
            known = mask.ahead is not None and (mask.ahead.num_output, mask.ahead.drafts) == (num_output, row.drafts)
            if len(output) == num_output and not known:
                asked.append((mask, list(output), row.drafts))
        if asked:
            self._begin(asked)

    def close(self) -> None:
        """No thread is left. A compilation that has begun is waited for: its limits bound it."""
        self._compilers.shutdown(wait=True, cancel_futures=True)
        self._filler.shutdown(wait=True, cancel_futures=True)

    # ---- inside

    def _begin(self, asked: list[tuple[GrammarMask, list[int], tuple[int, ...]]]) -> None:
        assert self._executor is not None  # there are masks
        words = all_ones(sum(1 + len(drafts) for _, _, drafts in asked), self._vocab_size)
        done = self._filler.submit(fill, self._executor, asked, words)
        row = 0
        for mask, output, drafts in asked:
            mask.ahead = Ahead(len(output), drafts, words[row : row + 1 + len(drafts)], done)
            row += 1 + len(drafts)

    def _keep(self, key: _Key, matcher: LLMatcher) -> None:
        self._cache[key] = matcher
        while len(self._cache) > _CACHED or sum(len(text) for _, text in self._cache) > _CACHED_CHARACTERS:
            self._cache.popitem(last=False)
