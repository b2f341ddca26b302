"""What the wrapper takes from below json, signal and socket: the same answers, fewer imports."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.repository import ROOT

from poprun_py.instance import fast_stdlib

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_frames_read_and_written_as_json_does(value):
    text = json.dumps(value)
    assert fast_stdlib.dumps(value) == text
    assert fast_stdlib.loads(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "value", [float("inf"), {"\u20ac": ["\\", '"', "\x00", "\udc80"]}, 1 << 99]
)
def test_frames_of_unusual_values(value):
    text = json.dumps(value)
    assert fast_stdlib.dumps(value) == text
    assert fast_stdlib.loads(text.encode()) == json.loads(text) == value


def test_the_parts_below_are_there_in_this_python():
    assert fast_stdlib.dumps is not json.dumps
    assert fast_stdlib.loads is not json.loads
    assert {fast_stdlib.signal.__name__, fast_stdlib.socket.__name__} == {"_signal", "_socket"}


def test_what_is_used_of_signal_and_socket_is_the_same_below():
    numbers = ("SIGTERM", "SIGKILL", "SIGINT", "SIGUSR1", "SIGCHLD", "SIGPIPE", "SIGRTMAX")
    for name in (*numbers, "SIG_DFL", "SIG_IGN"):
        assert getattr(fast_stdlib.signal, name) == getattr(signal, name)
    for name in ("signal", "getsignal", "set_wakeup_fd"):
        assert callable(getattr(fast_stdlib.signal, name))
    assert issubclass(socket.socket, fast_stdlib.socket.socket)
    assert fast_stdlib.socket.gethostname() == socket.gethostname()
    assert fast_stdlib.socket.AF_UNIX == socket.AF_UNIX


def test_the_public_modules_stand_in_where_the_parts_are_missing():
    code = (
        f"import json, signal, socket, sys; sys.path.append({str(ROOT)!r})\n"
        "sys.modules.update(_json=None, _signal=None)\n"
        "from poprun_py.instance import fast_stdlib\n"
        "assert fast_stdlib.dumps is json.dumps and fast_stdlib.signal is signal\n"
        "assert fast_stdlib.socket is socket"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wrapper_imports_little_of_the_standard_library():
    code = (
        f"import os, sys; before = set(sys.modules); sys.path.append({str(ROOT)!r})\n"
        "from poprun_py.instance import wrapper\n"
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith('poprun_py')))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    # Parts of the interpreter and small files; typing, re, enum and json take milliseconds.
    assert set(done.stdout.split()) <= {
        "_json", "_signal", "_socket", "errno", "mmap", "select", "time",
    }  # fmt: skip
