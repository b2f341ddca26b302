"""The seed of orders that instances have to share, for programs that set none.

Instance 0 draws it, the others receive it. Who reads what is ``popdist_py.sharding``'s.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from popdist_py import context
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["share_sampler", "shared_seed"]

# torch's own samplers: without a generator each process draws from its own random numbers.
_DRAWS_FROM_PROCESS: Final = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)
# By the instances that share it, so that all of them know whether there is one already.
_seeds: dict[tuple[int, ...], int] = {}


def shared_seed(options: Options) -> int:
    """Return the seed of the options, or else one that instance 0 draws for the whole job.

    The first call of a program that set no seed is collective: every instance makes it.

    Raises:
        AssertionError: there is no seed, and nothing connects the processes of ``options``.
    """
    if options.exists("random_seed"):
        return int(options.random_seed)
    assert _is_connected(options), (
        f"Options.Distributed has {options.Distributed.numProcesses} processes that nothing "
        "connects, so they cannot agree on a random order: set one seed on all of them with "
        "poptorch.Options.randomSeed(), or start them with poprun-py"
    )
    if not context.is_initialised():
        context.init()
    communicator = context.communicator()
    instances = tuple(communicator.instances)
    if instances not in _seeds:
        # torch.manual_seed() decides, as it does for torch's own loaders. All instances draw, so
        # that those whose streams are equal keep them equal.
        seed = communicator.broadcast_object(int(torch.randint(2**31, ())))
        _seeds[instances] = seed
        if communicator.instance_index == 0:
            logger.warning(
                "shuffle without randomSeed: the instances share the seed %d; set "
                "options.randomSeed(%d) to repeat this order",
                seed,
                seed,
            )
    return _seeds[instances]


def _is_connected(options: Options) -> bool:
    """Tell whether the processes of the options are the instances of a job."""
    return options.Distributed.numProcesses == context.environment().num_instances


def share_sampler(sampler: Any, options: Options) -> None:
    """Let a sampler of torch draw the same orders on every instance.

    Equal random numbers of the processes would not do: one draw more on one instance, such as for
    a sample of a text that only it shows, and the shares would overlap from then on.
    """
    draws = isinstance(sampler, _DRAWS_FROM_PROCESS) and sampler.generator is None
    if draws and (options.exists("random_seed") or _is_connected(options)):
        sampler.generator = torch.Generator().manual_seed(shared_seed(options))
