"""Each collective call with the comparison of its result; run by against_numpy_program.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from random_cases import (
    FUNCTIONS,
    Case,
    DifferenceError,
    as_tensor,
    bits_of,
    elements,
    equal_elements,
    excerpt,
    laid_out,
    plain,
    reductions,
    shape_of,
    storage,
    torch_dtype,
    widened,
)

import popdist_py
from popdist_py import context
from popdist_py.horovod import torch as hvd

# --- One call of this instance --------------------------------------------------------------------


@dataclass
class Run:
    """This instance's part of a case."""

    case: Case
    instances: tuple[int, ...]
    instance: int
    same: list[bytes] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    changed: bool = False
    process_group: Any = None

    def __post_init__(self) -> None:
        self.me, self.count = self.instances.index(self.instance), len(self.instances)
        self.op, self.root = self.case.op, self.instances[self.case.root % self.count]
        self.is_root = self.root == self.instance
        self.shape = shape_of(self.case, self.instance, self.count)
        own = elements(self.case, self.instance, self.shape)
        layout, window = self.case.layouts[self.instance % 2], None
        if "window" in self.case.layouts:  # all instances make this call
            size = max(1, *(row.nbytes for row in self.rows))
            window = context.communicator().gradient_buffer(size)
        self.base, self.x = laid_out(own, layout, self.case, window)
        self._before = self.base.tobytes(), getattr(self.x, "_version", 0)

    def row(self, instance: int) -> np.ndarray:
        return elements(self.case, instance, shape_of(self.case, instance, self.count))

    @property
    def rows(self) -> list[np.ndarray]:
        """The input arrays of all instances of the group."""
        return [self.row(instance) for instance in self.instances]

    def value(self, array: np.ndarray) -> Any:
        """Return an array or tensor of the case's kind with these elements."""
        copy = array.copy()
        return as_tensor(copy, self.case.dtype) if self.case.as_torch else copy

    def empty(self, shape: tuple[int, ...]) -> Any:
        """Return memory for a result, filled with other values."""
        filled = np.frombuffer(b"\x01" * (math.prod(shape) * storage(self.case.dtype).itemsize),
                               storage(self.case.dtype))  # fmt: skip
        return self.value(filled.reshape(shape))

    def finished(self, result: Any) -> Any:
        """Return the result of a call that may run in the background."""
        return result.wait() if self.case.is_async else result

    def check_like(self, found: Any, shape: tuple[int, ...]) -> None:
        """Require the dtype and the shape of a result."""
        dtype = torch_dtype(self.case.dtype) if self.case.as_torch else storage(self.case.dtype)
        if found.dtype != dtype or tuple(found.shape) != tuple(shape):
            raise DifferenceError(f"got {found.dtype}{tuple(found.shape)}, not {dtype}{shape}")

    def check_reduced(
        self,
        found: Any,
        rows: Sequence[np.ndarray] | None = None,
        *,
        truncates: bool = False,
        is_same: bool = True,
        is_like: bool = True,
    ) -> None:
        """Compare a result with the reduction of the rows."""
        rows = self.rows if rows is None else rows
        if is_like:
            self.check_like(found, rows[0].shape)
        self.results.append(found)
        array = plain(found, self.case.dtype)
        if is_same:
            self.same.append(bits_of(array))
        values = widened(array, self.case.dtype)
        # NumPy may return a zero of either sign.
        with_signs = self.op not in ("max", "min") and not (
            self.op == "prod" and values.dtype.kind == "c"
        )
        wrong = np.ones(values.shape, bool)
        first = None
        for expected in reductions(self.case, rows, truncates):
            first = expected if first is None else first
            wrong &= ~equal_elements(values, expected, with_signs=with_signs)
            if not wrong.any():
                return
        raise DifferenceError(excerpt(values, first, wrong))

    def check_moved(self, found: Any, expected: np.ndarray, *, is_same: bool = False) -> None:
        """Compare a result with the bytes of an array."""
        self.check_like(found, expected.shape)
        self.results.append(found)
        array = plain(found, self.case.dtype)
        if is_same:
            self.same.append(bits_of(array))
        if bits_of(array) != bits_of(expected):
            raise DifferenceError(excerpt(array, expected, np.asarray(array != expected)))

    def check_inputs(self) -> None:
        """Require an unchanged input. If the call writes to it, the gaps must be unchanged."""
        if self.changed:
            if self.case.layouts[self.instance % 2] == "strided" and self.x.ndim and self.base.size:
                before = np.frombuffer(self._before[0], self.base.dtype).reshape(self.base.shape)
                if self.base[..., 1::2].tobytes() != before[..., 1::2].tobytes():
                    raise DifferenceError("memory between the elements of the input was changed")
        elif self.base.tobytes() != self._before[0]:
            raise DifferenceError("the input was changed")
        elif getattr(self.x, "_version", 0) != self._before[1]:
            raise DifferenceError("the input counts as changed: its _version has grown")


