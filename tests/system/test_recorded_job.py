"""What one job with --output-dir and --timeline leaves: steps, logged values, devices and spans."""

from __future__ import annotations

import json
import math
import re
import stat
import sys
from pathlib import Path

import pytest
from support.repository import ROOT
from support.trace_tables import query
from system.run_files_program import MICRO_BATCHES, STEPS

from poprun_py.past_runs.recorded_run import read_run
from poprun_py.past_runs.run_files import find_run

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).with_name("run_files_program.py")
TWO = ("--num-instances", "2", "--num-replicas", "2", "--ipus-per-replica", "2")
# Spans with their row and their process.
_SPANS = (
    "(SELECT slice.*, thread.name AS row, process.name AS process FROM slice"
    " JOIN thread_track ON track_id = thread_track.id JOIN thread USING (utid)"
    " JOIN process USING (upid))"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which the job runs, with --output-dir out."""
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def job(shared_poprun, warm, folder):
    """A job of two instances, after it has ended."""
    words = (*TWO, "--ipu-model=mk2", "--output-dir=out", "--timeline", "--env=MINE=hush")
    done = shared_poprun(*words, *warm, PROGRAM, "processes", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def attempt(job, folder):
    run = read_run(find_run(str(folder / "out" / "latest")))
    assert run.problems == ()
    return run.attempts[0]


def steps_of(attempt, instance):
    return [each for each in attempt.steps if each.instance == instance]


@pytest.fixture
def rows(job, folder):
    """Ask the trace of the job."""
    path = folder / "out" / "latest" / "timeline.json.gz"
    return lambda sql: query(path, sql)


def test_every_step_is_recorded_once_with_the_loss_that_the_program_was_given(job, folder, attempt):
    printed = re.findall(r"\[1,(\d)\]<stdout>:(\d+) (\S+)", job.stdout)
    for instance in (0, 1):
        steps = steps_of(attempt, instance)
        assert [(str(each.step), repr(each.loss)) for each in steps] == [
            (step, loss) for index, step, loss in printed if int(index) == instance
        ]
        assert len(steps) == STEPS
        assert {each.samples for each in steps} == {8 * MICRO_BATCHES}
        assert steps[0].seconds == 0.0
        assert all(each.seconds >= each.own_seconds > 0 for each in steps[1:])
        lines = (folder / "out" / "latest" / "attempt-1" / "steps.jsonl").read_text().splitlines()
        own = [each for each in map(json.loads, lines) if each["instance"] == instance]
        assert [each["step"] for each in own] == list(range(1, STEPS + 1))
        assert [each["at"] for each in own] == sorted(each["at"] for each in own)
    at, last = attempt.observations[-1]
    assert at >= attempt.steps[-1].at
    assert [each.phase for each in last.instances] == ["ended", "ended"]
    assert [each.loss for each in last.instances] == [
        steps_of(attempt, instance)[-1].loss for instance in (0, 1)
    ]
    assert attempt.plan["num_instances"] == 2


def test_the_phases_of_the_program_add_up_to_its_time(job, folder, attempt):
    """The program imports torch, compiles, makes its steps, and ends."""
    for state in attempt.last_view().instances:
        phases = state.phases
        assert phases.has_joined
        assert phases.has_steps
        assert 0 < phases.launch < 60
        assert phases.imports > 0.05
        assert phases.before_steps["compiling"] > 0
        assert phases.in_steps["computing"] > 0
        parts = (phases.before_steps, phases.in_steps, phases.after_steps)
        whole = phases.imports + sum(sum(part.values()) for part in parts)
        assert whole == pytest.approx(phases.program, abs=0.1)
        own = steps_of(attempt, state.index)
        trained = own[-1].at - own[0].at
        assert sum(phases.in_steps.values()) == pytest.approx(trained, abs=0.1)
        assert 0 < state.busy <= state.num_cpus + 0.1
    page = (folder / "out" / "latest" / "report.html").read_text()
    assert re.search(r"before it: .*imports [\d.]+ s", page)
    assert "seconds since the first step" in page


def test_files_of_an_attempt_are_the_users_own_and_hold_no_value_of_a_variable(job, folder):
    paths = list((folder / "out" / "latest" / "attempt-1").iterdir())
    assert len(paths) > 5
    for path in paths:
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            assert "hush" not in path.read_text()


def test_the_first_instance_leaves_what_was_logged(folder, attempt):
    """Once: what a process logs that the program started is not the run's."""
    logged = [each for each in attempt.values if "loss" in each.values]
    assert [each.step for each in logged] == list(range(1, STEPS + 1))
    assert all(each.values["loss"] > 0 for each in logged)
    assert [math.isnan(each.values["odd"]) for each in logged] == [True, False] * (STEPS // 2)
    times = [each.at for each in attempt.values]
    assert times == sorted(times)
    path = folder / "out" / "latest" / "attempt-1" / "instance-0.values.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_some_instances_log_into_the_file_of_the_first_of_them(folder, attempt):
    alone = [each for each in attempt.values if "alone" in each.values]
    assert [(each.step, each.values) for each in alone] == [(STEPS + 1, {"alone": 1.0})]
    path = folder / "out" / "latest" / "attempt-1" / "instance-1.values.jsonl"
    assert len(path.read_text().splitlines()) == 1


def test_instance_0_leaves_what_the_device_says(attempt):
    assert list(attempt.devices) == [0]
    (model,) = attempt.devices[0]["models"]
    assert (model["name"], model["mode"]) == ("Pipeline", "training")
    assert model["device"]["is_named"]
    assert [own["ipu"] for own in model["memory"]["ipus"]] == [0, 1]
    actions = [cell[0] for cell in model["schedule"]["rows"][1]]
    assert actions.count("forward") == MICRO_BATCHES
    assert model["schedule"]["svg"].startswith("<svg ")


def test_ipus_are_rows_of_each_instance(rows):
    """Eight steps are drawn, and none of the others but every eighth."""
    drawn = 8
    counts = rows(
        f"SELECT process, row, name, COUNT(*) FROM {_SPANS} WHERE row LIKE 'IPU%'"
        " GROUP BY process, row, name"
    )
    found = {(process, row, name): int(count) for process, row, name, count in counts}
    for process in ("instance 0", "instance 1"):
        for row in ("IPU 0", "IPU 1"):
            assert found[process, row, "forward"] == drawn * MICRO_BATCHES
            assert found[process, row, "backward"] == drawn * MICRO_BATCHES
            assert found[process, row, "update"] == drawn
            assert found[process, row, "reduce"] == drawn
        assert found[process, "IPU 0", "recompute"] == drawn * MICRO_BATCHES
    assert {row for _, row, _ in found} == {"IPU 0", "IPU 1"}


def test_cells_lie_in_their_step_and_apart(rows):
    inside = rows(
        f"SELECT COUNT(*) FROM {_SPANS} c JOIN {_SPANS} s ON c.process = s.process"
        " AND s.ts <= c.ts AND c.ts + c.dur <= s.ts + s.dur"
        " WHERE c.row LIKE 'IPU%' AND s.name = 'step'"
    )
    total = rows(f"SELECT COUNT(*) FROM {_SPANS} WHERE row LIKE 'IPU%'")
    assert inside == total
    assert rows(f"SELECT MAX(depth) FROM {_SPANS} WHERE row LIKE 'IPU%'") == [("0",)]


def test_the_second_ipu_follows_the_first(rows):
    """In each step: its first forward begins where the first micro-batch leaves the first stage."""
    order = rows(
        "WITH cell AS (SELECT c.process, c.row, c.name, s.ts AS step, MIN(c.ts) AS begin,"
        f" MAX(c.ts + c.dur) AS end FROM {_SPANS} c JOIN {_SPANS} s ON c.process = s.process"
        " AND s.ts <= c.ts AND c.ts + c.dur <= s.ts + s.dur AND s.name = 'step'"
        " WHERE c.row LIKE 'IPU%' GROUP BY c.process, c.row, c.name, s.ts)"
        " SELECT COUNT(*), MIN(a.begin < b.begin), MIN(b.begin < back.begin),"
        " MIN(back.begin < first.begin), MIN(back.end <= first.end)"
        " FROM cell a JOIN cell b USING (process, step) JOIN cell back USING (process, step)"
        " JOIN cell first USING (process, step)"
        " WHERE a.row = 'IPU 0' AND a.name = 'forward' AND b.row = 'IPU 1' AND b.name = 'forward'"
        " AND back.row = 'IPU 1' AND back.name = 'backward'"
        " AND first.row = 'IPU 0' AND first.name = 'backward'"
    )
    assert order == [("16", "1", "1", "1", "1")]


def test_one_line_says_where_the_timeline_is(job):
    said = [line for line in job.stderr.splitlines() if "timeline" in line]
    assert len(said) == 1
    assert re.fullmatch(
        r"poprun-py: timeline: out/\S+/timeline.json.gz: [\d,]+ spans"
        r"(; other instances waited .+ for instance \d)?; open the file at ui.perfetto.dev",
        said[0],
    )


def test_the_report_of_the_run_names_the_timeline(folder):
    report = json.loads((folder / "out" / "latest" / "report.json").read_text())
    assert report["timeline"] == "timeline.json.gz"


def test_every_step_of_every_instance_is_there(rows):
    counts = rows(
        f"SELECT process, name, COUNT(*) FROM {_SPANS}"
        " WHERE row NOT LIKE 'IPU%' GROUP BY process, name"
    )
    found = {(process, name): int(count) for process, name, count in counts}
    for process in ("instance 0", "instance 1"):
        for name in ("mine", "step", "update", "reduce gradients", "transfer inputs"):
            assert found[process, name] == STEPS, (process, name, found)
        assert found[process, "compile"] >= 1
        assert found[process, "load"] >= STEPS
        assert found[process, "backward"] >= 1
        assert found[process, "samples"] >= STEPS


def test_the_parts_of_a_step_lie_in_it(rows):
    """On one row as children; a reduction, on a row of its own, between the step's ends."""
    inner = rows(
        "SELECT s.name, COUNT(*) FROM slice s JOIN slice p ON s.parent_id = p.id"
        " WHERE p.name = 'step' GROUP BY s.name"
    )
    assert {("update", str(2 * STEPS)), ("transfer inputs", str(2 * STEPS))} <= set(inner)
    between = rows(
        f"SELECT COUNT(*) FROM {_SPANS} r JOIN {_SPANS} s ON r.process = s.process"
        " AND s.ts <= r.ts AND r.ts + r.dur <= s.ts + s.dur"
        " WHERE r.name = 'reduce gradients' AND s.name = 'step'"
    )
    assert between == [(str(2 * STEPS),)]
    mine = rows(
        f"SELECT COUNT(*) FROM {_SPANS} m JOIN {_SPANS} s ON m.process = s.process"
        " AND m.ts <= s.ts AND s.ts + s.dur <= m.ts + m.dur"
        " WHERE m.row = 'program' AND s.name = 'step'"
    )
    assert mine == [(str(2 * STEPS),)]


def test_arrows_join_the_same_reduction_of_both_instances(rows):
    """They overlap in time: no instance leaves one before the other is there."""
    arrows = rows(
        "SELECT COUNT(*), MIN(a.name = b.name), MIN(b.ts <= a.ts + a.dur), MIN(b.ts >= a.ts),"
        f" MIN(a.process != b.process) FROM flow JOIN {_SPANS} a ON slice_out = a.id"
        f" JOIN {_SPANS} b ON slice_in = b.id WHERE a.name = 'reduce gradients'"
    )
    assert arrows == [(str(STEPS), "1", "1", "1", "1")]
    # The n-th of one instance goes to the n-th of the other.
    ranks = rows(
        "SELECT COUNT(*) FROM flow"
        " JOIN (SELECT id, RANK() OVER (PARTITION BY track_id ORDER BY ts) AS place FROM slice"
        " WHERE name = 'reduce gradients') a ON slice_out = a.id"
        " JOIN (SELECT id, RANK() OVER (PARTITION BY track_id ORDER BY ts) AS place FROM slice"
        " WHERE name = 'reduce gradients') b ON slice_in = b.id WHERE a.place = b.place"
    )
    assert ranks == [(str(STEPS),)]


def test_loaders_and_their_workers_have_rows(rows):
    found = [name for (name,) in rows("SELECT DISTINCT name FROM thread ORDER BY name")]
    assert {"program", "device", "collectives", "data loader"} <= set(found)
    assert any(name.startswith("data loader of ") for name in found)


def test_without_a_run_folder_nothing_is_left(poprun, script, tmp_path):
    path = script(
        "import os, popdist_py\n"
        "assert 'POPDIST_RUN_FILES' not in os.environ\n"
        "metrics = popdist_py.Metrics(); metrics.update(a=1); metrics.log(1)\n"
    )
    done = poprun("-n", 1, path, env={"POPDIST_RUN_FILES": f"{tmp_path}/mine"})
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.jsonl")) == []


def test_a_job_inside_an_instance_writes_nothing_of_the_outer_one(poprun, script, tmp_path):
    inner = script(
        "import popdist_py\n"
        "metrics = popdist_py.Metrics(); metrics.update(inner=1); metrics.log(1)\n"
    )
    words = (sys.executable, "-m", "poprun_py", "-n", 1, sys.executable, inner)
    done = poprun("-n", 1, "--output-dir", "out", *words, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("out/latest/attempt-1/*.values.jsonl")) == []
