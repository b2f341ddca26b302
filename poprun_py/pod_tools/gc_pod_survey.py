"""The partitions of the configured pod, and the processes that hold their IPUs.

Asks the pod, and the launchers of running jobs: the pod knows a job by its launcher, which knows
its instances.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from popdist_py.pods.errors import PodError
from popdist_py.pods.values import Attachment
from popdist_py.pods.values import Partition as PodPartition
from poprun_py.errors import StartError
from poprun_py.pod_tools.gc_partitions import Holder, Partition
from poprun_py.pod_tools.gc_survey import holders_of, program_of, survey
from poprun_py.running.supervise.inspection import running_jobs

_REQUEST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PodSurvey:
    """What there is in a pod now.

    Attributes:
        where: the pod, as messages name it.
        user: who looks at it.
        partitions: all of the pod, by name; then those of jobs that run without it.
        silent: launchers that do not answer.
    """

    where: str
    user: str
    partitions: list[Partition]
    silent: list[int]

    def own(self) -> list[Partition]:
        """Return the partitions that this user, or a job of his, made."""
        return [each for each in self.partitions if each.owner in ("", self.user)]


def survey_pod(environ: Mapping[str, str]) -> PodSurvey | None:
    """Look at the pod that is configured; None where there is none.

    Raises:
        StartError: it cannot be asked.
    """
    from popdist_py.pods.finding import find_pod

    try:
        store = find_pod(None, environ, timeout=_REQUEST_SECONDS)
        if store is None:
            return None
        try:
            found, attachments = store.partitions(), store.attachments()
        finally:
            store.close()
    except PodError as error:
        raise StartError(str(error)) from None
    jobs = running_jobs()
    partitions = [_shown(each, attachments, jobs) for each in found]
    others, silent = survey()
    launchers = {each.holder.pid for each in attachments if _is_here(each)}
    # The first are the free IPUs, which there are none of beside a pod.
    partitions += [each for each in others[1:] if each.launcher not in launchers]
    return PodSurvey(store.where, store.user, partitions, silent)


def _is_here(attachment: Attachment) -> bool:
    return attachment.holder.host == os.uname().nodename


def _shown(
    partition: PodPartition, attachments: Iterable[Attachment], jobs: Mapping[int, Any]
) -> Partition:
    own = [each for each in attachments if each.partition == partition.name]
    return Partition(
        name=partition.name,
        num_ipus=partition.size,
        host=partition.hosts[0],
        holders=tuple(holder for each in own for holder in _holders(each, jobs)),
        ipus=partition.ipus,
        num_ilds=partition.num_ilds,
        state=partition.state.value.lower(),
        is_reconfigurable=partition.reconfigurable,
        owner=partition.owner,
    )


def _holders(attachment: Attachment, jobs: Mapping[int, Any]) -> Iterable[Holder]:
    """Return the instances of a job of this host; of others only the process that attached."""
    holder = attachment.holder
    if _is_here(attachment) and (holdings := jobs.get(holder.pid)) is not None:
        try:
            instances = holders_of(holdings, os.uname().nodename)
            # A job numbers its IPUs from 0, in the order in which it holds them.
            return [
                replace(each, ipus=tuple(attachment.ipus[ipu] for ipu in each.ipus))
                for each in instances
            ]
        except (LookupError, TypeError, ValueError):
            pass  # what another version answers
    return [program_of(attachment)]
