"""Takes the pictures of the page to plan with for docs/device.md: ``python -m tools.pages.plan``.

The script needs Chromium and torchvision. The pictures show some charts of the page of
ResNet-101 over two IPUs, and the grid of alternatives.
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
PICTURES = {False: ROOT / "docs" / "plan-light.png", True: ROOT / "docs" / "plan-dark.png"}
MODEL = (
    "torchvision.models:resnet101",
    "--input",
    "3x64x64",
    "--batch",
    "64",
    "--split",
    "layer3.8",
)
OPTIONS = ("--optimizer", "adamw", "--accumulation", "8", "--precision", "16.16")
WIDTH = 1000
# The other charts and tables are removed, so that the pictures are small.
SHOWN = (
    "Memory of each IPU by category",
    "Memory of IPU 1 over time",
    "Activities of each IPU",
)
REMOVE = f"""
for (const part of document.querySelectorAll('section > :not(h2), nav, footer')) {{
  const title = part.querySelector('figcaption')?.firstChild.textContent;
  if (!{list(SHOWN)}.includes(title) && !part.querySelector('.pp-outlined')) part.remove();
}}
for (const section of document.querySelectorAll('section')) {{
  if (section.children.length === 1) section.remove();
}}
"""


def main(words: Sequence[str]) -> None:
    """Make the page of a run and write the files."""
    if words or CHROMIUM is None:
        raise SystemExit("usage: python -m tools.pages.plan (chromium: make system-packages)")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "plan.html")
        command = [sys.executable, "-m", "popdist_py.ipu", *MODEL, *OPTIONS, "--page", str(page)]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        with open_browser(Path(folder, "profile")) as browser:
            for is_dark, picture in PICTURES.items():
                browser.look(dark=is_dark, width=WIDTH)
                browser.open(page, "document.documentElement.dataset.drawn")
                browser.value(REMOVE)
                browser.screenshot(picture)


if __name__ == "__main__":
    main(sys.argv[1:])
