"""Functions that list, make, open and remove pods. Each pod is a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from popdist_py.pods.folder.file_names import POD_FILE
from popdist_py.pods.model.pod_errors import (
    InUseError,
    InvalidRequestError,
    NameTakenError,
    PodError,
    check_known,
)

if TYPE_CHECKING:
    from popdist_py.pods.folder.folder_store import FolderStore
    from popdist_py.pods.model.pod_parts import Pod

# A pod cannot have these names, because ``find_pod`` gives them another meaning.
_WORDS = ("none", "server")


def pods_root(environ: Mapping[str, str]) -> Path:
    """Return the folder that contains the pods of this user.

    The environment variable POPRUN_PODS names the folder. If POPRUN_PODS is not set, the folder is
    ``poprun-py/pods`` in XDG_STATE_HOME. The default of XDG_STATE_HOME is ``~/.local/state``.
    """
    given = environ.get("POPRUN_PODS")
    try:
        if given:
            return Path(given).expanduser()
        state = environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(state).expanduser() / "poprun-py" / "pods"
    except RuntimeError:
        # If this user does not have a home folder, the returned path does not exist, and the list
        # of pods is empty.
        return Path(os.devnull, "poprun-py", "pods")


def list_pods(root: Path) -> tuple[str, ...]:
    """Return the sorted names of the pods below ``root``.

    If ``root`` is missing, or this user must not read it, the result is empty.

    Raises:
        PodError: ``root`` cannot be read because of another error, such as a disk error.
    """
    try:
        entries = [entry.name for entry in root.iterdir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ()
    except OSError as error:
        raise PodError(f"the folder of pods {root} cannot be read: {error.strerror}") from None
    # Folder names that begin with a dot belong to unfinished and removed pods.
    return tuple(
        sorted(
            name for name in entries if name[0] != "." and os.path.lexists(root / name / POD_FILE)
        )
    )


def make_pod(root: Path, pod: Pod) -> Path:
    """Make the folder of a new pod below ``root``, and return the path of the folder.

    Raises:
        InvalidRequestError: The pod or its name breaks a rule.
        NameTakenError: Another pod has this name.
        PodError: The folder cannot be written.
    """
    from popdist_py.pods.folder.folder_store import FolderStore
    from popdist_py.pods.folder.pod_file import format_pod
    from popdist_py.pods.model.pod_rules import check_pod

    check_pod(pod)
    if pod.name in _WORDS:
        raise InvalidRequestError(
            f"the name {pod.name!r} is reserved for the option --pod: choose another name for the "
            "pod"
        )
    folder = root / pod.name
    partial = root / f".{pod.name}.{os.urandom(4).hex()}.partial"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
        # The permissions must not depend on the umask of this process.
        partial.chmod(0o700)
        file = os.open(partial / POD_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            stream.write(format_pod(pod))
        FolderStore(partial).close()
        partial.rename(folder)
    except OSError as error:
        # If another pod has this name, rename() fails, because the other pod's folder is not empty.
        if os.path.lexists(folder):
            raise NameTakenError(
                f"a pod named {pod.name} already exists ({folder}): choose another name, or remove "
                "that pod first"
            ) from None
        raise PodError(f"the folder of pods {root} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def open_pod(root: Path, name: str, *, user: str | None = None) -> FolderStore:
    """Open a pod below ``root``.

    Raises:
        UnknownNameError: No pod has this name.
        PodError, DamagedError: The pod cannot be used.
    """
    check_known("pod", name, list_pods(root), f"in {root}")
    from popdist_py.pods.folder.folder_store import FolderStore

    return FolderStore(root / name, user=user)


def remove_pod(root: Path, name: str, *, force: bool = False) -> None:
    """Remove the folder of a pod. With ``force``, also remove a pod that is damaged or in use.

    Raises:
        UnknownNameError: No pod has this name.
        InUseError: The pod has partitions, and ``force`` is False.
        PodError: The folder cannot be removed.
    """
    check_known("pod", name, list_pods(root), f"in {root}")
    if not force:
        with contextlib.closing(open_pod(root, name)) as store:
            names = [each.name for each in store.partitions()]
        if names:
            raise InUseError(
                f"pod {name} has the partitions {', '.join(names)}: remove these partitions first, "
                "or use --force"
            )
    gone = root / f".{name}.{os.urandom(4).hex()}.removed"
    try:
        (root / name).rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        raise PodError(
            f"the pod's folder {root / name} cannot be removed: {error.strerror}"
        ) from None
