"""The C modules below json, signal and socket give the same results with fewer imports."""

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

from poprun_py.instance import quick_imports

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_values_are_read_and_written_as_by_json(value):
    text = json.dumps(value)
    assert quick_imports.dumps(value) == text
    assert quick_imports.loads(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "value", [float("inf"), {"\u20ac": ["\\", '"', "\x00", "\udc80"]}, 1 << 99]
)
def test_unusual_values_are_read_and_written_as_by_json(value):
    text = json.dumps(value)
    assert quick_imports.dumps(value) == text
    assert quick_imports.loads(text.encode()) == json.loads(text) == value


def test_this_python_has_the_c_modules():
    assert quick_imports.dumps is not json.dumps
    assert quick_imports.loads is not json.loads
    assert {quick_imports.signal.__name__, quick_imports.socket.__name__} == {"_signal", "_socket"}


def test_the_c_modules_have_the_same_signals_and_sockets():
    numbers = ("SIGTERM", "SIGKILL", "SIGINT", "SIGUSR1", "SIGCHLD", "SIGPIPE", "SIGRTMAX")
    for name in (*numbers, "SIG_DFL", "SIG_IGN"):
        assert getattr(quick_imports.signal, name) == getattr(signal, name)
    for name in ("signal", "getsignal", "set_wakeup_fd"):
        assert callable(getattr(quick_imports.signal, name))
    assert issubclass(socket.socket, quick_imports.socket.socket)
    assert quick_imports.socket.gethostname() == socket.gethostname()
    assert quick_imports.socket.AF_UNIX == socket.AF_UNIX


def test_the_public_modules_replace_missing_c_modules():
    code = (
        f"import json, signal, socket, sys; sys.path.append({str(ROOT)!r})\n"
        "sys.modules.update(_json=None, _signal=None)\n"
        "from poprun_py.instance import quick_imports\n"
        "assert quick_imports.dumps is json.dumps and quick_imports.signal is signal\n"
        "assert quick_imports.socket is socket"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wrapper_imports_few_modules_of_the_standard_library():
    code = (
        f"import os, sys; before = set(sys.modules); sys.path.append({str(ROOT)!r})\n"
        "from poprun_py.instance import wrapper\n"
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith('poprun_py')))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    # These are parts of the interpreter or small. typing, re, enum and json take milliseconds.
    assert set(done.stdout.split()) <= {
        "_json", "_signal", "_socket", "errno", "mmap", "select", "time",
    }  # fmt: skip


PRCTL = """
import sys; sys.path.append({root!r})
from poprun_py.instance import process_control, quick_imports
if {fails}:
    def fail(): raise AttributeError("this version of Python has another _ctypes")
    quick_imports._quick_prctl = fail
print(process_control.become_subreaper(), process_control.become_subreaper())
prctl, number, reference = quick_imports.load_prctl()
known, unknown, found = prctl(1, 15, 0, 0, 0), prctl(1, 9999, 0, 0, 0), number()
prctl(2, reference(found), 0, 0, 0)  # read the signal of the first call
print(known, unknown, found.value, "ctypes" in sys.modules)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_prctl_acts_in_the_same_way_with_and_without_the_module_ctypes(fails):
    code = PRCTL.format(root=str(ROOT), fails=fails)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"False True\n0 -1 15 {fails}\n", done.stderr
