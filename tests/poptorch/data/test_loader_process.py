"""The process that loads: its errors reach the program, and it leaves nothing behind."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import torch
from poptorch.data.loading import ASYNC, FORK, Broken, Stream, numbers
from poptorch.forked_program import ForkedProgram
from support.processes import wait_until

from popdist_py import poptorch
from popdist_py.poptorch import DataLoader, Options
from popdist_py.poptorch.data.accessor import AsynchronousDataAccessor


def eventually_ended(processes):
    """Wait until the processes are gone; end those that are left."""
    try:
        wait_until(lambda: not any(process.is_running() for process in processes))
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Killed(Broken):
    def __getitem__(self, index):
        if index == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index])


def test_a_loader_has_one_accessor():
    loader = DataLoader(Options(), numbers(7), **ASYNC)
    with pytest.raises(poptorch.Error, match="already uses an AsynchronousDataAccessor"):
        AsynchronousDataAccessor(loader)
    loader.terminate()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_first_item_that_fails(workers, capfd):
    with pytest.raises(poptorch.Error, match="worker thread failed to start") as caught:
        DataLoader(Options(), Broken(0), num_workers=workers, **ASYNC)
    assert "this element is broken" in str(caught.value)
    assert "this element is broken" in capfd.readouterr().err


@pytest.mark.parametrize("source", [[], numbers(0), Stream(0)])
def test_an_empty_data_set(source):
    with pytest.raises(poptorch.Error, match="worker thread failed to start"):
        AsynchronousDataAccessor(source, **FORK)


def test_items_that_are_not_tensors():
    with pytest.raises(poptorch.Error, match="expected a tensor"):
        AsynchronousDataAccessor(["text"], **FORK)


def test_sparse_tensors():
    with pytest.raises(poptorch.Error, match=r"layout torch\.sparse_coo: expected a dense tensor"):
        AsynchronousDataAccessor([torch.eye(2).to_sparse()], **FORK)


@pytest.mark.parametrize("strategy", ["ForkServer", "SharedMemory", "FileSystem"])
def test_what_cannot_be_sent_to_another_process(strategy):
    options = {"sharing_strategy": poptorch.SharingStrategy[strategy]}
    arguments = {"mode": poptorch.DataLoaderMode.Async, "collate_fn": lambda samples: samples}
    said = r"failed to start: .*cannot be sent .*<lambda>.*top of a module.*SharingStrategy\.Fork"
    with pytest.raises(poptorch.Error, match=said):
        DataLoader(Options(), numbers(4), async_options=options, **arguments)


@pytest.mark.parametrize(
    "wrong",
    [{"buffer_size": "3"}, {"buffer_size": 0}, {"sharing_strategy": "fork"}],
)
def test_wrong_arguments_of_an_accessor(wrong):
    (name,) = wrong
    with pytest.raises(AssertionError, match=name):
        AsynchronousDataAccessor(numbers(4), **wrong)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Broken, Killed])
def test_a_later_item_that_fails(workers, kind):
    loader = DataLoader(Options(), kind(9), num_workers=workers, **ASYNC)
    seen = []
    with pytest.raises(AssertionError, match="error occurred in the data fetcher") as caught:
        seen.extend(batch.item() for batch in loader)
    assert seen == list(range(len(seen)))
    if kind is Broken:
        assert len(seen) == 9
        assert "this element is broken" in str(caught.value)
        assert "__getitem__" in str(caught.value), "the traceback of the worker"
    with pytest.raises(poptorch.Error, match="terminated"):
        iter(loader)


def shared_files():
    """Return the files in /dev/shm that Python and torch make: jobs of other tests have theirs."""
    kinds = ("torch_*", "psm_*", "sem.mp-*", "pym-*")
    return {path for kind in kinds for path in Path("/dev/shm").glob(kind)}


def test_nothing_is_left_behind():
    files = len(list(Path("/proc/self/fd").iterdir()))
    shared = shared_files()
    for workers in (0, 2):
        loader = DataLoader(Options(), numbers(20), num_workers=workers, **ASYNC)
        next(iter(loader))
        process = psutil.Process(loader._accessor._process.pid)
        family = [process, *process.children(recursive=True)]
        assert len(family) == 1 + workers
        if workers:
            del loader
        else:
            loader.terminate()
            del loader
        eventually_ended(family)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 1
    wait_until(lambda: shared_files() <= shared)


def test_a_temporary_loader_can_be_iterated():
    total = 0
    for batch in DataLoader(Options(), numbers(10), **ASYNC):
        total += batch[0].item()
    assert total == 45


PROGRAM = """
import os, signal, sys, time, torch
from popdist_py.poptorch import (
    AsynchronousDataAccessor, DataLoader, DataLoaderMode, Options, SharingStrategy,
)

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index): return torch.tensor([index])

