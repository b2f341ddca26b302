"""Functions for the URLs of pod servers, ``http://HOST:PORT``.

These functions are not in the client's module, because that module imports urllib3.
"""

import re
from typing import Final

from popdist_py.pods.model.pod_errors import InvalidRequestError

# The default port of a pod server. V-IPU's server has the same default port.
DEFAULT_PORT: Final = 8090
_URL: Final = re.compile(r"http://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?/?")


def server_url(host: str, port: int | str) -> str:
    """Return the URL of a server. ``host`` may be an IPv6 address with or without brackets."""
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{port}"


def host_and_port(url: str) -> tuple[str, int]:
    """Return the host and the port in the URL of a server; the default port is 8090.

    A host that is an IPv6 address is returned with brackets.

    Raises:
        InvalidRequestError: ``url`` is not the URL of a pod server.
    """
    found = _URL.fullmatch(url)
    port = int(found[2] or DEFAULT_PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise InvalidRequestError(
            f"{url!r} is not the address of a pod server: expected http://HOST:PORT, without a "
            "user, a path or a query"
        )
    return found[1], port
