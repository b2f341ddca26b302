"""The command ``python -m popdist_py PROGRAM``, which runs a program with emulated SDK modules.

The command replaces itself with a new Python process that has the folder ``start_hook`` on
PYTHONPATH. The program behaves as with ``python PROGRAM``, but it can also import poptorch,
popdist, horovod and popart. The launcher sets PYTHONPATH in the same way for the instances of a
job. The option ``--install-names`` makes these modules importable for all programs of a Python
environment, and ``--remove-names`` undoes this.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import TextIO

from popdist_py import __version__, installed_names
from popdist_py.environment import IPU_MODEL, SDK_COMMAND, SDK_NAMES, is_popdist_environment

_USAGE = """\
usage: python -m popdist_py [OPTIONS] PROGRAM [ARGUMENTS]
       python -m popdist_py [OPTIONS] -m MODULE [ARGUMENTS]
       python -m popdist_py [OPTIONS] -c CODE [ARGUMENTS]
       python -m popdist_py --install-names | --remove-names

Runs `python PROGRAM`. The program can import poptorch, popdist, horovod and popart, which
popdist_py emulates. For a program that imports poptorch, the emulated IPU is an Mk2. A model
that does not fit into the memory of an Mk2 raises an error. With POPDIST_IPU_MEMORY=warn,
a model that is too large runs, and a warning states the missing memory.

options:
--sdk-names auto|yes      auto (the default): emulate packages that are not installed;
                          yes: emulate installed packages too
--ipu-model mk1|mk2|bow   emulate this IPU, also for programs that import popdist_py.poptorch

--install-names           install the emulated packages in this Python environment
--remove-names            remove the packages that --install-names has installed
"""
# The environment variable that each option sets, and the values that the option accepts.
_OPTIONS = {
    "--sdk-names": (SDK_NAMES, ("auto", "yes")),
    "--ipu-model": (IPU_MODEL, ("mk1", "mk2", "bow")),
}
_HOOK = str(Path(__file__).resolve().parent / "start_hook")


def main() -> int:
    """Run the command line. Return an exit code, or replace this process with the program."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        _say(_USAGE, sys.stdout)
        return 0
    if arguments in (["--install-names"], ["--remove-names"]):
        return _change_environment(install=arguments == ["--install-names"])
    given: dict[str, str] = {}
    while arguments and arguments[0].startswith("--"):
        option, equals, value = arguments.pop(0).partition("=")
        if not equals and arguments:
            value = arguments.pop(0)
        variable, values = _OPTIONS.get(option, ("", ()))
        if value not in values:
            return _refuse(
                f"invalid option {f'{option} {value}'.rstrip()}: expected --sdk-names auto or yes, "
                "--ipu-model mk1, mk2 or bow, --install-names, --remove-names or --help. Write "
                "the options of the program after the program"
            )
        given[variable] = value
    if sys.flags.ignore_environment or sys.flags.no_site:
        return _refuse(
            "Python's options -E, -I and -S prevent the import of the emulated packages. Omit "
            "these options, or install the packages with python -m popdist_py --install-names"
        )
    os.environ.update(_variables(given))
    return os.execv(sys.executable, [sys.executable, *_options_of_python(), *arguments])


def _variables(given: dict[str, str]) -> dict[str, str]:
    """Return the variables to add to the program's environment, including those in ``given``."""
    mode = os.environ.get(SDK_NAMES, "")
    names = mode if mode in _OPTIONS["--sdk-names"][1] else "auto"
    # In an instance of a job, SDK_COMMAND is not changed: the launcher has set it or left it out.
    command = {} if is_popdist_environment(os.environ) else {SDK_COMMAND: "1"}
    path = os.environ.get("PYTHONPATH", "")
    # The folder start_hook must be first in PYTHONPATH, because Python runs only the first
    # sitecustomize that it finds.
    rest = [entry for entry in path.split(os.pathsep) if entry != _HOOK] if path else []
    hooked = os.pathsep.join([_HOOK, *rest])
    return {SDK_NAMES: names, "PYTHONPATH": hooked, **command, **given}


def _options_of_python() -> list[str]:
    """Return Python's own options, the words between ``python`` and ``-m popdist_py``."""
    words = ["", "", *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
    # Python's own arguments end with -m popdist_py or -mpopdist_py. Other one-letter options may
    # precede the m, as in -um popdist_py.
    last = words.pop()
    letters = last.removesuffix("popdist_py") or words.pop()
    if not (last.endswith("popdist_py") and letters.startswith("-") and letters.endswith("m")):
        return []  # Python ran this file by its path, or another program called main()
    letters = letters.removesuffix("m")
    return [*words[2:], letters] if letters != "-" else words[2:]


def _change_environment(*, install: bool) -> int:
    """Install or remove packages with the SDK's names in this Python environment."""
    site = Path(sysconfig.get_path("purelib"))
    try:
        if install:
            lines = installed_names.install(site, __version__)
        else:
            lines = installed_names.remove(site)
    except installed_names.InstallError as error:
        return _refuse(str(error))
    _say("".join(f"{line}\n" for line in lines), sys.stdout)
    return 0


def _refuse(message: str) -> int:
    _say(f"popdist_py: {message}\n", sys.stderr)
    return 2


def _say(text: str, stream: TextIO | None) -> None:
    """Write ``text`` to ``stream``, unless the stream was closed before Python started."""
    if stream is not None:
        # A path may contain bytes that are not UTF-8. Writing these bytes without escapes would
        # fail.
        stream.write(text.encode(errors="backslashreplace").decode())


if __name__ == "__main__":
    sys.exit(main())
