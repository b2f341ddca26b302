"""Placement of a network: the layers of each IPU, and the activations kept for the backward pass.

The name of a cut is the name of the first layer after the cut. A layer is a module that a plain
Sequential runs after other modules. A residual block is one layer.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise

import torch
from common.arguments import nearest
from torch import nn

from popdist_py import poptorch

__all__ = ["place", "splits"]


def splits(network: nn.Module) -> list[str]:
    """Return the names of all possible cuts of the network, in the order of the forward pass."""
    return list(_layers(network))[1:]


def place(network: nn.Module, args: argparse.Namespace) -> None:
    """Assign layers to the IPUs, and mark the activations that are kept instead of recomputed.

    Raises:
        ValueError: A cut does not exist, or the number of cuts or of IPUs is wrong.
    """
    if args.shards & (args.shards - 1):
        raise ValueError(
            f"--shards {args.shards} is given: a replica has 1, 2, 4 or another power of two IPUs"
        )
    if args.pipeline:
        cuts = _chosen(network, args)
    elif args.shards > 1:
        cuts = _balanced_cuts(network, args)
    else:
        cuts = []
    if args.shards > 1:
        _begin_stages(network, cuts)
    overlaps = args.pipeline and args.pipeline_schedule != "Sequential"
    if args.enable_recompute and not overlaps:  # that pipeline recomputes whole stages
        if args.pipeline and args.shards == 1:
            _keep_inputs(network, cuts)
        else:
            _keep_blocks(network)
    shares = args.available_memory_proportion or []
    if len(shares) > 1:
        _limit_products(network, cuts if args.shards > 1 else [], shares[1::2])


def _layers(network: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the layers by name, in order."""
    found: dict[str, nn.Module] = {}
    for name, part in network.named_children():
        # A module of a subclass of Sequential, such as a convolution with its norm, is one layer.
        inner = _layers(part, f"{prefix}{name}.") if type(part) is nn.Sequential else {}
        found |= inner or {f"{prefix}{name}": part}
    return found


# --- Cuts from --pipeline-splits ------------------------------------------------------------------


def _chosen(network: nn.Module, args: argparse.Namespace) -> list[str]:
    """Return --pipeline-splits, after checking that they are layers in the right order."""
    possible = splits(network)
    chosen = args.pipeline_splits or []
    _check_number(chosen, possible, args)
    for name in chosen:
        if name not in possible:
            raise ValueError(
                f"--pipeline-splits: {name!r} is not a place to cut{nearest(name, possible)}; "
                f"these are accepted: {' '.join(possible)}"
            )
    for first, second in pairwise(chosen):
        if first == second:
            raise ValueError(f"--pipeline-splits: {first} is given twice: give each once")
        if possible.index(first) > possible.index(second):
            raise ValueError(
                f"--pipeline-splits: {first} is given before {second}, which runs earlier: give "
                f"them in the order {' '.join(sorted(chosen, key=possible.index))}"
            )
    return chosen


def _check_number(chosen: list[str], possible: list[str], args: argparse.Namespace) -> None:
    if args.shards == 1 and args.pipeline_schedule != "Sequential":
        raise ValueError(
            f"--pipeline-schedule {args.pipeline_schedule} is given with one IPU, which cannot "
            "run beside another one: give --shards 2 or more, or the schedule Sequential"
        )
    if not chosen:
        raise ValueError(
            "--pipeline needs --pipeline-splits, the first layer of each later stage: "
            f"{_wanted(args)} of {' '.join(possible)}"
        )
    if args.shards > 1 and len(chosen) != args.shards - 1:
        raise ValueError(
            f"--pipeline-splits: {len(chosen)} are given for {args.shards} IPUs: "
            f"{_wanted(args)} is accepted, one less than --shards"
        )


def _wanted(args: argparse.Namespace) -> str:
    return str(args.shards - 1) if args.shards > 1 else "any number"


# --- Balanced cuts --------------------------------------------------------------------------------


