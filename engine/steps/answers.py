"""What is sent of a request: its tokens as they come, then one terminal message."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import Cancelled, Failed, Finished, FromEngine, Refused, TokenLogprobs, Tokens
from engine.steps.base import Launched
from scheduler.plan import Event, EventKind
from scheduler.request import Request


@dataclass(slots=True)
class Answer:
    """What the engine keeps of a request beside the scheduler's own."""

    request: Request
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position
    prompt_logprobs_due: bool = field(init=False)  # even if its very first token ended it
    plain: bool = False  # its messages are tokens and nothing else from now on

    def __post_init__(self) -> None:
        self.prompt_logprobs_due = self.request.sampling.prompt_logprobs is not None

    def tokens(self, event: Event, step: Launched | None) -> Tokens:
        """Those of the event, which came of the step."""
        request, prompt = self.request, None
        if self.prompt_logprobs_due:
            self.prompt_logprobs_due = False
            prompt = [self.prompt_logprobs.get(i) for i in range(len(request.prompt))]
        logprobs = step.logprobs.get(request.request_id) if step is not None and step.logprobs else None
        first, self.plain = len(request.output) <= len(event.tokens), request.sampling.logprobs is None
        return Tokens(
            request_id=request.request_id,
            tokens=event.tokens,
            logprobs=logprobs[: len(event.tokens)] if logprobs and event.tokens else None,
            prompt_logprobs=prompt,
            cached_tokens=request.num_cached if first else 0,
            queued_s=request.queued_s if first else 0.0,
        )


def terminal(event: Event, step: Launched | None) -> FromEngine:
    """The last message of the event's request."""
    request = event.request
    rid = request.request_id
    if event.kind is EventKind.FINISHED:
        return Finished(
            request_id=rid,
            reason=event.reason,
            prompt_tokens=len(request.prompt),
            output_tokens=len(request.output),
            cached_tokens=request.num_cached,
            stop_token=event.stop_token,
            stop_logprobs=_stop_logprobs(event, step),
        )
    if event.kind is EventKind.REFUSED:
        status, code = (503, "adapter_failed") if event.retry_after_s is None else (429, "queue_full")
        return Refused(
            request_id=rid, status=status, code=code, message=event.reason, retry_after_s=event.retry_after_s
        )
    if event.kind is EventKind.CANCELLED:
        return Cancelled(request_id=rid, reason=event.reason)
    return Failed(request_id=rid, message=event.reason)


def _stop_logprobs(event: Event, step: Launched | None) -> TokenLogprobs | None:
    """Of the token that ended a request: it was sampled after those of the event."""
    logprobs = step.logprobs.get(event.request.request_id) if step and event.stop_token is not None else None
    return logprobs[len(event.tokens)] if logprobs else None
