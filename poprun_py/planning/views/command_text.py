"""Commands of mpirun and of the launcher as text that a user can paste into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.given_options import typed_values
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import FLAG, option_name
from poprun_py.planning.mpi_commands import split_command
from poprun_py.terminal import command_name

Words = tuple[str, ...]

# The options of mpirun that have two values, such as --mca NAME VALUE.
_TWO_VALUES = {"mca", "gmca", "prtemca", "pmixmca", "env", "genv"}
_NEXT_LINE = " \\\n"
_INDENT = "  "
_ONE_LINE = 80


def folded(command: Sequence[str]) -> str:
    """Return an mpirun command as text with one line for each option and the option's values.

    A shell splits the text into exactly the words of ``command``. The lines of each part of the
    command (an app context in Open MPI) are indented.
    """
    lines: list[str] = []
    for part, words in enumerate(split_command(command)):
        options, program = command_options(words)
        counted = next((n for n, option in enumerate(options) if option[0] in ("-np", "-n")), 0)
        for number, option in enumerate(options):
            depth = 0 if not lines else 1 if number <= counted else 2
            separator = ": " if part and not number else ""
            lines.append(_INDENT * depth + separator + shlex.join(option))
        end = program.index("--") + 1 if "--" in program else len(program)
        lines += [
            _INDENT * 2 + shlex.join(words) for words in (program[:end], program[end:]) if words
        ]
    return _NEXT_LINE.join(lines)


def command_options(words: Words) -> tuple[list[Words], Words]:
    """Return the options of one part of an mpirun command, and the words of its program.

    Each option is a tuple with the option's values. The program begins with the wrapper.
    """
    start = _program_start(words)
    return list(_options(words[:start])), words[start:]


def _program_start(words: Sequence[str]) -> int:
    """Return the index of ``PYTHON``, the first word of the wrapper ``PYTHON -I -S FILE --``.

    If ``words`` does not contain the wrapper, return the number of words.
    """
    for number in range(1, len(words)):
        if words[number : number + 2] == ("-I", "-S") and words[number + 3 : number + 4] == ("--",):
            return number - 1
    return len(words)


def _options(words: Sequence[str]) -> Iterator[Words]:
    """Yield each option of a part of an mpirun command as a tuple with the option's values."""
    position = 0
    while position < len(words):
        end = position + 1
        if words[position].startswith("-") and words[position].lstrip("-") in _TWO_VALUES:
            end += 2
        else:
            while end < len(words) and not words[end].startswith("-"):
                end += 1
        yield tuple(words[position:end])
        position = end


def launch_command(config: LaunchConfig) -> str:
    """Return a poprun-py command with all options of ``config``, also those from files.

    The values of --env may be secret, so the command contains only the names of the variables. A
    launcher reads the values of the variables from its environment.
    """
    given = [shlex.join(words) for words in _given(config) if words]
    parts = [command_name(), *given, shlex.join(config.program or ("PROGRAM",))]
    line = " ".join(parts)
    return line if len(line) <= _ONE_LINE else f"{_NEXT_LINE}{_INDENT}".join(parts)


def _given(config: LaunchConfig) -> Iterator[list[str]]:
    """Yield the words of each option that the user gave, once for each value of the option."""
    for name, declared in OPTIONS.items():
        value = getattr(config, name)
        if not declared.saved or not config.is_given(name):
            continue
        if name == "verbosity":
            yield [f"-{'v' * value}"] if value else []
        elif declared.type is FLAG:
            yield [option_name(name)] if value else []
        else:
            for shown in typed_values(config, name):
                # A separate value that begins with a dash would be parsed as an option, so the
                # value is joined to its option with "=".
                is_like_option = shown.startswith("-")
                option = option_name(name)
                yield [f"{option}={shown}"] if is_like_option else [option, shown]
