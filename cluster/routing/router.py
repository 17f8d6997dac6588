"""Our policy as a request router of Ray Serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.call import Call
from cluster.routing.policy import Affinity, Policy, prefix


class AffinityRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # ray has no types
    """Requests are `Call`s. Serve asks the ranked replicas in turn; one that has no room passes it on."""

    def initialize_state(self, **settings: Any) -> None:
        self._policy = Policy(Affinity(**settings))
        self._learnt: dict[str, int] = {}  # the number of the last report of each replica
        self._sent: Counter[str] = Counter()  # requests of this router that have not ended, by replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        names = {replica.unique_id for replica in self.curr_replicas}
        self._policy.keep(list(names))
        self._sent = Counter({name: count for name, count in self._sent.items() if name in names})
        for name, replica in by_name.items():
            self._learn(name, replica.routing_stats)
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

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._sent[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Also of one that the replica had no room for, or that could not be sent: then one too few are counted."""
        super().on_request_completed(replica_id, internal_request_id)
        self._sent[replica_id.unique_id] = max(0, self._sent[replica_id.unique_id] - 1)

    def _learn(self, name: str, report: Mapping[str, Any]) -> None:
        """What a replica reported, once each time."""
        if "report" in report and self._learnt.get(name) != report["report"]:
            self._learnt[name] = report["report"]
            self._policy.update_adapters(name, report["slot"], report["host"])

    def _open(self, replica: RunningReplica) -> int:
        """At least what this router sent. Serve's cache has other routers' requests too, but forgets what it has not
        heard again for 10 s, and an answer may take longer."""
        name, heard = replica.replica_id, self.replica_queue_len_cache.get(replica.replica_id)
        return max(self._sent[name.unique_id], int(heard or 0))


def _call(pending: PendingRequest | None) -> Call | None:
    return next((each for each in pending.args if isinstance(each, Call)), None) if pending is not None else None


def _wanted(call: Call | None) -> tuple[str, Sequence[bytes]]:
    return ("", ()) if call is None else (call.model, prefix(f"{call.key}\0{call.model}", call.prompt))
