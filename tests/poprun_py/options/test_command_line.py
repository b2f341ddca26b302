"""Command-line parsing and the help pages."""

from __future__ import annotations

import contextlib
import re

import pytest
from click.shell_completion import ShellComplete
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.errors import UsageError
from poprun_py.options.command_line import parse
from poprun_py.options.declared_options import GROUPS, OPTIONS
from poprun_py.options.help_pages import COMMAND, MOST_USED, help_text
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import FLAG, option_name


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
        (["-vvv"], 3),
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


def test_all_words_after_the_program_belong_to_it():
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


def test_the_value_of_a_text_option_may_be_empty():
    assert parse(["-H=", "x"]) == {"host": "", "program": ("x",)}
    assert parse(["--mpi-local-args="])["mpi_local_args"] == ("",)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--num-replica-s", "2"], "did you mean --num-replicas?"),
        (["--num", "2"], "ambiguous option --num: expected one of"),
        (["--num-replicas"], "--num-replicas needs a value"),
        (["--num-replicas", "--dry-run"], "'--dry-run' follows"),
        (
            ["--mpi-global-args", "--version"],
            "if '--version' is the value, give --mpi-global-args=",
        ),
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
        (["--output", "log.txt"], "expected tag, time or plain, the prefix of each line; to write"),
        (["-z"], "unknown option -z"),
        (["-n", "2", "-np", "4"], "--num-instances is given twice ('2' and '4')"),
        (["-m"], "-m needs a value: expected the name of a Python module"),
        (["-m", "--lr"], "-m needs a value: expected the name of a Python module"),
        (["--nproc-per-node", "gpu"], "or auto or cpu for the number of CPUs"),
        (["--nproc-per-node", "0"], "a whole number of at least 1"),
        (["--timeout", "5x"], "a time such as 90s, 5m, 1h30m or 2d"),
        (["--timeout", "30m1h"], "a time such as 90s, 5m, 1h30m or 2d"),
        (["--timeout", "0s"], "a number of seconds above 0"),
        (["--grace", "m"], "a time such as"),
        (["--hang-timeout", "soon"], "or auto"),
        (
            ["--only-output-from-instance", "3-2"],
            "indices of instances (from 0), such as 1 or 0,2-3, or",
        ),
        (["--only-output-from-instance", "1,,2"], "indices of instances (from 0)"),
        (["--only-output-from-instance", "0-99999999999"], "indices of instances (from 0)"),
        (["--sync-type", "banana"], "one of ST_GS2_DEFAULT"),
        (["--sync-type", "ST_POD_NATIV"], "did you mean ST_POD_NATIVE_DEFAULT?"),
        (["-num-replicas", "2"], "did you mean --num-replicas?"),
        (["--NUM_REPLICA", "2"], "did you mean --num-replicas?"),
        (["--NUM-REPLICAS", "2"], "did you mean --num-replicas?"),
        (["--verbose=2"], "--verbose does not accept a value"),
        (["--vv=1"], "--vv does not accept a value"),
        (["--="], "ambiguous option --:"),
        (["--version=yes"], "does not accept a value"),
    ],
)
def test_errors_say_which_values_are_accepted(words, part):
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


_WORD = st.one_of(
    st.sampled_from([option_name(name) for name in OPTIONS] + ["-v", "-vv", "-H", "--", "-", ""]),
    st.sampled_from(["0", "1", "2", "yes", "no", "-1", "tree", "a,b", "[", "a[0-", "x=y"]),
    st.text(max_size=12),
    st.builds(lambda a, b: f"--{a}={b}", st.sampled_from(sorted(OPTIONS)), st.text(max_size=8)),
)


@given(st.lists(_WORD, max_size=8))
def test_random_words_are_parsed_or_give_an_error_of_one_line(words):
    answers = ("help", "version", "version_format")
    with error_of_one_line(words):
        values = parse(words)
        LaunchConfig(**{k: v for k, v in values.items() if k not in answers})


@contextlib.contextmanager
def error_of_one_line(words):
    """Ignore an error whose message is one line, apart from newlines in the words."""
    try:
        yield
    except UsageError as error:
        if "\n" in str(error) and not any("\n" in word for word in words):
            pytest.fail(f"more than one line: {error}")


@pytest.mark.parametrize(
    "words",
    [
        ["-n", "2"],
        ["-n2"],
        ["-n=2"],
        ["-np", "2"],
        ["-np=2"],
        ["--np", "2"],
        ["--num_instances", "2"],
    ],
)
def test_spellings_of_mpirun_for_the_number_of_instances(words):
    assert parse([*words, "prog"]) == {"num_instances": 2, "program": ("prog",)}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--nproc-per-node", "4"], 4),
        (["--nproc_per_node=4"], 4),
        (["--nproc-per-node=AUTO"], "auto"),
        (["--nproc_per_node", "cpu"], "cpu"),
    ],
)
def test_spellings_of_torchrun_for_the_number_of_instances(words, value):
    assert parse([*words, "x"]) == {"nproc_per_node": value, "program": ("x",)}


