"""Horovod's DistributedOptimizer, which reduces gradients over the ranks in the backward pass."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from popdist_py.errors import counted
from popdist_py.horovod.torch.allgather_ops import sparse_allreduce_async
from popdist_py.horovod.torch.allreduce_ops import allreduce_async_
from popdist_py.horovod.torch.basics import ProcessSet, check_process_set, global_process_set, size
from popdist_py.horovod.torch.calls import Average, ReduceOp, check_op, check_optimizer, is_whole
from popdist_py.horovod.torch.compression import Compression, Compressor, check_compression

__all__ = ["DistributedOptimizer"]

Parameter = torch.Tensor


@dataclass(frozen=True, slots=True)
class _Reduction:
    """The options of the reduction of gradients."""

    op: ReduceOp
    compression: type[Compressor]
    predivide_factor: float
    sparse_as_dense: bool

    def start(self, parameter: Parameter, name: str) -> Callable[[], None]:
        """Start to reduce the gradient of a parameter.

        Returns:
            A function that waits for the reduction and stores the result in the parameter.
        """
        if parameter.grad is None:
            # This rank's batch did not use the parameter, but the batch of another rank may have
            # used it. The missing gradient therefore counts as zeros in the reduction.
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        sparse_dim = gradient.sparse_dim() if gradient.is_sparse else 0
        if gradient.is_sparse and self.sparse_as_dense:
            gradient = gradient.to_dense()
        if gradient.is_sparse:
            wait = sparse_allreduce_async(gradient, name, self.op)

            def store_sparse() -> None:
                parameter.grad = wait()

            return store_sparse
        small, saved = self.compression.compress(gradient)
        # Gradients are divided by a factor before the sum, which can prevent overflow. The sum is
        # multiplied by the same factor.
        handle = allreduce_async_(
            small, name=name, op=self.op,
            prescale_factor=1.0 / self.predivide_factor, postscale_factor=self.predivide_factor,
        )  # fmt: skip

        def store() -> None:
            reduced = self.compression.decompress(handle.wait(), saved)
            if sparse_dim:
                # Some optimizers, such as SparseAdam, accept only sparse gradients.
                parameter.grad = reduced.to_sparse(sparse_dim)
            elif reduced is not gradient:
                gradient.copy_(reduced)

        return store


class _GradientReducer:
    """Reduces gradients in the same order on all ranks.

    Gradients are reduced in the reverse order of the parameters, because backward passes compute
    gradients in roughly this order. The reduction of a gradient starts when the gradient is
    complete and all earlier reductions have started.

    Args:
        names: The name of each parameter, in the order of the optimizer.
        passes: The number of backward passes whose gradients are added up before the reduction.
        reduction: The options of the reduction.
    """

    def __init__(self, names: dict[Parameter, str], passes: int, reduction: _Reduction) -> None:
        self.passes = passes
        self._reduction = reduction
        self._names: dict[Parameter, str] = {}
        self._order: list[Parameter] = []
        self._passes_left: dict[Parameter, int] = {}
        self._started: list[Callable[[], None]] = []
        for parameter, name in reversed(names.items()):
            self.add(parameter, name)

    def add(self, parameter: Parameter, name: str) -> None:
        """From now on, also reduce the gradient of ``parameter``."""
        self._names[parameter] = name
        self._order.append(parameter)
        self._passes_left[parameter] = self.passes
        # A parameter may exist longer than its optimizer. The hook uses a weak reference, so that
        # it does nothing after the optimizer was deleted.
        on_gradient = weakref.WeakMethod(self._on_gradient)

        def hook(parameter: Parameter) -> None:
            if (method := on_gradient()) is not None:
                method(parameter)

        parameter.register_post_accumulate_grad_hook(hook)

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._names

    @property
    def is_pending(self) -> bool:
        """Whether a backward pass has computed gradients since the last ``wait`` or ``forget``."""
        return any(left < self.passes for left in self._passes_left.values())

    def _on_gradient(self, parameter: Parameter) -> None:
        if self._passes_left[parameter] == 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[parameter] -= 1
        for ready in self._order[len(self._started) :]:
            if self._passes_left[ready] > 0:
                return
            self._start(ready)

    def _start(self, parameter: Parameter) -> None:
        with torch.no_grad():
            self._started.append(self._reduction.start(parameter, self._names[parameter]))

    def wait(self) -> None:
        """Start the reductions that are still missing, and wait until all gradients are stored."""
        for parameter in self._order[len(self._started) :]:
            # Frozen parameters are skipped, because weight decay would change a parameter with a
            # gradient of zeros.
            if parameter.requires_grad:
                self._start(parameter)
        with torch.no_grad():
            for store in self._started:
                store()
        self.forget()

    def forget(self) -> None:
        """Discard the started reductions, so that the gradients of a new step can be reduced."""
        self._started.clear()
        self._passes_left = dict.fromkeys(self._order, self.passes)


class _DistributedOptimizer(torch.optim.Optimizer):
    """The first base class of a distributed optimizer.

    The second base class is the class of the optimizer that the program passed.
    """

    _reducer: _GradientReducer | None
    _should_synchronize = True
    _synchronized = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes for each step, beginning with the next step."""
        _check_passes(passes)
        if self._reducer is not None:
            self._reducer.passes = passes
            self._reducer.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer; their gradients are also reduced."""
        super().add_param_group(param_group)
        self._add_missing()

    def _add_missing(self) -> None:
        """Also reduce the gradients of parameters that the program has added or unfrozen."""
        if self._reducer is not None:
            for name, parameter in _unnamed(self):
                if parameter.requires_grad and parameter not in self._reducer:
                    self._reducer.add(parameter, name)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for example before clipping them."""
        if self._reducer is not None:
            self._add_missing()
            self._reducer.wait()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step()`` in the ``with`` block use the gradients as they are, without a reduction.

        Programs call ``synchronize()`` before the block.
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until all gradients are reduced, and then update the parameters."""
        if self._should_synchronize and closure is not None:
            closure = self._synchronised(closure)
        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to "
                    "consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        result = super().step(closure)
        self._synchronized = False
        return result

    # Without this attribute, torch would run the optimizer's step hooks twice: for this method, and
    # for the method of the base class, which this method calls.
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronised(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return call

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset all gradients. Programs must not call this method between backward and step.

        Raises:
            AssertionError: The reduction of the gradients has not finished.
        """
        if self._reducer is not None and self._reducer.is_pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause "
                "a race condition."
            )
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the state of an optimizer, and discard the started reductions of gradients."""
        if self._reducer is not None:
            self._reducer.forget()
        self._synchronized = False
        super().load_state_dict(*args, **kwargs)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,  # noqa: ARG001
    groups: Any = None,  # noqa: ARG001
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer that reduces the gradients over all ranks before each step.

    The returned optimizer is an instance of the class of ``optimizer``. The returned optimizer
    shares the parameter groups and the state of ``optimizer``.

    Args:
        optimizer: An optimizer of ``torch.optim``, or an instance of a subclass.
        named_parameters: The names of the parameters for error messages, for example
            ``model.named_parameters()``.
        compression: The compressor, which converts each gradient before and after the reduction.
        backward_passes_per_step: Each rank adds up the gradients of this number of backward passes
            before a step.
        op: The reduction operator. All operators of ``allreduce`` are accepted.
        gradient_predivide_factor: Gradients are divided by this factor before the sum, and
            multiplied by it after the sum.
        num_groups: This argument is ignored, because it does not change results.
        groups: This argument is ignored, because it does not change results.
        sparse_as_dense: If True, sparse gradients are reduced as dense tensors.
        process_set: Only ``global_process_set`` is accepted.

    Raises:
        ValueError: An argument has an invalid value.
        TypeError: ``optimizer`` is not a torch optimizer, or ``compression`` is not a compressor.
        NotImplementedError: Adasum is not available.
    """
    check_process_set(process_set)
    check_compression(compression)
    check_optimizer("DistributedOptimizer", optimizer)
    reduce_op = check_op(op)
    _check_passes(backward_passes_per_step)
    if gradient_predivide_factor != 1.0 and reduce_op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    names = _names_of(optimizer, named_parameters)
    kind = type(optimizer)
    result: Any = object.__new__(type(kind.__name__, (_DistributedOptimizer, kind), {}))
    # A scheduler may have replaced the method ``optimizer.step``. This replacement is not copied,
    # because it does not reduce gradients.
    result.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    reduction = _Reduction(reduce_op, compression, gradient_predivide_factor, sparse_as_dense)
    trained = {p: names[p] for p in names if p.requires_grad}
    result._reducer = (
        _GradientReducer(trained, backward_passes_per_step, reduction) if size() > 1 else None
    )
    return result


