"""The exceptions of the PopTorch API: tree, attributes, and their way to other processes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.models import quiet_options

from popdist_py import poptorch

ERRORS = [
    poptorch.Error("a message"),
    poptorch.Error("a message", "poplar_runtime_error", "model.forward"),
    poptorch.RecoverableError("a message", "poplar_link_error", "run", "LINK_RESET"),
    poptorch.UnrecoverableError("a message", location="run"),
    poptorch.ConfigFileError("SyntaxError at line 2 of options.conf"),
]


def test_the_tree_is_poptorchs():
    assert poptorch.Error.__bases__ == (Exception,)
    assert poptorch.RecoverableError.__bases__ == (poptorch.Error,)
    assert poptorch.UnrecoverableError.__bases__ == (poptorch.Error,)
    assert poptorch.ConfigFileError.__bases__ == (Exception,)
    for name in ("Error", "RecoverableError", "UnrecoverableError"):
        assert getattr(poptorch.poptorch_core, name) is getattr(poptorch, name)
    assert poptorch.options.ConfigFileError is poptorch.ConfigFileError


def test_what_this_layer_raises_has_poptorchs_type_and_no_location():
    with pytest.raises(poptorch.Error) as raised:
        poptorch.nop(3)
    error = raised.value
    assert (error.type, error.location) == ("poptorch_py_error", "")
    assert error.message == error.args[0]
    assert str(error) == f"'poptorch_py_error': {error.message}"
    assert not hasattr(error, "recovery_action")


def test_attributes_are_those_given():
    error = ERRORS[2]
    assert vars(error) == {
        "message": "a message",
        "type": "poplar_link_error",
        "location": "run",
        "recovery_action": "LINK_RESET",
    }
    assert str(error) == "'poplar_link_error': a message\nError raised in:\nrun"
    assert poptorch.RecoverableError("a message").recovery_action == "IPU_RESET"


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize(
    "twin", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy]
)
def test_a_copy_is_equal(error, twin):
    other = twin(error)
    assert type(other) is type(error)
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise ERRORS[2]


def test_a_worker_of_a_loader_hands_its_error_on():
    loader = poptorch.DataLoader(quiet_options(), Broken(), num_workers=1)
    with pytest.raises(poptorch.RecoverableError) as raised:
        next(iter(loader))
    assert "'poplar_link_error': a message" in raised.value.message
    assert raised.value.type == "poptorch_py_error"  # torch makes it anew from its text