def _blocks(run: Run, array: np.ndarray) -> list[np.ndarray]:
    return np.split(array, run.count)


def _splits(run: Run, instance: int) -> list[int]:
    """Return the number of rows that an instance sends to each member of the group."""
    rows = shape_of(run.case, instance, run.count)[0]
    cuts = np.random.default_rng([run.case.seed, instance, 2]).integers(0, rows + 1, run.count - 1)
    return np.diff([0, *sorted(cuts.tolist()), rows]).tolist()


def _sent_to_me(run: Run, splits: Callable[[int], list[int]]) -> list[np.ndarray]:
    found = []
    for instance in run.instances:
        parts = splits(instance)
        begin = sum(parts[: run.me])
        found.append(run.row(instance)[begin : begin + parts[run.me]])
    return found


# --- The library's own calls ----------------------------------------------------------------------


def all_reduce(run: Run) -> None:
    run.changed = True
    found = run.finished(popdist_py.all_reduce(run.x, run.op, async_op=run.case.is_async))
    assert found is run.x
    run.check_reduced(found)


def all_reduce_container(run: Run) -> None:
    run.changed = True
    given = {"x": run.x, "numbers": (run.me + 1, [2.5])}
    found = run.finished(popdist_py.all_reduce(given, run.op, async_op=run.case.is_async))
    assert found["x"] is run.x
    run.check_reduced(found["x"])
    numbers = np.arange(1, run.count + 1)
    expected = numbers.mean() if run.op == "mean" else FUNCTIONS[run.op].reduce(numbers)
    if found["numbers"][0] != expected or type(found["numbers"][0]) is not type(expected.item()):
        raise DifferenceError(f"got the number {found['numbers'][0]!r}, not {expected!r}")


def all_reduce_number(run: Run) -> None:
    rows = [row.reshape(-1)[:1].copy() for row in run.rows]
    number = rows[run.me][0]
    found = run.finished(popdist_py.all_reduce(number, run.op, async_op=run.case.is_async))
    is_like = run.op != "mean" or rows[0].dtype.kind not in "biu"
    if is_like:
        run.check_reduced(np.asarray(found).reshape(1), rows)
    else:
        expected = np.mean([row.astype(float) for row in rows], axis=0)
        if not np.allclose(found, expected, rtol=1e-15):
            raise DifferenceError(f"got the mean {found!r}, not {expected[0]!r}")


def reduce_scatter(run: Run) -> None:
    found = run.finished(popdist_py.reduce_scatter(run.x, run.op, async_op=run.case.is_async))
    run.check_reduced(found, [_blocks(run, row)[run.me] for row in run.rows], is_same=False)


def broadcast(run: Run) -> None:
    run.changed = not run.is_root
    found = run.finished(popdist_py.broadcast(run.x, run.root, async_op=run.case.is_async))
    assert found is run.x
    run.check_moved(found, run.row(run.root), is_same=True)


