"""Destinations of ``--metrics-to``: ``tensorboard[:DIR]`` and ``wandb[:PROJECT]``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from poprun_py.options.option_types import OptionType, is_word

TENSORBOARD, WANDB = "tensorboard", "wandb"


@dataclass(frozen=True, slots=True)
class MetricsDestination:
    """A tool that stores a run's metrics, and the place where it stores them.

    Attributes:
        tool: The name of the tool, ``tensorboard`` or ``wandb``.
        where: TensorBoard's folder or the project of Weights & Biases; empty for the default.
    """

    tool: str
    where: str = ""

    @classmethod
    def read(cls, text: str) -> MetricsDestination:
        """Return the destination that a text such as ``tensorboard:logs`` describes.

        Raises:
            ValueError: The tool is unknown, or no text follows the colon.
        """
        tool, colon, where = text.partition(":")
        tool = tool.lower()
        if tool not in (TENSORBOARD, WANDB) or (colon and not where.strip()):
            raise ValueError(text)
        return cls(tool, where)

    def __str__(self) -> str:
        return f"{self.tool}:{self.where}" if self.where else self.tool

    def beside(self, folder: Path) -> MetricsDestination:
        """Return this destination; a relative folder of TensorBoard is joined to ``folder``."""
        if self.tool != TENSORBOARD or not self.where:
            return self
        return MetricsDestination(self.tool, str(folder / self.where))


def read_destinations(texts: Iterable[str]) -> tuple[MetricsDestination, ...]:
    """Return the destinations that the values of an option describe, without duplicates."""
    return tuple(map(MetricsDestination.read, dict.fromkeys(texts)))


def _normalised(text: str) -> str:
    return str(MetricsDestination.read(text))


def _is_destination(value: object) -> bool:
    if not is_word(value):
        return False
    try:
        MetricsDestination.read(value)
    except ValueError:
        return False
    return True


METRICS_DESTINATION = OptionType(
    metavar="TOOL[:WHERE]",
    expected="tensorboard, tensorboard:DIR, wandb or wandb:PROJECT",
    read=_normalised,
    accepts=_is_destination,
    keyword="str",
    normalise=_normalised,
)
