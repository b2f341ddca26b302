"""The registration is cheap for programs that import torch, and never makes the import fail."""

import os
import re
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from support.repository import ROOT
from torch.torch_version import TorchVersion

from popdist_py.environment import TORCH_BACKEND
from popdist_py.errors import PopdistError
from popdist_py.torch_backend import _WANTED, _create, process_group

# The modules that the registration may import. Every program that imports torch pays for them.
_LIGHT = {
    "popdist_py",
    "popdist_py.torch_backend",
    "popdist_py.torch_backend.torch_functions",
}


def python(code, **variables):
    """Return the standard output and the standard error of a Python process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, timeout=100, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


# os._exit avoids the half second that Python takes to end after torch was imported.
_END = "import os, sys; sys.stdout.flush(); os._exit(0)"
# Each case runs in a separate fork, because importing torch takes most of the time.
_REGISTERING = f"""
import os, sys, torch, torch.distributed as d
before = set(sys.modules)
if os.fork() == 0:
    import popdist_py.torch_backend as ours
    ours._autoload()
    print(*sorted(set(sys.modules) - before), flush=True)
    assert "POPDIST" in d.Backend._plugins
    os._exit(0)
assert os.wait()[1] == 0
for name, broken in (
    ("not built", lambda: setattr(d, "is_available", lambda: False)),
    ("other API", lambda: delattr(d.Backend, "register_backend")),
    ("variable", lambda: os.environ.update(POPDIST_TORCH_BACKEND="mpi")),
):
    if os.fork() == 0:
        broken()
        sys.stderr.write(f"{{name}}: ")
        import popdist_py.torch_backend
        sys.stderr.write("imported\\n")
        os._exit(0)
    assert os.wait()[1] == 0
{_END}
"""


def test_the_registration_is_light_and_a_failure_is_a_line_and_no_error():
    out, err = python(_REGISTERING, TORCH_DEVICE_BACKEND_AUTOLOAD="0", POPDIST_TORCH_BACKEND="auto")
    assert set(out.split()) == _LIGHT
    said = "popdist_py.torch_backend: "
    assert err == (
        "not built: imported\n"
        f"other API: {said}type object 'Backend' has no attribute 'register_backend'\nimported\n"
        f"variable: {said}POPDIST_TORCH_BACKEND='mpi': expected auto, gloo or popdist\n"
        "imported\n"
    )


@pytest.mark.parametrize(
    "wanted",
    [
        "popdist",
        pytest.param("auto", marks=pytest.mark.sweep),
        pytest.param("", marks=pytest.mark.sweep),
    ],
)
def test_a_python_of_a_job_registers_without_the_entry_point(wanted):
    code = "import torch.distributed as d; print(d.Backend('popdist'), d.Backend('gloo'))\n"
    code += "print('popdist' in d.Backend.backend_list)\n"
    code += "import sys; print('popdist_py.torch_backend.substitution' in sys.modules)\n"
    code += _END
    hook = ROOT / "popdist_py" / "start_hook"
    out, err = python(
        code,
        PYTHONPATH=f"{hook}:{ROOT}",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        POPDIST_TORCH_BACKEND=wanted,
    )
    assert out == f"popdist gloo\n{bool(wanted)}\n{wanted == 'popdist'}\n"
    assert err == ""


def test_the_name_of_the_variable_is_that_of_the_wire():
    assert _WANTED == TORCH_BACKEND


@pytest.mark.parametrize("version", ["2.9.1+cpu", "2.12.0"])
def test_a_group_on_an_older_torch_is_refused(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    said = rf"needs torch 2\.13 or newer, but torch {re.escape(version)} is installed"
    with pytest.raises(PopdistError, match=said):
        _create(None, 0, 1, timedelta(seconds=1))


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.0a0+git1234567", "2.15.0", "3.0.0"])
def test_a_group_on_a_newer_torch_is_made(monkeypatch, version):
    made = []
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(process_group, "PopdistProcessGroup", lambda *words: made.append(words))
    _create(None, 0, 1, timedelta(seconds=1))
    assert made == [(None, 0, 1, timedelta(seconds=1))]
