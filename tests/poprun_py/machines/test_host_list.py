"""Host lists and host files, their errors, and the short form of many names."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.errors import UsageError
from poprun_py.machines.host_list import (
    compress,
    parse_host_file,
    parse_host_list,
)


def places(hosts):
    return [(host.user, host.name, host.slots) for host in hosts]


def names(text):
    return [host.name for host in parse_host_list(text, source="--host")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("host[0-2,4]", ["host0", "host1", "host2", "host4"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1,3].site", ["r1n1.site", "r1n3.site", "r2n1.site", "r2n3.site"]),
        ("10.1.3.101,10.1.3.102", ["10.1.3.101", "10.1.3.102"]),
        ("x,n[1-2]:4,y", ["x", "n1", "n2", "y"]),
        ("fe80::1", ["fe80::1"]),
        ("[FD00:0::1],fd00::2,n[1-2]", ["fd00::1", "fd00::2", "n1", "n2"]),
        ("Node_A,GPU_Box[01-02]", ["Node_A", "GPU_Box01", "GPU_Box02"]),
    ],
)
def test_ranges_are_expanded_in_order(text, expected):
    assert names(text) == expected


def test_the_slots_of_an_entry_apply_to_each_of_its_hosts():
    hosts = parse_host_list("a:2,n[0-1]:3,b,[fd00::1]:4", source="--host")
    assert [(h.name, h.slots) for h in hosts] == [
        *(("a", 2), ("n0", 3), ("n1", 3), ("b", None), ("fd00::1", 4))
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an entry is empty"),
        ("a,,b", "an entry is empty"),
        ("a,", "an entry is empty"),
        ("a b", "without blanks"),
        ("a, b", "without blanks"),
        ("a,b,a", "host a is given twice"),
        ("Node_A,node_a", "host node_a is given twice"),
        ("fd00::1,[FD00:0::1]:2", "host fd00::1 is given twice"),
        (
            "fd00:::1",
            ("is not an IPv6 address; expected an address such as fd00::1, or [fd00::1]:2"),
        ),
        ("[fd00::1]:0", "whole number of at least 1"),
        ("[fd00::1]:", "whole number of at least 1"),
        ("n[0-2],n1", "host n1 is given twice"),
        ("n[2-0]", "the range '2-0' is not accepted"),
        ("n[a-b]", "the range 'a-b' is not accepted"),
        ("n[]", "the range '' is not accepted"),
        ("n[0-2", "brackets do not match"),
        ("n0-2]", "brackets do not match"),
        ("a:0", "whole number of at least 1"),
        ("a:x", "whole number of at least 1"),
        ("a:²", "whole number of at least 1"),
        ("a:" + "9" * 5000, "whole number of at least 1"),
        ("-a", "not a host name"),
        ("a;b", "not a host name"),
        ("n[0-99999999]", "expected at most 65536 hosts"),
        ("n[0-999]m[0-999]", "expected at most 65536 hosts"),
        # Only the first two ranges are expanded.
        ("n" + "[0-65535]" * 9_999, "expected at most 65536 hosts"),
        (",".join(f"{name}[0-65535]" for name in range(9_999)), "expected at most 65536 hosts"),
        ("@a", "'@a': expected user@host"),
        ("me@you@a", "'me@you@a': expected user@host"),
    ],
)
def test_errors_in_a_list(text, said):
    with pytest.raises(UsageError) as caught:
        parse_host_list(text, source="--host")
    assert said in str(caught.value)
    assert "--host" in str(caught.value)


@given(st.text(alphabet="ab01-[],:. \t.", max_size=24))
def test_random_text_is_a_list_or_a_usage_error(text):
    with contextlib.suppress(UsageError):
        hosts = parse_host_list(text, source="--host")
        assert hosts
        assert len({host.name for host in hosts}) == len(hosts)


def test_a_host_file_takes_comments_slots_and_ranges():
    text = "# rack 1\nnode[0-1] slots=4\n\nlast:2  # spare\n  plain  \n"
    hosts = parse_host_file(text, source="hosts")
    assert [(h.name, h.slots) for h in hosts] == [
        ("node0", 4), ("node1", 4), ("last", 2), ("plain", None),
    ]  # fmt: skip


def test_slots_of_several_lines_for_one_host_are_added():
    text = "b\na slots=2\nb\nA\nn[0-1] cpu=2\nn1:3\nlimited max-slots=4\nc slots=2 max_slots=8\n"
    assert places(parse_host_file(text, source="hosts")) == [
        *(("", "b", 2), ("", "a", 3), ("", "n0", 2), ("", "n1", 5)),
        *(("", "limited", 4), ("", "c", 2)),
    ]


def test_a_host_may_have_a_user():
    hosts = parse_host_list("me@n[0-1]:2,you@[fd00::1]:4,b", source="--host")
    assert places(hosts) == [
        *(("me", "n0", 2), ("me", "n1", 2), ("you", "fd00::1", 4), ("", "b", None)),
    ]  # fmt: skip
    hosts = parse_host_file("me@a:2\nb user=you\n", source="hosts")
    assert places(hosts) == [("me", "a", 2), ("you", "b", None)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# nothing\n", "the file names no host; expected one host per line"),
        ("a\nb oops\n", "hosts, line 2: 'oops'"),
        ("a\nme@A\n", "host A is given with several users"),
        ("a user=-oProxyCommand\n", "hosts, line 1: 'user=-oProxyCommand'"),
        ("a slots=x\n", "hosts, line 1: 'slots=x'"),
        ("a slots=²\n", "hosts, line 1: 'slots=²'"),
    ],
)
def test_errors_in_a_host_file(text, said):
    with pytest.raises(UsageError) as caught:
        parse_host_file(text, source="hosts")
    assert said in str(caught.value)


# --- the short form of many names ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a"], "a"),
        (["n3"], "n3"),
        (["n0", "n1", "n3"], "n[0-1,3]"),
        (["n08", "n09"], "n[08-09]"),
        (["n08", "n09", "n10", "n11"], "n[08-11]"),
        (["n10", "n9", "n08"], "n[08,10],n9"),
        (["n1.x", "n2.x", "m1"], "n[1-2].x,m1"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.1,10.0.0.2"),
    ],
)
def test_names_are_written_in_the_short_form(given, expected):
    assert compress(given) == expected


@given(
    st.lists(
        st.sampled_from(
            [
                f"{p}{n}{t}"
                for p in ("a", "node", "r1n")
                for n in (*range(12), "00", "07", "08", "09")
                for t in ("", ".x")
            ]
        ),
        unique=True,
        min_size=1,
    )
)
def test_the_short_form_expands_to_the_same_names(given):
    assert sorted(names(compress(given))) == sorted(given)
