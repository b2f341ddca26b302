"""Servers of pods for tests: in a thread of the test, and in processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

import pytest
from support.repository import ROOT

from poprun_py.command.pods.pod_server import LeaseExtender, PodServer, listen
from poprun_py.command.pods.server_api import make_application

TOKEN = "a-token-of-more-than-16-characters"


@contextlib.contextmanager
def served(store, *, seconds=30.0, idle_seconds=20.0, log=None, access_log=None):
    """Serve a store in a thread; yield the port."""
    lines = [] if log is None else log
    application = make_application(
        store, TOKEN, seconds=seconds, log=lines.append, access_log=access_log
    )
    with listen("127.0.0.1", 0) as listener:
        extender = LeaseExtender(lambda _: None, seconds)
        server = PodServer(application, listener, extender, idle_seconds=idle_seconds)
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            yield port
        finally:
            # Another wake-up may have let it end already, and its trigger is closed.
            with contextlib.suppress(OSError):
                server.trigger.pull_trigger(server.end)
            thread.join(10)
            assert not thread.is_alive()


class ServerProcess:
    """``serve`` of a folder in a process of its own; ``port`` is where it listens."""

    def __init__(self, folder, *, port=0, seconds=30.0, verbose=False, host="127.0.0.1"):
        # As the command ends: while an interpreter is finalised a signal has its default again.
        code = (
            "import os, pathlib, sys; from poprun_py.command.pods.pod_server import serve; "
            f"code = serve(pathlib.Path(sys.argv[1]), host={host!r}, port={port}, "
            f"verbose={verbose}, seconds={seconds}); sys.stderr.flush(); os._exit(code)"
        )
        self.lines = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        line = self.process.stderr.readline()
        if " at http://" not in line:
            self.process.kill()
            pytest.fail(f"the server did not start: {line}{self.process.communicate()[1]}")
        self.first_line = line
        self.url = "http://" + line.partition(" at http://")[2].partition(" (")[0]
        self.port = int(self.url.rpartition(":")[2])

    def end(self, number):
        """Send a signal; return the exit code and what was printed."""
        self.process.send_signal(number)
        stdout, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stdout + stderr

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
