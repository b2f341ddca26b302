"""The program of a job: what is run for the word that was typed, is it there, and what it reads.

Looks at files of this machine and starts nothing. Whether other hosts have it is decided in
hosts/host_checks.py.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from poprun_py.errors import StartError, UsageError

__all__ = ["require_program", "resolve_program", "standard_input"]


def resolve_program(program: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words that are run: a program that ends in ``.py`` runs under this Python."""
    if program and program[0].endswith(".py"):
        # Python would take a name such as -train.py for an option of its own.
        script = f"./{program[0]}" if program[0].startswith("-") else program[0]
        return (sys.executable, script, *program[1:])
    return program


def require_program(program: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Refuse a program that is not there, before anything starts.

    Raises:
        UsageError: no program is given.
        StartError: it does not exist, or cannot be run.
    """
    if not program or not program[0]:
        raise UsageError("no program given: expected poprun-py [options] program [arguments]")
    try:
        folder = Path.cwd()
    except OSError:
        raise StartError("the working folder was deleted; change to one that exists") from None
    script = program[1] if program[0] == sys.executable and len(program) > 1 else ""
    try:
        problem = _problem_of_script(script, folder) if script.endswith(".py") else ""
        if problem:
            raise StartError(f"program {script} {problem}")
        path = shutil.which(program[0], path=environ.get("PATH"))
        problem = _problem_of_interpreter(path) if path else _problem(program[0])
        if problem:
            raise StartError(f"program {program[0]!r} {problem}")
    except OSError as error:
        name = script or program[0]
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        raise StartError(f"program {shown!r} cannot be run: {error.strerror}") from None


def _problem_of_script(script: str, folder: Path) -> str:
    """Return what is wrong with a Python script; nothing if it is there."""
    # Python runs a folder too, if it has a __main__.py.
    if Path(script).is_file() or Path(script, "__main__.py").is_file():
        return ""
    if Path(script).is_dir():
        return "is a folder"
    return f"does not exist in {folder}"


def _problem_of_interpreter(path: str) -> str:
    """Return what is wrong with the ``#!`` line of a script: the kernel only says No such file."""
    try:
        with Path(path).open("rb") as file:
            line = file.readline(256)
    except PermissionError:
        return ""  # may be run and not be read
    words = line.removeprefix(b"#!").rstrip(b"\n").strip(b" \t").split(b" ")
    interpreter = os.fsdecode(words[0])
    if not line.startswith(b"#!") or not interpreter or Path(interpreter).exists():
        return ""
    hint = "; its lines end as on Windows" if interpreter.endswith("\r") else ""
    return f"cannot be run: its interpreter {interpreter!r} does not exist{hint}"


def _problem(name: str) -> str:
    """Return why the program ``name`` cannot be run."""
    if "/" not in name:
        return "was not found on PATH; a program in this folder is ./NAME"
    if Path(name).is_dir():
        return "is a folder"
    return "is not executable" if Path(name).exists() else "was not found"


def standard_input() -> dict[str, str]:
    """Return where an instance of this machine finds the launcher's standard input.

    A terminal stays mpirun's, and so does what cannot be opened a second time: sockets, files of
    which a part was read, another user's pipe.
    """
    path = f"/proc/{os.getpid()}/fd/0"
    try:
        mode = os.fstat(0).st_mode
        is_fresh = stat.S_ISREG(mode) and os.lseek(0, 0, os.SEEK_CUR) == 0
        if not (is_fresh or stat.S_ISFIFO(mode) or (stat.S_ISCHR(mode) and not os.isatty(0))):
            return {}
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return {}
    return {"POPRUN_STDIN": path}
