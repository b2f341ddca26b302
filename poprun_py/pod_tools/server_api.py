"""The API of a pod's server: every call of a store as a route, behind a token.

``GET /v1/version`` alone needs none. An answer is the call's result, or ``{"error": code,
"message": text}``. Nothing here listens, or decides what a pod allows.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Protocol
from urllib.parse import quote, unquote

import falcon

from popdist_py.pods import wire
from popdist_py.pods.errors import (
    DamagedError,
    InUseError,
    InvalidRequestError,
    NameTakenError,
    NotAllowedError,
    NotEnoughIpusError,
    PodError,
    UnknownNameError,
)
from popdist_py.pods.store import PodStore
from popdist_py.pods.values import Attachment, Holder
from popdist_py.pods.wire import Call, Lease
from poprun_py.pod_tools.lease_extension import LeaseClock
from poprun_py.pod_tools.repeats import Repeats
from poprun_py.versions import versions

Log = Callable[[str], None]

_STATUS: Final[tuple[tuple[type[PodError], int], ...]] = (
    (InvalidRequestError, 400),
    (NotAllowedError, 403),
    (UnknownNameError, 404),
    (NameTakenError, 409),
    (InUseError, 409),
    (NotEnoughIpusError, 409),
    (DamagedError, 500),
    (PodError, 500),
)
# Of HTTP's own refusals: an unknown path, a wrong verb, headers that are none.
_CODES: Final = {401: NotAllowedError.code, 404: "unknown-call", 405: "unknown-call"}


class ServedStore(PodStore, Protocol):
    """What a server needs of the store behind it, beside all of ``PodStore``."""

    def with_user(self, user: str) -> ServedStore:
        """Return a view that asks for another user."""

    def attach_renewed(
        self,
        partition: str,
        num_ipus: int,
        holder: Holder,
        *,
        ipus: tuple[int, ...] | None = None,
        seconds: float,
    ) -> Attachment:
        """Attach for a holder on another host, which has the IPUs as long as it renews them."""

    def renew(self, attachment_id: str, seconds: float) -> None:
        """Let a remote holder keep its IPUs for ``seconds`` from now (UnknownNameError: gone)."""

    def renew_all(self, seconds: float) -> None:
        """Give all remote holders ``seconds`` from now."""


def make_application(
    store: ServedStore,
    token: str,
    *,
    seconds: float,
    log: Log,
    access_log: Log | None = None,
    clock: LeaseClock | None = None,
) -> falcon.App[Any, Any]:
    """Return the WSGI application.

    Args:
        store: what keeps the pod; safe to use from several threads.
        token: what clients must send as ``Authorization: Bearer TOKEN``.
        seconds: how long an attachment lives without being renewed.
        log: takes what went wrong here, line by line.
        access_log: takes a line for every request.
        clock: is told of every request.
    """
    clock = clock or LeaseClock(store.renew_all, seconds)
    middleware: list[Any] = [_Record(access_log), _Gate(token, clock)]
    application = falcon.App(media_type=falcon.MEDIA_JSON, middleware=middleware)
    errors = _Errors(log)
    application.add_error_handler(Exception, errors.ours)
    application.add_error_handler(falcon.HTTPError, errors.of_http)
    application.add_error_handler(PodError, errors.refused)
    application.add_route(wire.VERSION_PATH, _Version())
    repeats = Repeats()
    for call in wire.CALLS:
        kind = _Change(call, store, seconds, repeats) if call.changes else _Question(call, store)
        application.add_route(call.path, kind)
    return application


class _Gate:
    """Lets in who knows the token; a stranger is told the same whatever it asks."""

    def __init__(self, token: str, clock: LeaseClock) -> None:
        self._digest = _digest(token)
        self._clock = clock

    def process_request(self, request: falcon.Request, response: falcon.Response) -> None:
        if request.path == wire.VERSION_PATH:
            return
        scheme, _, given = (request.auth or "").partition(" ")
        # Digests have one length, so that the time tells nothing about the token's.
        is_same = hmac.compare_digest(_digest(given.strip()), self._digest)
        if scheme.lower() != "bearer" or not is_same:
            raise falcon.HTTPUnauthorized(
                description="the token of this server is needed", challenges=["Bearer"]
            )
        request.context.user = _user(request)
        self._clock.tick()


class _Record:
    """Writes the access log: who, as whom, what, and how it ended; no header, no body."""

    def __init__(self, log: Log | None) -> None:
        self._log = log

    def process_request(self, request: falcon.Request, response: falcon.Response) -> None:
        request.context.since = time.monotonic()

    def process_response(
        self, request: falcon.Request, response: falcon.Response, resource: object, is_done: bool
    ) -> None:
        if self._log is not None:
            user = quote(getattr(request.context, "user", "-"), safe="@+")
            took = time.monotonic() - request.context.since
            what = quote(request.relative_uri[:200], safe="/?=&%.-_~")
            self._log(
                f"{request.remote_addr} {user} {quote(request.method)} {what} "
                f"{response.status_code} {1000 * took:.1f} ms"
            )


class _Version:
    """Tells anybody that a pod's server is here, and how to speak to it."""

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        ours = versions(full=False)
        response.data = wire.encode({"server": "poprun-py-pod", "api": wire.API, **ours})


