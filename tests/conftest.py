"""Three groups of tests: pure ones; real jobs through mpirun (marker ``mpi``); hosts and machines
made for the occasion (tests/lab, tests/numa), which have make targets of their own.

What every test gets: an environment without the variables that launcher, library, MPI and Slurm
read, and a look at what its jobs left behind.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from support.instances import Instances
from support.processes import LEASES, remove_surroundings, running_jobs
from support.repository import ROOT

# The default tests try the same few examples every time: none of them fails by chance. The sweep
# tries other ones each time, and repeats first what failed before (in the folder .hypothesis).
settings.register_profile(
    "default",
    derandomize=True,
    max_examples=25,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "sweep",
    settings.get_profile("default"),
    derandomize=False,
    max_examples=100,
    database=DirectoryBasedExampleDatabase(ROOT / ".hypothesis"),
    print_blob=True,
)
settings.load_profile("default")

# A shell's `&` and nohup leave these ignored, which every program that a test starts would inherit.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

_FOLDER = pytest.StashKey[Path]()
_WARM = ROOT / "tests" / "support" / "warm_python.py"


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
        if "multiprocessing.util" in sys.modules:
            # Multiprocessing removes its own folder at exit, and warns if that folder is gone.
            # It is in this one, so it goes first.
            sys.modules["multiprocessing.util"]._exit_function()
        shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


def pytest_collection(session):
    """Collect without looking for garbage: of thousands of tests none is any."""
    gc.disable()


def _let_torch_log_to_the_root():
    """Save pytest from adding its handlers to fifty loggers of torch, six times in each test."""
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Begin with the modules that take longest, so that a run ends with short ones.

    First come the modules that share one worker, then those with a time limit of ten minutes or
    more, then those that start jobs.
    """
    long = {item.path for item in items if _time_limit(item) >= 600}
    jobs = {item.path for item in items if item.get_closest_marker("mpi")}
    items.sort(
        key=lambda item: (
            not _shared_processes(item.path), item.path not in long, item.path not in jobs
        )
    )  # fmt: skip


def _time_limit(item) -> float:
    """Return the time limit that a test sets itself, in seconds, or 0."""
    marker = item.get_closest_marker("timeout")
    return marker.args[0] if marker else 0


def pytest_collection_finish(session):
    """Make every test cheaper: without loggers of torch, and less to search for garbage."""
    _let_torch_log_to_the_root()
    gc.freeze()
    gc.enable()


# Processes with torch that a session starts once, and the code of a module that uses them. Their
# imports of torch take three seconds of CPU time in each worker that has such modules.
_SHARED = {
    "instances": re.compile(r"\binstances\.run\("),
    "warm": re.compile(r"^def .*\bwarm\b.*\):$", re.MULTILINE),
    "ranks": re.compile(r"^from support\.ranks import ", re.MULTILINE),
}


@functools.cache
def _shared_processes(module: Path) -> str:
    """Return which processes of ``_SHARED`` a module uses, or an empty string."""
    text = module.read_text()
    return next((name for name, use in _SHARED.items() if use.search(text)), "")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep the modules that share processes in one worker, so that these start once."""
    if config.option.dist != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            module = config.rootpath / nodeid.partition("::")[0]
            return _shared_processes(module) or super()._split_scope(nodeid)

    return Scheduling(config, log)


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
        patch.setenv(LEASES, str(tmp_path_factory.mktemp("leases")))
        yield


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Remove what a surrounding job or shell might have set, or a test before."""
    remove_surroundings(monkeypatch)
    # A command that is called here, not in a process of its own, adds folders to this.
    monkeypatch.setattr(sys, "path", list(sys.path))


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


@pytest.fixture(scope="session")
def instances(own_cache, tmp_path_factory):
    """Run functions in a job that stays alive; ``support/instances.py`` says which tests may."""
    with pytest.MonkeyPatch.context() as patch:
        remove_surroundings(patch)
        jobs = Instances(tmp_path_factory.mktemp("instances"), os.environ)
    yield jobs
    jobs.close()


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Return the words in front of a program that runs it in a process with torch."""
    address = tmp_path_factory.mktemp("warm") / "s"
    with pytest.MonkeyPatch.context() as patch:
        remove_surroundings(patch)
        patch.setenv("PYTHONPATH", str(ROOT))
        # OpenMP reads this once, in the server. Its threads would spin on the core of a program.
        patch.setenv("OMP_WAIT_POLICY", "passive")
        server = subprocess.Popen(
            [sys.executable, _WARM, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    with server:
        assert server.stdout.readline() == b"ready\n"
        yield (sys.executable, "-S", _WARM, address)
        # Processes that the tests have forked may hold the other end of its stdin.
        server.terminate()


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
