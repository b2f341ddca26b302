"""Custom operations: Python functions under the names of device operations."""

import pytest
import torch
from support.models import inside

from popdist_py.poptorch import ops
from popdist_py.poptorch.errors import Error


def test_a_custom_operation_runs_its_python_function():
    x = torch.tensor([2.0])
    arguments = ([x], "Cube", "test.ops", 1)
    with inside(), pytest.raises(Error, match="registerCustomOp"):
        ops.custom_op(*arguments, example_outputs=[x])
    ops.registerCustomOp("Cube", "test.ops", lambda t, scale: t**3 * scale)
    with inside():
        (result,) = ops.custom_op(*arguments, example_outputs=[x], attributes={"scale": 2.0})
        assert result.item() == 16.0
        with pytest.raises(Error, match="example_outputs"):
            ops.custom_op(*arguments, example_outputs=[x, x], attributes={"scale": 2.0})
    (on_host,) = ops.custom_op(*arguments, example_outputs=[x], attributes={"scale": 2.0})
    assert torch.equal(on_host, x)


@pytest.mark.parametrize(
    "attributes",
    [
        {1: 2.0},
        {"a": object()},
        {"a": [1, 2.0]},
        {"a": "ü"},
        {"ü": 1},
        {"a": {"b": 1}},
        {"a": [[1]]},
    ],
)
def test_attributes_of_custom_operations(attributes):
    with pytest.raises(ValueError):
        ops.custom_op([], "Name", "domain", 1, example_outputs=[], attributes=attributes)
    good = {"f": 1.0, "i": 1, "s": "x", "l": [1, 2], "t": ("a", "b")}
    assert ops.custom_op([], "Name", "domain", 1, [], good) == []
