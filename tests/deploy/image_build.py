"""Carries out the steps of a Dockerfile on this machine, where no daemon is, and leaves nothing.

    unshare --mount --pid --fork --kill-child --mount-proc python image_build.py DOCKERFILE CONTEXT

The base image is this machine: every stage is an overlay over its own root, in memory, so that
what the steps change goes away with the process. COPY takes what ``.dockerignore`` leaves of the
context; RUN, ENV, USER and WORKDIR have their effect. What comes on stdin, a JSON list of
[stage, command], runs in the finished stages. What is not shown here: the real base image, and the
layers.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser
from pathspec import PathSpec

# As the image named by BASE: a python3 that everybody may run, and no user 1000 yet.
_BASE = """\
chmod 711 /root
getent passwd 1000 | cut -d: -f1 | xargs --no-run-if-empty userdel
"""
_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
# How pip and apt reach their packages from here.
_NETWORK = re.compile(r"(?i)pip_|https?_proxy|no_proxy")
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")


@dataclass
class Stage:
    """A stage: its instructions, and while it is built, its root and what was set so far."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    root: Path = Path("/")
    layers: list[Path] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    folder: str = "/"


def stages(dockerfile: Path) -> list[Stage]:
    """Return the stages of a Dockerfile; the last one is what a build without a target makes."""
    found: list[Stage] = []
    for step in DockerfileParser(path=str(dockerfile)).structure:
        kind, value = step["instruction"], step["value"]
        if kind == "FROM":
            base, _, name = value.partition(" AS ")
            found.append(Stage(name or str(len(found)), base))
        elif found and kind != "COMMENT":
            found[-1].steps.append((kind, value))
    return found


def copied(value: str) -> tuple[dict[str, str], list[str], str]:
    """Return the options, the sources and the target of a COPY."""
    words = shlex.split(value)
    options = [word for word in words if word.startswith("--")]
    *sources, target = words[len(options) :]
    return dict(option[2:].split("=", 1) for option in options), sources, target


def context_files(context: Path) -> Iterator[str]:
    """Yield what a build gets to see of ``context``: what its ``.dockerignore`` leaves.

    Patterns of the two kinds of file mean the same as long as whole top-level names are left in.
    """
    ignored = PathSpec.from_lines("gitignore", (context / ".dockerignore").read_text().splitlines())
    for folder, names, files in os.walk(context):
        inside = Path(folder).relative_to(context)
        if inside == Path():
            names[:] = [n for n in names if n not in {".git", ".venv"}]  # ignored, and large
        for name in files:
            if not ignored.match_file(path := str(inside / name)):
                yield path


def build(dockerfile: Path, context: Path, scratch: Path) -> dict[str, Stage]:
    """Carry out all stages; returns them by name.

    Raises:
        CalledProcessError: a step failed.
    """
    _run("mount", "-t", "tmpfs", "tmpfs", scratch)
    left = scratch / "context"
    for name in context_files(context):
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(context / name, left / name)
    made: dict[str, Stage] = {}
    for stage in stages(dockerfile):
        below = made.get(stage.base)
        _begin(stage, below, scratch)
        if below is None:
            _inside(stage, _BASE)
        for kind, value in stage.steps:
            print(f"{stage.name}: {kind} {value}"[:150], flush=True)
            _step(stage, kind, value, left, made)
        made[stage.name] = stage
    return made


def _begin(stage: Stage, below: Stage | None, scratch: Path) -> None:
    """Mount the root of a stage over the one that it begins with."""
    stage.root, top, work = (scratch / stage.name / part for part in ("root", "changes", "work"))
    for path in (stage.root, top, work):
        path.mkdir(parents=True)
    python = Path(sys.executable).resolve().parent
    lower = below.layers if below else [Path("/")]
    stage.layers = [top, *lower]
    stage.environ = dict(below.environ) if below else {"PATH": f"{python}:{_PATH}"}
    layers = ":".join(map(str, lower))
    _run("mount", "-t", "overlay", "overlay", "-o",
         f"lowerdir={layers},upperdir={top},workdir={work}", stage.root)  # fmt: skip
    for path in ("/proc", "/dev", "/opt/wheels", "/opt/pypi"):
        if Path(path).exists():
            (stage.root / path[1:]).mkdir(parents=True, exist_ok=True)
            _run("mount", "--rbind", path, stage.root / path[1:])


def _step(stage: Stage, kind: str, value: str, context: Path, made: dict[str, Stage]) -> None:
    if kind == "RUN":
        _inside(stage, value)
    elif kind == "COPY":
        _copy(stage, value, context, made)
    elif kind == "ENV":
        name, _, text = value.partition("=")
        stage.environ[name] = _VARIABLE.sub(
            lambda match: stage.environ.get(match[1] or match[2], ""), text
        )
    elif kind == "USER":
        stage.user = value
    elif kind == "WORKDIR":
        stage.folder = value
        (stage.root / value[1:]).mkdir(parents=True, exist_ok=True)
    elif kind not in {"ARG", "CMD"}:
        raise NotImplementedError(f"{kind} {value}")


def _copy(stage: Stage, value: str, context: Path, made: dict[str, Stage]) -> None:
    options, sources, target = copied(value)
    start = made[options["from"]].layers[0] if "from" in options else context
    place = stage.root / (Path(stage.folder) / target).relative_to("/")
    into = target.endswith("/") or len(sources) > 1
    for source in sources:
        path = start / source.lstrip("/")
        goal = place / path.name if into else place
        goal.parent.mkdir(parents=True, exist_ok=True)
        _run("cp", "--archive", "--no-target-directory", path, goal)
        if "chown" in options:
            _inside(stage, f"chown -R {options['chown']} {target}", user="0")


def _inside(stage: Stage, command: str, user: str | None = None) -> None:
    """Run a shell command in a stage, as its user and in its folder."""
    user = stage.user if user is None else user
    home = "/root" if user == "0" else "/home/poprun"
    network = {n: v for n, v in os.environ.items() if _NETWORK.match(n)}
    _run("chroot", f"--userspec={user}:{user}", stage.root, "/bin/sh", "-ec",
         f"cd {stage.folder}\n{command}",
         env={**network, **stage.environ, "HOME": home})  # fmt: skip


def _run(*words: object, **settings) -> None:
    subprocess.run([str(word) for word in words], check=True, stdin=subprocess.DEVNULL, **settings)


if __name__ == "__main__":
    _, dockerfile, context, scratch = sys.argv
    commands = json.load(sys.stdin)
    try:
        built = build(Path(dockerfile), Path(context), Path(scratch))
        for name, command in commands:
            _inside(built[name], command)
    except subprocess.CalledProcessError as error:
        sys.exit(str(error))
