"""Three groups of tests: pure ones; real jobs through mpirun (marker ``mpi``); hosts and machines
made for the occasion (tests/lab, tests/numa), which have make targets of their own.

What every test gets: an environment without the variables that launcher, library, MPI and Slurm
read, and a look at what its jobs left behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The default suite tries the same examples every time, however slow the machine; new ones are
# looked for on purpose: `make test ARGS=--hypothesis-profile=explore`.
settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "explore", settings.get_profile("same"), derandomize=False, max_examples=500
)
settings.load_profile("same")

ROOT = Path(__file__).resolve().parent.parent
# A shell's `&` and nohup leave these ignored, which every program that a test starts would inherit.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

_PREFIXES = (
    "POPDIST_",
    "POPRUN_",
    "OMPI_",
    "PMIX_",
    "PRTE_",
    "SLURM_",
    "POPLAR_",
    "IPUOF_",
    "POPTORCH_",
    "TORCHELASTIC_",
)
_LEASES = "POPRUN_LEASES"
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
          "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_NAME", "ROLE_RANK",
          "ROLE_WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NO_COLOR",
          # That of the workers of the tests, to which older progress bars would keep.
          "COLUMNS", "LINES")  # fmt: skip


_FOLDER = pytest.StashKey[Path]()


def pytest_configure(config):
    """Give the whole run a folder for temporary files: programs that are killed leave theirs.

    The workers of xdist inherit it. Its name is short, for paths of Unix sockets have 107 bytes,
    and other users, as whom some tests run programs, may use it as they may use /tmp.
    """
    if hasattr(config, "workerinput"):
        return
    folder = Path(tempfile.mkdtemp(prefix="tests-"))
    folder.chmod(0o1777)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # What tests type in a shell is nothing that the user has typed.
    os.environ["HISTFILE"] = ""
    if config.option.basetemp is None:
        config.option.basetemp = folder / "p"
    config.stash[_FOLDER] = folder


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Keep it where a test failed: somebody may want to look."""
    if exitstatus == pytest.ExitCode.TESTS_FAILED and _FOLDER in config.stash:
        terminalreporter.write_line(f"the files of the tests are kept in {config.stash[_FOLDER]}")
        del config.stash[_FOLDER]


def pytest_unconfigure(config):
    """Remove it."""
    if _FOLDER in config.stash:
        shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Give the tests a cache folder, where nothing was measured before, and a place for pods."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        # What else would go into the user's home.
        home = tmp_path_factory.mktemp("home")
        for name in ("IPYTHONDIR", "MPLCONFIGDIR", "WANDB_CONFIG_DIR"):
            patch.setenv(name, str(home / name.lower()))
        yield


@pytest.fixture(autouse=True, scope="session")
def own_leases(tmp_path_factory):
    """Give this process of the tests its own leases of cores: the others run jobs too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_LEASES, str(tmp_path_factory.mktemp("leases")))
        yield


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Remove what a surrounding job or shell might have set, or a test before."""
    remove_surroundings(monkeypatch)
    # A command that is called here, not in a process of its own, adds folders to this.
    monkeypatch.setattr(sys, "path", list(sys.path))


def remove_surroundings(monkeypatch):
    for name in list(os.environ):
        if (name.startswith(_PREFIXES) or name in _NAMES) and name != _LEASES:
            monkeypatch.delenv(name)


def survivors(marker: str) -> list[int]:
    """Return the pids of living processes whose environment holds ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if state not in (b"Z", b"X") and marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until(condition, limit: float = 30.0, message: str = "the condition did not come true"):
    """Poll ``condition`` until it holds; fail after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{message} within {limit} s")
        time.sleep(0.01)


@contextlib.contextmanager
def running_jobs(folder):
    """Give a function that runs ``poprun-py``; afterwards no process of its jobs may be left.

    Call it with the words of the command line; ``start=True`` returns the running process.
    ``through`` is a command that starts the launcher, ``python`` the Python that runs it.
    """
    marker = f"TEST_MARK_OF_POPRUN={os.getpid()}-{time.monotonic_ns()}"
    started: list[subprocess.Popen] = []

    def call(
        *words, timeout=100, env=None, cwd=None, start=False, stdin=subprocess.DEVNULL,
        through=(), python=sys.executable,
    ):  # fmt: skip
        name, _, value = marker.partition("=")
        process = subprocess.Popen(
            [*map(str, through), str(python), "-m", "poprun_py", *map(str, words)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), name: value, **(env or {})},
            cwd=cwd or folder,
        )
        started.append(process)
        if start:
            return process
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            stdout, stderr = process.communicate(timeout=20)
            pytest.fail(f"poprun-py {words} ran over {timeout} s\n{stdout}\n{stderr}")
        return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)

    call.marker = marker
    call.survivors = lambda: survivors(marker)
    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    deadline = time.monotonic() + 10
    while (left := survivors(marker)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes {left} outlived their job"


@pytest.fixture
def poprun(tmp_path):
    """Run ``poprun-py`` as ``running_jobs`` says, in the folder of the test."""
    with running_jobs(tmp_path) as call:
        yield call


@pytest.fixture(scope="module")
def shared_poprun(tmp_path_factory):
    """Run ``poprun-py`` for what several tests of a file look at."""
    with (
        pytest.MonkeyPatch.context() as patch,
        running_jobs(tmp_path_factory.mktemp("jobs")) as call,
    ):
        remove_surroundings(patch)
        yield call


@pytest.fixture
def script(tmp_path):
    """Write a Python program into the test's folder and return its path."""

    def write(text: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def pytest_addoption(parser):
    parser.addoption("--rewrite-goldens", action="store_true", help="write what is printed now")


@pytest.fixture
def golden(request):
    """Compare a whole text with a file beside the test; a missing file fails."""

    def compare(name: str, text: str) -> None:
        path = Path(request.node.path).parent / "golden" / name
        if request.config.getoption("--rewrite-goldens"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"golden file {path} is missing (--rewrite-goldens writes it)"
        assert text == path.read_text()

    return compare