if __name__ == "__main__":
    loader = DataLoader(
        Options(), Slow(), mode=DataLoaderMode.Async, num_workers={workers}, batch_size=2,
        async_options={{"sharing_strategy": SharingStrategy.{strategy}}},
    )
    # A forked process holds both ends of its pipe: it cannot tell from that when we are gone.
    idle = AsynchronousDataAccessor([torch.ones(1)], sharing_strategy=SharingStrategy.Fork)
    for batch in loader:
        print("pids", loader._accessor._process.pid, idle._process.pid, flush=True)
        while not os.path.exists({may_end!r}):
            time.sleep(0.01)
        {ending}
"""


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def write_program(folder, **values):
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM).format(may_end=str(may_end(program)), **values))
    return program


def may_end(program):
    """Return the file that lets a program end, once the test knows its processes."""
    return program.with_suffix(".may-end")


def family_of(program):
    """Return the processes that a program's loaders have started, once it has named them."""
    line = program.stdout.readline()
    assert line.startswith("pids "), program.stderr.read()
    loaders = [psutil.Process(int(pid)) for pid in line.split()[1:]]
    return [process for loader in loaders for process in (loader, *loader.children(recursive=True))]


@pytest.mark.parametrize(
    ("workers", "ending", "code"),
    [
        pytest.param(0, "break", 0, marks=pytest.mark.sweep),
        pytest.param(2, "sys.exit(7)", 7, marks=pytest.mark.sweep),
        pytest.param(2, "raise RuntimeError('of the program')", 1, marks=pytest.mark.sweep),
        pytest.param(0, "signal.pause()", -signal.SIGINT, marks=pytest.mark.sweep),
        pytest.param(2, "signal.pause()", -signal.SIGINT, marks=pytest.mark.sweep),
        pytest.param(2, KILLED, -signal.SIGKILL, marks=pytest.mark.sweep),
    ],
)
def test_processes_of_a_fork_server_end_with_the_program(tmp_path, workers, ending, code):
    program = write_program(tmp_path, workers=workers, ending=ending, strategy="ForkServer")
    root = str(Path(poptorch.__file__).parents[2])
    started = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )
    family = family_of(started)
    may_end(program).touch()
    if ending == "signal.pause()":
        os.killpg(started.pid, signal.SIGINT)  # what ^C in a terminal does
    try:
        assert started.wait(timeout=60) == code
    finally:
        eventually_ended(family)
        said = started.communicate()[1]
    assert "leaked" not in said


def test_forked_processes_end_with_a_program_that_is_killed(tmp_path):
    path = write_program(tmp_path, workers=2, ending=KILLED, strategy="Fork")
    program = ForkedProgram(path)
    try:
        family = family_of(program)
        assert len(family) == 4
        may_end(path).touch()
        assert program.wait() == -signal.SIGKILL
        eventually_ended(family)
    finally:
        program.close()


def test_memory_stays_the_same():
    accessor = AsynchronousDataAccessor(
        DataLoader(Options(), torch.utils.data.TensorDataset(torch.ones(64, 1000)), batch_size=8),
        **FORK,
    )

    def memory():
        processes = [psutil.Process(), psutil.Process(accessor._process.pid)]
        return sum(process.memory_info().rss for process in processes)

    def grown():
        before = memory()
        for _ in range(50):
            list(accessor)
        return memory() - before

    # What leaks does so each time; what else this process does may take memory once.
    assert sorted(grown() for _ in range(3))[1] < 500_000
    accessor.terminate()
