"""The HTTP API of a pod's server, with a route for each method of a pod store.

Every request except ``GET /v1/version`` needs the server's token. The answer to a request is the
result of the store's method in JSON, or ``{"error": code, "message": text}``.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import falcon

from popdist_py.pods.model.json_values import decode, encode, to_json
from popdist_py.pods.model.pod_errors import (
    InUseError,
    InvalidRequestError,
    NameTakenError,
    NotAllowedError,
    NotEnoughIpusError,
    PodError,
    UnknownNameError,
)
from popdist_py.pods.server import pod_api
from popdist_py.pods.server.pod_api import Call, Lease
from poprun_py.versions import versions

if TYPE_CHECKING:
    from popdist_py.pods.folder.folder_store import FolderStore

Log = Callable[[str], None]

# The HTTP status of each kind of PodError; other kinds of errors have the HTTP status 500.
_STATUS: Final[dict[type[PodError], int]] = {
    InvalidRequestError: 400,
    NotAllowedError: 403,
    UnknownNameError: 404,
    NameTakenError: 409,
    InUseError: 409,
    NotEnoughIpusError: 409,
}
# Maps the HTTP status of falcon's own errors, such as an unknown path, to this API's error codes.
_CODES: Final = {401: NotAllowedError.code, 404: "unknown-call", 405: "unknown-call"}
# The time in seconds for which the server keeps an answer, and the greatest number of answers that
# the server keeps. Clients repeat a request for less than 300 seconds. An answer has at most about
# 30 kB.
_KEPT_SECONDS: Final = 300.0
_MAX_KEPT: Final = 1024


def make_application(
    store: FolderStore,
    token: str,
    *,
    seconds: float,
    log: Log,
    access_log: Log | None = None,
) -> falcon.App[Any, Any]:
    """Return a WSGI application, safe for several threads, that serves the pod in ``store``.

    Args:
        store: The store of the pod.
        token: The token that clients must send as ``Authorization: Bearer TOKEN``.
        seconds: The seconds after which a lease ends unless its holder renews it.
        log: A function that is called with the traceback of each internal error.
        access_log: A function that is called with a line about each request; None for no log.
    """
    api = _PodApi(store, seconds)
    middleware: list[Any] = [_Middleware(token, access_log)]
    application = falcon.App(media_type=falcon.MEDIA_JSON, middleware=middleware)
    for kind in (Exception, falcon.HTTPError, PodError):
        application.add_error_handler(kind, partial(_answer_error, log))
    application.add_route(pod_api.VERSION_PATH, SimpleNamespace(on_get=_answer_version))
    for call in pod_api.CALLS:
        route = (
            SimpleNamespace(on_post=partial(api.change, call))
            if call.changes
            else SimpleNamespace(on_get=partial(api.query, call))
        )
        application.add_route(call.path, route)
    return application


class _Middleware:
    """Middleware that refuses requests without the token, reads user names, and logs requests."""

    def __init__(self, token: str, access_log: Log | None) -> None:
        self._digest = _digest(token)
        self._access_log = access_log

    def process_request(self, request: falcon.Request, response: falcon.Response) -> None:
        request.context.since = time.monotonic()
        if request.path == pod_api.VERSION_PATH:
            return
        scheme, _, given = (request.auth or "").partition(" ")
        # Digests have equal length, so the duration of the comparison does not reveal the length of
        # the token.
        is_same = hmac.compare_digest(_digest(given.strip()), self._digest)
        if scheme.lower() != "bearer" or not is_same:
            raise falcon.HTTPUnauthorized(
                description="the token of this server is missing",
                challenges=["Bearer"],
            )
        user = unquote(request.get_header(pod_api.USER_HEADER) or "")
        if not re.fullmatch(r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffd]{1,64}", user):
            raise falcon.HTTPBadRequest(
                description=f"the header {pod_api.USER_HEADER} must contain the name of the user, "
                "percent-encoded: 1 to 64 characters without blanks"
            )
        request.context.user = user

    def process_response(
        self, request: falcon.Request, response: falcon.Response, resource: object, is_done: bool
    ) -> None:
        # Headers and bodies are not logged, because they contain secrets.
        if self._access_log is not None:
            user = quote(getattr(request.context, "user", "-"), safe="@+")
            seconds = time.monotonic() - request.context.since
            uri = quote(request.relative_uri[:200], safe="/?=&%.-_~")
            self._access_log(
                f"{request.remote_addr} {user} {quote(request.method)} {uri} "
                f"{response.status_code} {1000 * seconds:.1f} ms"
            )


class _PodApi:
    """The handlers of HTTP requests, which call the methods of a pod store."""

    def __init__(self, store: FolderStore, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._answers = _RepeatedAnswers()

    def query(self, call: Call[Any], request: falcon.Request, response: falcon.Response) -> None:
        """Answer a request that reads the pod, with arguments in the URL's query string."""
        arguments = call.read_arguments(dict(request.params))
        result = self._result(call, request.context.user, arguments)
        if call is pod_api.ATTACHMENTS:
            # Remove the ids, because a client that knows an attachment's id could release its IPUs.
            result = tuple(replace(each, id="") for each in result)
        response.data = encode(to_json(result))

    def change(self, call: Call[Any], request: falcon.Request, response: falcon.Response) -> None:
        """Answer a request that changes the pod, with arguments in the request's body.

        If a client repeats a request, the pod is changed only once.
        """
        body = request.bounded_stream.read(pod_api.MOST_REQUEST_BYTES + 1)
        if len(body) > pod_api.MOST_REQUEST_BYTES:
            raise InvalidRequestError(
                f"the request is too long: expected at most {pod_api.MOST_REQUEST_BYTES} bytes"
            )
        arguments = call.read_arguments(decode(body))
        user: str = request.context.user

        def act() -> bytes:
            return encode(to_json(self._result(call, user, arguments)))

        request_id = request.get_header(pod_api.REQUEST_HEADER)
        if request_id is None:
            response.data = act()
            return
        if not re.fullmatch(r"[!-~]{8,64}", request_id):
            raise InvalidRequestError(
                f"the header {pod_api.REQUEST_HEADER} must have 8 to 64 printable characters "
                "without blanks"
            )
        digest = hashlib.sha256(request.path.encode() + b"\0" + body).digest()
        response.data = self._answers.once(user, request_id, digest, act)

    def _result(self, call: Call[Any], user: str, arguments: dict[str, Any]) -> Any:
        store = self._store.with_user(user)
        if call is pod_api.ATTACH:
            attachment = store.attach_renewed(**arguments, seconds=self._seconds)
            return Lease(attachment=attachment, seconds=self._seconds)
        if call is pod_api.RENEW:
            return [each for each in arguments["ids"] if not self._renew(store, each)]
        return getattr(store, call.name.replace("-", "_"))(**arguments)

    def _renew(self, store: FolderStore, attachment_id: str) -> bool:
        """Renew a lease; return False if its attachment has ended."""
        try:
            store.renew(attachment_id, self._seconds)
        except UnknownNameError:
            return False
        return True


