"""Synthetic inputs, which replace the inputs from the host when a program measures a call's time.

A call with synthetic inputs does not transfer data from the host to the device. The class
SyntheticTransfer reads only the shapes and dtypes of the host's input tensors. The options of a
model select zeros or random numbers as synthetic inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from popdist_py.popart import SyntheticDataMode
from popdist_py.poptorch.calls.transfer import Transfer

__all__ = ["SyntheticTransfer"]

_SEED = 0


class SyntheticTransfer(Transfer):
    """A ``Transfer`` that makes synthetic inputs on the device and does not copy the host's inputs.

    Later calls with inputs of the same shapes use the same synthetic inputs again. Synthetic
    integer inputs are always zeros, because 0 is a valid index and a valid label for every model.

    Args:
        mode: The kind of values that floating-point inputs get: zeros or random numbers.
        double_precision: Whether the device computes with float64 tensors in float64. Without
            ``double_precision``, the device computes in float32.
    """

    def __init__(self, mode: SyntheticDataMode, *, double_precision: bool) -> None:
        super().__init__(double_precision=double_precision)
        self._mode = mode
        self._made: list[torch.Tensor] = []

    def inputs(
        self, tensors: Sequence[torch.Tensor], *, widen_integers: bool
    ) -> Sequence[torch.Tensor]:
        """Return synthetic inputs for a call.

        The synthetic inputs of the last call are returned again if their shapes and dtypes fit the
        new call.
        """
        wanted = [(t.shape, self._device_dtype(t, widen_integers=widen_integers)) for t in tensors]
        if wanted != [(made.shape, made.dtype) for made in self._made]:
            self._made = list(super().inputs(tensors, widen_integers=widen_integers))
        return self._made

    def to_device(self, tensor: torch.Tensor, *, widen_integers: bool) -> torch.Tensor:
        """Return a synthetic tensor with an input's shape and its dtype on the device."""
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
        """Delete the synthetic inputs, because the forward pass has changed some of them in place.

        The next call of the model makes new synthetic inputs with the original values.
        """
        self._made = []
