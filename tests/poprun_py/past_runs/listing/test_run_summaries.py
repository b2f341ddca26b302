"""Summaries of runs: their states, progress and order, also of damaged and foreign folders."""

from __future__ import annotations

import json
import os
import time

import pytest
from support.launcher.listed_runs import locked, observed, write_run
from support.launcher.lying_json import lying_values

from poprun_py.errors import UsageError
from poprun_py.past_runs.listing.run_state import Liveness, RunState, ended_state, unended_state
from poprun_py.past_runs.listing.run_summary import read_summaries, read_summary
from poprun_py.past_runs.listing.run_table import run_lines

OTHER_HOST = {"host": "elsewhere", "pid": 1}


@pytest.mark.parametrize(
    ("code", "cause", "state"),
    [
        (0, "completed", RunState.FINISHED),
        (0, "signal", RunState.FINISHED),  # Ctrl-C after all programs had ended
        (7, "failed", RunState.FAILED),
        (124, "time_limit", RunState.FAILED),
        (130, "signal", RunState.INTERRUPTED),
        (75, "checkpoint", RunState.INTERRUPTED),
        (3, "refused", RunState.FAILED),
    ],
)
def test_state_of_a_run_that_ended(code, cause, state):
    assert ended_state({"exit_code": code, "attempts": [{"cause": cause}]}) is state


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (Liveness(is_locked=True, is_of_this_host=False, silent_seconds=900), RunState.RUNNING),
        (Liveness(), RunState.LOST),
        # A file system without locks
        (Liveness(is_process_alive=True), RunState.RUNNING),
        (Liveness(is_of_this_host=False, silent_seconds=5), RunState.RUNNING),
        (
            Liveness(is_of_this_host=False, is_process_alive=True, silent_seconds=900),
            RunState.UNKNOWN,
        ),
    ],
)  # fmt: skip
def test_state_of_a_run_without_an_end(facts, state):
    assert unended_state(facts) is state


def states(parent):
    return {run.name: str(run.state) for run in read_summaries(parent)}


def test_states_of_folders(tmp_path):
    held = locked(write_run(tmp_path, "runs"))
    write_run(tmp_path, "died")
    write_run(tmp_path, "done", ended=1)
    own = {"host": os.uname().nodename, "pid": os.getpid()}
    write_run(tmp_path, "unlocked", launcher=own, began=time.time())
    # The id of the launcher now belongs to this process, which is younger than the run.
    write_run(tmp_path, "reused", launcher=own, began=time.time() - 10 * 365 * 86_400)
    old = write_run(tmp_path, "elsewhere", launcher=OTHER_HOST)
    os.utime(old / "report.json", (1, 1))
    (tmp_path / "waits-for-IPUs").mkdir()
    waiting = locked(tmp_path / "waits-for-IPUs")
    (tmp_path / "latest").symlink_to("done")
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").touch()
    assert states(tmp_path) == {
        "runs": "running", "died": "lost", "done": "finished", "unlocked": "running",
        "reused": "lost", "elsewhere": "unknown", "waits-for-IPUs": "running",
    }  # fmt: skip
    os.close(held)
    os.close(waiting)


def test_the_newest_run_is_first_and_a_lost_run_ends_with_its_last_sign_of_life(tmp_path):
    for began in (1000.0, 3000.0, 2000.0):
        folder = write_run(tmp_path, f"r{began:.0f}", began=began)
        os.utime(folder / "report.json", (began + 5, began + 5))
    assert [run.name for run in read_summaries(tmp_path)] == ["r3000", "r2000", "r1000"]
    assert [run.seconds(9e9) for run in read_summaries(tmp_path)] == [5.0] * 3


def test_progress_comes_from_the_report_or_from_the_last_whole_observation(tmp_path):
    ended = write_run(tmp_path, "ended", ended=1)
    run = read_summary(ended)
    assert (run.step, run.steps_per_second, run.loss, run.program) == (10, 4.0, 0.5, "train.py")
    going = write_run(tmp_path, "going", attempts=[{"number": 1, "folder": "attempt-1"}])
    lines = [json.dumps({"at": 1, **observed(step=step, loss="nan")}) for step in (20, 30)]
    # Many observations, and a last line that is being written.
    text = f"{lines[0]}\n" * 1000 + f"{lines[1]}\n" + lines[0][:30]
    (going / "attempt-1" / "looks.jsonl").write_text(text)
    run = read_summary(going)
    assert (run.step, run.steps_per_second, str(run.loss)) == (30, 4.0, "nan")


def test_a_loss_that_the_program_logged_is_shown(tmp_path):
    attempt = {"number": 1, "folder": "attempt-1", "observation": observed(loss=None)}
    folder = write_run(tmp_path, "logged", ended=1, attempts=[attempt])
    values = {"at": 1.0, "step": 3, "values": {"loss": 0.125}}
    (folder / "attempt-1" / "instance-0.values.jsonl").write_text(json.dumps(values) + "\n")
    assert read_summary(folder).loss == 0.125


def test_long_lines_at_the_end_of_a_file_are_read(tmp_path):
    folder = write_run(tmp_path, "wide", attempts=[{"number": 1, "folder": "attempt-1"}])
    wide = {"at": 1, "instances": observed(step=7)["instances"] * 3000}
    line = json.dumps(wide) + "\n"
    (folder / "attempt-1" / "looks.jsonl").write_text(line * 3)
    assert len(line) > 1 << 17
    assert read_summary(folder).step == 7


def test_broken_and_foreign_folders_give_no_traceback(tmp_path):
    reports = {
        "foreign": '{"tests": 3}', "list": "[]", "text": "hello", "deep": "[" * 100_000,
        "digits": '{"run_id": ' + "9" * 5000 + "}",
    }  # fmt: skip
    for name, text in reports.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(text)
    (tmp_path / "folder" / "report.json").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "report.json")
    assert read_summaries(tmp_path) == []
    half = write_run(tmp_path, "half", ended=1)
    half.joinpath("report.json").write_text('{"run_id": "half", "sta')
    (run,) = read_summaries(tmp_path)
    assert (run.name, run.state) == ("half", RunState.UNKNOWN)
    assert run.problem.startswith("report.json cannot be read")
    assert json.dumps(run.to_json(0.0))


def test_damaged_reports_are_read_or_said_to_be_damaged(tmp_path):
    folder = write_run(tmp_path, "run", ended=1, tags={"a": "b"})
    report = json.loads((folder / "report.json").read_text())
    report["attempts"][0]["observation"] = {"instances": [None]}
    (folder / "report.json").write_text(json.dumps(report))
    assert read_summary(folder).state is RunState.FINISHED
    report["attempts"][0]["observation"] = observed()
    for changed in lying_values(report, every=3):
        (folder / "report.json").write_text(json.dumps(changed))
        runs = read_summaries(tmp_path)
        json.dumps([run.to_json(time.time()) for run in runs], allow_nan=False)
        "\n".join(run_lines(runs, tmp_path, time.time(), width=80)).encode()


def test_a_folder_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file or directory; expected the folder of the"):
        read_summaries(tmp_path / "none")
