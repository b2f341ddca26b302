"""Programs of plain PyTorch, which call nothing of the library, are seen like all others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.processes import wait_until
from support.trace_tables import query

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]

# Instance 1 takes longer to load its batches.
DDP = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())

class Samples(Dataset):
    def __len__(self):
        return 100000
    def __getitem__(self, index):
        time.sleep(0.002 + 0.018 * rank)
        return torch.ones(8)

def train(num_steps):
    for step, batch in zip(range(num_steps), DataLoader(Samples(), batch_size=2)):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends = torch.tensor(float(os.path.exists("stop")))
        dist.all_reduce(ends)
        if ends:
            break
"""


def ended(poprun, tmp_path, *words, exit_code=0, **options):
    """Run a job to its end; return what it said, and its last attempt in report.json."""
    done = poprun("--output-dir", "out", *words, timeout=130, **options)
    assert done.returncode == exit_code, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "latest" / "report.json").read_text())
    return done, report["attempts"][-1]


def test_every_view_shows_a_ddp_loop_that_calls_nothing(poprun, script, tmp_path):
    path = script(f"{DDP}\ntrain(100000)\n")
    job = poprun("-n", 2, "--live", "--output-dir", "out", "--timeline", path, start=True)
    said = ""
    while "instance 1" not in said.rpartition(" is slow: ")[0]:
        line = job.stderr.readline()
        assert line, said
        said += line
    assert "without waiting for other instances" in said
    assert "it loads data longer" in said
    status = json.loads(poprun(f"--status={job.pid}", "--status-format", "json").stdout)
    for each in status["instances"]:
        assert each["phase"] == "training"
        assert each["step"] > 5
        assert each["loss"] is None
    slow, quick = status["instances"][1]["shares"], status["instances"][0]["shares"]
    assert slow["loading"] > 0.5 > quick["loading"]
    assert quick["waiting"] > 0.3
    assert min(each["computing"] for each in (slow, quick)) > 0
    (tmp_path / "stop").touch()
    rest = job.communicate(timeout=60)[1]
    assert job.returncode == 0, rest
    assert re.search(r"speed: [\d.]+ steps/s, 2 instances", rest)

    folder = tmp_path / "out" / "latest"
    attempt = json.loads((folder / "report.json").read_text())["attempts"][0]
    steps = attempt["instances"][0]["training_step"]
    assert "no_steps" not in attempt
    rows = [
        json.loads(line) for line in (folder / "attempt-1" / "steps.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if row["instance"] == 1] == list(range(1, steps + 1))
    counts = dict(
        query(folder / "timeline.json.gz", "SELECT name, COUNT(*) FROM slice GROUP BY name")
    )
    # The loop is observed from its first step on.
    for name in ("forward", "backward", "update", "step"):
        assert 2 * steps - 2 <= int(counts[name]) <= 2 * steps, counts
    assert int(counts["load"]) >= 2 * steps - 2


def test_a_program_without_a_loop_says_why_it_has_no_steps(poprun, tmp_path):
    waits = "until [ -e stop ]; do sleep 0.1; done"
    job = poprun("--output-dir=out", "--timeline=t.json", "sh", "-c", waits, start=True)
    wait_until((tmp_path / "out" / "latest" / "attempt-1").exists, 30, "it does not start")
    running = ""

    def is_seen():
        nonlocal running
        running = poprun(f"--status={job.pid}").stdout
        return "running" in running

    wait_until(is_seen, 30, "its status is not shown")
    reason = (
        "neither called a PopTorch model, nor stepped an optimizer of torch in its main process, "
        "nor called popdist_py.heartbeat.step()"
    )
    assert f"no steps: so far, the program has {reason}\n" in running
    (tmp_path / "stop").touch()
    said = job.communicate(timeout=30)[1]
    assert "poprun-py: warning: timeline: t.json: 0 spans, because the program used none" in said
    folder = tmp_path / "out" / "latest"
    (attempt,) = json.loads((folder / "report.json").read_text())["attempts"]
    assert attempt["no_steps"] == f"the program {reason}"
    page = re.sub(r"\s+", " ", (folder / "report.html").read_text())
    assert f"No training steps were recorded: the program {reason}." in page


@pytest.mark.sweep
def test_work_between_the_steps_is_no_hang_but_silence_is(poprun, script, tmp_path):
    code = f"""{DDP}
train(8)
end = time.monotonic() + 6
if rank == 0:
    while time.monotonic() < end:  # evaluate
        model.module(torch.ones(64, 8))
dist.barrier()
train(4)
if rank == 1:
    time.sleep(1000)
dist.barrier()
"""
    done, attempt = ended(
        poprun, tmp_path, "-n", 2, "--hang-timeout", 2, "--grace", 1, script(code), exit_code=124
    )
    assert attempt["hung"] == [1], done.stderr
    named = re.search(r"instance 1 .* hangs: no training step for [\d.]+ s, (.*)", done.stderr)
    assert named, done.stderr
    assert re.match(r"after training step 12, at program.py:\d+: time.sleep", named[1]), named


FSDP = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
for layer in (*model, model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
"""
COMPILED = f"{DDP}\nmodel = torch.compile(model, backend='eager')\ntrain(6)"
EXPLICIT = f"""{DDP}
from popdist_py import heartbeat
for _ in range(3):
    train(2)
    heartbeat.step(samples=4)
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("program", "steps", "options"),
    [
        (FSDP, 6, ()),
        (COMPILED, 6, ()),
        (f"{DDP}\ntrain(6)", 6, ("--torch-backend", "popdist")),
        (EXPLICIT, 3, ()),
        (f"{DDP}\ntrain(6)", None, ("--env", "POPDIST_COUNT_STEPS=no")),
    ],
    ids=["FSDP", "compiled", "popdist", "explicit", "off"],
)
def test_the_steps_of_every_loop_are_counted_once(
    poprun, script, tmp_path, program, steps, options
):
    _, attempt = ended(poprun, tmp_path, "-n", 2, *options, script(program))
    assert ("POPDIST_COUNT_STEPS=no" in attempt.get("no_steps", "")) == (steps is None)
    assert {each["training_step"] for each in attempt["instances"]} == {steps}
    has_collectives = any(each["last_collective"] for each in attempt["instances"])
    assert has_collectives == ("popdist" in options)


@pytest.mark.trainers
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "package", "steps"),
    [
        ("lightning", "pytorch_lightning", 6),
        ("accelerate", "accelerate", 4),
        ("transformers", "transformers", 8),
    ],
)
def test_the_steps_of_trainers_are_counted_once(
    poprun, tmp_path, monkeypatch, name, package, steps
):
    pytest.importorskip(package, reason=f"{name} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = Path(__file__).parent.parent / "frameworks" / f"{name}_program.py"
    _, attempt = ended(poprun, tmp_path, "-n", 2, program, "gloo")
    assert {each["training_step"] for each in attempt["instances"]} == {steps}
