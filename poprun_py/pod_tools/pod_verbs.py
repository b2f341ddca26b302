"""The verbs of pods of this machine: create, list, get, remove, and serve for other hosts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from popdist_py.pods.errors import PodError
from popdist_py.pods.finding import DEFAULT_PORT
from popdist_py.pods.pod_file import SYSTEMS, machine_pod, read_pod, system_pod
from poprun_py.errors import UsageError
from poprun_py.pod_tools.command_grammar import NAME, Names, action
from poprun_py.pod_tools.documents import pod_document
from poprun_py.pod_tools.pod_access import (
    doing,
    opened_pod,
    print_json,
    success,
    wants_json,
)
from poprun_py.pod_tools.pod_objects import pod_facts
from poprun_py.pod_tools.tables import table
from poprun_py.terminal import print_out

if TYPE_CHECKING:
    from popdist_py.pods.values import Pod

_KIND = "pod"
# Beside the systems of popdist_py/pods/pod_file.py: the IPUs of this host.
_MACHINE = "machine"
_TYPES = (*SYSTEMS, _MACHINE)


def _root() -> Path:
    from popdist_py.pods.folder import pods_root

    return pods_root(os.environ)


def _pod_names(_: click.Context) -> Sequence[str]:
    from popdist_py.pods.folder import list_pods

    try:
        return list_pods(_root())
    except (PodError, OSError):
        return ()


# Name, IPUs, free IPUs, partitions and folder of a pod.
_Looked = tuple[str, int | None, int | None, int | None, str]
_KNOWN = Names(_pod_names)


@action(
    "pod",
    "create pod lab --type POD64",
    "create pod lab --type POD128 --hosts node0,node1,node2,node3",
    "create pod lab --file pod.toml",
)
@NAME
@click.option(
    "--type",
    "system",
    type=click.Choice(_TYPES),
    help="The system that it is like; machine: the IPUs of this host.",
)
@click.option("--hosts", metavar="H1,H2,...", help="The hosts that share its IPU-Machines.")
@click.option(
    "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="POD.TOML",
    help="A description of another pod.",
)  # fmt: skip
def CREATE(*, name: str, system: str | None, hosts: str | None, file: Path | None) -> None:
    """Make a pod of emulated IPUs, kept on this machine.

    It lies in a folder of its own below POPRUN_PODS (~/.local/state/poprun-py/pods), where pod.toml
    describes it. Hosts that share a pod ask its server: poprun-py-pod serve.
    """
    if (system is None) == (file is None):
        raise UsageError("expected one of --type TYPE and --file POD.TOML")
    names = tuple(host.strip() for host in (hosts or "").split(",") if host.strip())
    if hosts is not None and (file is not None or system == _MACHINE or not names):
        raise UsageError("--hosts H1,H2,... names the hosts of --type POD4 to POD256")
    with doing("create", _KIND, name):
        from popdist_py.pods.folder import make_pod

        make_pod(_root(), _described(name, system, names, file))
    success("create", _KIND, name)


def _described(name: str, system: str | None, hosts: tuple[str, ...], file: Path | None) -> Pod:
    """Return the pod that the options describe."""
    if file is not None:
        return replace(read_pod(file), name=name)
    if system == _MACHINE:
        return machine_pod(name)
    assert system is not None
    return system_pod(system, name, hosts or None)


@action("pods")
def LIST() -> None:
    """List the pods of this machine, by name."""
    from popdist_py.pods.folder import list_pods

    with doing("list", "pods"):
        root = _root()
        found = list(_looked_at(root, list_pods(root)))
    if wants_json():
        keys = ("id", "num_ipus", "num_free_ipus", "num_partitions", "where")
        print_json([dict(zip(keys, row, strict=True)) for row in found])
    else:
        rows = (["?" if cell is None else cell for cell in row] for row in found)
        print_out(table(("Pod", "IPUs", "Free", "Partitions", "Folder"), rows))


def _looked_at(
    root: Path, names: Sequence[str]
) -> Iterator[tuple[str, int | None, int | None, int | None, str]]:
    """Return what each pod is; None for what cannot be read."""
    from popdist_py.pods.folder import open_pod

    for name in names:
        counts: tuple[int | None, int | None, int | None] = (None, None, None)
        with contextlib.suppress(PodError), contextlib.closing(open_pod(root, name)) as store:
            total, partitions = len(store.pod().ipus()), store.partitions()
            counts = total, total - sum(each.size for each in partitions), len(partitions)
        yield (name, *counts, str(root / name))


@action("pod")
@click.argument("name", type=_KNOWN, required=False)
def GET(*, name: str | None) -> None:
    """Show a pod of this machine; without a name the one that is asked."""
    with opened_pod(name) as store, doing("get", _KIND, name or ""):
        pod, partitions = store.pod(), store.partitions()
    if wants_json():
        print_json(pod_document(pod, store.where, partitions))
    else:
        print_out(pod_facts(pod, store.where, partitions))


@action("pod")
@click.argument("name", type=_KNOWN)
@click.option("--force", is_flag=True, help="Also while somebody holds IPUs of it.")
def REMOVE(*, name: str, force: bool) -> None:
    """Remove a pod of this machine, with its partitions and its folder."""
    from popdist_py.pods.folder import remove_pod

    with doing("remove", _KIND, name):
        remove_pod(_root(), name, force=force)
    success("remove", _KIND, name)


@action(
    "serve",
    "serve --pod lab",
    "serve --pod lab --host 10.1.3.101 --port 8090",
)
@click.option(
    "--host",
    metavar="HOST",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on.",
)
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="The port to listen on.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log every request.")
def SERVE(*, host: str, port: int, verbose: bool) -> int:
    """Serve a pod of this machine to several hosts, until Ctrl-C.

    Clients need the token of the file "token" in the pod's folder. It is sent as plain HTTP: other
    hosts need a network that is trusted, or a tunnel of ssh.
    """
    from popdist_py.pods.database import FolderStore

    with opened_pod() as store:
        where = store.where
        if not isinstance(store, FolderStore):
            raise UsageError(f"serve needs a pod of this machine, not a server: {where}")
    from poprun_py.pod_tools.pod_server import serve

    return serve(Path(where), host=host, port=port, verbose=verbose)
