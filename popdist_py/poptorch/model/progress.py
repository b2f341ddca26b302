"""The progress bar that is shown while a model is compiled, as in PopTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from popdist_py.poptorch.logger import logger

__all__ = ["progress_bar"]

# The format of the progress bar, which shows the percentage and the time. The progress bar does not
# show a rate, because a rate in per cent per second would not be useful.
_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


@contextmanager
def progress_bar(*, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """Show the progress bar of a compilation, and yield a function that advances the bar.

    The yielded function takes two arguments, the completed percentage of the compilation and the
    name of the compilation step that begins.

    Args:
        shown: Whether to show the progress bar. Without the progress bar, the yielded function does
            nothing.
    """
    if not shown:
        yield lambda *_: None
        return
    start = time.monotonic()
    with tqdm(total=100, desc="Graph compilation", bar_format=_FORMAT) as bar:

        def advance(percentage: int, what: str) -> None:
            bar.set_postfix_str(what, refresh=False)
            bar.update(percentage - bar.n)
            # Without the call of ``refresh``, tqdm could show the name of the previous step during
            # a long step.
            bar.refresh()

        yield advance
    logger.debug("Graph compilation took %.3f s", time.monotonic() - start)
