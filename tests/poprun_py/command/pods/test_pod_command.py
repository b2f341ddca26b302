"""Tests of all verbs of poprun-py-pod with a pod in a folder, and of its help and completion."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest
from support.repository import ROOT

from popdist_py.pods.folder.folder_store import FolderStore
from popdist_py.pods.folder.pod_file import format_pod
from popdist_py.pods.folder.pod_folders import make_pod
from popdist_py.pods.model.graphcore_systems import system_pod
from popdist_py.pods.model.pod_parts import Holder, PartitionRequest
from poprun_py.command.pods.pod_access import pod_address
from poprun_py.command.pods.pod_command import COMMAND

POD = system_pod("POD16", "lab", ("h0", "h1"))
ANN = Holder(host="h0", pid=4711, user="ann", program="train.py", run_id="run-1")


@pytest.fixture
def held(pod):
    """Return a pod with a partition of 8 IPUs and a partition of bob. Ann holds two IPUs."""
    fill(pod)
    return pod


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory):
    """Make the same pod for all tests that do not change it."""
    root = tmp_path_factory.mktemp("shared")
    with contextlib.closing(FolderStore(make_pod(root, POD))) as store:
        fill(store)
        yield root


@pytest.fixture
def shared(shared_root, monkeypatch, ask):
    """Return a function that runs the command with the shared pod."""
    monkeypatch.setenv("POPRUN_PODS", str(shared_root))

    def call(*words):
        found = ask(*words)
        found.out = found.out.replace(str(shared_root), "ROOT")
        return found

    return call


def fill(store):
    store.create_partition(PartitionRequest(name="p8", size=8, reconfigurable=True))
    store.attach("p8", 2, ANN)
    store.with_user("bob").create_partition(PartitionRequest(name="theirs", size=4))


TABLES = {
    "partitions": ("list", "partitions"),
    "partition": ("get", "partition", "p8"),
    "devices": ("list", "devices"),
    "allocations": ("list", "allocations"),
    "allocation": ("get", "allocation", "a16"),
    "clusters": ("list", "clusters"),
    "cluster": ("get", "cluster", "c16"),
    "agents": ("list", "agents"),
    "agent": ("get", "agent", "ag01"),
    "ipu-attrs": ("list", "ipu-attrs"),
    "ipu-attrs-of-agent": ("get", "ipu-attrs", "ag01"),
    "pods": ("list", "pods"),
    "pod": ("get", "pod"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(name, shared, golden):
    found = shared(*TABLES[name])
    assert (found.code, found.err) == (0, "")
    # The rules are left out, because their length depends on the folder's name.
    text = found.out if name != "pods" else "\n".join(found.out.split("\n")[::2])
    golden(f"{name}.txt", text)


def in_lines(value) -> list[str]:
    """Return one line for each element of a list or entry of an object."""
    if isinstance(value, list):
        return [json.dumps(each) for each in value]
    return [f"{name}: {json.dumps(each)}" for name, each in value.items()]


def test_json(shared, golden):
    values = {}
    for name, words in TABLES.items():
        found = shared(*words, "--showjson")
        assert (found.code, found.err) == (0, "")
        values[name] = json.loads(found.out)
        assert found.out == json.dumps(values[name], indent=2) + "\n"
    of_agent = [each for each in values["ipu-attrs"] if each["agent"] == "ag01"]
    assert len(of_agent) == 12
    assert values.pop("ipu-attrs-of-agent") == of_agent
    text = [line for name, each in values.items() for line in (f"== {name}", *in_lines(each))]
    golden("json.txt", "\n".join(text) + "\n")


def test_the_table_of_partitions_has_the_form_of_v_ipu(root, ask):
    folder = make_pod(root, system_pod("POD64", "lab", ("h0",)))
    with contextlib.closing(FolderStore(folder)) as store:
        store.create_partition(PartitionRequest(name="p64", size=64))
    assert ask("list", "partitions").out == (
        " Partition | Cluster | ILDs | GW Routing | ILD Routing | Size | GCDs | State\n"
        "-----------------------------------------------------------------------------\n"
        " p64       | c64     | 1    | DEFAULT    | RINGSWNC    | 64   | 1    | ACTIVE\n"
        "-----------------------------------------------------------------------------\n"
    )


def test_objects_in_singular_or_plural_and_places_of_global_options(shared):
    ask = shared
    usual = ask("list", "partitions", "--showjson").out
    assert ask("--showjson", "list", "partition").out == usual
    assert ask("--pod", "lab", "list", "partitions", "--showjson").out == usual
    assert ask("--pod", "nowhere", "list", "partitions", "--showjson", "--pod", "lab").out == usual
    assert ask("get", "partitions", "p8").out == ask("get", "partition", "p8").out


def test_create_fail_reset_and_remove_a_partition(pod, ask):
    words = "--num-gcds 2 --total-num-replicas 4 --sync-type pod-native-default --allocation a16"
    done = ask("create", "partition", "p4", "--size", 4, *words.split())
    assert (done.code, done.out, done.err) == (0, "create partition (p4): success.\n", "")
    made = pod.partition("p4")
    assert (made.size, made.num_gcds, made.num_replicas) == (4, 2, 4)
    assert made.sync_type.value == "ST_POD_NATIVE_DEFAULT"
    assert ask("fail", "partition", "p4", "--reason", "a link is down").code == 0
    shown = ask("get", "partition", "p4").out
    assert "  state: ERROR\n" in shown
    assert "  error: a link is down\n" in shown
    assert ask("reset", "partition", "p4").out == "reset partition (p4): success.\n"
    assert pod.partition("p4").generation == 1
    assert ask("remove", "partition", "p4").out == "remove partition (p4): success.\n"
    assert pod.partitions() == ()


@pytest.mark.parametrize("given", ["c2-compatible", "ST_GS2_DEFAULT", "st_gs2_default"])
def test_sync_types_have_two_names(given, pod, ask):
    assert ask("create", "partition", "p", "--size", 1, "--sync-type", given).code == 0
    assert pod.partition("p").sync_type.value == "ST_GS2_DEFAULT"


@pytest.mark.parametrize(
    ("given", "said"), [("swnc", ""), ("default", ""), ("ring-swnc", "SWNC, not RINGSWNC")]
)
def test_a_routing_that_differs_from_the_option_gives_a_warning(given, said, pod, ask):
    done = ask("create", "partition", "p8", "--size", 8, "--routing", given)
    assert (done.code, done.out) == (0, "create partition (p8): success.\n")
    assert said in done.err
    assert done.err.count("\n") == bool(said)


def test_each_gcd_has_a_configuration(pod, ask, golden):
    pod.create_partition(PartitionRequest(name="p4", size=4, num_gcds=2))
    first = json.loads(ask("get", "partition", "p4", "--ipuof-configs").out)
    found = ask("get", "partition", "p4", "--gcd", 1, "--ipuof-configs").out
    second = json.loads(found)
    golden("ipuof_config.txt", "\n".join(in_lines(second)) + "\n")
    assert (first["attributes"], second["attributes"]) == ({}, {"GCD Id": "1"})
    ipus = [each["ipu_id"] for each in first["devices"] + second["devices"]]
    assert ipus == [ipu.index for ipu in pod.partition("p4").ipus]


def test_create_and_remove_clusters_and_allocations(pod, ask):
    assert ask("remove", "cluster", "c16").code == 1
    for kind, name in (("allocation", "a16"), ("cluster", "c16")):
        assert ask("remove", kind, name).out == f"remove {kind} ({name}): success.\n"
    done = ask("create", "cluster", "one", "--agents", "ag01,ag02", "--topology", "torus")
    assert done.out == "create cluster (one): success.\n"
    # Without --agents, the cluster takes all agents that are in no cluster.
    words = ("--num-ipulinkdomains", 2, "--cluster-topology", "looped")
    assert ask("create", "cluster", "two", *words).code == 0
    one, two = pod.pod().clusters
    assert (one.agents, one.num_ilds, one.topology, one.is_looped) == (
        ("ag01", "ag02"), 1, "torus", False,
    )  # fmt: skip
    assert (two.agents, two.num_ilds, two.is_looped) == (("ag03", "ag04"), 2, True)
    assert ask("create", "allocation", "team").code == 2  # of which cluster?
    done = ask("create", "allocation", "team", "--cluster", "two", "--agents", "ag03")
    assert done.out == "create allocation (team): success.\n"
    assert ask("create", "allocation", "all", "--cluster", "one").code == 0
    agents = {each.name: each.agents for each in pod.pod().allocations}
    assert agents == {"team": ("ag03",), "all": ("ag01", "ag02")}


REFUSED = [
    ("create partition p8 --size 4", "p8"),
    ("create partition q --size 3", "3"),
    ("create partition q --size 16", "16"),
    ("create partition q --size 4 --num-gcds 8", "8"),
    ("create partition q --size 4 --allocation zz", "zz"),
    ("create partition q --size 4 --reconfigurable --sync-type pod-native-default", "c2"),
    ("get partition zz", "zz"),
    ("get agent ag09", "ag09"),
    ("get cluster zz", "zz"),
    ("get ipu-attrs zz", "zz"),
    ("get allocation a1", "did you mean a16?"),
    ("reset partition zz", "zz"),
    ("reset partition p8", "train.py"),
    ("remove partition p8", "train.py"),
    ("remove partition theirs", "belongs to user bob"),
    ("remove cluster c16", "a16"),
    ("remove allocation a16", "p8"),
    ("remove allocation zz", "zz"),
    ("create cluster c2 --agents ag01", "ag01"),
    ("create allocation a16", "a16"),
    ("create pod lab --type POD4", "lab"),
    ("create pod none --type POD4", "none"),
    ("create pod a/b --type POD4", "a/b"),
    ("create pod b --type POD4 --hosts h0,h0", "2 hosts"),
    ("remove pod zz", "zz"),
    ("remove pod lab", "p8"),
]


@pytest.mark.parametrize(("words", "names"), REFUSED)
def test_a_refusal_is_one_line_in_the_form_of_v_ipu(words, names, shared):
    before = shared("get", "pod", "--showjson").out
    found = shared(*words.split())
    assert (found.code, found.out) == (1, "")
    assert found.err.count("\n") == 1
    verb, kind, name, *_ = words.split()
    assert found.err.startswith(f"{verb} {kind} ({name}): failed: ")
    assert names in found.err.partition("failed: ")[2]
    assert shared("get", "pod", "--showjson").out == before


def test_control_characters_in_names_and_reasons_are_not_printed(held, ask):
    found = ask("get", "partition", "\x1b[2J\nzz")
    assert found.err.startswith("get partition (?[2J?zz): failed: ")
    assert found.err.count("\n") == 1
    assert found.err.rstrip("\n").isprintable()
    assert ask("fail", "partition", "p8", "--reason", "a\x1b[2Jb").code == 0
    assert "  error: a?[2Jb\n" in ask("get", "partition", "p8").out


def test_force_removes_partitions_in_use_and_of_other_users(held, ask):
    assert ask("remove", "partition", "p8", "--force").code == 0
    assert ask("remove", "partition", "theirs", "--force").code == 0
    assert held.partitions() == held.attachments() == ()


WRONG_USAGE = [
    ("", "the verb is missing: expected one of create"),
    ("lits partitions", "unknown verb 'lits'; did you mean list?"),
    ("list", "the object is missing: expected one of partitions, devices"),
    ("list partitons", "did you mean partitions?"),
    ("update partition p", "unknown verb 'update'"),
    ("delete partition p", "unknown verb 'delete'; did you mean remove?"),
    (
        "partitions list",
        "unknown verb 'partitions': give a verb before the object, such as list partitions",
    ),
    ("create partition", "Missing argument 'NAME'"),
    ("create partition p", "Missing option '--size'"),
    ("create partition p --size x", "'x' is not a valid integer"),
    ("create partition p --sise 4", "unknown option --sise; did you mean --size?"),
    ("create partition p --size 4 --sync-type fast", "expected one of c2-compatible"),
    ("create partition p --size 4 --wait -1", "--wait"),
    ("get partition p8 --gcd 0", "--gcd K can only be used together with --ipuof"),
    ("get partition p8 --gcd 1 --ipuof-configs", "a GCD of partition p8, 0 to 0"),
    ("create pod p", "expected either --type TYPE or --file"),
    ("create pod p --type POD5", "'POD5' is not one of 'POD4'"),
    ("create pod p --type machine --hosts h0", "--hosts"),
    ("create pod p --file no-such.toml", "no-such.toml"),
    ("list partitions more", "unexpected extra argument"),
    ("list partitions --pod lab --api-host h", "cannot be used together"),
    ("list partitions --api-host a/b", "--api-host 'a/b': expected a host name or an IP address"),
    ("list partitions --api-port 0", "--api-port"),
]


@pytest.mark.parametrize(("words", "says"), WRONG_USAGE)
def test_wrong_usage_is_one_line(words, says, shared):
    found = shared(*words.split())
    assert (found.code, found.out) == (2, "")
    assert found.err.count("\n") == 1
    assert found.err.startswith("poprun-py-pod: error: ")
    assert says in found.err


def test_without_a_pod_and_with_several_pods(root, ask):
    found = ask("list", "partitions")
    assert found.code == 3
    assert "no pod is configured: select a pod with --pod WHERE or POPRUN_POD" in found.err
    assert ask("list", "pods").code == 0
    assert ask("create", "pod", "one", "--type", "POD4").out == "create pod (one): success.\n"
    assert ask("create", "pod", "two", "--type", "machine").code == 0
    found = ask("list", "partitions")
    assert (found.code, found.err.count("\n")) == (3, 1)
    assert "one, two" in found.err
    assert ask("list", "partitions", "--pod", "two").code == 0
    assert ask("list", "partitions", "--pod", "none").code == 3
    found = ask("get", "pod", "three")
    assert (found.code, found.err.count("\n")) == (3, 1)
    assert "'three'" in found.err
    assert ask("remove", "pod", "one").out == "remove pod (one): success.\n"
    assert ask("list", "partitions").code == 0


def test_a_pod_from_a_file_has_the_given_name(root, ask, tmp_path):
    file = tmp_path / "pod.toml"
    file.write_text(format_pod(system_pod("POD4", "other", ("h7",))))
    assert ask("create", "pod", "mine", "--file", file).code == 0
    assert "Pod mine:" in ask("get", "pod").out
    file.write_text("agents = 3\n")
    found = ask("create", "pod", "broken", "--file", file)
    assert (found.code, found.err.count("\n")) == (3, 1)
    assert "pod.toml" in found.err


def test_a_damaged_pod_is_an_error_and_other_pods_are_listed(root, ask):
    for name in ("bad", "good"):
        make_pod(root, system_pod("POD4", name, ("h0",)))
    (root / "bad" / "pod.sqlite").write_bytes(b"no database" * 1000)
    found = ask("list", "partitions", "--pod", "bad")
    assert (found.code, found.out, found.err.count("\n")) == (3, "", 1)
    rows = ask("list", "pods").out.splitlines()
    assert [row.split()[:7:2] for row in rows[2:4]] == [
        ["bad", "?", "?", "?"], ["good", "4", "4", "0"],
    ]  # fmt: skip
    assert ask("remove", "pod", "bad").code == 3
    assert ask("remove", "pod", "bad", "--force").code == 0
    assert ask("list", "partitions").code == 0


def test_an_unreachable_server_is_named(root, ask, tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("secret-of-the-test\n")
    token.chmod(0o600)
    monkeypatch.setenv("POPRUN_POD_TOKEN_FILE", str(token))
    found = ask("list", "partitions", "-H", "127.0.0.1", "--api-port", 1)
    assert (found.code, found.out, found.err.count("\n")) == (3, "", 1)
    assert "127.0.0.1:1" in found.err
    assert "secret" not in found.err


@pytest.mark.parametrize(
    ("kept", "environ", "where"),
    [
        ({}, {}, None),
        ({"pod": "lab"}, {"VIPU_CLI_API_HOST": "h"}, "lab"),
        ({}, {"VIPU_CLI_API_HOST": "h"}, "http://h:8090"),
        ({}, {"VIPU_CLI_API_HOST": "h", "VIPU_CLI_API_PORT": "9"}, "http://h:9"),
        ({}, {"VIPU_CLI_API_HOST": "h", "POPRUN_POD": "lab"}, None),
        ({"api_host": "g"}, {"VIPU_CLI_API_HOST": "h", "POPRUN_POD": "lab"}, "http://g:8090"),
        ({"api_port": 7}, {"VIPU_CLI_API_HOST": "h"}, "http://h:7"),
        ({"api_port": 7}, {}, "http://localhost:7"),
        ({"api_host": "::1"}, {}, "http://[::1]:8090"),
    ],
)
def test_address_of_the_selected_pod(kept, environ, where):
    assert pod_address(kept, environ) == where


def test_a_server_gives_the_same_answers_as_its_folder(held, ask, tmp_path):
    server = subprocess.Popen(
        [sys.executable, "-m", "poprun_py.command.pods.pod_command", "serve", "--port", "0"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        port = re.search(r"http://127\.0\.0\.1:(\d+)", server.stderr.readline())[1]
        there = ("-H", "127.0.0.1", "--api-port", port)
        assert ask("list", "devices", *there).out == ask("list", "devices").out
        done = ask("create", "partition", "p2", "--size", 2, *there)
        assert (done.code, done.out) == (0, "create partition (p2): success.\n")
        assert held.partition("p2").size == 2
        done = ask("remove", "partition", "theirs", *there)
        assert done.code == 1
        assert done.err.startswith("remove partition (theirs): failed: ")
        assert f"where: http://127.0.0.1:{port}\n" in ask("get", "pod", *there).out
        assert ask("serve", "--pod", f"http://127.0.0.1:{port}").code == 2
    finally:
        server.terminate()
        _, said = server.communicate(timeout=30)
    assert (server.returncode, said) == (0, "")


# --- waiting ------------------------------------------------------------------------------------


@pytest.fixture
def slow(root):
    """Return a pod that creates partitions in 0.2 s and resets them in an hour."""
    known = replace(system_pod("POD4", "slow", ("h0",)), create_seconds=0.2, reset_seconds=3600.0)
    with contextlib.closing(FolderStore(make_pod(root, known))) as store:
        yield store


def test_waiting_until_a_partition_is_active(slow, ask):
    assert ask("create", "partition", "now", "--size", 1).code == 0
    assert " PENDING" in ask("list", "partitions").out
    assert ask("create", "partition", "later", "--size", 1, "--wait", 60).code == 0
    assert slow.partition("later").state.value == "ACTIVE"
    found = ask("reset", "partition", "later", "--wait", 0.05)
    assert (found.code, found.out, found.err.count("\n")) == (1, "", 1)
    assert found.err.startswith(
        "reset partition (later): failed: the partition is still PENDING after 0.05 s"
    )


def test_waiting_for_a_partition_that_fails(slow, ask):
    ask("create", "partition", "p", "--size", 1)

    def fail_while_waiting():
        with contextlib.closing(FolderStore(Path(slow.where))) as store:
            while store.partition("p").operation.value != "RESETTING":
                pass
            store.fail_partition("p", "a link is down")

    other = threading.Thread(target=fail_while_waiting)
    other.start()
    found = ask("reset", "partition", "p", "--wait", 60)
    other.join()
    assert found.code == 1
    assert found.err == (
        "reset partition (p): failed: the partition is in the state ERROR: a link is down\n"
    )


def test_a_terminal_shows_the_reason_of_the_wait(slow):
    words = ["-m", "poprun_py.command.pods.pod_command", "create", "partition", "p", "--size", "1"]
    seen = pexpect.spawn(
        sys.executable, [*words, "--wait", "60"], encoding="utf-8", timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )  # fmt: skip
    seen.expect(r"create partition \(p\): waiting until the partition is ACTIVE")
    seen.expect(r"create partition \(p\): success\.")
    seen.expect(pexpect.EOF)
    seen.close()
    assert seen.exitstatus == 0


# --- help and completion ------------------------------------------------------------------------


def verbs():
    """Yield the words of each command with its own help."""
    yield ()
    for verb, command in COMMAND.commands.items():
        yield (verb,)
        for kind in getattr(command, "commands", {}):
            yield verb, kind


def test_help(root, ask, golden):
    """The golden file has the whole main page, and the specific parts of all other pages."""
    pages = {words: ask(*words, "--help") for words in verbs()}
    assert {(page.code, page.err) for page in pages.values()} == {(0, "")}
    text = pages[()].out
    of_all = text[text.index("\nGlobal options:") :]
    for words, page in pages.items():
        own = page.out.removesuffix(of_all)
        # The help of a verb does not list the global options, which its objects take.
        assert (own == page.out) == (len(words) == 1 and words != ("serve",)), words
        if words:
            lines = [line for line in own.splitlines() if line and "  -h, --help " not in line]
            text += "\n" + "\n".join(lines) + "\n"
    golden("help.txt", text)


def in_a_process(*words, env=None, **settings):
    return subprocess.run(
        [sys.executable, "-m", "poprun_py.command.pods.pod_command", *words],
        capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}, **settings,
    )  # fmt: skip


def test_a_process_prints_its_name_and_returns_the_exit_code(shared):
    done = in_a_process("list", "zz")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("poprun-py-pod: error: unknown object 'zz'")


def test_a_closed_pipe_gives_no_traceback(shared):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "poprun_py.command.pods.pod_command", "list", "devices"],
            stdout=closed, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("re", ["reset", "remove"]),
        ("create p", ["partition", "pod"]),
        ("remove partition ", ["p8", "theirs"]),
        ("create partition q --sync-type pod", ["pod-native-default",
                                                "pod-native-replicated-pipeline"]),
        ("create partition q --all", ["--allocation"]),
        ("create partition q --allocation ", ["a16"]),
        ("get pod ", ["lab"]),
        ("create pod x --type POD1", ["POD16", "POD128"]),
        ("remove partition --pod nowhere ", []),
    ],
)  # fmt: skip
def test_a_shell_completes_verbs_options_and_names(typed, offered, shared, capsys):
    from click.shell_completion import BashComplete

    *words, last = typed.split(" ")
    complete = BashComplete(COMMAND, {}, "poprun-py-pod", "_POPRUN_PY_POD_COMPLETE")
    assert [item.value for item in complete.get_completions(words, last)] == offered
    assert capsys.readouterr() == ("", "")


def test_completion_of_bash(shared):
    done = in_a_process(env={
        "_POPRUN_PY_POD_COMPLETE": "bash_complete", "COMP_CWORD": "2",
        "COMP_WORDS": "poprun-py-pod remove part",
    })  # fmt: skip
    assert done.stdout == "plain,partition\n"


def test_help_imports_neither_database_nor_server():
    code = (
        "import sys; from poprun_py.command.click_commands import run\n"
        "from poprun_py.command.pods.pod_command import COMMAND; run(COMMAND, ['--help'])\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    loaded = set(done.stdout.split("\n")[-2].split())
    assert not loaded & {
        "sqlite3",
        "falcon",
        "waitress",
        "urllib3",
        "torch",
        "numpy",
        "rich",
        "asyncio",
    }
