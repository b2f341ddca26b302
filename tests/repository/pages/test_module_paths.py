"""The pages about the architecture and security name only modules and folders that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support.imports import ROOT

_FOLDERS = ("poprun_py", "popdist_py", "tests", "benchmarks", "examples", "tools")
# A path of Python names, such as `weights/device_state` or `pods/model/`.
_PATH = re.compile(r"`([a-z_]+(?:/[a-z_]+)+)/?(?:\.py)?`")


def _existing() -> set[str]:
    """Return the paths of all modules and folders, without the suffix of modules."""
    found = {path for folder in _FOLDERS for path in (ROOT / folder).rglob("*") if path.is_dir()}
    found |= {path.with_suffix("") for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return {f"/{path.relative_to(ROOT)}" for path in found}


def _missing(page: str) -> Iterator[str]:
    """Yield the paths in a page that are the end of no existing path."""
    existing = _existing()
    for path in _PATH.findall(page):
        if not any(full.endswith(f"/{path}") for full in existing):
            yield path


@pytest.mark.parametrize(("name", "least"), [("docs/architecture.md", 30), ("SECURITY.md", 6)])
def test_a_page_names_existing_modules(name: str, least: int):
    page = (ROOT / name).read_text()
    assert len(_PATH.findall(page)) > least
    assert list(_missing(page)) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`weights/device_state`", []),
        ("`weights/device_state.py` and `pods/model/`", []),
        ("`weights/state_of_device`, `evice_state`", ["weights/state_of_device"]),
        ("`eights/device_state`", ["eights/device_state"]),
    ],
)
def test_missing_modules_are_found(text: str, missing: list[str]):
    assert list(_missing(text)) == missing
