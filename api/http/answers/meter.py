"""What one answer counts for: metrics, its tenant's limits, the usage log."""

from __future__ import annotations

import time

from api.http.metrics import Metrics
from api.logs import current_request
from api.tenants.limits import Ticket
from api.tenants.usage import UsageLog
from api.tracing import Tracing, current_trace


class Meter:
    """Made when the answer is asked for. `billed_prompt`: tokens; a prompt with several answers is billed once."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        tenant: str = "default",
        model: str = "",
        billed_prompt: int = 0,
        ticket: Ticket | None = None,
        usage: UsageLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._metrics = metrics
        self._labels = tenant, model
        self._billed_prompt = billed_prompt
        self._ticket = ticket
        self._usage = usage
        self._tracing = tracing
        self._request, self._trace = current_request.get(), current_trace.get()
        self._began = self._last = time.monotonic()
        self._ttft_s: float | None = None
        self._itl = metrics.itl.labels(tenant)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request to its first token."""
        return self._ttft_s

    def delivered(self, tokens: int, queued_s: float) -> None:
        """So many output tokens have come. `queued_s`: what of the time before the first was spent in the queue."""
        now = time.monotonic()
        since_last = now - self._last
        if self._ticket is not None:
            self._ticket.delivered(tokens)
        if self._ttft_s is None and tokens:
            tenant, _ = self._labels
            self._ttft_s = now - self._began
            self._metrics.ttft.labels(tenant).observe(self._ttft_s)
            self._metrics.queue.labels(tenant).observe(queued_s)
            tokens, since_last = tokens - 1, 0.0  # those that came with the first
        if tokens:
            self._itl.observe(since_last / tokens, tokens)
        self._last = now

    def ended(self, outcome: str, *, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Called once."""
        tenant, model = self._labels
        seconds = time.monotonic() - self._began
        ran = outcome != "refused"
        if self._ticket is not None:
            self._ticket.end(ran=ran)
        label = self._metrics.model_label(model)
        self._metrics.requests(outcome, tenant, label).inc()
        self._metrics.total.labels(tenant).observe(seconds)
        if ran:
            self._metrics.prompt_tokens(tenant, label).inc(prompt_tokens)
            self._metrics.cached_tokens(tenant, label).inc(cached_tokens)
            self._metrics.output_tokens(tenant, label).inc(output_tokens)
        if self._tracing is not None:
            attributes: dict[str, str | int | float] = {
                "gen_ai.request.model": model,
                "gen_ai.response.finish_reasons": outcome,
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": output_tokens,
                "ktserve.tenant": tenant,
                "ktserve.cached_tokens": cached_tokens,
                "ktserve.request_id": self._request or "",
            }
            if self._ttft_s is not None:
                attributes["ktserve.time_to_first_token_s"] = self._ttft_s
            self._tracing.answer(seconds, self._trace, attributes)
        if self._usage is not None:
            self._usage.write(
                {
                    "time": time.time(),
                    "request_id": self._request,
                    "tenant": tenant,
                    "model": model,
                    "outcome": outcome,
                    "prompt_tokens": self._billed_prompt if ran else 0,
                    "cached_tokens": min(cached_tokens, self._billed_prompt) if ran else 0,
                    "output_tokens": output_tokens,
                    "seconds": round(seconds, 6),
                    "ttft_s": None if self._ttft_s is None else round(self._ttft_s, 6),
                }
            )
