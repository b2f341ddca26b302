"""The class BlockRecorder, which records the blocks and operations of one forward pass.

A block is a group of operations on one IPU. Annotations in the program call the ``BlockRecorder``
where blocks begin and end. The execution strategy of the model chooses the IPU and the stage of
each block. The method ``BlockRecorder.placement`` returns the chosen IPUs and stages. A
``BlockRecorder`` does not change the results of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from popdist_py.ipu.graph import stages_of
from popdist_py.poptorch.calls.nested_values import tensors_of
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.tracing.block_places import BlockPlace, ForwardPlaces, Strategy
from popdist_py.poptorch.tracing.current_forward import current_watch, require_python
from popdist_py.poptorch.tracing.operation_names import OperationNames
from popdist_py.poptorch.tracing.operator_limits import (
    check_limits,
    refuse_reading,
    values_needed,
)

__all__ = ["BlockRecorder", "current_blocks", "on_host"]

# A function that is called with the name and the value of an operation's result.
TellResult = Callable[[str, torch.Tensor], None]

_BEFORE_BLOCKS: Final = BlockPlace(None, ipu=0, stage=0)


class BlockRecorder:
    """The recorder of the blocks and operations of one forward pass.

    Args:
        strategy: The execution strategy, which chooses the IPU and the stage of each block.
        module: The user's torch module, or another callable, whose forward pass is recorded.
        inputs: The tensors in the arguments of the forward method, including tensors inside custom
            types.
        tell_result: A function that is called with the name and the value of each operation's
            result.
        module_scopes: Whether the names of operations begin with the name of the module that calls
            them.

    Attributes:
        names: The ``OperationNames`` object, which gives names to the operations.
        function: The name of the torch function that is running now.
        calls: The number of calls of torch functions so far, including the running function.
        blocks: The recorded blocks, in the order of execution.
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
        # The keys of the dictionary ``_on_device`` are the tensors that are on the device. In
        # ``_on_device``, the value is True for a tensor that depends on an input or a parameter. In
        # ``_on_device``, the value is False for a tensor that depends on buffers only. If
        # ``module`` is not a torch module, all tensors count as tensors on the device.
        self._on_device = WeakIdKeyDictionary()
        self._mark(inputs, depends=True)
        self._reads_buffers = False
        # The names of the operator settings that do not have an effect in the emulation. The
        # dictionary ``_idle_settings`` is used as an ordered set.
        self._idle_settings: dict[str, None] = {}
        # The number of ``on_host`` contexts that are open now.
        self._on_host = 0
        self._names_of_parameters: dict[int, str] = {}

    @property
    def place(self) -> BlockPlace | None:
        """The block of the operations that run now; None after the end of a block."""
        return self._active

    # Annotations and operators in the user's program call the following methods.

    def begin_block(self, user_id: Any, ipu_id: int | None) -> None:
        """Begin a block, and let the execution strategy choose its IPU and stage."""
        if user_id is None:
            user_id = str(self._next_auto_id)
            self._next_auto_id += 1
        self.begin_placed(self._place(user_id, ipu_id))

    def begin_placed(self, block: BlockPlace) -> None:
        """Begin a block with the given IPU and stage, without a call of the execution strategy."""
        self._active = block
        self.blocks.append(block)

    def end_block(self) -> None:
        """End the current block.

        After a call of ``end_block``, no block is active, even if the ended block began inside
        another block.
        """
        self._active = None

    def restart_auto_ids(self) -> None:
        """Make the automatic ids of blocks, for blocks without an id, start at 0 again."""
        self._next_auto_id = 0

    def use_idle_settings(self, names: Iterable[str]) -> None:
        """Record the names of operator settings that do not have an effect in the emulation."""
        self._idle_settings.update(dict.fromkeys(names))

    # A ``ForwardWatch`` calls the following methods during the forward pass.

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Record the modules, parameters and buffers of the forward pass in the ``with`` block."""
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
        """Record the module's parameters and buffers as tensors on the device.

        When ``_begin_forward`` runs, ``torch.func.functional_call`` has already replaced
        parameters. Therefore the method records the tensors that replaced the parameters.
        """
        for name, parameter in module.named_parameters():
            self._names_of_parameters[id(parameter)] = name
            self._on_device[parameter] = True
        self._mark(module.buffers(), depends=False)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Run the ``with`` block on the host, where the limits of the device do not apply."""
        self._on_host += 1
        try:
            yield
        finally:
            self._on_host -= 1

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count a call of a torch function, and check that the device supports the call.

        Raises:
            Error: The device does not support the operation, or Python code reads a value that only
                the device can compute.
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
        """Record an operation and its results, if the operation runs on the emulated IPU.

        Raises:
            Error: The operation is between the end of a block and the beginning of the next block.
        """
        if _operation_name(func) is None:
            return
        inputs, results = tensors_of((args, kwargs)), tensors_of(result)
        if results and any(map(self._is_on_device, inputs)):
            self._operation(func, inputs, results)
            self._mark(results, depends=any(map(self._only_device_knows, inputs)))

    def _look_at_values(self, name: str, args: Any) -> None:
        """Check the tensors whose values a call reads in Python, and record reads of buffers.

        Raises:
            Error: The call reads a value in Python that only the device can compute.
        """
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
                f"No active Block: the operation {name} comes after the end of a Block, but in a "
                "model with Blocks, every operation must belong to a Block. Move the operation "
                "into a poptorch.Block, or use poptorch.BeginBlock, whose block extends to the "
                "next block"
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

    def placement(self, *, training: bool) -> ForwardPlaces:
        """Return the IPUs of all blocks, operations and parameters of the model.

        Args:
            training: Whether a backward pass follows the recorded forward pass.
        """
        ipus = [place.ipu for _, place in self._operations]
        ipus += [block.ipu for block in self.blocks]
        ipu_of_parameter = dict(self._ipu_of_parameter)
        if self._module is not None:
            for name, _ in self._module.named_parameters():
                ipu_of_parameter.setdefault(name, 0)
        stages = stages_of((place.phase, place.ipu) for _, place in self._operations)
        forward_stages = stages[-1] + 1 if stages else 1
        return ForwardPlaces(
            blocks=tuple(self.blocks),
            num_ipus=max(ipus, default=0) + 1,
            num_stages=2 * forward_stages - 1 if training else forward_stages,
            operations=tuple((name, place.ipu) for name, place in self._operations),
            ipu_of_parameter=ipu_of_parameter,
            reads_buffers=self._reads_buffers,
            idle_settings=tuple(self._idle_settings),
        )


# The names of torch functions that do not compute anything on the IPU.
_NO_OPERATIONS: Final = frozenset(
    {
        "__format__", "__get__", "__set__", "as_subclass", "register_hook", "requires_grad_",
        "retain_grad",
    }
)  # fmt: skip


def _operation_name(func: Any) -> str | None:
    """Return the name of a torch function; None if the function is not an operation."""
    name = getattr(func, "__name__", "")
    return None if name in _NO_OPERATIONS else name


def current_blocks() -> BlockRecorder | None:
    """Return the recorder of this thread's forward pass; None if blocks are not recorded."""
    watch = current_watch()
    return None if watch is None else watch.blocks


@contextmanager
def on_host() -> Iterator[None]:
    """Mark the ``with`` block as code that must run on the host in every forward pass."""
    require_python()
    blocks = current_blocks()
    with blocks.on_host() if blocks else nullcontext():
        yield