def _balanced_cuts(network: nn.Module, args: argparse.Namespace) -> list[str]:
    """Return the cuts that minimise the size of the largest part.

    The size of a part is the number of its weights and activations.
    """
    names = list(_layers(network))
    include, exclude = args.sharding_include_filter, args.sharding_exclude_filter
    allowed = [
        index
        for index, name in enumerate(names)
        if index
        and (not include or any(part in name for part in include))
        and not any(part in name for part in exclude)
    ]
    if len(allowed) < args.shards - 1:
        left = " ".join(names[index] for index in allowed) or "none"
        raise ValueError(
            f"--shards {args.shards} needs {args.shards - 1} places to cut and the filters leave "
            f"{len(allowed)} ({left}): lower --shards, or change --sharding-include-filter or "
            "--sharding-exclude-filter"
        )
    return [names[index] for index in _even_parts(_sizes(network, args), allowed, args.shards)]


def _even_parts(sizes: Sequence[int], allowed: Sequence[int], parts: int) -> tuple[int, ...]:
    """Divide a list into parts so that the largest sum of a part is as small as possible.

    The result has the first index of each part except the first part.

    Args:
        sizes: The sizes of the list's items, in order.
        allowed: The indices that may begin a part, ascending. There are ``parts`` - 1 or more.
        parts: The number of parts.
    """
    before = (0, *accumulate(sizes))
    impossible = before[-1] + 1  # more than any part

    @cache
    def best(end: int, parts: int) -> tuple[int, tuple[int, ...]]:
        """Divide the items before ``end``, and return the largest sum and the first indices."""
        if parts == 1:
            return before[end], ()
        return min(divided(end, parts), default=(impossible, ()))

    def divided(end: int, parts: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        for begin in allowed:
            if begin < end:
                largest, begins = best(begin, parts - 1)
                yield max(largest, before[end] - before[begin]), (*begins, begin)

    return best(len(sizes), parts)[1]


_COPIES_OF_WEIGHTS = 3  # weights, gradients and momentum


def _sizes(network: nn.Module, args: argparse.Namespace) -> list[int]:
    """Return the number of weight values and activation values of each layer in training.

    The activations are the results of all modules in a layer for one micro-batch. Only shapes are
    computed.
    """
    shapes = copy.deepcopy(network).to("meta").float()
    results: dict[str, int] = {}

    def watch(layer: str, part: nn.Module) -> None:
        def count(_part: nn.Module, _args: tuple, result: torch.Tensor) -> None:
            results[layer] += result.numel()

        part.register_forward_hook(count)

    for name, layer in _layers(shapes).items():
        results[name] = _COPIES_OF_WEIGHTS * sum(weight.numel() for weight in layer.parameters())
        for part in layer.modules():
            if not list(part.children()):
                watch(name, part)
    side = args.image_size
    shapes(torch.empty(args.batch_size, 3, side, side, device="meta"))
    return list(results.values())


# --- Marks in the network -------------------------------------------------------------------------


def _begin_stages(network: nn.Module, cuts: Sequence[str]) -> None:
    layers = _layers(network)
    for ipu, name in enumerate((next(iter(layers)), *cuts)):
        poptorch.BeginBlock(layers[name], user_id=f"stage{ipu}", ipu_id=ipu)


def _keep_inputs(network: nn.Module, cuts: Sequence[str]) -> None:
    """Keep the inputs of the layers after the cuts; other activations are recomputed."""
    for name in cuts:
        _layers(network)[name].register_forward_pre_hook(_kept_input)


def _keep_blocks(network: nn.Module) -> None:
    """Keep the results of layers that consist of several modules, such as residual blocks."""
    for layer in _layers(network).values():
        if list(layer.children()):
            layer.register_forward_hook(_kept_result)


def _limit_products(network: nn.Module, cuts: Sequence[str], shares: Sequence[float]) -> None:
    """Set the available memory proportion for the matrix products of each stage."""
    stage = 0
    for name, layer in _layers(network).items():
        stage += name in cuts
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_hook(partial(_limited, shares[stage]))


# These hooks are functions of the module, so that a network with hooks can be pickled.


def _kept_input(_layer: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (poptorch.recomputationCheckpoint(args[0]),)


def _kept_result(_layer: nn.Module, _args: tuple, result: torch.Tensor) -> torch.Tensor:
    return poptorch.recomputationCheckpoint(result)


def _limited(share: float, _layer: nn.Module, _args: tuple, result: torch.Tensor) -> torch.Tensor:
    return poptorch.set_available_memory(result, share)
