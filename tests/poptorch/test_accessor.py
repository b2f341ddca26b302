"""Loading in a process of its own: order, epochs, structures, errors, and a clean end."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import wait_until

from popdist_py import poptorch
from popdist_py.poptorch import DataLoader, DataLoaderMode, Options, SharingStrategy
from popdist_py.poptorch.accessor import AsynchronousDataAccessor
from popdist_py.poptorch.custom_types import ICustomArgParser, registerCustomArgParser

torch.set_num_threads(1)
FORK = {"sharing_strategy": SharingStrategy.Fork}
ASYNC = {"mode": DataLoaderMode.Async, "async_options": FORK}
REBATCHED = {"mode": DataLoaderMode.AsyncRebatched, "async_options": FORK}


def numbers(count):
    return torch.utils.data.TensorDataset(torch.arange(count), torch.arange(count) * 0.5)


def flat(lists):
    return [element for elements in lists for element in elements]


def read(batches):
    return [batch[0].tolist() for batch in batches]


def eventually_ended(processes, seconds=20.0):
    """Poll until the processes are gone; the time limit makes a test fail rather than hang."""
    limit = time.monotonic() + seconds
    while alive := [process for process in processes if process.is_running()]:
        if time.monotonic() > limit:
            for process in alive:
                process.kill()
            pytest.fail(f"still there: {alive}")
        time.sleep(0.01)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(torch.arange(start, self.count, step))

    def __len__(self):
        return self.count


class Broken(torch.utils.data.Dataset):
    def __init__(self, at):
        self.at = at

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == self.at:
            raise KeyError("this element is broken")
        return torch.tensor([index])


class Killed(Broken):
    def __getitem__(self, index):
        if index == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index])


# --- What comes out -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", list(SharingStrategy))
def test_every_sharing_strategy_delivers(strategy):
    # More tensors than the file descriptors that can be passed to a new process.
    source = [torch.full((2,), float(i)) for i in range(300)]
    accessor = AsynchronousDataAccessor(source, sharing_strategy=strategy)
    assert len(accessor) == 300
    for _ in range(2):
        assert [item[0].item() for item in accessor] == list(range(300))
    accessor.terminate()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("strategy", [SharingStrategy.ForkServer, SharingStrategy.Fork])
def test_batches_are_those_of_the_synchronous_loader(workers, strategy):
    arguments = {"batch_size": 3, "num_workers": workers}
    expected = read(DataLoader(Options().deviceIterations(2), numbers(40), **arguments))
    loader = DataLoader(
        Options().deviceIterations(2),
        numbers(40),
        mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": strategy},
        **arguments,
    )
    assert len(loader) == len(expected)
    for _ in range(3):
        assert read(loader) == expected
    loader.terminate()


@pytest.mark.parametrize("buffer_size", [1, 2, 5])
@pytest.mark.parametrize("load_indefinitely", [True, False])
@pytest.mark.parametrize("early_preload", [True, False])
def test_epochs_follow_one_another(buffer_size, load_indefinitely, early_preload):
    accessor = AsynchronousDataAccessor(
        DataLoader(Options(), numbers(9), batch_size=2),
        buffer_size=buffer_size,
        load_indefinitely=load_indefinitely,
        early_preload=early_preload,
        **FORK,
    )
    for _ in range(3):
        assert read(accessor) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert next(accessor, None) is None
    accessor.terminate()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [True, False])
def test_leaving_an_epoch_begins_the_next_one_from_the_start(workers, persistent):
    loader = DataLoader(
        Options(),
        numbers(50),
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
        **ASYNC,
    )
    for length in (1, 3, 50, 7, 1, 50):
        seen = [batch[0].item() for batch, _ in zip(loader, range(length), strict=False)]
        assert seen == list(range(length))
    loader.terminate()


def test_an_item_is_valid_until_the_next_and_its_memory_used_again():
    accessor = AsynchronousDataAccessor([torch.full((4,), float(i)) for i in range(20)], **FORK)
    places = set()
    for i, item in enumerate(accessor):
        assert item.tolist() == [float(i)] * 4
        places.add(item.data_ptr())
    assert len(places) <= 3, "a ring of three slots"
    accessor.terminate()


def test_items_outlive_the_accessor():
    accessor = AsynchronousDataAccessor([torch.arange(5)], **FORK)
    item = next(iter(accessor))
    accessor.terminate()
    del accessor
    gc.collect()
    assert item.tolist() == list(range(5))


def test_items_of_changing_shape_and_dtype():
    source = [
        torch.ones(n, n % 3 + 1, dtype=t)
        for n, t in zip(
            (1, 50, 2, 0, 7),
            (torch.uint8, torch.half, torch.bool, torch.double, torch.bfloat16),
            strict=True,
        )
    ]
    accessor = AsynchronousDataAccessor(source, **FORK)
    for _ in range(2):
        for got, expected in zip(accessor, source, strict=True):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
    accessor.terminate()


class Pair:
    def __init__(self, x, y, label):
        self.x, self.y, self.label = x, y, label


class SpecialPair(Pair):
    pass


class PairParser(ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.x
        yield struct.y

    def reconstruct(self, original_structure, tensor_iterator):
        kind = type(original_structure)
        return kind(next(tensor_iterator), next(tensor_iterator), original_structure.label)


@pytest.fixture
def pair_parser():
    registerCustomArgParser(Pair, PairParser())
    yield
    registerCustomArgParser(Pair, None)


def test_structures(pair_parser):
    one, two = torch.ones(2), torch.zeros(3, dtype=torch.int)
    source = [
        (one, two),
        [one, [two, (one,)]],
        {"a": one, "b": {"c": two}},
        SpecialPair(one, two, "x"),
        Pair(two, one, "y"),
    ]
    # A fork server's process learns the registered parsers too.
    accessor = AsynchronousDataAccessor(source)
    got = []
    for item in accessor:
        copy = item
        if isinstance(item, Pair):
            copy = (type(item).__name__, item.x.tolist(), item.y.tolist(), item.label)
        else:
            copy = torch.utils._pytree.tree_map(lambda tensor: tensor.tolist(), item)
        got.append(copy)
    a, b = one.tolist(), two.tolist()
    assert got == [
        [a, b],
        [a, [b, [a]]],
        {"a": a, "b": {"c": b}},
        ("SpecialPair", a, b, "x"),
        ("Pair", b, a, "y"),
    ]
    accessor.terminate()


def test_a_custom_parser_must_inherit():
    with pytest.raises(poptorch.Error, match="must inherit"):
        registerCustomArgParser(Pair, object())


class ShapeCollate:
    def __call__(self, samples):
        return {"x": torch.stack([s[0] for s in samples]), "n": torch.tensor(len(samples))}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_custom_collate_function(workers):
    loader = DataLoader(
        Options(), numbers(6), 3, num_workers=workers, collate_fn=ShapeCollate(), **ASYNC
    )
    assert [(b["x"].tolist(), b["n"].item()) for b in loader] == [([0, 1, 2], 3), ([3, 4, 5], 3)]
    loader.terminate()


def test_mixed_dtypes_are_collated_as_torch_does():
    samples = [torch.ones(2, dtype=torch.int64), torch.full((2,), 0.5)]
    (expected,) = torch.utils.data.DataLoader(samples, batch_size=2)
    loader = DataLoader(Options(), samples, batch_size=2, **ASYNC)
    (got,) = (batch.clone() for batch in loader)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
    loader.terminate()


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffling_is_new_each_epoch_and_repeatable(workers):
    def epochs():
        torch.manual_seed(3)
        loader = DataLoader(Options(), numbers(20), shuffle=True, num_workers=workers, **ASYNC)
        orders = [[b[0].item() for b in loader] for _ in range(3)]
        loader.terminate()
        return orders

    first = epochs()
    assert all(sorted(order) == list(range(20)) for order in first)
    assert len({tuple(order) for order in first}) == 3
    assert epochs() == first


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("strategy", [SharingStrategy.Fork, SharingStrategy.ForkServer])
def test_a_generator_of_the_program_gives_torchs_order(workers, strategy):
    def arguments():
        return {
            "shuffle": True,
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "generator": torch.Generator().manual_seed(1),
        }

    expected = torch.utils.data.DataLoader(numbers(20), **arguments())
    loader = DataLoader(
        Options(),
        numbers(20),
        mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": strategy},
        **arguments(),
    )
    assert [read(loader) for _ in range(2)] == [read(expected) for _ in range(2)]
    loader.terminate()


class WithoutLength:
    def __getitem__(self, index):
        if index == 3:
            raise IndexError
        return torch.tensor([index])


@pytest.mark.parametrize(
    "source", [WithoutLength(), Broken(3), [torch.tensor([i]) for i in range(3)]]
)
def test_any_sequence_can_be_iterated(source):
    if isinstance(source, Broken):
        source = torch.utils.data.Subset(source, range(3))
    accessor = AsynchronousDataAccessor(source, **FORK)
    assert [item.item() for item in accessor] == [0, 1, 2]
    accessor.terminate()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_may_be_started_in_any_way(method):
    loader = DataLoader(
        Options(),
        numbers(6),
        num_workers=1,
        multiprocessing_context=method,
        mode=DataLoaderMode.Async,
    )
    for _ in range(2):
        assert flat(read(loader)) == list(range(6))
    loader.terminate()


def test_instances_read_their_shares():
    orders = []
    for process in range(2):
        options = Options().randomSeed(1)
        options.Distributed.configureProcessId(process, 2)
        loader = DataLoader(options, numbers(21), batch_size=2, shuffle=True, **ASYNC)
        orders.append([flat(read(loader)) for _ in range(2)])
        loader.terminate()
    for first, second in zip(*orders, strict=True):
        assert len(set(first) | set(second)) == 20


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [numbers, Stream])
def test_a_data_set_of_whole_batches(workers, make):
    arguments = {"batch_size": None, "num_workers": workers, "worker_init_fn": print_nothing}
    loader = DataLoader(Options().deviceIterations(3), make(5), **arguments, **ASYNC)
    items = [item if make is Stream else item[0] for item in loader]
    assert loader.combinedBatchSize is None
    assert (len(loader), {item.shape for item in items}) == (5, {torch.Size([])})
    loader.terminate()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", [DataLoaderMode.Async, DataLoaderMode.AsyncRebatched])
@pytest.mark.parametrize("drop_last", [True, False])
def test_single_elements_are_never_short(workers, mode, drop_last):
    loader = DataLoader(
        Options(),
        numbers(5),
        num_workers=workers,
        drop_last=drop_last,
        mode=mode,
        async_options=FORK,
    )
    assert read(loader) == [[0], [1], [2], [3], [4]]
    loader.terminate()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_of_a_sampler(workers, drop_last):
    loader = DataLoader(
        Options().deviceIterations(2),
        numbers(9),
        num_workers=workers,
        drop_last=drop_last,
        batch_sampler=torch.utils.data.BatchSampler(range(9), 2, drop_last=False),
        **ASYNC,
    )
    short = [] if drop_last else [[8]]
    assert read(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], *short]
    assert len(loader) == (2 if drop_last else 3)
    loader.terminate()


# --- Rebatching -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("worker_size", [None, 1, 4, 6])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("make", [numbers, Stream])
def test_workers_may_load_batches_of_another_size(workers, worker_size, drop_last, make):
    loader = DataLoader(
        Options().deviceIterations(2),
        make(40),
        batch_size=3,
        num_workers=workers,
        drop_last=drop_last,
        rebatched_worker_size=worker_size,
        worker_init_fn=print_nothing,
        **REBATCHED,
    )
    sizes = [6] * 6 if drop_last else [6] * 6 + [4]
    assert len(loader) == len(sizes)
    batches = [(b if make is Stream else b[0]).tolist() for b in loader]
    assert [len(batch) for batch in batches] == sizes
    elements = flat(batches)
    assert len(set(elements)) == len(elements)
    if make is numbers:
        assert elements == list(range(len(elements)))
    loader.terminate()


def print_nothing(_):
    pass


def test_async_without_dropping_rebatches():
    loader = DataLoader(Options(), numbers(7), batch_size=3, drop_last=False, **ASYNC)
    assert (len(loader), read(loader)) == (3, [[0, 1, 2], [3, 4, 5], [6]])
    loader.terminate()


def test_items_without_tensors_cannot_be_rebatched():
    with pytest.raises(poptorch.Error, match="a int without tensors"):
        AsynchronousDataAccessor([1, 2, 3], rebatched_size=2, **FORK)


def test_an_accessor_rebatches_on_its_own():
    def sync(drop_last):
        return DataLoader(Options(), numbers(11), batch_size=2, drop_last=drop_last)

    accessor = AsynchronousDataAccessor(sync(True), rebatched_size=4, **FORK)
    assert (len(accessor), read(accessor)) == (2, [[0, 1, 2, 3], [4, 5, 6, 7]])
    accessor.terminate()
    accessor = AsynchronousDataAccessor(sync(False), rebatched_size=4, **FORK)
    assert read(accessor)[-1] == [8, 9, 10]
    accessor.terminate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rebatched_worker_size": 7}, "rebatched_worker_size"),
        ({"async_options": {"rebatched_size": 4}}, "rebatched_size"),
    ],
)
def test_sizes_that_do_not_go_together(arguments, message):
    with pytest.raises(AssertionError, match=message):
        DataLoader(
            Options(), numbers(9), batch_size=6, mode=DataLoaderMode.AsyncRebatched, **arguments
        )


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_rebatched_size_is_greater_than_one(size):
    with pytest.raises(AssertionError, match="rebatched_size"):
        AsynchronousDataAccessor([torch.ones(1)], rebatched_size=size)


def test_a_short_batch_needs_rebatching():
    loader = DataLoader(Options(), numbers(7), batch_size=3, drop_last=False)
    with pytest.raises(AssertionError, match="drop_last"):
        AsynchronousDataAccessor(loader)


def test_a_loader_has_one_accessor():
    loader = DataLoader(Options(), numbers(7), **ASYNC)
    with pytest.raises(poptorch.Error, match="already uses an AsynchronousDataAccessor"):
        AsynchronousDataAccessor(loader)
    loader.terminate()


# --- Errors ---------------------------------------------------------------------------------------


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


# --- The end --------------------------------------------------------------------------------------


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
        Options(), Slow(), mode=DataLoaderMode.Async, num_workers={workers}, batch_size=2
    )
    # A forked process holds both ends of its pipe: it cannot tell from that when we are gone.
    idle = AsynchronousDataAccessor([torch.ones(1)], sharing_strategy=SharingStrategy.Fork)
    for batch in loader:
        print("pids", loader._accessor._process.pid, idle._process.pid, flush=True)
        {ending}
"""


