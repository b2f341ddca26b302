"""Unusual models: the command estimates them, or one message says why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from poptorch.on_ipu.asked_command import ask

FILE = str(Path(__file__).with_name("unusual_models.py"))
COUNTS = ("0", "1", "2", "3", "17", "99999999999999999999", "-1", "1.5", "", "nan", "1e3")
MODULES = ("0", "2", "1,2", "2,1", "2,2", "0,2", "3", "", ",", "2,", "ReLU", "nll_loss_forward")
SORTS = ("weights", "accumulators,optimizer", "activations,activations", "", "all")
VALUES = {
    "--set": ("a=1", "a", "=", "bias=True"),
    "--input": ("4", "4", "4:int64", "4x4", "0x3", "3.5", ":", "9" * 30, "4:int4"),
    "--batch": (*COUNTS, "1000000000"),
    "--loss": ("cross-entropy", "token-cross-entropy", "mse", "own", "none"),
    "--precision": ("16.16", "16.32", "32.32", "8"),
    "--optimizer": ("sgd", "adamw", "lamb", "none"),
    "--accum-type": ("float16", "int8"),
    "--accumulation": COUNTS,
    "--device-iterations": COUNTS,
    "--replicas": (*COUNTS, "1000000000"),
    "--split": MODULES,
    "--strategy": ("grouped", "interleaved", "sharded", "serial-phased", "parallel-phased"),
    "--recompute": ("default", "none", "norm", "stage"),
    "--checkpoint": MODULES,
    "--device": ("mk1", "bow", "mk3"),
    "--io-tiles": (*COUNTS, "32", "192", "1472"),
    "--available-memory-proportion": ("0", "1", "0.1,0.2", "nan", "1e-300", ""),
    "--off-chip": SORTS,
    "--sharded": SORTS,
    "--output-mode": ("final", "all", "sum"),
    "--find": ("batch", "splits", "recompute"),
    "--ipus": (*COUNTS, "10000"),
}
FLAGS = ("--inference", "--synthetic-data", "--json")


@pytest.mark.parametrize(
    "name",
    [
        *("without_parameters", "no_operation", "meta", "meta_norm_first"),
        *("bfloat16", "float64", "float16", "data_parallel", "symbolic", "lazy", "scripted_part"),
        *("dict_output", "vectorised", "differentiated", "functional", "changing_input"),
        *("drawing", "eight_bits", "detached", "compiled", "compiled_part", "with_autocast"),
        *("an_instance", "hooked", "exported", "with_none", "with_lock", "with_odd_names", "Twice"),
    ],
)
def test_estimated(name):
    code, out, errors = ask(f"{FILE}:{name}", "--input", "4", "--batch", "2")
    assert (code, errors) == (0, "")
    assert out.startswith("Memory: fits on 1 mk2 IPU;")


def test_nothing_is_compiled(recwarn, caplog):
    # The results of earlier command lines are cached, so the file gets another name.
    compiled = f"{Path(FILE).parent}/./{Path(FILE).name}:compiled"
    assert ask(compiled, "--input", "4", "--batch", "2")[0] == 0
    assert not any("hooks" in str(warning.message) for warning in recwarn)
    assert caplog.text == ""


def test_modules_of_wrappers_have_their_own_names():
    for name in ("compiled", "data_parallel", "meta"):
        assert ask(f"{FILE}:{name}", "--input", "4", "--split", "2")[0] == 0


def test_what_a_model_prints_is_not_in_the_report():
    code, out, errors = ask(f"{FILE}:printing", "--input", "4", "--json")
    assert code == 0
    assert json.loads(out)["fits"] is True
    assert set(errors.splitlines()) == {"text of the factory", "text of the forward"}


def test_large_inputs_need_no_memory():
    code, out, _ = ask(f"{FILE}:layers", "--input", "4", "--batch", "1000000000")
    assert code == 1
    assert out.startswith("Memory: does not fit on 1 mk2 IPU;")
    assert ask(f"{FILE}:huge_result", "--input", "4")[0] == 1


def test_a_module_takes_no_arguments():
    code, _, errors = ask(f"{FILE}:an_instance", "--input", "4", "--set", "width=3")
    assert code == 2
    assert "remove --set" in errors


def test_inference_does_not_train():
    assert ask(f"{FILE}:norm", "--input", "4", "--inference")[0] == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "lacking_key",
            "KeyError: 'gone'\nThe shapes of the model's inputs, micro-batch first: 1x4:float32",
        ),
        ("asserting", "in _asserting\n    assert x.shape[1] == 5\n"),
        ("leaving", "SystemExit: 0"),
        ("fourier", "fft_r2c computes a complex64 tensor, but PopTorch does not support"),
        ("complex_view", "mul computes a complex64 tensor, but PopTorch does not support"),
        ("branching", "a Python condition on a tensor needs the value of a tensor"),
        ("masking", "indexing with a boolean mask"),
        ("unique", "whose size depends on values (unique2)"),
        ("listing", "Tensor.item() needs the value of a tensor"),
        ("as_array", "reads the values of a tensor"),
        ("sparse", "PopTorch supports only dense tensors"),
        ("overflowing", "a tensor of more than 2**63 bytes"),
        ("truth", "first output has the type bool, but a loss needs float32 or float16"),
        ("no_tensor", "returned an object of the type str, but a loss needs a tensor"),
        ("own_class", "returned an object of the type Output, but a loss needs a tensor"),
        ("number_output", "choose --loss mse, or choose --loss own"),
        ("odd_width", "in <lambda>"),
        ("norm", "give --batch 2 or more, or --inference"),
        ("KeywordOnly", "has the signature (*, x), which does not match the inputs"),
        ("a_class", "return an instance, as in Linear(...)"),
        ("a_list", "of the type list: expected a torch.nn.Module"),
        ("three", "of the type tuple: expected a torch.nn.Module"),
        ("nothing", "returned an object of the type NoneType"),
        ("scripted", "return the original module, without torch.jit.script"),
        ("traced", "return the original module, without torch.jit.script"),
        ("quantized", "0 is a quantized ReLU6"),
        ("with_options", "an object of the type Options: expected the module's inputs"),
        ("wrapped", "return the module that the program gives to poptorch"),
        ("too_large", 'make the weights on the device "meta", as in: with torch.device("meta")'),
        ("layer", "has no function layer; did you mean layers"),
        ("Computing", "give --set compute=VALUE"),
    ],
)
def test_refused(name, said):
    code, out, errors = ask(f"{FILE}:{name}", "--input", "4")
    assert (code, out) == (2, "")
    assert said in errors
    assert "popdist_py/" not in errors
    assert "fault of popdist_py" not in errors
    # An error is one line. An exception of the user's code also shows the lines of this code.
    assert errors.count("\n") == 1 or "failed:" in errors


def test_an_interruption_has_its_own_exit_code():
    for name in ("interrupted", "interrupting"):
        code, out, _ = ask(f"{FILE}:{name}", "--input", "4")
        assert (code, out) == (130, "")


@pytest.mark.parametrize(
    ("model", "split", "said"),
    [
        ("layers", "0", "--split cannot contain 0, because the model begins with this module"),
        ("layers", "0,2", "--split cannot contain 0, because the model begins with this module"),
        (
            "layers",
            "2,1",
            "gives 1 after 2, but 1 runs before 2: give the modules in execution order",
        ),
        ("layers", "2,1", "order, 1,2"),
        ("layers", "2,2", "gives the module 2 twice"),
        ("layers", "2,", "expected values that are separated by single commas"),
        ("nested", "1,1.0", "modules 1 and 1.0, which begin with the same operation"),
        ("Twice", "never", "the forward pass runs no module named never"),
        ("Twice", "first", "because the model begins with this module"),
    ],
)
def test_invalid_splits(model, split, said):
    code, out, errors = ask(f"{FILE}:{model}", "--input", "4", "--split", split)
    assert (code, out) == (2, "")
    assert said in errors


def test_a_stage_may_begin_where_a_module_runs_again():
    code, out, _ = ask(f"{FILE}:Twice", "--input", "4", "--split", "between,first")
    assert code == 0
    assert out.startswith("Memory: fits on 3 mk2 IPUs;")


def test_proportions_are_for_all_ipus_or_for_each():
    cut = (f"{FILE}:layers", "--input", "4", "--split", "2", "--available-memory-proportion")
    for shares in ("0.2", "0.2,0.3"):
        assert ask(*cut, shares)[0] == 0
    code, out, errors = ask(*cut, "0.1,0.2,0.3")
    assert (code, out) == (2, "")
    assert "gives 3 numbers for 2 IPUs: expected one number for all IPUs" in errors


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_options_end_in_a_verdict_or_in_a_message(data):
    names = data.draw(st.lists(st.sampled_from([*VALUES, *FLAGS]), unique=True, max_size=6))
    words = [f"{FILE}:layers", *(() if "--input" in names else ("--input", "4"))]
    for name in names:
        words += [name, data.draw(st.sampled_from(VALUES[name]))] if name in VALUES else [name]
    code, out, errors = ask(*words)
    assert code in (0, 1, 2, 4)
    assert (out == "") == (code == 2)
    assert (errors == "") == (code != 2)
    assert "fault of popdist_py" not in errors
    if code != 2 and "--json" in names:
        json.loads(out)
