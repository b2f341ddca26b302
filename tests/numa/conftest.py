"""Emulated machines are booted only when they are asked for by path."""

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = [Path(arg.split("::")[0]).resolve() for arg in config.invocation_params.args
             if not arg.startswith("-")]  # fmt: skip
    if any(path == HERE or HERE in path.parents for path in asked):
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="boots emulated machines: make test-numa"))
