"""Takes the pictures of docs/runs.md: ``python -m tools.pages.report``.

It runs a job and needs Chromium. The pictures show the page of examples/train.py with two
instances, as it begins.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.running.browser import CHROMIUM, open_browser

ROOT = Path(__file__).resolve().parents[2]
PICTURES = {False: ROOT / "docs" / "report-light.png", True: ROOT / "docs" / "report-dark.png"}
JOB = ("--output-dir", "runs", "--num-instances", "2", "--num-replicas", "4", "--timeline")
WIDTH, HEIGHT = 1000, 1480


def main(words: Sequence[str]) -> None:
    """Run the job and write the files."""
    if words or CHROMIUM is None:
        raise SystemExit("usage: python -m tools.pages.report (chromium: make system-packages)")
    with tempfile.TemporaryDirectory() as folder:
        program = ROOT / "examples" / "train.py"
        command = [sys.executable, "-m", "poprun_py", *JOB, str(program)]
        subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        page = Path(folder, "runs", "latest", "report.html")
        with open_browser(Path(folder, "profile")) as browser:
            for is_dark, picture in PICTURES.items():
                browser.look(dark=is_dark, width=WIDTH)
                browser.open(page, "document.documentElement.dataset.drawn")
                browser.screenshot(picture, height=HEIGHT)


if __name__ == "__main__":
    main(sys.argv[1:])
