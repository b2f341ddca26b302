"""Random numbers on the device: one stream for each (seed, global replica, micro-batch).

So a split of the replicas over instances does not change any number. The host's own stream is left
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.overrides import TorchFunctionMode

from popdist_py.poptorch.calls.nested_values import map_tensors

__all__ = ["RandomStreams"]


class RandomStreams:
    """The device's random numbers, from one seed.

    Attributes:
        seed_value: the seed, the same on all instances.
    """

    def __init__(self, seed: int) -> None:
        self.seed_value = seed

    def stream(self, replica: int, step: int) -> int:
        """Return the seed of the stream of one replica's micro-batch number ``step``."""
        text = f"{self.seed_value}/{replica}/{step}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def seed(self, replica: int, step: int) -> None:
        """Let torch draw from the stream of one replica's micro-batch."""
        torch.default_generator.manual_seed(self.stream(replica, step))

    def seed_update(self, step: int) -> None:
        """Let torch draw from the stream of the update after micro-batch ``step``.

        It belongs to no replica, so that all instances round their weights alike.
        """
        self.seed(-1, step)

    @contextmanager
    def vectorised(self, replicas: Sequence[int], step: int) -> Iterator[None]:
        """Let random functions inside ``vmap`` draw every replica's numbers from its stream."""
        with _PerReplica([self.stream(replica, step) for replica in replicas]):
            yield


@contextmanager
def host_stream_kept(random: bool) -> Iterator[None]:
    """Leave the host's random stream as it was, if the enclosed code draws numbers."""
    if not random:
        yield
        return
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


class _PerReplica(TorchFunctionMode):
    """Runs each random function replica by replica, each with its own stream.

    The random functions are listed by name in ``_random_functions()``. Any other function that
    draws numbers runs once for all replicas. The comparison with the loop back end then fails.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _RANDOM:
            return func(*args, **kwargs)
        level = torch._C._functorch.maybe_current_level()
        if level is None:
            return func(*args, **kwargs)
        results = []
        for replica, generator in enumerate(self._generators):
            torch.default_generator.set_state(generator.get_state())
            slice_of = partial(_of_replica, replica=replica, level=level)
            own_args, own_kwargs = map_tensors(slice_of, (args, kwargs))
            with temporarily_pop_interpreter_stack():
                results.append(func(*own_args, **own_kwargs))
            generator.set_state(torch.default_generator.get_state())
        return map_tensors(partial(_stacked, level), *results)


def _stacked(level: int, *values: torch.Tensor) -> torch.Tensor:
    """Return the values of all replicas as one batched tensor."""
    return torch._C._functorch._add_batch_dim(torch.stack(values), 0, level)


def _of_replica(tensor: torch.Tensor, replica: int, level: int) -> torch.Tensor:
    """Return one replica's slice of a batched tensor, any other one as it is."""
    functorch = torch._C._functorch
    if not functorch.is_batchedtensor(tensor) or functorch.maybe_get_level(tensor) != level:
        return tensor
    return functorch.get_unwrapped(tensor).select(functorch.maybe_get_bdim(tensor), replica)


def _random_functions() -> frozenset[Callable[..., Any]]:
    functional, tensor = torch.nn.functional, torch.Tensor
    names = {
        functional: (
            "dropout",
            "dropout1d",
            "dropout2d",
            "dropout3d",
            "alpha_dropout",
            "feature_alpha_dropout",
            "rrelu",
            "gumbel_softmax",
            # Composites that drop out inside, where a function mode does not see it.
            "multi_head_attention_forward",
            "scaled_dot_product_attention",
        ),
        torch: (
            "rand",
            "randn",
            "randint",
            "randperm",
            "rand_like",
            "randn_like",
            "randint_like",
            "bernoulli",
            "normal",
            "poisson",
            "multinomial",
            "dropout",
            "feature_dropout",
        ),
        tensor: ("bernoulli", "multinomial"),
    }
    return frozenset(
        getattr(place, name)
        for place, found in names.items()
        for name in found
        if hasattr(place, name)
    )


_RANDOM = _random_functions()
