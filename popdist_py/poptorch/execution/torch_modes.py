"""Context managers inside which a model runs, for example with mixed precision.

All models run inside the context manager ``WithoutValueReads``. The compiler chooses which of the
context managers ``MixedPrecision``, ``OneThread`` and ``FloatingPointTraps`` a model needs. The
module ``floating_point_traps.py`` contains ``FloatingPointTraps``, the mode for floating-point
exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from popdist_py.poptorch.calls.nested_values import tensors_of
from popdist_py.poptorch.execution.batch_folding import folded_now

__all__ = ["MixedPrecision", "OneThread", "WithoutValueReads"]

_HALF_AND_FLOAT: Final = {torch.float16, torch.float32}


def _products() -> frozenset[Callable[..., Any]]:
    """Return torch's matrix products, convolutions, recurrent layers and norms.

    If torch has several Python objects for one function, such as ``torch.conv1d`` and ``F.conv1d``,
    the result contains all these objects.
    """
    both = ("matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "dot", "inner")
    names = {
        F: ("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
            "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
            "multi_head_attention_forward", "layer_norm", "group_norm", "batch_norm",
            "instance_norm", "prelu"),
        torch: (*both, "conv1d", "conv2d", "conv3d", "lstm", "gru", "rnn_tanh", "einsum",
                "tensordot", "chain_matmul", "cdist"),
        torch.Tensor: (*both, "__matmul__", "__rmatmul__"),
        torch.linalg: ("matmul", "multi_dot", "vecdot"),
        torch._VF: ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell",
                    "rnn_tanh_cell", "rnn_relu_cell"),
    }  # fmt: skip
    return frozenset(
        getattr(place, name)
        for place, members in names.items()
        for name in members
        if hasattr(place, name)
    )


_PRODUCTS: Final = _products()
_NORMS: Final = frozenset({F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm})

_NORMS_WITH_STATISTICS: Final = frozenset({F.batch_norm, F.instance_norm})


def _keep_statistics(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    args32: Sequence[Any],
    kwargs32: dict[str, Any],
) -> None:
    """Copy the running statistics that a norm updated in float32 to the model's statistics.

    The updated float32 statistics are rounded to the dtype of the model's running statistics.
    """
    for position, name in ((1, "running_mean"), (2, "running_var")):
        own, new = (
            given[position] if len(given) > position else named.get(name)
            for given, named in ((args, kwargs), (args32, kwargs32))
        )
        if own is not new and own is not None:
            own.copy_(new)


class MixedPrecision(TorchFunctionMode):
    """A torch function mode that computes float16 matrix products with the device's precision.

    Matrix products of float16 tensors are computed in float32, and the result is rounded to float16
    at the end. If a matrix product gets both float16 and float32 tensors, the result has the dtype
    of the activations. Weights with another dtype than the activations are cast to the dtype of the
    activations. Norm layers are computed in float32 and return the dtype of the activations. On a
    CPU, matrix products in float32 are about 20 to 70 times faster than torch's float16 kernels.

    Attributes:
        met_half: Whether any matrix product, convolution, recurrent layer or norm had a float16
            argument. If ``met_half`` is False, MixedPrecision did not change any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met_half = False

    def __enter__(self) -> MixedPrecision:
        # Recurrent layers reject inputs and weights of different dtypes in Python code, before they
        # call a torch function.
        nn.RNNBase.check_input = _check_recurrent_input  # type: ignore[assignment,method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        nn.RNNBase.check_input = _CHECK_INPUT  # type: ignore[method-assign]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        floats = [t for t in tensors_of((args, kwargs)) if _is_half_or_float(t)]
        if not any(t.dtype == torch.float16 for t in floats):
            return func(*args, **kwargs)
        self.met_half = True
        wanted = floats[0].dtype
        if func not in _NORMS:
            # If the activations are float16, a float32 weight is rounded to float16 before the
            # matrix product.
            args, kwargs = _cast(args, wanted), _cast(kwargs, wanted)
        args32, kwargs32 = _cast(args, torch.float32), _cast(kwargs, torch.float32)
        result = folded_now(func)(*args32, **kwargs32)
        if func in _NORMS_WITH_STATISTICS:
            _keep_statistics(args, kwargs, args32, kwargs32)
        return _cast(result, wanted)


_CHECK_INPUT: Final = nn.RNNBase.check_input


def _check_recurrent_input(
    layer: nn.RNNBase, input: torch.Tensor, batch_sizes: torch.Tensor | None
) -> None:
    """Check a recurrent layer's input like torch, but accept both float16 and float32."""
    weights = layer._flat_weights[0]
    if _is_half_or_float(input) and isinstance(weights, torch.Tensor):
        input = input.to(weights.dtype)
    _CHECK_INPUT(layer, input, batch_sizes)


def _is_half_or_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF_AND_FLOAT


def _cast(value: Any, dtype: torch.dtype) -> Any:
    # The function ``_cast`` must be fast, because it is called for every matrix product. Therefore
    # ``_cast`` does not use map_tensors(), which takes twice as long.
    if _is_half_or_float(value):
        return value.to(dtype)
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value


class OneThread:
    """A context manager that makes torch run every operation on one thread.

    PyTorch splits sums into one part for each thread, so the bits of a sum depend on the number of
    threads. By default, the number of threads depends on how many instances share the cores of a
    host.
    """

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)


class WithoutValueReads:
    """A context manager that stops torch's own code from reading the values of tensors.

    On an IPU, the values of tensors are not available when a model is compiled. Therefore torch's
    own code must not read the values of tensors while a model runs. Inside the ``with`` block,
    torch's distributions check their arguments only if the program passes ``validate_args=True``.
    Torch's fast path for attention is disabled, because the fast path reads padding masks to pack
    samples.
    """

    def __enter__(self) -> None:
        self._before = Distribution._validate_args, torch.backends.mha.get_fastpath_enabled()
        self._set(False, False)

    def __exit__(self, *_: object) -> None:
        self._set(*self._before)

    def _set(self, validate: bool, fast_attention: bool) -> None:
        Distribution.set_default_validate_args(validate)
        torch.backends.mha.set_fastpath_enabled(fast_attention)
