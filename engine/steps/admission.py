"""From a submitted message to a request in the queue, or the reason why not."""

from __future__ import annotations

from engine.errors import UserError
from engine.grammar.grammars import Grammars
from engine.lora.adapters import Adapters
from engine.messages import Refused, Submit
from engine.steps.limits import check_sampling
from scheduler.plan import AdmissionError, Event
from scheduler.request import BASE, Request
from scheduler.scheduler import Scheduler


class RefusalError(Exception):
    """`answer` is what the client gets."""

    def __init__(
        self, m: Submit, status: int, code: str, text: str, field: str | None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(text)
        self.answer = Refused(
            request_id=m.request_id, status=status, code=code, message=text, field=field, retry_after_s=retry_after_s
        )


def admit(
    m: Submit, scheduler: Scheduler, adapters: Adapters, grammars: Grammars, vocabulary: int, now: float
) -> tuple[Request, Event | None]:
    """The request, which waits now, and the end of another one whose place it took. `vocabulary`: token ids there are.
    Raises RefusalError."""
    wrong = [token for token in m.prompt if not 0 <= token < vocabulary]
    if not m.prompt or wrong:
        text = f"token id {wrong[0]} is outside 0..{vocabulary - 1}" if wrong else "the prompt has no tokens"
        raise RefusalError(m, 400, "invalid_tokens", text, "prompt")
    try:
        check_sampling(m.sampling, scheduler.config.eos_token_ids, vocabulary)
        if m.grammar is not None:
            grammars.check(m.grammar, m.sampling)
    except UserError as error:
        raise RefusalError(m, 400, "invalid_sampling", str(error), error.field) from None
    try:
        request = Request(
            m.request_id,
            m.prompt,
            m.sampling,
            BASE if m.adapter is None else adapters.resolve(m.adapter),
            m.tenant,
            m.priority,
            None if m.timeout_s is None else now + m.timeout_s,
            m.background,
            cache_salt=m.cache_salt,
            cache_group=m.cache_group,
            opening_tokens=m.opening_tokens,
            system_tokens=m.system_tokens,
            part_ends=m.part_ends,
        )
        return request, scheduler.add(request, now, m.tenant_weight, m.max_waiting)
    except UserError as error:
        raise RefusalError(m, 404, "unknown_adapter", str(error), "model") from None
    except AdmissionError as error:
        status = 429 if error.code == "queue_full" else 400
        long = error.code == "too_long"
        code = "context_length_exceeded" if long else error.code
        raise RefusalError(m, status, code, str(error), "prompt" if long else None, error.retry_after_s) from None
