"""Make walkthrough.ipynb and walkthrough_code_only.py of walkthrough.py.

python examples/pipelining/notebooks.py
python examples/pipelining/notebooks.py made

The notebook is stored without outputs, so a change of the script changes few of its lines.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import Parser
from common.notebooks import notebook_text

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "walkthrough.py"
_MADE = "# Made of walkthrough.py by notebooks.py.\n"


def make() -> dict[str, str]:
    """Return the text of each file by its name."""
    import jupytext  # imported here because --help does not need it

    cells = jupytext.read(SCRIPT).cells
    return {
        "walkthrough.ipynb": notebook_text(SCRIPT),
        "walkthrough_code_only.py": _MADE
        + _joined([c.source for c in cells if c.cell_type == "code"]),
    }


def _joined(parts: list[str]) -> str:
    """Return the cells as one program, with the usual blank lines around definitions."""
    text = parts[0]
    for before, after in pairwise(parts):
        last = [line for line in before.splitlines() if line[:1].strip()][-1]
        around = (last, after)
        text += "\n\n\n" if any(x.startswith(("def ", "class ")) for x in around) else "\n\n"
        text += after
    return text + "\n"


def main(argv: list[str] | None = None) -> list[Path]:
    """Write the files, and return their paths."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=HERE, help="where to, by default beside the script"
    )
    args = parser.parse_args(argv)
    try:
        made = make()
        args.folder.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            (args.folder / name).write_text(text, encoding="utf-8")
    except ModuleNotFoundError:
        parser.error("jupytext is missing: python -m pip install jupytext")
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    print(f"made: {', '.join(made)}")
    return [args.folder / name for name in made]


if __name__ == "__main__":
    main()
