"""Inputs that the device makes itself: what a call costs without any data from the host.

Only shapes and dtypes of the host's tensors are read here. Which mode is on is said by the options.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from popdist_py.popart import SyntheticDataMode
from popdist_py.poptorch.calls.transfer import Transfer

__all__ = ["SyntheticTransfer"]

_SEED = 0


class SyntheticTransfer(Transfer):
    """What happens to a tensor between host and device if none of them travels.

    The inputs of a call are made once and used for every later one. Whole numbers are zeros in
    every mode, so that they are indices and labels of any model.

    Args:
        mode: what the floating-point elements are.
        double_precision: keep float64 instead of computing in float32.
    """

    def __init__(self, mode: SyntheticDataMode, *, double_precision: bool) -> None:
        super().__init__(double_precision=double_precision)
        self._mode = mode
        self._made: list[torch.Tensor] = []

    def inputs(
        self, tensors: Sequence[torch.Tensor], *, widen_integers: bool
    ) -> Sequence[torch.Tensor]:
        """Return tensors like the inputs of a call: those of the last call if they fit."""
        wanted = [(t.shape, self._device_dtype(t, widen_integers=widen_integers)) for t in tensors]
        if wanted != [(made.shape, made.dtype) for made in self._made]:
            self._made = list(super().inputs(tensors, widen_integers=widen_integers))
        return self._made

    def to_device(self, tensor: torch.Tensor, *, widen_integers: bool) -> torch.Tensor:
        """Return a tensor of the device's own with the shape of an input."""
        dtype = self._device_dtype(tensor, widen_integers=widen_integers)
        made = torch.zeros(tensor.shape, dtype=dtype)
        generator = torch.Generator().manual_seed(_SEED)
        if dtype.is_floating_point and self._mode == SyntheticDataMode.RandomNormal:
            made.normal_(generator=generator)
        elif dtype.is_floating_point and self._mode == SyntheticDataMode.RandomUniform:
            made.uniform_(generator=generator)
        return made

    def write_back(
        self, changed: Iterable[int], host: Sequence[torch.Tensor], device: Sequence[torch.Tensor]
    ) -> None:
        """Forget inputs that the forward changed: the next call has them as they were."""
        self._made = []
