"""The partition of a pod from which a job gets its IPUs.

A pure function in planning/partition_decision.py decides which partition a job uses. The launch
plan contains a first decision about the partition. The launcher decides about the partition again
just before the job starts, because other jobs may have changed the pod.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import FrameType
from typing import TYPE_CHECKING

from popdist_py.errors import counted
from popdist_py.pods.find_pod import find_pod
from popdist_py.pods.model.pod_errors import (
    InUseError,
    NameTakenError,
    NotEnoughIpusError,
    PodError,
    UnknownNameError,
    UnreachableError,
)
from poprun_py.display.formatting import numbered
from poprun_py.errors import StartError
from poprun_py.launching.wait_for_resources import BusyError, Wait
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.job_partition import HOST, PORT, HeldPartition
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.user_program import short_name
from poprun_py.terminal import Console

# Only launches that use a pod import these modules about pods at run time.
if TYPE_CHECKING:
    from popdist_py.pods.model.pod_parts import Attachment, Partition, PartitionRequest
    from popdist_py.pods.model.pod_store import PodStore
    from poprun_py.planning.partition_decision import PartitionDecision
    from poprun_py.planning.pod_state import PodState

NO_POD = "none"
# The seconds between two queries of the pod while a job waits for IPUs. Each query sends three
# small requests, often to a server on another machine. A pod has no queue of jobs: free IPUs go to
# the first job that asks for them.
_POLL_SECONDS = 0.3
# The shortest and the longest pause in seconds between two checks whether a partition is ready.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
# If the wait for a partition takes longer than this many seconds, the launcher tells the user.
_SILENT_SECONDS = 1.0
# The most tries to get a partition before the job is refused. A try fails if another job takes the
# IPUs between the decision about the partition and the attachment of the IPUs.
_MOST_DECISIONS = 5


# --- deciding on a partition ----------------------------------------------------------------------


def planned_partition(config: LaunchConfig, environ: Mapping[str, str]) -> PartitionDecision | None:
    """Decide which partition of the pod a launch uses; return None if no pod is configured.

    If the pod does not answer, the returned decision refuses the launch.
    """
    try:
        store = _open_pod(config, environ)
        if store is None:
            return None
        with contextlib.closing(store):
            return _decide(store, config, environ)[0]
    except (StartError, PodError) as error:
        from poprun_py.planning.partition_decision import refusal

        return refusal(config.pod or "", str(error))


def _open_pod(config: LaunchConfig, environ: Mapping[str, str]) -> PodStore | None:
    """Return the pod that a launch uses; None if no pod is configured or --offline-mode is yes."""
    if config.offline_mode or config.pod == NO_POD:
        return None
    environ = dict(environ)
    if config.vipu_server_host is not None:
        environ[HOST] = config.vipu_server_host
    if config.is_given("vipu_server_port"):
        environ[PORT] = str(config.vipu_server_port)
    try:
        return find_pod(config.pod, environ, timeout=float(config.vipu_server_timeout))
    except PodError as error:
        raise StartError(str(error)) from None


def pod_state(store: PodStore) -> PodState:
    """Return the current state of a pod; raise PodError if the pod does not answer."""
    from poprun_py.planning.pod_state import PodState

    return PodState(
        where=store.where,
        user=store.user,
        pod=store.pod(),
        partitions=store.partitions(),
        attachments=store.attachments(),
    )


def _decide(
    store: PodStore, config: LaunchConfig, environ: Mapping[str, str]
) -> tuple[PartitionDecision, tuple[Partition, ...]]:
    """Return the decision about a launch's partition, and the partitions of dead launches.

    Before the caller acts on the decision, it removes the partitions of dead launches.
    """
    from poprun_py.planning.job_partition import is_abandoned, permanent_name, temporary_name
    from poprun_py.planning.partition_decision import decide_partition

    state, host = pod_state(store), socket.gethostname()
    abandoned = tuple(
        each
        for each in state.partitions
        # A user cannot remove the partitions of other users.
        if each.owner == state.user
        and is_abandoned(each, state.attachments, host, create_seconds=state.pod.create_seconds)
    )
    living = tuple(each for each in state.partitions if each not in abandoned)
    name = temporary_name(host) if config.remove_partition else permanent_name(host)
    state = replace(state, partitions=living)
    return decide_partition(config, environ, state, new_name=name), abandoned


# --- holding a partition while a job runs ---------------------------------------------------------


@contextlib.contextmanager
def ipus_of_job(
    planned: LaunchPlan, run_id: str, console: Console, wait: Wait
) -> Iterator[HeldPartition]:
    """Hold a partition for a job until the end of the ``with`` block.

    Raises:
        StartError: The job cannot get its IPUs.
    """
    config = planned.config
    store = _open_pod(config, planned.environ)
    if store is None:
        is_off = config.offline_mode or config.pod == NO_POD
        if not is_off:
            console.log("no pod is configured: the IPUs are emulated without a partition")
        yield HeldPartition(where=NO_POD if is_off else "")
        return
    job = _JobPartition(store, planned, console, wait)
    with contextlib.closing(store), _exit_on_signals(), contextlib.closing(job):
        try:
            held = job.take(run_id)
        except PodError as error:
            raise StartError(str(error)) from None
        yield held


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit, so that the job's partition is given back.

    While instances run, the supervisor replaces the signal handlers of this function.
    """

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(slots=True)
class _JobPartition:
    """The partition that one job uses, and the attachment of the job to IPUs of the partition."""

    store: PodStore
    plan: LaunchPlan
    console: Console
    wait: Wait
    has_waited: bool = False  # for IPUs of other jobs
    attachment: Attachment | None = None
    # The name of the partition that this job created, and the time of the partition's creation. If
    # a signal interrupts the creation of the partition, the time of creation stays 0.0.
    created: str = ""
    created_at: float = 0.0
    is_removed_at_end: bool = False
    # The partition that this job removed to create a new partition of the same name. If the job
    # does not get the new partition, the launcher creates the removed partition again.
    replaced: Partition | None = None

    # --- getting a partition before the job starts ----------------------------------------------

    def take(self, run_id: str) -> HeldPartition:
        """Decide on a partition for the job, prepare the partition, and attach the job's IPUs."""
        self._debug(f"connecting to V-IPU: {self.store.where}")
        left = _MOST_DECISIONS
        while True:
            waited = self.wait.seconds
            decision = self.wait.until(self._decide)
            if self.wait.seconds > waited:
                left = _MOST_DECISIONS
            if decision.inherited is not None:
                return HeldPartition(
                    where=self.store.where,
                    partition=decision.partition,
                    attachment=decision.inherited,
                    inherited_gcd=decision.inherited_gcd,
                )
            try:
                partition = self._wait_until_ready(self._prepare(decision))
                attachment = self._attach(partition, decision.num_ipus, run_id)
            except (InUseError, NameTakenError, NotEnoughIpusError, UnknownNameError) as error:
                left -= 1
                if not left:
                    raise
                self._give_back_partition()
                self.console.log(f"{error}; the launcher chooses a partition again")
                continue
            self.attachment = attachment
            self.replaced = None
            if not self.is_removed_at_end:
                self.created = ""
            ipus = numbered("IPU", attachment.ipus)
            self.console.log(f"this job uses {ipus} of partition {partition.name}")
            return HeldPartition(where=self.store.where, partition=partition, attachment=attachment)

    def _attach(self, partition: Partition, num_ipus: int, run_id: str) -> Attachment:
        from popdist_py.pods.model.pod_parts import Holder

        holder = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            user=self.store.user,
            program=short_name(self.plan.config.program),
            run_id=run_id,
        )
        return self.store.attach(partition.name, num_ipus, holder)

    def _decide(self) -> PartitionDecision:
        """Decide which partition the job uses, and remove the partitions of dead launches.

        Raises:
            BusyError: Other jobs hold the IPUs that the job needs.
            StartError: The decision refuses the job, or the partition does not fit the job's plan.
        """
        try:
            decision, abandoned = _decide(self.store, self.plan.config, self.plan.environ)
        except UnreachableError as error:
            # If the server of a pod is restarted while a job waits for IPUs, the job goes on
            # waiting.
            if not self.has_waited:
                raise
            raise BusyError(str(error), f"for IPUs: {error}", _POLL_SECONDS) from None
        for each in abandoned:
            # Another launch may remove the same partition at the same time.
            with contextlib.suppress(UnknownNameError, InUseError):
                self.store.remove_partition(each.name)
                self.console.log(
                    f"removed partition {each.name}, whose launcher is no longer running"
                )
        if decision.busy:
            self.has_waited = True
            raise BusyError(decision.reason, f"for IPUs: {decision.busy}", _POLL_SECONDS)
        self.console.log(decision.sentence)
        if decision.is_refused:
            raise StartError(decision.reason)
        found, topology = decision.num_ilds, self.plan.topology
        if found not in (None, topology.num_ilds) and topology.num_instances % found == 0:
            raise StartError(
                f"partition {decision.name} has {counted(found, 'IPU-Link domain')}, but the plan "
                f"was made for {counted(topology.num_ilds, 'IPU-Link domain')}; make a new plan"
            )
        return decision

    def _prepare(self, decision: PartitionDecision) -> Partition:
        """Create, replace or reset a partition as ``decision`` says, and return the partition."""
        from poprun_py.planning.partition_decision import Action

        # Each change of the pod is noted in ``self`` before the call that makes the change, because
        # a signal can interrupt the call after the change.
        if decision.action is Action.UPDATE:
            self.replaced = decision.partition
            self.store.remove_partition(decision.name)
        if decision.request is not None:
            return self._create(decision.request, is_removed_at_end=decision.removes)
        partition = self.store.partition(decision.name)
        if decision.action is Action.RESET:
            # Wait until an earlier creation or reset of the partition has ended, even with an
            # error.
            self._wait_until_ready(partition, accepts_error=True)
            return self.store.reset_partition(decision.name)
        return partition

    def _create(self, request: PartitionRequest, *, is_removed_at_end: bool) -> Partition:
        self.created, self.created_at = request.name, 0.0
        self.is_removed_at_end = is_removed_at_end
        try:
            created = self.store.create_partition(request)
        except PodError:
            self.created = ""
            raise
        self.created_at = created.created
        return created

    def _wait_until_ready(self, partition: Partition, *, accepts_error: bool = False) -> Partition:
        """Wait until a partition is ACTIVE; --vipu-partition-attempts limits the wait.

        Raises:
            StartError: The partition did not become ACTIVE in time, or is in the state ERROR.
        """
        from popdist_py.pods.model.pod_parts import PartitionState

        limit = self.plan.config.vipu_partition_attempts * self.plan.config.vipu_server_timeout
        began, pause = time.monotonic(), _FIRST_PAUSE
        # If a program that calls the Python API has closed its stderr, sys.stderr is None here.
        tells = sys.stderr is not None and sys.stderr.isatty()
        while partition.state is PartitionState.PENDING:
            waited = time.monotonic() - began
            if waited >= limit:
                raise StartError(
                    f"partition {partition.name} is still PENDING after {limit} s; raise "
                    "--vipu-partition-attempts or --vipu-server-timeout, or show the partition "
                    f"with poprun-py-pod get partition {partition.name}"
                )
            if tells and waited >= _SILENT_SECONDS:
                tells = False
                self.console.tell(
                    f"waiting at most {limit} s until partition {partition.name} is ready"
                )
            time.sleep(min(pause, limit - waited))
            pause = min(2 * pause, _LONGEST_PAUSE)
            partition = self.store.partition(partition.name)
        self._debug(f"the state of partition {partition.name} is PS_{partition.state}")
        if partition.state is PartitionState.ERROR and not accepts_error:
            raise StartError(
                f"partition {partition.name} is in the state ERROR ({partition.error}); reset the "
                f"partition with poprun-py-pod reset partition {partition.name}, or remove the "
                "partition"
            )
        return partition

    # --- giving the partition back after the job ------------------------------------------------

    def close(self) -> None:
        """Detach the job's IPUs, and remove a temporary partition; warn if this fails."""
        attachment, self.attachment = self.attachment, None
        try:
            if attachment is not None:
                self.store.detach(attachment)
            self._give_back_partition()
        except PodError as error:
            stays = f"; partition {self.created} may remain" if self.created else ""
            self.console.warn(
                f"the IPUs of this job cannot be released: {error}{stays}{self._lost}"
            )
        except (KeyboardInterrupt, SystemExit):
            stays = (
                f"partition {self.created}"
                if self.created
                else "the attachment of this job to its IPUs"
            )
            self.console.warn(
                f"the release of this job's IPUs was interrupted; {stays} may remain in "
                f"{self.store.where}{self._lost}"
            )
            raise

    @property
    def _lost(self) -> str:
        """The end of a warning, about a removed partition that was not created again; or empty."""
        if self.replaced is None:
            return ""
        from poprun_py.planning.pod_state import shape_text

        shape = shape_text(self.replaced)
        return (
            f"; partition {self.replaced.name}, which had {shape}, may be missing; create the "
            "partition again"
        )

    def _give_back_partition(self) -> None:
        """Remove the partition that this job created, and create the replaced partition again."""
        name, old = self.created, self.replaced
        try:
            # Another user may have removed this job's partition and created a partition of the same
            # name.
            if (
                name
                and (self.is_removed_at_end or old is not None)
                and self.created_at in (0.0, self.store.partition(name).created)
            ):
                self.store.remove_partition(name)
                self.console.log(f"removed partition {name}")
        except UnknownNameError:
            pass
        except InUseError as error:
            self.console.warn(
                f"partition {name} is not removed, because other jobs use the partition too: "
                f"{error}"
            )
        self.created = ""
        if old is not None:
            from poprun_py.planning.pod_state import shape_text

            # NameTakenError means that the old partition was not removed, or that another user has
            # created a partition of the same name.
            with contextlib.suppress(NameTakenError):
                self.store.create_partition(_request_of(old))
                self.console.log(
                    f"partition {old.name} has its earlier shape again: {shape_text(old)}"
                )
        self.replaced = None

    def _debug(self, line: str) -> None:
        if self.plan.config.verbosity >= 2:
            self.console.log(line)


def _request_of(partition: Partition) -> PartitionRequest:
    """Return a request to create a removed partition again."""
    from popdist_py.pods.model.pod_parts import PartitionRequest

    # The request names no cluster: the pod may create the partition in any cluster.
    names = {each.name for each in fields(PartitionRequest)} - {"cluster"}
    return PartitionRequest(**{name: getattr(partition, name) for name in names})
