"""Models from the words of a command line: factory functions, inputs, and error messages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from popdist_py.poptorch.on_ipu.model_factories import Example, InputSpec, made_example
from popdist_py.poptorch.on_ipu.model_losses import LOSSES, with_loss
from popdist_py.poptorch.on_ipu.user_failures import FactoryError

FILE = str(Path(__file__).with_name("command_models.py"))


@pytest.mark.parametrize(
    ("word", "shape", "dtype"),
    [
        ("3x4", (2, 3, 4), torch.float32),
        ("7:int64", (2, 7), torch.int64),
        (":uint8", (2,), torch.uint8),
        *(
            (f"3:{str(dtype)[6:]}", (2, 3), dtype)
            for dtype in (
                *(torch.float16, torch.float64, torch.bfloat16),
                *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
            )
        ),
        ("1x1:float16", (2, 1, 1), torch.float16),
    ],
)
def test_inputs(word, shape, dtype):
    tensor = InputSpec.parse(word).tensor(2)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)


@pytest.mark.parametrize("word", ["", "x", "3x", "3,4", "0x3", "-1", "3x4:complex", "3:4:5"])
def test_no_inputs(word):
    with pytest.raises(ValueError, match="expected"):
        InputSpec.parse(word)


def test_arguments_are_literals_or_texts():
    words = {"depth": "3", "activation": "Tanh", "classes": "0x10"}
    model = made_example(f"{FILE}:mlp", words, [InputSpec((16,))], 1).module
    assert [type(layer) for layer in model] == [nn.Linear, nn.Tanh] * 3 + [nn.Linear]
    assert model[-1].out_features == 16


def test_modules_and_classes_are_factories(monkeypatch, tmp_path):
    assert isinstance(
        made_example("torch.nn:Linear", {"in_features": "3", "out_features": "2"},
                     [InputSpec((3,))], 5).module,
        nn.Linear,
    )  # fmt: skip
    # As with ``python -m``, modules in the current folder are found.
    (tmp_path / "beside_the_caller.py").write_text("from torch.nn import ReLU as make\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert isinstance(
        made_example("beside_the_caller:make", {}, [InputSpec((3,))], 1).module, nn.ReLU
    )


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [("with_dict", 0, {"x", "labels"}), ("with_tuple", 2, set()), ("with_tensor", 1, set())],
)
def test_inputs_of_the_factory(name, args, kwargs):
    example = made_example(f"{FILE}:{name}", {}, [], 1)
    assert example.has_inputs
    assert (len(example.args), set(example.kwargs)) == (args, kwargs)


@pytest.mark.parametrize(
    ("loss", "output", "labels"),
    [
        ("cross-entropy", (2, 5), (2,)),
        ("cross-entropy", (2, 5, 3, 4), (2, 3, 4)),
        ("token-cross-entropy", (2, 7, 5), (2, 7)),
        ("mse", (2, 7), (2, 7)),
        ("l1", (2,), (2,)),
        ("bce", (2, 1), (2, 1)),
    ],
)
def test_labels_fit_the_output(loss, output, labels):
    example = Example(nn.Identity(), (torch.zeros(output),), {}, has_inputs=False)
    with with_loss(example, loss) as called:
        assert tuple(called.args[0].shape) == labels
        made, value = called.module(*called.args)
        assert tuple(made.shape) == output
        assert value.shape == ()
        expected = LOSSES[loss](made, called.args[0])
        torch.testing.assert_close(value, expected)


def test_a_loss_does_not_change_the_model():
    example = made_example(f"{FILE}:frozen", {}, [InputSpec((16,))], 2)
    before = {name: value.clone() for name, value in example.module.state_dict().items()}
    with with_loss(example, "cross-entropy"):
        pass
    assert "forward" not in vars(example.module)
    assert [module.training for module in example.module][:2] == [False, True]
    for name, value in example.module.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, before[name])
    with pytest.raises(FactoryError), with_loss(example, "cross-entropy"):
        raise FactoryError("as if making the graph failed")
    assert "forward" not in vars(example.module)


def test_hooks_do_not_see_labels():
    seen = []
    module = nn.Linear(3, 2)
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs)))
    own = module.forward = lambda x: x * 2
    with with_loss(Example(module, (torch.ones(4, 3),), {}, has_inputs=False), "mse") as called:
        seen.clear()
        made, _ = called.module(*called.args)
    assert seen == [1]
    assert made.sum() == 24
    assert module.forward is own
    assert list(module._forward_pre_hooks) == [hook.id]


@pytest.mark.parametrize(
    ("factory", "words", "inputs", "said"),
    [
        ("torchvision", {}, "3", "does not name a function"),
        (":mlp", {}, "3", "does not name a function"),
        ("nowhere.at_all:f", {}, "3", "no module nowhere "),
        ("..x:f", {}, "3", "no module"),
        ("no/such.py:f", {}, "3", "the file no/such.py does not exist"),
        (f"{FILE}:other", {}, "3", "has no function other"),
        (f"{FILE}:number", {}, "3", "has the type int"),
        (f"{FILE}:text", {}, "3", "returned an object of the type str"),
        (f"{FILE}:mlp", {}, "", "--input 3x224x224"),
        (f"{FILE}:with_dict", {}, "8", "remove --input"),
        (f"{FILE}:mlp", {"layers": "2"}, "3", "the arguments of --set do not match"),
        (f"{FILE}:mlp", {"activation": "Nothing"}, "3", "has no attribute 'Nothing'"),
        (f"{FILE}:leaving", {}, "3", "SystemExit"),
    ],
)
def test_invalid_factories(factory, words, inputs, said):
    specs = [InputSpec.parse(inputs)] if inputs else []
    with pytest.raises(FactoryError, match=said):
        made_example(factory, words, specs, 1)


def test_a_failure_shows_the_user_s_lines_only():
    with pytest.raises(FactoryError) as raised:
        made_example(f"{FILE}:failing", {}, [], 1)
    lines = str(raised.value).splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2].startswith(f'  File "{FILE}", line ')
    assert lines[-1] == "RuntimeError: no weights here"
    assert len(lines) == 5


def test_a_file_that_fails_when_it_is_read(tmp_path):
    file = tmp_path / "halves.py"
    file.write_text("def f():\n    return (\n")
    with pytest.raises(FactoryError, match="SyntaxError"):
        made_example(f"{file}:f", {}, [], 1)
    file.write_text("import nothing_of_this_name\n")
    with pytest.raises(FactoryError, match="line 1, in <module>"):
        made_example(f"{file}:f", {}, [], 1)
