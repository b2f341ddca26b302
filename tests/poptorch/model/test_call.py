"""One call of a wrapped model: what it takes, and what it returns."""

from __future__ import annotations

import collections
import copy
import dataclasses
import warnings

import numpy as np
import pytest
import torch
from support.models import Mlp, WithLoss, classified, quiet_options, trained
from torch import nn

import popdist_py.poptorch as poptorch

Pair = collections.namedtuple("Pair", "first second")


class Nested(nn.Module):
    def forward(self, x, *rest, extra=None, scale=1):
        total = x
        for item in rest:
            total = total + item
        if extra is not None:
            total = total + extra["a"][0] + extra["b"]
        return Pair({"total": total * scale}, [None, 3, (x, "word")])


def test_constants_that_are_arrays_compare_by_element():
    model = poptorch.inferenceModel(lambda x, scales: x * float(scales[1]), quiet_options())
    for _ in range(2):
        assert model(torch.ones(1), np.array([1.0, 2.0])).tolist() == [2]
    for other in ([1.0, 3.0], [1.0, 2.0, 3.0]):
        with pytest.raises(poptorch.Error, match="Value mismatch for scales"):
            model(torch.ones(1), np.array(other))


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

    @pytest.mark.parametrize("first", [{}, {"scale": torch.tensor([[2.0]])}])
    def test_a_tensor_may_be_left_to_its_default(self, first):
        def forward(x, scale=torch.ones(1, 1), shift=torch.zeros(2)):  # noqa: B008
            return x * scale + shift

        inference = poptorch.inferenceModel(forward, quiet_options())
        x, two = torch.ones(2, 2), torch.tensor([[2.0]])
        assert inference(x, **first).sum() == (8 if first else 4)
        assert inference(x).sum() == 4
        assert inference(x, scale=two, shift=torch.ones(2)).sum() == 12
        assert inference(x, two).sum() == 8
        assert inference(x, two, shift=torch.ones(2)).sum() == 12
        with pytest.raises(AssertionError, match="scale was passed more than once"):
            inference(x, two, scale=two)
        with pytest.raises(AssertionError, match="Too many arguments"):
            inference(x, two, two, two)
        with pytest.raises(poptorch.Error, match="Shape mismatch for scale"):
            inference(x, torch.ones(2, 1))

    @pytest.mark.parametrize("rows", [2, 4])
    def test_a_forward_sees_a_default_whole(self, rows):
        """It is for one micro-batch, unless the first call gave a tensor of its shape."""
        default = torch.arange(float(rows))[:, None]

        def forward(x, shift=default):
            return x + shift

        options = quiet_options().deviceIterations(2)
        zeros = torch.zeros(4, 1)
        inference = poptorch.inferenceModel(forward, options)
        expected = default.repeat(2, 1) if rows == 2 else default
        if rows == 4:
            assert inference(zeros, shift=torch.ones(4, 1)).tolist() == [[1]] * 4
        assert torch.equal(inference(zeros), expected)
        assert inference(zeros, shift=torch.ones(4, 1)).tolist() == [[1]] * 4
        assert torch.equal(inference(zeros), expected)

    def test_defaults_that_cannot_be_inputs_are_constants(self):
        def forward(x, scale=torch.tensor(3.0), none=torch.zeros(0)):  # noqa: B008
            return x * scale + none.numel()

        inference = poptorch.inferenceModel(forward, quiet_options().deviceIterations(2))
        assert inference(torch.ones(2)).tolist() == [3, 3]
        assert len(inference.getPerfCounters()["input"]) == 1
        alone = poptorch.inferenceModel(forward, quiet_options())
        assert alone(torch.ones(2), scale=torch.tensor(2.0)).tolist() == [2, 2]
        assert alone(torch.ones(2)).tolist() == [3, 3]

    @pytest.mark.parametrize(
        ("first", "then", "text"),
        [
            ({}, "tensor", "mask: expected <class 'NoneType'> but got <class 'torch.Tensor'>"),
            ({"mask": 1}, "none", "mask: expected <class 'torch.Tensor'> but got .*NoneType"),
            ({"mask": 1}, "left out", "mask: expected <class 'torch.Tensor'> but got .*NoneType"),
        ],
    )
    def test_none_for_a_tensor_names_the_argument(self, first, then, text):
        def forward(x, mask=None, more=None):
            return x if mask is None else x * mask + more

        one = torch.ones(2)
        inference = poptorch.inferenceModel(forward, quiet_options())
        inference(one, more=one, **dict.fromkeys(first, one))
        later = {"tensor": {"mask": one}, "none": {"mask": None}, "left out": {}}[then]
        with pytest.raises(poptorch.Error, match=f"Type mismatch for {text}"):
            inference(one, more=one, **later)

    def test_none_may_be_left_out(self):
        inference = poptorch.inferenceModel(lambda x, mask=None: (x, mask), quiet_options())
        for given in ({}, {"mask": None}, {}):
            assert inference(torch.ones(1), **given)[1] is None

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
        assert [record.message[:5] for record in caplog.records] == ["Dicti"]

    def test_unusual_inputs_are_taken_with_one_warning_each(self, caplog):
        inference = poptorch.inferenceModel(lambda x, d: x + d["a"], quiet_options())
        x = torch.ones(2, 3).t().requires_grad_()
        for _ in range(2):
            inference(x, {"a": torch.ones(3, 2)})
        text = caplog.text
        assert text.count("is not contiguous") == 1
        assert text.count("The input tensor will be detached") == 1
        assert text.count("Dictionaries in the inputs") == 1

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
        x, y = classified(8)
        losses = []
        for labels in (y, y.int(), y.short()):
            torch.manual_seed(0)
            _, training = trained(Mlp())
            losses.append(training(x, labels)[1])
        assert losses[0] == losses[1] == losses[2]


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
