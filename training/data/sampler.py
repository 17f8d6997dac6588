"""The order of a data set's samples, which goes on where a checkpoint left it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from training.data.packing import shuffled
from training.errors import DataError


class ShuffledSampler:
    """Indices of a data set, each once an epoch, in an order that follows from (seed, epoch). An iteration is what is
    left of the current epoch; the next one is the next epoch."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._epoch = self._position = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next index is of, from 0."""
        return self._epoch + (self._position == self._size and self._size > 0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless that is the current one."""
        if epoch != self.epoch:
            self._epoch, self._position = epoch, 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        self._epoch, self._position = self.epoch, self._position % max(self._size, 1)
        order = shuffled(self._size, self._seed, self._epoch)
        while self._position < self._size:
            self._position += 1
            yield order[self._position - 1]

    def state_dict(self, ahead: int = 0) -> dict[str, int]:
        """Where the data stands. `ahead`: indices that were given out, but not trained on yet."""
        done = self._epoch * self._size + self._position - ahead
        return {"size": self._size, "seed": self._seed, "samples": max(done, 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """DataError if the state is another data set's."""
        if (state["size"], state["seed"]) != (self._size, self._seed):
            raise DataError(
                f"the checkpoint's data is {state['size']} rows with seed {state['seed']}, the configuration's "
                f"{self._size} with seed {self._seed}: resume with the same data, cutoff_len, packing and seed",
                "resume_from_checkpoint",
            )
        self._epoch, self._position = divmod(int(state["samples"]), self._size)
