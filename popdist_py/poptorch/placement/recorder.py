"""The recorder: follows the blocks and operations of one traced forward.

Annotations tell the recorder where blocks begin and end. The strategy decides where a block goes.
The result is a Placement. The recorder computes no numbers, and no numbers depend on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from popdist_py.poptorch import forward_phase
from popdist_py.poptorch.calls.nested_values import tensors_of
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.placement.block_places import BlockPlace, Placement, Strategy
from popdist_py.poptorch.placement.operation_names import OperationNames
from popdist_py.poptorch.placement.operator_limits import (
    check_limits,
    refuse_reading,
    values_needed,
)
from popdist_py.poptorch.placement.overlapped_io import OverlapConditions, checked_overlap

__all__ = ["current_recorder", "on_host", "record_placement"]


# Told the name and the value of an operation's result.
Watch = Callable[[str, torch.Tensor], None]

_BEFORE_BLOCKS: Final = BlockPlace(None, ipu=0, stage=0)


class _Recorder(TorchFunctionMode):
    """Follows the blocks and operations of one forward."""

    def __init__(
        self,
        strategy: Strategy,
        module: Any,
        inputs: Sequence[torch.Tensor],
        watch: Watch,
        *,
        module_scopes: bool,
    ) -> None:
        super().__init__()
        self._place = strategy._placer()
        self._module = module if isinstance(module, torch.nn.Module) else None
        self._watch = watch
        self.names = OperationNames(self._module if module_scopes else None)
        # Of the function of torch that runs, and which one it is in order: what operations of
        # torch's own below it belong together.
        self.function, self.calls = "", 0
        self._active: BlockPlace | None = _BEFORE_BLOCKS
        self._next_auto_id = 0
        self.blocks: list[BlockPlace] = []
        self.operations: list[tuple[str, int]] = []
        self.ipu_of_parameter: dict[str, int] = {}
        # Tensors on the device, and whether their values depend on inputs or parameters rather
        # than on buffers alone. Of a module only: of another callable, all are.
        self._on_device = WeakIdKeyDictionary()
        self._mark(inputs, depends=True)
        self.reads_buffers = False
        self.idle_settings: dict[str, None] = {}  # a set in order
        self._on_host = 0  # how many host functions are being run
        self._names: dict[int, str] = {}

    @property
    def place(self) -> BlockPlace | None:
        """Where what runs now goes; None after the end of a block."""
        return self._active

    # What annotations tell:

    def begin_block(self, user_id: Any, ipu_id: int | None) -> None:
        """Everything from here belongs to this block."""
        if user_id is None:
            user_id = str(self._next_auto_id)
            self._next_auto_id += 1
        self.begin_placed(self._place(user_id, ipu_id))

    def begin_placed(self, block: BlockPlace) -> None:
        """Everything from here belongs to this block, wherever the strategy has its blocks."""
        self._active = block
        self.blocks.append(block)

    def end_block(self) -> None:
        """No block is active from here, whatever was before the block that ends."""
        self._active = None

    def restart_auto_ids(self) -> None:
        """Begin to count blocks without an id from 0 again."""
        self._next_auto_id = 0

    def use_idle_settings(self, names: Iterable[str]) -> None:
        """The forward uses an operator with these settings, which do nothing here."""
        self.idle_settings.update(dict.fromkeys(names))

    # What the forward does:

    def begin_forward(self) -> None:
        """Take note of the state on the device (that of a functional call included)."""
        if self._module is None:
            return
        for name, parameter in self._module.named_parameters():
            self._names[id(parameter)] = name
            self._on_device[parameter] = True
        self._mark(self._module.buffers(), depends=False)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Run the enclosed code on the host, where no limits of the device hold."""
        self._on_host += 1
        try:
            yield
        finally:
            self._on_host -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" or name in _NO_OPERATIONS:
            return func(*args, **(kwargs or {}))
        inputs = tensors_of((args, kwargs))
        if not self._on_host:
            self._look_at_values(name, args)
            if any(map(self._only_device_knows, inputs)):
                check_limits(name, args, kwargs or {})
        self.function, self.calls = name, self.calls + 1
        result = func(*args, **(kwargs or {}))
        results = tensors_of(result)
        if results and any(map(self._is_on_device, inputs)):
            self._operation(func, inputs, results)
            self._mark(results, depends=any(map(self._only_device_knows, inputs)))
        return result

    def _look_at_values(self, name: str, args: Any) -> None:
        """Note what a call reads in Python; refuse it if only the device knows that."""
        read = values_needed(name, args)
        if any(map(self._only_device_knows, read)):
            refuse_reading(name)
        self.reads_buffers |= any(tensor in self._on_device for tensor in read)

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return self._module is None or tensor in self._on_device

    def _only_device_knows(self, tensor: torch.Tensor) -> bool:
        return bool(self._on_device.get(tensor, False))

    def _operation(
        self, func: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        name = self.names.next(func)
        if self._active is None:
            raise Error(
                f"No active Block: all operations must belong to a Block once Blocks are used, but "
                f"{name} comes after the end of one. Move it into a poptorch.Block, or use "
                "poptorch.BeginBlock, which has no end"
            )
        for index, tensor in enumerate(results):
            one = f"{name}:{index}" if index else name
            self.operations.append((one, self._active.ipu))
            self._watch(one, tensor)
        for tensor in inputs:
            parameter = self._names.get(id(tensor))
            if parameter is not None:
                self.ipu_of_parameter.setdefault(parameter, self._active.ipu)

    def _mark(self, tensors: Iterable[torch.Tensor], depends: bool) -> None:
        for tensor in tensors:
            self._on_device[tensor] = depends or self._only_device_knows(tensor)


# Neither read nor make a value on the device.
_NO_OPERATIONS: Final = frozenset(
    {"requires_grad_", "register_hook", "retain_grad", "__set__", "as_subclass", "__format__"}
)


class _Current(threading.local):
    recorder: _Recorder | None = None


_current = _Current()


def current_recorder() -> _Recorder | None:
    """Return the recorder of the forward that is being traced; None everywhere else."""
    return _current.recorder


@contextmanager
def on_host() -> Iterator[None]:
    """Mark the enclosed code as Python that has to run on the host, each time the model runs."""
    forward_phase.require_python()
    recorder = _current.recorder
    with recorder.on_host() if recorder else nullcontext():
        yield


@contextmanager
def record_placement(
    strategy: Strategy,
    module: Any,
    training: bool,
    overlap: OverlapConditions | None = None,
    *,
    inputs: Sequence[torch.Tensor],
    watch: Watch = lambda *_: None,
    module_scopes: bool = True,
) -> Iterator[Placement]:
    """Record where the blocks of the enclosed forward of ``module`` go.

    Args:
        strategy: the execution strategy.
        module: the user's module, or any callable.
        training: whether a backward pass follows.
        overlap: what the options say of overlapped I/O; None leaves its rules unchecked.
        inputs: the tensors of the forward's arguments, those inside custom types included.
        watch: told the name and the value of every operation's result.
        module_scopes: whether the names of operations begin with those of their modules.

    Yields:
        The placement; it is filled when the context ends.

    Raises:
        AssertionError: a block that the strategy does not know or cannot place.
        Error: an operation after the end of a Block and before the next one, or one that the
            device lacks; overlapped I/O that breaks a rule.
    """
    placement = Placement()
    recorder = _Recorder(strategy, module, inputs, watch, module_scopes=module_scopes)
    hook = None
    if isinstance(module, torch.nn.Module):
        hook = module.register_forward_pre_hook(lambda *_: recorder.begin_forward(), prepend=True)
    previous, _current.recorder = _current.recorder, recorder
    try:
        with (
            checked_overlap(module, overlap, inputs) if overlap else nullcontext(),
            recorder.names.following_modules(),
            recorder,
        ):
            yield placement
    finally:
        _current.recorder = previous
        if hook is not None:
            hook.remove()
    ipus = [ipu for _, ipu in recorder.operations] + [block.ipu for block in recorder.blocks]
    forward_stages = _num_forward_stages(recorder.blocks)
    placement.blocks = tuple(recorder.blocks)
    placement.num_ipus = max(ipus, default=0) + 1
    placement.num_stages = 2 * forward_stages - 1 if training else forward_stages
    placement.operations = tuple(recorder.operations)
    placement.ipu_of_parameter = recorder.ipu_of_parameter
    placement.reads_buffers = recorder.reads_buffers
    placement.idle_settings = tuple(recorder.idle_settings)
    if isinstance(module, torch.nn.Module):
        for name, _ in module.named_parameters():
            placement.ipu_of_parameter.setdefault(name, 0)


def _num_forward_stages(blocks: list[BlockPlace]) -> int:
    return 1 + sum(block.ipu != following.ipu for block, following in pairwise(blocks))
