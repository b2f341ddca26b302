"""Follows the blocks and the operations of one forward.

Annotations tell the recorder where blocks begin and end. The strategy decides where a block goes.
The result is a Placement. The recorder computes no numbers, and no numbers depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from popdist_py.poptorch.calls.nested_values import tensors_of
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.tracing.block_places import BlockPlace, Placement, Strategy, stages_of
from popdist_py.poptorch.tracing.current_forward import current_watch, require_python
from popdist_py.poptorch.tracing.operation_names import OperationNames
from popdist_py.poptorch.tracing.operator_limits import (
    check_limits,
    refuse_reading,
    values_needed,
)

__all__ = ["BlockRecorder", "current_blocks", "on_host"]

# Told the name and the value of an operation's result.
TellResult = Callable[[str, torch.Tensor], None]

_BEFORE_BLOCKS: Final = BlockPlace(None, ipu=0, stage=0)


class BlockRecorder:
    """Follows the blocks and operations of one forward.

    Args:
        strategy: The execution strategy.
        module: The user's module, or any callable.
        inputs: The tensors of the forward's arguments, those inside custom types included.
        tell_result: Told the name and the value of each operation's result.
        module_scopes: Whether the names of operations begin with those of their modules.

    Attributes:
        names: Names the operations.
        function: Name of torch's function that runs.
        calls: How many of torch's functions ran before and with this one.
        blocks: The blocks, in the order in which they began.
    """

    def __init__(
        self,
        strategy: Strategy,
        module: Any,
        inputs: Sequence[torch.Tensor],
        *,
        tell_result: TellResult = lambda *_: None,
        module_scopes: bool = True,
    ) -> None:
        self._place = strategy._placer()
        self._module = module if isinstance(module, torch.nn.Module) else None
        self._tell_result = tell_result
        self.names = OperationNames(self._module if module_scopes else None)
        self.function, self.calls = "", 0
        self._active: BlockPlace | None = _BEFORE_BLOCKS
        self._next_auto_id = 0
        self.blocks: list[BlockPlace] = []
        self._operations: list[tuple[str, BlockPlace]] = []
        self._ipu_of_parameter: dict[str, int] = {}
        # The tensors on the device. The value tells whether a tensor depends on inputs or
        # parameters, and not on buffers alone. Of a callable that is no module, all are there.
        self._on_device = WeakIdKeyDictionary()
        self._mark(inputs, depends=True)
        self._reads_buffers = False
        self._idle_settings: dict[str, None] = {}  # a set in order
        self._on_host = 0  # how many functions of the host run
        self._names_of_parameters: dict[int, str] = {}

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
        self._idle_settings.update(dict.fromkeys(names))

    # What the forward does:

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Follow the submodules of the enclosed forward, and the state that it begins with."""
        with self.names.following_modules():
            if self._module is None:
                yield
                return
            hook = self._module.register_forward_pre_hook(self._begin_forward, prepend=True)
            try:
                yield
            finally:
                hook.remove()

    def _begin_forward(self, module: torch.nn.Module, _: Any) -> None:
        """Take note of the state on the device (that of a functional call included)."""
        for name, parameter in module.named_parameters():
            self._names_of_parameters[id(parameter)] = name
            self._on_device[parameter] = True
        self._mark(module.buffers(), depends=False)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Run the enclosed code on the host, where no limits of the device hold."""
        self._on_host += 1
        try:
            yield
        finally:
            self._on_host -= 1

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count a call, and refuse it if the device cannot do it.

        Raises:
            Error: The device lacks the operation, or does not know a value that the call reads.
        """
        name = _operation_name(func)
        if name is None:
            return
        if not self._on_host:
            self._look_at_values(name, args)
            if any(map(self._only_device_knows, tensors_of((args, kwargs)))):
                check_limits(name, args, kwargs)
        self.function, self.calls = name, self.calls + 1

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an operation on the device.

        Raises:
            Error: The operation comes after the end of a block and before the next one.
        """
        if _operation_name(func) is None:
            return
        inputs, results = tensors_of((args, kwargs)), tensors_of(result)
        if results and any(map(self._is_on_device, inputs)):
            self._operation(func, inputs, results)
            self._mark(results, depends=any(map(self._only_device_knows, inputs)))

    def _look_at_values(self, name: str, args: Any) -> None:
        """Note what a call reads in Python; refuse it if only the device knows that."""
        read = values_needed(name, args)
        if any(map(self._only_device_knows, read)):
            refuse_reading(name)
        self._reads_buffers |= any(tensor in self._on_device for tensor in read)

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
            self._operations.append((one, self._active))
            self._tell_result(one, tensor)
        for tensor in inputs:
            parameter = self._names_of_parameters.get(id(tensor))
            if parameter is not None:
                self._ipu_of_parameter.setdefault(parameter, self._active.ipu)

    def _mark(self, tensors: Iterable[torch.Tensor], depends: bool) -> None:
        for tensor in tensors:
            self._on_device[tensor] = depends or self._only_device_knows(tensor)

    def placement(self, *, training: bool) -> Placement:
        """Return where everything went.

        Args:
            training: Whether a backward pass follows.
        """
        ipus = [place.ipu for _, place in self._operations]
        ipus += [block.ipu for block in self.blocks]
        ipu_of_parameter = dict(self._ipu_of_parameter)
        if self._module is not None:
            for name, _ in self._module.named_parameters():
                ipu_of_parameter.setdefault(name, 0)
        stages = stages_of((place.phase, place.ipu) for _, place in self._operations)
        forward_stages = stages[-1] + 1 if stages else 1
        return Placement(
            blocks=tuple(self.blocks),
            num_ipus=max(ipus, default=0) + 1,
            num_stages=2 * forward_stages - 1 if training else forward_stages,
            operations=tuple((name, place.ipu) for name, place in self._operations),
            ipu_of_parameter=ipu_of_parameter,
            reads_buffers=self._reads_buffers,
            idle_settings=tuple(self._idle_settings),
        )


# These functions neither read nor make a value on the device.
_NO_OPERATIONS: Final = frozenset(
    {
        "__format__", "__get__", "__set__", "as_subclass", "register_hook", "requires_grad_",
        "retain_grad",
    }
)  # fmt: skip


def _operation_name(func: Any) -> str | None:
    """Return the name of torch's function, or None if it is no operation."""
    name = getattr(func, "__name__", "")
    return None if name in _NO_OPERATIONS else name


def current_blocks() -> BlockRecorder | None:
    """Return the recorder of the forward that this thread runs, or None."""
    watch = current_watch()
    return None if watch is None else watch.blocks


@contextmanager
def on_host() -> Iterator[None]:
    """Mark the enclosed code as Python that has to run on the host, each time the model runs."""
    require_python()
    blocks = current_blocks()
    with blocks.on_host() if blocks else nullcontext():
        yield
