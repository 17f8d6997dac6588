"""Requests and tokens a minute, and how many at a time.

A bucket starts full with a minute's worth and refills steadily. What a request is sure to take, its prompt and the
`max_tokens` it names, is taken when it is admitted; what it did not use comes back at its end. Output beyond that
(no `max_tokens` named) is taken as it is delivered, if need be as a debt: nothing new is admitted before it is repaid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from api.errors import ApiError, bad_request
from api.tenants.record import Tenant

_BUSY_RETRY_S = 1.0  # when one of the tenant's own requests ends is not known


class Bucket:
    """Level, in [.., capacity]; below 0 is debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = per_minute
        self._level = float(per_minute)
        self._now = now

    def resize(self, per_minute: int, now: float) -> None:
        self.level(now)
        self.capacity = per_minute
        self._level = min(self._level, per_minute)

    def level(self, now: float) -> float:
        self._level = min(self.capacity, self._level + max(0.0, now - self._now) * self.capacity / 60)
        self._now = max(self._now, now)
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Until so much could be taken, if nobody else takes any; 0: now."""
        return max(0.0, amount - self.level(now)) * 60 / self.capacity

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def refund(self, amount: float, now: float) -> None:
        self._level = min(self.capacity, self.level(now) + amount)


class _Account:
    """What a tenant has taken."""

    def __init__(self) -> None:
        self.open = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def follow(self, tenant: Tenant, now: float) -> None:
        """The limits may have been changed."""
        self.requests = _sized(self.requests, tenant.requests_per_minute, now)
        self.tokens = _sized(self.tokens, tenant.tokens_per_minute, now)


def _sized(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    if bucket.capacity != per_minute:
        bucket.resize(per_minute, now)
    return bucket


class Ticket:
    """One answer's part in its tenant's limits. `end` it exactly once; a second call does nothing."""

    def __init__(self, account: _Account, prompt_tokens: int, output_tokens: int, clock: Callable[[], float]) -> None:
        self._account = account
        self._tokens = account.tokens
        self._prompt = prompt_tokens
        self._reserved = output_tokens
        self._delivered = 0
        self._clock = clock
        self._ended = False

    def delivered(self, tokens: int) -> None:
        """So many output tokens more."""
        before = max(self._delivered, self._reserved)
        self._delivered += tokens
        if self._tokens is not None and self._delivered > before:
            self._tokens.take(self._delivered - before, self._clock())

    def end(self, *, ran: bool = True) -> None:
        """`ran` False: the engine did nothing for it."""
        if self._ended:
            return
        self._ended = True
        self._account.open -= 1
        unused = max(0, self._reserved - self._delivered) + (0 if ran else self._prompt)
        if self._tokens is not None:
            self._tokens.refund(unused, self._clock())


class Limits:
    """What tenants have used of their limits: open answers, requests and tokens a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, tenant: Tenant, answers: Sequence[tuple[int, int]]) -> list[Ticket]:
        """A ticket for each answer of a request, given as (prompt tokens to count, output tokens to reserve). Raises
        ApiError: 429 with the time to wait, 400 for a request that never fits."""
        now = self._clock()
        account = self._account(tenant, now)
        need = sum(prompt + output for prompt, output in answers)
        if tenant.max_concurrency is not None and account.open + len(answers) > tenant.max_concurrency:
            most = tenant.max_concurrency
            if len(answers) > most:
                raise bad_request(f"{len(answers)} answers at a time; this key may have {most}", "n")
            raise _refusal(f"{account.open} requests of this key are open, the most are {most}", _BUSY_RETRY_S)
        if account.tokens is not None and need > account.tokens.capacity:
            raise bad_request(
                f"prompt and max_tokens are {need} tokens; this key may have {account.tokens.capacity} a minute",
                "max_tokens",
            )
        for what, bucket, amount in (("requests", account.requests, 1), ("tokens", account.tokens, need)):
            if bucket is not None and (wait_s := bucket.wait_s(amount, now)) > 0:
                raise _refusal(f"the limit of {bucket.capacity} {what} a minute is reached", wait_s)
        if account.requests is not None:
            account.requests.take(1, now)
        if account.tokens is not None:
            account.tokens.take(need, now)
        account.open += len(answers)
        return [Ticket(account, prompt, output, self._clock) for prompt, output in answers]

    def headers(self, tenant: Tenant) -> dict[str, str]:
        """x-ratelimit-*, of the limits that the tenant has."""
        if tenant.requests_per_minute is None and tenant.tokens_per_minute is None:
            return {}
        now = self._clock()
        account = self._account(tenant, now)
        found = {}
        for what, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{what}"] = str(bucket.capacity)
                found[f"x-ratelimit-remaining-{what}"] = str(max(0, int(bucket.level(now))))
                found[f"x-ratelimit-reset-{what}"] = f"{bucket.wait_s(bucket.capacity, now):.3f}s"
        return found

    def keep(self, names: Iterable[str]) -> None:
        """Forget idle tenants other than these."""
        kept = set(names)
        self._accounts = {name: a for name, a in self._accounts.items() if name in kept or a.open}

    def _account(self, tenant: Tenant, now: float) -> _Account:
        account = self._accounts.setdefault(tenant.name, _Account())
        account.follow(tenant, now)
        return account


def _refusal(message: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)
