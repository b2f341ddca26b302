"""Detection of faults in a launch command that was copied from a document, such as a PDF file.

A copied command may contain line breaks, blanks, dashes and commas that are not in the original
command. After an unexpected blank or dash, the command-line parser takes the rest of the command as
the program. This module corrects each fault and parses the rest of the command again, so that one
error message names all faults.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from poprun_py.errors import UsageError
from poprun_py.machines.host_list import are_host_names
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import option_name
from poprun_py.planning.mpi_commands import split_args

# The hyphens, dashes and minus sign that word processors insert in place of "-" and "--".
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
# Python's own long options. If "python3" is followed by any other long option, the name of a script
# is missing in the command.
_PYTHON_OPTIONS = (
    "--check-hash-based-pycs", "--help", "--help-all", "--help-env", "--help-xoptions", "--version",
)  # fmt: skip
# Python's options whose value may be a separate word.
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
# Python's options that are followed by code or by the name of a module instead of a script.
_PROGRAM_OPTIONS = ("-c", "-m")
_MPI_ARGUMENTS = ("mpi_global_args", "mpi_local_args")
_INTERFACES = ("_if_include", "_if_exclude")
_MCA = ("--mca", "-mca", "--prtemca", "--pmixmca", "--omca")
# The pattern of the address of a network, such as 10.3.0.0/16. The pattern also accepts the
# placeholder xxx.xxx.xxx.0/xx, so that commands in documents can be tried with --dry-run.
_NETWORK = re.compile(r"[^./]+(?:\.[^./]+){3}/(?:[12]?\d|3[0-2]|x+)|[^/]*:[^/]*/\d{1,3}")
_CONTINUED = "a backslash continues a line only if it is the line's last character"


def check_pasted_command(config: LaunchConfig) -> None:
    """Raise UsageError if the launch command has faults because of copying from a document."""
    faults = list(_faults(config))
    if len(faults) == 1:
        raise UsageError(faults[0])
    if faults:
        numbered = (f"({number}) {fault}" for number, fault in enumerate(faults, start=1))
        raise UsageError(f"the command has {len(faults)} faults: {'; '.join(numbered)}")


def _faults(config: LaunchConfig) -> Iterator[str]:
    program, host = config.program, config.host
    texts = [
        (config.named(field), text) for field in _MPI_ARGUMENTS for text in getattr(config, field)
    ]
    while (found := _parse_fault(host, program)) is not None:
        # Only a launch command with faults is parsed again, so the parser is imported here.
        from poprun_py.options.command_line import parse

        fault, words = found
        yield fault
        try:
            values = parse(words)
        except UsageError as error:
            yield str(error)
            return
        program, host = tuple(values["program"]), values.get("host")
        texts += [(option_name(f), text) for f in _MPI_ARGUMENTS for text in values.get(f, ())]
    for option, text in texts:
        yield from _network_faults(text, option)
    if fault := _missing_script(program):
        yield fault


def _parse_fault(host: str | None, program: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the fault because of which the parser took an option or a host for the program.

    Return an error text, and the corrected words that belong at the end of the launch command. If
    the launch command has no such fault, return None.
    """
    if not program or not program[0] or _is_program(program[0]):
        return None
    word, rest = program[0], tuple(program[1:])
    if word[:1].isspace():
        meant = word.strip()
        what = (
            "is an option that begins with a blank"
            if meant.startswith("-")
            else "begins with a blank"
        )
        fault = f"program {word!r} {what}: expected {meant or 'no blank'}; {_CONTINUED}"
        return fault, (meant, *rest) if meant else rest
    if word[:1] in _DASHES:
        meant = f"--{word.lstrip(_DASHES)}"
        fault = (
            f"program {word!r} begins with a dash, which documents print in place of hyphens: "
            f"expected two hyphens, {meant}"
        )
        return fault, (meant, *rest)
    return None if host is None else _host_list_fault(host, program)


def _host_list_fault(host: str, program: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return an error text about blanks in a list of hosts, and the words after the host list."""
    parts, rest = [host], list(program)
    while rest and _is_part_of_list(parts[-1], rest[0]):
        parts.append(rest.pop(0))
    if len(parts) == 1:
        return None
    last_names = [part.strip(",").split(",")[-1] for part in parts[:-1]]
    missing = [
        f"{last} and {following.split(',')[0]}"
        for last, (part, following) in zip(last_names, pairwise(parts), strict=True)
        if not part.endswith(",") and not following.startswith(",")
    ]
    commas = f", and no comma between {', '.join(missing)}" if missing else ""
    whole = ",".join(part.strip(",") for part in parts)
    fault = (
        f"--host has a blank after {', '.join(last_names)}{commas}: expected host names separated "
        f"by one comma, without blanks, such as --host {whole}"
    )
    return fault, tuple(rest)


def _is_part_of_list(before: str, word: str) -> bool:
    """Tell whether ``word`` belongs to the list of hosts that ends with the word ``before``."""
    if "," not in f"{before[-1:]}{word}" or word.endswith(".py") or _is_program(word):
        return False
    return are_host_names(word.strip(",").split(","))


def _is_program(word: str) -> bool:
    try:
        is_file = Path(word).exists()
    except OSError:  # The word is too long to be the name of a file.
        is_file = False
    return is_file or shutil.which(word) is not None


def _network_faults(text: str, option: str) -> Iterator[str]:
    try:
        words = split_args(text, option)
    except UsageError:
        return  # MPI arguments with unclosed quotes are reported when the launch plan is made.
    for index, word in enumerate(words):
        if word not in _MCA or len(words) < index + 3:
            continue
        key, value = words[index + 1 : index + 3]
        if not key.endswith(_INTERFACES):
            continue
        for entry in value.removeprefix("^").split(","):
            if entry and ("/" not in entry or _NETWORK.fullmatch(entry)):
                continue
            meant = value.replace(",", ".")
            hint = f"; did you mean {meant}?" if _NETWORK.fullmatch(meant) else ""
            what = f"{entry!r} is not a network" if entry else "an entry is empty"
            yield (
                f"{option}: {key} {value!r}: {what}; expected names of interfaces, or networks "
                f"such as 10.3.0.0/16, separated by commas{hint}"
            )


def _missing_script(program: Sequence[str]) -> str:
    """Return an error text if a ``python`` command has an option of a script but no script."""
    if not program or not _PYTHON.fullmatch(Path(program[0]).name):
        return ""
    words = iter(program[1:])
    for word in words:
        if not word.startswith("-") or word == "-" or word[:2] in _PROGRAM_OPTIONS:
            return ""
        if word in _OPTIONS_WITH_VALUE:
            next(words, None)
        elif word.startswith("--") and word.partition("=")[0] not in _PYTHON_OPTIONS:
            return (
                f"program {program[0]} {word} has no script: {word} is not an option of Python; "
                f"expected a script before {word}, such as {program[0]} train.py {word}"
            )
    return ""
