"""Descriptions of the commands, from their click declarations, without a layout.

The manual pages and the reference on the site use these descriptions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from poprun_py.command.compare import COMPARE
from poprun_py.command.jobs import JOBS
from poprun_py.command.pods.graphcore_tools import GC_INFO, GC_MONITOR
from poprun_py.command.pods.pod_command import COMMAND as POD
from poprun_py.command.report import REPORT
from poprun_py.command.runs import RUNS
from poprun_py.command.scale import SCALE
from poprun_py.command.stop import STOP

__all__ = ["FILES", "LAUNCHER", "Described", "Paragraph", "described", "shared_options"]

# Programs of their own, and the commands of poprun-py.
FILES = {"poprun-py-pod": POD, "gc-info": GC_INFO, "gc-monitor": GC_MONITOR}
_OF_LAUNCHER = (JOBS, STOP, RUNS, REPORT, COMPARE, SCALE)
LAUNCHER = {f"poprun-py {command.name}": command for command in _OF_LAUNCHER}
# click marks paragraphs whose lines must not be joined.
_KEPT = "\b"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of a description; the lines of a kept paragraph are not joined."""

    text: str
    is_kept: bool


@dataclass(frozen=True)
class Described:
    """The usage, the description and the options of a command."""

    name: str
    usage: str
    paragraphs: tuple[Paragraph, ...]
    options: tuple[tuple[str, str], ...]


def described(
    name: str, command: click.Command, parent: click.Context | None = None
) -> Iterator[Described]:
    """Yield a command and all commands below it."""
    # With the settings of the command, such as the short name -h of --help.
    context = click.Context(command, parent, name, **command.context_settings)
    records = (
        param.get_help_record(context)
        for param in command.get_params(context)
        if isinstance(param, click.Option)
    )
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    options = tuple(record for record in records if record)
    yield Described(name, usage, tuple(_paragraphs(command.help or "")), options)
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            below = command.get_command(context, word)
            if below is not None:
                yield from described(f"{name} {word}", below, context)


def shared_options(commands: Sequence[Described]) -> tuple[tuple[str, str], ...]:
    """Return the options of most of the commands, which a page describes only once."""
    counts = Counter(option for each in commands for option in each.options)
    return tuple(option for option, count in counts.items() if count > len(commands) / 2 > 1)


def _paragraphs(text: str) -> Iterator[Paragraph]:
    for block in text.strip().split("\n\n"):
        lines = block.strip("\n").splitlines()
        if lines[0].strip() == _KEPT:
            yield Paragraph("\n".join(line.rstrip() for line in lines[1:]), is_kept=True)
        else:
            yield Paragraph(" ".join(" ".join(lines).split()), is_kept=False)
