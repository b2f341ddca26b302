"""Access to the pod that the command line selects, and messages about the results of requests.

RefusedError (exit code 1) means that the pod refused a request. The message of a
RefusedError has V-IPU's form ``VERB OBJECT (NAME): failed: ...``. StartError (exit code 3) means
that the pod cannot be reached or read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from popdist_py.pods.find_pod import find_pod
from popdist_py.pods.model.pod_errors import DamagedError, PodError, UnreachableError
from popdist_py.pods.server.server_url import DEFAULT_PORT, server_url
from poprun_py.command.pods.command_grammar import GLOBAL_OPTIONS
from poprun_py.command.pods.object_formats import ObjectKind
from poprun_py.command.pods.pod_snapshot import PodSnapshot
from poprun_py.display.formatting import printable
from poprun_py.errors import LaunchError, StartError, UsageError
from poprun_py.terminal import print_out

if TYPE_CHECKING:
    from popdist_py.pods.model.pod_store import PodStore

_REQUEST_SECONDS = 30.0
# The time-out of shell completion is shorter than that of commands, because the user waits for
# completion while typing.
_COMPLETION_SECONDS = 2.0
_HOST = re.compile(r"[^\s/@?#\[\]]+|\[[0-9A-Fa-f:.]+\]")
Completion = Callable[[click.Context, click.Parameter, str], list[str]]


class RefusedError(LaunchError):
    """The pod refused a request. The error's message is the complete line to print."""


# --- the selected pod ---------------------------------------------------------------------------


def pod_address(given: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Return the pod's name, folder or URL for ``find_pod``; None if the user names no pod.

    The command line takes precedence over POPRUN_POD, and POPRUN_POD over V-IPU's variables
    VIPU_CLI_API_HOST and VIPU_CLI_API_PORT.

    Args:
        given: The global options that the command line gives, keyed by parameter name.
        environ: The environment variables.

    Raises:
        UsageError: The options contradict one another, or the host or port is invalid.
    """
    pod, host, port = (given.get(name) for name in ("pod", "api_host", "api_port"))
    if host is None and port is None:
        host = environ.get("VIPU_CLI_API_HOST")
        if pod is not None or environ.get("POPRUN_POD") or not host:
            return pod
    elif pod is not None:
        raise UsageError(
            "--pod cannot be used together with --api-host or --api-port: give either --pod or the "
            "server's host and port"
        )
    host = host or environ.get("VIPU_CLI_API_HOST") or "localhost"
    port = str(port or environ.get("VIPU_CLI_API_PORT") or DEFAULT_PORT)
    if not _HOST.fullmatch(host):
        raise UsageError(
            f"--api-host {host!r}: expected a host name or an IP address, without a port"
        )
    if not port.isdigit():
        raise UsageError(
            f"VIPU_CLI_API_PORT={port}: expected a port number, such as {DEFAULT_PORT}"
        )
    return server_url(host, port)


def _global_options(context: click.Context | None = None) -> Mapping[str, Any]:
    given: Mapping[str, Any] = (context or click.get_current_context()).meta.get(GLOBAL_OPTIONS, {})
    return given


def wants_json() -> bool:
    """Return whether --showjson is given."""
    return bool(_global_options().get("showjson"))


@contextlib.contextmanager
def opened_pod(name: str | None = None) -> Iterator[PodStore]:
    """Open the pod with the given name, by default the pod that the global options select.

    Raises:
        UsageError: The global options contradict one another.
        StartError: The pod does not exist, or cannot be reached or read.
    """
    store = _find(_global_options() if name is None else {"pod": name}, _REQUEST_SECONDS)
    if store is None:
        raise StartError(
            "no pod is configured: select a pod with --pod WHERE or POPRUN_POD, or make a pod, for "
            "example with poprun-py-pod create pod lab --type POD16"
        )
    with contextlib.closing(store):
        yield store


def _find(given: Mapping[str, Any], seconds: float) -> PodStore | None:
    address = pod_address(given, os.environ)
    try:
        return find_pod(address, os.environ, timeout=seconds)
    except PodError as error:
        raise StartError(str(error)) from None


def completion(names: Callable[[click.Context], Iterable[str]]) -> Completion:
    """Return a function for click's ``shell_complete`` that offers ``names`` to the shell.

    If the names cannot be read, the function offers no names and prints no error.
    """

    def complete(context: click.Context, _: click.Parameter, start: str) -> list[str]:
        with contextlib.suppress(LaunchError, PodError, OSError):
            return [name for name in names(context) if name.startswith(start)]
        return []

    return complete


def known_names(kind: ObjectKind[Any]) -> Completion:
    """Return the shell completion function for the names of the pod's objects of one kind."""

    def names(context: click.Context) -> list[str]:
        store = _find(_global_options(context), _COMPLETION_SECONDS)
        if store is None:
            return []
        with contextlib.closing(store):
            return [each.name for each in kind.find_all(PodSnapshot(store))]

    return completion(names)


def _pods_of_machine(_: click.Context) -> Iterable[str]:
    from popdist_py.pods.folder.pod_folders import list_pods, pods_root

    return list_pods(pods_root(os.environ))


known_pods = completion(_pods_of_machine)


# --- results of requests ------------------------------------------------------------------------


@contextlib.contextmanager
def refusals(verb: str, kind: str, name: str = "") -> Iterator[None]:
    """Convert the pod's errors in the ``with`` block into errors of the command.

    Raises:
        RefusedError: The pod refused the request. The error's message is the line that V-IPU
            prints about a refusal.
        StartError: The pod cannot be reached or read, or its storage failed.
    """
    try:
        yield
    except PodError as error:
        # Refusals are subclasses of PodError, but PodError itself means that the storage failed.
        if type(error) in (PodError, UnreachableError, DamagedError):
            raise StartError(str(error)) from None
        raise RefusedError(f"{_request(verb, kind, name)}: failed: {error}") from None


@contextlib.contextmanager
def requested(verb: str, kind: str, name: str) -> Iterator[None]:
    """Convert errors as ``refusals`` does; print a line like ``create pod (lab): success.``."""
    with refusals(verb, kind, name):
        yield
    print_out(f"{_request(verb, kind, name)}: success.")


@contextlib.contextmanager
def changed_pod(verb: str, kind: str, name: str) -> Iterator[PodStore]:
    """Open the pod for a change in the ``with`` block; print the result as ``requested`` does.

    Raises:
        UsageError, StartError, RefusedError: ``opened_pod`` and ``refusals`` list the reasons.
    """
    with requested(verb, kind, name), opened_pod() as store:
        yield store


def _request(verb: str, kind: str, name: str) -> str:
    return f"{verb} {kind} ({printable(name)})" if name else f"{verb} {kind}"
