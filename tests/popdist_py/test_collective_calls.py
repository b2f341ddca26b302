"""Values that the collectives refuse before they send data, tested with one instance."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import popdist_py
from popdist_py.public_collectives import leaf_arrays


def read_only():
    array = np.ones(3)
    array.flags.writeable = False
    return array


def looped():
    inner = {}
    outer = [1, inner]
    inner["again"] = outer
    return outer


WHOLE = np.ones(6)


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (read_only(), ValueError, "all_reduce: x is a read-only array: pass a copy"),
        (torch.ones(2, 1).expand(2, 3), ValueError, "share memory, as after expand"),
        (
            torch.ones(4).as_strided((2, 3), (1, 1)), ValueError,
            r"a tensor whose elements share memory, as after expand\(\) or as_strided\(\)",
        ),
        (
            np.lib.stride_tricks.as_strided(np.ones(4), (2, 3), (8, 8)), ValueError,
            r"an array whose elements share memory.*: pass its copy\(\)",
        ),
        (
            {"a": WHOLE[:3], "b": WHOLE[2:]}, ValueError,
            r"x\['b'\] is an array that overlaps \['a'\] in memory, .*: pass a copy",
        ),
        (
            [WHOLE[4:], torch.ones(2), torch.from_numpy(WHOLE)], ValueError,
            r"x\[2\] is an array that overlaps \[0\] in memory",
        ),
        (looped(), ValueError, r"x is a container that contains itself, at \[1\]\['again'\]"),
        (torch.eye(2).to_sparse(), TypeError, "sparse_coo on device cpu: expected a dense tensor"),
        (torch.empty(2, device="meta"), TypeError, "on device meta: expected a dense tensor"),
        (torch.ones(2).to(torch.float8_e4m3fn), TypeError, "floats of 16 bits or more"),
        (
            {"loss": {"value": 1.0, "name": "abc"}}, TypeError,
            r"all_reduce: x\['loss'\]\['name'\] is a str, 'abc': expected a number, an array",
        ),
        ([1, (2, None)], TypeError, r"x\[1\]\[1\] is a NoneType: expected a number"),
        ("abc", TypeError, "all_reduce: x is a str, 'abc': expected a number"),
        (np.array(["a"]), TypeError, "x is an array with dtype <U1: expected booleans, integers"),
        (np.array([None]), TypeError, "x is an array of Python objects"),
        (2**63, ValueError, "x is an int of more than 64 bits: pass a float"),
    ],
    ids=["read-only", "expanded", "strided", "strided array", "overlap", "part", "looped", "sparse",
         "meta", "float8", "text in a dict", "nothing in a list", "text", "texts", "objects",
         "large"],
)  # fmt: skip
def test_what_cannot_be_reduced_in_place(x, error, says):
    with pytest.raises(error, match=says):
        popdist_py.all_reduce(x, name="x")


def test_views_are_reduced_in_place():
    whole = torch.arange(6.0).reshape(2, 3)
    assert popdist_py.all_reduce(whole.t()[1:], "max") is not None
    assert torch.equal(whole, torch.arange(6.0).reshape(2, 3))
    single = torch.ones(1, 3).expand(1, 3).t()
    assert popdist_py.all_reduce(single) is single


def test_views_without_a_common_element_are_reduced():
    whole = np.ones((4, 6))
    parts = [whole[:2], whole[2:, :3], whole[2:, 3:], whole[:0]]
    popdist_py.all_reduce([*parts, torch.arange(12.0).as_strided((2, 3), (3, 2))])
    assert (whole == 1).all()


def test_containers_may_be_deeper_than_python_recurses():
    innermost = x = [1]
    for _ in range(5 * sys.getrecursionlimit()):
        x = (x,)
    for found in (popdist_py.all_reduce(x), popdist_py.all_reduce(x, async_op=True).wait()):
        while found and isinstance(found, tuple):
            (found,) = found
        assert found == innermost
        assert found is not innermost


def test_a_tensor_can_be_resized_after_a_call():
    for dtype in (torch.float32, torch.bfloat16):
        for call in (popdist_py.all_reduce, popdist_py.broadcast, popdist_py.all_gather):
            tensor = torch.ones(3, dtype=dtype)
            call(tensor)
            tensor.untyped_storage().resize_(0)


def test_a_root_must_be_an_instance():
    with pytest.raises(ValueError, match="root='0'"):
        popdist_py.broadcast(1, root="0")


def test_nothing_is_reduced_when_a_later_leaf_is_refused():
    array = np.ones(3)
    frozen = read_only()
    with pytest.raises(ValueError, match=r"x\[1\] is a read-only array"):
        popdist_py.all_reduce([array, frozen])
    assert array.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("x", "mean", "kind"),
    [
        (3, 3.0, float),
        (True, 1.0, float),
        (2**53 - 1, 2.0**53 - 1, float),
        (np.int32(3), 3.0, np.float64),
        (np.bool_(True), 1.0, np.float64),
        (np.float32(3), 3.0, np.float32),
    ],
    ids=["int", "bool", "large int", "int32", "bool_", "float32"],
)
def test_the_mean_of_whole_numbers_is_a_float(x, mean, kind):
    found = popdist_py.all_reduce(x, "mean")
    assert (found, type(found)) == (mean, kind)
    assert popdist_py.all_reduce({"x": [x]}, "mean") == {"x": [mean]}


@pytest.mark.parametrize(
    "x",
    [np.ones(2, np.int64), torch.ones(2, dtype=torch.int64), np.ones(2, bool)],
    ids=["array", "tensor", "booleans"],
)
def test_an_array_of_whole_numbers_cannot_receive_its_mean(x):
    with pytest.raises(
        TypeError, match=r"counts\['n'\] is an? .* with dtype .*: op='mean' needs fl"
    ):
        popdist_py.all_reduce({"n": x}, "mean", name="counts")


class Weights(OrderedDict):
    """A dict that knows more than its items."""


@dataclass(frozen=True)
class Totals:
    correct: int
    losses: dict[str, object]


Pair = namedtuple("Pair", "left right")


def test_containers_come_back_as_they_were():
    weights = Weights(b=1.5, a=np.ones(2))
    weights.version = 3
    given = Totals(3, {"pair": Pair(1, (2, [True])), "weights": weights, "empty": {}})
    found = popdist_py.all_reduce(given)
    assert found == Totals(3, {"pair": Pair(1, (2, [1])), "weights": weights, "empty": {}})
    assert found is not given
    copy = found.losses["weights"]
    assert (type(copy), list(copy), copy.version) == (Weights, ["b", "a"], 3)
    assert copy["a"] is weights["a"]
    assert type(found.losses["pair"]) is Pair


class Fixed(dict):
    """A dict whose items are replaced one by one."""

    def update(self, *_, **__):
        raise NotImplementedError


@pytest.mark.parametrize("given", [Counter(a=2, b=3), Fixed(a=2, b=3)], ids=["Counter", "fixed"])
def test_dicts_with_an_update_of_their_own(given):
    found = popdist_py.all_reduce(given)
    assert (type(found), dict(found)) == (type(given), {"a": 2, "b": 3})


def test_texts_are_sent_and_gathered():
    given = {"name": "run 1", 2: [None, "x", 2**70], "tags": {"a"}, "weights": np.ones(2)}
    assert popdist_py.broadcast(given) == given
    assert popdist_py.all_gather(given) == [given]
    assert popdist_py.gather("x") == ["x"]
    assert popdist_py.gather_object(None) == [None]
    assert popdist_py.broadcast_object(given) == given
    assert popdist_py.all_gather_object(given) == [given]
    (found,) = popdist_py.gather(torch.ones(2, dtype=torch.bfloat16))
    assert torch.equal(found, torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize("call", ["broadcast", "broadcast_object", "gather", "gather_object"])
def test_every_root_is_an_instance(call):
    with pytest.raises(ValueError, match=r"root=0\.0\): expected one of the instances"):
        getattr(popdist_py, call)(1, root=0.0)
    with pytest.raises(ValueError, match=rf"{call}\(root=1\): expected one of the instances \[0\]"):
        getattr(popdist_py, call)(1, root=1)


def test_an_operation_must_be_known():
    for call in (popdist_py.all_reduce, popdist_py.reduce_scatter):
        with pytest.raises(ValueError, match=r"op='median'\): expected one of sum, mean, max"):
            call(np.ones(1), "median")
        with pytest.raises(ValueError, match=r"op=\['sum'\]\): expected one of sum"):
            call(np.ones(1), ["sum"])


def test_every_call_can_go_on_beside_the_program():
    calls = (
        popdist_py.broadcast_object, popdist_py.all_gather_object, popdist_py.gather,
        popdist_py.gather_object,
    )  # fmt: skip
    handles = [call("x", async_op=True) for call in calls]
    assert [handle.wait() for handle in handles] == ["x", ["x"], ["x"], ["x"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_tensor_is_where_the_callers_is(dtype):
    elsewhere = torch.zeros(2, dtype=dtype, device="meta")
    leaf = leaf_arrays.movable(torch.ones(2, dtype=dtype), needs_writing=False)
    gathered = leaf_arrays.tensor_like(elsewhere, leaf.array)
    assert (gathered.device, gathered.dtype) == (elsewhere.device, dtype)
