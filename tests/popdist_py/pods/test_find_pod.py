"""Which pod is meant: by words, variables, folders and servers."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
from support.repository import ROOT

from popdist_py.pods.find_pod import find_pod
from popdist_py.pods.folder.pod_folders import make_pod
from popdist_py.pods.model.graphcore_systems import system_pod
from popdist_py.pods.model.pod_errors import InvalidRequestError, PodError, UnknownNameError


@pytest.fixture
def environ(tmp_path):
    home = {"POPRUN_PODS": str(tmp_path / "pods"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    return {**home, "PATH": "/usr/bin"}


@pytest.fixture
def made(tmp_path):
    def make(*names):
        return [make_pod(tmp_path / "pods", system_pod("POD4", name)) for name in names]

    return make


@pytest.fixture
def servers(monkeypatch):
    """Put a client that only notes what it is given in the place of the real one."""
    asked = []
    module = types.ModuleType("popdist_py.pods.server.server_store")
    module.ServerStore = lambda url, token, timeout: asked.append((url, token, timeout))
    monkeypatch.setitem(sys.modules, "popdist_py.pods.server.server_store", module)
    return asked


def _name(store):
    store.close()
    return store.pod().name


def test_none_is_there(environ):
    assert find_pod(None, environ) is None
    assert find_pod("none", environ) is None


def test_the_only_one_is_meant(environ, made):
    made("one")
    assert _name(find_pod(None, environ)) == "one"
    assert find_pod("none", environ) is None
    assert find_pod(None, {**environ, "POPRUN_POD": "none"}) is None
    assert _name(find_pod(None, {**environ, "POPRUN_POD": ""})) == "one"


def test_of_several_one_is_named(environ, made):
    _, folder = made("one", "two")
    with pytest.raises(InvalidRequestError, match=r"several pods \(one, two\): select one"):
        find_pod(None, environ)
    for where in ("two", str(folder)):
        assert _name(find_pod(where, environ)) == "two"
    # What is said counts before the variable.
    assert _name(find_pod("one", {**environ, "POPRUN_POD": "two"})) == "one"
    assert _name(find_pod(None, {**environ, "POPRUN_POD": "two"})) == "two"


@pytest.mark.parametrize("where", ["gone", "", "./gone", "/dev/null/x"])
def test_one_that_is_not_there_is_said(environ, made, where):
    made("one")
    with pytest.raises(PodError) as caught:
        find_pod(where, environ)
    assert "\n" not in str(caught.value)


def test_a_server_is_asked_with_the_token_of_a_file(environ, made, servers, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    environ["POPRUN_POD_TOKEN_FILE"] = str(token)
    find_pod("http://h1:9000", environ, timeout=7.0)
    find_pod("http://h1/", environ)
    find_pod("server", environ)
    find_pod("server", {**environ, "VIPU_CLI_API_HOST": "h2", "VIPU_CLI_API_PORT": "1"})
    for host in ("::1", "[::1]"):
        find_pod("server", {**environ, "IPUOF_VIPU_API_HOST": host, "VIPU_CLI_API_HOST": "h2"})
    assert servers == [
        ("http://h1:9000", "secret", 7.0),
        ("http://h1:8090", "secret", 120.0),
        ("http://localhost:8090", "secret", 120.0),
        ("http://h2:1", "secret", 120.0),
        *[("http://[::1]:8090", "secret", 120.0)] * 2,
    ]


def test_the_token_of_a_pod_of_this_machine_and_of_the_user(environ, made, servers, tmp_path):
    with pytest.raises(UnknownNameError, match="POPRUN_POD_TOKEN_FILE"):
        find_pod("http://localhost", environ)
    folder, other = made("one", "two")
    (folder / "token").write_text("of-the-pod")
    own = tmp_path / "config" / "poprun-py" / "pod-token"
    own.parent.mkdir(parents=True)
    own.write_text("of-the-user")
    find_pod("http://127.0.0.1", environ)
    find_pod("http://far", environ)
    assert [token for _, token, _ in servers] == ["of-the-pod", "of-the-user"]
    (other / "token").write_text("another")
    with pytest.raises(UnknownNameError, match="2 pods of this machine have a token file"):
        find_pod("http://localhost", environ)


@pytest.mark.parametrize(
    "url", ["https://h", "http://", "http://h:0", "http://h:99999", "http://u:p@h", "http://h/x"]
)
def test_what_is_no_server_is_said(environ, servers, url):
    with pytest.raises(InvalidRequestError, match="http://HOST:PORT"):
        find_pod(url, environ)


@pytest.mark.parametrize("content", [b"", b"\xff", None])
def test_a_token_that_cannot_be_read_is_said(environ, servers, tmp_path, content):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PodError, match=str(file)):
        find_pod("http://h", {**environ, "POPRUN_POD_TOKEN_FILE": str(file)})
    assert servers == []


_AS_A_STRANGER = """
import os, sys
from popdist_py.pods.folder import pod_folders
from popdist_py.pods.find_pod import find_pod
os.setgid(65534), os.setuid(54321)
for environ in ({"POPRUN_PODS": sys.argv[1]}, {"XDG_STATE_HOME": sys.argv[1]}, {}):
    assert find_pod(None, environ) is None, environ
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_user_who_may_not_look_or_has_no_home_has_no_pod(tmp_path):
    tmp_path.chmod(0o700)
    environ = {name: value for name, value in os.environ.items() if name != "HOME"}
    done = subprocess.run(
        [sys.executable, "-c", _AS_A_STRANGER, tmp_path / "pods"],
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
