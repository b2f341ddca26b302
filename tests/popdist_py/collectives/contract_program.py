"""The contract of a communicator, checked by every instance of a job; run by test_contract.py.

As a program it takes ways of joining as arguments. It prints values that test_contract.py compares.
"""

from __future__ import annotations

import contextlib
import logging.handlers
import sys
import threading
from collections import namedtuple
from functools import partial
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from jobs import SMALL_MESSAGES, ways

import popdist_py
from popdist_py.collectives.communicators.solo import SoloCommunicator
from popdist_py.collectives.within_host.shared_window import WindowError

SIZES = [0, 1, 5, 1000, 40_000, 700_001]
FUNCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
DTYPES = [np.float32, np.float64, np.float16, np.int8, np.int32, np.int64, np.uint8, np.bool_]
Pair = namedtuple("Pair", "left right")
LARGE = 9_000_001  # one process copies it from the memory of another
_PATTERN = np.resize(np.arange(3, dtype=np.uint8), LARGE + 2)


def of_instance(instance, size, dtype):
    return _PATTERN[instance % 3 :][:size].astype(dtype)


def check_reductions():
    for size in SIZES:
        # The largest arrays are reduced in the same way for every dtype.
        for dtype in DTYPES if size < SIZES[-1] else DTYPES[:1]:
            everyone = [of_instance(i, size, dtype) for i in range(count)]
            for op, function in FUNCTIONS.items():
                expected = everyone[0].copy()
                for other in everyone[1:]:
                    expected = function(expected, other)
                x = everyone[me].copy()
                assert popdist_py.all_reduce(x, op) is x
                assert np.array_equal(x, expected), (size, dtype, op)
        for dtype in (np.float32, np.float64):
            x = of_instance(me, size, dtype)
            popdist_py.all_reduce(x, "mean")
            mean = np.mean([of_instance(i, size, dtype) for i in range(count)], axis=0)
            assert np.allclose(x, mean), (size, dtype)


def check_equal_bits():
    for dtype in (np.float16, np.float32):
        for size in (100, 300_000):
            x = np.random.default_rng(me).normal(size=size).astype(dtype)
            popdist_py.all_reduce(x)
            for other in popdist_py.all_gather(x):
                assert np.array_equal(x, other), (dtype, size)


def check_bits_do_not_depend_on_the_way():
    # The first calls try two ways of reducing. Then each of the two is made the faster one.
    if comm.host_memory is None or count == 1:
        return
    everyone = [np.random.default_rng(i).normal(size=1_100_003) for i in range(count)]
    expected = sum(everyone[1:], start=everyone[0])
    window = comm.gradient_buffer(expected.nbytes).view(np.float64)
    window[:] = everyone[me]
    assert np.array_equal(popdist_py.all_reduce(window), expected)
    small = popdist_py.all_reduce(everyone[me][:100].copy())
    assert np.array_equal(small, expected[:100])
    for call in range(12):
        for trial in comm._sliced._trials.values():
            if trial.is_over:
                calls = len(trial.reading)
                trial.reading[:] = [1 + call % 2] * calls
                trial.through_slots[:] = [2 - call % 2] * calls
        x = everyone[me].copy()
        popdist_py.all_reduce(x, name="way")
        assert np.array_equal(x, expected), call


def check_halves_are_added_in_float32():
    # A sum in 16 bits would lose each 1 that is added to 2048 (float16) or 256 (bfloat16).
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        x = torch.full((5,), large if me == 0 else 1.0, dtype=dtype)
        popdist_py.all_reduce(x)
        assert torch.equal(x, torch.full((5,), large + count - 1).to(dtype)), (x, dtype)


