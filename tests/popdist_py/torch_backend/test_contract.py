"""The contract of each torch.distributed call, tested with gloo and with popdist.

All calls of one back end run in one job. The expected value of a call is computed without a process
group. ``gloo=False`` marks calls that gloo does not support.
"""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values

_CASES = {}


def _case(expected, *, gloo=True, sizes=(2, 3)):
    """Register a test whose function must return the same as ``expected(rank, size)``."""

    def register(function):
        _CASES[function.__name__.strip("_")] = (function, expected, gloo, sizes)
        return function

    return register


def _given(rank, dtype=torch.float32, count=6):
    """Return a tensor of small numbers, whose sums are exact in every dtype."""
    return (torch.arange(count) % 3 + rank + 1).to(dtype)


def _all_given(size, dtype=torch.float32, count=6):
    return torch.stack([_given(rank, dtype, count) for rank in range(size)])


# --- Reductions ---------------------------------------------------------------------------------

_OPS = {
    "SUM": lambda rows: rows.sum(0),
    "PRODUCT": lambda rows: rows.prod(0),
    "MIN": lambda rows: rows.amin(0),
    "MAX": lambda rows: rows.amax(0),
    "BAND": lambda rows: _fold(torch.bitwise_and, rows),
    "BOR": lambda rows: _fold(torch.bitwise_or, rows),
    "BXOR": lambda rows: _fold(torch.bitwise_xor, rows),
    "AVG": lambda rows: rows.float().mean(0),
}
_FLOATS = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_OF_GLOO = {*_FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64}


def _fold(function, rows):
    total = rows[0]
    for row in rows[1:]:
        total = function(total, row)
    return total


def _register_reductions():
    for name, reduction in _OPS.items():
        types = (*_FLOATS, *_INTEGERS) if name in ("SUM", "PRODUCT", "MIN", "MAX") else _INTEGERS
        for dtype in _FLOATS if name == "AVG" else types:

            def reduce(rank, size, name=name, dtype=dtype):
                tensor = _given(rank, dtype)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
                return tensor

            def expected(rank, size, reduction=reduction, dtype=dtype):
                return reduction(_all_given(size, dtype)).to(dtype)

            reduce.__name__ = f"all_reduce_{name}_{str(dtype)[6:]}"
            of_bits = name.startswith("B") or name == "AVG"
            _case(expected, gloo=dtype in _OF_GLOO and not of_bits)(reduce)


_register_reductions()


