"""The command of a job's program, and checks before the launch that the program can run.

machines/host_checks.py checks whether other hosts have the program.
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

from poprun_py.errors import StartError, UsageError, shortened
from poprun_py.terminal import command_name

# The script that every instance runs if a Python function is launched instead of a program.
_RUN_CALL = str(Path(__file__).resolve().parents[1] / "python_api" / "functions" / "run_call.py")
# The name of the file that contains the pickled call of a launched function.
CALL_FILE = "call"

_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# Python's option to run a module.
_MODULE = "-m"


def resolve_program(program: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that runs ``program``, which may be a Python script or ``-m MODULE``.

    Scripts and modules run with the Python interpreter that runs the launcher.
    """
    if program and program[0] == _MODULE:
        return (sys.executable, *program)
    if program and program[0].endswith(".py"):
        # Without ./ in front, Python would take a script name such as -train.py for an option.
        script = f"./{program[0]}" if program[0].startswith("-") else program[0]
        return (sys.executable, script, *program[1:])
    return program


def absolute_program(
    program: tuple[str, ...], folder: str, environ: Mapping[str, str], *, is_local: bool
) -> tuple[str, ...]:
    """Return the command ``program`` with absolute paths of the program and its Python script.

    If the job runs on other hosts (``is_local`` is False), a program name without a folder stays
    unchanged, because each host searches its own PATH for the program.
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
    """Check before the launch that the program can be run.

    Raises:
        UsageError: No program is given.
        StartError: The program does not exist or cannot be run, or the working folder was deleted.
    """
    if not program or not program[0]:
        raise UsageError(
            f"no program is given; expected {command_name()} [options] program [arguments]"
        )
    try:
        folder = Path.cwd()
    except OSError:
        raise StartError("the working folder was deleted; change to an existing folder") from None
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
        raise StartError(f"program {shortened(name)!r} cannot be run: {error.strerror}") from None


def _problem_of_module(module: str, folder: Path, environ: Mapping[str, str]) -> str:
    """Return a text that says why ``python -m`` cannot run ``module``; empty if Python can.

    The module is searched where Python would search the module, but it is not imported.
    """
    # An empty entry in PYTHONPATH stands for the working folder.
    named = environ["PYTHONPATH"].split(os.pathsep) if environ.get("PYTHONPATH") else []
    search = [*(str(folder / place) for place in named), *sys.path]
    if not environ.get("PYTHONSAFEPATH"):
        search.insert(0, str(folder))
    outer, inside = "", None
    for name in module.split("."):
        if outer and inside is None:
            return f"was not found: {outer} is not a package"
        spec = _spec(name, search, is_outermost=not outer)
        if spec is None:
            return f"was not found in {folder} or on the module path of {sys.executable}"
        outer = f"{outer}.{name}" if outer else name
        inside = spec.submodule_search_locations
        if outer != module and _changes_its_path(spec):
            return ""
        search = list(inside or ())
    if inside is not None and _spec("__main__", search) is None:
        return "is a package without __main__.py; give the name of a module in the package"
    return ""


def _spec(name: str, search: Sequence[str], *, is_outermost: bool = False) -> ModuleSpec | None:
    """Find the module ``name`` in the folders ``search``.

    The finders of editable installs are also used for an outermost package or module.
    """
    spec = PathFinder.find_spec(name, search)
    for finder in sys.meta_path if is_outermost else ():
        spec = spec or finder.find_spec(name, None)
    return spec


def _changes_its_path(spec: ModuleSpec) -> bool:
    """Tell whether importing a package may change the package's search path for submodules."""
    origin = spec.origin or ""
    return origin.endswith(".py") and b"__path__" in Path(origin).read_bytes()


def _problem_of_script(script: str, folder: Path) -> str:
    # Python can also run a folder if the folder contains a file __main__.py.
    if Path(script).is_file() or Path(script, "__main__.py").is_file():
        return ""
    if Path(script).is_dir():
        return "is a folder"
    return f"does not exist in {folder}"


def _problem_of_interpreter(path: str) -> str:
    """Return an error text if the ``#!`` line of a file names a missing interpreter; else empty.

    The kernel would report only "No such file or directory", without the interpreter's name.
    """
    interpreter = next(iter(_interpreter(path)), "")
    if not interpreter or Path(interpreter).exists():
        return ""
    hint = "; the file has Windows line ends" if interpreter.endswith("\r") else ""
    return f"cannot be run: its interpreter {interpreter!r} does not exist{hint}"


def _problem(name: str, environ: Mapping[str, str]) -> str:
    if hint := _hint(name, environ):
        return f"was not found{hint}"
    if "/" not in name:
        return "was not found on PATH; write a program in this folder as ./NAME"
    if Path(name).is_dir():
        return "is a folder"
    if not Path(name).exists():
        return "was not found"
    shown, interpreter = shlex.quote(name), " ".join(_interpreter(name)).strip() or "sh"
    return f"is not executable: type chmod +x {shown} once, or launch {interpreter} {shown}"


def _interpreter(path: str) -> list[str]:
    """Return the words of the ``#!`` line of a file; empty if the file has no ``#!`` line."""
    try:
        with Path(path).open("rb") as file:
            line = file.readline(256)
    except PermissionError:
        return []  # A program may be executable without being readable.
    return os.fsdecode(line[2:]).strip(" \t\n").split(" ") if line.startswith(b"#!") else []


def _hint(word: str, environ: Mapping[str, str]) -> str:
    """Return a hint if ``word`` is ``NAME=VALUE`` or a whole command in one pair of quotes.

    If ``word`` is anything else, or the path of an existing file, return an empty text.
    """
    if Path(word).exists():
        return ""
    words = word.split()
    first = words[0] if words else ""
    if len(words) == 1 and _SETTING.match(word):
        return (
            f"; to set a variable, write it before {command_name()}, or use --env "
            f"{shlex.quote(word)}"
        )
    is_command = shutil.which(first, path=environ.get("PATH")) or Path(first).is_file()
    if len(words) < 2 or not (is_command or _SETTING.match(first)):
        return ""
    return (
        f"; give the command without quotes around all of its words: {command_name()} [options] "
        f"{word}"
    )


def function_program(folder: Path, name: str) -> tuple[str, ...]:
    """Return the command that makes the pickled call of a function that ``folder`` contains."""
    return (sys.executable, _RUN_CALL, str(folder), name)


def call_folder(program: tuple[str, ...]) -> Path | None:
    """Return the folder of the pickled call that ``program`` makes; None for other programs."""
    return Path(program[2]) if program[1:2] == (_RUN_CALL,) and len(program) == 4 else None


def short_name(program: tuple[str, ...]) -> str:
    """Return a short name of the script, module, function or program that a command runs."""
    if call_folder(program) is not None:
        return f"{program[3]}()"
    scripts = (word for word in program[:3] if word.endswith((".py", ".sh")))
    if "-m" in program[:2]:
        return " ".join(program[program.index("-m") :][:2])
    return next(scripts, program[0]).rpartition("/")[2]