def _check_passes(passes: int) -> None:
    if not is_whole(passes) or passes <= 0:
        raise ValueError(
            f"backward_passes_per_step={passes!r}: backward_passes_per_step must be > 0 and an "
            "integer"
        )


def _unnamed(optimizer: torch.optim.Optimizer) -> list[tuple[str, Parameter]]:
    """Return each parameter with a generated name that contains its indices in the optimizer."""
    return [
        (f"allreduce.noname.{i}.{j}", parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    ]


def _names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]] | None
) -> dict[Parameter, str]:
    """Return the name of each parameter, in the order of the optimizer.

    Raises:
        ValueError: ``named_parameters`` does not contain pairs, contains a name twice, or does not
            contain all parameters of the optimizer.
    """
    placed = _unnamed(optimizer)
    named = list(named_parameters or ())
    if not named:
        return {parameter: name for name, parameter in placed}
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    all_names = [name for name, _ in named]
    if repeated := sorted({name for name in all_names if all_names.count(name) > 1}):
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(repeated)
        )
    names = {parameter: name for name, parameter in named}
    if missing := [place for place, parameter in placed if parameter not in names]:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{len(missing)} of {counted(len(placed), 'parameter')} of the optimizer. Pass "
            "model.named_parameters() of the whole model, or omit named_parameters"
        )
    return {parameter: names[parameter] for _, parameter in placed}
