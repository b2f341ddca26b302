"""A job's partition from before it starts until after its end: made, attached, given back.

What is done was decided elsewhere (planning/partition_decision.py), and is decided again here just
before, since other jobs use the pod too.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING

from popdist_py.errors import counted
from popdist_py.pods.errors import (
    InUseError,
    NameTakenError,
    NotEnoughIpusError,
    PodError,
    UnknownNameError,
    UnreachableError,
)
from poprun_py.console import Console
from poprun_py.errors import StartError
from poprun_py.launching.partition_survey import NO_POD, decide_now, open_pod
from poprun_py.launching.waiting import Wait
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.partition_variables import HeldPartition

if TYPE_CHECKING:
    from popdist_py.pods.store import PodStore
    from popdist_py.pods.values import Attachment, Partition, PartitionRequest
    from poprun_py.planning.partition_decision import PartitionDecision

# Between two questions to the pod, which may be a server: each is three small requests. A pod keeps
# no queue: the first job that asks after IPUs became free gets them.
_POLL_SECONDS = 0.3
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0  # between two looks at a partition that is not ready
_PATIENCE_SECONDS = 1.0  # after which somebody at a terminal is told what is waited for
# Another job may take what was free a moment ago. It is then decided anew, so many times at most.
_MOST_DECISIONS = 5


@contextlib.contextmanager
def partition_for_job(
    config: LaunchConfig,
    environ: Mapping[str, str],
    console: Console,
    wait: Wait,
    *,
    run_id: str,
    program: str,
    num_ilds: int,
) -> Iterator[HeldPartition]:
    """Give a job its partition, and give back at the end what it had.

    Args:
        config: what is asked for.
        environ: the launcher's environment.
        console: takes what is done.
        wait: how long the job may wait for other jobs.
        run_id: the name of the run.
        program: its short name, for those who look at the pod.
        num_ilds: the IPU-Link domains that the job was planned for.

    Raises:
        StartError: the job cannot have its IPUs.
    """
    store = open_pod(config, environ)
    if store is None:
        if not config.offline_mode and config.pod != NO_POD:
            console.log("no pod is configured: the IPUs are emulated without a partition")
        is_off = config.offline_mode or config.pod == NO_POD
        yield HeldPartition(where=NO_POD if is_off else "")
        return
    job = _JobPartition(store, config, environ, console, num_ilds, wait)
    with contextlib.closing(store), _ended_by_signals():
        try:
            try:
                held = job.take(run_id, program)
            except PodError as error:
                raise StartError(str(error)) from None
            finally:
                wait.end()
            yield held
        finally:
            job.give_back()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind this process, so that nothing of the pod stays taken.

    While instances run, the supervisor has handlers of its own.
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


class _JobPartition:
    """What one job takes of a pod, and has to give back."""

    def __init__(
        self,
        store: PodStore,
        config: LaunchConfig,
        environ: Mapping[str, str],
        console: Console,
        num_ilds: int,
        wait: Wait,
    ) -> None:
        self._store = store
        self._config = config
        self._environ = environ
        self._console = console
        self._num_ilds = num_ilds
        self._job_wait = wait
        self._attachment: Attachment | None = None
        self._made = ""  # the partition that was made
        self._made_at = 0.0  # stays 0.0 if a signal interrupts its creation
        self._is_removed_at_end = False
        # The partition that the one in _made replaces, until the job has got that one.
        self._replaced: Partition | None = None

    # --- before the job -------------------------------------------------------------------------

    def take(self, run_id: str, program: str) -> HeldPartition:
        """Make or reset the partition as is decided, and attach the job's IPUs."""
        self._debug(f"connecting to V-IPU: {self._store.where}")
        left = _MOST_DECISIONS
        while True:
            use = self._decided()
            if use is None:
                left = _MOST_DECISIONS
                continue
            self._job_wait.end()
            self._console.log(use.sentence)
            self._check(use)
            if use.inherited is not None:
                return HeldPartition(
                    where=self._store.where,
                    partition=use.partition,
                    attachment=use.inherited,
                    inherited_gcd=use.inherited_gcd,
                )
            try:
                partition = self._wait(self._prepare(use))
                attachment = self._attach(use, partition, run_id, program)
            except (InUseError, NameTakenError, NotEnoughIpusError, UnknownNameError) as error:
                left -= 1
                if not left:
                    raise
                self._give_back_partition()
                self._console.log(f"{error}: deciding anew")
                continue
            self._attachment = attachment
            self._replaced = None
            if not self._is_removed_at_end:
                self._made = ""
            first, last = attachment.ipus[0], attachment.ipus[-1]
            ipus = f"IPU {first}" if first == last else f"IPUs {first}-{last}"
            self._console.log(f"attached to {ipus} of partition {partition.name}")
            return HeldPartition(
                where=self._store.where, partition=partition, attachment=attachment
            )

    def _decided(self) -> PartitionDecision | None:
        """Decide what is done; None where others have the IPUs, and the job has waited a moment."""
        try:
            use, left_behind = decide_now(self._store, self._config, self._environ)
        except UnreachableError as error:
            # The server of a pod may be started again meanwhile.
            if self._job_wait.has_begun and not self._job_wait.is_over:
                self._job_wait.sleep(_POLL_SECONDS, f"for IPUs: {error}")
                return None
            raise
        for each in left_behind:
            with contextlib.suppress(UnknownNameError, InUseError):
                self._store.remove_partition(each.name)
                self._console.log(f"removed partition {each.name} of a launch that is dead")
        if use.busy and not self._job_wait.is_over:
            self._job_wait.sleep(_POLL_SECONDS, f"for IPUs: {use.busy}")
            return None
        return use

    def _check(self, use: PartitionDecision) -> None:
        """Refuse what was decided to be refused, and what the plan was not made for."""
        from poprun_py.planning.partition_decision import Action

        if use.action is Action.REFUSE:
            raise StartError(self._job_wait.refusal(use.reason) if use.busy else use.reason)
        found, instances = use.num_ilds, self._config.num_instances
        if found is not None and instances % found == 0 and found != self._num_ilds:
            raise StartError(
                f"partition {use.name} has {counted(found, 'IPU-Link domain')}, the plan was "
                "made for "
                f"{self._num_ilds}: make a new plan"
            )

    def _prepare(self, use: PartitionDecision) -> Partition:
        """Do what is decided, and return the partition."""
        from poprun_py.planning.partition_decision import Action

        if use.action is Action.CREATE:
            assert use.request is not None
            return self._create(use.request, use)
        if use.action is Action.UPDATE:
            return self._change(use)
        if use.action is Action.RESET:
            # One that is not ready yet is in the state that a reset would bring it to.
            self._wait(self._store.partition(use.name), accepts_error=True)
            return self._store.reset_partition(use.name)
        return self._store.partition(use.name)

    def _create(self, request: PartitionRequest, use: PartitionDecision) -> Partition:
        # Interrupted in the call, it may be there or not.
        self._made, self._made_at = request.name, 0.0
        self._is_removed_at_end = use.removes
        try:
            made = self._store.create_partition(request)
        except PodError:
            self._made = ""
            raise
        self._made_at = made.created
        return made

    def _change(self, use: PartitionDecision) -> Partition:
        """Replace a partition; the old one is created again if the job does not get the new one."""
        assert use.request is not None
        # Set before the call: if a signal interrupts it, the old partition may be gone already.
        self._replaced = use.partition
        self._store.remove_partition(use.name)
        return self._create(use.request, use)

    def _wait(self, partition: Partition, *, accepts_error: bool = False) -> Partition:
        """Wait until a partition is ACTIVE, at most for all attempts.

        Raises:
            StartError: it is not, or is in the state ERROR.
        """
        from popdist_py.pods.values import PartitionState

        limit = self._config.vipu_partition_attempts * self._config.vipu_server_timeout
        began, pause, is_told = time.monotonic(), _FIRST_PAUSE, False
        while partition.state is PartitionState.PENDING:
            waited = time.monotonic() - began
            if waited >= limit:
                raise StartError(
                    f"partition {partition.name} is still PENDING after {limit} s: raise "
                    "--vipu-partition-attempts or --vipu-server-timeout, or look at it with "
                    f"poprun-py-pod get partition {partition.name}"
                )
            if not is_told and waited >= _PATIENCE_SECONDS:
                is_told = True
                if sys.stderr.isatty():
                    self._console.tell(f"waiting for partition {partition.name}, at most {limit} s")
            time.sleep(min(pause, limit - waited))
            pause = min(2 * pause, _LONGEST_PAUSE)
            partition = self._store.partition(partition.name)
        self._debug(f"partition {partition.name}: PS_{partition.state}")
        if partition.state is PartitionState.ERROR and not accepts_error:
            raise StartError(
                f"partition {partition.name} is in the state ERROR ({partition.error}): reset it "
                f"with poprun-py-pod reset partition {partition.name}, or remove it"
            )
        return partition

    def _attach(
        self, use: PartitionDecision, partition: Partition, run_id: str, program: str
    ) -> Attachment:
        import os

        from popdist_py.pods.values import Holder

        holder = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            user=self._store.user,
            program=program,
            run_id=run_id,
        )
        return self._store.attach(partition.name, use.num_ipus, holder)

    # --- after it -------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Detach the IPUs and remove the partition, if the job made it; what fails is a warning."""
        attachment, self._attachment = self._attachment, None
        try:
            if attachment is not None:
                self._store.detach(attachment)
            self._give_back_partition()
        except PodError as error:
            stays = f"; partition {self._made} may stay" if self._made else ""
            self._console.warn(f"the job's IPUs are not given back: {error}{stays}{self._lost}")
        except (KeyboardInterrupt, SystemExit):
            stays = f"partition {self._made}" if self._made else "an attachment"
            self._console.warn(f"interrupted: {stays} may stay in {self._store.where}{self._lost}")
            raise

    @property
    def _lost(self) -> str:
        """A text that names a replaced partition that could not be created again; else empty."""
        if self._replaced is None:
            return ""
        from poprun_py.planning.partition_decision import shape_text

        shape = shape_text(self._replaced)
        return f"; partition {self._replaced.name}, which had {shape}, may be missing: make it anew"

    def _give_back_partition(self) -> None:
        """Remove the partition that was made, and create again the one that it replaced."""
        name, old = self._made, self._replaced
        try:
            # Somebody may have removed it, and somebody made one of this name.
            if (
                name
                and (self._is_removed_at_end or old is not None)
                and self._made_at in (0.0, self._store.partition(name).created)
            ):
                self._store.remove_partition(name)
                self._console.log(f"removed partition {name}")
        except UnknownNameError:
            pass
        except InUseError as error:
            self._console.warn(f"the partition stays, since others use it too: {error}")
        self._made = ""
        if old is not None:
            from poprun_py.planning.partition_decision import shape_text

            # The name is taken if the old partition was not removed, or if another user took it.
            with contextlib.suppress(NameTakenError):
                self._store.create_partition(_like(old))
                self._console.log(f"partition {old.name} is as before: {shape_text(old)}")
        self._replaced = None

    def _debug(self, line: str) -> None:
        if self._config.verbosity >= 2:
            self._console.log(line)


def _like(partition: Partition) -> PartitionRequest:
    """Return what makes a partition like one that was removed."""
    from popdist_py.pods.values import PartitionRequest

    return PartitionRequest(
        name=partition.name,
        size=partition.size,
        allocation=partition.allocation,
        num_gcds=partition.num_gcds,
        num_ilds=partition.num_ilds,
        num_replicas=partition.num_replicas,
        reconfigurable=partition.reconfigurable,
        sync_type=partition.sync_type,
    )
