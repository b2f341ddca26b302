"""What examples/deploy and .devcontainer hold is well-formed, and the image's steps can be done.

The MPIJob and the batch scripts run in tests/lab.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from deploy.image_build import context_files, copied, stages
from support.repository import ROOT

DEPLOY = ROOT / "examples/deploy"
DOCKERFILE = DEPLOY / "docker/Dockerfile"
TOOLS = Path(sys.executable).parent
UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def lint(*words):
    """Run a linter; it has nothing to say."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_linters_have_nothing_to_say():
    lint(TOOLS / "hadolint", DOCKERFILE)
    lint(TOOLS / "shellcheck", "--severity=warning", *sorted(DEPLOY.glob("slurm/*.sbatch")))


@pytest.mark.examples
def test_an_mpijob_has_the_fields_of_the_api():
    # Their import takes two seconds, which the collection of every other test would pay.
    import jsonschema
    import kubernetes_validate

    job = yaml.safe_load((DEPLOY / "kubernetes/mpijob.yaml").read_text())
    schema = json.loads((Path(__file__).parent / "mpijob_schema.json").read_text())
    jsonschema.validate(job, schema)
    for name, replicas in job["spec"]["mpiReplicaSpecs"].items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.lower()}}
        kubernetes_validate.validate(pod | replicas["template"], "1.30", strict=True)
        (container,) = replicas["template"]["spec"]["containers"]
        assert container["resources"]["limits"], f"{name} may take the whole node"
    assert job["spec"]["sshAuthMountPath"] in (DEPLOY / "docker/sshd_config").read_text()


def test_the_image_sees_what_it_copies_and_nothing_else():
    files = set(context_files(ROOT))
    for stage in stages(DOCKERFILE):
        for kind, value in stage.steps:
            options, sources, _ = copied(value) if kind == "COPY" else ({}, [], "")
            for source in sources if "from" not in options else []:
                assert any(f"{name}/".startswith(f"{source}/") for name in files), source
    others = [name for name in files if name != "docs/reliability.md"]
    tops = {name.partition("/")[0] for name in others}
    assert not tops & {"tests", "benchmarks", "docs", "runs", "poprun-runs", ".ci", ".github"}
    assert not [name for name in files if "__pycache__" in name]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_steps_of_the_image_can_be_done(tmp_path):
    """Installs everything as the image does, in memory; the main job then runs as its user."""
    if os.geteuid() or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("a dry run of the image needs root and namespaces of its own")
    commands = [
        ["runtime", "poprun-py --num-instances 2 --num-replicas 8 examples/train.py"],
        ["runtime", "test $(id -u) = 1000 && ssh -G worker | grep -qx 'port 2222'"],
        ["dev", "make --version && git --version && rsync --version"],
    ]
    done = subprocess.run(
        [*UNSHARE, sys.executable, Path(__file__).with_name("image_build.py"), DOCKERFILE, ROOT,
         tmp_path],
        input=json.dumps(commands), capture_output=True, text=True, timeout=570,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "test accuracy 98" in done.stdout


def test_the_devcontainer_builds_a_stage_and_installs_as_the_readers_of_the_docs_do():
    found = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    known = {"name", "build", "remoteUser", "runArgs", "postCreateCommand", "customizations"}
    assert set(found) == known
    folder = ROOT / ".devcontainer"
    assert (folder / found["build"]["dockerfile"]).samefile(DOCKERFILE)
    assert (folder / found["build"]["context"]).samefile(ROOT)
    assert found["build"]["target"] in {stage.name for stage in stages(DOCKERFILE)}
    program, target = found["postCreateCommand"].split()
    assert program == "make"
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


@pytest.mark.mpi
def test_the_command_of_the_pipelines_runs(poprun, script, tmp_path):
    github, gitlab = (
        yaml.safe_load((DEPLOY / f"ci/{name}.yml").read_text()) for name in ("github", "gitlab")
    )
    command = github["jobs"]["train"]["steps"][-1]["run"].split()
    # GitLab's is the same, but for a folder that it keeps.
    kept = ["--output-dir", "runs"]
    other = gitlab["train"]["script"][-1].split()
    assert sorted([*command, *kept]) == sorted(other)
    assert gitlab["train"]["artifacts"]["paths"] == ["runs/"]
    script("print('trained')", "train.py")
    program, *words = other
    assert program == "poprun-py"
    done = poprun(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
    assert list((tmp_path / "runs").iterdir())
