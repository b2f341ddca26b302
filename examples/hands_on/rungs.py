"""The steps of the IPU hands-on session, with the figures of its slides."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RUNGS", "Rung"]


@dataclass(frozen=True)
class Rung:
    """A step of the session, with the figures of its slides; None for a missing figure.

    Attributes:
        name: The name for ``--only``.
        title: The change of this step.
        flags: The words of its command after ``main.py``, without ``--epochs``.
        fits: Whether the run fitted on the IPUs.
        cycles: The cycles of one call.
        received: The MiB that the first IPU got from the host in one call.
        sent: The KiB that the first and the second IPU sent to the host in one call.
        call_seconds: The seconds of a call from the second epoch on.
    """

    name: str
    title: str
    flags: str
    fits: bool
    cycles: int | None = None
    received: float | None = None
    sent: tuple[float, float] | None = None
    call_seconds: float | None = None

    @property
    def rate(self) -> float | None:
        """The images per second in the session; None if a figure is missing."""
        if self.call_seconds is None:
            return None
        words = self.flags.split()
        numbers = (words[words.index(w) + 1] for w in words if w in _FACTORS)
        images = 1
        for number in numbers:
            images *= int(number)
        return images / self.call_seconds


_FACTORS = ("--batch-size", "--gradient-accumulation", "--device-iteration")
_HALF = "--batch-size 64 --precision 16.16"
_LONG = f"{_HALF} --gradient-accumulation 8 --device-iteration 4"
RUNGS = (
    Rung("base", "single precision",
         "--batch-size 64 --precision 32.32 --gradient-accumulation 3", False),
    Rung("half", "half precision",
         f"{_HALF} --gradient-accumulation 3", True, 60_111_417, 4.5, (51.8, 141)),
    Rung("accumulation", "accumulation of 8",
         f"{_HALF} --gradient-accumulation 8", True, 95_653_315, 12.0, (138, 141), 1 / 2.10),
    Rung("iterations", "4 device iterations",
         _LONG, True, 283_021_420, 48.0, (552, 142), 1.88),
    Rung("8-bit", "8-bit I/O",
         f"{_LONG} --eight-bit-io", True, 278_393_266, 24.0, (551, 142), 1 / 1.77),
    Rung("async", "asynchronous loader",
         f"{_LONG} --eight-bit-io --async-dataloader", True, None, None, None, 1 / 2.75),
)  # fmt: skip
