"""The class DeviceState, which stores the device's tensors for a module and its submodules.

The device is an emulated IPU. The device's tensors are copies of the tensors of the user's module.
The tensors of the user's module are called the host's tensors. While a forward pass runs, the
``__dict__`` of every module object is replaced by a second ``__dict__`` that holds device tensors.
Because the module objects stay the same, their hooks, bound methods and closures also use the
device's tensors. The host's tensors keep their values until the device's tensors are copied to the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.weights.gradient_hooks import GradientHooks
from popdist_py.poptorch.weights.module_attributes import ModuleAttributes
from popdist_py.poptorch.weights.replica_grouping import Grouping, grouping_of

__all__ = ["DeviceState", "Precision"]

Precision = Callable[[torch.dtype], torch.dtype]


class DeviceState:
    """The device's parameters, buffers and other tensors for the module ``top`` and its submodules.

    Args:
        top: The module whose forward pass runs.
        owner: The user's module. ``top`` is ``owner`` itself or a shallow copy of ``owner``.
        precision: A function that returns the dtype on the device for a dtype on the host.
        num_replicas: The number of replicas of all instances together.
        copied: A function that makes a device tensor from a host tensor and a dtype. By default,
            the device tensor gets the values of the host tensor.

    Attributes:
        parameters: The device's parameters by name. If groups of replicas have different values of
            a parameter, the dict ``parameters`` has one entry for each group, such as
            ``weight[0]``.
        buffers: The device's buffers by name. If replicas have different values of a buffer, the
            dict ``buffers`` contains the buffer of the first replica on this instance.
        gradient_hooks: The hooks that the program registered on its parameters' gradients; None for
            an inference model.
        attributes: The object that stores those attributes of the modules that are not parameters,
            buffers or submodules.

    Raises:
        Error: A buffer is not a plain tensor, or a replica-grouped parameter does not have exactly
            one row for each replica group.
    """

    def __init__(
        self,
        top: nn.Module,
        owner: nn.Module,
        precision: Precision,
        num_replicas: int = 1,
        copied: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        self._precision = precision
        self._copied = copied or _copied
        self._device_of: dict[int, torch.Tensor] = {}
        self._grouped: dict[int, tuple[Grouping, list[nn.Parameter]]] = {}
        self._hosts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stacks: dict[str, torch.Tensor] = {}
        self._places: list[tuple[dict[str, Any], str, list[torch.Tensor]]] = []
        self._num_replicas = num_replicas
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.gradient_hooks: GradientHooks | None = None
        with torch._C.DisableTorchFunctionSubclass():
            self._copy_parameters(top)
            self._copy_buffers(top)
            self._views = self._make_views(top, owner)
        self.attributes = ModuleAttributes(self._views)

    # -- methods that make the device's tensors ------------------------------------------------

    def _copy_parameters(self, top: nn.Module) -> None:
        """Make the device's copies of the module's parameters.

        Modules that share a host parameter also share the device parameter.
        """
        for name, host in top.named_parameters(remove_duplicate=True):
            grouping = grouping_of(host)
            # Device parameters must be contiguous like their gradients, because torch's fused
            # optimisers ignore strides.
            data = self._copied(host, self._precision(host.dtype)).contiguous()
            if grouping is None:
                self.parameters[name] = nn.Parameter(data, requires_grad=host.requires_grad)
                self._device_of[id(host)] = self.parameters[name]
                self._hosts.append((host, self.parameters[name]))
                continue
            rows = [nn.Parameter(row.clone(), host.requires_grad) for row in data]
            grouping.check(name, host, self._num_replicas)
            self.parameters.update({f"{name}[{group}]": row for group, row in enumerate(rows)})
            self._device_of[id(host)] = rows[0]
            self._grouped[id(host)] = (grouping, rows)

    def _copy_buffers(self, top: nn.Module) -> None:
        for name, host in top.named_buffers(remove_duplicate=True):
            if not _is_plain(host):
                raise Error(
                    f"The buffer {name} of the model is a {type(host).__name__}: a buffer must be "
                    "a plain torch.Tensor"
                )
            self.buffers[name] = self._copied(host, self._precision(host.dtype))
            self._device_of[id(host)] = self.buffers[name]
            self._hosts.append((host, self.buffers[name]))

    def _make_views(
        self, top: nn.Module, owner: nn.Module
    ) -> list[tuple[nn.Module, dict[str, Any]]]:
        views: list[tuple[nn.Module, dict[str, Any]]] = []
        for module in top.modules():
            view = {key: self._device_attribute(value) for key, value in vars(module).items()}
            for group in ("_parameters", "_buffers"):
                view[group] = {
                    key: None if value is None else self._device_of[id(value)]
                    for key, value in vars(module)[group].items()
                }
            view["_modules"] = dict(vars(module)["_modules"])
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                view["sparse"] = False  # The device supports only dense gradients.
            views.append((module, view))
            self._places += [
                (view["_parameters"], key, list(self._grouped[id(value)][1]))
                for key, value in vars(module)["_parameters"].items()
                if id(value) in self._grouped
            ]
        if owner is not top:
            views.append((owner, views[0][1]))
        return views

    def _device_attribute(self, value: Any) -> Any:
        """Return the device's value of a plain attribute (which is not a parameter or buffer).

        If a plain attribute refers to a parameter or a buffer of the model, its value on the device
        is the device's copy of the parameter or buffer. Any other tensor in a plain attribute is
        copied to the device.
        """
        if isinstance(value, torch.Tensor):
            device = self._device_of.get(id(value))
            if device is not None:
                return device
            return self._copied(value, self._precision(value.dtype))
        if type(value) in (list, tuple) and any(id(item) in self._device_of for item in value):
            return type(value)(self._device_of.get(id(item), item) for item in value)
        return value

    # -- methods for tensors that differ between replicas -------------------------------------

    def give_replicas_buffers(self, names: frozenset[str], replicas: int) -> None:
        """Make separate copies of the named buffers for each replica of this instance.

        Args:
            names: The names of the buffers.
            replicas: The number of replicas of this instance.
        """
        for name in sorted(names):
            buffer = self.buffers[name]
            stack = torch.stack([buffer] * replicas)
            self._stacks[name] = stack
            rows = list(stack.unbind())
            self.buffers[name] = rows[0]
            self._hosts = [
                (host, rows[0] if device is buffer else device) for host, device in self._hosts
            ]
            self._places += [
                (view["_buffers"], key, rows)
                for _, view in self._views
                for key, value in view["_buffers"].items()
                if value is buffer
            ]

    @property
    def has_own_tensors(self) -> bool:
        """Whether the replicas have separate buffers or separate replica-grouped parameters."""
        return bool(self._places)

    @property
    def has_groups(self) -> bool:
        """Whether groups of replicas have different values of a parameter."""
        return bool(self._grouped)

    def select(self, local_replica: int, global_replica: int) -> None:
        """Put the tensors of one replica into the modules before the replica's forward pass.

        Args:
            local_replica: The index of the replica on this instance.
            global_replica: The index of the replica among the replicas of all instances.
        """
        groups = {
            id(rows[0]): grouping.group_of(global_replica, self._num_replicas)
            for grouping, rows in self._grouped.values()
        }
        for place, key, rows in self._places:
            place[key] = rows[groups.get(id(rows[0]), local_replica)]

    def stacked_buffers(self) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """Return the buffers with a separate copy for every replica of this instance.

        Returns:
            One tuple for each module attribute that stores a buffer with separate copies. Each
            tuple contains the module's dictionary that holds the buffer, the buffer's key in the
            dictionary, and a tensor that contains the buffer's copies of all replicas of this
            instance.
        """
        stacks = {stack.data_ptr(): stack for stack in self._stacks.values()}
        return [
            (place, key, stacks[rows[0].data_ptr()])
            for place, key, rows in self._places
            if rows[0].data_ptr() in stacks
        ]

    def buffers_of_replicas(self, names: frozenset[str]) -> dict[str, torch.Tensor]:
        """Return the values of the named buffers on all replicas of this instance.

        Args:
            names: The names of the buffers.

        Returns:
            Tensors of shape [local replicas, ...] by buffer name. If the replicas share a buffer,
            the first dimension of its tensor has the size 1.
        """
        return {
            name: self._stacks[name] if name in self._stacks else self.buffers[name].unsqueeze(0)
            for name in sorted(names)
        }

    # -- methods that compare the device's tensors with the host's tensors --------------------

    def check_registered(self) -> None:
        """Check that the forward pass did not replace or delete parameters and buffers.

        Raises:
            Error: A parameter or a buffer was reassigned or deleted.
        """
        for host, view in self._views:
            for group in ("_parameters", "_buffers"):
                for key, value in host.__dict__[group].items():
                    expected = [None] if value is None else self.device_tensors(value)
                    _check_place(type(host).__name__, group, key, expected, view[group])

    @torch.no_grad()
    def host_copies(self) -> dict[int, torch.Tensor]:
        """Return the host parameters whose numbers are equal to those of the device parameters.

        Returns:
            The host parameters, keyed by the ``id`` of the device parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return {
                id(device): host.detach()
                for host, device in self._hosts
                if isinstance(device, nn.Parameter) and _equal(host, device)
            }

    # -- methods that use the device's tensors ------------------------------------------------

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace host tensors in the modules by device tensors while the ``with`` block runs."""
        # ``object.__setattr__`` avoids the checks in nn.Module's ``__setattr__``.
        put = object.__setattr__
        hosts = [(module, module.__dict__) for module, _ in self._views]
        try:
            for module, view in self._views:
                put(module, "__dict__", view)
            yield
        finally:
            for module, host in hosts:
                put(module, "__dict__", host)

    @contextmanager
    def substituted(self, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Replace device tensors in the modules by other tensors while the ``with`` block runs.

        Args:
            tensors: The other tensors, each keyed by the ``id`` of the device tensor that it
                replaces.
        """
        saved: list[tuple[dict[str, Any], str, Any]] = []
        for _, view in self._views:
            for place in (view, view["_parameters"], view["_buffers"]):
                for key, value in list(place.items()):
                    other = _substitute(value, tensors)
                    if other is not value:
                        saved.append((place, key, value))
                        place[key] = other
        try:
            yield
        finally:
            for place, key, value in reversed(saved):
                place[key] = value

    def device_tensors(self, host: torch.Tensor) -> list[torch.Tensor]:
        """Return the device's copies of one host tensor.

        Returns:
            One tensor, or one tensor for each group of replicas if ``host`` is a replica-grouped
            parameter. The list of device tensors is empty if the device does not have a copy of
            ``host``.
        """
        if id(host) in self._grouped:
            return list(self._grouped[id(host)][1])
        device = self._device_of.get(id(host))
        return [] if device is None else [device]

    def device_copies(self) -> dict[int, torch.Tensor]:
        """Return the device's copies of the host's tensors, keyed by the ``id`` of the host tensor.

        Replica-grouped parameters are left out, because they have several copies.
        """
        return {id(host): device for host, device in self._hosts}

    def hook_gradients(self, hosts: Iterable[torch.Tensor]) -> GradientHooks:
        """Make backward passes call the gradient hooks of the given host parameters from now on."""
        if self.gradient_hooks is not None:
            self.gradient_hooks.remove()
        self.gradient_hooks = GradientHooks(hosts, self.device_tensors)
        return self.gradient_hooks

    @torch.no_grad()
    def upload(self, only: frozenset[str] | None = None) -> None:
        """Copy the host's parameters and buffers to the device.

        Args:
            only: The names of the buffers to copy; None to copy all parameters and buffers to the
                device.
        """
        wanted = None if only is None else {id(self.buffers[name]) for name in only}
        with torch._C.DisableTorchFunctionSubclass():
            for host, device in self._hosts:
                if wanted is not None and id(device) not in wanted:
                    continue
                if isinstance(device, nn.Parameter):
                    # The device parameter gets new memory, because other instances may be reading
                    # its old memory. The new memory of the device parameter is contiguous like the
                    # optimiser's state, because torch's fused optimisers ignore strides.
                    device.data = host.detach().to(
                        device.dtype, copy=True, memory_format=torch.contiguous_format
                    )
                    # The version counter of the parameter is increased, because torch does not
                    # count assignments to ``data``.
                    increment_version(device)
                else:
                    device.copy_(host)
            for name, stack in self._stacks.items():
                if only is None or name in only:
                    stack.copy_(stack[:1].clone().expand_as(stack))
            if only is None:
                for host_id, (_, rows) in self._grouped.items():
                    for row, value in zip(rows, self._host_rows(host_id), strict=True):
                        row.copy_(value)

    @torch.no_grad()
    def download(self, only: frozenset[int] | None = None) -> None:
        """Copy the device's parameters and buffers to the host.

        Args:
            only: The ``id`` of each device tensor to copy; None to copy all tensors to the host.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for host, device in self._hosts:
                if only is None or id(device) in only:
                    host.copy_(device)
            for grouping, rows in self._grouped.values():
                if only is None or any(id(row) in only for row in rows):
                    grouping.write_host(rows, self._num_replicas)

    def _host_rows(self, host_id: int) -> list[torch.Tensor]:
        grouping, rows = self._grouped[host_id]
        return grouping.read_host(len(rows), self._num_replicas)


def _copied(host: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return host.detach().to(dtype, copy=True)


def _substitute(value: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return tensors.get(id(value), value)
    if type(value) in (list, tuple) and any(id(item) in tensors for item in value):
        return type(value)(tensors.get(id(item), item) for item in value)
    return value


def _equal(host: torch.Tensor, device: torch.Tensor) -> bool:
    """Tell whether ``host``, converted to the device's dtype, has the same bits as ``device``."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(device.itemsize)
    if bits is None or host.shape != device.shape:
        return False
    return torch.equal(host.detach().to(device.dtype).view(bits), device.detach().view(bits))


def _is_plain(buffer: torch.Tensor) -> bool:
    return type(buffer) is torch.Tensor or getattr(type(buffer), "is_watched_buffer", False)


def _check_place(
    module: str, group: str, key: str, expected: Sequence[Any], place: dict[str, Any]
) -> None:
    kind = "Parameter" if group == "_parameters" else "Buffer"
    if key not in place:
        raise Error(
            f"{kind} {key} of {module} no longer exists after the model's forward: do not delete "
            f"the {kind.lower()} in the forward"
        )
    if all(place[key] is not tensor for tensor in expected):
        raise Error(
            f"{kind} {key} of {module} was reassigned within the model: change the {kind.lower()} "
            "in place (with copy_(), add_(), ...), so that it keeps its value between calls"
        )
