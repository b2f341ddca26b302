"""Values of variables on several hosts: no command line of any host, no output and no file has one.

The test looks from outside of the hosts, where the processes of all of them are seen: launcher,
mpirun, ssh or srun, daemons, wrappers and programs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.processes import wait_until
from system.test_secrets import search

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
POPRUN = (sys.executable, "-m", "poprun_py")
MARK = "s3cret"
# By name, how each is given. None is part of another one.
SECRETS = {
    "TYPED": "s3cret-typed",
    "IN_FILE": "s3cret-in-file",
    "IN_OPTIONS": "s3cret-in-options",
    "FORWARDED": "s3cret-forwarded",
    "API_KEY": "s3cret-of-environment",
}
PROGRAM = """
import json, os, time
from pathlib import Path
from popdist_py import heartbeat

folder, names = Path(os.environ["FOUND"]), json.loads(os.environ["SEARCHED"])
seen = {name: os.environ.get(name) for name in names}
(folder / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
while not (folder / "go").exists():
    time.sleep(0.01)
    heartbeat.step()
raise RuntimeError("as it should")
"""


def command_lines():
    """Return the words of all processes of this machine, and so of all hosts of the lab."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            yield words


def given_in(tmp_path, *, is_typed):
    """Return words that give each variable in its way, and the environment of the launch.

    What is not typed stands in a file of options.
    """
    found = tmp_path / "found"
    found.mkdir()
    (tmp_path / "variables").write_text(f"IN_FILE={SECRETS['IN_FILE']}\n")
    env = [
        *(f"{name}={SECRETS[name]}" for name in ("TYPED", "IN_OPTIONS")),
        *("FORWARDED", "API_KEY", f"FOUND={found}", f"SEARCHED={json.dumps(list(SECRETS))}"),
    ]
    words = ["-n", "2", "--num-replicas", "2", "-vv"]
    if is_typed:
        words += [word for each in env for word in ("--env", each)]
        words += ["--env-file", tmp_path / "variables"]
    else:
        options = tmp_path / "options.json"
        options.write_text(json.dumps({"env": env, "env_file": str(tmp_path / "variables")}))
        words += ["--import-config", options]
    return words, {name: SECRETS[name] for name in ("FORWARDED", "API_KEY")}, found


def check(host, launch, tmp_path, script, environ=None, *, is_typed):
    """Run a job that fails, and look for the values wherever somebody could see them."""
    program, runs = script(PROGRAM), tmp_path / "runs"
    words, values, found = given_in(tmp_path, is_typed=is_typed)
    environ = {**values, **(environ or {})}
    job = host.start(*launch, *words, "--output-dir", runs, program, env=environ, cwd=tmp_path)
    try:
        wait_until(lambda: len(list(found.glob("*.json"))) == 2 or job.poll() is not None, 90)
        lines = list(command_lines())
    finally:
        (found / "go").touch()
        out, err = job.communicate(timeout=120)
    assert job.returncode == 1, err
    assert "as it should" in err
    for path in found.glob("*.json"):
        assert json.loads(path.read_text()) == SECRETS
    # The launcher's own, as the user typed it, and what has started the launcher so.
    shown = [line for line in lines if MARK in "".join(line)]
    assert bool(shown) == is_typed
    for line in shown:
        assert "poprun_py" in line, line
        assert all(line[line.index(word) - 1] == "--env" for word in line if MARK in word), line
    # Wrappers and programs of both hosts were there to be seen.
    assert sum(str(program) in line and "poprun_py" not in line for line in lines) >= 4
    # The other views of a plan say the same of a job here (tests/system/test_secrets.py).
    done = host.run(*launch, *words, "--dry-run", "-vvv", program, env=environ, cwd=tmp_path)
    assert done.stdout
    texts = [out, err, done.stdout, done.stderr]
    for text in texts:
        assert MARK not in text, text[max(0, text.index(MARK) - 300) :][:600]
    assert search(runs) == []
    return lines


def test_values_stand_on_no_command_line_of_any_host(lab, script, tmp_path):
    launch = (*POPRUN, "--host", lab.names(2))
    lines = check(lab[0], launch, tmp_path, script, is_typed=True)
    assert any(Path(line[0]).name == "ssh" for line in lines)


def test_values_stand_on_no_command_line_of_a_slurm_job(cluster, script, tmp_path):
    launch = ("salloc", "-N2", *POPRUN)
    lines = check(cluster.lab[0], launch, tmp_path, script, cluster.environ, is_typed=False)
    assert any(Path(line[0]).name == "srun" for line in lines)
