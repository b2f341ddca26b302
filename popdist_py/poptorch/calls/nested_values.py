"""Nested arguments and results: flattening and rebuilding.

Registered custom types, tuples, named tuples, lists, dicts; tensors are the leaves, anything else
is a constant. This is the one walk through nested values. It is not torch's pytree, which knows
exact types only: it takes a subclass of a list or dictionary for a leaf, and so would not see the
tensors inside; and it lists every type for the whole process, where ours has a parser for a class
and its subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from popdist_py.poptorch.calls.custom_types import parser_of
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
    """The shape of one nested value: kind, names of the children, the children, or a constant.

    A custom type has the number of its tensors as its only key, and as its constant the parser and
    the value.
    """

    kind: type
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()
    constant: Any = None

    def rebuild(self, leaves: Iterator[Any]) -> Any:
        """Return the value with its tensors taken from ``leaves``, in order."""
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
        """Number of tensors of the value."""
        if self.kind is _Custom:
            return int(self.keys[0])
        return int(self.kind is torch.Tensor) + sum(c.num_tensors for c in self.children)

    def constants(self) -> Iterator[Any]:
        """Yield the values without tensors, those inside custom types excepted."""
        if self.kind is _Constant:
            yield self.constant
        for child in self.children:
            yield from child.constants()


class _Constant:
    """Marks a tree that holds a value without tensors."""


class _Custom:
    """Marks a tree that holds a value of a registered custom type."""


_LEAF = Tree(torch.Tensor)
_SEQUENCES = (tuple, list)


def _sequence(kind: Any, values: list[Any]) -> Any:
    try:
        return kind(values)
    except TypeError:
        return values  # of a class that cannot be made from its items, as torch's loader does


def _mapping(kind: type, values: dict[Any, Any]) -> Any:
    try:
        return kind(values)
    except TypeError:
        return kind(**values)


def flatten(value: Any, leaves: list[torch.Tensor]) -> Tree:
    """Append the tensors of ``value`` to ``leaves`` and return its shape."""
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
    # Last, because torch asks in Python whether something is a tensor.
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return _LEAF
    return Tree(_Constant, (), (), value)


def _taken_apart(parser: Any, value: Any) -> list[torch.Tensor]:
    tensors = list(parser.yieldTensors(value))
    for item in tensors:
        if not isinstance(item, torch.Tensor):
            raise Error(
                f"{type(parser).__name__}.yieldTensors() yields a {type(item).__name__} of a "
                f"{type(value).__name__}: expected tensors only. reconstruct() finds everything "
                "else in the original structure"
            )
    return tensors


def _reconstructed(parser: Any, original: Any, tensors: list[torch.Tensor]) -> Any:
    try:
        return parser.reconstruct(original, iter(tensors))
    except StopIteration as error:
        raise Error(
            f"{type(parser).__name__}.reconstruct() takes more tensors than yieldTensors() yields "
            f"of a {type(original).__name__}, {len(tensors)}"
        ) from error


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of ``value``, in order: those that :func:`flatten` appends."""
    leaves: list[torch.Tensor] = []
    _collect(value, leaves)
    return leaves


def _collect(value: Any, leaves: list[torch.Tensor]) -> None:
    """Do what :func:`flatten` does, in half the time: this is called for every operation."""
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
    """Return ``value`` with ``function`` of the tensors in the same place of all values.

    Args:
        function: takes as many tensors as there are values.
        value: gives the structure and the constants of the result.
        others: values of the same structure; their dictionaries may be in another order.
    """
    leaves: list[torch.Tensor] = []
    tree = flatten(value, leaves)
    columns = [leaves, *(tensors_of(_in_order(tree, other)) for other in others)]
    return tree.rebuild(function(*column) for column in zip(*columns, strict=True))


def check_outputs(outputs: Tree) -> None:
    """Check that no tensor hides in what a forward returns: it would keep its first value for ever.

    Raises:
        Error: an object of a class that is not registered holds tensors.
    """
    for child in outputs.children:
        check_outputs(child)
    value = outputs.constant
    if outputs.kind is not _Constant or isinstance(value, torch.nn.Module):
        return
    held = value if isinstance(value, Set | ValuesView) else getattr(value, "__dict__", {}).values()
    if any(isinstance(item, torch.Tensor) for item in held):
        raise Error(
            f"Unsupported output type {type(value)}: it holds tensors. Return tensors, tuples, "
            "lists or dictionaries, or tell how to take it apart with "
            "poptorch.registerCustomArgParser()"
        )


def _custom_parser(value: Any) -> Any:
    """Return the parser registered for the type of ``value``, if any; a tensor needs none."""
    parser = parser_of(value)
    return None if parser is None or isinstance(value, torch.Tensor) else parser


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call: trees of the positional and the keyword arguments, and tensors."""

    positional: tuple[Tree, ...]
    keywords: tuple[tuple[str, Tree], ...]
    leaves: list[torch.Tensor]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Flatten the arguments of a call."""
        leaves: list[torch.Tensor] = []
        positional = tuple(flatten(value, leaves) for value in args)
        # Sorted, so that two calls that differ in the order of keywords compare equal.
        keywords = tuple((name, flatten(kwargs[name], leaves)) for name in sorted(kwargs))
        return cls(positional, keywords, leaves)

    def like(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Flatten the arguments of a call, with dictionaries in the order of this one's."""
        if not kwargs and len(args) == len(self.positional):
            # The usual call, as fast as can be.
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
        """Return the positional and keyword arguments with other tensors in the same places."""
        tensors = iter(leaves)
        return (
            [tree.rebuild(tensors) for tree in self.positional],
            {name: tree.rebuild(tensors) for name, tree in self.keywords},
        )

    @property
    def num_samples(self) -> int:
        """The first dimension of the first tensor that has dimensions; 0 without such a tensor."""
        return next((leaf.shape[0] for leaf in self.leaves if leaf.dim()), 0)

    def fits(self, other: Call) -> bool:
        """Tell quickly whether ``other`` has the same structure, shapes and dtypes."""
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
        """Return the same call with tensors that have shape and dtype only."""
        meta = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in self.leaves]
        return Call(self.positional, self.keywords, meta)

    def example(self) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments of this kind, with ones in all tensors."""
        return self.arguments([torch.ones(t.shape, dtype=t.dtype) for t in self.leaves])

    @property
    def has_dictionary(self) -> bool:
        """Whether an argument is or holds a dictionary."""
        trees = [*self.positional, *(tree for _, tree in self.keywords)]
        return any(_has_dictionary(tree) for tree in trees)


def _in_order(tree: Tree | None, value: Any) -> Any:
    """Return ``value`` with the keys of its dictionaries in the order they have in ``tree``."""
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
        # Constants that cannot be compared as a whole, such as arrays.
        return False


def _has_dictionary(tree: Tree) -> bool:
    return issubclass(tree.kind, dict) or any(_has_dictionary(child) for child in tree.children)
