"""Wrapping a module: once, in which mode, and what stays visible of it."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import Mlp, WithLoss, classified, quiet_options, trained
from torch import nn

import popdist_py.poptorch as poptorch


class TestConstruction:
    def test_a_module_is_wrapped_for_training_once(self):
        model, training = trained()
        assert isinstance(model, Mlp)
        assert type(model).__name__ == "PoptorchMlp"
        with pytest.raises(RuntimeError, match="already been wrapped"):
            poptorch.trainingModel(model)
        training(*classified(4))
        model.destroy()
        assert type(model) is Mlp
        assert type(model.layers[0].weight) is nn.Parameter
        assert not training.isCompiled()
        again = poptorch.trainingModel(training, quiet_options())
        assert again.model is model
        again(*classified(4))

    def test_a_refused_optimizer_leaves_the_module_as_it_was(self):
        model = Mlp()
        with pytest.raises(AssertionError, match="Unsupported optimizer type"):
            poptorch.trainingModel(
                model, quiet_options(), torch.optim.Adagrad(model.parameters(), lr=0.1)
            )
        assert type(model) is Mlp
        assert poptorch.trainingModel(model, quiet_options()).model is model

    def test_the_options_of_a_wrapper_say_its_output_mode(self):
        mode, given = poptorch.OutputMode, quiet_options()
        model = Mlp()
        training = poptorch.trainingModel(model, given)
        inference = poptorch.inferenceModel(model, given)
        assert (training.options.output_mode, inference.options.output_mode) == (
            mode.Final,
            mode.All,
        )
        assert given.defaultOutputMode()
        assert not inference.options.defaultOutputMode()
        assert training.options.toDict()["output_mode"] == mode.Final
        chosen = poptorch.inferenceModel(model, quiet_options().outputMode(mode.EveryN, 3))
        assert (chosen.options.output_mode, chosen.options.output_return_period) == (mode.EveryN, 3)

    @pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
    def test_what_is_no_model(self, wrap):
        with pytest.raises(AssertionError, match=r"Invalid type .*'model'"):
            wrap("model")

    @pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
    def test_modules_that_are_compiled_already(self, wrap):
        scripted, compiled = torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2)
        compiled.compile(backend="eager")
        for module, text in ((scripted, "torch.jit"), (compiled, "torch.compile")):
            with pytest.raises(poptorch.Error, match=f"The model comes from {text}"):
                wrap(module)
            with pytest.raises(poptorch.Error, match=f"Module 'model' comes from {text}"):
                wrap(WithLoss(module))

    @pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
    def test_lazy_layers_need_a_first_call(self, wrap):
        model = WithLoss(nn.LazyLinear(2))
        with pytest.raises(poptorch.Error, match=r"'model\.weight' has no shape yet"):
            wrap(model)
        samples = (torch.ones(1, 3), torch.ones(1, 2))
        model(*samples)
        wrap(model, quiet_options())(*samples)

    def test_attributes_of_the_module_are_those_of_the_wrapper(self):
        model, training = trained()
        model.custom = "seen"
        assert training.custom == "seen"
        assert training.layers is model.layers
        with pytest.raises(AttributeError):
            training.no_such_thing  # noqa: B018

    def test_plain_attributes_are_captured(self):
        class Scaled(nn.Module):
            factor = 1

            def forward(self, x):
                return x * self.factor

        model = Scaled()
        model.factor = 2
        inference = poptorch.inferenceModel(model, quiet_options())
        model.factor = 3
        assert inference(torch.ones(1)).item() == 2

    def test_the_mode_at_compile_time_counts(self):
        model = nn.Sequential(nn.Dropout(0.5))
        model.eval()
        inference = poptorch.inferenceModel(model, quiet_options())
        assert torch.equal(inference(torch.ones(64)), torch.ones(64))
        model.train()
        assert torch.equal(inference(torch.ones(64)), torch.ones(64))

    def test_programs_read_what_a_wrapper_keeps(self):
        model, training = trained()
        assert training._user_model is training.model is model
        assert training._training
        assert training._options is training.options
        states = []
        for change in (lambda: None, lambda: training(*classified(4)), training.detachFromDevice,
                       training.destroy):  # fmt: skip
            change()
            states.append((training._executable is not None, training._is_attached))
            assert states[-1] == (training.isCompiled(), training.isAttachedToDevice())
        assert states == [(False, False), (True, True), (True, False), (False, False)]

    def test_text(self):
        model = nn.Sequential(nn.Linear(2, 2), poptorch.BeginBlock(nn.ReLU(), "b", 1))
        text = repr(poptorch.inferenceModel(model))
        assert "(0): Linear(in_features=2, out_features=2, bias=True)" in text
        assert "(1): BeginBlock(user_id=b, ipu_id=1) ReLU()" in text

    def test_printing(self, capsys):
        model = nn.Sequential(poptorch.BeginBlock(nn.ReLU(), "b", 1))
        poptorch.print(model)
        poptorch.print(poptorch.inferenceModel(model), "and", 3, sep="|")
        text = repr(poptorch.inferenceModel(model))
        assert capsys.readouterr().out == f"{text}\n{text}|and|3\n"

    def test_hooks_and_closures_see_the_device(self):
        model = WithLoss(nn.Linear(3, 1))
        model.model.register_forward_hook(lambda module, _, out: out + module.bias)
        reference = copy.deepcopy(model)
        _, training = trained(model)
        x, y = torch.ones(2, 3), torch.zeros(2, 1)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(2):
            training(x, y)
            optimizer.zero_grad()
            reference(x, y)[1].backward()
            optimizer.step()
        torch.testing.assert_close(model.model.bias.detach(), reference.model.bias.detach())


def test_a_parametrised_module_can_be_wrapped():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    training = poptorch.trainingModel(module, quiet_options())
    training.destroy()
    model = poptorch.inferenceModel(module, quiet_options())
    torch.testing.assert_close(model(torch.ones(4, 3)), module(torch.ones(4, 3)).detach())


def test_a_function_in_c_tells_no_signature():
    model = poptorch.inferenceModel(torch.mm, quiet_options())
    assert model(torch.ones(2, 3), torch.ones(3, 2)).tolist() == [[3, 3], [3, 3]]
