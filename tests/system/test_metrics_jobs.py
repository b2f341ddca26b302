"""Real jobs whose numbers are scraped while they run, and written for TensorBoard and W&B."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support.processes import wait_until

pytestmark = pytest.mark.mpi

# A step takes 10 ms, and there are steps until there is a file "stop"; a file "fails" is a failure.
# The loss tells the step, and in its whole part twice the attempt.
PROGRAM = """
import os, sys, time
from pathlib import Path
import popdist_py
from popdist_py import activities, heartbeat

popdist_py.init()
index = popdist_py.getInstanceIndex()
print("runs", flush=True)
step = 0
while not Path("stop").exists():
    if index == 0 and Path("fails").exists():
        Path("fails").unlink()
        sys.exit(3)
    with activities.doing(activities.COMPUTING):
        time.sleep(0.01)
    step += 1
    heartbeat.step(4, loss=2 * int(os.environ.get("POPDIST_RESTART_COUNT", 0)) + 1 / step)
"""
OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


def scrape(url):
    """Return every sample by name and labels, as a scraper of OpenMetrics reads it."""
    request = urllib.request.Request(url, headers=OPENMETRICS)
    with urllib.request.urlopen(request, timeout=30) as response:
        kind = response.headers["Content-Type"]
        if kind is None:
            raise HTTPException("the server ended before it had sent the headers")
        assert kind.startswith("application/openmetrics-text")
        text = response.read().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found, name):
    return sum(value for (each, *_), value in found.items() if each == name)


def wait_for_url(job):
    """Return where the launcher says that the numbers are."""
    line = job.stderr.readline()
    match = re.fullmatch(
        r"poprun-py: metrics are served at (http://127\.0\.0\.1:(\d+)/metrics)\n", line
    )
    assert match, line + job.stderr.read()
    return match[1], int(match[2])


def listening_at(port):
    """Return the addresses at which the kernel listens for a port, in its own spelling."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            host, _, number = address.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.append(host)
    return found


@contextlib.contextmanager
def rude_scrapers(port, number):
    """Hold connections of which some say half a word, and others read nothing of the answer."""
    with contextlib.ExitStack() as opened:
        for index in range(number):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(b"GET /metr" if index % 2 else b"GET /metrics HTTP/1.0\r\n\r\n")
        yield


def is_consistent_after(metrics, steps):
    """Return whether there are more steps, each with its samples and its duration.

    A program counts a step a moment before its samples. A busy machine may stop it in between.
    """
    done = total(metrics, "poprun_steps_total")
    timed = total(metrics, "poprun_step_duration_seconds_count")
    # The first step of each of the two instances does not have a duration.
    return done > steps and timed == done - 2 and total(metrics, "poprun_samples_total") >= 4 * done


def test_a_job_is_scraped_while_it_runs(poprun, script, tmp_path):
    job = poprun("-n", 2, "--metrics-port", 0, script(PROGRAM), start=True)
    url, port = wait_for_url(job)
    seen = [scrape(url)]
    wait_until(lambda: seen.append(scrape(url)) or total(seen[-1], "poprun_steps_total") > 20)
    assert listening_at(port) == ["0100007F"]
    with rude_scrapers(port, 20):
        with ThreadPoolExecutor(100) as scrapers:
            seen += scrapers.map(scrape, [url] * 100)
        steps = total(seen[-1], "poprun_steps_total")
        wait_until(lambda: seen.append(scrape(url)) or is_consistent_after(seen[-1], steps))
        (tmp_path / "stop").touch()
        _, stderr = job.communicate(timeout=60)
    assert (job.returncode, stderr) == (0, "")
    with pytest.raises(urllib.error.URLError):
        scrape(url)
    last = seen[-1]
    assert total(last, "poprun_instances") == total(last, "poprun_instances_running") == 2
    assert total(last, "poprun_samples_total") >= 4 * total(last, "poprun_steps_total")
    losses = {value for (name, *_), value in last.items() if name == "poprun_loss"}
    assert losses
    assert losses <= {1 / step for step in range(1, 100_000)}
    durations = "poprun_step_duration_seconds"
    num_steps = total(last, f"{durations}_count")
    assert num_steps == total(last, "poprun_steps_total") - 2  # the first of each has none
    assert total(last, f"{durations}_sum") / num_steps > 0.01
    computing = sum(v for key, v in last.items() if ("activity", "computing") in key)
    assert computing >= 0.01 * num_steps
    assert total(last, "poprun_memory_bytes") > 2 << 20


@pytest.mark.sweep
def test_counters_never_go_back_within_an_attempt(poprun, script, tmp_path):
    job = poprun("-n", 2, "--metrics-port", 0, script(PROGRAM), start=True)
    url, _ = wait_for_url(job)
    seen = [scrape(url)]
    wait_until(lambda: seen.append(scrape(url)) or total(seen[-1], "poprun_steps_total") > 100)
    (tmp_path / "stop").touch()
    # The server ends with the job, maybe in the middle of an answer, which is then left out.
    with contextlib.suppress(OSError, HTTPException):
        while True:
            seen.append(scrape(url))
    assert job.wait(60) == 0
    ends = ("_total", "_count", "_sum", "_bucket")
    for before, after in pairwise(seen):
        for key, value in before.items():
            if key[0].endswith(ends):
                assert after[key] >= value, key


