"""What inspection prints is what runs: pasted commands, saved plans, the Python interface."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from support.repository import ROOT

from poprun_py import LaunchConfig, UsageError, launch, plan
from poprun_py.planning.plan_file import plan_from_json, plan_to_json
from poprun_py.planning.plan_warnings import plan_warnings

pytestmark = pytest.mark.mpi

JOB = ("--num-instances", "2", "--num-replicas", "4")
SHOW = ("sh", "-c", "echo $POPDIST_REPLICA_INDEX_OFFSET $GREETING")


def test_printed_command_can_be_pasted_into_a_shell(look, tmp_path):
    printed = look(*JOB, "--dry-run", *SHOW).stdout
    command = printed[printed.index("/") :]
    assert max(len(line.split(" -x ")) for line in command.splitlines()) <= 2
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        check=True,
    )
    assert sorted(done.stdout.split()) == ["0", "2"]


def test_saved_plan_runs(poprun, look, tmp_path):
    saved = tmp_path / "plan.json"
    look(*JOB, "--env", "GREETING=hello there", "--dry-run", "--export-plan", saved, *SHOW)
    refused = look("--from-plan", saved)
    assert refused.returncode == 2
    assert "set GREETING in the environment of this launch" in refused.stderr
    done = poprun("--from-plan", saved, env={"GREETING": "hello there"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[1,0]<stdout>:0 hello there",
        "[1,1]<stdout>:2 hello there",
    ]
    assert "hello" not in saved.read_text()


TOO_MANY = ("--num-instances", "400", "--num-replicas", "400")


def test_a_plan_of_more_instances_than_cpus_is_refused_like_its_command_line(look, tmp_path):
    saved = tmp_path / "plan.json"
    looked_at = look(*TOO_MANY, "--dry-run", "--export-plan", saved, "touch", "started")
    assert looked_at.returncode == 0, looked_at.stderr
    assert "this plan can be shown but not launched: 400 instances" in looked_at.stderr
    assert json.loads(saved.read_text())["options"].get("oversubscribe", False) is False
    typed = look(*TOO_MANY, "touch", "started")
    again = look("--from-plan", saved)
    assert (again.returncode, again.stderr) == (typed.returncode, typed.stderr)
    assert typed.returncode == 2
    assert len(typed.stderr.splitlines()) == 1
    assert not (tmp_path / "started").exists()
    looked_at_again = look("--from-plan", saved, "--dry-run")
    assert (looked_at_again.returncode, looked_at_again.stderr) == (0, looked_at.stderr)


def test_a_plan_that_was_allowed_more_instances_than_cpus_runs(poprun, look, tmp_path):
    saved, count = tmp_path / "plan.json", str(len(os.sched_getaffinity(0)) + 1)
    words = ("--num-instances", count, "--num-replicas", count, "--oversubscribe")
    look(*words, "--dry-run", "--export-plan", saved, "true")
    assert json.loads(saved.read_text())["options"]["oversubscribe"] is True
    done = poprun("--from-plan", saved)
    assert done.returncode == 0, done.stderr


def test_a_plan_from_python_is_looked_at_but_not_launched(tmp_path):
    program = ("touch", str(tmp_path / "started"))
    config = LaunchConfig(num_instances=400, num_replicas=400, program=program)
    planned = plan(config)
    assert planned.config.oversubscribe is False
    (first, *_) = plan_warnings(planned)
    assert planned.refusal in first
    for job in (config, planned, plan_from_json(plan_to_json(planned), os.environ)):
        with pytest.raises(UsageError) as caught:
            launch(job)
        assert str(caught.value) == planned.refusal
    assert not (tmp_path / "started").exists()


def test_a_plan_runs_in_the_environment_that_it_was_made_in(capfd, monkeypatch):
    """What another instance's arguments set would reach all: the others keep the planned value."""
    monkeypatch.setenv("GREETING", "planned")
    config = LaunchConfig(
        num_instances=2, num_replicas=2, instance_mpi_local_args=("1:-x GREETING=own",),
        output="plain", program=("sh", "-c", "echo $RANK $GREETING $INHERITED"),
    )  # fmt: skip
    monkeypatch.setenv("INHERITED", "too")
    planned = plan(config)
    monkeypatch.setenv("GREETING", "later")
    monkeypatch.delenv("INHERITED")
    assert launch(planned).exit_code == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 planned too", "1 own too"]
    assert launch(planned, environ=os.environ).exit_code == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 later", "1 own"]
    assert "planned" not in repr(planned)


