"""The client of a pod's server, which implements ``PodStore`` with HTTP requests.

``pod_api.py`` defines the calls, and ``lease_renewal.py`` renews the leases.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, TimeoutError

from popdist_py.pods.model.json_values import decode, encode, from_json, to_json
from popdist_py.pods.model.pod_errors import (
    ERRORS,
    InvalidRequestError,
    NotAllowedError,
    PodError,
    UnreachableError,
)
from popdist_py.pods.model.pod_parts import (
    Allocation,
    Attachment,
    Cluster,
    Holder,
    Partition,
    PartitionRequest,
    Pod,
)
from popdist_py.pods.model.pod_store import own_user
from popdist_py.pods.server import pod_api
from popdist_py.pods.server.lease_renewal import Renewal
from popdist_py.pods.server.pod_api import Call, Lease
from popdist_py.pods.server.server_url import host_and_port

Result = TypeVar("Result")

# A request without an answer is repeated after pauses. The pauses are long enough for a server to
# restart. More than four attempts would only delay the error message.
_ATTEMPTS: Final = 4
_FIRST_PAUSE: Final = 0.1
# The time-out for a connection, in seconds. A reachable host accepts a connection within
# milliseconds.
_CONNECT_SECONDS: Final = 10.0
# At the end of a job, the launcher waits at most this long for a server that does not answer.
_CLOSE_SECONDS: Final = 3.0
_LEAST_SECONDS: Final = 0.1
# The size limit of an answer is more than ten times the largest expected answer, which is a list of
# 256 partitions with long names.
_MOST_ANSWER_BYTES: Final = 16 << 20


class ServerStore:
    """A pod store that calls the server of a pod. Several threads may use one store.

    A request without an answer is repeated a few times. If the request changes the pod, the
    repeated request has the same id, so that the server makes the change only once. A daemon thread
    renews the leases while this process runs. Leases do not end while the server is stopped. A
    forked child neither renews nor releases the leases of its parent.

    Args:
        url: ``http://HOST:PORT``.
        token: The server's token.
        timeout: The time-out of each call, in seconds.
        user: The user who makes the calls; by default the user of this process.

    Raises:
        InvalidRequestError: ``url`` does not have the form ``http://HOST:PORT``.
        NotAllowedError: ``token`` is empty, or contains characters that are not allowed.
    """

    def __init__(
        self, url: str, token: str, timeout: float = 120.0, *, user: str | None = None
    ) -> None:
        self._host, self._port = host_and_port(url)
        self._address = f"{self._host}:{self._port}"
        self.where = f"http://{self._address}"
        token = token.strip()
        if not re.fullmatch(r"[!-~]+", token):
            raise NotAllowedError(f"the token for the pod server {self.where} {_TOKEN_ADVICE}")
        self.user = own_user() if user is None else user
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            pod_api.USER_HEADER: quote(self.user, safe="", errors="replace"),
        }
        self._timeout = timeout
        self._is_closed = False
        # The ids of the attachments that this process inherited from its parents and must not
        # release.
        self._of_parents: frozenset[str] = frozenset()
        self._start_over()

    def pod(self) -> Pod:
        """Return the pod without its partitions."""
        return self._ask(pod_api.POD)

    def partitions(self) -> tuple[Partition, ...]:
        """Return all partitions, sorted by name."""
        return self._ask(pod_api.PARTITIONS)

    def partition(self, name: str) -> Partition:
        """Return the current state of one partition."""
        return self._ask(pod_api.PARTITION, name=name)

    def create_partition(self, request: PartitionRequest) -> Partition:
        """Make a partition of free IPUs."""
        return self._ask(pod_api.CREATE_PARTITION, request=request)

    def reset_partition(self, name: str) -> Partition:
        """Reset a partition to its initial state."""
        return self._ask(pod_api.RESET_PARTITION, name=name)

    def fail_partition(self, name: str, reason: str) -> Partition:
        """Put a partition into the state ERROR."""
        return self._ask(pod_api.FAIL_PARTITION, name=name, reason=reason)

    def remove_partition(self, name: str, *, force: bool = False) -> None:
        """Remove a partition and free its IPUs."""
        self._ask(pod_api.REMOVE_PARTITION, name=name, force=force)

    def create_cluster(self, cluster: Cluster) -> None:
        """Make a cluster of agents."""
        self._ask(pod_api.CREATE_CLUSTER, cluster=cluster)

    def remove_cluster(self, name: str) -> None:
        """Remove a cluster."""
        self._ask(pod_api.REMOVE_CLUSTER, name=name)

    def create_allocation(self, allocation: Allocation) -> None:
        """Make an allocation of agents."""
        self._ask(pod_api.CREATE_ALLOCATION, allocation=allocation)

    def remove_allocation(self, name: str) -> None:
        """Remove an allocation."""
        self._ask(pod_api.REMOVE_ALLOCATION, name=name)

    def attach(
        self, partition: str, num_ipus: int, holder: Holder, *, ipus: Sequence[int] | None = None
    ) -> Attachment:
        """Attach IPUs of a partition to ``holder`` as long as this process renews the lease."""
        lease = self._attach(partition, num_ipus, holder, ipus)
        self._renewal.keep(lease)
        return lease.attachment

    def detach(self, attachment: Attachment) -> None:
        """Release the IPUs of an attachment. A second call does nothing.

        If the server cannot be reached, UnreachableError is raised. The IPUs then stay attached
        until their lease ends.
        """
        if self._is_child() or attachment.id in self._of_parents:
            return
        self._ask(pod_api.DETACH, attachment=self._renewal.forget(attachment))

    def attachments(self) -> tuple[Attachment, ...]:
        """Return all attachments, without their ids."""
        return self._ask(pod_api.ATTACHMENTS)

    def close(self) -> None:
        """Close this store, and release the IPUs that it attached. A second call does nothing.

        If the server does not answer, this method returns after about 3 seconds.
        """
        if self._is_closed or self._is_child():
            return
        self._is_closed = True
        deadline = time.monotonic() + min(self._timeout, _CLOSE_SECONDS)
        with contextlib.suppress(PodError):
            for attachment in self._renewal.end():
                left = max(_LEAST_SECONDS, deadline - time.monotonic())
                # Each request gets two attempts, because the server may have closed the idle
                # connection.
                self._ask_within(left, 2, pod_api.DETACH, {"attachment": attachment})
        self._pool.close()

    def _attach(
        self, partition: str, num_ipus: int, holder: Holder, ipus: Sequence[int] | None
    ) -> Lease:
        chosen = None if ipus is None else tuple(ipus)
        return self._ask(
            pod_api.ATTACH,
            partition=partition,
            num_ipus=num_ipus,
            holder=holder,
            ipus=chosen,
        )

    def _attach_again(self, lost: Attachment) -> Lease:
        return self._attach(lost.partition, len(lost.ipus), lost.holder, lost.ipus)

    def _renew(self, ids: tuple[str, ...], seconds: float) -> tuple[str, ...]:
        # A failed renewal is not repeated, because the next renewal follows soon.
        return self._ask_within(min(self._timeout, seconds), 1, pod_api.RENEW, {"ids": ids})

    def _is_child(self) -> bool:
        return self._pid != os.getpid()

    def _start_over(self) -> None:
        """Prepare new connections, because a forked child must not use its parent's connections."""
        self._pid = os.getpid()
        self._pool = urllib3.HTTPConnectionPool(self._host.strip("[]"), self._port, maxsize=4)
        self._renewal = Renewal(self._renew, self._attach_again)

    def _ask(self, call: Call[Result], **arguments: Any) -> Result:
        if self._is_closed:
            raise UnreachableError(
                f"this program has closed its connection to the pod server {self._address}: open "
                "the pod again"
            )
        if self._is_child():
            self._of_parents |= self._renewal.kept_ids()
            self._start_over()
        return self._ask_within(self._timeout, _ATTEMPTS, call, arguments)

    def _ask_within(
        self, seconds: float, attempts: int, call: Call[Result], arguments: Mapping[str, Any]
    ) -> Result:
        deadline = time.monotonic() + seconds
        headers = {**self._headers, pod_api.REQUEST_HEADER: secrets.token_hex(16)}
        values = to_json(arguments)
        target, body = call.path, None
        if call.changes:
            body = encode(values)
            if len(body) > pod_api.MOST_REQUEST_BYTES:
                raise InvalidRequestError(
                    f"the request {call.name} has {len(body)} bytes, but a request can have at "
                    f"most {pod_api.MOST_REQUEST_BYTES} bytes"
                )
        elif values:
            target += f"?{urlencode(values, errors='replace')}"
        pause = _FIRST_PAUSE
        for attempt in range(1, attempts + 1):
            left = max(_LEAST_SECONDS, deadline - time.monotonic())
            try:
                status, answer = self._send(target, body, headers, left)
            except HTTPError as error:
                left = deadline - time.monotonic()
                if attempt == attempts or left <= pause or _took_all_time(error):
                    raise self._unreachable(error, call, seconds) from None
                time.sleep(pause)
                pause *= 2
            else:
                return self._read(call, status, answer)
        raise AssertionError("the last attempt returns or raises")

    def _send(
        self, target: str, body: bytes | None, headers: Mapping[str, str], left: float
    ) -> tuple[int, bytes]:
        response = self._pool.urlopen(
            "GET" if body is None else "POST",
            target,
            body=body,
            headers=headers,
            retries=False,
            redirect=False,
            timeout=urllib3.Timeout(connect=min(left, _CONNECT_SECONDS), total=left),
            preload_content=False,
        )
        try:
            answer = response.read(_MOST_ANSWER_BYTES + 1, decode_content=False)
            if len(answer) <= _MOST_ANSWER_BYTES:
                response.drain_conn()
            return response.status, answer
        finally:
            response.release_conn()

    def _read(self, call: Call[Result], status: int, body: bytes) -> Result:
        """Return the result in a server's answer.

        Raises:
            UnreachableError: The answer is not from a pod server, or the server has another
                version.
            PodError: The server refused the call. The error code in the answer determines the
                subclass.
        """
        try:
            if len(body) > _MOST_ANSWER_BYTES:
                raise InvalidRequestError(
                    f"the answer has more than {_MOST_ANSWER_BYTES >> 20} MiB"
                )
            said = decode(body)
            if status == 200:
                result: Result = from_json(call.result, said, call.name)
                return result
            error = from_json(pod_api.Refusal, said, "answer")
        except InvalidRequestError as problem:
            raise UnreachableError(
                f"the answer of {self._address} (HTTP {status}) is not the answer of a pod server "
                f"of this version: {problem}; check the address, and install the same version of "
                "poprun-py on client and server"
            ) from None
        if error.error == "unknown-call":
            raise UnreachableError(
                f"the pod server {self._address} does not know {call.path}, because the server has "
                "another version: install the same version of poprun-py on client and server"
            )
        message = " ".join(error.message.split())
        if status == 401:
            message = f"the token for the pod server {self.where} {_TOKEN_ADVICE}"
        raise ERRORS.get(error.error, PodError)(message)

    def _unreachable(self, error: HTTPError, call: Call[Any], seconds: float) -> UnreachableError:
        doubt = "; the requested change may have been made" if call.changes else ""
        # NewConnectionError is tested first, because it is a subclass of urllib3's TimeoutError.
        if isinstance(error, NewConnectionError):
            reason = f"cannot be reached ({str(error).rpartition('] ')[2].rstrip(')')})"
            doubt = ""
        elif isinstance(error, TimeoutError):
            reason = f"did not answer within {seconds:g} s"
        else:
            reason = "closed the connection without an answer"
        return UnreachableError(
            f"the pod server {self._address} {reason}{doubt}: start the server on its host with "
            "poprun-py-pod serve, or check host and port (--api-host, --api-port, --pod)"
        )


_TOKEN_ADVICE: Final = (
    "is wrong: copy the file token from the folder of the server's pod to "
    "~/.config/poprun-py/pod-token, or set POPRUN_POD_TOKEN_FILE to the path of a copy"
)


def _took_all_time(error: HTTPError) -> bool:
    # If a host drops packets, the first attempt takes the whole time-out, and no time is left for a
    # second attempt.
    return isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError)
