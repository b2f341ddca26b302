"""Random collective calls on every path give the results of NumPy, with equal bits everywhere.

The tests with the marker ``long`` make 10,000 calls on every path, other ones with every
``--hypothesis-seed``:

    pytest -n 0 -m long tests/popdist_py/collectives/test_against_numpy.py --hypothesis-seed=1

A failure names the call as a ``Case``; against_numpy_program.py makes a single case by hand.
"""

from __future__ import annotations

import functools
import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.instances import InstanceFailedError

with mock.patch.object(sys, "path", [str(Path(__file__).parent), *sys.path]):
    import against_numpy_program as program
    import random_cases
    from random_cases import Case

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]

WITHOUT_READING, WITHOUT_SHARING = "TEST_WITHOUT_READING=1", "POPDIST_SHARED_MEMORY=0"
PATHS = {
    1: [""],
    2: ["", WITHOUT_READING, WITHOUT_SHARING, "TEST_NUM_HOSTS=2",
        "TEST_NUM_HOSTS=2,TEST_WITHOUT_SOCKETS=1"],
    3: ["", WITHOUT_READING, WITHOUT_SHARING, "TEST_NUM_HOSTS=2",
        "TEST_NUM_HOSTS=2,TEST_WITHOUT_SOCKETS=1,TEST_WITHOUT_READING=1"],
    4: ["", WITHOUT_READING, WITHOUT_SHARING, "TEST_NUM_HOSTS=2",
        "TEST_NUM_HOSTS=2,TEST_WITHOUT_SOCKETS=1"],
}  # fmt: skip
_MOST_CASES_OF_AN_EXAMPLE = 30


# --- Cases ----------------------------------------------------------------------------------------

# Some calls take another way above one of these sizes, in bytes.
_THRESHOLDS = [4096, 65_536, 131_072, 262_144, 524_288, 1_048_576, 2_097_152]
_SMALL = st.lists(st.integers(0, 5), max_size=3)
_LAYOUTS_OF_NUMPY = ["contiguous", "strided", "reversed", "transposed", "read_only", "unaligned",
                     "expanded", "window"]  # fmt: skip
_LAYOUTS_OF_TORCH = ["contiguous", "strided", "transposed", "requires_grad", "conj", "expanded"]
_MEANS = {"mean", "sum", "max", "min", "prod"}


@st.composite
def _shapes(draw, itemsize, *, needs_rows):
    kind = draw(st.sampled_from(["small", "small", "small", "vector", "limit"]))
    if kind == "small":
        shape = draw(_SMALL)
    elif kind == "vector":
        shape = [draw(st.integers(6, 3000))]
    else:
        size = draw(st.sampled_from(_THRESHOLDS)) // itemsize
        shape = [max(0, size + draw(st.integers(-1, 1)))]
        if draw(st.booleans()):
            shape.append(1)
    return tuple(shape) if shape or not needs_rows else (draw(st.integers(0, 5)),)


@st.composite
def cases(draw, count, calls):
    """Draw a call that all paths accept, or all refuse."""
    call = draw(st.sampled_from(calls))
    case = {"call": call, "seed": draw(st.integers(0, 2**32 - 1))}
    is_torchs, is_horovods = call.startswith("torch_"), call.startswith("hvd_")
    is_special = call in ("add_replicas", "reduce_slice", "all_reduce_number")
    as_torch = is_torchs or is_horovods or (not is_special and draw(st.booleans()))
    dtypes = random_cases.OF_TORCH if as_torch else random_cases.OF_NUMPY
    if call not in program.REDUCING and not is_special:
        dtypes += random_cases.ONLY_MOVED_BY_TORCH if is_torchs else ()
        dtypes += random_cases.ONLY_MOVED_BY_NUMPY if not as_torch else ()
    if is_special:
        dtypes = random_cases.NUMBERS[1:]
    if call.endswith("_object"):  # torch cannot pickle these, and NumPy loses the byte order
        unknown = (">f4", ">i8", *random_cases.ONLY_MOVED_BY_TORCH)
        unknown += ("uint16", "uint32", "uint64") if as_torch else ()
        dtypes = [name for name in dtypes if name not in unknown]
    case |= {"as_torch": as_torch, "dtype": draw(st.sampled_from(dtypes))}
    if call in program.REDUCING:
        ops = list(random_cases.FUNCTIONS if is_torchs else _MEANS)
        ops = ["sum", "mean"] if call == "hvd_reducescatter" else sorted(ops)
        case["op"] = "sum" if call == "reduce_slice" else draw(st.sampled_from(ops))
    rows = ("scatter", "alltoall", "all_to_all", "hvd_allgather")
    itemsize = random_cases.storage(case["dtype"]).itemsize
    shapes = _shapes(itemsize, needs_rows=any(word in call for word in rows))
    case["shape"] = (1,) if call == "all_reduce_number" else draw(shapes)
    case["values"] = draw(st.sampled_from(["small", "normal", "special", "bits"]))
    case["root"] = draw(st.integers(0, count - 1))
    if not is_special:
        case["layouts"] = _fitting(draw, call, as_torch)
        case["is_async"] = draw(st.booleans())
    if count > 1 and not is_horovods and draw(st.booleans()):
        subsets = [s for n in range(1, count + 1) for s in itertools.combinations(range(count), n)]
        case["group"] = draw(st.sampled_from(subsets))
    return Case(**case)


