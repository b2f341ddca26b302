"""Runs programs in processes that have torch already: each is a fork of one process.

``python tests/support/forks.py`` reads a JSON list [program, words] a line, runs the program as
Python would, and answers with its exit code, standard output and standard error.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LIMIT = 20  # seconds for a program


class Forks:
    """The side of the test: ``run`` gives what a program's process ended with."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def run(self, program: Path, *words: str) -> subprocess.CompletedProcess:
        """Run ``program`` with its words."""
        self._process.stdin.write(json.dumps([str(program), words]) + "\n")
        self._process.stdin.flush()
        code, output, errors = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess([program, *words], code, output, errors)


@contextmanager
def forks(root: Path, folder: Path) -> Iterator[Forks]:
    """Start the process in ``folder``; afterwards it has ended.

    Importing mpi4py initialises no MPI, which takes a second: no program gets as far as using it.
    """
    process = subprocess.Popen(
        [sys.executable, __file__], cwd=folder, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1",
             "MPI4PY_RC_INITIALIZE": "0"},
    )  # fmt: skip
    with process:
        yield Forks(process)


def _serve() -> None:
    import sklearn.datasets  # noqa: F401
    import torchvision  # noqa: F401

    import popdist_py.poptorch  # noqa: F401

    for line in sys.stdin:
        program, words = json.loads(line)
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                signal.alarm(_LIMIT)
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                _become(program, words)
            _, status = os.waitpid(pid, 0)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it has started
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode())
            print(json.dumps([os.waitstatus_to_exitcode(status), *texts]), flush=True)


def _become(program: str, words: list[str]) -> None:
    """Be the process of ``program``, up to its end."""
    sys.argv = [program, *words]
    sys.path[0] = str(Path(program).parent)
    code = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # as Python does with whatever ends a program
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
