"""The bar that PopTorch shows while it compiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from popdist_py.poptorch.logger import logger

__all__ = ["progress_bar"]

# Percentages and times: a rate in per cent per second would mean nothing.
_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


@contextmanager
def progress_bar(*, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """Show PopTorch's bar; yields a function that takes the percentage done and what begins."""
    if not shown:
        yield lambda *_: None
        return
    start = time.monotonic()
    with tqdm(total=100, desc="Graph compilation", bar_format=_FORMAT) as bar:

        def advance(percentage: int, what: str) -> None:
            bar.set_postfix_str(what, refresh=False)
            bar.update(percentage - bar.n)
            # What begins may take long: a bar that waits for its turn would show what is over.
            bar.refresh()

        yield advance
    logger.debug("Graph compilation took %.3f s", time.monotonic() - start)