@pytest.mark.parametrize(
    ("workers", "ending", "code"),
    [
        (0, "break", 0),
        (2, "sys.exit(7)", 7),
        (2, "raise RuntimeError('of the program')", 1),
        (0, "signal.pause()", -signal.SIGINT),
        (2, "signal.pause()", -signal.SIGINT),
        (2, "os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_processes_end_with_the_program(tmp_path, workers, ending, code):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM).format(workers=workers, ending=ending))
    root = str(Path(poptorch.__file__).parents[2])
    started = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )
    line = started.stdout.readline()
    assert line.startswith("pids "), started.stderr.read()
    family = []
    for pid in line.split()[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            loader = psutil.Process(int(pid))
            family += [loader, *loader.children(recursive=True)]
    if ending == "signal.pause()":
        os.killpg(started.pid, signal.SIGINT)  # what ^C in a terminal does
    try:
        assert started.wait(timeout=20) == code
        eventually_ended(family)
        assert "leaked" not in started.stderr.read()
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        started.stdout.close()
        started.stderr.close()


def test_memory_stays_the_same():
    accessor = AsynchronousDataAccessor(
        DataLoader(Options(), torch.utils.data.TensorDataset(torch.ones(64, 1000)), batch_size=8),
        **FORK,
    )

    def memory():
        processes = [psutil.Process(), psutil.Process(accessor._process.pid)]
        return sum(process.memory_info().rss for process in processes)

    for _ in range(20):
        list(accessor)
    before = memory()
    for _ in range(200):
        list(accessor)
    assert memory() - before < 2_000_000
    accessor.terminate()
