"""Runs programs in forks of one process that has imported torch and the library already.

``python tests/examples/forks.py`` reads one JSON object a line: a program, its arguments and a
folder. It runs the program in that folder as Python would, and answers with a JSON list of its exit
code, standard output and standard error.
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

_LIMIT = 100  # seconds of a program; a test has 120
# An option of PopTorch: finding the fastest way to run replicas takes longer than a few steps.
_IN_A_LOOP = '{"Emulator.replicaExecution": "loop"}'


class Forks:
    """The test's side of the forking process."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def run(self, program: Path, *words: str, folder: Path) -> subprocess.CompletedProcess:
        """Run ``program`` with arguments in ``folder``, to its end."""
        request = {"program": str(program), "words": words, "folder": str(folder)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code, output, errors = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess([program, *words], code, output, errors)


@contextmanager
def forks(root: Path) -> Iterator[Forks]:
    """Start the process, and end it afterwards.

    Importing mpi4py would initialise MPI, which takes a second. The programs that run in forks
    never call MPI, so it is left out.
    """
    process = subprocess.Popen(
        [sys.executable, __file__], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1",
             "MPI4PY_RC_INITIALIZE": "0", "POPTORCH_DEFAULT_OPTIONS": _IN_A_LOOP},
    )  # fmt: skip
    with process:
        yield Forks(process)
        # Processes that the tests have forked may hold the other end of its stdin.
        process.terminate()


def _serve() -> None:
    # jupytext would import a grammar of web addresses, which takes longer than jupytext itself.
    sys.modules["rfc3987_syntax"] = None

    import jupytext  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torchvision  # noqa: F401

    from popdist_py.poptorch.data import accessor

    # A loader's process is forked too. The usual server of processes would import torch again.
    accessor._START_METHODS = dict.fromkeys(accessor._START_METHODS, "fork")
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                signal.alarm(_LIMIT)
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                os.chdir(request["folder"])
                _become(request["program"], request["words"])
            _, status = os.waitpid(pid, 0)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # the processes that the program left behind
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode())
            print(json.dumps([os.waitstatus_to_exitcode(status), *texts]), flush=True)
    os._exit(0)  # the usual end, which frees every object of these modules, takes a second


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