def test_values_of_env_reach_instances_but_no_command_line(poprun, script, tmp_path):
    env_file = tmp_path / "env"
    env_file.write_text("# comment\nexport GREETING=from file\nOTHER=1\n")
    program = script(
        "import os, pathlib\n"
        "secret = os.environ['SECRET_WORD']\n"
        "lines = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')]\n"
        "print(os.environ['GREETING'], secret, sum(secret.encode() in line for line in lines))\n"
    )
    done = poprun(
        *JOB, "--env-file", env_file, "--env", "SECRET_WORD", "--env", "GREETING=typed",
        program, env={"SECRET_WORD": "xyzzy-42"},
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == [
        "[1,0]<stdout>:typed xyzzy-42 0",
        "[1,1]<stdout>:typed xyzzy-42 0",
    ]


def test_the_verbose_log_is_short_and_a_doubly_verbose_one_is_whole(poprun):
    done = poprun("-v", *JOB, "true")
    log = done.stderr.splitlines()
    assert len(log) <= 15, done.stderr
    assert "options from the command line: --num-instances 2, --num-replicas 4" in log[0]
    assert re.search(r"POPRUN \[I\] running: \S+mpirun --bind-to none ", done.stderr)
    assert done.stderr.count("WORLD_SIZE=2 ") == 2  # once as LOCAL_WORLD_SIZE
    assert re.search("^  instance 1: .*RANK=1 LOCAL_RANK=1", done.stderr, re.M)
    assert "instance 1 has PID" in done.stderr
    whole = poprun("-vv", *JOB, "true").stderr
    assert re.search(r"POPRUN \[I\] running: \S+mpirun \\\n  --bind-to none \\\n", whole)
    assert whole.count("-x WORLD_SIZE=2 ") == 2


def test_from_python(tmp_path, capfd):
    planned = plan(LaunchConfig(num_instances=2, num_replicas=4, program=SHOW))
    assert [list(p.instance.replicas) for p in planned.instances] == [[0, 1], [2, 3]]
    result = launch(planned)
    assert result.exit_code == 0
    assert [r.code for r in result.instances] == [0, 0]
    assert sorted(capfd.readouterr().out.split("\n"))[1:] == ["[1,0]<stdout>:0", "[1,1]<stdout>:2"]
    failed = launch(
        LaunchConfig(num_instances=2, num_replicas=2, program=("sh", "-c", "exit $RANK"))
    )
    assert failed.exit_code == 1
    assert failed.first_failure.index == 1
    with pytest.raises(UsageError):
        LaunchConfig(num_instances=3, num_replicas=4)


def test_user_arguments_of_mpi_win(poprun):
    done = poprun(
        "-v", *JOB, "--mpi-global-args", "--tag-output --mca btl self,tcp",
        "--mpi-local-args", "-x ONE=1", "sh", "-c", "echo $ONE $OMPI_MCA_btl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[1,0]<stdout>:1 self,tcp" in done.stdout


def test_compact_command_gives_every_instance_its_wire(script, tmp_path):
    program = script(
        "import sys\n"
        "import poprun_py.planning.mpi_commands\n"
        "poprun_py.planning.mpi_commands._MAX_BYTES = 2000\n"
        "from poprun_py.command.cli import run\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, program, *JOB, "--env", "GREETING=hi", "sh", "-c",
         "echo $RANK $POPDIST_REPLICA_INDEX_OFFSET $OMPI_COMM_WORLD_LOCAL_RANK $GREETING"],
        capture_output=True, text=True, timeout=100, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == [
        "[1,0]<stdout>:0 0 0 hi",
        "[1,1]<stdout>:1 2 1 hi",
    ]


def test_words_that_mpirun_knows_reach_the_program(poprun, tmp_path):
    words = ["a", ":", "-np", "1", "touch", str(tmp_path / "x"), "%:", "%%:", "c:", "--", "-x"]
    done = poprun("echo", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[1,0]<stdout>:{' '.join(words)}\n"
    assert not (tmp_path / "x").exists()


def test_plan_on_standard_output_is_json_and_starts_nothing(look, tmp_path):
    done = look(*JOB, "--export-plan", "-", "touch", "started")
    assert json.loads(done.stdout)["num_replicas"] == 4
    assert not (tmp_path / "started").exists()
    saved = tmp_path / "plan.json"
    saved.write_text(done.stdout)
    assert look("--from-plan", saved, "--export-plan", "-").stdout == done.stdout
    refused = look("--from-plan", saved, "--num-instances", "4")
    assert refused.returncode == 2
    assert "--from-plan and --num-instances cannot be used together" in refused.stderr


def test_a_plan_is_only_written_unless_it_is_to_run_as_well(poprun, look, tmp_path):
    saved, started = tmp_path / "plan.json", tmp_path / "started"
    again = ("--overwrite-config", "yes", "--run")
    for name, words in ((saved, (*JOB, "touch", "started")), ("-", ("--from-plan", saved))):
        done = look("--export-plan", name, *words)
        assert (done.returncode, started.exists()) == (0, False), done.stderr
        done = poprun("--export-plan", name, *again, *words)
        assert (done.returncode, started.exists()) == (0, True), done.stderr
        started.unlink()
        assert (done.stdout == "") == (name is saved)


def test_a_saved_plan_runs_from_any_folder_in_the_one_where_it_was_made(
    poprun, look, script, tmp_path
):
    made, elsewhere = tmp_path / "made", tmp_path / "elsewhere"
    for folder in (made / "data", elsewhere):
        folder.mkdir(parents=True)
    (made / "data" / "words").write_text("found\n")
    script("import os, sys; print(os.getcwd(), open(sys.argv[1]).read().strip())", "made/show.py")
    saved = tmp_path / "plan.json"
    for program in (("show.py",), (sys.executable, "./show.py")):
        words = ("--overwrite-config", "yes", "--output-dir", "runs", *program, "data/words")
        done = look("--export-plan", saved, *words, cwd=made)
        assert done.returncode == 0, done.stderr
        plan = json.loads(saved.read_text())
        assert plan["folder"] == str(made)
        assert plan["program"][0].startswith("/")
        assert plan["program"][-1] == "data/words"
        assert plan["command"][-len(plan["program"]) :] == plan["program"]
        done = poprun("--from-plan", saved, cwd=elsewhere)
        assert done.stdout == f"[1,0]<stdout>:{made} found\n", done.stderr
    assert json.loads(saved.read_text())["program"][1] == str(made / "show.py")
    assert (made / "runs").is_dir()
    assert list(elsewhere.iterdir()) == []
    made.rename(tmp_path / "moved")
    done = look("--from-plan", saved, cwd=elsewhere)
    assert done.returncode == 3
    assert done.stderr.startswith(
        f"poprun-py: error: the working folder {made} of the plan cannot be entered"
    )
    assert "(No such file or directory); create the folder, or make a new plan" in done.stderr


def test_a_plan_from_python_runs_where_it_was_made(capfd, tmp_path, monkeypatch):
    made, elsewhere = tmp_path / "made", tmp_path / "elsewhere"
    for folder in (made, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(made)
    planned = plan(LaunchConfig(output="plain", program=("pwd",)))
    assert planned.folder == str(made)
    monkeypatch.chdir(elsewhere)
    assert launch(planned).exit_code == 0
    assert capfd.readouterr().out == f"{made}\n"
    assert os.getcwd() == str(elsewhere)  # noqa: PTH109


def test_a_plan_of_before_folders_were_kept_runs_where_it_is_launched(tmp_path, monkeypatch):
    data = plan_to_json(plan(LaunchConfig(program=("touch", "started"))))
    data = {**data, "version": 1}
    del data["folder"]
    monkeypatch.chdir(tmp_path)
    assert launch(plan_from_json(data, os.environ)).exit_code == 0
    assert (tmp_path / "started").exists()


@pytest.mark.parametrize("words", ["--help", "--export-plan - true"])
def test_full_disk_behind_stdout_is_one_line(words, tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m poprun_py {words} > /dev/full", shell=True, stderr=subprocess.PIPE,
        text=True, timeout=100, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("poprun-py: error: standard output cannot be")
    assert "Traceback" not in done.stderr


def test_lost_output_is_said_and_the_job_goes_on(tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m poprun_py sh -c 'echo hi; touch done' > /dev/full", shell=True,
        stderr=subprocess.PIPE, text=True, timeout=100, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0
    assert "is lost: No space left on device" in done.stderr
    assert (tmp_path / "done").exists()
