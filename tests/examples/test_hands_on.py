"""The IPU hands-on session's program: its lines, its data, its memory, its steps side by side."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import survivors, wait_until
from support.repository import ROOT

FOLDER = ROOT / "examples" / "hands_on"
CUT = ["--model", "resnet18", "--side", "16", "--batch-size", "2", "--steps", "1", "--epochs", "1"]
FULL = ["--batch-size", "64", "--precision", "32.32", "--gradient-accumulation", "3"]
FULL += ["--epochs", "1"]
# A job of two replicas reads two halves of the data, so that one program with both replicas has to
# read them in turns to get the same micro-batches; flips are drawn by each instance for itself.
SAME_PICTURES = """\
import runpy, sys, torch
from torchvision import transforms
import popdist_py
from popdist_py import poptorch
transforms.RandomHorizontalFlip = lambda: lambda picture: picture
loader, options = poptorch.DataLoader, poptorch.DistributedOptions
def in_turns(opts, data, batch_size, shuffle, mode):
    call = 2 * 3 * batch_size  # images: replicas, accumulated micro-batches
    order = torch.arange(len(data) // call * call)  # each instance has whole calls
    if popdist_py.getNumInstances() == 1:
        order = order.view(2, -1, batch_size).transpose(0, 1).flatten()
    return loader(opts, data, batch_size=batch_size, sampler=order.tolist(), mode=mode)
def exact():
    made = options()
    made.Emulator.deterministicReduction()
    return made
poptorch.DataLoader, poptorch.DistributedOptions = in_turns, exact
sys.argv[0] = {path!r}
runpy.run_path({path!r}, run_name="__main__")
"""

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]


@pytest.fixture
def module(monkeypatch):
    """Import a module of the folder by name, as its own process would."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("main", "utils", "compare", "ladder_figure", "networks", "rungs")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    torch = importlib.import_module("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Make 320 pictures in CIFAR-10's files."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from common.sample_data import make_cifar10
    finally:
        sys.path.pop(0)
    folder = tmp_path_factory.mktemp("cifar10")
    make_cifar10(folder, training=320, test=10)
    return folder


def run(words, **environ):
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=140,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )  # fmt: skip


def test_commands_of_the_session_are_read_as_it_shows(module):
    text = (ROOT / "tests/sdk_programs/commands/hands_on.sh").read_text().replace("\\\n", "")
    commands = [line.split() for line in text.splitlines()]
    assert {tuple(words[:2]) for words in commands} == {("python", "main.py")}
    found = [module("main").parse_arguments(words[2:]) for words in commands]
    assert [one.precision for one in found] == ["32.32"] + ["16.16"] * 5
    assert [one.epochs for one in found] == [1] + [5] * 5
    assert [one.gradient_accumulation for one in found] == [3, 3, 8, 8, 8, 8]
    assert [one.device_iterations for one in found] == [1, 1, 1, 4, 4, 4]
    assert [one.eight_bit_io for one in found] == [False] * 4 + [True] * 2
    assert [one.async_dataloader for one in found] == [False] * 5 + [True]


