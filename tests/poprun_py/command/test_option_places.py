"""The command with options from variables, pyproject.toml and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launcher.sysfs_trees import SNAPSHOTS
from support.repository import ROOT

from poprun_py.command import cli
from poprun_py.command.cli import run
from poprun_py.options.launch_config import LaunchConfig, merged_config
from poprun_py.options.option_origins import from_command_line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shape(capsys, *words):
    """Return instances and replicas of what the words plan, and what was said on stderr."""
    assert run([*words, "--print-topology", "json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    return (data["num_instances"], data["num_replicas"]), captured.err


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


OURS = "[tool.poprun-py]\nnum-instances = 2\nnum-replicas = 4\n"


def test_instances_alone_are_enough(capsys, folder):
    assert shape(capsys, "-n", "3", "--oversubscribe")[0] == (3, 3)
    assert run(["-n", "3", "--num-replicas", "8", "x"]) == 2
    assert "--num-replicas 8 cannot be split evenly over --num-instances 3" in (
        capsys.readouterr().err
    )


def test_instances_of_each_host(capsys, folder):
    words = ["--nproc_per_node", "4", "--host", "a,b,c"]
    assert shape(capsys, *words)[0] == (12, 12)
    assert shape(capsys, *words, "--num-replicas", "24")[0] == (12, 24)
    assert run([*words, "--num-replicas", "8", "x"]) == 2
    assert "--nproc-per-node 4 x 3 hosts = 12 instances" in capsys.readouterr().err
    cpus = len(os.sched_getaffinity(0))
    assert shape(capsys, "--nproc-per-node", "auto")[0][0] <= cpus
    assert run(["--nproc-per-node", "auto", "--host", "a,b", "x"]) == 2
    assert (
        "the launcher does not know the CPUs of host a before the launch; give"
        in capsys.readouterr().err
    )
    machine = str(SNAPSHOTS / "example.json")
    (instances, _), _ = shape(
        capsys, "--nproc-per-node", "auto", "--host", "a,b", "--hardware", machine
    )
    assert instances > 2
    assert run(["-n", "2", "--nproc-per-node", "4", "x"]) == 2
    assert "--num-instances and --nproc-per-node cannot" in capsys.readouterr().err


def test_instances_of_each_host_of_an_allocation(capsys, folder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    assert shape(capsys, "--nproc-per-node", "2")[0] == (4, 4)
    assert run(["--nproc-per-node", "3", "--dry-run", "x"]) == 2
    assert "give --ntasks-per-node=3 to sbatch or salloc, or" in capsys.readouterr().err


def test_the_nearest_project_file_with_our_table_counts(capsys, folder, monkeypatch):
    write(folder / "pyproject.toml", OURS)
    deep = folder / "a" / "b"
    write(deep / "pyproject.toml", "[tool.other]\n")
    assert shape(capsys)[0] == (2, 4)
    monkeypatch.chdir(deep)
    assert shape(capsys)[0] == (2, 4)
    write(deep.parent / "pyproject.toml", "[tool.poprun-py]\nnum-instances = 5\n")
    assert shape(capsys, "--oversubscribe")[0] == (5, 5)
    (deep.parent / "pyproject.toml").unlink()
    (deep.parent / ".git").mkdir()
    assert shape(capsys)[0] == (1, 1)


def test_paths_in_a_project_file_are_relative_to_it(capsys, folder, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    write(folder / "hosts", "a\nb\n")
    text = OURS + "host-file = 'hosts'\nmpi = 'mpirun'\n"
    write(folder / "pyproject.toml", text)
    below = folder / "below"
    below.mkdir()
    for place in (folder, below):
        monkeypatch.chdir(place)
        assert run(["--print-topology", "json"]) == 0
        assert [h["name"] for h in json.loads(capsys.readouterr().out)["hosts"]] == ["a", "b"]
    write(folder / "pyproject.toml", "[tool.poprun-py]\nmpi = './mpirun'\n")
    assert run(["--dry-run", "x"]) == 3
    assert f"mpi in {folder}/pyproject.toml {folder}/mpirun: " in capsys.readouterr().err


def test_every_place_is_weaker_than_the_next(capsys, folder, monkeypatch):
    write(folder / "pyproject.toml", OURS)
    write(folder / "job.toml", "num-replicas = 6\n")
    assert shape(capsys, "--import-config", "job.toml")[0] == (2, 6)
    monkeypatch.setenv("POPRUN_IMPORT_CONFIG", "job.toml")
    assert shape(capsys)[0] == (2, 6)
    monkeypatch.setenv("POPRUN_NUM_REPLICAS", "8")
    assert shape(capsys)[0] == (2, 8)
    assert shape(capsys, "-n", "1")[0] == (1, 8)
    monkeypatch.delenv("POPRUN_NUM_REPLICAS")
    assert shape(capsys, "--import-config", "none")[0] == (1, 1)


def test_the_log_tells_options_with_their_places_but_no_secret_values(capsys, folder, monkeypatch):
    write(folder / "pyproject.toml", OURS)
    monkeypatch.setenv("POPRUN_ENV", "HF_TOKEN=hush")
    said = shape(capsys, "-v", "--oversubscribe", "--timeout", "5m", "--env", "KEY=hush")[1]
    assert "options from pyproject.toml: num-instances = 2, num-replicas = 4\n" in said
    assert "options from the command line: --env KEY, --oversubscribe, --timeout 300, " in said
    monkeypatch.setenv("POPRUN_NUM_REPLICAS", "8")
    said = shape(capsys, "-v")[1]
    assert "options from pyproject.toml: num-instances = 2\n" in said
    assert "options from the environment: POPRUN_NUM_REPLICAS=8, POPRUN_ENV=HF_TOKEN\n" in said
    assert "hush" not in said
    assert "options from" not in shape(capsys)[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.poprun-py]\nnum-replicaz = 2\n", "pyproject.toml, line 2: unknown option"),
        ("[tool.poprun-py]\nnum-replicas = 8\nnum-instances = 3\n",
         "num-replicas = 8 in pyproject.toml cannot be split evenly over num-instances = 3 in"),
        ("[tool.poprun-py]\nssh-config = '/no'\nhost = 'a'\n",
         "ssh-config = /no in pyproject.toml: the file does not exist"),
        ("[tool.poprun-py]\nhost = 'a,,b'\n", ("host in pyproject.toml 'a,,b': an entry is "
                                               "empty; expected names")),
        ("[tool.poprun-py]\nmpi = '/no'\n", ("mpi in pyproject.toml /no: expected the path of "
                                             "mpirun")),
        ("[tool.poprun-py]\nhardware = '/no'\n", "hardware in pyproject.toml /no: No such file"),
        ("[tool.poprun-py]\noutput-dir = '/dev/null'\n",
         "output-dir in pyproject.toml /dev/null: the folder of the run cannot be created "
         "(File exists)"),
        ("[tool.poprun-py]\nenv = ['1=2']\n", "env in pyproject.toml '1': expected NAME=VALUE"),
        ("[tool.poprun-py]\ncores-per-instance = 4000\n", "cores-per-instance in pyproject.toml"),
        ("[tool.poprun-py]\nmpi-global-args = [\"'\"]\n", "mpi-global-args in pyproject.toml"),
        ("[tool.poprun-py]\ninstance-mpi-local-args = [\"7:x\"]\n",
         ("instance-mpi-local-args in pyproject.toml '7:x': expected the index of an instance, "
          "from 0")),
    ],
)  # fmt: skip
def test_a_refusal_names_the_file_and_no_option(text, said, capsys, folder):
    write(folder / "pyproject.toml", text)
    assert run(["true"]) == (3 if ("expected the path of mpirun") in said else 2)
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1
    assert "error: --" not in line


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["--help", "all"]])
def test_help_and_version_look_at_no_place(words, capsys, folder, monkeypatch):
    write(folder / "pyproject.toml", "[tool.poprun-py]\nx = ")
    monkeypatch.setenv("POPRUN_NUM_REPLICAS", "many")
    assert run(words) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert captured.err == ""


def test_help_on_nothing_is_a_usage_error(capsys):
    assert run(["--help", "placment"]) == 2
    assert "did you mean placement?" in capsys.readouterr().err


def test_stacks_of_a_job_are_asked_for_whatever_the_places_say(capsys, folder, monkeypatch):
    write(folder / "pyproject.toml", "[tool.poprun-py]\nx = ")
    monkeypatch.setenv("POPRUN_NUM_REPLICAS", "many")
    assert run(["--stacks", "1"]) == 3
    assert "--stacks 1: no job of yours" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["1"], 2, "--add-host 1: expected one host after the job, such as --add-host 1 node4"),
        (["1", "a", "b"], 2, "--add-host 1: expected one host after the job"),
        (["1", "a"], 3, "--add-host 1: no job of yours"),
    ],
)
def test_a_host_is_added_to_one_job(capsys, words, code, part):
    assert run(["--add-host", *words]) == code
    assert part in capsys.readouterr().err


def test_a_variable_that_is_no_option_is_a_warning(capsys, folder, monkeypatch):
    monkeypatch.setenv("POPRUN_NUM_REPLICA", "8")
    monkeypatch.setenv("POPRUN_NUM_INSTANCES", "")
    got, said = shape(capsys)
    assert got == (1, 1)
    assert said == (
        "poprun-py: warning: POPRUN_NUM_REPLICA is not an option of poprun-py; did you mean "
        "POPRUN_NUM_REPLICAS?\n"
    )


def test_a_saved_plan_is_not_changed_by_variables(capsys, folder, monkeypatch):
    assert run(["-n", "2", "--export-plan", "plan.json", "--dry-run", "true"]) == 0
    write(folder / "pyproject.toml", "[tool.poprun-py]\nx = ")
    monkeypatch.setenv("POPRUN_NUM_INSTANCES", "3")
    monkeypatch.setenv("POPRUN_EXPORT_CONFIG", "c.toml")
    monkeypatch.setenv("POPRUN_PRINT_TOPOLOGY", "json")
    capsys.readouterr()
    assert run(["--from-plan", "plan.json", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert '"num_instances": 2' in captured.out
    assert captured.err == (
        "poprun-py: warning: POPRUN_NUM_INSTANCES, POPRUN_EXPORT_CONFIG have no effect: the plan "
        "of --from-plan takes precedence\n"
    )
    assert not (folder / "c.toml").exists()


def test_an_option_beside_a_saved_plan_is_named_as_it_was_written(folder):
    assert run(["-n", "1", "--export-plan", "plan.json", "--dry-run", "true"]) == 0
    config = LaunchConfig(from_plan="plan.json", wait_for_resources=5.0)
    written = from_command_line({"from_plan": "plan.json", "wait_for_resources": 5.0})
    assert cli._load_plan(config).config.shown("wait_for_resources") == "wait_for_resources=5.0"
    config = cli._load_plan(merged_config(written)).config
    assert config.shown("wait_for_resources") == "--wait-for-resources 5.0"


def test_a_file_that_a_stranger_left_above_is_not_read(capsys, folder, monkeypatch):
    write(folder / "pyproject.toml", OURS)
    below = folder / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    os.chown(folder / "pyproject.toml", 54321, 54321)
    assert shape(capsys)[0] == (2, 4)  # nobody else could have put it there
    folder.chmod(0o1777)
    got, said = shape(capsys)
    assert got == (1, 1)
    assert "pyproject.toml is not read, because it belongs to another user" in said
    monkeypatch.chdir(folder)
    assert shape(capsys)[0] == (2, 4)  # it is in the folder that the user chose


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_project_file_is_not_waited_for(capsys, folder, monkeypatch):
    write(folder / "pyproject.toml", OURS)
    below = folder / "below"
    below.mkdir()
    os.mkfifo(below / "pyproject.toml")
    monkeypatch.chdir(below)
    assert shape(capsys)[0] == (2, 4)


def test_a_project_file_of_others_is_not_parsed(capsys, folder):
    write(folder / "pyproject.toml", "[tool.ruff]\nline-length = 100\n")
    code = (
        "import sys; from poprun_py.options.gathered_options import gather_options\n"
        "gather_options({'program': ()}, {}); print('tomllib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--env", "=s3cret"],
        ["--env", "A-B=s3cret"],
        ["--env", "TOKEN s3cret"],
        ["--envv=TOKEN=s3cret"],
        ["--en=TOKEN=s3cret"],
        ["-xTOKEN=s3cret"],
        ["--env-file", "variables"],
        ["--import-config", "job.toml"],
        ["-vvv", "--dry-run", "--env", "TOKEN=s3cret"],
        *(
            [f"--print-topology={form}", "--dry-run", "--env", "TOKEN=s3cret"]
            for form in ("yes", "json", "html")
        ),
    ],
)
def test_the_value_of_a_variable_is_never_shown(words, folder, capsys):
    write(folder / "variables", "TOKEN s3cret\n")
    write(folder / "job.toml", 'env = "TOKEN=s3cret"\n')
    run([*words, "true"])
    shown = capsys.readouterr()
    assert shown.out + shown.err
    assert "s3cret" not in shown.out + shown.err
