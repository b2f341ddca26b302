"""The bar that PopTorch shows while it compiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from popdist_py.poptorch.logger import logger

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(*, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show PopTorch's bar; yields a function that takes the percentage done."""
    if not shown:
        yield lambda _: None
        return
    start = time.monotonic()
    with tqdm(total=100, desc="Graph compilation", unit="%") as bar:

        def advance(percentage: int) -> None:
            bar.update(percentage - bar.n)

        yield advance
    logger.debug("Graph compilation took %.3f s", time.monotonic() - start)
