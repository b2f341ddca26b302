"""Search for the pod that the user names, or for the only pod of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from popdist_py.pods.folder.file_names import TOKEN_FILE
from popdist_py.pods.folder.pod_folders import list_pods, open_pod, pods_root
from popdist_py.pods.model.pod_errors import InvalidRequestError, PodError, UnknownNameError
from popdist_py.pods.server.server_url import DEFAULT_PORT, host_and_port, server_url

if TYPE_CHECKING:
    from popdist_py.pods.model.pod_store import PodStore


def find_pod(
    where: str | None, environ: Mapping[str, str], *, timeout: float = 120.0
) -> PodStore | None:
    """Open the configured pod; return None if no pod is configured.

    Args:
        where: The name or folder of a pod of this machine, ``http://HOST:PORT`` of a server,
            ``server`` or ``none``. ``server`` selects the server that V-IPU's environment variables
            name. These are IPUOF_VIPU_API_HOST and IPUOF_VIPU_API_PORT, or else VIPU_CLI_API_HOST
            and VIPU_CLI_API_PORT. The default server is localhost:8090. If ``where`` is None, the
            environment variable POPRUN_POD is used instead. If ``where`` is None and POPRUN_POD is
            not set, the only pod of this machine is used.
        environ: The environment variables.
        timeout: The time-out of each request to a server, in seconds.

    Raises:
        PodError: The pod cannot be opened, or the user must select one of several pods.
    """
    # An empty POPRUN_POD means the same as an unset POPRUN_POD.
    given = where if where is not None else environ.get("POPRUN_POD") or None
    if given == "none":
        return None
    root = pods_root(environ)
    if given is None:
        names = list_pods(root)
        if not names:
            return None
        if len(names) > 1:
            raise InvalidRequestError(
                f"{root} contains several pods ({', '.join(names)}): select one with --pod NAME or "
                "POPRUN_POD=NAME, or use no pod with --pod none or POPRUN_POD=none"
            )
        return open_pod(root, names[0])
    if given == "server":
        return _server(_url_of(environ), root, environ, timeout)
    if "://" in given:
        return _server(given, root, environ, timeout)
    if "/" in given:
        from popdist_py.pods.folder.folder_store import FolderStore

        return FolderStore(Path(given).expanduser())
    return open_pod(root, given)


def _url_of(environ: Mapping[str, str]) -> str:
    """Return the URL of the pod server that V-IPU's environment variables name."""
    for prefix in ("IPUOF_VIPU_API", "VIPU_CLI_API"):
        host = environ.get(f"{prefix}_HOST")
        if host:
            port = environ.get(f"{prefix}_PORT") or str(DEFAULT_PORT)
            return server_url(host, port)
    return server_url("localhost", environ.get("IPUOF_VIPU_API_PORT") or DEFAULT_PORT)


def _server(url: str, root: Path, environ: Mapping[str, str], timeout: float) -> PodStore:
    host, port = host_and_port(url)
    from popdist_py.pods.server.server_store import ServerStore

    return ServerStore(server_url(host, port), _token(host, root, environ), timeout)


def _token(host: str, root: Path, environ: Mapping[str, str]) -> str:
    """Read a server's token from a file.

    The token is not a command-line argument, because all users can see command lines.
    """
    named = environ.get("POPRUN_POD_TOKEN_FILE")
    if named:
        files = [Path(named).expanduser()]
    else:
        # The token of a server on this machine is in the folder of the server's pod.
        local = [file for name in list_pods(root) if (file := root / name / TOKEN_FILE).exists()]
        config = environ.get("XDG_CONFIG_HOME") or "~/.config"
        own = [Path(config).expanduser() / "poprun-py" / "pod-token"]
        own = [file for file in own if file.exists()]
        here = host in ("localhost", "[::1]", os.uname().nodename) or host.startswith("127.")
        files = (local or own) if here else (own or local)
    if len(files) != 1:
        several = (
            f"{len(files)} pods of this machine have a token file"
            if files
            else "no token file was found"
        )
        raise UnknownNameError(
            f"the token of the pod's server is not known ({several}): copy the file "
            f"{TOKEN_FILE!r} from the folder of the server's pod to ~/.config/poprun-py/pod-token, "
            "or set POPRUN_POD_TOKEN_FILE to the path of a copy"
        )
    try:
        token = files[0].read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not ASCII text"
        raise PodError(f"the token file {files[0]} cannot be read: {why}") from None
    if not token:
        raise PodError(
            f"the token file {files[0]} is empty: copy the token of the pod's server into the file"
        )
    return token
