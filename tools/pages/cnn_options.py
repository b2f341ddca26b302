"""The tables of options in docs/cnns.md.

A table stands below ``<!-- options: GROUP -->``, a group of ``examples/cnns/arguments.py``.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cnns.md"
_TABLE = re.compile(r"(<!-- options: (?P<group>[\w &]+) -->\n)(?:\|[^\n]*\n)*")
_HEAD = "| option | default | meaning |\n|---|---|---|\n"
# What stands behind an option, by the function that reads it; NUMBER where none is named.
_VALUES = {"str": "TEXT", "Path": "PATH", "positive": "N", "from_zero": "N", "worker_count": "N"}
# What configurations.py fills in, where the parser knows no default.
_FOLLOWS = {
    "model_size": "20, 29, B0 (CIFAR); 50, 50, B0",
    "norm": "by data set",
    "dataset": "by its files",
    "data_dir": "`$DATA_DIR`",
    "generated_samples": "as many as the data set has",
    "image_size": "32 (CIFAR), 224",
    "seed": "another each time",
    "epochs": "160 (CIFAR), 100",
    "iterations": "those of the epochs",
    "batch_size": "32 (CIFAR), 4",
    "global_batch_size": "what follows",
    "gradient_accumulation_count": "1; twice the stages of a pipeline",
    "base_learning_rate_exponent": "by optimiser: below",
    "pipeline_splits": "lists them",
    "available_memory_proportion": "the device's",
    "select_ipus": "AUTO",
    "device": "none: a warning where an Mk2 has no room",
    "valid_batch_size": "the training's",
    "weight_avg": "none",
    "config": "none",
    "config_path": "`configs.yml` beside train.py",
}


def page(text: str) -> str:
    """Return the text of the page with the tables of today's options.

    Raises:
        KeyError: the page names a group that is none, or lacks one.
    """
    groups = _groups()
    named = [found["group"] for found in _TABLE.finditer(text)]
    if sorted(named) != sorted(groups):
        raise KeyError(f"the page has tables of {named}, the options are in {list(groups)}")
    return _TABLE.sub(lambda found: found[1] + _HEAD + groups[found["group"]], text)


def _groups() -> dict[str, str]:
    """Return the rows of every group of options, by its name."""
    examples = ROOT / "examples"
    paths, modules = [*sys.path], {*sys.modules}
    sys.path.insert(0, str(examples / "cnns"))
    try:
        from arguments import make_parser
    finally:
        sys.path[:] = paths
        # Other examples have modules of the same names.
        for name in {*sys.modules} - modules:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(f"{examples}/"):
                del sys.modules[name]
    parser = make_parser("", "")
    return {
        group.title: "".join(_row(action) for action in group._group_actions)
        for group in parser._action_groups
        if group._group_actions and "-h" not in group._group_actions[0].option_strings
    }


def _row(action: argparse.Action) -> str:
    spelled = [_spelled(name, action) for name in action.option_strings]
    if isinstance(action, argparse.BooleanOptionalAction):
        spelled = spelled[::-1] if action.default else spelled
    meaning = (action.help or "").replace("|", "\\|")
    if action.choices:
        meaning += f": {', '.join(f'`{choice}`' for choice in action.choices)}"
    return f"| {', '.join(spelled)} | {_default(action)} | {meaning} |\n"


def _spelled(name: str, action: argparse.Action) -> str:
    if action.nargs == 0:
        return f"`{name}`"
    kind = getattr(action.type, "__name__", "str")
    value = action.metavar or ("NAME" if action.choices else _VALUES.get(kind, "NUMBER"))
    return f"`{name} {value}{' ...' if action.nargs == '+' else ''}`"


def _default(action: argparse.Action) -> str:
    value = action.default
    if isinstance(value, bool):
        return "yes" if value else "no"
    if action.dest in _FOLLOWS:
        return _FOLLOWS[action.dest]
    if isinstance(value, list):
        return " ".join(f"{each:g}" for each in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def files() -> dict[Path, str]:
    """Return the page with the tables of today's options."""
    return {PAGE: page(PAGE.read_text(encoding="utf-8"))}
