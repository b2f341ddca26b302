"""Where multiprocessing keeps its sockets in a Python of a job."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib.util

importlib.util.find_spec("multiprocessing.util")  # as programs do that look whether it is there
from multiprocessing import Process, connection, util

def show(*_):
    print(connection.arbitrary_address("AF_UNIX"), flush=True)

if __name__ == "__main__":
    child = Process(target=show)  # made before a folder is asked for
    show()
    child.start()
    child.join()
"""


def addresses(job_folder: Path, temporary: Path) -> list[Path]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "popdist_py" / "start_hook"),
        "POPDIST_JOB_FOLDER": str(job_folder),
        "TMPDIR": str(temporary),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, text=True, capture_output=True, check=True
    )
    return [Path(line) for line in done.stdout.splitlines()]


def test_sockets_lie_in_the_folder_of_the_job(tmp_path):
    with tempfile.TemporaryDirectory(prefix="poprun-") as folder:
        assert {path.parent for path in addresses(Path(folder), tmp_path)} == {Path(folder)}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["gone", "n" * 100])
def test_where_the_folder_will_not_do_they_lie_where_they_always_do(tmp_path, name):
    if name != "gone":
        (tmp_path / name).mkdir()
    for path in addresses(tmp_path / name, tmp_path):
        assert path.parent.name.startswith("pymp-")
        assert path.parent.parent == tmp_path