@_case(lambda _rank, size: [_all_given(size).sum(0), _all_given(size, count=3).sum(0)])
def _all_reduce_coalesced(rank, size):
    tensors = [_given(rank), _given(rank, count=3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


@_case(lambda _rank, size: (_all_given(size) * 0.5).sum(0), gloo=False)
def _all_reduce_with_a_factor(rank, size):
    tensor = _given(rank)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    return tensor


@_case(lambda rank, size: (_all_given(size) * 3).sum(0)[rank * 2 : rank * 2 + 2], gloo=False)
def _reduce_scatter_with_a_factor(rank, size):
    output = torch.zeros(2)
    whole = _given(rank, count=2 * size)
    dist.reduce_scatter_single(output, whole, dist._make_nccl_premul_sum(torch.tensor([3.0])))
    return output


@_case(lambda _rank, size: torch.full((4,), complex(sum(range(size)), size)))
def _all_reduce_complex(rank, size):
    tensor = torch.full((4,), complex(rank, 1))
    dist.all_reduce(tensor)
    return tensor


@_case(lambda _rank, size: [True, size > 1, False], gloo=False)
def _all_reduce_of_booleans(rank, size):
    tensor = torch.tensor([True, rank == 1, False])
    dist.all_reduce(tensor)
    return tensor


@_case(lambda _rank, size: [[0.0, 0.0, 3.0 * size, 0.0, 3.0 * size], sum(range(1, size + 1))])
def _all_reduce_sparse(rank, size):
    places = torch.tensor([[2, 4, rank % 2, rank % 2]])
    tensor = torch.sparse_coo_tensor(places, torch.tensor([3.0, 3.0, 1.0, -1.0]), (5,))
    dist.all_reduce(tensor)
    embedded = torch.sparse_coo_tensor([[0]], torch.tensor([[1.0 + rank]]), (2, 1))
    dist.all_reduce(embedded)
    return [tensor.to_dense(), embedded.to_dense()[0, 0]]


@_case(lambda rank, size: [_all_given(size).sum(0) if rank == 1 else None] * 2)
def _reduce(rank, size):
    tensors = [_given(rank), _given(rank)]
    dist.reduce(tensors[0], dst=1)
    dist.reduce(tensors[1], group_dst=1)
    return tensors if rank == 1 else [None, None]


@_case(lambda rank, size: _all_given(size, count=2 * size).sum(0)[2 * rank : 2 * rank + 2])
def _reduce_scatter(rank, size):
    output = torch.empty(2)
    dist.reduce_scatter(output, list(_given(rank, count=2 * size).chunk(size)))
    return output


@_case(lambda rank, size: [sum(range(1, size + 1)) * 1.0] * (rank + 1), gloo=False)
def _reduce_scatter_of_different_sizes(rank, size):
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, [torch.full((n + 1,), rank + 1.0) for n in range(size)])
    return output


@_case(lambda rank, size: _all_given(size, count=2 * size).amax(0)[2 * rank : 2 * rank + 2])
def _reduce_scatter_into_its_input(rank, size):
    whole = _given(rank, count=2 * size)
    output = whole[2 * rank : 2 * rank + 2]
    dist.reduce_scatter_single(output, whole, dist.ReduceOp.MAX)
    return output


@_case(
    lambda rank, size: [_all_given(size, count=n * size).sum(0).chunk(size)[rank] for n in (1, 2)]
)
def _reduce_scatter_coalesced(rank, size):
    outputs = [torch.empty(1), torch.empty(2)]
    with dist._coalescing_manager():
        for n, output in enumerate(outputs, 1):
            dist.reduce_scatter_single(output, _given(rank, count=n * size))
    return outputs


# --- Calls that move values ---------------------------------------------------------------------

_MOVED = (
    *_FLOATS,
    *_INTEGERS,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_MOVED_BY_GLOO = {*_OF_GLOO, torch.bool, torch.complex64, torch.complex128}


def _register_moves():
    for dtype in _MOVED:

        def move(rank, size, dtype=dtype):
            sent, gathered = _given(rank, dtype), torch.empty(6 * size, dtype=dtype)
            rows = [torch.empty(6, dtype=dtype) for _ in range(size)]
            copied = sent.clone()
            dist.broadcast(copied, 1)
            dist.all_gather(rows, sent)
            dist.all_gather_single(gathered, sent)
            return [copied, *rows, gathered]

        def expected(rank, size, dtype=dtype):
            rows = list(_all_given(size).to(dtype))
            return [rows[1], *rows, torch.cat(rows)]

        move.__name__ = f"moved_{str(dtype)[6:]}"
        _case(expected, gloo=dtype in _MOVED_BY_GLOO)(move)


_register_moves()


@_case(lambda _rank, size: _all_given(size), gloo=False)
def _all_gather_stacked(rank, size):
    stacked = torch.empty(size, 6)
    dist.all_gather_single(stacked, _given(rank))
    return stacked


@_case(lambda _rank, size: _all_given(size).reshape(-1))
def _all_gather_from_its_output(rank, size):
    whole = torch.zeros(size * 6)
    own = whole[rank * 6 : rank * 6 + 6]
    own.copy_(_given(rank))
    dist.all_gather_single(whole, own)
    return whole


@_case(lambda _rank, size: [torch.full((n + 1,), float(n)) for n in range(size)], gloo=False)
def _all_gather_of_different_sizes(rank, size):
    rows = [torch.empty(n + 1) for n in range(size)]
    dist.all_gather(rows, torch.full((rank + 1,), float(rank)))
    return rows


@_case(lambda _rank, size: [_all_given(size).reshape(-1), _all_given(size, count=2).reshape(-1)])
def _all_gather_single_coalesced(rank, size):
    outputs = [torch.empty(size * 6), torch.empty(size * 2)]
    with dist._coalescing_manager():
        dist.all_gather_single(outputs[0], _given(rank))
        dist.all_gather_single(outputs[1], _given(rank, count=2))
    return outputs


@_case(lambda _rank, size: [[row, row[:2]] for row in _all_given(size)])
def _all_gather_coalesced(rank, size):
    lists = [[torch.empty(6), torch.empty(2)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [_given(rank), _given(rank, count=2)])
    return lists


@_case(lambda rank, size: list(_all_given(size)) if rank == size - 1 else [])
def _gather(rank, size):
    rows = [torch.empty(6) for _ in range(size)] if rank == size - 1 else None
    dist.gather(_given(rank), rows, dst=size - 1)
    return rows or []


@_case(lambda rank, _size: _given(rank + 10))
def _scatter(rank, size):
    output = torch.empty(6)
    rows = [_given(n + 10) for n in range(size)] if rank == 1 else None
    dist.scatter(output, rows, group_src=1)
    return output


@_case(lambda rank, size: [torch.full((rank + 1,), 10.0 * n + rank) for n in range(size)])
def _all_to_all(rank, size):
    outputs = [torch.empty(rank + 1) for _ in range(size)]
    blocks = [torch.full((n + 1,), 10.0 * rank + n) for n in range(size)]
    if dist.get_backend() == "gloo":  # gloo only has the signature with one tensor
        output = torch.cat(outputs)
        dist.all_to_all_single(
            output, torch.cat(blocks), [rank + 1] * size, [n + 1 for n in range(size)]
        )
        return list(output.chunk(size))
    dist.all_to_all(outputs, blocks)
    return outputs


@_case(lambda rank, size: [[10 * n + rank] * 2 for n in range(size)])
def _all_to_all_single(rank, size):
    output = torch.empty(size, 2, dtype=torch.int64)
    blocks = torch.tensor([[10 * rank + n] * 2 for n in range(size)])
    dist.all_to_all_single(output, blocks)
    return output


@_case(lambda rank, size: [*([10 * n + rank] * (n + 1) for n in range(size))])
def _all_to_all_single_with_sizes(rank, size):
    output = torch.empty(sum(range(1, size + 1)), dtype=torch.int64)
    blocks = torch.cat([torch.full((rank + 1,), 10 * rank + n) for n in range(size)])
    sizes = [n + 1 for n in range(size)]
    dist.all_to_all_single(output, blocks, sizes, [rank + 1] * size)
    return list(output.split(sizes))


# --- Objects, groups, and what is built on the calls ----------------------------------------------


@_case(
    lambda rank, size: [
        [{"rank": n} for n in range(size)],
        [{"rank": n} for n in range(size)] if rank == 0 else None,
        ["from", 1],
        f"for {rank}",
    ]
)
def _objects(rank, size):
    everywhere, at_root = [None] * size, [None] * size if rank == 0 else None
    dist.all_gather_object(everywhere, {"rank": rank})
    dist.gather_object({"rank": rank}, at_root)
    told = ["from", 1] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, 1)
    received = [None]
    dist.scatter_object_list(received, [f"for {n}" for n in range(size)] if rank == 0 else None)
    return [everywhere, at_root, told, received[0]]


@_case(
    lambda rank, size: (
        [[size - 2, size - 1], [2.0 * size - 3, size - 1.0]] if rank >= size - 2 else None
    )
)
def _groups(rank, size):
    group = dist.new_group([size - 2, size - 1])
    if rank < size - 2:
        return None
    total, told = torch.tensor(float(rank)), torch.tensor(float(rank))
    dist.all_reduce(total, group=group)
    dist.broadcast(told, size - 1, group=group)
    assert dist.get_backend(group) == dist.get_backend()
    assert group.group_name
    return [dist.get_process_group_ranks(group), [total, told]]


@_case(
    lambda rank, size: [
        _all_given(size).sum(0),
        _all_given(size).reshape(-1),
        _all_given(size).sum(0)[: 6 // size * size].chunk(size)[rank],
        _all_given(size)[1],
        _all_given(size, count=size)[:, rank],
        _given((rank - 1) % size),
    ],
    sizes=(2,),
)
def _functional(rank, size):
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    own = _given(rank)
    return [
        functional.all_reduce(own, "sum", group).clone(),
        functional.all_gather_tensor(own, 0, group).clone(),
        functional.reduce_scatter_tensor(own[: 6 // size * size], "sum", 0, group).clone(),
        functional.broadcast(own, 1, group).clone(),
        functional.all_to_all_single(_given(rank, count=size), None, None, group).clone(),
        functional.permute_tensor(own, [(n + 1) % size for n in range(size)], group).clone(),
    ]


@_case(
    lambda _rank, size: [
        [[size] * 2, [size] * 3],
        [[row] * 2 for row in range(1, size + 1)],
        [[1.0 + n for n in range(size)], [3.0] * size, [1.0, 2.0]],
    ],
    sizes=(2,),
)
def _functional_coalesced_and_gradients(rank, size):
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    summed = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", group)
    (gathered,) = functional.all_gather_into_tensor_coalesced([torch.full((1, 2), rank + 1)], group)
    gathered = gathered.clone()
    changed, shared, split = (torch.ones(size, requires_grad=True) for _ in range(3))
    outputs = [
        functional.all_to_all_single_autograd(changed, [1] * size, [1] * size, group),
        functional.all_gather_tensor_autograd(shared, 0, group),
        functional.reduce_scatter_tensor_autograd(split, "sum", 0, group),
    ]
    for output in outputs:
        (output * (rank + 1)).sum().backward()
    return [
        [tensor.clone() for tensor in summed],
        gathered,
        [tensor.grad for tensor in (changed, shared, split)],
    ]


@_case(lambda _rank, _size: [1.0] * 3, gloo=False)  # gloo treats it as contiguous
def _broadcast_of_an_expanded_tensor(rank, _size):
    tensor = torch.ones(1).expand(3) if rank == 0 else torch.zeros(3)
    dist.broadcast(tensor, 0)
    return tensor


@_case(
    lambda _rank, size: [_all_given(size), _all_given(size).sum(0), torch.ones(6) * size],
    sizes=(2,),
)
def _device_mesh(rank, size):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (size,))
    rows = DTensor.from_local(_given(rank).view(1, 6), mesh, [Shard(0)])
    parts = DTensor.from_local(_given(rank), mesh, [Partial()])
    columns = rows.redistribute(mesh, [Replicate()])
    ones = torch.ones(6, requires_grad=True)
    DTensor.from_local(ones, mesh, [Partial()]).redistribute(
        mesh, [Replicate()]
    ).to_local().sum().backward()
    return [columns.to_local(), parts.full_tensor(), ones.grad * size]


# --- Tensors of every kind ------------------------------------------------------------------------


@_case(lambda _rank, size: [size * 1.0, [], [[size * 1.0] * 2] * 3, size * 1.0])
def _shapes(rank, size):
    scalar, empty, parameter = torch.ones(()), torch.empty(0, 3), torch.ones((), requires_grad=True)
    turned = torch.ones(2, 3).T
    for tensor in (scalar, empty, turned, parameter):
        dist.all_reduce(tensor)
    dist.barrier(device_ids=[0])
    return [scalar, empty.reshape(-1), turned, parameter]


@_case(lambda _rank, size: [1.0, size, 1.0, size], gloo=False)  # gloo treats it as contiguous
def _part_of_a_storage(rank, size):
    storage = torch.ones(4)
    dist.all_reduce(storage[1::2])
    return storage


@_case(lambda _rank, size: [_all_given(size).T.reshape(3, 2, size), _given(1).view(3, 2)])
def _strides(rank, size):
    gathered = torch.zeros(3, 2, size)
    rows = [gathered[..., n] for n in range(size)]
    dist.all_gather(rows, _given(rank).view(3, 2))
    told = _given(rank).view(3, 2).T.contiguous().T
    dist.broadcast(told, 1)
    return [gathered, told]


@_case(lambda _rank, size: [[float(size)] * 100] * 5)
def _many_at_once(rank, size):
    tensors = [torch.ones(100) for _ in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)
    return tensors


@_case(
    lambda rank, size: [
        _all_given(size).amax(0),
        _given(1),
        _all_given(size).sum(0) if rank == 1 else None,
        list(_all_given(size)),
        list(_all_given(size)) if rank == 1 else [],
        [rank + 10.0],
    ]
)
def _methods_of_a_group(rank, size):
    group, opposite = dist.group.WORLD, torch.empty(1)
    largest, told, summed = _given(rank), _given(rank), _given(rank)
    rows, at_root = ([torch.empty(6) for _ in range(size)] for _ in range(2))
    sent = [torch.tensor([n + 10.0]) for n in range(size)]
    group.allreduce(largest, dist.ReduceOp.MAX).wait()
    group.broadcast(told, root=1).wait()
    group.reduce(summed, 1, dist.ReduceOp.SUM).wait()
    group.allgather(rows, _given(rank)).wait()
    group.gather(at_root if rank == 1 else [], _given(rank), 1).wait()
    group.scatter(opposite, sent if rank == 1 else [], root=1).wait()
    group.barrier().wait()
    at_one = (summed, at_root) if rank == 1 else (None, [])
    return [largest, told, at_one[0], rows, at_one[1], opposite]


@_case(lambda _rank, _size: 2)
def _sequence_number(_rank, _size):
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    return group._get_sequence_number_for_group() - before


# --- Wrong calls: an error on every rank, and nothing is sent -------------------------------------


@_case(lambda _rank, _size: ["RuntimeError", "RuntimeError"])
def _wrong_lists(rank, size):
    return [
        _error(dist.all_gather, [torch.empty(2)], torch.empty(2)),
        _error(dist.all_gather, [torch.empty(3)] * size, torch.empty(2)),
    ]


@_case(
    lambda _rank, _size: ["RuntimeError"] * 4 + ["TypeError"] * 3 + ["RuntimeError"] * 2, gloo=False
)
def _wrong_arguments(rank, size):
    root = dist.BroadcastOptions()
    root.rootRank = size
    group = dist.group.WORLD
    return [
        _error(dist.all_gather_single, torch.empty(3), torch.empty(2)),  # sizes
        _error(dist.reduce_scatter_single, torch.empty(2), torch.empty(3)),
        _error(dist.all_to_all_single, torch.empty(7), torch.empty(7)),  # splits
        _error(dist.all_to_all_single, torch.empty(7), torch.empty(7), [1] * size, [1] * size),
        _error(dist.all_reduce, torch.ones(2), dist.ReduceOp.BXOR),  # dtypes
        _error(dist.all_reduce, torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG),
        _error(dist.all_reduce, torch.ones(2).to(torch.float8_e5m2)),
        _error(group.broadcast, [torch.ones(2)], root),  # rank out of range
        _error(dist.all_reduce, torch.ones(2, device="meta")),  # not on the CPU
    ]


@_case(lambda _rank, _size: [["RuntimeError"] * 9, [1.0] * 6], gloo=False)
def _elements_that_share_memory(rank, size):
    whole, few = torch.ones(6), torch.ones(2)
    strided, expanded = whole.as_strided((3, 2), (1, 1)), torch.ones(3, 1).expand(3, 2)
    return [
        [
            _error(dist.all_reduce, strided),
            _error(dist.all_reduce, expanded),
            _error(dist.reduce, expanded, rank),
            _error(dist.broadcast, expanded, (rank + 1) % size),
            _error(dist.recv, strided),
            _error(dist.all_gather, [expanded, *[torch.ones(6)] * (size - 1)], whole),
            _error(dist.reduce_scatter_single, expanded, torch.ones(6 * size)),
            _error(dist.all_reduce_coalesced, [few, whole[1:4], whole[3:]]),
            _error(dist.all_reduce_coalesced, [few, whole.view(3, 2)[:, 1], whole[3:4]]),
        ],
        whole,
    ]


@_case(lambda _rank, size: [float(size)] * 6, gloo=False)
def _all_reduce_of_columns_that_lie_between_one_another(rank, size):
    whole = torch.ones(3, 2)
    dist.all_reduce_coalesced([whole[:, 0], whole[:, 1]])
    return whole.view(-1)


def _error(function, *args):
    """Return the name of the error class that programs catch."""
    try:
        function(*args)
    except TypeError:
        return "TypeError"
    except RuntimeError:
        return "RuntimeError"
    return "no error"


# --- The judge ------------------------------------------------------------------------------------


def _run_all(rank, names):
    import warnings

    found = {}
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # old torch lacks the new names
            try:
                found[name] = _plain(_CASES[name][0](rank, dist.get_world_size()))
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def _plain(value):
    """Convert tensors to numbers and the name of their dtype."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu()
        if numbers.dtype.itemsize == 1 and numbers.dtype.is_floating_point:
            numbers = numbers.float()
        return numbers.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


@cache
def _results(backend, size):
    names = [
        name
        for name, (_, _, gloo, sizes) in _CASES.items()
        if (gloo or backend != "gloo") and size in sizes
    ]
    return values(run_ranks(size, _run_all, names, backend=backend))


def _parameters():
    for name, (_, _, gloo, sizes) in _CASES.items():
        for size in sizes:
            yield pytest.param("popdist", size, name, marks=[pytest.mark.sweep] * (size > 2))
            # Two ranks of gloo check that the expected values are those of torch.
            if gloo and size == 2:
                yield pytest.param("gloo", size, name, marks=pytest.mark.sweep)


@pytest.mark.parametrize(("backend", "size", "name"), list(_parameters()))
def test_a_call_does_what_it_promises(backend, size, name):
    expected = _CASES[name][1]
    found = _results(backend, size)
    for rank in range(size):
        assert found[rank][name] == _plain(expected(rank, size)), f"rank {rank}"


def _overflow(rank):
    import warnings

    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in _FLOATS:
            tensor = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
            tensor[rank] = -torch.inf
            tensor[2] = (-1) ** rank * torch.inf
            dist.all_reduce(tensor)
            found.append([str(value) for value in tensor.tolist()])
    return found


def test_sums_that_overflow_are_infinite_without_a_warning():
    expected = [["-inf", "-inf", "nan", "inf"]] * len(_FLOATS)
    assert values(run_ranks(2, _overflow)) == [expected] * 2