@pytest.mark.sweep
def test_one_endpoint_serves_all_attempts_and_charts_have_each_step_once(poprun, script, tmp_path):
    pytest.importorskip("tensorboard")
    job = poprun(
        "-n", 2, "--metrics-port", 0, "--metrics-to", "tensorboard", "--output-dir", "runs",
        "--max-restarts", 1, script(PROGRAM), start=True,
    )  # fmt: skip
    url, _ = wait_for_url(job)
    wait_until(lambda: total(scrape(url), "poprun_steps_total") > 60)
    (tmp_path / "fails").touch()
    wait_until(lambda: total(scrape(url), "poprun_restarts_total") == 1)
    wait_until(lambda: total(scrape(url), "poprun_instances_running") == 2)
    wait_until(lambda: total(scrape(url), "poprun_steps_total") > 60)
    (tmp_path / "stop").touch()
    job.communicate(timeout=60)
    assert job.returncode == 0
    found = events_of(tmp_path / "runs" / "latest" / "tensorboard")
    steps = [step for step, _ in found["loss/mean"]]
    assert steps == sorted(set(steps))
    # What the second attempt wrote takes the place of the first one's from its first step on.
    attempts = [int(loss // 2) for _, loss in found["loss/mean"]]
    assert attempts == sorted(attempts)
    assert attempts[-1] == 1
    assert set(found) >= {
        "samples_per_second/total", "step_seconds/instance-0", "step_p95_seconds/instance-1",
        "step_own_seconds/instance-0", "share_of_time/computing", "memory_bytes/instance-1",
    }  # fmt: skip
    files = list((tmp_path / "runs" / "latest" / "tensorboard").iterdir())
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


READ_EVENTS = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
tags = events.Tags()["scalars"]
print(json.dumps({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}))
"""


def events_of(folder):
    """What TensorBoard itself reads, in a process of its own: it changes warnings and logging."""
    done = subprocess.run(
        [sys.executable, "-c", READ_EVENTS, folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


FEW_STEPS = """
import time
import popdist_py
from popdist_py import heartbeat
popdist_py.init()
for step in (1, 2):
    time.sleep(0.05)
    heartbeat.step(4, loss=1 / step)
"""


def test_a_table_and_lines_of_json_are_in_the_folder_of_the_run(poprun, script, tmp_path):
    words = ("--metrics-to", "csv", "--metrics-to", "jsonl:lines.jsonl")
    done = poprun("-n", 2, *words, "--output-dir", "runs", script(FEW_STEPS))
    assert done.returncode == 0, done.stderr
    assert "incomplete" not in done.stderr
    table = tmp_path / "runs" / "latest" / "metrics.csv"
    with table.open() as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == "2"
    assert float(rows[-1]["loss/mean"]) == 0.5
    assert [int(row["step"]) for row in rows] == [line["step"] for line in lines]
    for row, line in zip(rows, lines, strict=True):
        assert {name: float(text) for name, text in row.items() if text} == line
    for path in (table, tmp_path / "lines.jsonl"):
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.sweep
def test_nothing_is_left_of_a_launcher_that_is_killed(poprun, script, tmp_path):
    words = ("--metrics-port", 0, "--metrics-to", f"tensorboard:{tmp_path / 'charts'}")
    job = poprun("-n", 1, *words, script(PROGRAM), start=True)
    url, _ = wait_for_url(job)
    wait_until(lambda: total(scrape(url), "poprun_steps_total") > 1)
    job.kill()
    job.wait()
    wait_until(lambda: not poprun.survivors())
    with pytest.raises(urllib.error.URLError):
        scrape(url)


@pytest.mark.sweep
def test_ctrl_c_of_a_terminal_ends_the_job_and_not_what_writes_its_numbers(
    poprun, script, tmp_path
):
    words = ("--metrics-port", 0, "--metrics-to", f"tensorboard:{tmp_path / 'charts'}")
    job = poprun(*words, script(PROGRAM), start=True, through=("setsid",))
    url, _ = wait_for_url(job)
    wait_until(lambda: total(scrape(url), "poprun_steps_total") > 1)
    os.killpg(job.pid, signal.SIGINT)
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 130
    said = [line for line in stderr.splitlines() if line.startswith("poprun-py: ")]
    assert not any("early" in line or "in time" in line for line in said), said


def test_a_port_in_use_is_refused_before_anything_starts(look, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = look("--metrics-port", port, "--output-dir", "runs", "touch", "started")
    assert done.returncode == 2
    assert done.stderr == (
        f"poprun-py: error: --metrics-port {port}: cannot listen on port {port} of 127.0.0.1: "
        "Address already in use. Choose another port, or 0 for a free port\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("file/charts", "Not a directory"),
        ("file", "File exists"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(look, tmp_path, where, said):
    (tmp_path / "file").touch()
    done = look("--metrics-to", f"tensorboard:{where}", "touch", "started")
    assert done.returncode == 2
    assert done.stderr == (
        f"poprun-py: error: --metrics-to tensorboard:{where}: expected a folder that can be "
        f"created and written to ({said})\n"
    )
    assert not (tmp_path / "started").exists()


def test_tensorboard_without_a_folder_of_the_run_is_refused(look):
    done = look("--metrics-to", "tensorboard", "true")
    assert (done.returncode, done.stderr) == (
        2,
        "poprun-py: error: --metrics-to tensorboard: the run has no folder for the metrics: give "
        "tensorboard:DIR, or --output-dir\n",
    )


@pytest.mark.parametrize(
    "own", [{}, pytest.param({"WANDB_RUN_GROUP": "mine"}, marks=pytest.mark.sweep)]
)
def test_runs_of_the_program_join_the_group_of_the_run(poprun, own):
    env = {"POPRUN_RUN_ID": "night-7", "WANDB_MODE": "offline", **own}
    words = ("--output", "plain", "--metrics-to", "wandb")
    done = poprun(*words, "sh", "-c", "echo $WANDB_RUN_GROUP", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "mine\n" if own else "night-7\n",
        "",
    )
    done = poprun("--output", "plain", "sh", "-c", "echo $WANDB_RUN_GROUP", env=env)
    assert done.stdout == ("mine\n" if own else "\n")


def test_the_program_may_be_given_another_group(poprun):
    words = ("--output", "plain", "--metrics-to", "wandb", "--env", "WANDB_RUN_GROUP=other")
    assert poprun(*words, "sh", "-c", "echo $WANDB_RUN_GROUP").stdout == "other\n"


# The file is a log of LevelDB behind seven bytes: checksum, length and type, then a message.
READ_RUN = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2
data = Path(sys.argv[1]).read_bytes()
at, pieces, run, steps = 7, b"", None, []
while at + 7 <= len(data):
    left = 32768 - at % 32768
    if left < 7:
        at += left
        continue
    _, length, kind = struct.unpack_from("<IHB", data, at)
    pieces += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):  # whole, or the last of several
        record = wandb_internal_pb2.Record.FromString(pieces)
        pieces = b""
        if record.HasField("run"):
            run = record.run
        items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
        if items:
            steps.append([int(items["_step"]), float(items["loss/mean"])])
names = ("project", "run_group", "job_type", "display_name")
print(json.dumps({"run": [getattr(run, name) for name in names], "steps": steps}))
"""


# wandb takes 62 MB and starts a server of its own.
@pytest.mark.long
def test_an_offline_run_of_wandb_holds_the_numbers(poprun, script, tmp_path):
    pytest.importorskip("wandb")
    env = {"WANDB_MODE": "offline", "POPRUN_RUN_ID": "night-7"}
    words = ("--metrics-port", 0, "--metrics-to", "wandb:digits")
    job = poprun("-n", 2, *words, script(PROGRAM), env=env, start=True)
    url, _ = wait_for_url(job)
    wait_until(lambda: total(scrape(url), "poprun_steps_total") > 60)
    (tmp_path / "stop").touch()
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 0, stderr
    assert "incomplete" not in stderr
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    done = subprocess.run(
        [sys.executable, "-c", READ_RUN, run], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["run"] == ["digits", "night-7", "launcher", "night-7"]
    assert found["steps"]
    assert all(loss == pytest.approx(1 / step, rel=0.5) for step, loss in found["steps"])


@pytest.mark.long
def test_without_an_account_the_job_runs_and_wandb_is_said_to_lack_numbers(
    poprun, script, tmp_path
):
    pytest.importorskip("wandb")
    env = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_API_KEY": ""}
    words = ("--metrics-port", 0, "--metrics-to", "wandb:digits")
    job = poprun(*words, script(PROGRAM), env=env, start=True)
    url, _ = wait_for_url(job)
    wait_until(lambda: total(scrape(url), "poprun_steps_total") > 60)
    (tmp_path / "stop").touch()
    _, stderr = job.communicate(timeout=90)
    assert job.returncode == 0
    assert "poprun-py: warning: metrics for wandb:digits are incomplete: " in stderr


@pytest.mark.sweep
def test_a_program_whose_name_is_no_text_is_scraped(poprun, script, tmp_path):
    program = script(PROGRAM, "gr\udcff.py")
    job = poprun("--metrics-port", 0, program, start=True)
    url, _ = wait_for_url(job)
    (run,) = (labels for (name, *labels) in scrape(url) if name == "poprun_run_info")
    assert ("program", "gr?.py") in run
    (tmp_path / "stop").touch()
    job.communicate(timeout=60)
    assert job.returncode == 0
