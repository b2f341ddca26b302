"""Make a notebook of a script in jupytext's percent format, beside it.

python examples/common/notebooks.py examples/notebook/training.py

The notebook is stored without outputs, so a change of the script changes few of its lines. Cells
with the tag "script" are left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["notebook_text"]


def notebook_text(script: Path) -> str:
    """Return the text of the notebook for a script.

    Raises:
        ModuleNotFoundError: The package jupytext is missing.
        OSError: The script cannot be read.
    """
    import jupytext  # imported here because --help does not need it

    notebook = jupytext.read(script)
    notebook.cells = [c for c in notebook.cells if "script" not in c.metadata.get("tags", [])]
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"  # jupytext's ids would differ each time
    notebook.nbformat_minor = 5
    notebook.metadata.pop("jupytext", None)
    return jupytext.writes(notebook, fmt="ipynb")


def main(argv: list[str] | None = None) -> None:
    """Write the notebook beside each script."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from common.arguments import Parser

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", type=Path, metavar="SCRIPT")
    args = parser.parse_args(argv)
    for script in args.scripts:
        notebook = script.with_suffix(".ipynb")
        try:
            notebook.write_text(notebook_text(script), encoding="utf-8")
        except ModuleNotFoundError:
            parser.error("jupytext is missing: python -m pip install jupytext")
        except OSError as error:
            parser.error(f"{error.filename}: {error.strerror}")
        print(f"made: {notebook}")


if __name__ == "__main__":
    main()
