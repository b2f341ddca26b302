"""A browser without a screen, driven through a pipe: what a page asks for, says and looks like.

Chromium's own protocol (DevTools), a message being JSON that a zero byte ends. No port is opened.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_WAIT = 90.0


class Page:
    """An open page.

    Attributes:
        requests: the addresses of everything that was asked for.
        problems: exceptions, errors and warnings of the console, refused requests.
    """

    def __init__(self, browser: _Pipe, session: str) -> None:
        self._browser = browser
        self._session = session
        self.requests: list[str] = []
        self.problems: list[str] = []
        browser.listeners[session] = self._take
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict:
        """Call a method of the protocol for this page and return its answer."""
        return self._browser.call(method, parameters, self._session)

    def look(self, *, dark: bool = False, width: int = 1200, height: int = 900) -> None:
        """Choose the colours that the reader prefers, and the size of the screen."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def open(self, path: Path, until: str = "document.readyState === 'complete'") -> None:
        """Open a file and wait until an expression is true."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for(f"location.href !== 'about:blank' && document.body && {until}")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + _WAIT
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, (expression, self.problems)
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Return what an expression is in the page."""
        said = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """Take a picture of the page from its top, the whole of it by default."""
        width = self.value("innerWidth")
        height = height or self.value("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        said = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(said["data"]))

    def _take(self, event: dict) -> None:
        about = event["params"]
        match event["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(about["exceptionDetails"])[:800])
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(about["args"])[:800])
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.problems.append(about["entry"]["text"])


class _Pipe:
    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self.listeners: dict[str, Any] = {}

    def call(self, method: str, parameters: dict, session: str = "") -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _WAIT
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            if answer.get("sessionId") in self.listeners:
                self.listeners[answer["sessionId"]](answer)

    def _next(self, deadline: float) -> dict:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self._answers], [], [], max(0.0, left))
            assert readable, "the browser does not answer"
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """Give a page of a new browser, which ends with it; its profile is in ``folder``."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # The browser reads descriptor 3 and writes descriptor 4, which either may have been.
    passed = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (theirs_in, theirs_out)]
    os.close(theirs_in)
    os.close(theirs_out)
    started = subprocess.Popen(
        [
            "bash", "-c", f'exec "$@" 3<&{passed[0]} 4>&{passed[1]}', "bash",
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-dev-shm-usage", "--remote-debugging-pipe", "--no-first-run",
            "--disable-background-networking", "--disable-component-update",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}", "about:blank",
        ],
        pass_fds=passed,
        env={**os.environ, "XDG_CONFIG_HOME": f"{folder}/config"},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for each in passed:
        os.close(each)
    pipe = _Pipe(ours_out, ours_in)
    try:
        target = pipe.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = pipe.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        yield Page(pipe, attached["sessionId"])
        with contextlib.suppress(AssertionError, OSError):
            pipe.call("Browser.close", {})
    finally:
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        os.close(ours_out)
        os.close(ours_in)