@pytest.mark.parametrize("word", ["-m", "--module"])
def test_a_module_ends_the_options_and_keeps_the_words_after_it(word):
    words = ["-n", "2", word, "pkg.mod", "--lr", "1", "-v", "--", "-m"]
    assert parse(words) == {
        "num_instances": 2,
        "program": ("-m", "pkg.mod", "--lr", "1", "-v", "--", "-m"),
    }
    assert parse(["--module=pkg.mod", "-v"])["program"] == ("-m", "pkg.mod", "-v")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("2d", 172_800),
        ("1D2H3M4S", 93_784),
        ("1.5h", 5400),
        ("0.5s", 0.5),
    ],
)
@pytest.mark.parametrize("option", ["timeout", "grace", "hang_timeout"])
def test_spellings_of_a_time(option, text, seconds):
    value = parse([option_name(option), text])[option]
    assert value == seconds
    assert type(value) is type(seconds)


@pytest.mark.parametrize(
    ("text", "indices"),
    [("1", (1,)), ("0,2-3", (0, 2, 3)), ("3,1-2,2", (1, 2, 3)), ("all", None), ("ALL", None)],
)
def test_spellings_of_indices(text, indices):
    words = ["--only-output-from-instance", text]
    assert parse(words) == {"only_output_from_instance": indices, "program": ()}


def test_sync_types_are_stored_as_the_protocol_spells_them():
    assert parse(["--sync-type", "st_pod_native_default"])["sync_type"] == "ST_POD_NATIVE_DEFAULT"
    complete = ShellComplete(COMMAND, {}, "poprun-py", "_POPRUN_PY_COMPLETE")
    assert "ST_POD_NATIVE_DEFAULT" in [
        item.value for item in complete.get_completions(["--sync-type"], "")
    ]


# --- help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "topic"),
    [
        (["--help"], ""),
        (["-h"], ""),
        (["--he"], ""),
        (["-n", "2", "--help"], ""),
        (["--help", "Placement"], "Placement"),
        (["--help=all", "x"], "all"),
        (["-h", "--timeout"], "--timeout"),
    ],
)
def test_help_takes_a_topic_and_ignores_all_other_words(words, topic):
    assert parse(words) == {"help": topic, "program": ()}


@pytest.mark.parametrize("topic", ["", "placement", "timeout"])
def test_help(topic, golden):
    text = help_text(topic, 200)
    assert max(map(len, text.splitlines())) <= 100
    golden(f"help{'_' if topic else ''}{topic}.txt", text + "\n")


def test_the_whole_help_names_every_option():
    text = help_text("all", 200)
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    pages = [" ".join(help_text(group, 200).split()) for group in GROUPS]
    assert [page for page in pages if page not in words] == []
    for name, opt in OPTIONS.items():
        if name != "verbosity":
            assert option_name(name) in text
            assert opt.type is FLAG or opt.type.metavar in text


def test_the_short_help_shows_the_most_used_options_and_every_group():
    text = help_text("", 200)
    assert len(MOST_USED) <= 12
    for name in MOST_USED:
        assert name == "verbosity" or option_name(name) in text
    for group, purpose in GROUPS.items():
        assert f"  {group.lower()} " in text
        assert purpose in text
    assert len(text.splitlines()) <= 64


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_may_be_shortened_and_written_in_any_case(group):
    page = help_text(group, 100)
    own = [option_name(n) for n, opt in OPTIONS.items() if opt.group == group]
    for name in own:
        assert name == "--verbosity" or name in page
    # -m, --install-names and --remove-names are not fields.
    assert page.count("\n  -") == len(own) + {"Job": 1, "Environment": 2}.get(group, 0)
    for topic in (group.upper(), group.lower().replace(" ", "-"), group[:2].lower()):
        assert help_text(topic, 100) == page


def test_names_are_either_installed_or_removed():
    assert parse(["--remove-names", "--remove-names"])["names_change"] == "--remove-names"
    with pytest.raises(UsageError, match="--install-names and --remove-names cannot be used"):
        parse(["--install-names", "--remove-names"])


@pytest.mark.parametrize("topic", ["timeout", "--timeout", "TIMEOUT", "timeo"])
def test_the_help_of_one_option_names_its_variable(topic):
    text = help_text(topic, 100)
    assert "--timeout TIME" in text
    assert "POPRUN_TIMEOUT" in text
    assert "--grace" not in text


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("placment", "did you mean placement?"),
        ("train.py", "expected all, an option, a command (jobs, stop, runs,"),
        ("--timeot", "did you mean timeout?"),
        ("num", "expected all"),
    ],
)
def test_an_unknown_topic_of_help_is_an_error_of_one_line(topic, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        help_text(topic, 100)


def test_the_hint_for_an_ambiguous_topic_is_not_the_topic_itself():
    with pytest.raises(UsageError) as caught:
        help_text("n", 100)
    assert "mean n?" not in str(caught.value)


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_descriptions_have_half_of_a_narrow_screen(columns):
    lines = [line for line in help_text("all", columns).split("\n") if line.startswith("    ")]
    widest = max(len(line) - len(line.lstrip()) for line in lines)
    assert widest <= columns // 2


def test_every_option_is_declared_once():
    spelled = [name for param in COMMAND.params for name in getattr(param, "opts", ())]
    assert len(spelled) == len(set(spelled))
