"""The class ``CallSignature``, which describes the call arguments that a model was compiled for.

The methods of ``CallSignature`` compare the arguments of later calls with the arguments of the
first call. The module ``nested_values`` flattens the arguments of a call into a list of tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from popdist_py.poptorch.calls.default_arguments import Defaults
from popdist_py.poptorch.calls.nested_values import Call, Tree, _Constant, _Custom
from popdist_py.poptorch.errors import Error

__all__ = ["CallSignature"]

_RECOMPILE = (
    " The model was compiled for arguments like those of its first call. To compile the model "
    "for other arguments, call destroy() on its PopTorch wrapper, or make a new wrapper."
)


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The structure, shapes and dtypes of the call arguments that a model was compiled for.

    Attributes:
        template: The flattened arguments of the first call, with meta tensors (shape and dtype
            without data) in place of the tensors.
        names: The names of the forward method's parameters for the positional arguments in
            ``template``.
        defaults: The default values for the parameters that a call leaves out.
    """

    template: Call
    names: tuple[str, ...]
    defaults: Defaults

    @classmethod
    def of(
        cls,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_slices: int,
    ) -> tuple[CallSignature, Call]:
        """Return the CallSignature and the flattened arguments of a model's first call.

        Args:
            forward: The model's forward method, or the function that the model calls.
            args: The positional arguments of the first call.
            kwargs: The keyword arguments of the first call.
            num_slices: The number of micro-batches into which each input is cut.

        Raises:
            AssertionError: The call passes too many arguments, an unknown keyword, or one parameter
                twice.
            Error: The call leaves out a parameter without a default.
        """
        names = _check_call(forward, args, kwargs)
        defaults = Defaults.of(_signature(forward), args, kwargs, num_slices)
        args, kwargs = defaults.completed(args, kwargs)
        call = Call.of(args, kwargs)
        return cls(call.without_data(), tuple(names[: len(args)]), defaults), call

    def matched(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call:
        """Return the flattened arguments of a later call.

        The keys of each dictionary in the arguments are sorted in the order of the first call. From
        an argument of a custom type, only the tensors of the later call are used. The attributes of
        a custom-type argument that are not tensors keep their values from the first call, even if
        the forward method runs in Python.

        Raises:
            AssertionError: The arguments of the call do not match the parameters of ``forward``.
            Error: The arguments differ from the arguments that the model was compiled for.
        """
        all_args, all_kwargs = self.defaults.completed(args, kwargs)
        call = Call.of(all_args, all_kwargs)
        if not self.template.fits(call):
            _check_call(forward, args, kwargs)
            call = self.template.like(all_args, all_kwargs)
            _check_same(self.template, call, self.names)
        return Call(self.template.positional, self.template.keywords, call.leaves)


def _check_call(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Check a call against ``forward``, and return the parameter names of positional arguments.

    Raises:
        AssertionError: The call passes too many arguments, an unknown keyword, or one parameter
            twice.
        Error: The call leaves out a parameter without a default.
    """
    parameters = list(_signature(forward).parameters.values())
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = next((p for p in parameters if p.kind == p.VAR_POSITIONAL), None)
    assert variadic or len(args) <= len(plain), (
        f"Too many arguments provided: the model accepts at most {len(plain)} positional "
        f"arguments, got {len(args)}"
    )
    open_keywords = any(p.kind == p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    filled = {p.name for p in plain[: len(args)]}
    for name in kwargs:
        assert open_keywords or name in named, f"{name} is not a valid parameter of the model"
        assert name not in filled, f"Parameter {name} was passed more than once"
    for parameter in parameters:
        if (
            parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and parameter.default is parameter.empty
            and parameter.name not in filled
            and parameter.name not in kwargs
        ):
            raise Error(
                f"Mandatory parameter {parameter.name} missing: the call of the model must give a "
                f"value for {parameter.name}"
            )
    extra = [f"*{variadic.name}[{i}]" for i in range(len(args) - len(plain))] if variadic else []
    return [p.name for p in plain[: len(args)]] + extra


def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of the function or method ``forward``.

    For a function that is written in C, Python may not know the signature. For a function without a
    known signature, the returned signature accepts all arguments.
    """
    try:
        return inspect.signature(forward)
    except ValueError:
        return inspect.signature(lambda *_args, **_kwargs: None)


def _check_same(compiled: Call, call: Call, names: Sequence[str]) -> None:
    """Compare the arguments of a call with the arguments that the model was compiled for.

    Raises:
        Error: The arguments differ from those at compile time in their number, names, types,
            lengths, constants, dtypes or shapes.
    """
    expected, got = len(compiled.positional), len(call.positional)
    if expected != got:
        raise Error(
            f"Number of positional arguments mismatch: expected {expected} but got {got}."
            + _RECOMPILE
        )
    leaves = iter(zip(compiled.leaves, call.leaves, strict=False))
    for name, before, now in zip(names, compiled.positional, call.positional, strict=True):
        _check_tree(name, before, now, leaves)
    before_keywords, now_keywords = dict(compiled.keywords), dict(call.keywords)
    _check_keys("keyword arguments", tuple(before_keywords), tuple(now_keywords))
    for name, before in before_keywords.items():
        _check_tree(name, before, now_keywords[name], leaves)


def _check_keys(name: str, expected: tuple[Any, ...], got: tuple[Any, ...]) -> None:
    if set(expected) == set(got):
        return
    unexpected = ", ".join(sorted(str(key) for key in set(got) - set(expected)))
    missing = ", ".join(sorted(str(key) for key in set(expected) - set(got)))
    raise Error(
        f"Keys mismatch for {name}."
        + (f" Unexpected arguments: {unexpected}." if unexpected else "")
        + (f" Missing arguments: {missing}." if missing else "")
        + _RECOMPILE
    )


def _kind_name(tree: Tree) -> str:
    if tree.kind in (_Constant, _Custom):
        value = tree.constant[1] if tree.kind is _Custom else tree.constant
        return str(type(value))
    return str(tree.kind)


def _check_tree(
    name: str, before: Tree, now: Tree, leaves: Iterator[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    if _kind_name(before) != _kind_name(now):
        raise Error(
            f"Type mismatch for {name}: expected {_kind_name(before)} but got "
            f"{_kind_name(now)}." + _RECOMPILE
        )
    if before.kind is torch.Tensor:
        _check_tensor(name, *next(leaves))
    elif before.kind is _Custom:
        (expected,), (got,) = before.keys, now.keys
        _check_length(name, expected, got)
        for index in range(expected):
            _check_tensor(f"{name}[{index}]", *next(leaves))
    elif before.kind is _Constant:
        _check_constant(name, before.constant, now.constant)
    else:
        _check_children(name, before, now, leaves)


def _check_children(
    name: str, before: Tree, now: Tree, leaves: Iterator[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    if issubclass(before.kind, dict):
        _check_keys(name, before.keys, now.keys)
        for key, old, new in zip(before.keys, before.children, now.children, strict=True):
            _check_tree(f"{name}[{key}]", old, new, leaves)
        return
    _check_length(name, len(before.children), len(now.children))
    for index, (old, new) in enumerate(zip(before.children, now.children, strict=True)):
        _check_tree(f"{name}[{index}]", old, new, leaves)


def _check_length(name: str, expected: int, got: int) -> None:
    if expected != got:
        raise Error(f"Length mismatch for {name}: expected {expected} but got {got}." + _RECOMPILE)


def _check_constant(name: str, before: Any, now: Any) -> None:
    if before is now:
        return
    try:
        same = before == now
        # Comparing two NumPy arrays returns an array with one result per element.
        same = bool(same.all() if hasattr(same, "all") else same)
    except (RuntimeError, ValueError, TypeError):
        same = False
    if not same:
        raise Error(f"Value mismatch for {name}: expected {before} but got {now}." + _RECOMPILE)


def _check_tensor(name: str, before: torch.Tensor, now: torch.Tensor) -> None:
    if before.dtype != now.dtype:
        raise Error(
            f"Data type mismatch for {name}: expected {before.dtype} but got {now.dtype}."
            + _RECOMPILE
        )
    if before.shape != now.shape:
        raise Error(
            f"Shape mismatch for {name}: expected {tuple(before.shape)} but got "
            f"{tuple(now.shape)}." + _RECOMPILE
        )
