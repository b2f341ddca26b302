"""examples/language_model.py: the same losses under every split, and after a stop."""

from __future__ import annotations

import csv
import importlib
import re
import signal
import sys

import pytest
from support.repository import ROOT

PROGRAM = ROOT / "examples" / "language_model.py"
SMALL = ("--steps", "150", "--width", "16", "--layers", "1", "--heads", "2", "--context", "16",
         "--micro-batch", "2", "--gradient-accumulation", "2", "--validate-every", "25",
         "--warm-up", "5", "--sample", "20")  # fmt: skip
# Bit for bit equal, however the replicas are split.
EXACT = (
    "--env",
    "POPDIST_DETERMINISTIC=1",
    "--env",
    "OMP_NUM_THREADS=1",
    "--output",
    "plain",
    "--grace",
    "60",
)
TWO = ("-n", "2", "--num-replicas", "4", *EXACT)
ONE = ("--num-replicas", "4", *EXACT)

pytestmark = [pytest.mark.examples, pytest.mark.timeout(200)]


def told(output: str) -> list[str]:
    """Return what a run printed, without the speed."""
    return [re.sub(r" +[\d,]+ tokens/s$", "", line) for line in output.splitlines()]


@pytest.fixture(scope="module")
def undisturbed(shared_poprun):
    done = shared_poprun(*TWO, PROGRAM, *SMALL, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return told(done.stdout)


@pytest.mark.mpi
def test_model_learns(undisturbed):
    losses = [re.search(r"step +(\d+)  loss ([\d.]+)  validation ([\d.]+)", x) for x in undisturbed]
    steps = [(int(m[1]), float(m[2]), float(m[3])) for m in losses if m]
    assert [step for step, _, _ in steps] == [25, 50, 75, 100, 125, 150]
    assert steps[0][2] < 5.6  # random guesses among 256 bytes have ln 256 = 5.5
    assert steps[-1][2] < steps[0][2] - 0.3
    assert "\n".join(undisturbed[6:]).startswith("The ")


@pytest.mark.long
@pytest.mark.mpi
def test_losses_are_the_same_however_replicas_are_split(poprun, undisturbed):
    done = poprun(*ONE, PROGRAM, *SMALL, timeout=150)
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == undisturbed


@pytest.mark.mpi
@pytest.mark.long
def test_stopped_training_goes_on_where_it_was(poprun, undisturbed, tmp_path):
    words = (*TWO, PROGRAM, *SMALL, "--checkpoints", "c", "--save-every", "1000",
             "--metrics", "metrics.csv")  # fmt: skip
    job = poprun(*words, start=True)
    first = job.stdout.readline()
    job.send_signal(signal.SIGTERM)
    rest, stderr = job.communicate(timeout=100)
    assert job.returncode == 75, stderr
    begun = told(first + rest)
    assert (stopped := re.fullmatch(r"stopped after step (\d+)", begun.pop()))
    done = poprun(*words, timeout=150)
    assert done.returncode == 0, done.stderr
    resumed = told(done.stdout)
    assert resumed.pop(0) == f"resumed after step {stopped[1]}"
    assert begun + resumed == undisturbed
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["25", "50", "75", "100", "125", "150"]
    assert f"{float(rows[-1]['validation']):.3f}" in undisturbed[5]
    # What is complete has nothing left to do but to show its sample.
    again = poprun(*words, timeout=150)
    assert told(again.stdout) == ["resumed after step 150", *undisturbed[6:]]


@pytest.fixture
def example(monkeypatch):
    """Import the example, as its own process would."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module("language_model")
    sys.modules.pop("language_model", None)


def test_alone_on_a_text_of_ones_own(example, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("abcdefgh" * 100)
    example.main(
        ["--text", str(text), "--steps", "60", "--width", "16", "--layers", "1", "--heads", "2",
         "--context", "8", "--sample", "12", "--replicas", "2", "--learning-rate", "0.01"]
    )  # fmt: skip
    found = re.search(r"step   60  loss .* validation ([\d.]+)", capsys.readouterr().out)
    assert float(found[1]) < 1.5  # e to this power: how many bytes it hesitates between


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--text", "short"], "short has 100 bytes: --context 64 needs at least 650"),
        (["--width", "10", "--heads", "4"], "--width 10 cannot be divided among --heads 4"),
    ],
)
def test_what_does_not_fit_is_explained(example, words, reason, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("x" * 100)
    with pytest.raises(SystemExit) as ended:
        example.main(words)
    assert reason in f"{ended.value.code}{capsys.readouterr().err}"


def test_schedule_rises_and_falls(example):
    rates = [example.learning_rate_factor(step, 10, 110) for step in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1
    assert rates[60] == pytest.approx(0.5)
    assert rates[110] == pytest.approx(0)
    assert example.learning_rate_factor(500, 10, 110) == pytest.approx(0)
