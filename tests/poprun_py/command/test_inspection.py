"""Looking at a launch without starting it, and files written on the way."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from support.launcher.sysfs_trees import SNAPSHOTS
from support.repository import ROOT

from poprun_py.command.cli import COMMANDS, main, run
from poprun_py.command.machine_jobs import MachineJob

JOB = ("--num-instances", "2", "--num-replicas", "4")
TOO_MANY = str(len(os.sched_getaffinity(0)) + 1)


def test_dry_run_prints_table_and_command(capsys):
    assert run([*JOB, "--dry-run", "python3", "a b.py"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].strip("|").strip() == "poprun topology"
    command = out[11:]
    assert command[0].endswith("mpirun \\")
    assert command[-1] == "    python3 'a b.py'"
    # One option a line, one block an instance.
    assert "    -x RANK=1 \\" in command
    assert [line for line in command if "-np" in line] == ["  -np 1 \\", "  : -np 1 \\"]


def test_the_table_of_a_large_dry_run_stays_readable_in_a_file_too(capsys):
    large = ["--num-instances", "2048", "--host", "h[1-128]:16", "--no-check", "--dry-run"]
    assert run([*large, "true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:11])) <= 120
    assert lines[12] == "h[1-128]: 16 instances each, from 0-15 on h1 to 2032-2047 on h128"
    assert run([*large, "--print-topology", "yes", "true"]) == 0
    assert "| 1024 |" in capsys.readouterr().out


def test_program_may_be_left_out(capsys):
    assert run([*JOB, "--print-topology", "yes"]) == 0
    assert "replicas  | 0 | 1 | 2 | 3 |" in capsys.readouterr().out
    assert run(list(JOB)) == 2
    assert "no program is given; expected" in capsys.readouterr().err


def test_more_instances_than_cpus_may_be_looked_at(capsys):
    assert run(["-n", TOO_MANY, "--print-topology", "json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_instances"] == int(TOO_MANY)
    assert "warning" in captured.err


def test_more_instances_than_cpus_are_refused_with_the_numbers(capsys):
    assert run(["-n", TOO_MANY, "true"]) == 2
    err = capsys.readouterr().err
    assert f"{TOO_MANY} instances" in err
    assert "--oversubscribe" in err


def test_tree_shows_everything_and_no_colour_in_a_pipe(capsys):
    assert run(["--num-instances", "1", "--num-replicas", "2", "--ipus-per-replica", "2",
                "--print-topology", "tree"]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for part in ("localhost", "instance 0", "replicas 0-1: IPUs 0-3, 2 each"):
        assert part in out


def test_numbers_of_cores_are_those_of_the_job_on_every_host(capsys):
    machine = str(SNAPSHOTS / "cpuset-container.json")
    words = ["--num-instances", "4", "--num-replicas", "4", "--cores-per-instance", "2"]
    assert run([*words, "--host", "a,b", "--hardware", machine, "--print-topology", "cores"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a:",
        "node 0   | 0 0 . . . . . . x x x x x x x x |",
        "node 1   | 1 1 x x x x x x x x x x x x x x |",
        "(. no instance, x not allowed)",
        "instance 0: CPUs 0-1,32-33; any memory; 2 threads",
        "instance 1: CPUs 16-17; any memory; 2 threads",
        "b:",
        "node 0   | 2 2 . . . . . . x x x x x x x x |",
        "node 1   | 3 3 x x x x x x x x x x x x x x |",
        "(. no instance, x not allowed)",
        "instance 2: CPUs 0-1,32-33; any memory; 2 threads",
        "instance 3: CPUs 16-17; any memory; 2 threads",
    ]


@pytest.mark.parametrize("form", ["svg", "html"])
def test_a_picture_is_all_of_standard_output_and_starts_nothing(form, capsys):
    words = ["-n", "2", "-vv", "--print-topology", form, "sh", "-c", "echo started"]
    assert run(words) == 0
    whole = capsys.readouterr().out
    assert ElementTree.fromstring(whole).tag.endswith(form)
    assert "started" not in whole or form == "html"  # the command of the page
    # A dry run prints the command besides every other form.
    assert run(["--dry-run", *words]) == 0
    assert capsys.readouterr().out.replace("--dry-run", "") == whole


def test_a_picture_may_be_of_a_larger_machine_and_of_a_saved_plan(capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    job = ["-n", TOO_MANY, "--print-topology", "svg"]
    assert run([*job, "--export-plan", path, "sh"]) == 0
    captured = capsys.readouterr()
    assert "this plan can be shown but not launched" in captured.err
    assert run(["--from-plan", path, "--print-topology", "svg"]) == 0
    assert capsys.readouterr().out == captured.out


def test_exported_plan_is_private_and_complete(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert run([*JOB, "--export-plan", str(path), "no-such-program"]) == 0
    # Planned and written; then there is no such program to run.
    again = [*JOB, "--export-plan", str(path), "--overwrite-config", "yes"]
    assert run([*again, "--run", "no-such-program"]) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    plan = json.loads(path.read_text())
    assert set(plan) >= {
        "version", "num_replicas", "num_instances", "num_local_replicas", "ipus_per_replica",
        "num_ilds", "hosts", "instances", "command", "folder", "program",
    }  # fmt: skip
    assert set(plan["hosts"][0]) == {"name", "slots", "numa_nodes"}
    assert set(plan["instances"][0]) >= {"index", "local_index", "host", "ild", "replicas", "ipus",
                                         "numa_nodes", "cpus", "threads", "env"}  # fmt: skip


def test_export_config_keeps_an_existing_file(capsys, tmp_path):
    path = tmp_path / "job.toml"
    words = [*JOB, "--export-config", str(path)]
    assert run(words) == 0
    assert (
        path.read_text() == "num-instances = 2  # command line\nnum-replicas = 4  # command line\n"
    )
    assert run(["--num-replicas", "6", "--export-config", str(path)]) == 2
    assert "--overwrite-config yes" in capsys.readouterr().err
    assert run(["--num-replicas", "6", "--export-config", str(path), "--overwrite-config=yes"]) == 0
    assert path.read_text() == "num-replicas = 6  # command line\n"


def test_export_plan_keeps_an_existing_file(capsys, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("mine")
    started = tmp_path / "started"
    words = ["--export-plan", str(path), "--run", "touch", str(started)]
    assert run(words) == 2
    assert capsys.readouterr().err == (
        f"poprun-py: error: --export-plan {path}: the file exists already: name another file, or "
        "add --overwrite-config yes\n"
    )
    assert path.read_text() == "mine"
    assert not started.exists()
    assert run(["--overwrite-config", "yes", "--export-plan", str(path), "true"]) == 0
    assert json.loads(path.read_text())["num_instances"] == 1
    assert "no effect" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["job.toml", "plan.json"])
def test_an_export_on_a_full_disk_leaves_the_path_as_it_was(name, capsys, tmp_path, monkeypatch):
    def full(path, data):
        with path.open("wb") as file:
            file.write(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / name
    option = "--export-config" if name == "job.toml" else "--export-plan"
    words = [option, str(path), "--overwrite-config", "yes", "true"]
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_bytes", full)
        assert run(words) == 2
        assert (
            f"{option} {path}: the file cannot be written (No space left" in capsys.readouterr().err
        )
        assert list(tmp_path.iterdir()) == []
        path.write_text("mine")
        assert run(words) == 2
        assert path.read_text() == "mine"
    assert run(words) == 0
    assert path.read_text() != "mine"


def test_the_suffix_of_exported_options_is_checked_with_the_option(capsys, tmp_path):
    assert run([*JOB, "--export-config", str(tmp_path / "job.yaml")]) == 2
    err = capsys.readouterr().err
    assert (
        f"--export-config {tmp_path / 'job.yaml'}: expected a file name that ends in .toml" in err
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_takes_a_command_as_its_topic(command, capsys):
    assert run(["--help", command]) == 0
    asked = capsys.readouterr().out
    assert run([command, "--help"]) == 0
    assert capsys.readouterr().out == asked
    assert asked.startswith(f"Usage: poprun-py {command} ")


def test_options_are_exported_to_standard_output(capsys, tmp_path):
    started = tmp_path / "started"
    assert run([*JOB, "--export-config", "-", "touch", str(started)]) == 0
    out = capsys.readouterr().out
    assert tomllib.loads(out)["num-instances"] == 2
    assert not started.exists()
    assert run(["--export-config", "-", "--export-plan", "-", "true"]) == 2
    assert "name the same file; give each option its own file" in capsys.readouterr().err


def test_command_line_wins_over_the_imported_file(capsys, tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"num-replicas": 8, "num_instances": 2, "host": "a,b"}))
    words = ["--import-config", str(path), "--num-replicas", "4", "--print-topology", "json"]
    assert run(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["num_replicas"], [h["name"] for h in data["hosts"]]) == (4, ["a", "b"])


@pytest.mark.parametrize("form", ["text", "json", "full-text", "full-json"])
def test_version(form, capsys):
    assert run(["--version", "--version-format", form]) == 0
    out = capsys.readouterr().out
    assert "poprun-py" in out
    assert ("torch" in out) == form.startswith("full")
    if form.endswith("json"):
        assert "poprun-py" in json.loads(out)


def test_public_names_are_frozen():
    import poprun_py

    assert set(poprun_py.__all__) == {
        "InstanceResult", "JobFailedError", "JobHandle", "JobStatus", "LaunchConfig", "LaunchError",
        "LaunchPlan", "LaunchResult", "StartError", "TimeLimitError", "UsageError", "__version__",
        "launch", "plan", "start",
    }  # fmt: skip
    for name in poprun_py.__all__:
        assert getattr(poprun_py, name) is not None


@pytest.mark.parametrize(
    ("typed", "options"),
    [
        ("-n 2 --output t", {"tag", "time"}),
        ("--num-", {"--num-instances", "--num-replicas"}),
        ("compare --ta", {"--target"}),
        ("scale --inst", {"--instances"}),
        ("report --op", {"--open"}),
        ("stop --ti", {"--timeout"}),
        ("stop tr", {"train-3"}),
    ],
)
def test_shell_completion_knows_the_options(typed, options, monkeypatch, capsys):
    own = MachineJob(run_id="train-3", pid=7, user="ann", is_own=True, since=0.0)
    jobs = [own, replace(own, run_id="train-4", is_own=False), replace(own, run_id="lr")]
    monkeypatch.setattr("poprun_py.command.stop.jobs_of_machine", lambda: jobs)
    for name, value in (
        ("_POPRUN_PY_COMPLETE", "bash_complete"),
        ("COMP_WORDS", f"poprun-py {typed}"),
        ("COMP_CWORD", str(len(typed.split()))),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["/opt/bin/poprun-py"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    completed = set(capsys.readouterr().out.split())
    assert {f"plain,{option}" for option in options} <= completed
    assert not completed & {"plain,train-4", "plain,lr"}


def test_a_process_answers_the_shell():
    done = subprocess.run(
        [sys.executable, "-m", "poprun_py"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "_POPRUN_PY_COMPLETE": "bash_complete",
             "COMP_WORDS": "poprun-py --num-rep", "COMP_CWORD": "1"},
    )  # fmt: skip
    assert done.stdout == "plain,--num-replicas\n"
