"""The functions that read and change the gradients of parameters."""

from __future__ import annotations

import pytest
import torch

from popdist_py.poptorch.weights.parameter_gradients import (
    add_gradient,
    clear_gradients,
    gradients_of,
    gradients_replaced,
    set_gradients,
)


def _parameters(number: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(3, 2, requires_grad=True) for _ in range(number)]


def test_gradients_are_set_and_cleared_without_copies():
    parameters, gradient = _parameters(), torch.ones(3, 2)
    set_gradients(parameters, [gradient, None])
    first, second = gradients_of(parameters)
    assert first is gradient
    assert second is None
    clear_gradients(parameters)
    assert gradients_of(parameters) == [None, None]


def test_a_missing_gradient_of_the_list_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        set_gradients(_parameters(), [None])


@pytest.mark.parametrize("copies", [True, False])
def test_gradients_are_added_as_autograd_adds_them(copies: bool):
    (parameter,) = _parameters(1)
    first = torch.ones(2, 3).t()
    add_gradient(parameter, first, copies=copies)
    kept = parameter.grad
    add_gradient(parameter, torch.full((3, 2), 2.0), copies=copies)
    assert parameter.grad is kept
    assert torch.equal(parameter.grad, torch.full((3, 2), 3.0))
    # A copy leaves the given tensor alone, and is contiguous as fused updates require.
    assert first.sum() == (6 if copies else 18)
    assert parameter.grad.is_contiguous() is copies


def test_replaced_gradients_are_restored_after_an_error():
    parameters, own = _parameters(), torch.ones(3, 2)
    set_gradients(parameters, [own, None])

    def replace_and_fail() -> None:
        with gradients_replaced(parameters, [None, own]) as before:
            assert before[0] is own
            assert parameters[0].grad is None
            assert parameters[1].grad is own
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        replace_and_fail()
    assert parameters[0].grad is own
    assert parameters[1].grad is None
