"""What every scheduler test checks beside its own: sums that are kept equal those that are counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scheduler.batching.missing import Missing


@pytest.fixture(autouse=True, scope="package")
def counted_sums() -> Iterator[None]:
    total = Missing.total

    def checked(self: Missing) -> int:
        kept = total(self)
        assert kept == sum(self.of(request) for _, _, request in self._core.running)
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Missing, "total", checked)
        yield
