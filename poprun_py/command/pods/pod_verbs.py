"""The verbs of ``poprun-py-pod`` for the pods of this machine: create, list, get, remove, serve."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from popdist_py.pods.find_pod import DEFAULT_PORT
from popdist_py.pods.pod_errors import PodError
from popdist_py.pods.pod_file import SYSTEMS, machine_pod, read_pod, system_pod
from poprun_py.command.pods.command_grammar import NAME, ObjectName, object_command
from poprun_py.command.pods.pod_access import (
    json_text,
    opened_pod,
    print_success,
    refusals,
    wants_json,
)
from poprun_py.command.pods.pod_objects import POD, ruled_table
from poprun_py.command.pods.pod_snapshot import PodSnapshot
from poprun_py.display.formatting import printable
from poprun_py.errors import UsageError
from poprun_py.terminal import print_out

if TYPE_CHECKING:
    from popdist_py.pods.model import Pod

# The value of --type for a pod with the IPUs of this host. The other values of --type are
# Graphcore's systems.
_MACHINE = "machine"
_TYPES = (*SYSTEMS, _MACHINE)
# Maps each heading of the table of ``list pods`` to a key of the JSON document.
_COLUMNS = {
    "Pod": "id", "IPUs": "num_ipus", "Free": "num_free_ipus", "Partitions": "num_partitions",
    "Folder": "where",
}  # fmt: skip


def _root() -> Path:
    from popdist_py.pods.pod_folders import pods_root

    return pods_root(os.environ)


def _pod_names(_: click.Context) -> Sequence[str]:
    from popdist_py.pods import pod_folders

    try:
        return pod_folders.list_pods(_root())
    except (PodError, OSError):
        return ()


_KNOWN_NAME = ObjectName(_pod_names)


@object_command(
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
    help="The Graphcore system to emulate; machine: the IPUs of this host.",
)
@click.option("--hosts", metavar="H1,H2,...", help="The hosts of the pod's IPU-Machines.")
@click.option(
    "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="POD.TOML",
    help="The description of a pod, such as the pod.toml of another pod.",
)  # fmt: skip
def create_pod(*, name: str, system: str | None, hosts: str | None, file: Path | None) -> None:
    """Make a pod of emulated IPUs on this machine.

    The pod has its own folder below POPRUN_PODS (~/.local/state/poprun-py/pods), with its
    description in pod.toml. The command "poprun-py-pod serve" lets other hosts use
    the pod.
    """
    if (system is None) == (file is None):
        raise UsageError("expected one of --type TYPE and --file POD.TOML")
    names = tuple(host.strip() for host in (hosts or "").split(",") if host.strip())
    if hosts is not None and (file is not None or system == _MACHINE or not names):
        raise UsageError("--hosts H1,H2,... names the hosts of --type POD4 to POD256")
    with refusals("create", "pod", name):
        from popdist_py.pods.pod_folders import make_pod

        make_pod(_root(), _requested_pod(name, system, names, file))
    print_success("create", "pod", name)


def _requested_pod(name: str, system: str | None, hosts: tuple[str, ...], file: Path | None) -> Pod:
    if file is not None:
        return replace(read_pod(file), name=name)
    if system == _MACHINE:
        return machine_pod(name)
    assert system is not None
    return system_pod(system, name, hosts or None)


@object_command("pods")
def list_pods() -> None:
    """List the pods of this machine, sorted by name."""
    from popdist_py.pods import pod_folders

    with refusals("list", "pods"):
        root = _root()
        documents = [_summary(root, name) for name in pod_folders.list_pods(root)]
    if wants_json():
        print_out(json_text(documents))
    else:
        cells = ([each[key] for key in _COLUMNS.values()] for each in documents)
        rows = [["?" if cell is None else printable(str(cell)) for cell in row] for row in cells]
        print_out(ruled_table(tuple(_COLUMNS), rows))


def _summary(root: Path, name: str) -> dict[str, str | int | None]:
    """Return the JSON document of a pod for ``list pods``.

    If the pod cannot be read, its numbers of IPUs and partitions are None.
    """
    from popdist_py.pods.pod_folders import open_pod

    counts: dict[str, str | int | None] = dict.fromkeys(
        ("num_ipus", "num_free_ipus", "num_partitions")
    )
    with contextlib.suppress(PodError), contextlib.closing(open_pod(root, name)) as store:
        total, partitions = len(store.pod().ipus()), store.partitions()
        num_free = total - sum(each.size for each in partitions)
        counts = {
            "num_ipus": total, "num_free_ipus": num_free, "num_partitions": len(partitions)
        }  # fmt: skip
    return {"id": name, **counts, "where": str(root / name)}


@object_command("pod")
@click.argument("name", type=_KNOWN_NAME, required=False)
def get_pod(*, name: str | None) -> None:
    """Show a pod of this machine; without NAME, the pod that the global options select."""
    with opened_pod(name) as store, refusals("get", "pod", name or ""):
        snapshot = PodSnapshot(store)
        shown = (
            json_text(POD.to_json(snapshot, snapshot.pod))
            if wants_json()
            else POD.fact_lines(snapshot, snapshot.pod)
        )
    print_out(shown)


@object_command("pod")
@click.argument("name", type=_KNOWN_NAME)
@click.option("--force", is_flag=True, help="Remove the pod even while its IPUs are in use.")
def remove_pod(*, name: str, force: bool) -> None:
    """Remove a pod of this machine, with its partitions and its folder."""
    from popdist_py.pods import pod_folders

    with refusals("remove", "pod", name):
        pod_folders.remove_pod(_root(), name, force=force)
    print_success("remove", "pod", name)


@object_command(
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
def serve_pod(*, host: str, port: int, verbose: bool) -> int:
    """Serve a pod of this machine to several hosts, until Ctrl-C.

    Clients need the token in the file "token" of the pod's folder. They send it over plain HTTP, so
    other hosts need a trusted network or an SSH tunnel.
    """
    from popdist_py.pods.folder_store import FolderStore

    with opened_pod() as store:
        where = store.where
        if not isinstance(store, FolderStore):
            raise UsageError(f"serve needs a pod of this machine, not a server: {where}")
    from poprun_py.command.pods.pod_server import serve

    return serve(Path(where), host=host, port=port, verbose=verbose)
