"""Random numbers on the device, with a separate stream for each replica and micro-batch.

A random stream depends only on the seed, the global index of the replica and the number of the
micro-batch. Therefore random numbers do not depend on how the replicas are distributed over
instances. Random numbers on the device do not change the state of the host's random generator.
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
    """The device's random streams, whose seeds are derived from one seed.

    Attributes:
        seed_value: The seed, which is the same on all instances.
    """

    def __init__(self, seed: int) -> None:
        self.seed_value = seed

    def stream(self, replica: int, step: int) -> int:
        """Return the seed of the random stream for micro-batch ``step`` of a replica."""
        text = f"{self.seed_value}/{replica}/{step}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def seed(self, replica: int, step: int) -> None:
        """Seed torch's default generator for micro-batch ``step`` of a replica."""
        torch.default_generator.manual_seed(self.stream(replica, step))

    def seed_update(self, step: int) -> None:
        """Seed torch's default generator for the weight update after micro-batch ``step``.

        The seed of a weight update does not depend on a replica. Therefore all instances round
        their weights in the same way.
        """
        self.seed(-1, step)

    @contextmanager
    def vectorised(self, replicas: Sequence[int], step: int) -> Iterator[None]:
        """Make random functions inside ``vmap`` use a separate random stream for each replica.

        Args:
            replicas: The indices of the replicas among all replicas of all instances.
            step: The number of the micro-batch that the replicas run.
        """
        with _PerReplica([self.stream(replica, step) for replica in replicas]):
            yield


@contextmanager
def host_stream_kept(random: bool) -> Iterator[None]:
    """Restore the state of the host's random generator at the end of the ``with`` block.

    Args:
        random: Whether the ``with`` block draws random numbers. With False, the state of the
            generator is neither saved nor restored.
    """
    if not random:
        yield
        return
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


class _PerReplica(TorchFunctionMode):
    """A torch function mode that runs random functions once for each replica.

    Each replica has a separate random stream. The function ``_random_functions()`` contains the
    list of random functions. A random function that is missing in ``_random_functions()`` runs only
    once for all replicas. The results of a model that calls a missing function differ from the
    results of ``LoopReplicas`` (the back end that defines the correct results), and the compiler
    detects the difference.
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
    """Stack the tensors of all replicas into one tensor that ``vmap`` treats as a batch."""
    return torch._C._functorch._add_batch_dim(torch.stack(values), 0, level)


def _of_replica(tensor: torch.Tensor, replica: int, level: int) -> torch.Tensor:
    """Return one replica's slice of a tensor that ``vmap`` batches, and other tensors unchanged."""
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
            # The attention functions are random too, because they apply dropout without a call that
            # a torch function mode could intercept.
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
