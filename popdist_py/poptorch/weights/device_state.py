"""The device's own copy of a module tree: weights, buffers and constants, and when modules see it.

The user's module objects stay the only ones: while a forward runs, each looks into a second
``__dict__`` that holds device tensors. So hooks, bound methods and closures see the device, and the
host's tensors are not touched between a download and the next.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.weights.gradient_hooks import GradientHooks
from popdist_py.poptorch.weights.replica_grouping import Grouping, grouping_of

__all__ = ["DeviceState", "Precision"]

Precision = Callable[[torch.dtype], torch.dtype]
_MISSING: Final = object()
_CONTAINERS: Final = (list, dict, set, deque, defaultdict)
_TORCH_GROUPS: Final = ("_parameters", "_buffers", "_modules")


class DeviceState:
    """Device tensors of the modules under ``top``.

    Args:
        top: the module whose forward runs.
        owner: the user's module that ``top`` is a shallow copy of.
        precision: dtype on the device of a host dtype.
        num_replicas: number R of all replicas, of all instances.
        copied: makes a device tensor of a dtype from one of the host.

    Attributes:
        parameters: device parameters by name; a replica-grouped one has an entry for each group.
        buffers: device buffers by name; those of the first local replica if each has its own.
        gradient_hooks: the program's hooks on its parameters; None in inference.

    Raises:
        Error: a buffer that is no plain tensor, or a 0-d parameter that is replica-grouped.
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
        self._constants: list[tuple[dict[str, Any], str, Any]] = []
        self._places: list[tuple[dict[str, Any], str, list[torch.Tensor]]] = []
        self._num_replicas = num_replicas
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.gradient_hooks: GradientHooks | None = None
        with torch._C.DisableTorchFunctionSubclass():
            self._copy_parameters(top)
            self._copy_buffers(top)
            self._views = self._make_views(top, owner)

    # -- construction -------------------------------------------------------------------------

    def _copy_parameters(self, top: nn.Module) -> None:
        """Make one device tensor for each different host tensor; tied ones stay tied."""
        for name, host in top.named_parameters(remove_duplicate=True):
            grouping = grouping_of(host)
            # Contiguous, as gradients are: torch's fused updates look at neither's strides.
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
                    f"Buffer {name} is a {type(host).__name__}: a buffer must be a plain "
                    "torch.Tensor"
                )
            self.buffers[name] = self._copied(host, self._precision(host.dtype))
            self._device_of[id(host)] = self.buffers[name]
            self._hosts.append((host, self.buffers[name]))

    def _make_views(
        self, top: nn.Module, owner: nn.Module
    ) -> list[tuple[nn.Module, dict[str, Any]]]:
        views: list[tuple[nn.Module, dict[str, Any]]] = []
        for module in top.modules():
            view = {key: self._constant(value) for key, value in vars(module).items()}
            for group in ("_parameters", "_buffers"):
                view[group] = {
                    key: None if value is None else self._device_of[id(value)]
                    for key, value in vars(module)[group].items()
                }
            view["_modules"] = dict(vars(module)["_modules"])
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                view["sparse"] = False  # the device has dense gradients only
            views.append((module, view))
            self._places += [
                (view["_parameters"], key, list(self._grouped[id(value)][1]))
                for key, value in vars(module)["_parameters"].items()
                if id(value) in self._grouped
            ]
        if owner is not top:
            views.append((owner, views[0][1]))
        return views

    def _constant(self, value: Any) -> Any:
        """Return a plain attribute as the device sees it: tensors are captured by value."""
        if isinstance(value, torch.Tensor):
            device = self._device_of.get(id(value))
            if device is not None:
                return device
            return self._copied(value, self._precision(value.dtype))
        if type(value) in (list, tuple) and any(id(item) in self._device_of for item in value):
            return type(value)(self._device_of.get(id(item), item) for item in value)
        return value

    # -- replicas -----------------------------------------------------------------------------

    def give_replicas_buffers(self, names: frozenset[str], replicas: int) -> None:
        """Let each of the local ``replicas`` have its own copy of the buffers ``names``."""
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
        """Whether replicas differ in buffers or in replica-grouped parameters."""
        return bool(self._places)

    @property
    def has_groups(self) -> bool:
        """Whether there are replica-grouped parameters."""
        return bool(self._grouped)

    def select(self, local_replica: int, global_replica: int) -> None:
        """Show the next forward the tensors of one replica."""
        groups = {
            id(rows[0]): grouping.group_of(global_replica, self._num_replicas)
            for grouping, rows in self._grouped.values()
        }
        for place, key, rows in self._places:
            place[key] = rows[groups.get(id(rows[0]), local_replica)]

    def stacked_buffers(self) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """Return where every buffer that replicas own stands, and all replicas' values of it."""
        stacks = {stack.data_ptr(): stack for stack in self._stacks.values()}
        return [
            (place, key, stacks[rows[0].data_ptr()])
            for place, key, rows in self._places
            if rows[0].data_ptr() in stacks
        ]

    def buffers_of_replicas(self, names: frozenset[str]) -> dict[str, torch.Tensor]:
        """Return all local replicas' values of the buffers ``names``: [local replicas, ...]."""
        return {
            name: self._stacks[name] if name in self._stacks else self.buffers[name].unsqueeze(0)
            for name in sorted(names)
        }

    # -- constants ----------------------------------------------------------------------------

    def snapshot(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return every module's plain attributes as they are, with the values of tensors."""
        return [
            (view, {key: _frozen(value) for key, value in view.items() if key not in _TORCH_GROUPS})
            for _, view in self._views
        ]

    def constants(self) -> list[torch.Tensor]:
        """Return the tensors among the modules' plain attributes."""
        return [
            value
            for _, view in self._views
            for value in view.values()
            if isinstance(value, torch.Tensor) and value.layout == torch.strided
        ]

    def freeze_constants(self, before: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Make the attributes that changed since ``before`` constants of the program.

        The host's modules keep the plain values that the first forward assigned, because Python
        code in a forward runs once on a device.
        """
        for (module, view), (_, values) in zip(self._views, before, strict=True):
            plain = {key: value for key, value in view.items() if key not in _TORCH_GROUPS}
            for key in plain.keys() | values.keys():
                if _unchanged(values.get(key, _MISSING), plain.get(key, _MISSING)):
                    continue
                self._constants.append((view, key, values.get(key, _MISSING)))
                if key in plain and not isinstance(plain[key], torch.Tensor):
                    module.__dict__[key] = plain[key]

    def restore_constants(self) -> None:
        """Give the attributes that a forward changes their values from compile time."""
        for view, key, value in self._constants:
            if value is _MISSING:
                view.pop(key, None)
            else:
                view[key] = value[1].clone() if isinstance(value, tuple) else value

    def changing_attributes(self) -> list[Any]:
        """Return what the attributes that a forward changes have now."""
        return [view.get(key, _MISSING) for view, key, _ in self._constants]

    def put_attributes(self, values: Sequence[Any]) -> None:
        """Give the attributes that a forward changes what ``changing_attributes()`` returned."""
        for (view, key, _), value in zip(self._constants, values, strict=True):
            if value is _MISSING:
                view.pop(key, None)
            else:
                view[key] = value

    @contextmanager
    def contents_kept(self) -> Iterator[None]:
        """Undo what the enclosed code puts into lists, dicts and sets that modules hold."""
        saved = [
            (value, value.copy())
            for _, view in self._views
            for key, value in view.items()
            if key not in _TORCH_GROUPS and type(value) in _CONTAINERS
        ]
        try:
            yield
        finally:
            for container, content in saved:
                container.clear()
                add = container.extend if hasattr(container, "extend") else container.update
                add(content)

    def check_registered(self) -> None:
        """Check that the forward left parameters and buffers registered.

        Raises:
            Error: one was reassigned or deleted.
        """
        for host, view in self._views:
            for group in ("_parameters", "_buffers"):
                for key, value in host.__dict__[group].items():
                    expected = [None] if value is None else self.device_tensors(value)
                    _check_place(type(host).__name__, group, key, expected, view[group])

    @torch.no_grad()
    def host_copies(self) -> dict[int, torch.Tensor]:
        """Return the host's tensor for each device parameter (by ``id``) that is a copy of it."""
        with torch._C.DisableTorchFunctionSubclass():
            return {
                id(device): host.detach()
                for host, device in self._hosts
                if isinstance(device, nn.Parameter) and _equal(host, device)
            }

    # -- use ----------------------------------------------------------------------------------

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the modules see the device's tensors while the enclosed code runs."""
        # Not by assignment, because torch looks at every attribute that a module is given.
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
        """Show other tensors in place of the device's (by ``id``) in the enclosed code."""
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
        """Return the device's tensors for a tensor of the host: several if replica-grouped."""
        if id(host) in self._grouped:
            return list(self._grouped[id(host)][1])
        device = self._device_of.get(id(host))
        return [] if device is None else [device]

    def hook_gradients(self, hosts: Iterable[torch.Tensor]) -> GradientHooks:
        """Start calling the program's hooks on the gradients of these parameters."""
        if self.gradient_hooks is not None:
            self.gradient_hooks.remove()
        self.gradient_hooks = GradientHooks(hosts, self.device_tensors)
        return self.gradient_hooks

    @torch.no_grad()
    def upload(self, only: frozenset[str] | None = None) -> None:
        """Copy the host's parameters and buffers to the device, or only the buffers ``only``."""
        wanted = None if only is None else {id(self.buffers[name]) for name in only}
        with torch._C.DisableTorchFunctionSubclass():
            for host, device in self._hosts:
                if wanted is not None and id(device) not in wanted:
                    continue
                if isinstance(device, nn.Parameter):
                    # Not in place: other instances may be reading these very weights. Contiguous,
                    # as the optimiser's state is: torch's fused updates look at no strides.
                    device.data = host.detach().to(
                        device.dtype, copy=True, memory_format=torch.contiguous_format
                    )
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
        """Copy the device's parameters and buffers to the host, or only those with these ids."""
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
    """Tell whether the host's tensor becomes the device's, to the bit."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(device.itemsize)
    if bits is None or host.shape != device.shape:
        return False
    return torch.equal(host.detach().to(device.dtype).view(bits), device.detach().view(bits))


def _is_plain(buffer: torch.Tensor) -> bool:
    return type(buffer) is torch.Tensor or getattr(type(buffer), "is_watched_buffer", False)


def _frozen(value: Any) -> Any:
    """Return a tensor as (itself, its value, its version); anything else as it is."""
    if isinstance(value, torch.Tensor):
        return (value, value.detach().clone(), value._version)
    return value


def _unchanged(before: Any, now: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return (
            isinstance(before, tuple)
            and len(before) == 3
            and before[0] is now
            and before[2] == now._version
        )
    return before is now or (
        not isinstance(before, tuple)
        and type(before) is type(now)
        and isinstance(now, int | float | str | bool)
        and before == now
    )


def _check_place(
    module: str, group: str, key: str, expected: Sequence[Any], place: dict[str, Any]
) -> None:
    kind = "Parameter" if group == "_parameters" else "Buffer"
    if key not in place:
        raise Error(f"{kind} {key} of {module} no longer exists after the forward")
    if all(place[key] is not tensor for tensor in expected):
        raise Error(
            f"{kind} {key} of {module} was reassigned within the model: change it in place "
            "(copy_(), add_(), ...) so that it keeps its value between calls"
        )
