"""Functions that flatten nested arguments and results into lists of tensors, and rebuild them.

A nested value consists of tensors inside tuples, named tuples, lists, dictionaries and registered
custom types. A value that is neither a tensor, a container nor a registered custom type is called a
constant. All code that traverses nested values calls the module ``nested_values``.

Torch's pytree (``torch.utils._pytree``) is not used here, because it recognises exact types only.
For pytree, a subclass of list or dict is a leaf, so pytree does not find the tensors in it. To use
pytree, a program would have to register each subclass of list or dict for the whole process. In the
package ``poptorch.calls``, a parser for a class also handles the subclasses of the class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from popdist_py.poptorch.calls.custom_type_parsers import parser_of
from popdist_py.poptorch.errors import Error

__all__ = [
    "Call",
    "Tree",
    "check_outputs",
    "flatten",
    "map_tensors",
    "tensors_of",
]


@dataclass(frozen=True, slots=True)
class Tree:
    """The structure of one nested value, without the tensors in the value.

    Attributes:
        kind: The type of the value, or one of the marker classes ``_Constant`` and ``_Custom``.
        keys: The keys of the dictionary, if the value is a dictionary. For a value of a registered
            custom type, ``keys`` contains only the number of tensors in the value.
        children: The structures of the contained values, if the value is a tuple, list or
            dictionary.
        constant: The value itself, if the value is neither a tensor nor a container nor of a custom
            type. For a value of a registered custom type, ``constant`` is a tuple of the type's
            parser and the value.
    """

    kind: type
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()
    constant: Any = None

    def rebuild(self, leaves: Iterator[Any]) -> Any:
        """Return the nested value, with its tensors replaced by the next tensors of ``leaves``."""
        if self.kind is torch.Tensor:
            return next(leaves)
        if self.kind is _Constant:
            return self.constant
        if self.kind is _Custom:
            parser, original = self.constant
            return _reconstructed(parser, original, list(islice(leaves, *self.keys)))
        values = [child.rebuild(leaves) for child in self.children]
        if issubclass(self.kind, dict):
            return _mapping(self.kind, dict(zip(self.keys, values, strict=True)))
        if hasattr(self.kind, "_fields"):
            return self.kind(*values)
        return _sequence(self.kind, values)

    @property
    def num_tensors(self) -> int:
        """The number of tensors in the nested value."""
        if self.kind is _Custom:
            return int(self.keys[0])
        return int(self.kind is torch.Tensor) + sum(c.num_tensors for c in self.children)

    def constants(self) -> Iterator[Any]:
        """Yield the constants in the nested value, except the constants inside custom types."""
        if self.kind is _Constant:
            yield self.constant
        for child in self.children:
            yield from child.constants()


class _Constant:
    """The marker in the attribute ``kind`` of a ``Tree`` (a value's structure) for a constant."""


class _Custom:
    """The marker in the attribute ``kind`` of a ``Tree`` (value structure) for a custom type."""


_LEAF = Tree(torch.Tensor)
_SEQUENCES = (tuple, list)


def _sequence(kind: Any, values: list[Any]) -> Any:
    try:
        return kind(values)
    except TypeError:
        # If the container type ``kind`` cannot be constructed from a list of elements, the result
        # is a list. Torch's data loader also returns a list for a type that cannot be constructed
        # from a list.
        return values


def _mapping(kind: type, values: dict[Any, Any]) -> Any:
    try:
        return kind(values)
    except TypeError:
        return kind(**values)


def flatten(value: Any, leaves: list[torch.Tensor]) -> Tree:
    """Append the tensors of ``value`` to ``leaves``, and return the structure of ``value``."""
    parser = _custom_parser(value)
    if parser is not None:
        tensors = _taken_apart(parser, value)
        leaves.extend(tensors)
        return Tree(_Custom, (len(tensors),), (), (parser, value))
    if isinstance(value, _SEQUENCES):
        return Tree(type(value), (), tuple([flatten(item, leaves) for item in value]))
    if isinstance(value, dict):
        children = tuple([flatten(item, leaves) for item in value.values()])
        return Tree(type(value), tuple(value), children)
    # The check for tensors comes last, because isinstance() with torch.Tensor is slow for other
    # types.
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return _LEAF
    return Tree(_Constant, (), (), value)


def _taken_apart(parser: Any, value: Any) -> list[torch.Tensor]:
    tensors = list(parser.yieldTensors(value))
    for item in tensors:
        if not isinstance(item, torch.Tensor):
            raise Error(
                f"{type(parser).__name__}.yieldTensors() yields a value of type "
                f"{type(item).__name__} for a {type(value).__name__}: expected tensors only. "
                "reconstruct() can read all values that are not tensors from its argument "
                "original_structure"
            )
    return tensors


def _reconstructed(parser: Any, original: Any, tensors: list[torch.Tensor]) -> Any:
    try:
        return parser.reconstruct(original, iter(tensors))
    except StopIteration as error:
        raise Error(
            f"{type(parser).__name__}.reconstruct() reads more tensors than yieldTensors() yields "
            f"for a value of type {type(original).__name__}. Number of yielded tensors: "
            f"{len(tensors)}"
        ) from error


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in the nested ``value``, in the same order as :func:`flatten`."""
    leaves: list[torch.Tensor] = []
    _collect(value, leaves)
    return leaves


def _collect(value: Any, leaves: list[torch.Tensor]) -> None:
    """Append the tensors of ``value`` to ``leaves``.

    The function ``_collect`` must be fast, because it is called for every operation of a forward
    pass. The function ``_collect`` takes half as long as :func:`flatten`, because it does not
    return the structure of the value.
    """
    parser = _custom_parser(value)
    if parser is not None:
        leaves.extend(parser.yieldTensors(value))
    elif isinstance(value, _SEQUENCES):
        for item in value:
            _collect(item, leaves)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, leaves)
    elif isinstance(value, torch.Tensor):
        leaves.append(value)


def map_tensors(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """Return ``value`` with each tensor replaced by a result of ``function``.

    Args:
        function: The function to call with each tensor of ``value``, and with the tensors at the
            same position in ``others``.
        value: A nested value, such as a list of dictionaries of tensors. The result of
            ``map_tensors`` has the structure and the constants of ``value``.
        others: Values with the same structure as ``value``, except for the order of the keys in
            dictionaries.
    """
    leaves: list[torch.Tensor] = []
    tree = flatten(value, leaves)
    columns = [leaves, *(tensors_of(_in_order(tree, other)) for other in others)]
    return tree.rebuild(function(*column) for column in zip(*columns, strict=True))


def check_outputs(outputs: Tree) -> None:
    """Check that a forward method's result contains no tensors inside unregistered classes.

    In a forward method's result, an object of an unregistered class counts as a constant. Without
    the check, every call of the model would return the same object, whose tensors contain results
    of the first forward pass.

    Raises:
        Error: The forward method's result contains an object of an unregistered class with tensors
            inside.
    """
    for child in outputs.children:
        check_outputs(child)
    value = outputs.constant
    if outputs.kind is not _Constant or isinstance(value, torch.nn.Module):
        return
    held = value if isinstance(value, Set | ValuesView) else getattr(value, "__dict__", {}).values()
    if any(isinstance(item, torch.Tensor) for item in held):
        raise Error(
            f"Unsupported output type {type(value)}: the value contains tensors, and no parser is "
            "registered for the type. Return tensors, tuples, lists or dictionaries, or register a "
            "parser with poptorch.registerCustomArgParser()"
        )


def _custom_parser(value: Any) -> Any:
    """Return the custom-type parser for ``value``; None for tensors and unregistered types."""
    parser = parser_of(value)
    return None if parser is None or isinstance(value, torch.Tensor) else parser


@dataclass(frozen=True, slots=True)
class Call:
    """The flattened arguments of one call of a model.

    Attributes:
        positional: The structure of each positional argument.
        keywords: The name and the structure of each keyword argument, sorted by name.
        leaves: The tensors of all arguments, in a flat list.
    """

    positional: tuple[Tree, ...]
    keywords: tuple[tuple[str, Tree], ...]
    leaves: list[torch.Tensor]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Return the flattened form of the arguments of a call."""
        leaves: list[torch.Tensor] = []
        positional = tuple(flatten(value, leaves) for value in args)
        # The names of keyword arguments are sorted, because two calls are equal even if their
        # keyword arguments have a different order.
        keywords = tuple((name, flatten(kwargs[name], leaves)) for name in sorted(kwargs))
        return cls(positional, keywords, leaves)

    def like(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Return another call's flattened arguments, to compare them with this ``Call``.

        The keys of each dictionary in the other call are sorted in the order of the dictionary in
        this ``Call``.
        """
        if not kwargs and len(args) == len(self.positional):
            # Most calls pass only tensors as positional arguments, so a shorter and faster path
            # handles such calls.
            plain = all(tree is _LEAF for tree in self.positional)
            if plain and all(isinstance(value, torch.Tensor) for value in args):
                return Call(self.positional, (), list(args))
        trees = dict(self.keywords)
        known = [_in_order(tree, value) for tree, value in zip(self.positional, args, strict=False)]
        return Call.of(
            [*known, *args[len(known) :]],
            {name: _in_order(trees.get(name), value) for name, value in kwargs.items()},
        )

    def arguments(self, leaves: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return the call's positional and keyword arguments, with ``leaves`` as their tensors."""
        tensors = iter(leaves)
        return (
            [tree.rebuild(tensors) for tree in self.positional],
            {name: tree.rebuild(tensors) for name, tree in self.keywords},
        )

    @property
    def num_samples(self) -> int:
        """The number of samples in the first input that is not 0-d; 0 if all inputs are 0-d."""
        return next((leaf.shape[0] for leaf in self.leaves if leaf.dim()), 0)

    def fits(self, other: Call) -> bool:
        """Tell whether this call's arguments have the structure, shapes and dtypes of ``other``.

        The method ``fits`` is fast, but it may return False for equal calls, for example if the
        keys of a dictionary have another order.
        """
        return (
            len(self.leaves) == len(other.leaves)
            and all(
                a.shape == b.shape and a.dtype is b.dtype
                for a, b in zip(self.leaves, other.leaves, strict=True)
            )
            and _same_trees(self.positional, other.positional)
            and _same_trees(self.keywords, other.keywords)
        )

    def without_data(self) -> Call:
        """Return this ``Call`` with meta tensors, which have a shape and a dtype but no data."""
        meta = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in self.leaves]
        return Call(self.positional, self.keywords, meta)

    def example(self) -> tuple[list[Any], dict[str, Any]]:
        """Return example arguments with the structure of this call, whose tensors contain ones."""
        return self.arguments([torch.ones(t.shape, dtype=t.dtype) for t in self.leaves])

    @property
    def has_dictionary(self) -> bool:
        """Whether an argument of the call is a dictionary or contains a dictionary."""
        trees = [*self.positional, *(tree for _, tree in self.keywords)]
        return any(_has_dictionary(tree) for tree in trees)


def _in_order(tree: Tree | None, value: Any) -> Any:
    """Return ``value`` with the keys of its dictionaries in the same order as in ``tree``."""
    if tree is None or type(value) is not tree.kind or not isinstance(value, tuple | list | dict):
        return value
    if len(value) != len(tree.children):
        return value
    if not isinstance(value, dict):
        items = [_in_order(child, item) for child, item in zip(tree.children, value, strict=True)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return tree.kind(*items) if hasattr(value, "_fields") else _sequence(tree.kind, items)
    if set(tree.keys) != set(value):
        return value
    children = zip(tree.keys, tree.children, strict=True)
    return _mapping(tree.kind, {key: _in_order(child, value[key]) for key, child in children})


def _same_trees(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    try:
        return before == now
    except (RuntimeError, ValueError, TypeError):
        # The comparison of some constants, such as NumPy arrays, does not return one bool.
        return False


def _has_dictionary(tree: Tree) -> bool:
    return issubclass(tree.kind, dict) or any(_has_dictionary(child) for child in tree.children)
