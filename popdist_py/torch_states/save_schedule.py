"""The class SaveSchedule, which decides where the state after a training step is saved."""

from __future__ import annotations

from popdist_py import heartbeat

__all__ = ["SaveSchedule"]


class SaveSchedule:
    """The numbers of steps between two copies to memory, and between two checkpoints on the disk.

    A program may call ``save()`` after every step or only after some steps. A state is due as soon
    as its step reaches or passes a multiple of the number of steps between two states.

    Args:
        memory_every: The number of steps between two copies to memory; None for no copies.
        disk_every: The number of steps between two checkpoints on the disk.

    Raises:
        ValueError: ``disk_every`` is less than 1.
    """

    def __init__(self, memory_every: int | None, disk_every: int) -> None:
        if disk_every < 1:
            raise ValueError(f"disk_every={disk_every}: expected a number of steps, at least 1")
        self._memory_every = memory_every
        self._disk_every = disk_every
        self._last = 0

    def resume(self, step: int) -> None:
        """Continue after the given number of steps."""
        self._last = step

    def due(self, step: int) -> tuple[bool, bool]:
        """Return whether the state after ``step`` is saved to memory, and to the disk."""
        last, self._last = self._last, step
        to_memory = self._memory_every is not None and _passes(last, step, self._memory_every)
        to_disk = _passes(last, step, self._disk_every) or heartbeat.is_stopping()
        return to_memory, to_disk


def _passes(last: int, step: int, every: int) -> bool:
    return every == 1 or last // every != step // every