def all_gather(run: Run) -> None:
    found = run.finished(popdist_py.all_gather(run.x, async_op=run.case.is_async))
    _check_list(run, found)


def gather(run: Run) -> None:
    found = run.finished(popdist_py.gather(run.x, run.root, async_op=run.case.is_async))
    assert (found is None) == (not run.is_root)
    if found is not None:
        _check_list(run, found, is_same=False)


def _check_list(run: Run, found: Sequence[Any], *, is_same: bool = True) -> None:
    assert len(found) == run.count
    for row, expected in zip(found, run.rows, strict=True):
        run.check_moved(row, expected, is_same=is_same)


def _object(run: Run) -> Any:
    return {"x": run.x, "text": "x" * run.instance, "more": [run.instance, None]}


def _check_object(run: Run, found: Any, instance: int) -> None:
    assert (found["text"], found["more"]) == ("x" * instance, [instance, None])
    run.check_moved(found["x"], run.row(instance))


def all_gather_object(run: Run) -> None:
    found = run.finished(popdist_py.all_gather_object(_object(run), async_op=run.case.is_async))
    for each, instance in zip(found, run.instances, strict=True):
        _check_object(run, each, instance)


def gather_object(run: Run) -> None:
    given = _object(run)
    found = run.finished(popdist_py.gather_object(given, run.root, async_op=run.case.is_async))
    assert (found is None) == (not run.is_root)
    for each, instance in zip(found or (), run.instances if run.is_root else (), strict=True):
        _check_object(run, each, instance)


def broadcast_object(run: Run) -> None:
    given = _object(run) if run.is_root else None
    found = run.finished(popdist_py.broadcast_object(given, run.root, async_op=run.case.is_async))
    _check_object(run, found, run.root)


def add_replicas(run: Run) -> None:
    """Compare the bits with the sums of the tree over replicas, whose order is fixed."""
    communicator = context.communicator()
    rows = 1 + run.case.seed % 3
    shape = (rows, math.prod(run.shape))
    everyone = [elements(run.case, i, shape) for i in run.instances]
    memory = communicator.gradient_buffer(max(1, everyone[0].nbytes))
    leaves = memory[: everyone[0].nbytes].view(everyone[0].dtype).reshape(shape)
    leaves[...] = everyone[run.me]
    communicator.add_replicas(leaves)
    level = [row for array in everyone for row in array]
    while len(level) > 1:
        sums = [a + b for a, b in zip(level[::2], level[1::2], strict=False)]
        level = sums + level[2 * len(sums) :]
    run.same.append(leaves[0].tobytes())
    wrong = ~equal_elements(leaves[0], level[0], with_signs=True)
    if wrong.any():
        raise DifferenceError(excerpt(leaves[0], level[0], wrong))


def reduce_slice(run: Run) -> None:
    memory = context.communicator().host_memory
    if memory is None:
        return
    window = context.communicator().gradient_buffer(max(1, run.base.nbytes))
    array = window[: run.base.nbytes].view(run.base.dtype)
    flat = [row.reshape(-1) for row in run.rows]
    array[:] = flat[run.me]
    own = memory.own_slice(array.size)
    memory.reduce_slice(array)
    run.check_reduced(array[own].copy(), [row[own] for row in flat], is_same=False)
    rest = [slice(0, own.start), slice(own.stop, array.size)]
    popdist_py.barrier()
    if any(array[part].tobytes() != flat[run.me][part].tobytes() for part in rest):
        raise DifferenceError("elements outside of the own slice were changed")


# --- Horovod's calls ------------------------------------------------------------------------------

_HVD_OPS = {"sum": hvd.Sum, "mean": hvd.Average, "max": hvd.Max, "min": hvd.Min,
            "prod": hvd.Product}  # fmt: skip


