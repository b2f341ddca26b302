"""Instances forked from one process that has imported torch, since each import takes two seconds.

``python -S warm_python.py SOCKET PROGRAM ARGS...`` runs the program in a process that the server at
SOCKET forks, with this one's environment, folder, CPUs, stdout and stderr, and ends with its code.
An instance that a signal ends takes the forked process with it, without a warning. Jobs that are
stopped, and jobs whose first failure matters, need instances of their own.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import threading

_MOST_BYTES = 1 << 17  # of a message: an environment, a folder and words


def serve(path: str) -> None:
    """Import torch, then run a program for each connection, until stdin or a signal ends it."""
    import mpi4py  # noqa: F401
    import torch._dynamo  # optimizers import it

    import popdist_py.poptorch  # noqa: F401

    torch.set_num_threads(1)
    # A search for garbage would write to, and so copy, every page that a program shares with this.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> None:
    """Fork the program, and send its exit code; end it when the instance is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(descriptors, **json.loads(told))
    process = os.pidfd_open(pid)
    if process not in select.select([connection, process], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.send(b"%d" % (code if code >= 0 else 128 - code))
    os._exit(0)


def _become(
    descriptors: list[int], environ: dict[str, str], folder: str, cpus: list[int], words: list[str]
) -> None:
    """Run the program as Python runs a script, in the surroundings of an instance."""
    import runpy

    from popdist_py.activities import ledger
    from popdist_py.timeline import spans

    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    os.sched_setaffinity(0, cpus)
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])  # noqa: PTH120
    # To the library this is the program itself, whose import of it reads the environment.
    ledger._is_program = True
    spans._begin_as_asked(os.environ)
    kept = runpy.run_path(words[0], run_name="__main__")
    if "mpi4py.MPI" not in sys.modules:  # else the usual end finalises MPI
        _end_with(kept)
    sys.exit()


def _end_with(kept: dict[str, object]) -> None:
    """End without freeing the program's objects: those of DDP can wait for gloo's threads for ever.

    A program of a process of its own has the start hook, which waits for these threads.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def ask(path: str, words: list[str]) -> int:
    """Have the server run the program; returns its exit code."""
    told = {
        "environ": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "cpus": sorted(os.sched_getaffinity(0)),
        "words": words,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(told).encode()], [1, 2])
        return int(connection.recv(16) or 1)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