def check_windows():
    if count > 1:
        with pytest.raises(WindowError, match="memory"):
            comm.gradient_buffer(1 << 50)
        comm.barrier()  # the instances go on
    for size in (1, 5000, 700_001):
        x = comm.gradient_buffer(4 * size).view(np.float32)
        assert not x.any()
        for _ in range(2):
            x[:] = of_instance(me, size, np.float32)
            popdist_py.all_reduce(x)
            assert np.array_equal(x, sum(of_instance(i, size, np.float32) for i in range(count)))
        tail = x[size // 2 :]
        tail[:] = me
        popdist_py.all_reduce(torch.from_numpy(tail), "max")
        assert (tail == count - 1).all()
    # The result is the same if only one instance's array is in the window.
    mixed = x if me == 0 else np.empty_like(x)
    mixed[:] = me + 1
    popdist_py.all_reduce(mixed)
    assert (mixed == count * (count + 1) / 2).all()


def check_host_memory():
    memory = comm.host_memory
    if memory is None:
        return
    common = memory.common_buffer(100).view(np.uint8)
    assert not common.any()
    comm.barrier()
    common[me] = me + 1
    comm.barrier()
    assert common[:count].tolist() == list(range(1, count + 1))
    for size in (1, 5000, 700_001):
        own = memory.own_slice(size)
        slices = sorted((part.start, part.stop) for part in comm.all_gather_object(own))
        assert slices[0][0] == 0
        assert slices[-1][1] == size
        assert all(a[1] == b[0] for a, b in pairwise(slices))
        x = comm.gradient_buffer(4 * size).view(np.float32)
        x[:] = of_instance(me, size, np.float32)
        memory.reduce_slice(x)
        expected = of_instance(me, size, np.float32)
        expected[own] = sum(of_instance(i, size, np.float32)[own] for i in range(count))
        comm.barrier()
        assert np.array_equal(x, expected), size
    with pytest.raises(ValueError, match=r"gradient_buffer\(\)"):
        memory.reduce_slice(np.zeros(5))


def check_tree():
    for rows in (1, 3, 4):
        everyone = np.random.default_rng(0).normal(size=(rows * count, 70_001)).astype(np.float32)
        leaves = comm.gradient_buffer(rows * 70_001 * 4).view(np.float32).reshape(rows, -1)
        leaves[:] = everyone[me * rows : (me + 1) * rows]
        comm.add_replicas(leaves)
        SoloCommunicator().add_replicas(everyone)
        assert np.array_equal(leaves[0], everyone[0]), rows


def check_moves():
    for size in SIZES:
        for root in {0, count - 1}:
            x = of_instance(me, size, np.int64)
            popdist_py.broadcast(x, root)
            assert np.array_equal(x, of_instance(root, size, np.int64))
        for index, row in enumerate(popdist_py.all_gather(of_instance(me, size, np.float32))):
            assert np.array_equal(row, of_instance(index, size, np.float32))
    large = of_instance(me, LARGE, np.uint8)
    for index, row in enumerate(popdist_py.all_gather(large)):
        assert np.array_equal(row, of_instance(index, large.size, np.uint8))
    popdist_py.broadcast(large, count - 1)
    assert np.array_equal(large, of_instance(count - 1, large.size, np.uint8))
    halves = popdist_py.all_gather(torch.full((3,), float(me), dtype=torch.bfloat16))
    assert [half[0].item() for half in halves] == list(range(count))
    for scalar in (torch.tensor(me), torch.tensor(float(me), dtype=torch.bfloat16), np.array(me)):
        assert [(x.shape, int(x)) for x in popdist_py.all_gather(scalar)] == [
            (scalar.shape, i) for i in range(count)
        ]
    assert popdist_py.all_gather({"text": "x" * me}) == [{"text": "x" * i} for i in range(count)]
    big = popdist_py.all_gather("x" * (3_000_000 if me == 0 else 5))
    assert [len(text) for text in big] == [3_000_000] + [5] * (count - 1)
    assert comm.broadcast_object({"from": me}, count - 1) == {"from": count - 1}
    block = popdist_py.reduce_scatter(np.arange(count * 6.0).reshape(count * 2, 3) * (me + 1))
    whole = np.arange(count * 6.0).reshape(count * 2, 3) * (count * (count + 1) / 2)
    assert np.array_equal(block, whole[2 * me : 2 * me + 2])


def check_reduce_scatter():
    for rows, columns in ((0, 3), (1, 1), (2, 5), (3, 100_000)):
        shape = (count * rows, columns)
        own = slice(me * rows, (me + 1) * rows)
        for dtype in (np.float32, np.float16, np.int64, np.bool_):
            everyone = [of_instance(i, count * rows * columns, dtype) for i in range(count)]
            x = everyone[me].reshape(shape).copy()
            x.flags.writeable = False  # it is only read
            for op, function in FUNCTIONS.items():
                expected = everyone[0].copy()
                for other in everyone[1:]:
                    expected = function(expected, other)
                block = popdist_py.reduce_scatter(x, op)
                assert block.dtype == dtype
                assert np.array_equal(block, expected.reshape(shape)[own]), (shape, dtype, op)
            assert np.array_equal(x, everyone[me].reshape(shape)), "the array was changed"
    given = torch.full((count * 2, 3), me + 0.5, dtype=torch.bfloat16, requires_grad=True)
    block = popdist_py.reduce_scatter(given, "mean")
    assert torch.equal(block, torch.full((2, 3), count / 2, dtype=torch.bfloat16))
    transposed = np.arange(count * 4.0).reshape(4, count).T
    assert np.array_equal(popdist_py.reduce_scatter(transposed), count * transposed[me : me + 1])
    later = np.ones((count, 2))
    handle = popdist_py.reduce_scatter(later, async_op=True)
    later[:] = 9  # a copy is being sent
    assert handle.wait().tolist() == [[count, count]]


def check_python_values():
    total = count * (count - 1) // 2
    given = {"b": me, "a": [float(me), True], "pair": Pair(np.float32(me), torch.tensor(me))}
    reduced = popdist_py.all_reduce(given)
    assert reduced == {"b": total, "a": [float(total), count], "pair": Pair(total, total)}
    assert list(reduced) == ["b", "a", "pair"]
    assert type(reduced["b"]) is int
    assert type(reduced["pair"].left) is np.float32
    strided = np.full((4, 6), me)[:, ::2]
    popdist_py.all_reduce(strided)
    assert (strided == total).all()
    transposed = torch.full((4, 6), float(me)).t()
    popdist_py.all_reduce(transposed)
    assert (transposed == total).all()
    parameter = torch.nn.Parameter(torch.full((3,), float(me)))
    popdist_py.all_reduce(parameter)
    assert (parameter == total).all()


def check_trees():
    total, mean = count * (count - 1) / 2, (count - 1) / 2
    given = {
        "loss": {"train": me, "all": [np.full(3, float(me)), {"deep": torch.full((2,), me)}]},
        3: (True, float(me)),
    }
    found = popdist_py.all_reduce(given, name="metrics")
    assert found["loss"]["train"] == total
    assert found["loss"]["all"][0].tolist() == [total] * 3
    assert given["loss"]["all"][1]["deep"].tolist() == [total] * 2
    assert found[3] == (count, total)
    assert popdist_py.all_reduce({"n": [me, me == 0]}, "mean") == {"n": [mean, 1 / count]}
    assert type(popdist_py.all_reduce(me, "mean")) is float
    keys = ["a", 1, "1", "b"][:: 1 if me else -1]  # the order differs on instance 0
    values = {"a": 1, 1: 20, "1": 300, "b": 4000}
    found = popdist_py.all_reduce({key: values[key] for key in keys})
    assert found == {key: count * value for key, value in values.items()}
    assert list(found) == keys
    sent = {"name": f"run {me}", "seed": 2**64 + me, "weights": np.full(3, me), "none": None}
    found = popdist_py.broadcast(sent, count - 1, name="settings")
    assert found["weights"] is sent["weights"]
    assert found["weights"].tolist() == [count - 1] * 3
    assert found["name"] == f"run {count - 1}"
    assert found["seed"] == 2**64 + count - 1
    assert popdist_py.broadcast("text" if me == 0 else None) == "text"
    frozen = np.full(3, me)
    frozen.flags.writeable = me != 0
    # Only the arrays of the others are overwritten.
    assert popdist_py.broadcast(frozen).tolist() == [0] * 3
    if me:
        frozen[:] = me
    assert popdist_py.broadcast({"frozen": frozen})["frozen"].tolist() == [0] * 3


def check_objects():
    last = count - 1
    everyone = [{"of": i, "text": "x" * i} for i in range(count)]
    assert popdist_py.all_gather_object(everyone[me], name="objects") == everyone
    assert popdist_py.broadcast_object(everyone[me], last) == everyone[last]
    for root in {0, last}:
        found = popdist_py.gather_object(everyone[me], root)
        assert found == (everyone if me == root else None)
        for size in SIZES:
            rows = popdist_py.gather(of_instance(me, size, np.float32), root, name="rows")
            assert (rows is None) == (me != root)
            for i, row in enumerate(rows or ()):
                assert np.array_equal(row, of_instance(i, size, np.float32))
    halves = popdist_py.gather(torch.full((2,), me, dtype=torch.bfloat16))
    assert me != 0 or [half[1].item() for half in halves] == list(range(count))
    # Values of different shapes, and values larger than a slot or a message.
    big = np.full(20_000_000 if me == last else me, me, np.uint8)
    for found in (popdist_py.all_gather_object(big), popdist_py.gather_object(big)):
        if found is not None:
            assert [x.size for x in found] == [*range(last), 20_000_000]
            assert all((x == i).all() for i, x in enumerate(found))
    received = popdist_py.broadcast_object((big, torch.ones(3)) if me == last else None, last)
    assert received[0].size == 20_000_000
    received[0][:] = me  # the array is this instance's own
    if count == 1:
        return  # alone nothing is pickled
    given = {"loss": [1, (lambda: 0) if me == last else 2]}
    for call, heard_by in (
        (popdist_py.all_gather_object, range(count)),
        (popdist_py.all_gather, range(count)),
        (popdist_py.gather_object, {0, last}),
        (partial(popdist_py.broadcast_object, root=last), range(count)),
        (partial(popdist_py.broadcast, root=last), range(count)),
    ):
        if me in heard_by:
            reason = (
                rf"on instance {last}, given\['loss'\]\[1\] is a function that cannot be pickled"
            )
            with pytest.raises(TypeError, match=reason):
                call(given, name="given")
        else:
            call(given, name="given")


def check_objects_that_are_too_deep():
    if count == 1 or not is_first_way:
        return  # one way of joining is enough, because all refuse the objects in the same way
    last = count - 1
    deep = []
    for _ in range(12_000):
        deep = [deep]
    with pytest.raises(TypeError, match=rf"on instance {last}, obj is a list that cannot be pick"):
        popdist_py.all_gather_object(deep if me == last else 1)


def check_memory_that_comes_twice():
    tied, other = torch.ones(3), np.ones((2, 2))
    found = popdist_py.all_reduce(
        {"a": tied, "b": [tied.view(3, 1), other], "c": other.T, "d": [np.ones(0), np.ones(0)]}
    )
    assert found["a"] is tied
    assert tied.tolist() == [count] * 3
    assert (other == count).all()
    if count > 1:
        with pytest.raises(
            popdist_py.CollectiveMismatchError,
            match=r"x\['b'\] \(instance.*the same memory as \['a'\]",
        ):
            popdist_py.all_reduce({"a": tied, "b": tied if me == 0 else torch.ones(3)})


def check_background():
    handles = [popdist_py.all_reduce(np.full(1000, me + n), async_op=True) for n in range(5)]
    direct = popdist_py.all_reduce(me)
    assert all(handle.is_completed() for handle in handles)
    for n, handle in enumerate(handles):
        assert (handle.wait() == direct + n * count).all()
    failing = popdist_py.all_reduce(np.full(3, "x"), async_op=True)
    try:
        failing.wait()
        raise AssertionError("text was added")
    except TypeError:
        pass


def check_that_autograd_notices_what_was_written():
    if count == 1:
        return  # nothing is written
    weight = torch.ones(3, requires_grad=True)
    for written, write in (
        (True, popdist_py.all_reduce),
        (True, lambda x: popdist_py.all_reduce({"x": x})),
        (me != 0, popdist_py.broadcast),
        (me != 0, lambda x: popdist_py.broadcast([x])),
        (False, popdist_py.all_gather),
        (False, lambda x: popdist_py.reduce_scatter(x.expand(count, 3))),
    ):
        saved = torch.ones(3)
        product = weight * saved
        write(saved)
        if written:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
        else:
            product.sum().backward()
    with torch.inference_mode():
        popdist_py.all_reduce(torch.ones(3))


def check_groups():
    inside = popdist_py.execute_on_instances({0}, popdist_py.all_reduce, 5)
    assert inside == (5 if me == 0 else None)
    if count > 2:
        group = {0, count - 1}
        found = popdist_py.execute_on_instances(
            group, lambda: (popdist_py.all_gather(me), popdist_py.broadcast(me, count - 1))
        )
        assert found == (([0, count - 1], count - 1) if me in group else None)
    assert popdist_py.execute_on_instances(range(count + 3), popdist_py.all_reduce, 1) == count
    seen = []

    def look():
        seen.append(popdist_py.context.communicator().num_instances)

    def look_in_another_thread():
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    popdist_py.execute_on_instances({me}, look_in_another_thread)
    assert seen == [1, count]


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


def _small_messages():
    # A test should not use enough memory for the largest message of MPI.
    from popdist_py.collectives.between_hosts import mpi

    return mock.patch.object(mpi, "_MAX_BYTES", 1_000_000)


def make_all_checks(*words):
    """Make all checks in each way of joining: variables, ``A=1,B=2`` or nothing.

    Return for each way the class of the communicator and that of its mesh between hosts, and the
    warnings of the library.
    """
    global me, count, comm, way, is_first_way
    found, warned = [], logging.handlers.BufferingHandler(100)
    logging.getLogger("popdist").addHandler(warned)
    try:
        for way, comm in ways(words):
            me, count, is_first_way = comm.instance_index, comm.num_instances, way == words[0]
            with _small_messages() if SMALL_MESSAGES in way else contextlib.nullcontext():
                for check in CHECKS:
                    check()
                    popdist_py.synchronize()
            group = getattr(comm, "_slice_owners", None)
            between_hosts = getattr(group, "mesh", None)
            found.append((type(comm).__name__, type(between_hosts).__name__))
    finally:
        logging.getLogger("popdist").removeHandler(warned)
    return found, [record.getMessage() for record in warned.buffer]


if __name__ == "__main__":
    for communicator, between_hosts in make_all_checks(*sys.argv[1:])[0]:
        print(f"{communicator} {len(CHECKS)} checks, {between_hosts}")
