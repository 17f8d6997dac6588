"""Our policy as a request router of Ray Serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.call import Call
from cluster.policy import Affinity, Policy, prefix


class AffinityRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # ray has no types
    """Requests are `Call`s. Serve asks the ranked replicas in turn; one that has no room passes it on."""

    def initialize_state(self, **settings: Any) -> None:
        self._policy = Policy(Affinity(**settings))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._policy.keep([replica.unique_id for replica in self.curr_replicas])
        opened = {name: self._open(replica) for name, replica in by_name.items()}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all are full: do not spin
        call = _call(pending_request)
        ranked = self._policy.rank(opened, *_wanted(call))
        if call is not None:  # a stable order: those that refused it come last
            ranked.sort(key=lambda name: name in call.tried)
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._policy.sent(replica_id.unique_id, *_wanted(_call(pending_request)))

    def _open(self, replica: RunningReplica) -> int:
        """As this router last heard it from the replica, with what it sent since; else none."""
        return int(self.replica_queue_len_cache.get(replica.replica_id) or 0)


def _call(pending: PendingRequest | None) -> Call | None:
    return next((each for each in pending.args if isinstance(each, Call)), None) if pending is not None else None


def _wanted(call: Call | None) -> tuple[str, Sequence[bytes]]:
    return ("", ()) if call is None else (call.model, prefix(f"{call.key}\0{call.model}", call.prompt))
