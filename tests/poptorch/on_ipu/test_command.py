"""``python -m popdist_py.ipu``: its reports, its exit codes, and its errors for wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from poptorch.on_ipu.asked_command import ask
from support.repository import ROOT

from popdist_py.ipu.runs import run_from_command
from popdist_py.ipu.specification import MK2

FILE = str(Path(__file__).with_name("command_models.py"))
MLP = (f"{FILE}:mlp", "--input", "16")
LARGE = (f"{FILE}:large", "--input", "20000")
ENCODER = (f"{FILE}:Encoder", "--input", "32:int64", "--loss", "token-cross-entropy")
# A small model, which is enough for options that do not depend on stages.
LAYER = (f"{FILE}:Encoder", "--set", "layers=1", *ENCODER[1:])


def told(*words):
    """Return the JSON that the command prints."""
    code, out, _ = ask(*words, "--json")
    made = json.loads(out)
    if "verdict" in made:
        assert code == {"fits": 0, "close": 4, "does not fit": 1}[made["verdict"]]
    else:
        assert code == (not made["found"])
    return made


def needed(*words):
    """Return the bytes that each IPU needs."""
    return [own["needed"] for own in told(*words)["memory"]["ipus"]]


@pytest.mark.sweep
def test_output_of_a_process(tmp_path):
    words = [*ENCODER, "--split", "layers.1", "--accumulation", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "popdist_py.ipu", *words],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    assert first.startswith("Memory: fits on 2 mk2 IPUs;")
    assert any(line.startswith("Execution: ") for line in rest)
    # The command prints the same text if it runs in this process.
    assert ask(*words)[1] == done.stdout


def test_json_has_both_reports():
    made = told(*MLP)
    assert made["version"] == 2
    assert made["fits"] is True
    assert made["memory"]["report"] == "memory"
    assert made["execution"]["report"] == "execution"
    weights = 4 * (2 * (16 * 16 + 16) + 16 * 4 + 4)
    assert made["memory"]["ipus"][0]["by_category"]["weights"] == weights


def test_exit_code_1_if_the_model_does_not_fit():
    code, out, _ = ask(*LARGE)
    assert code == 1
    assert out.startswith("Memory: does not fit on 1 mk2 IPU;")
    assert "Changes that would save memory, each alone" in out


def test_exit_code_4_if_the_model_is_close_to_the_limit(monkeypatch):
    uncached = ask.__wrapped__
    (own,) = told(*MLP)["memory"]["ipus"]
    for share, code, said in ((0.97, 4, "close to the limit"), (1.02, 4, "close to the limit"),
                              (1.06, 1, "does not fit"), (0.9, 0, "fits")):  # fmt: skip
        small = replace(MK2, tile_bytes=round(own["fullest_tile"] / share))
        monkeypatch.setattr(run_from_command, "IPUS", {"mk2": small})
        found, out, _ = uncached(*MLP)
        assert found == code
        needs = f"the fullest tile needs {share:.1%} +- 5% of its {small.tile_bytes:,} bytes"
        assert out.startswith(f"Memory: {said} on 1 mk2 IPU; {needs}")


def test_the_factory_s_inputs_and_loss():
    for name in ("with_dict", "with_tuple"):
        made = told(f"{FILE}:{name}")
        assert made["execution"]["samples"] == 4
    inference = told(f"{FILE}:with_tensor", "--inference")
    assert [one["backward"] for one in inference["execution"]["stages"]] == [0]
    added = told(f"{FILE}:with_tensor", "--loss", "cross-entropy")
    assert added["execution"]["stages"][0]["backward"] > 0


def test_samples_of_a_call():
    options = ("--batch", "3", "--accumulation", "5", "--device-iterations", "2", "--replicas", "4")
    assert told(*MLP, *options)["execution"]["samples"] == 3 * 5 * 2 * 4


def test_a_pipeline_has_as_many_micro_batches_as_it_needs():
    made = told(*ENCODER, "--split", "layers.1,head")
    assert made["execution"]["samples"] == 5
    inference = told(ENCODER[0], *ENCODER[1:3], "--split", "layers.1,head", "--inference")
    assert inference["execution"]["samples"] == 3
    turns = told(*ENCODER, "--split", "layers.1,head", "--strategy", "sharded")
    assert turns["execution"]["samples"] == 1


@pytest.mark.parametrize(
    ("options", "change"),
    [
        (["--optimizer", "adam"], "more"),
        (["--batch", "8"], "more"),
        (["--precision", "16.16"], "less"),
        (["--inference"], "less"),
        (["--available-memory-proportion", "0.00001"], "less"),
        (["--partials", "float16"], "less"),
        (["--matmul-partials", "float16"], "less"),
        (["--synthetic-data"], "less"),
        (["--device", "mk1"], "less"),
        (["--off-chip", "activations"], "less"),
        (["--io-tiles", "32"], "less"),
    ],
)
def test_options_that_change_memory(options, change):
    without_loss = LAYER[:-2] if "--inference" in options else LAYER
    before, after = needed(*LAYER), needed(*without_loss, *options)
    assert (after > before) if change == "more" else (after < before)


@pytest.mark.parametrize(
    ("options", "others"),
    [
        (["--optimizer", "adam", "--off-chip", "optimizer"], ["--optimizer", "adam"]),
        (
            ["--optimizer", "adam", "--first-order-momentum-accum-type", "float16"],
            ["--optimizer", "adam"],
        ),
        (["--accumulation", "4", "--accum-type", "float16"], ["--accumulation", "4"]),
        (
            ["--replicas", "4", "--optimizer", "adam", "--sharded", "optimizer,weights"],
            ["--replicas", "4", "--optimizer", "adam"],
        ),
    ],
)
def test_options_that_change_others(options, others):
    assert needed(*LAYER, *options) < needed(*LAYER, *others)


def test_checkpoints_and_recomputation():
    deep = (*ENCODER, "--batch", "64")
    kept = needed(*deep, "--recompute", "none")
    again = needed(*deep, "--recompute", "stage")
    layers = "layers.0,layers.1"
    marked = needed(*deep, "--recompute", "stage", "--checkpoint", layers)
    assert marked < again <= kept
    # The last stage of a pipeline recomputes if it contains a checkpoint.
    cut = (*deep, "--split", "layers.0")
    assert needed(*cut, "--checkpoint", "layers.0")[-1] < needed(*cut)[-1]


def test_phases_take_the_ipus_that_poptorch_gives_them():
    cut = (*ENCODER, "--split", "layers.0,layers.1,head", "--strategy")
    assert len(needed(*cut, "grouped")) == 4
    assert len(needed(*cut, "serial-phased")) == 1
    assert len(needed(*cut, "parallel-phased")) == 2


def test_searches():
    found = told(*MLP, "--find", "batch", "--device", "mk1")
    assert found["found"]
    batch = found["batch"]
    assert told(*MLP, "--device", "mk1", "--batch", str(batch))["fits"]
    splits = told(*ENCODER, "--find", "splits", "--ipus", "3")["splits"]
    assert len(splits) == 2
    assert len(needed(*ENCODER, "--split", ",".join(splits))) == 3
    fewest = told(*ENCODER, "--find", "ipus", "--ipus", "4")
    assert (fewest["num_ipus"], fewest["verdict"], fewest["changes"]) == (1, "fits", [])
    assert [one["num_ipus"] for one in fewest["alternatives"]] == [2, 4]
    cheapest = told(*ENCODER, "--find", "recompute")
    assert (cheapest["recompute"], cheapest["checkpoints"]) == ("none", [])
    code, out, _ = ask(*ENCODER, "--find", "splits", "--ipus", "3")
    assert code == 0
    assert out.startswith("The best splits over 3 IPUs: ")
    assert "samples/s" in out


def test_splits_that_were_found_can_be_given_to_the_command():
    tied = (f"{FILE}:Tied", *ENCODER[1:], "--accumulation", "9")
    found = told(*tied, "--find", "splits", "--ipus", "2")
    assert found["ipus"] == [0, 1, 0]
    assert found["split"] == f"{','.join(found['splits'])}@0"
    given = told(*tied, "--split", found["split"])
    assert len(given["memory"]["ipus"]) == 2
    assert given["memory"]["share"] == found["share"]
    _, out, _ = ask(*tied, "--find", "splits", "--ipus", "2")
    assert out.endswith(f"\n  --split {found['split']}\n")
    assert f"{given['execution']['cycles']:,} cycles a call" in out


def test_searches_without_a_result():
    for words in (["batch"], ["splits", "--ipus", "2"], ["recompute"]):
        made = told(*LARGE, "--find", *words)
        assert {key: value for key, value in made.items() if key != "curve"} == {
            "version": 1, "question": words[0], "found": False,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing argument 'MODEL'"),
        (["torch.nn:Linear", "--input", "3xa"], "is not the shape of a sample"),
        (["torch.nn:Linear", "--input", "3:float8"], "is not a data type of a model input"),
        (["torch.nn:Linear", "--set", "features"], "'features' does not have the form NAME=VALUE"),
        (["torch.nn:Linear", "--precision", "8.8"], "is not one of"),
        (["torch.nn:Linear", "--off-chip", "weights,data"], "is not one of"),
        (["torch.nn:Linear", "--available-memory-proportion", "0.5,2"], "not in the range"),
        (["torch.nn:Linear", "--batch", "0"], "not in the range"),
        (
            ["torch.nn:Linear", "--find", "splits"],
            "--find splits needs the number of IPUs: add --ipus N",
        ),
        (["torch.nn:Linear", "--ipus", "2"], "--ipus can be used only with --find splits"),
        (["torch.nn:Linear", "--inference", "--loss", "mse"], "inference has no loss"),
        (["nowhere:f"], "there is no module nowhere"),
        (
            ["torch.optin:SGD"],
            "(the name of a file must end with .py); did you mean optim",
        ),
        (["torch.nn:linear"], "torch.nn has no function linear; did you mean Linear"),
        (["torch.nn"], "as in torchvision.models:resnet50"),
        ([*ENCODER[:2], "32", *ENCODER[3:]], "need an integer type, as in --input 128:int64"),
        ([*ENCODER, "--split", "1"], "no module named 1; existing modules: layers.1"),
        ([f"{FILE}:with_tuple", "--batch", "3"], "remove --batch"),
        ([f"{FILE}:mlp"], "--input 3x224x224"),
        ([*MLP, "--split", "9"], "the forward pass runs no module named 9; existing modules: 0, "),
        ([*MLP, "--split", "4,0"], "but 0 runs before 4"),
        (
            [*MLP, "--split", "2@2"],
            "2@2: the stage that begins with 2 cannot run on IPU 2; expected one of 1",
        ),
        ([*MLP, "--split", "2@"], "expected one of 1"),
        ([*MLP, "--split", "2,4@1"], "expected one of 0, 2"),
        ([*MLP, "--split", "2@0", "--strategy", "serial-phased"], "serial-phased chooses the IPUs"),
        ([*MLP, "--checkpoint", "layers.0"], "no module named layers.0"),
        ([*MLP, "--io-tiles", "3"], "an even number"),
        ([*MLP, "--io-tiles", "1472"], "even number from 32 to 192"),
        (
            [*MLP, "--split", "2", "--accumulation", "2"],
            "expected at least 3 for a pipeline of 2 stages",
        ),
        ([*MLP, "--inference", "--accumulation", "2"], "inference has no weight updates"),
        ([f"{FILE}:mlp", "--input", "15"], "the model's forward failed"),
        ([f"{FILE}:failing"], "RuntimeError: no weights here"),
        ([f"{FILE}:Squared", "--input", "3"], "in forward"),
        ([f"{FILE}:Reading", "--input", "4"], "Tensor.item() needs the value of a tensor"),
        (
            [f"{FILE}:Nothing", "--input", "4"],
            "the model's forward returned an object of the type NoneType",
        ),
    ],
)
def test_wrong_input_has_one_message_and_exit_code_2(words, said, caplog):
    code, out, errors = ask(*words)
    assert (code, out) == (2, "")
    message = errors.partition("Error: ")[2]
    assert said in message
    assert "popdist_py/" not in message
    assert caplog.text == ""


def test_help_names_every_option_and_exit_code():
    code, out, _ = ask("--help")
    assert code == 0
    for words in (
        "Exit codes:\n    0  the model fits",
        "torchvision.models:resnet50",
        "BeginBlock",
        "--sharded",
    ):
        assert words in out