class _Question:
    """A call that changes nothing: its arguments stand in the query."""

    def __init__(self, call: Call[Any], store: ServedStore) -> None:
        self._call = call
        self._store = store

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        arguments = self._call.read_arguments(dict(request.params))
        store = self._store.with_user(request.context.user)
        result = _plain_call(store, self._call, arguments)
        if self._call is wire.ATTACHMENTS:
            # Whoever knows an id can give the IPUs back.
            result = tuple(replace(each, id="") for each in result)
        response.data = wire.encode(wire.to_json(result))


class _Change:
    """A call that changes the pod: its arguments stand in the body; a repeat is done once."""

    def __init__(
        self, call: Call[Any], store: ServedStore, seconds: float, repeats: Repeats
    ) -> None:
        self._call = call
        self._store = store
        self._seconds = seconds
        self._repeats = repeats

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = request.bounded_stream.read(wire.MOST_REQUEST_BYTES + 1)
        if len(body) > wire.MOST_REQUEST_BYTES:
            raise InvalidRequestError(f"a request has at most {wire.MOST_REQUEST_BYTES} bytes")
        arguments = self._call.read_arguments(wire.decode(body))
        user: str = request.context.user

        def act() -> bytes:
            return wire.encode(wire.to_json(self._act(self._store.with_user(user), arguments)))

        request_id = request.get_header(wire.REQUEST_HEADER)
        if request_id is None:
            response.data = act()
        else:
            _check_request_id(request_id)
            what = hashlib.sha256(request.path.encode() + b"\0" + body).digest()
            response.data = self._repeats.once(user, request_id, what, act)

    def _act(self, store: ServedStore, arguments: dict[str, Any]) -> object:
        if self._call is wire.ATTACH:
            attachment = store.attach_renewed(**arguments, seconds=self._seconds)
            return Lease(attachment=attachment, seconds=self._seconds)
        if self._call is wire.RENEW:
            return [each for each in arguments["ids"] if not self._renews(store, each)]
        return _plain_call(store, self._call, arguments)

    def _renews(self, store: ServedStore, attachment_id: str) -> bool:
        try:
            store.renew(attachment_id, self._seconds)
        except UnknownNameError:
            return False
        return True


class _Errors:
    """Turns what is raised into answers."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def refused(
        self, request: falcon.Request, response: falcon.Response, error: PodError, _: object
    ) -> None:
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        _answer(response, status, error.code, str(error))

    def of_http(
        self, request: falcon.Request, response: falcon.Response, error: falcon.HTTPError, _: object
    ) -> None:
        code = _CODES.get(error.status_code, InvalidRequestError.code)
        for name, value in dict(error.headers or {}).items():
            response.set_header(name, value)
        message = error.description or error.title or ""
        if code == "unknown-call":
            calls = ", ".join(f"{_verb(call)} {call.path}" for call in wire.CALLS)
            message = f"no such call; there are GET {wire.VERSION_PATH}, {calls}"
        _answer(response, error.status_code, code, message)

    def ours(
        self, request: falcon.Request, response: falcon.Response, error: Exception, _: object
    ) -> None:
        self._log("".join(traceback.format_exception(error)).rstrip())
        message = "the server has failed to do this; its standard error says why"
        _answer(response, 500, PodError.code, message)


def _plain_call(store: ServedStore, call: Call[Any], arguments: dict[str, Any]) -> Any:
    """Call the method of the store that a call is named after."""
    return getattr(store, call.name.replace("-", "_"))(**arguments)


def _answer(response: falcon.Response, status: int, code: str, message: str) -> None:
    response.status = status
    response.content_type = falcon.MEDIA_JSON
    response.data = wire.encode({"error": code, "message": " ".join(message.split())})


def _user(request: falcon.Request) -> str:
    user = unquote(request.get_header(wire.USER_HEADER) or "")
    if not re.fullmatch(r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffd]{1,64}", user):
        raise falcon.HTTPBadRequest(
            description=f"the header {wire.USER_HEADER} must say who asks: 1 to 64 characters, "
            "no blanks, percent-encoded"
        )
    return user


def _check_request_id(request_id: str) -> None:
    if not re.fullmatch(r"[!-~]{8,64}", request_id):
        raise InvalidRequestError(
            f"the header {wire.REQUEST_HEADER} must have 8 to 64 printable characters, no blanks"
        )


def _verb(call: Call[Any]) -> str:
    return "POST" if call.changes else "GET"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
