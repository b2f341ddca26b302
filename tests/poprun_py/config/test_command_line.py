"""The grammar of the command line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.config.command_line import COMMAND, help_text, parse
from poprun_py.config.launch_config import LaunchConfig, options
from poprun_py.config.option_kinds import FLAG, option_name
from poprun_py.errors import UsageError


@pytest.mark.parametrize(
    "words",
    [
        ["--num-instances", "2", "prog"],
        ["--num-instances=2", "prog"],
        ["--num-inst", "2", "prog"],
        ["--num-in=2", "prog"],
    ],
)
def test_spellings_of_a_value(words):
    assert parse(words) == {"num_instances": 2, "program": ("prog",)}


@pytest.mark.parametrize(
    ("words", "level"),
    [
        (["-v"], 1),
        (["-vv"], 2),
        (["--vv"], 2),
        (["--verbose"], 1),
        (["-v", "-v"], 2),
        ([], 0),
        (["--verb"], 1),
    ],
)
def test_verbosity(words, level):
    assert parse(words).get("verbosity", 0) == level


@pytest.mark.parametrize("text", ["yes", "ON", "True", "1"])
def test_booleans_true(text):
    assert parse(["--offline-mode", text])["offline_mode"] is True


@pytest.mark.parametrize("text", ["no", "Off", "FALSE", "0"])
def test_booleans_false(text):
    assert parse([f"--remove-partition={text}"])["remove_partition"] is False


def test_program_keeps_everything_after_it():
    words = parse(["-H", "a,b", "train.py", "--num-replicas", "8", "-v", "--", "x"])
    assert words == {"host": "a,b", "program": ("train.py", "--num-replicas", "8", "-v", "--", "x")}


def test_double_dash_ends_the_options():
    assert parse(["--num-replicas", "2", "--", "-odd-name"])["program"] == ("-odd-name",)


def test_repeatable_arguments_accumulate_in_order():
    words = ["--mpi-global-args=--tag-output", "--mpi-global-args", " --mca a b "]
    assert parse(words)["mpi_global_args"] == ("--tag-output", " --mca a b ")


def test_optional_value():
    assert parse(["--print-hardware", "prog"]) == {"print_hardware": "table", "program": ("prog",)}
    assert parse(["--print-hardware=json"])["print_hardware"] == "json"


def test_empty_value_of_a_text_option_is_kept():
    assert parse(["-H=", "x"]) == {"host": "", "program": ("x",)}
    assert parse(["--mpi-local-args="])["mpi_local_args"] == ("",)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--num-replica-s", "2"], "did you mean --num-replicas?"),
        (["--num", "2"], "ambiguous option --num: expected one of"),
        (["--num-replicas"], "--num-replicas needs a value"),
        (["--num-replicas", "--dry-run"], "'--dry-run' follows"),
        (["--mpi-global-args", "--version"], "if that is the value: --mpi-global-args=--version"),
        (["--num-replicas", "0"], "at least 1"),
        (["--num-replicas", "2.0"], "a whole number"),
        (["--num-replicas", "99999999999999999999"], "a whole number"),
        (["--num-replicas", "2", "--num-replicas", "4"], "given twice"),
        (["--numa-aware", "maybe"], "yes or no"),
        (["--process-placement", "spreadnum"], "did you mean spreadnuma?"),
        (["--print-topology", "treee"], "did you mean tree?"),
        (["--timeout", "nan"], "a number of seconds above 0"),
        (["--timeout", "1e999"], "a number of seconds above 0"),
        (["--timeout", "1_0"], "a number of seconds above 0"),
        (["--vipu-server-port", "65536"], "at most 65535"),
        (["--max-restarts", "99999999999"], "at most 2147483647"),
        (["-z"], "unknown option -z"),
        (["-np", "2"], "did you mean --num-instances?"),
        (["--nproc-per-node=2"], "did you mean --num-instances?"),
        (["-m", "mod"], "did you mean python -m MODULE?"),
        (["-num-replicas", "2"], "did you mean --num-replicas?"),
        (["--NUM-REPLICAS", "2"], "did you mean --num-replicas?"),
        (["--verbose=2"], "--verbose takes no value"),
        (["--vv=1"], "--vv takes no value"),
        (["--="], "ambiguous option --="),
        (["--help=yes"], "takes no value"),
    ],
)
def test_refusals_say_what_is_accepted(words, part):
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


_WORD = st.one_of(
    st.sampled_from([option_name(name) for name in options()] + ["-v", "-vv", "-H", "--", "-", ""]),
    st.sampled_from(["0", "1", "2", "yes", "no", "-1", "tree", "a,b", "[", "a[0-", "x=y"]),
    st.text(max_size=12),
    st.builds(lambda a, b: f"--{a}={b}", st.sampled_from(sorted(options())), st.text(max_size=8)),
)


@given(st.lists(_WORD, max_size=8))
def test_any_words_parse_or_are_refused_in_one_line(words):
    answers = ("help", "version", "version_format")
    with refused_in_one_line(words):
        values = parse(words)
        LaunchConfig(**{k: v for k, v in values.items() if k not in answers})


@contextlib.contextmanager
def refused_in_one_line(words):
    """Let a refusal pass if it is one line; a newline may only come from the words themselves."""
    try:
        yield
    except UsageError as error:
        if "\n" in str(error) and not any("\n" in word for word in words):
            pytest.fail(f"more than one line: {error}")


def test_help_fits_and_names_every_option(golden):
    text = help_text(200)
    assert max(map(len, text.splitlines())) <= 100
    for name, opt in options().items():
        if name != "verbosity":
            assert option_name(name) in text
            assert opt.kind is FLAG or opt.kind.metavar in text
    golden("help.txt", text + "\n")


def test_every_option_is_declared_once():
    spelled = [name for param in COMMAND.params for name in getattr(param, "opts", ())]
    assert len(spelled) == len(set(spelled))
