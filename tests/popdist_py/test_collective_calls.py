"""What the collectives refuse, before anything is sent; one instance is enough to see it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import popdist_py


def read_only():
    array = np.ones(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (read_only(), ValueError, "the array is read-only: give a copy"),
        (torch.ones(2, 1).expand(2, 3), ValueError, "share memory, as after expand"),
        (torch.eye(2).to_sparse(), TypeError, "torch.sparse_coo on cpu: expected a dense one"),
        (torch.empty(2, device="meta"), TypeError, "on meta: expected a dense one"),
        (torch.ones(2).to(torch.float8_e4m3fn), TypeError, "floats of 16 bits or more"),
        ({"loss": "low"}, TypeError, r"all_reduce\(x\['loss'\]\): cannot communicate a str"),
    ],
    ids=["read-only", "expanded", "sparse", "meta", "float8", "text"],
)
def test_what_cannot_be_reduced_in_place(x, error, says):
    with pytest.raises(error, match=says):
        popdist_py.all_reduce(x, name="x")


def test_views_are_reduced_in_place():
    whole = torch.arange(6.0).reshape(2, 3)
    assert popdist_py.all_reduce(whole.t()[1:], "max") is not None
    assert torch.equal(whole, torch.arange(6.0).reshape(2, 3))
    single = torch.ones(1, 3).expand(1, 3).t()
    assert popdist_py.all_reduce(single) is single


def test_a_root_must_be_an_instance():
    with pytest.raises(ValueError, match="root='0'"):
        popdist_py.broadcast(1, root="0")
