"""Tensors printed from the device, as PopTorch prints them."""

import pytest
import torch
from support.models import inside

from popdist_py.poptorch import ops


def printed(capsys, tensor, title="t", **style):
    with inside():
        result = ops.ipu_print_tensor(tensor, title, **style)
    assert torch.equal(result, tensor)
    return capsys.readouterr().err


def test_rows_stand_on_their_own_lines(capsys):
    text = printed(capsys, torch.arange(8.0).reshape(2, 2, 2))
    assert text == (
        "t: (\n (\n  (0.000, 1.000)\n  (2.000, 3.000)\n )\n"
        " (\n  (4.000, 5.000)\n  (6.000, 7.000)\n )\n)\n"
    )
    assert printed(capsys, torch.tensor([1, 2])) == "t: (1, 2)\n"


def test_brackets_and_separators(capsys):
    text = printed(
        capsys, torch.tensor([[1, 2], [3, 4]]), separator=";", open_bracket="{", close_bracket="}"
    )
    assert text == "t: {\n {1;2}\n {3;4}\n}\n"


@pytest.mark.parametrize(
    ("value", "digits", "float_format", "text"),
    [
        (1.4962566, 8, "scientific", "1.4962566e+00"),
        (1.4962566, 4, "auto", "1.496"),
        (1.4962566e-9, 4, "auto", "1.496e-09"),
        (123456.0, 3, "fixed", "123456"),
        (0.0149625, 4, "fixed", "0.01496"),
        (0.0, 4, "auto", "0.000"),
        (float("inf"), 4, "auto", "inf"),
        (2.5, 4, "none", "2.5"),
    ],
)
def test_numbers(capsys, value, digits, float_format, text):
    tensor = torch.tensor([value], dtype=torch.float64)
    got = printed(capsys, tensor, digits=digits, float_format=float_format)
    assert got == f"t: ({text})\n"


def test_long_tensors_are_summarised_and_long_rows_wrapped(capsys):
    text = printed(capsys, torch.arange(100), summarise_threshold=10, edge_items=2)
    assert text == "t: (0, 1, ..., 98, 99)\n"
    lines = printed(capsys, torch.arange(60)[None], max_line_width=40).splitlines()
    assert len(lines) > 4
    assert all(len(line) <= 40 for line in lines)
    assert all(line.startswith("   ") for line in lines[2:-1])


def test_the_gradient_is_printed_too(capsys):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for wanted in (True, False):
        with inside(training=True):
            (ops.ipu_print_tensor(x, "x", print_gradient=wanted) * 3).sum().backward()
        assert ("x_gradient: (3.000, 3.000)\n" in capsys.readouterr().err) == wanted


def test_nothing_is_printed_while_tracing_or_on_the_host(capsys):
    ops.ipu_print_tensor(torch.ones(1), "host")
    with inside(tracing_forward=True):
        ops.ipu_print_tensor(torch.ones(1), "traced")
    assert capsys.readouterr().err == ""
