"""The course's programs on distributed training: what they count, compare and show is so."""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

COURSE = ROOT / "examples" / "course"
MODULES = (
    "fashion_mnist",
    "data_parallel",
    "distributed_example",
    "lightning_example",
    "speed_up",
    "speed_up_instance",
    "threads_or_processes",
)
SMALL = ("--epochs", "1", "--items", "201", "--batch-size", "25")

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]


@pytest.fixture
def course(monkeypatch):
    """Import a program by name, as its own process would."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(COURSE))
    torch = importlib.import_module("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def data(course, tmp_path):
    """Make a small FashionMNIST."""
    folder = tmp_path / "data"
    course("common.sample_data").make_fashion_mnist(folder, training=240, test=40)
    return folder


@pytest.fixture
def batch(course):
    """Return a model in evaluation mode and 7 images."""
    import torch

    model = course("fashion_mnist").FashionCNN().eval()
    model.layer1[1].running_mean += 0.1  # BatchNorm has something to do
    return model, torch.rand(7, 1, 28, 28)


def test_the_model_has_the_weights_that_it_says(course):
    fashion_mnist = course("fashion_mnist")
    count = sum(weights.numel() for weights in fashion_mnist.FashionCNN().parameters())
    assert f"{count:,} weights" in fashion_mnist.FashionCNN.__doc__


def test_training_on_one_device(course, data, capsys):
    accuracy = course("fashion_mnist").main(["--data-dir", str(data), *SMALL])
    assert f"test accuracy {accuracy:.1f} %" in capsys.readouterr().out


def test_a_stand_in_is_made_whole_or_not_at_all(course, tmp_path, monkeypatch):
    fashion_mnist = course("fashion_mnist")
    maker = course("common.sample_data")
    small = maker.make_fashion_mnist

    def while_another_makes_it(folder):
        small(folder, training=20, test=10)
        if folder != tmp_path:
            small(tmp_path, training=30, test=10)

    monkeypatch.setattr(maker, "make_fashion_mnist", while_another_makes_it)
    training, _ = fashion_mnist.load(tmp_path)
    assert len(training) == 30  # the quicker one's
    assert [path.name for path in tmp_path.iterdir()] == ["FashionMNIST"]


def test_no_data_is_told_in_a_line(course, tmp_path):
    (tmp_path / "FashionMNIST").mkdir()
    with pytest.raises(SystemExit, match=r"no FashionMNIST in .* expected its four"):
        course("fashion_mnist").load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"--data-dir .*file: .* give a folder"):
        course("fashion_mnist").load(tmp_path / "file")


@pytest.mark.parametrize("devices", [2, 3])
def test_data_parallel_gathers_what_one_device_computes(course, batch, devices):
    import torch

    model, images = batch
    emulated = course("data_parallel").DataParallel(model, devices)
    with torch.no_grad():
        torch.testing.assert_close(emulated.forward(images), model(images))
    assert len(emulated.transfers) == 3 * devices
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    sent = {
        step: [transfer.bytes for transfer in emulated.transfers if transfer.step == step]
        for step in ("scatter batch", "replicate model", "gather outputs")
    }
    assert sum(sent["scatter batch"]) == images.nbytes
    assert sent["replicate model"] == [weights] * devices
    assert sum(sent["gather outputs"]) == 7 * 10 * 4


def test_data_parallel_sums_the_gradients(course, batch):
    import torch

    model, images = batch
    emulated = course("data_parallel").DataParallel(model, 2)
    scores = emulated.forward(images)
    scores.square().mean().backward()
    summed = emulated.backward(scores.grad)
    assert len(emulated.transfers) == 5 * 2
    model(images).square().mean().backward()
    for own, parameter in zip(summed, model.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad)


def test_threads_of_data_parallel_train_as_one_device(course):
    import torch

    program = course("threads_or_processes")
    model = course("fashion_mnist").FashionCNN().eval()  # no sample depends on the others
    alone = copy.deepcopy(model)
    optimizer = torch.optim.Adam(alone.parameters())
    threads = program.DataParallelThreads(model)
    images, labels = torch.rand(8, 1, 28, 28), torch.randint(10, (8,))
    for _ in range(2):
        expected = torch.nn.functional.cross_entropy(alone(images), labels)
        optimizer.zero_grad()
        expected.backward()
        assert threads.step(images, labels) == pytest.approx(expected.item(), rel=1e-4)
        for own, weights in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.grad, weights.grad, rtol=1e-4, atol=1e-5)
        optimizer.step()
    assert [len(times) for times in threads.seconds.values()] == [2] * len(program.PARTS)


def test_runs_of_threads_and_processes_take_turns_and_medians_count(course, monkeypatch, capsys):
    program = course("threads_or_processes")
    order = []
    dp, ddp = iter([0.2, 0.9, 0.3]), iter([0.1, 0.15, 0.8])
    parts = dict.fromkeys(program.PARTS, 0.01)

    def next_dp(batch_size, steps):
        order.append(("dp", batch_size, steps))
        return next(dp), parts

    def next_ddp(instances, batch_size, steps):
        order.append(("ddp", batch_size, steps))
        assert instances == 2
        return {"run": next(ddp)}

    monkeypatch.setattr(program, "dp_seconds", next_dp)
    monkeypatch.setattr(program, "job", next_ddp)
    found = program.main(["--repetitions", "3", "--steps", "7", "--batch-size", "64"])
    assert order == [("dp", 64, 7), ("ddp", 64, 7)] * 3
    assert found.ratio == pytest.approx(2.0)
    out = capsys.readouterr().out
    assert "DP, 2 threads of a process    300.0 ms a step (200.0 to 900.0)" in out
    assert "DDP is 2.00 times as fast as DP (FashionCNN, global batch 64, 2 of" in out
    assert "medians of 3 runs of 7 steps, in turn" in out


def test_the_primary_sends_itself_nothing(course):
    transfer = course("data_parallel").Transfer
    assert transfer("gather outputs", 0, 10**9).seconds == 0
    launch = 3800 / 1.33e9
    assert transfer("gather outputs", 1, 160 * 10**9).seconds == pytest.approx(1 + launch)


def test_data_parallel_says_from_which_batch_on(course, data, tmp_path, capsys):
    program = course("data_parallel")
    figure = tmp_path / "figure.svg"
    found = program.main(
        ["--data-dir", str(data), "--batch-size", "512", "8", "--figure", str(figure)]
    )
    assert [one.speed_up > 1 for one in found] == [False, True]
    out = capsys.readouterr().out
    assert "forward: 6 = 3 x M" in out
    assert "faster from batch 512 on" in out
    assert "nn.DataParallel ran the model 1 time(s)" in out
    for name in ("replicate-model", "compute", "one-device"):
        assert f'id="{name}"' in figure.read_text()


def test_data_parallel_on_the_host_measures(course, data):
    program = course("data_parallel")
    (one,) = program.main(
        ["--data-dir", str(data), "--batch-size", "8", "--compute", "host", "-n_reps", "2",
         "--backward", "--devices", "4"]
    )  # fmt: skip
    assert one.one_device > 0
    assert one.largest_difference < 1e-5
    assert len(one.transfers) == 5 * 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "1"], "--devices 1: 2 or more are compared with one"),
        (["--devices", "4", "--batch-size", "3"], "--batch-size 3: each of the 4 devices"),
    ],
)
def test_data_parallel_refuses_what_cannot_be_shared(course, arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        course("data_parallel").main(arguments)
    assert said in capsys.readouterr().err


def test_the_distributed_example_runs_alone(course, data, capsys):
    result = course("distributed_example").main(["--data-dir", str(data), *SMALL, "--show-samples"])
    (own,) = result.samples
    assert sorted(own) == list(range(201))
    assert result.largest_difference == 0
    assert "together 201 of 201 samples; 0 given twice" in capsys.readouterr().out


def test_without_lightning_a_line_says_what_to_do(course, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(SystemExit, match="needs Lightning: python -m pip install"):
        course("lightning_example").main([])


def test_lightning_is_told_the_processes_of_the_launcher(course, monkeypatch):
    program = course("lightning_example")
    assert program.processes(3) == (3, 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert program.processes(1) == (2, 2)


def jobs(speed_up):
    """Return what was found of jobs in which every reason has a size of its own."""
    ones = [{"start": 2.0, "run": 1.0, "half batch": 0.55, "optimiser": 0.08}]
    twos = [{"start": 3.0, "run": 0.71, "half batch": 0.6, "without reduction": 0.62,
             "with reduction": 0.7}]  # fmt: skip
    return speed_up.explained(ones, twos)


def test_the_parts_of_a_step_add_up(course, capsys):
    program = course("speed_up")
    found = jobs(program)
    seconds = {part.name: round(part.seconds, 6) for part in found.parts}
    assert seconds == {
        "half a step of one": 0.5, "optimiser": 0.04, "smaller batch": 0.01, "shared memory": 0.05,
        "DDP's wrapper": 0.02, "reduction": 0.08, "unexplained": 0.01,
    }  # fmt: skip
    assert sum(seconds.values()) == pytest.approx(found.two)
    assert found.speed_up == pytest.approx(1 / 0.71)
    assert found.bound == pytest.approx(1 / (0.08 + 0.92 / 2))
    assert found.speed_up_of_run(1) == pytest.approx(3 / 3.71)
    program.print_table(found, 10)
    assert re.search(r"^together +710\.00 +100%$", capsys.readouterr().out, re.M)


def test_the_parts_are_drawn(course, tmp_path):
    program = course("speed_up")
    program.draw(jobs(program), tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    for name in ("one-instance", "half-a-step-of-one", "DDPs-wrapper", "reduction"):
        assert f'id="{name}"' in drawn


def test_quick_is_a_repetition_of_8_steps(course, monkeypatch, capsys):
    program = course("speed_up")
    started = []
    names = ("start", "run", "half batch", "optimiser", "without reduction", "with reduction")

    def job(instances, batch_size, steps):
        started.append((instances, steps))
        return dict.fromkeys(names, 1.0)

    monkeypatch.setattr(program, "job", job)
    program.main(["--quick"])
    assert started == [(1, 8), (2, 8)]
    program.main([])
    assert started[2:] == [(1, 30), (2, 30)] * 3


def test_speed_up_starts_its_instances_itself(course, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="2"):
        course("speed_up").main([])
    assert "run it without a launcher" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [("figure.txt", "'figure.txt' is given"), ("/proc/no/figure.svg", "--figure /proc/no/figure")],
)
def test_a_figure_that_cannot_be_drawn_is_told(course, data, name, said, capsys):
    with pytest.raises(SystemExit) as ended:
        course("data_parallel").main(
            ["--data-dir", str(data), "--batch-size", "2", "--figure", name]
        )
    assert said in f"{ended.value.code} {capsys.readouterr().err}"


def test_half_of_the_variables_is_told_in_a_line(course, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="2"):
        course("distributed_example").main([])
    assert "WORLD_SIZE expected, but not set" in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["2", "-1", "two"])
def test_a_rank_that_nobody_waits_for_is_told_at_once(course, monkeypatch, rank, capsys):
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        course("distributed_example").main([])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert rank in error
    assert "WORLD_SIZE" in error


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "0", "WORLD_SIZE=0: an integer from 1 on"),
        ("WORLD_SIZE", "two", "WORLD_SIZE=two: an integer from 1 on"),
        ("PYTHON", "/no/python", "PYTHON=/no/python is no command"),
    ],
)
def test_the_script_refuses_in_a_line(tmp_path, name, value, said):
    done = subprocess.run(
        [str(COURSE / "distributed_example.sh")], cwd=tmp_path, capture_output=True, text=True,
        timeout=20, check=False, env={**os.environ, "PYTHON": sys.executable, name: value},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def strange_place(tmp_path):
    """Return the script in a path with blanks, and a PATH with bash, dirname and Python only."""
    folder = tmp_path / "with blanks"
    commands = folder / "commands"
    commands.mkdir(parents=True)
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in ("bash", "dirname"):
        (commands / name).symlink_to(shutil.which(name))
    (commands / "python").symlink_to(sys.executable)
    return folder / "examples" / "course" / "distributed_example.sh", commands


def launched(launcher: str, poprun, folder: Path, *arguments: str, script=None, path=None) -> str:
    """Run distributed_example.py on two processes, from another folder, and return its output."""
    program = COURSE / "distributed_example.py"
    if launcher == "poprun-py":
        done = poprun("-n", "2", "--num-replicas", "2", "--output", "plain", program, *arguments)
    else:
        words = {
            "sh": [script or COURSE / "distributed_example.sh"],
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone",
                         "--nproc-per-node", "2", program],
        }[launcher]  # fmt: skip
        done = subprocess.run(
            [*map(str, words), *arguments], cwd=folder, capture_output=True, text=True, timeout=110,
            check=False,
            env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
                 "PATH": str(path or os.environ["PATH"])},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


TOGETHER = "together 201 of 201 samples; 1 given twice"


@pytest.mark.mpi
@pytest.mark.parametrize(
    "launchers",
    [["poprun-py"], pytest.param(["poprun-py", "sh", "torchrun"], marks=pytest.mark.long)],
)
def test_each_launcher_starts_the_same_training(poprun, data, tmp_path, launchers):
    arguments = ("--data-dir", str(data), *SMALL, "--show-samples")
    (output,) = {launched(launcher, poprun, tmp_path, *arguments) for launcher in launchers}
    assert TOGETHER in output
    assert "weights of the ranks differ by 0.0e+00" in output


@pytest.mark.parametrize("barrier", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_late_rank_is_waited_for_and_without_ddp_the_ranks_part(
    data, tmp_path, strange_place, barrier
):
    """The script that starts them needs no torchrun, and works in a path with blanks."""
    script, path = strange_place
    options = ("--without-ddp",) if barrier else ("--without-barrier",)
    output = launched(
        "sh", None, tmp_path, "--data-dir", str(data), *SMALL, "--late-rank", "4", "--show-samples",
        *options, script=script, path=path,
    )  # fmt: skip
    assert TOGETHER in output
    waited = re.search(r"rank 0: (\S+) s in the barrier, (\S+) s in the first step", output)
    in_barrier, in_step = map(float, waited.groups())
    assert (in_barrier if barrier else in_step) > 1.5
    difference = float(re.search(r"differ by (\S+)", output)[1])
    assert (difference > 1e-4) == barrier


def test_a_failing_rank_ends_the_script(tmp_path):
    done = subprocess.run(
        [str(COURSE / "distributed_example.sh"), "--data-dir", "/proc/nowhere"], cwd=tmp_path,
        capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("give a folder that can be written") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("instances", [pytest.param(1, marks=pytest.mark.long), 2])
def test_lightning_trains_on_instances(poprun, data, instances):
    pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")
    done = poprun(
        "-n", instances, "--output", "plain", COURSE / "lightning_example.py",
        "--data-dir", data, *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"on {instances} rank(s)" in done.stdout


@pytest.mark.long
@pytest.mark.mpi
def test_speed_up_measures_and_explains(tmp_path):
    done = subprocess.run(
        [sys.executable, str(COURSE / "speed_up.py"), "--json", "--batch-size", "8", "--steps", "1",
         "--repetitions", "1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["speed_up"] == pytest.approx(found["one"] / found["two"])
    assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(found["two"])
