"""The job in one of whose instances a launch is, and which of its IPUs that instance has. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from popdist_py.environment import RUN_ID, InstanceEnvironment
from popdist_py.errors import WireError
from popdist_py.pods.values import Attachment


def held_around(
    environ: Mapping[str, str], attachments: Collection[Attachment], partition: str
) -> Attachment | None:
    """Return what the job holds of a partition, of that only the IPUs of this instance.

    They are as many as a device has, and neighbours: a power of two from a multiple of itself.
    None where this is no instance of a job that holds some.
    """
    run_id = environ.get(RUN_ID)
    found = (
        each
        for each in attachments
        if run_id and each.partition == partition and each.holder.run_id == run_id
    )
    around = next(found, None)
    if around is None:
        return None
    try:
        job = InstanceEnvironment.from_environ(environ)
    except WireError:
        return around
    width = job.num_ipus_per_replica
    size = 1 << (job.num_local_replicas * width - 1).bit_length()
    start = job.replica_index_offset * width // size * size
    return replace(around, ipus=around.ipus[start : start + size])
