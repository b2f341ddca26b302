"""Where --metrics-to writes: ``tensorboard``, ``tensorboard:DIR``, ``wandb`` or ``wandb:PROJECT``.

Pure: a text in, a value out. Nothing here looks at folders or packages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from poprun_py.options.option_types import Kind, is_word

TENSORBOARD, WANDB = "tensorboard", "wandb"


@dataclass(frozen=True, slots=True)
class MetricsDestination:
    """A tool that takes a run's numbers, and ``where``: its folder or project; empty for none."""

    tool: str
    where: str = ""

    @classmethod
    def read(cls, text: str) -> MetricsDestination:
        """Read the value of an option.

        Raises:
            ValueError: it names no tool, or nothing stands after the colon.
        """
        tool, colon, where = text.partition(":")
        tool = tool.lower()
        if tool not in (TENSORBOARD, WANDB) or (colon and not where.strip()):
            raise ValueError(text)
        return cls(tool, where)

    def __str__(self) -> str:
        return f"{self.tool}:{self.where}" if self.where else self.tool

    def beside(self, folder: Path) -> MetricsDestination:
        """Return it with its path relative to ``folder``, where the file is that names it."""
        if self.tool != TENSORBOARD or not self.where:
            return self
        return MetricsDestination(self.tool, str(folder / self.where))


def read_destinations(texts: Iterable[str]) -> tuple[MetricsDestination, ...]:
    """Return the destinations that an option's values name, each once."""
    return tuple(map(MetricsDestination.read, dict.fromkeys(texts)))


def _kept(text: str) -> str:
    return str(MetricsDestination.read(text))


def _is_destination(value: object) -> bool:
    if not is_word(value):
        return False
    try:
        MetricsDestination.read(value)
    except ValueError:
        return False
    return True


METRICS_DESTINATION = Kind(
    metavar="TOOL[:WHERE]",
    expected="tensorboard, tensorboard:DIR, wandb or wandb:PROJECT",
    read=_kept,
    accepts=_is_destination,
    keep=_kept,
)
