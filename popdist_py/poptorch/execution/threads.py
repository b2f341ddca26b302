"""How many threads PyTorch works with while a model runs."""

from __future__ import annotations

import torch

__all__ = ["OneThread"]


class OneThread:
    """A context in which every operation runs on one thread.

    PyTorch cuts sums by the number of threads, which depends on how the cores of a host are shared
    among instances: with one thread the bits of a result do not.
    """

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)
