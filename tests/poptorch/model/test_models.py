"""Model wrappers: construction, arguments, results, life cycle, and whose weights are newer."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import logging
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from support.models import Mlp, WithLoss, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch

Pair = collections.namedtuple("Pair", "first second")


def trained(model=None, **options):
    model = model or Mlp()
    return model, poptorch.trainingModel(
        model, quiet_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )


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

    @pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
    def test_what_is_no_model(self, wrap):
        with pytest.raises(AssertionError, match=r"Invalid type .*'model'"):
            wrap("model")

    @pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
    def test_modules_that_are_compiled_already(self, wrap):
        scripted, compiled = torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2)
        compiled.compile()
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


class Nested(nn.Module):
    def forward(self, x, *rest, extra=None, scale=1):
        total = x
        for item in rest:
            total = total + item
        if extra is not None:
            total = total + extra["a"][0] + extra["b"]
        return Pair({"total": total * scale}, [None, 3, (x, "word")])


class TestArguments:
    @pytest.fixture
    def inference(self):
        inference = poptorch.inferenceModel(Nested(), quiet_options())
        one = torch.ones(2)
        result = inference(one, one, extra={"a": (one, 1), "b": one}, scale=2)
        assert result.first["total"].tolist() == [8, 8]
        assert result.second[:2] == [None, 3]
        assert isinstance(result, Pair)
        return inference

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"rest": ()}, "Number of positional arguments mismatch: expected 2 but got 1"),
            ({"scale": 3}, "Value mismatch for scale: expected 2 but got 3"),
            ({"extra": [1]}, "Type mismatch for extra"),
            ({"extra": {"a": (torch.ones(2), 1)}}, r"Keys mismatch for extra.*Missing.*: b"),
            (
                {"extra": {"a": (torch.ones(2), 1), "b": torch.ones(2), "d": 1, "c": 1}},
                r"Keys mismatch for extra.*Unexpected arguments: c, d",
            ),
            ({"extra": {"a": (torch.ones(2),), "b": torch.ones(2)}}, r"Length .* extra\[a\]"),
            ({"x": torch.ones(3)}, "Shape mismatch for x"),
            ({"rest": (torch.ones(3),)}, r"Shape mismatch for \*rest\[0\]"),
            (
                {"x": torch.ones(2, dtype=torch.int64)},
                "Data type mismatch for x: expected torch.float32 but got torch.int64",
            ),
            (
                {"extra": {"a": (torch.ones(2), 1), "b": torch.ones(5)}},
                r"Shape mismatch for extra\[b\]",
            ),
        ],
    )
    def test_calls_must_match_the_compiled_one(self, inference, change, text):
        one = torch.ones(2)
        call = {"x": one, "rest": (one,), "extra": {"a": (one, 1), "b": one}, "scale": 2}
        call.update(change)
        with pytest.raises(poptorch.Error, match=text) as info:
            inference(call["x"], *call["rest"], extra=call["extra"], scale=call["scale"])
        assert "destroy()" in str(info.value)

    @pytest.mark.parametrize(
        ("args", "kwargs", "error", "text"),
        [
            ((1, 2, 3), {}, AssertionError, "Too many arguments provided"),
            ((1,), {"z": 3}, AssertionError, "not a valid parameter"),
            ((1,), {"x": 3}, AssertionError, "passed more than once"),
            ((), {"y": 3}, poptorch.Error, "Mandatory parameter x missing"),
        ],
    )
    def test_the_signature_of_forward_counts(self, args, kwargs, error, text):
        with pytest.raises(error, match=text):
            poptorch.inferenceModel(lambda x, y=1: x + y, quiet_options())(*args, **kwargs)

    def test_dtypes_of_results(self):
        inference = poptorch.inferenceModel(lambda *t: t, quiet_options())
        given = [torch.ones(2, dtype=d) for d in (torch.int64, torch.float64, torch.bfloat16)]
        given += [torch.ones(2, dtype=d) for d in (torch.uint8, torch.int8, torch.bool)]
        given += [torch.ones(2, dtype=torch.half)]
        assert [t.dtype for t in inference(*given)] == [
            torch.int32, torch.float32, torch.float32, torch.uint8, torch.int8, torch.bool,
            torch.half,
        ]  # fmt: skip
        with pytest.raises(poptorch.Error, match=r"Unsupported.*input type"):
            poptorch.inferenceModel(lambda x: x, quiet_options())(torch.ones(2) * 1j)
        with pytest.raises(poptorch.Error, match=r"Zero-sized tensors are unsupported.*\[2, 0\]"):
            poptorch.inferenceModel(lambda x: x, quiet_options())(torch.ones(2, 0))

    def test_dictionaries_are_announced_once(self, caplog):
        inference = poptorch.inferenceModel(lambda x: x["a"] + 1, quiet_options())
        inference({"a": torch.ones(1)})
        inference.destroy()
        inference({"a": torch.ones(1)})
        assert [record.message[:5] for record in caplog.records] == ["Dicts"]

    def test_unusual_inputs_are_taken_with_one_warning_each(self, caplog):
        inference = poptorch.inferenceModel(lambda x, d: x + d["a"], quiet_options())
        x = torch.ones(2, 3).t().requires_grad_()
        for _ in range(2):
            inference(x, {"a": torch.ones(3, 2)})
        text = caplog.text
        assert text.count("not contiguous") == 1
        assert text.count("This tensor will be detached") == 1
        assert text.count("Dicts as inputs") == 1

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_inputs_changed_in_place(self, dtype):
        def forward(x):
            x += 1
            return x * 2

        x = torch.zeros(4, dtype=dtype)
        inference = poptorch.inferenceModel(forward, quiet_options().deviceIterations(2))
        assert inference(x).tolist() == [2, 2, 2, 2]
        assert x.tolist() == [1, 1, 1, 1]

    @pytest.mark.parametrize("execution", ["loop", "auto"])
    def test_dictionaries_are_taken_by_key(self, execution):
        def forward(batch, scale, *, more):
            return 2 * batch["x"] + batch["in"][0]["y"] + scale + 100 * more["a"] + more["b"]

        options = quiet_options()
        options.Emulator.replicaExecution(execution)
        inference = poptorch.inferenceModel(forward, options)
        one, zero = torch.ones(2), torch.tensor(0.0)
        inference({"x": one, "in": [{"y": one, "n": 1}]}, zero, more={"a": one, "b": one})
        batch = {"in": [{"n": 1, "y": 3 * one}], "x": one}
        out = inference(batch, zero, more={"b": 5 * one, "a": one})
        assert out.tolist() == [110, 110]
        with pytest.raises(poptorch.Error, match=r"Data type mismatch for batch\[x\]"):
            inference({**batch, "x": one.int()}, zero, more={"b": one, "a": one})

    def test_narrow_labels_and_indices(self):
        _, training = trained(Mlp())
        x, y = classified(8)
        training(x, y.int())
        _, training = trained(Mlp())
        training(x, y.short())


@dataclasses.dataclass
class Scores:
    value: object


class TestOutputs:
    def test_backward_is_not_for_programs(self):
        _, training = trained()
        _, loss = training(*classified(4))
        with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
            loss.backward()

    def test_results_do_not_change_with_later_calls(self):
        model = WithLoss(nn.Linear(2, 1))

        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model

            def forward(self, x, y):
                return self.inner(x, y)[1], self.inner.model.weight, x

        _, training = trained(Inner())
        x, y = torch.ones(2, 2), torch.zeros(2, 1)
        results = training(x, y)
        first = [tensor.clone() for tensor in results]
        training(x, y)
        for now, before in zip(results, first, strict=True):
            assert torch.equal(now, before)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_the_programs_autograd_mode_is_its_own(self, mode):
        torch.manual_seed(0)
        model = Mlp()
        reference = copy.deepcopy(model)
        _, training = trained(model)
        inference = poptorch.inferenceModel(model, quiet_options())
        _, plain = trained(reference)
        x, y = classified(4)
        for _ in range(2):
            expected = plain(x, y)[1]
            with mode():
                torch.testing.assert_close(training(x + 0, y)[1], expected)
                scores = inference(x + 0)
        torch.testing.assert_close(scores, reference(x).detach())

    @pytest.mark.parametrize("wrap", [Scores, lambda x: {x}, lambda x: ([x], {"a": x}.values())])
    def test_tensors_do_not_hide_in_other_types(self, wrap):
        inference = poptorch.inferenceModel(lambda x: wrap(x * 2), quiet_options())
        with pytest.raises(poptorch.Error, match=r"Unsupported output type .*registerCustomArg"):
            inference(torch.ones(2))

    def test_other_objects_pass(self):
        inference = poptorch.inferenceModel(lambda x: (x, {1, 2}, Scores(3)), quiet_options())
        assert inference(torch.ones(2))[1:] == ({1, 2}, Scores(3))

    def test_tensors_made_outside_the_forward_come_with_a_warning(self):
        outside = torch.arange(3.0)
        kept = []

        def keep(size):
            kept.append(torch.ones(size))
            return kept[-1]

        made = {"inside": torch.ones, "inside and kept": keep, "outside": lambda _: outside}
        for where, make in made.items():
            inference = poptorch.inferenceModel(
                lambda x, make=make: {"x": x, "y": [make(3)], "z": x.argmax()}, quiet_options()
            )
            with warnings.catch_warnings(record=True, action="always") as found:
                result = inference(torch.ones(2))
            assert torch.equal(result["y"][0], outside if where == "outside" else torch.ones(3))
            texts = [str(one.message) for one in found if "expected to be on the IPU" in str(one)]
            assert len(texts) == (where == "outside")

    def test_running_on_ipu_only_inside(self):
        seen = []

        def forward(x):
            seen.append(poptorch.isRunningOnIpu())
            return x

        poptorch.inferenceModel(forward, quiet_options())(torch.ones(1))
        assert all(seen)
        assert not poptorch.isRunningOnIpu()


class TestWeights:
    def test_reading_fetches_once_and_only_when_needed(self, monkeypatch):
        model, training = trained()
        training.compile(*classified(4))
        fetched = []
        party = training._party
        download = party._download
        monkeypatch.setattr(party, "_download", lambda: (fetched.append(1), download()))
        before = model.layers[0].weight.tolist()
        training(*classified(4))
        training(*classified(4))
        assert not fetched
        assert model.layers[0].weight.tolist() != before
        model.state_dict()
        model(classified(4)[0])
        assert len(fetched) == 1
        assert not training.copyWeightsToHostIfNeeded()
        training(*classified(4))
        assert training.copyWeightsToHostIfNeeded()
        assert len(fetched) == 2

    def test_inference_follows_training(self):
        model, training = trained()
        inference = poptorch.inferenceModel(model, quiet_options())
        x, y = classified(4)
        before = inference(x)
        training(x, y)
        after = inference(x)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, copy.deepcopy(model)(x).detach())
        training(x, y)
        training.destroy()
        assert not torch.equal(inference(x), after)

    def test_changes_on_the_host_are_not_noticed(self):
        model = nn.Linear(2, 2)
        inference = poptorch.inferenceModel(model, quiet_options())
        x = torch.ones(1, 2)
        before = inference(x)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        assert torch.equal(inference(x), before)
        inference.copyWeightsToDevice()
        assert inference(x).tolist() == [[0, 0]]

    def test_copies_and_pickles_are_plain(self):
        model, training = trained()
        training(*classified(4))
        for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(duplicate) is Mlp
            assert type(duplicate.layers[0].weight) is nn.Parameter
            assert torch.equal(duplicate.layers[0].weight, model.layers[0].weight.detach())
            duplicate(classified(4)[0])
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert torch.equal(torch.load(file)["layers.0.bias"], model.layers[0].bias.detach())

    @pytest.mark.parametrize("first", [0, 1])
    def test_models_that_are_wrapped_apart_may_share_a_module(self, first):
        shared = nn.Linear(6, 4)
        models = [WithLoss(nn.Sequential(shared, nn.Linear(4, 2))) for _ in range(2)]
        wrappers = [trained(model)[1] for model in models]
        x = torch.randn(3, 6)
        for turn in (first, 1 - first):
            before = shared.weight.detach().clone()
            wrappers[turn](x, torch.zeros(3, 2))
            assert not torch.equal(shared.weight, before), "read from the one that trained last"
        wrappers[first].destroy()
        before = shared.weight.detach().clone()
        wrappers[1 - first](x, torch.zeros(3, 2))
        assert not torch.equal(shared.weight, before)
        wrappers[1 - first].destroy()
        assert type(shared.weight) is type(models[first].model[1].weight) is nn.Parameter

    def test_loading_a_state_uploads_it(self):
        model, training = trained()
        x, y = classified(4)
        state = copy.deepcopy(model.state_dict())
        first = training(x, y)[1]
        training(x, y)
        result = training.load_state_dict({**state, "more": torch.ones(1)}, strict=False)
        assert result.unexpected_keys == ["more"]
        torch.testing.assert_close(training(x, y)[1], first)
        assert list(training.state_dict()) == list(state)

    def test_tied_and_frozen_parameters(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
                self.b.weight = self.a.weight
                self.b.bias.requires_grad_(False)

            def forward(self, x):
                return poptorch.identity_loss(self.b(self.a(x)), "sum")

        model = Tied()
        bias = model.b.bias.clone()
        _, training = trained(model)
        training(torch.ones(1, 3))
        assert model.a.weight is model.b.weight
        assert torch.equal(model.b.bias, bias)

    def test_parameters_outside_the_optimizer_stay(self):
        model = Mlp()
        training = poptorch.trainingModel(
            model, quiet_options(), torch.optim.SGD(model.layers[2].parameters(), lr=0.5)
        )
        before = copy.deepcopy(model.state_dict())
        training(*classified(4))
        now = model.state_dict()
        assert torch.equal(now["layers.0.weight"], before["layers.0.weight"])
        assert not torch.equal(now["layers.2.weight"], before["layers.2.weight"])


class TestLifeCycle:
    def test_before_compiling(self):
        _, training = trained()
        for act in (
            training.copyWeightsToHost,
            training.copyWeightsToDevice,
            training.detachFromDevice,
            training.attachToDevice,
            lambda: training.save("file"),
            lambda: training.rng_state,
        ):
            with pytest.raises(poptorch.Error, match="not been compiled or has been destroyed"):
                act()
        assert not training.isAttachedToDevice()
        training.destroy()

    def test_compiling_twice_is_ignored(self, caplog):
        _, training = trained()
        training.compile(*classified(4))
        assert training.isCompiled()
        training.compile(*classified(4))
        assert "already compiled" in caplog.text

    def test_detach_and_attach(self):
        model, training = trained()
        training(*classified(4))
        with pytest.raises(poptorch.Error, match="already attached"):
            training.attachToDevice()
        training.detachFromDevice()
        with pytest.raises(poptorch.Error, match="Device is not attached"):
            training.detachFromDevice()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        training(*classified(4))
        assert training.isAttachedToDevice()
        assert model.layers[0].weight.abs().max() < 0.1

    def test_processes_that_nothing_connects_are_announced(self, caplog):
        options = quiet_options()
        options.Distributed.configureProcessId(1, 2)
        model = Mlp()
        poptorch.inferenceModel(model, options)(classified(2)[0])
        assert not caplog.records
        poptorch.trainingModel(model, options)(*classified(2))
        assert "Options.Distributed has 2 processes, but nothing connects them" in caplog.text

    def test_one_device_for_two_models(self):
        first = poptorch.inferenceModel(Mlp(), quiet_options().useIpuId(3))
        second = poptorch.inferenceModel(Mlp(), quiet_options().useIpuId(3))
        x, _ = classified(2)
        first(x)
        with pytest.raises(poptorch.Error, match="Failed to acquire"):
            second(x)
        first.detachFromDevice()
        second(x)

    def test_no_device(self):
        options = quiet_options().useOfflineIpuTarget()
        inference = poptorch.inferenceModel(Mlp(), options)
        inference.compile(classified(2)[0])
        assert inference.isCompiled()
        for act in (lambda: inference(classified(2)[0]), inference.attachToDevice):
            with pytest.raises(AssertionError, match="offline device"):
                act()

    def test_compilation_hooks(self):
        calls = []
        before = poptorch.registerPreCompileHook(lambda: calls.append("before"))
        after = poptorch.registerPostCompileHook(lambda: calls.append("after"))
        poptorch.inferenceModel(Mlp(), quiet_options())(classified(2)[0])
        before.remove()
        after.remove()
        poptorch.inferenceModel(Mlp(), quiet_options())(classified(2)[0])
        assert calls == ["before", "after"]
        with pytest.raises(RuntimeError, match="must be callable"):
            poptorch.registerPreCompileHook(3)

    def test_random_state_can_be_taken_back(self):
        inference = poptorch.inferenceModel(nn.Dropout(), quiet_options().randomSeed(5))
        x = torch.ones(128)
        inference.compile(x)
        state = inference.rng_state
        assert state[0] == 5
        host = torch.get_rng_state()
        first, second = inference(x), inference(x)
        assert torch.equal(torch.get_rng_state(), host)
        inference.rng_state = state
        assert torch.equal(inference(x), first)
        assert not torch.equal(first, second)

    def test_progress_bar_and_compilation_time(self, capsys):
        inference = poptorch.inferenceModel(Mlp())
        with pytest.raises(poptorch.Error, match="not been compiled"):
            inference.compilationTime()
        inference.compile(classified(2)[0])
        assert "Graph compilation: 100%" in capsys.readouterr().err
        assert inference.compilationTime().total_seconds() > 0
        with pytest.raises(poptorch.Error, match="showCompilationProgressBar"):
            poptorch.inferenceModel(Mlp(), quiet_options()).compilationTime()

    def test_ipus(self, caplog):
        def forward(x):
            for index, ipu in enumerate((0, 1, 2)):
                with poptorch.Block(str(index), ipu_id=ipu):
                    x = x + 1
            return x

        def options():
            return quiet_options().deviceIterations(3)

        x = torch.ones(3)
        with pytest.raises(poptorch.Error, match="autoRoundNumIPUs"):
            poptorch.inferenceModel(forward, options())(x)
        poptorch.inferenceModel(forward, options().autoRoundNumIPUs())(x)
        assert "rounded up from 3 to 4" in caplog.text
        with pytest.raises(poptorch.Error, match="deviceIterations is 1"):
            poptorch.inferenceModel(forward, quiet_options().autoRoundNumIPUs())(x)
        many = options().autoRoundNumIPUs().replicationFactor(17)
        with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(68\)"):
            poptorch.inferenceModel(forward, many)(torch.ones(51))
        assert poptorch.ipuHardwareIsAvailable()
        assert not poptorch.ipuHardwareIsAvailable(65)
        assert poptorch.ipuHardwareVersion() == 2


class TestLosses:
    @pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
    def test_identity_loss(self, reduction):
        x = torch.tensor([1.0, 3.0])
        expected = {"sum": 4, "mean": 2, "none": [1, 3]}[reduction]
        assert poptorch.identity_loss(x, reduction).tolist() == expected
        with pytest.raises(AssertionError, match="Unsupported reduction"):
            poptorch.identity_loss(x, "max")

    def test_a_loss_is_needed_and_one_only(self):
        class NoLoss(Mlp):
            def forward(self, x):
                return self.layers(x)

        class Two(Mlp):
            def forward(self, x):
                out = self.layers(x)
                return F.mse_loss(out, out * 2), F.l1_loss(out, out * 2)

        with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph"):
            trained(NoLoss())[1](classified(2)[0])
        with pytest.raises(poptorch.Error, match=r"Multiple independent losses.*identity_loss"):
            trained(Two())[1](classified(2)[0])

    def test_a_model_without_parameters_needs_a_loss(self):
        class Plain(nn.Module):
            def forward(self, x):
                return poptorch.identity_loss(x, "mean")

        assert poptorch.trainingModel(Plain(), quiet_options())(torch.ones(2)).item() == 1


class TestBuffers:
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.constant = torch.zeros(1)

        def forward(self, x):
            self.count += 1
            self.constant += 1
            return x + self.count, x + self.constant

    def test_buffers_last_and_plain_tensors_do_not(self):
        model = self.Counting()
        inference = poptorch.inferenceModel(model, quiet_options().deviceIterations(2))
        assert [t.tolist() for t in inference(torch.zeros(2))] == [[1, 2], [1, 1]]
        assert [t.tolist() for t in inference(torch.zeros(2))] == [[3, 4], [1, 1]]
        assert model.count.item() == 0
        inference.copyWeightsToHost()
        assert model.count.item() == 4

    @pytest.mark.parametrize("execution", ["loop", "fused"])
    def test_every_replica_has_its_own(self, execution):
        class Sums(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("total", torch.zeros(()))

            def forward(self, x):
                self.total += x.sum()
                return x + self.total

        model = Sums()
        options = quiet_options().replicationFactor(2)
        with pytest.raises(poptorch.Error, match="broadcastBuffers"):
            poptorch.inferenceModel(model, options.clone())(torch.zeros(2))
        options.broadcastBuffers(False).Emulator.replicaExecution(execution)
        inference = poptorch.inferenceModel(model, options)
        x = torch.tensor([1.0, 10.0])
        assert inference(x).tolist() == [2, 20]
        assert inference(x).tolist() == [3, 30]
        inference.copyWeightsToHost()
        assert model.total.item() == 2

    @pytest.mark.parametrize("how", ["reassign", "delete"])
    def test_buffers_stay_registered(self, how):
        class Loses(self.Counting):
            def forward(self, x):
                if how == "reassign":
                    self.count = self.count + 1
                else:
                    del self.count
                return x

        text = "was reassigned within the model" if how == "reassign" else "no longer exists"
        with pytest.raises(poptorch.Error, match=text):
            poptorch.inferenceModel(Loses(), quiet_options())(torch.zeros(1))

    def test_named_buffers_are_sent_alone(self):
        class Shift(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("a", torch.zeros(1))
                self.register_buffer("b", torch.zeros(1))

            def forward(self, x):
                return x + self.a + 10 * self.b

        model = Shift()
        options = quiet_options().updatableNamedBuffers(["a"])
        inference = poptorch.inferenceModel(model, options)
        inference(torch.zeros(1))
        model.a += 1
        model.b += 1
        inference.copyNamedBuffersToDevice()
        assert inference(torch.zeros(1)).item() == 1
        plain = poptorch.inferenceModel(model, quiet_options())
        plain(torch.zeros(1))
        with pytest.raises(poptorch.Error, match="updatableNamedBuffers"):
            plain.copyNamedBuffersToDevice()
        unknown = quiet_options().updatableNamedBuffers(["z"])
        with pytest.raises(poptorch.Error, match="z"):
            poptorch.inferenceModel(model, unknown)(torch.zeros(1))


class TestGroupedWeights:
    class Scale(nn.Module):
        def __init__(self, groups):
            super().__init__()
            self.w = nn.Parameter(torch.arange(2.0 * groups).reshape(groups, 2) + 1)

        def forward(self, x):
            return poptorch.identity_loss(self.w * x, "sum"), self.w * x

    @pytest.mark.parametrize(
        ("kind", "size", "rows"),
        [
            (poptorch.CommGroupType.Consecutive, 2, [0, 0, 1, 1]),
            (poptorch.CommGroupType.Orthogonal, 2, [0, 1, 0, 1]),
            (poptorch.CommGroupType.NoGrouping, 1, [0, 1, 2, 3]),
            (poptorch.CommGroupType.All, 4, [0, 0, 0, 0]),
        ],
    )
    def test_groups_learn_by_themselves(self, kind, size, rows):
        model = self.Scale(max(rows) + 1)
        before = model.w.detach().clone()
        options = quiet_options().replicationFactor(4).outputMode(poptorch.OutputMode.All)
        training = poptorch.trainingModel(
            model, options, torch.optim.SGD(model.parameters(), lr=1.0)
        )
        training.w.replicaGrouping(kind, size, poptorch.VariableRetrievalMode.OnePerGroup)
        x = torch.arange(1.0, 5.0)[:, None].expand(4, 2).contiguous()
        _, out = training(x)
        torch.testing.assert_close(out, before[rows] * x)
        # The mean is over all replicas, the sum inside a group only.
        gradient = torch.zeros_like(before).index_add_(0, torch.tensor(rows), x) / 4
        torch.testing.assert_close(model.w.detach(), before - gradient)

    def test_all_replicas_can_be_read(self):
        model = self.Scale(2)
        training = poptorch.trainingModel(
            model, quiet_options().replicationFactor(4), torch.optim.SGD(model.parameters(), lr=0)
        )
        training.w.replicaGrouping(
            poptorch.CommGroupType.Consecutive, 2, poptorch.VariableRetrievalMode.AllReplicas
        )
        training(torch.ones(4, 2))
        assert model.w.tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]

    def test_optimizer_state_has_a_row_for_each_group(self):
        def wrapped(model):
            optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
            options = quiet_options().replicationFactor(4)
            training = poptorch.trainingModel(model, options, optimizer)
            training.w.replicaGrouping(
                poptorch.CommGroupType.Consecutive, 2, poptorch.VariableRetrievalMode.OnePerGroup
            )
            return training, optimizer

        model = self.Scale(2)
        whole, optimizer = wrapped(model)
        x = torch.arange(8.0).reshape(4, 2)
        whole(x)
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        assert set(saved["ipu_state"]) == {"Accl1___w", "Accl2___w", "Step___w"}
        gradients = x.reshape(2, 2, 2).sum(1) / 4
        torch.testing.assert_close(saved["ipu_state"]["Accl1___w"], 0.1 * gradients)
        again = self.Scale(2)
        again.load_state_dict(weights)
        continued, optimizer = wrapped(again)
        optimizer.load_state_dict(saved)
        whole(x)
        continued(x)
        torch.testing.assert_close(again.w.detach(), model.w.detach())

    def test_scalars_cannot_be_grouped(self):
        model = nn.Module()
        model.w = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(poptorch.Error, match="Scalars cannot be passed as per-replica"):
            poptorch.inferenceModel(model).w.replicaGrouping(
                poptorch.CommGroupType.NoGrouping, 1, poptorch.VariableRetrievalMode.OnePerGroup
            )


def test_results_are_the_callers_own():
    class Aliases(nn.Module):
        def __init__(self):
            super().__init__()
            self.constant = torch.ones(3)

        def forward(self, x):
            out = x * 2
            return out, out.t(), out[:1].expand(2, 3), self.constant, x, x * 2

    model = poptorch.inferenceModel(Aliases(), quiet_options())
    x = torch.ones(2, 3)
    results = model(x)
    for result in results:
        result.add_(1)
    assert [result.unique().tolist() for result in results] == [[3], [3], [3], [2], [2], [3]]
    assert x.eq(1).all()
    assert model(x)[3].eq(1).all()


def test_a_saved_result_is_loaded_by_torchs_default(tmp_path):
    training = poptorch.trainingModel(Mlp(), quiet_options())
    out, loss = training(*classified(4))
    torch.save({"out": out, "loss": loss}, tmp_path / "results.pt")
    assert torch.equal(torch.load(tmp_path / "results.pt")["loss"], loss)


def test_a_parametrised_module_can_be_wrapped():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    training = poptorch.trainingModel(module, quiet_options())
    training.destroy()
    model = poptorch.inferenceModel(module, quiet_options())
    torch.testing.assert_close(model(torch.ones(4, 3)), module(torch.ones(4, 3)).detach())


def test_a_function_in_c_tells_no_signature():
    model = poptorch.inferenceModel(torch.mm, quiet_options())
    assert model(torch.ones(2, 3), torch.ones(3, 2)).tolist() == [[3, 3], [3, 3]]


def test_the_log_goes_to_stderr_in_one_format(capsys):
    logging.getLogger("poptorch::python").warning("hello")
    assert capsys.readouterr().err.endswith(" [poptorch::python] [warning] hello\n")