@st.composite
def _batches(draw, count, calls):
    """Draw some cases. ``lists()`` would draw fewer, and every example joins all paths anew."""
    size = draw(st.integers(1, _MOST_CASES_OF_AN_EXAMPLE))
    return [draw(cases(count, calls)) for _ in range(size)]


def _fitting(draw, call, as_torch):
    """Draw two layouts, which the instances take in turn. If one is refused, both are equal."""
    layouts = _LAYOUTS_OF_TORCH if as_torch else _LAYOUTS_OF_NUMPY
    if call.startswith("torch_"):  # torch itself refuses the conjugate view of a complex tensor
        layouts = [layout for layout in layouts if layout != "conj"]
    first, second = draw(st.sampled_from(layouts)), draw(st.sampled_from(layouts))
    refused = ("read_only", "expanded")
    if call in program.IN_PLACE:
        if first in refused:
            return first, first
        return first, "contiguous" if second in refused else second
    if call.rstrip("_").endswith(("broadcast", "torch_reduce")):  # the root alone may give them
        return tuple("contiguous" if each in refused else each for each in (first, second))
    return first, second


# --- All instances make the same calls ------------------------------------------------------------


def _make(given_cases, paths, count, folder):
    """Make the calls on this instance."""
    batch = [Case(**case) for case in given_cases]
    if folder is None:
        return program.on_paths(batch, paths)
    return program.on_torch_paths(batch, paths, count, folder)


def _problems(batch, paths, replies):
    """Yield a description of each difference."""
    for (path_number, path), (number, case) in itertools.product(
        enumerate(paths), enumerate(batch)
    ):
        of_instances = [reply[path_number][number] for reply in replies]
        members = [of_instances[i] for i in case.group or range(len(replies))]
        for instance, (problem, _, _) in zip(case.group or range(99), members, strict=False):
            if problem:
                yield f"{case}\n  on {path or 'shared memory'}, instance {instance}: {problem}"
        if any(same != members[0][1] for _, same, _ in members):
            yield f"{case}\n  on {path or 'shared memory'}: the instances' results differ in bits"
    for number, case in enumerate(batch):
        texts = {
            outcome[2] for reply in replies for of_path in reply if (outcome := of_path[number])[2]
        }
        if len(texts) > 1:
            yield f"{case}\n  is refused in different words: {texts}"


def _compare(run, calls, paths, count, examples):
    failures = []

    @settings(max_examples=examples)
    @given(_batches(count, calls))
    def compare(batch):
        if failures:
            return
        try:
            replies = run([asdict(case) for case in batch], paths)
        except InstanceFailedError as error:
            # The text names the case. Hypothesis would start a job for each simpler case.
            failures.append(error)
            return
        problems = list(_problems(batch, paths, replies))
        assert not problems, "\n".join(problems)

    compare()
    if failures:
        raise failures[0]


@pytest.fixture
def run(request, tmp_path):
    """Return a function that makes calls on all instances, and returns their outcomes."""
    numbers = itertools.count()

    def make(given_cases, paths, *, count, is_torchs):
        folder = None
        if is_torchs:
            folder = tmp_path / str(next(numbers))
            folder.mkdir()
        args = (given_cases, paths, count, folder and str(folder))
        if count == 1:
            return [_make(*args)]
        instances = request.getfixturevalue("instances")
        return instances.run(_make, *args, count=count, limit=120)

    return make


def _sizes(*long):
    """Return the numbers of instances, and of examples; an example has 15 cases on average."""
    return [
        pytest.param(1, 2),
        pytest.param(2, 2),
        pytest.param(3, 3, marks=pytest.mark.sweep),
        pytest.param(4, 3, marks=pytest.mark.sweep),
        *(
            pytest.param(count, size, marks=[pytest.mark.long, pytest.mark.timeout(3600)])
            for count, size in enumerate(long, 1)
        ),
    ]


@pytest.mark.parametrize(("count", "examples"), _sizes(60, 160, 130, 90))
def test_the_librarys_calls(run, count, examples):
    make = functools.partial(run, count=count, is_torchs=False)
    _compare(make, list(program.CALLS), PATHS[count], count, examples)


@pytest.mark.parametrize(("count", "examples"), _sizes(30, 90, 70, 50))
def test_calls_of_torch_distributed(run, count, examples):
    make = functools.partial(run, count=count, is_torchs=True)
    paths = program.TORCH_PATHS[: 1 if count == 1 else None]
    _compare(make, list(program.TORCH_CALLS), paths, count, examples)
