"""Which pod is asked, and what becomes of the answer: a line of success, a refusal, or neither.

RefusedError       1    the pod said no: the line is V-IPU's ``VERB OBJECT (NAME): failed: ...``
StartError         3    the pod cannot be reached or read
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from popdist_py.pods.errors import DamagedError, PodError, UnreachableError
from popdist_py.pods.finding import DEFAULT_PORT, find_pod
from popdist_py.pods.values import Partition, PartitionState
from poprun_py.errors import LaunchError, StartError, UsageError
from poprun_py.pod_tools.command_grammar import KEPT
from poprun_py.terminal import can_rewrite_lines, print_out, rewrite_line
from poprun_py.texts import printable

if TYPE_CHECKING:
    from popdist_py.pods.store import PodStore

_REQUEST_SECONDS = 30.0
# A shell that completes a word does not wait longer.
_COMPLETION_SECONDS = 2.0
_HOST = re.compile(r"[^\s/@?#\[\]]+|\[[0-9A-Fa-f:.]+\]")


class RefusedError(LaunchError):
    """The pod refused what was asked for; the message is the whole line."""


def asked_pod(kept: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Return where the pod is, as ``find_pod`` takes it; None where nothing names one.

    The command line wins over POPRUN_POD, and that over V-IPU's VIPU_CLI_API_HOST and _PORT.

    Raises:
        UsageError: the options contradict one another, or a host is none.
    """
    pod, host, port = (kept.get(name) for name in ("pod", "api_host", "api_port"))
    if host is None and port is None:
        host = environ.get("VIPU_CLI_API_HOST")
        if pod is not None or environ.get("POPRUN_POD") or not host:
            return pod
    elif pod is not None:
        raise UsageError("--pod and --api-host or --api-port exclude one another: give one")
    host = host or environ.get("VIPU_CLI_API_HOST") or "localhost"
    port = str(port or environ.get("VIPU_CLI_API_PORT") or DEFAULT_PORT)
    if not _HOST.fullmatch(host):
        raise UsageError(f"--api-host {host!r}: expected a name or an address, without a port")
    if not port.isdigit():
        raise UsageError(f"VIPU_CLI_API_PORT={port}: expected a port, such as {DEFAULT_PORT}")
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{port}"


def _kept() -> Mapping[str, Any]:
    kept: Mapping[str, Any] = click.get_current_context().meta.get(KEPT, {})
    return kept


@contextlib.contextmanager
def opened_pod(named: str | None = None) -> Iterator[PodStore]:
    """Open the pod that is ``named``, or else the one that the global options mean.

    Raises:
        UsageError: the words contradict one another.
        StartError: there is none, or it cannot be reached or read.
    """
    kept = _kept() if named is None else {"pod": named}
    store = _open(kept, _REQUEST_SECONDS)
    if store is None:
        raise StartError(
            "no pod is configured: name one with --pod WHERE or POPRUN_POD, or make one, such as "
            "poprun-py-pod create pod lab --type POD16"
        )
    with contextlib.closing(store):
        yield store


def _open(kept: Mapping[str, Any], seconds: float) -> PodStore | None:
    where = asked_pod(kept, os.environ)
    try:
        return find_pod(where, os.environ, timeout=seconds)
    except PodError as error:
        raise StartError(str(error)) from None


@contextlib.contextmanager
def doing(verb: str, kind: str, name: str = "") -> Iterator[None]:
    """Turn what the pod refuses in the block into the line of V-IPU.

    Raises:
        RefusedError: it refused.
        StartError: it cannot be reached or read, or the file system fails.
    """
    try:
        yield
    except (UnreachableError, DamagedError) as error:
        raise StartError(str(error)) from None
    except PodError as error:
        # Of no kind: what keeps the pod failed, not a rule.
        if type(error) is PodError:
            raise StartError(str(error)) from None
        raise RefusedError(f"{_words(verb, kind, name)}: failed: {error}") from None


def success(verb: str, kind: str, name: str) -> None:
    """Say that it is done, as V-IPU does."""
    print_out(f"{_words(verb, kind, name)}: success.")


def _words(verb: str, kind: str, name: str) -> str:
    return f"{verb} {kind} ({printable(name)})" if name else f"{verb} {kind}"


def wants_json() -> bool:
    """Tell whether JSON is asked for."""
    return bool(_kept().get("showjson"))


def print_json(document: Any) -> None:
    """Print a document for programs."""
    print_out(json.dumps(document, indent=2))


def wait_until_active(
    store: PodStore, verb: str, partition: Partition, seconds: float
) -> Partition:
    """Return a partition once it is ACTIVE; on a terminal a line says what is waited for.

    Raises:
        RefusedError: it is in the state ERROR, or not ACTIVE after ``seconds``.
        StartError, PodError: the pod cannot be asked.
    """
    name, deadline, pause = partition.name, time.monotonic() + seconds, 0.01
    with _progress(f"{verb} partition ({name}): waiting until it is ACTIVE"):
        while partition.state is PartitionState.PENDING and time.monotonic() < deadline:
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            # A server need not be asked a hundred times a second for minutes.
            pause = min(pause * 1.5, 0.5)
            partition = store.partition(name)
    failed = f"{verb} partition ({name}): failed: "
    if partition.state is PartitionState.ERROR:
        raise RefusedError(f"{failed}it is in the state ERROR: {partition.error}")
    if partition.state is PartitionState.PENDING:
        raise RefusedError(
            f"{failed}it is still PENDING after {seconds:g} s; wait longer with --wait, or look "
            f"with poprun-py-pod get partition {name}"
        )
    return partition


@contextlib.contextmanager
def _progress(words: str) -> Iterator[None]:
    if not can_rewrite_lines():
        yield
        return
    rewrite_line(words)
    try:
        yield
    finally:
        rewrite_line("")


def known_names(names: Callable[[PodStore], Sequence[str]]) -> Callable[[click.Context], list[str]]:
    """Return what completes names for a shell: those that ``names`` finds in the pod.

    A shell is told no errors: a pod that cannot be asked has no names.
    """

    def complete(context: click.Context) -> list[str]:
        try:
            store = _open(context.meta.get(KEPT, {}), _COMPLETION_SECONDS)
            if store is None:
                return []
            with contextlib.closing(store):
                return list(names(store))
        except (LaunchError, PodError, OSError):
            return []

    return complete
