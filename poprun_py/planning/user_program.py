"""The program of a job: the command for the word that was typed, and whether it can be run.

Looks at files of this machine and starts nothing. Whether other hosts have it is decided in
machines/host_checks.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from poprun_py.console import command_name
from poprun_py.errors import StartError, UsageError

# What every instance runs for a function, and the file in the folder of the call that it reads.
_RUN_CALL = str(Path(__file__).resolve().parents[1] / "python_api" / "functions" / "run_call.py")
CALL_FILE = "call"

_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# Before a Python module, for us as for Python.
_MODULE = "-m"


def resolve_program(program: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words that are run: a script or ``-m MODULE`` runs under this Python."""
    if program and program[0] == _MODULE:
        return (sys.executable, *program)
    if program and program[0].endswith(".py"):
        # Python would take a name such as -train.py for an option of its own.
        script = f"./{program[0]}" if program[0].startswith("-") else program[0]
        return (sys.executable, script, *program[1:])
    return program


def absolute_program(
    program: tuple[str, ...], folder: str, environ: Mapping[str, str], *, is_local: bool
) -> tuple[str, ...]:
    """Return the words with the program, or its Python script, as an absolute path.

    The other words are the user's. A bare name of a job on other hosts stays one: each host looks
    for it on its own.
    """
    if not program or not program[0]:
        return program
    name = program[0]
    if "/" not in name and is_local:
        name = shutil.which(name, path=environ.get("PATH")) or name
    first = str(Path(folder, name)) if "/" in name else name
    is_script = first == sys.executable and len(program) > 1 and program[1].endswith(".py")
    script = (str(Path(folder, program[1])),) if is_script else program[1:2]
    return (first, *script, *program[2:])


def require_program(program: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Refuse a program that is not there, before anything starts.

    Raises:
        UsageError: no program is given.
        StartError: it does not exist, or cannot be run.
    """
    if not program or not program[0]:
        raise UsageError(
            f"no program given: expected {command_name()} [options] program [arguments]"
        )
    try:
        folder = Path.cwd()
    except OSError:
        raise StartError("the working folder was deleted; change to one that exists") from None
    script = program[1] if program[0] == sys.executable and len(program) > 1 else ""
    module = program[2] if script == _MODULE and len(program) > 2 else ""
    try:
        problem = _problem_of_script(script, folder) if script.endswith(".py") else ""
        if problem:
            raise StartError(f"program {script} {problem}{_hint(script, environ)}")
        if module and (problem := _problem_of_module(module, folder, environ)):
            raise StartError(f"module {module} {problem}")
        path = shutil.which(program[0], path=environ.get("PATH"))
        problem = _problem_of_interpreter(path) if path else _problem(program[0], environ)
        if problem:
            raise StartError(f"program {program[0]!r} {problem}")
    except OSError as error:
        name = script or program[0]
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        raise StartError(f"program {shown!r} cannot be run: {error.strerror}") from None


def _problem_of_module(module: str, folder: Path, environ: Mapping[str, str]) -> str:
    """Return why ``python -m`` cannot run a module; nothing if it is there.

    Nothing of it is imported: its packages are found one inside the other, in the folders in which
    Python would look.
    """
    # An empty entry is the working folder.
    named = environ["PYTHONPATH"].split(os.pathsep) if environ.get("PYTHONPATH") else []
    search = [*(str(folder / place) for place in named), *sys.path]
    if not environ.get("PYTHONSAFEPATH"):
        search.insert(0, str(folder))
    outer, inside = "", None
    for name in module.split("."):
        if outer and inside is None:
            return f"was not found: {outer} is no package"
        spec = _spec(name, search, is_outermost=not outer)
        if spec is None:
            return f"was not found in {folder} or on the module path of {sys.executable}"
        outer = f"{outer}.{name}" if outer else name
        inside = spec.submodule_search_locations
        if outer != module and _changes_its_path(spec):
            return ""
        search = list(inside or ())
    if inside is not None and _spec("__main__", search) is None:
        return "is a package without __main__.py: name a module in it"
    return ""


def _spec(name: str, search: Sequence[str], *, is_outermost: bool = False) -> ModuleSpec | None:
    """Find one module in folders, or as Python's own finders (of editable installs, say) do."""
    spec = PathFinder.find_spec(name, search)
    for finder in sys.meta_path if is_outermost else ():
        spec = spec or finder.find_spec(name, None)
    return spec


def _changes_its_path(spec: ModuleSpec) -> bool:
    """Tell whether a package may look for its modules elsewhere once it is imported."""
    origin = spec.origin or ""
    return origin.endswith(".py") and b"__path__" in Path(origin).read_bytes()


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


def _problem(name: str, environ: Mapping[str, str]) -> str:
    """Return a text that says why the program ``name`` cannot be run, and what to type instead."""
    if hint := _hint(name, environ):
        return f"was not found{hint}"
    if "/" not in name:
        return "was not found on PATH; a program in this folder is ./NAME"
    if Path(name).is_dir():
        return "is a folder"
    if not Path(name).exists():
        return "was not found"
    shown, interpreter = shlex.quote(name), " ".join(_interpreter(name)) or "sh"
    return f"is not executable: type chmod +x {shown} once, or launch {interpreter} {shown}"


def _interpreter(path: str) -> list[str]:
    """Return the words of a file's ``#!`` line; empty if the file has no such line."""
    try:
        with Path(path).open("rb") as file:
            line = file.readline(256)
    except PermissionError:
        return []
    return os.fsdecode(line).removeprefix("#!").split() if line.startswith(b"#!") else []


def _hint(word: str, environ: Mapping[str, str]) -> str:
    """Return what to type instead of a word that only a shell understands; empty for other words.

    Such a word is a whole command in one pair of quotes, or sets a variable (``NAME=VALUE``).
    """
    if Path(word).exists():
        return ""
    words = word.split()
    first = words[0] if words else ""
    if len(words) == 1 and _SETTING.match(word):
        return (
            f"; a variable is set in front of {command_name()}, or with --env {shlex.quote(word)}"
        )
    is_command = shutil.which(first, path=environ.get("PATH")) or Path(first).is_file()
    if len(words) < 2 or not (is_command or _SETTING.match(first)):
        return ""
    return f"; type a command without quotes around all of it: {command_name()} [options] {word}"


def function_program(folder: Path, name: str) -> tuple[str, ...]:
    """Return the program that makes the call which lies in a folder."""
    return (sys.executable, _RUN_CALL, str(folder), name)


def call_folder(program: tuple[str, ...]) -> Path | None:
    """Return the folder of the call that a program makes; None for every other program."""
    return Path(program[2]) if program[1:2] == (_RUN_CALL,) and len(program) == 4 else None


def short_name(program: tuple[str, ...]) -> str:
    """Return what people call a program: its script, behind an interpreter too, or its module."""
    if call_folder(program) is not None:
        return f"{program[3]}()"
    scripts = (word for word in program[:3] if word.endswith((".py", ".sh")))
    if "-m" in program[:2]:
        return " ".join(program[program.index("-m") :][:2])
    return next(scripts, program[0]).rpartition("/")[2]
