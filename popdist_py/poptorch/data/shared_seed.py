"""The random seed that all instances share to read a data set in the same random order.

If the program does not set a seed, instance 0 draws a seed and sends the seed to the other
instances. The module ``popdist_py.sharding`` divides the elements of the data set among the
instances.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from popdist_py import context
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["share_sampler", "shared_seed"]

# The classes of torch samplers that use the process's own random generator if the program does not
# give them a generator.
_DRAWS_FROM_PROCESS: Final = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)
# The seed that the log shows. A program that makes a loader for each epoch would otherwise log a
# seed in each epoch.
_announced: list[int] = []


def shared_seed(options: Options) -> int:
    """Return the seed in the options, or a seed that instance 0 draws for all instances.

    If the options do not contain a seed, all instances must call ``shared_seed`` equally often,
    because each call exchanges a seed between them. Each call draws one number from torch's random
    generator on every instance. Two calls therefore return different seeds, and generators with
    equal states stay equal. A program that calls ``torch.manual_seed()`` gets the same seeds in
    each run and with any number of instances.

    Raises:
        AssertionError: The options do not contain a seed, and the processes that the options
            describe are not the instances of this job.
    """
    if options.exists("random_seed"):
        return int(options.random_seed)
    is_alone = options.Distributed.numProcesses == 1
    assert is_alone or _is_connected(options), (
        f"Options.Distributed has {options.Distributed.numProcesses} processes, but these "
        "processes are not connected, so they cannot agree on a random order. Start the processes "
        "with poprun-py, or set the same poptorch.Options.randomSeed() in all of them"
    )
    own = int(torch.randint(2**31, ()))
    if is_alone:
        return own
    if not context.is_initialised():
        context.init()
    communicator = context.communicator()
    seed: int = communicator.broadcast_object(own)
    if communicator.instance_index == 0 and not _announced:
        _announced.append(seed)
        logger.warning(
            "shuffle=True without Options.randomSeed(): all instances use the seed %d, which "
            "instance 0 has drawn. To repeat this order of the data, set options.randomSeed(%d)",
            seed,
            seed,
        )
    return seed


def _is_connected(options: Options) -> bool:
    """Tell whether the options have as many processes as this job has instances."""
    return options.Distributed.numProcesses == context.environment().num_instances


def share_sampler(sampler: Any, options: Options) -> None:
    """Give a torch sampler a random generator that makes its orders equal on all instances.

    Equal seeds of the processes' own random generators would not be sufficient. If one instance
    drew one more random number than the other instances, the instances' shares of the data set
    would overlap in all later epochs.
    """
    draws = isinstance(sampler, _DRAWS_FROM_PROCESS) and sampler.generator is None
    is_alone = options.Distributed.numProcesses == 1
    if draws and (options.exists("random_seed") or is_alone or _is_connected(options)):
        sampler.generator = torch.Generator().manual_seed(shared_seed(options))