def _hvd(run: Run, name: str, *args: Any, **more: Any) -> Any:
    if run.case.is_async:
        stem = name.rstrip("_")
        call = getattr(hvd, f"{stem}_async{name[len(stem) :]}")
        return hvd.synchronize(call(*args, **more))
    return getattr(hvd, name)(*args, **more)


def hvd_allreduce(run: Run) -> None:
    found = _hvd(run, "allreduce", run.x, op=_HVD_OPS[run.op])
    run.check_reduced(found, truncates=True)


def hvd_allreduce_(run: Run) -> None:
    run.changed = True
    assert _hvd(run, "allreduce_", run.x, op=_HVD_OPS[run.op]) is run.x
    run.check_reduced(run.x, truncates=True)


def hvd_grouped_allreduce(run: Run) -> None:
    other = run.value(run.row(run.instance).reshape(-1)[:3])
    found = _hvd(run, "grouped_allreduce", [run.x, other], op=_HVD_OPS[run.op])
    run.check_reduced(found[0], truncates=True)
    run.check_reduced(found[1], [row.reshape(-1)[:3] for row in run.rows], truncates=True)


def hvd_allgather(run: Run) -> None:
    run.check_moved(_hvd(run, "allgather", run.x), np.concatenate(run.rows), is_same=True)


def hvd_broadcast(run: Run) -> None:
    found = _hvd(run, "broadcast", run.x, run.root)
    run.check_moved(found, run.row(run.root), is_same=True)


def hvd_broadcast_(run: Run) -> None:
    run.changed = not run.is_root
    assert _hvd(run, "broadcast_", run.x, run.root) is run.x
    run.check_moved(run.x, run.row(run.root), is_same=True)


def hvd_alltoall(run: Run) -> None:
    splits = functools.partial(_splits, run)
    given = torch.tensor(splits(run.instance), dtype=torch.int32)
    found, received = _hvd(run, "alltoall", run.x, given)
    expected = _sent_to_me(run, splits)
    run.check_moved(found, np.concatenate(expected))
    assert received.tolist() == [len(rows) for rows in expected]


def hvd_reducescatter(run: Run) -> None:
    found = _hvd(run, "reducescatter", run.x, op=_HVD_OPS[run.op])
    rows = [np.array_split(row, run.count)[run.me] for row in run.rows]
    run.check_reduced(found, rows, truncates=True, is_same=False)


# --- Calls of torch.distributed -------------------------------------------------------------------

_TORCH_OPS = {"sum": "SUM", "mean": "AVG", "max": "MAX", "min": "MIN", "prod": "PRODUCT",
              "band": "BAND", "bor": "BOR", "bxor": "BXOR"}  # fmt: skip


def _torch(run: Run, name: str, *args: Any, **more: Any) -> None:
    work = getattr(dist, name)(*args, group=run.process_group, async_op=run.case.is_async, **more)
    if run.case.is_async:
        work.wait()


def _torch_op(run: Run) -> Any:
    return getattr(dist.ReduceOp, _TORCH_OPS[run.op])


def torch_all_reduce(run: Run) -> None:
    run.changed = True
    _torch(run, "all_reduce", run.x, _torch_op(run))
    run.check_reduced(run.x, truncates=True)


def torch_reduce(run: Run) -> None:
    run.changed = run.is_root
    _torch(run, "reduce", run.x, run.root, _torch_op(run))
    if run.is_root:
        run.check_reduced(run.x, truncates=True, is_same=False)


def torch_reduce_scatter_single(run: Run) -> None:
    rows = [_blocks(run, row)[run.me] for row in run.rows]
    output = run.empty(rows[0].shape)
    _torch(run, "reduce_scatter_single", output, run.x, _torch_op(run))
    run.check_reduced(output, rows, truncates=True, is_same=False)