class _RepeatedAnswers:
    """The answers to recent requests that changed the pod, keyed by user and request id.

    A client repeats a request if it received no answer. The server answers the repeated request
    with the answer or error of the first request, as soon as the first request has been handled.
    When the server ends, the kept answers are lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, str], _KnownRequest] = {}

    def once(self, user: str, request_id: str, digest: bytes, act: Callable[[], bytes]) -> bytes:
        """Return the result of ``act``; for a repeated request, the result of the first request.

        Raises:
            InvalidRequestError: A different request of this user had the same id.
        """
        own = _KnownRequest(digest, time.monotonic(), Future())
        with self._lock:
            self._forget_old(own.since)
            known = self._requests.setdefault((user, request_id), own)
        if known.digest != digest:
            raise InvalidRequestError(
                f"a different request had the same id in the header {pod_api.REQUEST_HEADER}: "
                "choose a new id"
            )
        if known is own:
            try:
                own.answer.set_result(act())
            except Exception as error:
                own.answer.set_exception(error)
        return known.answer.result()

    def _forget_old(self, now: float) -> None:
        # The dictionary is ordered from the oldest answer to the newest.
        for key, known in list(self._requests.items()):
            if now - known.since <= _KEPT_SECONDS and len(self._requests) < _MAX_KEPT:
                break
            if known.answer.done():
                del self._requests[key]


@dataclass(frozen=True, slots=True)
class _KnownRequest:
    digest: bytes
    since: float
    answer: Future[bytes]


def _answer_version(_request: falcon.Request, response: falcon.Response) -> None:
    ours = versions(full=False)
    response.data = encode({"server": "poprun-py-pod", "api": pod_api.API, **ours})


def _answer_error(
    log: Log, _request: falcon.Request, response: falcon.Response, error: Exception, _: object
) -> None:
    if isinstance(error, PodError):
        status, code, message = _STATUS.get(type(error), 500), error.code, str(error)
    elif isinstance(error, falcon.HTTPError):
        status, message = error.status_code, error.description or error.title or ""
        code = _CODES.get(status, InvalidRequestError.code)
        for name, value in dict(error.headers or {}).items():
            response.set_header(name, value)
        if code == "unknown-call":
            calls = ", ".join(
                f"{'POST' if call.changes else 'GET'} {call.path}" for call in pod_api.CALLS
            )
            message = f"unknown call: expected one of GET {pod_api.VERSION_PATH}, {calls}"
    else:
        log("".join(traceback.format_exception(error)).rstrip())
        status, code = 500, PodError.code
        message = "the server failed to execute the request: see the standard error of the server"
    response.status = status
    response.content_type = falcon.MEDIA_JSON
    response.data = encode({"error": code, "message": " ".join(message.split())})


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