def test_arguments_are_printed_as_the_session_does(module):
    parse = module("main").parse_arguments
    line = (
        "Namespace(async_dataloader=False, batch_size=64, device_iterations=1, "
        "eight_bit_io=False, epochs=1, gradient_accumulation=3, precision='32.32', replicas=1)"
    )
    assert parse(FULL).shown == line
    shown = parse([*FULL, "--side", "16", "--data-dir", "/data"]).shown
    assert shown == line.replace("device_", "data_dir='/data', device_", 1).replace(
        "replicas=1", "replicas=1, side=16"
    )
    for name in ("--device-iteration", "--device-iterations"):
        assert parse([name, "4"]).device_iterations == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gradient-accumulation", "2"], "2 is given, a pipeline over 2 IPUs needs 3 or more"),
        (["--batch-size", "1", "--side", "16"], "2 or more are accepted"),
        (["--times", "/dev/null/file"], "/dev/null is not a folder"),
    ],
)
def test_what_cannot_run_is_one_line(module, words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        module("main").parse_arguments(words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_missing_pictures_are_made_and_those_on_disk_are_read(module, tmp_path, monkeypatch):
    utils = module("utils")
    made = utils.make_cifar10
    monkeypatch.setattr(utils, "make_cifar10", lambda folder: made(folder, training=50, test=10))
    transform = utils.get_transform("32.32", eight_bit_io=True, side=16)
    first = utils.training_set(tmp_path / "new", transform)
    assert len(first) == 50
    assert utils.is_stand_in(first)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["cifar-10-batches-py"]
    monkeypatch.setattr(utils, "make_cifar10", None)
    again = utils.training_set(tmp_path / "new", transform)
    assert (again.data == first.data).all()
    (tmp_path / "new" / "cifar-10-batches-py" / "test_batch").unlink()
    with pytest.raises(SystemExit, match="files are missing or damaged"):
        utils.training_set(tmp_path / "new", transform)


@pytest.mark.parametrize("precision", ["32.32", "16.16"])
def test_training_prints_the_session_s_lines(module, pictures, precision, capsys, tmp_path):
    times = tmp_path / "times.json"
    words = [*CUT, "--data-dir", pictures, "--precision", precision, "--times", times]
    results = module("main").main([*map(str, words), "--eight-bit-io"])
    assert len(results) == 1
    printed, shown = capsys.readouterr()
    assert re.search(r"^\[Epoch 01\] loss: \d+\.\d{3}, acc: \d+\.\d$", printed, re.MULTILINE)
    assert re.search(r"\[Epoch 01\]: 100%\|█+\| 1/1 \[.*, loss=[\d.]+, acc=\d+\.?\d*\]", shown)
    assert "not CIFAR-10, digits in its format" in shown
    assert json.loads(times.read_text())["samples"] == 6


def test_the_session_s_first_command_is_refused_before_it_trains(module, pictures, capsys):
    with pytest.raises(SystemExit) as caught:
        module("main").main([*FULL, "--data-dir", str(pictures)])
    told = caught.value.code
    assert "Out of memory on IPU 1: 693,568 bytes used on the fullest tile" in told
    assert "half precision" in told.partition("Changes that would save memory")[2]
    assert "loss" not in capsys.readouterr().out


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize("precision", ["32.32", "16.16"])
def test_two_instances_have_the_loss_of_two_replicas(pictures, tmp_path, precision):
    program = tmp_path / "same_pictures.py"
    program.write_text(SAME_PICTURES.format(path=str(FOLDER / "main.py")))
    words = [program, *CUT, "--precision", precision, "--data-dir", pictures]
    words += ["--batch-size", "8", "--steps", "3", "--epochs", "2", "--seed", "3"]
    alone = run([*words, "--replicas", "2"])
    job = ("--num-instances", "2", "--num-replicas", "2", "--ipus-per-replica", "2")
    together = run(["-m", "poprun_py", *job, *words])
    losses, split = (
        re.findall(r"\[Epoch 0\d\] loss: ([\d.]+), acc", done.stdout) for done in (alone, together)
    )
    assert len(losses) == 2, alone.stderr
    assert losses == split, together.stderr
    assert float(losses[1]) < float(losses[0])


@pytest.mark.long
@pytest.mark.parametrize("step", range(1, 6))
def test_every_step_learns_at_the_size_it_is_compared_at(module, pictures, step):
    compare = module("compare")
    args = compare.parse_arguments(["--data-dir", str(pictures), "--steps", "2"])
    rung = compare.RUNGS[step]
    command = compare._command(rung, True, pictures / "times.json", args)[2:]
    command[command.index("--epochs") + 1] = "3"
    results = module("main").main(command)
    losses = [loss for loss, _ in results]
    assert all(loss < losses[0] for loss in losses[1:]), losses  # nan is not less, either
    assert len(losses) == 3


def test_a_loss_that_overflows_is_explained(module, pictures, capsys):
    words = [*CUT, "--data-dir", str(pictures), "--precision", "16.16", "--steps", "3"]
    ((loss, _),) = module("main").main(words)
    assert loss != loss
    assert capsys.readouterr().err.splitlines()[-1].startswith("The loss is not finite: gradients")


@pytest.fixture
def start():
    """Start a program in a group of its own; afterwards nothing of it is left."""
    mark = f"hands-on-{os.getpid()}-{time.monotonic_ns()}"

    def call(*words):
        return subprocess.Popen(
            [sys.executable, *map(str, words)], start_new_session=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HANDS_ON_TEST": mark},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    call.mark = f"HANDS_ON_TEST={mark}"
    yield call
    wait_until(lambda: not survivors(call.mark), 30, "processes of the session are left")


@pytest.mark.parametrize(
    "send",
    [
        pytest.param(os.kill, marks=pytest.mark.long),
        os.killpg,
    ],
)
def test_ctrl_c_ends_a_training(start, pictures, send):
    program = start(
        FOLDER / "main.py", *CUT[:-1], "9999", "--async-dataloader",
        "--precision", "32.32", "--data-dir", pictures,
    )  # fmt: skip
    assert any("Epoch 01] loss" in line for line in program.stdout)
    send(program.pid, signal.SIGINT)
    _, said = program.communicate(timeout=60)
    assert program.returncode == 130
    assert "main.py: interrupted" in said.splitlines()
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("send", "number"),
    [
        (os.kill, signal.SIGINT),
        (os.killpg, signal.SIGINT),
        (os.kill, signal.SIGTERM),
    ],
)
def test_a_comparison_that_is_ended_ends_its_run(start, pictures, send, number):
    program = start(
        FOLDER / "compare.py", "--only", "async", "--steps", "500", "--data-dir", pictures
    )
    wait_until(lambda: len(survivors(start.mark)) >= 3, 60)  # itself, main.py, and its loader
    send(program.pid, number)
    _, said = program.communicate(timeout=60)
    assert program.returncode == 128 + number
    assert "Traceback" not in said
    assert said.count("interrupted") == (number == signal.SIGINT)


# The modelled figures of the first five steps: the share of the fullest tile, MiB that the first
# IPU receives, kB that the two IPUs send, and cycles of a call.
MODELLED = (
    ("109%", "", "", ""),
    ("71%", "4.5", "51.8, 141", "60,275,087"),
    ("71%", "12.0", "138, 141", "95,857,604"),
    ("71%", "48.0", "552, 142", "283,354,122"),
    ("71%", "24.0", "552, 142", "280,477,237"),
)


def test_modelled_columns_are_near_those_of_hardware(module, tmp_path, capsys):
    files = {name: tmp_path / f"ladder.{name}" for name in ("csv", "json")}
    figure = tmp_path / "ladder.svg"
    words = ["--csv", str(files["csv"]), "--json", str(files["json"])]
    rows = module("compare").main([*words, "--steps", "0", "--figure", str(figure)])
    for row, (memory, received, sent, cycles) in zip(rows, MODELLED, strict=False):
        assert f"{max(row.modelled.memory):.0%}" == memory
        if row.rung.cycles:
            assert f"{row.modelled.cycles:,}" == cycles
            assert f"{row.modelled.received[0]}" == received
            assert ", ".join(f"{size:.3g}" for size in row.modelled.sent) == sent
            assert row.modelled.received[0] == row.rung.received
            assert row.modelled.sent == pytest.approx(row.rung.sent, rel=0.01)
            assert row.modelled.cycles == pytest.approx(row.rung.cycles, rel=0.01)
    assert [row.modelled.fits for row in rows] == [row.rung.fits for row in rows]
    assert rows[4].modelled == rows[5].modelled
    drawn = figure.read_text()
    for name in ("measured-rate-1", "modelled-cycles-5", "session-cycles", "all-memory"):
        assert f'id="{name}"' in drawn
    with files["csv"].open() as file:
        assert [line["step"] for line in csv.DictReader(file)] == [row.rung.name for row in rows]
    assert len(json.loads(files["json"].read_text())["rows"]) == 6
    assert "modelled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--model", "vgg"], "'resnet18'"), (["--batch-size", "1"], "2 or more are accepted")],
)
def test_what_cannot_be_compared_is_one_line(module, words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        module("compare").main(words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_each_step_is_run_as_often_as_asked_for(module, monkeypatch):
    compare = module("compare")
    runs = []

    def run(command):
        runs.append(command)
        times = {"samples": 6, "seconds": [[9, len(runs)]]}  # the first call compiles
        Path(command[-1]).write_text(json.dumps(times))
        return 0, ""

    monkeypatch.setattr(compare, "_run", run)
    for words, count, images_per_second in ([], 1, 6), (["--repeats", "3"], 3, 3):
        runs.clear()
        args = compare.parse_arguments(words)
        assert compare.measured(compare.RUNGS[1], True, args).rate == images_per_second
        assert len(runs) == count


def test_several_instances_do_not_compare(module, monkeypatch):
    compare = module("compare")
    monkeypatch.setattr(compare.popdist_py, "getNumInstances", lambda: 2)
    with pytest.raises(SystemExit, match="start it once, with python, not poprun-py"):
        compare.main([])


def test_a_step_that_fails_is_a_row_with_its_reason(module, capsys):
    rows = module("compare").main(["--only", "half", "--steps", "1", "--data-dir", "/dev/null/x"])
    assert len(rows) == 1
    assert rows[0].measured.rate is None
    assert "no CIFAR-10 in /dev/null/x" in rows[0].measured.reason
    assert "half precision: no CIFAR-10" in capsys.readouterr().out