def torch_reduce_scatter(run: Run) -> None:
    """Reduce blocks of different sizes. The first rank gets the rows that are left over."""
    rows = shape_of(run.case, run.instance, run.count)[0]
    parts = [min(rows // run.count, 1)] * run.count
    parts[0] = rows - sum(parts[1:])
    ends = np.cumsum(parts)[:-1]
    expected = [np.split(row, ends)[run.me] for row in run.rows]
    output = run.empty(expected[0].shape)
    _torch(run, "reduce_scatter", output, list(run.x.split(parts)), _torch_op(run))
    run.check_reduced(output, expected, truncates=True, is_same=False)


def torch_broadcast(run: Run) -> None:
    run.changed = not run.is_root
    _torch(run, "broadcast", run.x, run.root)
    run.check_moved(run.x, run.row(run.root), is_same=True)


def torch_all_gather(run: Run) -> None:
    outputs = [run.empty(row.shape) for row in run.rows]
    _torch(run, "all_gather", outputs, run.x)
    _check_list(run, outputs)


torch_all_gather_uneven = torch_all_gather


def torch_all_gather_single(run: Run) -> None:
    output = run.empty((run.count, *run.shape))
    _torch(run, "all_gather_single", output, run.x)
    run.check_moved(output, np.stack(run.rows), is_same=True)


def torch_gather(run: Run) -> None:
    outputs = [run.empty(row.shape) for row in run.rows] if run.is_root else None
    _torch(run, "gather", run.x, outputs, run.root)
    if outputs is not None:
        _check_list(run, outputs, is_same=False)


def torch_scatter(run: Run) -> None:
    expected = _blocks(run, run.row(run.root))[run.me]
    output = run.empty(expected.shape)
    inputs = list(run.x.chunk(run.count)) if run.is_root else None
    # chunk() returns a single chunk of an empty tensor.
    if inputs is not None and len(inputs) < run.count:
        inputs = [run.empty(expected.shape) for _ in range(run.count)]
    _torch(run, "scatter", output, inputs, run.root)
    run.check_moved(output, expected)


def torch_all_to_all(run: Run) -> None:
    splits = functools.partial(_splits, run)
    expected = _sent_to_me(run, splits)
    outputs = [run.empty(rows.shape) for rows in expected]
    _torch(run, "all_to_all", outputs, list(run.x.split(splits(run.instance))))
    for found, rows in zip(outputs, expected, strict=True):
        run.check_moved(found, rows)


def torch_all_to_all_single(run: Run) -> None:
    expected = np.concatenate([_blocks(run, row)[run.me] for row in run.rows])
    output = run.empty(expected.shape)
    _torch(run, "all_to_all_single", output, run.x)
    run.check_moved(output, expected)


def torch_all_gather_object(run: Run) -> None:
    found: list[Any] = [None] * run.count
    dist.all_gather_object(found, _object(run), run.process_group)
    for each, instance in zip(found, run.instances, strict=True):
        _check_object(run, each, instance)


CALLS: dict[str, Callable[[Run], None]] = {
    each.__name__: each
    for each in (
        all_reduce, all_reduce_container, all_reduce_number, reduce_scatter, broadcast, all_gather,
        gather, all_gather_object, gather_object, broadcast_object, add_replicas, reduce_slice,
        hvd_allreduce, hvd_allreduce_, hvd_grouped_allreduce, hvd_allgather, hvd_broadcast,
        hvd_broadcast_, hvd_alltoall, hvd_reducescatter,
    )
}  # fmt: skip
TORCH_CALLS: dict[str, Callable[[Run], None]] = {
    "torch_all_gather_uneven": torch_all_gather_uneven,
    **{
        each.__name__: each
        for each in (
            torch_all_reduce, torch_reduce, torch_reduce_scatter_single, torch_reduce_scatter,
            torch_broadcast, torch_all_gather, torch_all_gather_single, torch_gather,
            torch_scatter, torch_all_to_all, torch_all_to_all_single, torch_all_gather_object,
        )
    },
}  # fmt: skip
