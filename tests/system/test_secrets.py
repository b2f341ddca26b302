"""Values of variables are secrets: they reach the instances, and are seen nowhere else.

A job gets them in every way there is; then all that it left, showed and had on command lines is
searched for them.
"""

from __future__ import annotations

import gzip
import json
import re

import pytest
from support.processes import wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.sweep]

# By name, how each is given. None is part of another one.
SECRETS = {
    "TYPED": "s3cret-typed",
    "OPENAI_API_KEY": "s3cret-of-variable",
    "IN_FILE": "s3cret-in-file",
    "FORWARDED": "s3cret-forwarded",
    "INHERITED": "s3cret-inherited",
    "POPTORCH_MINE": "s3cret-of-library",
    "POPLAR_ENGINE_OPTIONS": '{"debug": "s3cret-of-engine"}',
    "LD_LIBRARY_PATH": "/s3cret-of-loader",
}
_MARK = "s3cret"

_PROGRAM = """
import json, os, sys, time
from pathlib import Path
from popdist_py import heartbeat

found = []
for entry in Path("/proc").iterdir():
    if entry.name.isdigit():
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"s3cret" in words:
            found.append([int(entry.name), words.decode()])
names = json.loads(os.environ["SEARCHED"])
seen = {name: os.environ.get(name) for name in names}
folder = Path(os.environ["FOUND"])
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
(folder / f"{attempt}-{rank}.json").write_text(json.dumps([found, seen]))
for step in range(3):
    heartbeat.step(loss=1.0)
while attempt == "0" and not (folder / "go").exists():
    time.sleep(0.01)
    heartbeat.step(loss=1.0)
if attempt == "0" and rank == "1":
    raise RuntimeError("as it should")
"""


def texts_in(folder):
    """Yield the content of every file below a folder, unpacked."""
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            yield path, gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def search(folder):
    """Return the files in which a value stands, with what is around it."""
    return [
        (str(path), data[max(0, at - 60) : at + 30])
        for path, data in texts_in(folder)
        if (at := data.find(_MARK.encode())) >= 0
    ]


@pytest.mark.timeout(200)
def test_values_are_nowhere_but_in_the_environments_of_instances(poprun, script, tmp_path):
    program, found = script(_PROGRAM), tmp_path / "found"
    found.mkdir()
    (tmp_path / "variables").write_text(f"IN_FILE={SECRETS['IN_FILE']}\n")
    given = {name: SECRETS[name] for name in SECRETS if name not in ("TYPED", "IN_FILE")}
    environ = {**given, "FOUND": str(found), "SEARCHED": json.dumps(list(SECRETS))}
    words = [
        "-n", "2", "--num-replicas", "2", "--oversubscribe",
        "--env", f"TYPED={SECRETS['TYPED']}", "--env", "FORWARDED", "--env", "OPENAI_API_KEY",
        "--env-file", tmp_path / "variables",
    ]  # fmt: skip
    job = poprun(
        *words, "-vv", "--output-dir", tmp_path / "runs", "--timeline", "--max-restarts", "1",
        "--metrics-to", "tensorboard", "--metrics-port", "0", program, env=environ, start=True,
    )  # fmt: skip
    wait_until(lambda: len(list(found.glob("*.json"))) == 2, 60)
    shown = {"status": [], "run": []}
    for form in ("text", "json"):
        done = poprun(f"--status={job.pid}", "--status-format", form)
        assert done.returncode == 0, done.stderr
        shown["status"].append(done.stdout + done.stderr)
    (found / "go").touch()
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    assert "as it should" in err
    shown["run"] = [out, err]

    for path in sorted(found.glob("*.json")):
        lines, seen = json.loads(path.read_text())
        # MPI puts its own folder in front of what it is given.
        assert {name: value.rpartition("lib:")[2] for name, value in seen.items()} == SECRETS, path
        # What the user typed is on the launcher's own command line, and nothing else.
        assert {pid for pid, _ in lines} == {job.pid}
        assert re.findall(rf"\w*=?{_MARK}[-\w]*", lines[0][1]) == [f"TYPED={SECRETS['TYPED']}"]

    run = next(path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    pages = [poprun("report", run), poprun("compare", run, run)]
    for text in ("table", "json", "html", "svg", "tree"):
        pages.append(poprun(*words, f"--print-topology={text}", "-vv", program, env=environ))
    pages.append(poprun(*words, "-vvv", "--dry-run", program, env=environ))
    pages.append(poprun(*words, "-vv", "--export-plan", "-", program, env=environ))
    pages.append(poprun(*words, "-vv", "--no-such-option", program, env=environ))
    shown["pages"] = [done.stdout + done.stderr for done in pages]
    for where, texts in shown.items():
        for text in texts:
            assert text
            assert _MARK not in text, (where, text[max(0, text.index(_MARK) - 200) :][:400])
    assert search(tmp_path / "runs") == []
