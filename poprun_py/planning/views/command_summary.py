"""Summary of an mpirun command in few lines, for the log of -v."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from popdist_py.errors import counted
from poprun_py.planning.mpi_commands import split_command
from poprun_py.planning.views.command_text import Words, command_options

# The options of mpirun whose value is a variable, in Open MPI and in MPICH.
_VARIABLE_OPTIONS = {"-x", "-env", "-genv"}
# At most this many instances have a line of their own.
_MOST_LINES = 4


def command_summary(command: Sequence[str]) -> str:
    """Return an mpirun command as text with few lines, in which each variable stands only once.

    The first line has the options for all parts of the command. A second line has the options,
    variables and program that the instances share. Then each instance has a line with its own
    options and variables.
    """
    parts = [command_options(words) for words in split_command(command)]
    options, program = parts[0]
    start = next((n for n, (name, *_) in enumerate(options) if name in ("-np", "-n")), len(options))
    first = [shlex.join(_flat(options[:start])), "(-vv logs the whole command)"]
    own_options = [options[start:], *(each for each, _ in parts[1:])]
    shared = [each for each in own_options[0] if all(each in other for other in own_options)]
    of_all = f"{_text(shared)} {shlex.join(_user_program(program))}".strip()
    lines = [" ".join(first), f"  every instance: {of_all}"]
    if len(parts) > 1:
        for index, given in enumerate(own_options[:_MOST_LINES]):
            own = [each for each in given if each not in shared]
            lines.append(f"  instance {index}: {_text(own)}")
        if (left := len(parts) - _MOST_LINES) > 0:
            lines.append(
                f"  and {counted(left, 'more instance')}, which differ in the same options"
            )
    return "\n".join(lines)


def _flat(options: Sequence[Words]) -> list[str]:
    return [word for option in options for word in option]


def _text(options: Sequence[Words]) -> str:
    """Return options of mpirun as text, and variables without the option that sets them."""
    shown = [each[1:] if each[0] in _VARIABLE_OPTIONS else each for each in options]
    return shlex.join(_flat(shown))


def _user_program(words: Words) -> Words:
    """Return the words of the user's program, which follow the wrapper in a part of a command."""
    return words[words.index("--") + 1 :] if "--" in words else words
