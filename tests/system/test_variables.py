"""The variables that real instances get: those of torchrun, and no options of the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

from poprun_py import LaunchConfig, plan

pytestmark = pytest.mark.mpi

# torchrun's own: a file for the errors of its decorator, and what its agent reads.
_AGENTS = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
# One write for the whole line: workers of torchrun share a pipe, and are unbuffered.
_PROGRAM = "import json, os\nos.write(1, json.dumps(dict(os.environ)).encode() + b'\\n')\n"


def environments(text):
    """Return the environments that instances printed, by rank."""
    found = [json.loads(line[line.index("{") :]) for line in text.splitlines() if "{" in line]
    return {environ["RANK"]: environ for environ in found}


@pytest.mark.timeout(200)
def test_instances_get_every_variable_of_torchrun(poprun, warm, script, tmp_path):
    program = script(_PROGRAM)
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [*warm, torchrun, "--standalone", "--nproc-per-node=2", "--max-restarts=3", program],
        env=bare, capture_output=True, text=True, check=True, timeout=100, cwd=tmp_path,
    )  # fmt: skip
    theirs = environments(done.stdout)
    set_by_torchrun = set(theirs["0"]) - set(bare) - {"LC_CTYPE"}
    assert {"TORCHELASTIC_RUN_ID", "ROLE_RANK", "GROUP_WORLD_SIZE"} <= set_by_torchrun
    done = poprun("-n", "2", "--max-restarts", "3", "--output", "plain", program)
    assert done.returncode == 0, done.stderr
    ours = environments(done.stdout)
    differing = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"}
    # Instance 0 opens the store itself; torchrun's agent does so for its own.
    differing.add("TORCHELASTIC_USE_AGENT_STORE")
    for rank in ("0", "1"):
        assert set_by_torchrun - set(ours[rank]) == _AGENTS
        for name in set_by_torchrun - _AGENTS - differing:
            assert ours[rank][name] == theirs[rank][name], name
        assert ours[rank]["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert ours[rank]["NODE_RANK"] == "0"
        assert ours[rank]["TORCHELASTIC_RUN_ID"] == ours[rank]["POPRUN_RUN_ID"]
    ids = {environ["TORCHELASTIC_RUN_ID"] for environ in ours.values()}
    assert len(ids) == 1
    again = environments(poprun("-n", "1", "--output", "plain", program).stdout)
    assert again["0"]["TORCHELASTIC_RUN_ID"] not in ids


def test_a_pasted_command_sets_what_follows_from_the_ranks(tmp_path, script):
    program = script(_PROGRAM)
    made = plan(LaunchConfig(num_instances=2, oversubscribe=True, program=(str(program),)))
    done = subprocess.run(
        made.command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=True, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    found = environments(done.stdout)
    assert sorted(found) == ["0", "1"]
    for rank, environ in found.items():
        assert environ["ROLE_RANK"] == rank
        assert (environ["ROLE_WORLD_SIZE"], environ["GROUP_WORLD_SIZE"]) == ("2", "1")


def test_an_instance_is_not_told_the_options_of_its_launcher_or_of_an_outer_job(poprun, script):
    program = script(_PROGRAM)
    outer = {
        "POPRUN_NUM_INSTANCES": "2",
        "POPRUN_OUTPUT": "plain",
        "POPRUN_HOST_SUBNET": "",
        "ROLE_RANK": "7",
        "GROUP_WORLD_SIZE": "9",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/x",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
    done = poprun("--env", "POPRUN_GRACE=2", "--env", "ROLE_NAME=mine", program, env=outer)
    assert done.returncode == 0, done.stderr
    told = environments(done.stdout)
    assert sorted(told) == ["0", "1"]
    for rank, environ in told.items():
        assert not {"POPRUN_NUM_INSTANCES", "POPRUN_OUTPUT", "POPRUN_HOST_SUBNET"} & set(environ)
        assert "TORCHELASTIC_ERROR_FILE" not in environ
        assert environ["POPRUN_GRACE"] == "2"
        assert environ["ROLE_NAME"] == "mine"
        assert (environ["ROLE_RANK"], environ["GROUP_WORLD_SIZE"]) == (rank, "1")
        assert environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_a_launcher_in_an_instance_takes_none_of_our_variables_for_options(poprun, script):
    words = ["-n", "1", "--output", "plain", "sh", "-c", "echo $WORLD_SIZE"]
    program = script(
        "import subprocess, sys\n"
        f"done = subprocess.run([sys.executable, '-m', 'poprun_py', *{words}],\n"
        "                      capture_output=True, text=True, stdin=subprocess.DEVNULL)\n"
        "print(done.returncode, repr(done.stdout), repr(done.stderr))\n"
    )
    done = poprun("-n", "2", "--output", "plain", program)
    assert done.stdout.splitlines() == ["0 '1\\n' ''"] * 2, done.stderr


def test_a_module_runs_as_under_python(poprun, tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])\n")
    done = poprun("-n", "2", "--output", "plain", "-m", "package.train", "--lr", "1", ":")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["__main__ package ['--lr', '1', ':']"] * 2


@pytest.mark.parametrize(
    ("by_file", "program", "said"), [(False, ("-m", "found"), "module"), (True, ("tool",), "tool")]
)
def test_a_program_may_be_where_only_the_instances_look(poprun, tmp_path, by_file, program, said):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "found.py").write_text("print('module')\n")
    tool = tmp_path / "bin" / "tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho tool\n")
    tool.chmod(0o755)
    settings = {"PYTHONPATH": f"{tmp_path}/lib", "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    lines = [f"{name}={value}" for name, value in settings.items()]
    (tmp_path / "variables").write_text("\n".join(lines))
    options = [f"--env={line}" for line in lines]
    options = ["--env-file", f"{tmp_path}/variables"] if by_file else options
    done = poprun("-n", "2", *options, "--output", "plain", *program)
    assert (done.returncode, done.stdout) == (0, f"{said}\n{said}\n"), done.stderr
