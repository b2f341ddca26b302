"""The precedence of the sources of options, and the spelling of options in messages."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.repository import ROOT

from poprun_py.errors import UsageError
from poprun_py.launching.job_ipus import planned_partition
from poprun_py.machines.host_list import LOCALHOST, parse_host_list
from poprun_py.options.config_files import (
    checked_values,
    config_text,
    parse_config,
    parse_project_file,
)
from poprun_py.options.declared_options import OPTION_VARIABLES
from poprun_py.options.gathered_options import (
    INTERNAL_VARIABLES,
    POD_VARIABLES,
    from_environment,
    is_option_variable,
    with_variables,
)
from poprun_py.options.launch_config import (
    LaunchConfig,
    config_to_dict,
    merged_config,
)
from poprun_py.options.option_origins import from_command_line
from poprun_py.options.python_keywords import from_keywords
from poprun_py.planning.instances_on_hosts import make_topology


def variables(**environ):
    return from_environment(environ)[0]


def project(text):
    return parse_project_file(f"[tool.poprun-py]\n{text}", "pyproject.toml")


def config_from(data, source="configuration"):
    return merged_config(checked_values(data, source))


def dump_config(config, path):
    return config_text(config_to_dict(config), config.origins, path)


# --- variables for jobs of Python ---------------------------------------------------------------


def test_python_reads_only_variables_about_other_jobs(tmp_path):
    environ = dict.fromkeys(OPTION_VARIABLES, "nonsense")
    share, wait = environ.pop("POPRUN_SHARE_CORES"), environ.pop("POPRUN_WAIT_FOR_RESOURCES")
    assert share == wait == environ.pop("POPRUN_POD")
    config = LaunchConfig(num_instances=2)
    assert with_variables(config, environ) is config
    shared = with_variables(config, {**environ, "POPRUN_SHARE_CORES": "no"})
    assert shared == replace(config, share_cores=False, origins=shared.origins)
    assert shared.shown("share_cores") == "POPRUN_SHARE_CORES=no"
    waits = with_variables(config, {**environ, "POPRUN_WAIT_FOR_RESOURCES": "5"})
    assert waits.wait_for_resources == 5
    # The launcher reads POPRUN_POD itself.
    pods = {"POPRUN_POD": "lab", "POPRUN_PODS": str(tmp_path)}
    assert "lab" in planned_partition(config, pods).reason


@pytest.mark.parametrize("keyword", [{"share_cores": True}, {"wait_for_resources": 3}])
def test_variables_do_not_change_keywords_of_python(keyword):
    config = LaunchConfig(**keyword)
    for environ in ({"POPRUN_SHARE_CORES": "no"}, {"POPRUN_WAIT_FOR_RESOURCES": "1"}):
        assert with_variables(config, environ) is config


# --- replicas follow the instances --------------------------------------------------------------


def test_replicas_are_as_many_as_instances_unless_given():
    assert LaunchConfig().num_replicas == 1
    config = LaunchConfig(num_instances=3)
    assert config.num_replicas == 3
    assert make_topology(config, (LOCALHOST,)).num_replicas == 3
    assert repr(config) == "LaunchConfig(num_instances=3)"
    assert LaunchConfig(num_instances=3, num_replicas=6).num_replicas == 6


def test_an_export_shows_the_replicas_but_does_not_fix_them():
    config = merged_config(from_command_line({"num_instances": 3}))
    text = dump_config(config, "c.toml")
    assert text == (
        "num-instances = 3  # command line\n# num-replicas = 3 (as many as instances)\n"
    )
    again = merged_config(parse_config(text, "c.toml"), from_command_line({"num_instances": 4}))
    assert again.num_replicas == 4


def test_instances_of_each_host_are_counted_when_the_hosts_are_known():
    config = LaunchConfig(nproc_per_node=4).on_hosts(3)
    assert (config.num_instances, config.num_replicas, config.nproc_per_node) == (12, 12, None)
    config = LaunchConfig(nproc_per_node="auto", num_replicas=12).on_hosts(2, cpus=3)
    assert (config.num_instances, config.num_replicas) == (6, 12)
    assert LaunchConfig(num_instances=2).on_hosts(5).num_instances == 2


# --- spelling in messages -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (from_command_line({"num_replicas": 8}), "--num-replicas 8 cannot be"),
        (variables(POPRUN_NUM_REPLICAS="8"), "POPRUN_NUM_REPLICAS=8 cannot be"),
        (project("num-replicas = 8"), "num-replicas = 8 in pyproject.toml cannot be"),
        (parse_config('{"num_replicas": 8}', "job.json"), "num_replicas = 8 in job.json cannot be"),
        (from_keywords({"num_replicas": 8}), "num_replicas=8 cannot be"),
    ],
)
def test_an_error_spells_an_option_as_its_source_does(source, said):
    with pytest.raises(UsageError) as caught:
        merged_config(source, from_command_line({"num_instances": 3}))
    assert str(caught.value).startswith(said)
    assert "over --num-instances 3 (" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_instances": 65_536, "ipus_per_replica": 32},
         "num-replicas = 65536 (as many as instances) x --ipus-per-replica 32 = 2097152 IPUs"),
        ({"num_ilds": 2}, "num-instances = 1 (the default) cannot be split evenly over"),
        ({"only_output_from_instance": (0, 1)},
         "--only-output-from-instance 1: expected an index of an instance from 0 to 0 (num-inst"),
    ],
)  # fmt: skip
def test_an_error_marks_a_default_value(values, said):
    with pytest.raises(UsageError) as caught:
        merged_config(from_command_line(values))
    assert str(caught.value).startswith(said)


def test_an_error_names_the_instances_of_each_host_and_the_hosts():
    config = merged_config(from_command_line({"nproc_per_node": 4, "num_replicas": 12}))
    with pytest.raises(UsageError) as caught:
        config.on_hosts(2)
    assert "over --nproc-per-node 4 x 2 hosts = 8 instances (" in str(caught.value)
    config = merged_config(from_command_line({"nproc_per_node": "auto", "num_replicas": 4}))
    with pytest.raises(UsageError, match=re.escape("--nproc-per-node auto (3 CPUs) = 3 instances")):
        config.on_hosts(1, cpus=3)


def test_an_error_about_hosts_names_only_options_that_were_given():
    config = merged_config(variables(POPRUN_NUM_INSTANCES="3"))
    with pytest.raises(UsageError, match=r"^POPRUN_NUM_INSTANCES=3 cannot be split .* 2 hosts"):
        make_topology(config, parse_host_list("a,b", source="x"))
    with pytest.raises(UsageError) as caught:
        make_topology(config, parse_host_list("a:1", source="x"))
    assert "--" not in str(caught.value)


# --- precedence ---------------------------------------------------------------------------------


def test_precedence_of_command_line_variables_and_files():
    weakest = project("timeout = 1\ngrace = 1\nhost = 'a'\nnum-instances = 2")
    file = parse_config('{"timeout": 2, "grace": 2, "host": "b"}', "job.json")
    environ = variables(POPRUN_TIMEOUT="3", POPRUN_GRACE="3")
    config = merged_config(
        weakest, file, environ, from_command_line({"timeout": 4, "program": ("x",)})
    )
    assert (config.timeout, config.grace, config.host, config.num_instances) == (4, 3, "b", 2)
    assert {name: origin.label for name, origin in config.origins.items()} == {
        "timeout": "command line",
        "grace": "POPRUN_GRACE",
        "host": "job.json",
        "num_instances": "pyproject.toml",
    }


@pytest.mark.parametrize(
    ("weaker", "stronger"),
    [
        (("host", "a"), ("host_file", "f")),
        (("host_file", "f"), ("host", "a")),
        (("hardware", "f"), ("hardware_root", "d")),
        (("num_instances", 2), ("nproc_per_node", 1)),
        (("nproc_per_node", 1), ("num_instances", 2)),
        (("nproc_per_node", 3), ("num_instances", 1)),
    ],
)
def test_of_two_options_that_exclude_each_other_the_later_source_counts(weaker, stronger):
    config = merged_config(of_file(weaker), from_command_line(dict([stronger])))
    assert getattr(config, stronger[0]) == stronger[1]
    assert not config.is_given(weaker[0])
    with pytest.raises(UsageError, match="cannot be used together: give one"):
        merged_config(from_command_line(dict([weaker, stronger])))


def of_file(pair):
    return parse_config(json.dumps(dict([pair])), "job.json")


def test_a_list_is_replaced_as_a_whole():
    config = merged_config(project('env = ["A=1", "B=2"]'), from_command_line({"env": ("C=3",)}))
    assert config.env == ("C=3",)


def test_the_program_of_a_file_is_used_if_the_command_line_has_none():
    file = parse_config('{"program": ["train.py"]}', "job.json")
    assert merged_config(file, from_command_line({"program": ()})).program == ("train.py",)
    assert merged_config(file, from_command_line({"program": ("x",)})).program == ("x",)


# --- variables ----------------------------------------------------------------------------------


def test_variables_are_read_like_the_command_line():
    values, warnings = from_environment(
        {
            "POPRUN_NUM_INSTANCES": "2",
            "POPRUN_TIMEOUT": "5m",
            "POPRUN_DRY_RUN": "yes",
            "POPRUN_ONLY_OUTPUT_FROM_INSTANCE": "all",
            "POPRUN_ENV": "A=1 2\nB=x,y\n",
            "POPRUN_GRACE": "",
            "POPRUN_CPUS": "1,2",
            "PATH": "/bin",
        }
    )
    assert warnings == ()
    assert {name: value for name, (value, _) in values.items()} == {
        "num_instances": 2, "timeout": 300, "dry_run": True, "only_output_from_instance": None,
        "env": ("A=1 2", "B=x,y"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("POPRUN_NUM_REPLICAS", "x", "POPRUN_NUM_REPLICAS 'x': expected a whole number"),
        ("POPRUN_SMT", "maybe", "POPRUN_SMT 'maybe': expected yes or no"),
        ("POPRUN_LOG_LEVEL", "loud", "POPRUN_LOG_LEVEL 'loud': expected one of TRACE"),
    ],
)
def test_an_error_names_the_variable(name, text, said):
    with pytest.raises(UsageError) as caught:
        from_environment({name: text})
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({"POPRUN_LOG_LEVEL": "TRACE"}, 2),
        ({"POPRUN_LOG_LEVEL": "info"}, 1),
        ({"POPRUN_LOG_LEVEL": "OFF"}, 0),
        ({"POPRUN_LOG_LEVEL": "TRACE", "POPRUN_VERBOSITY": "1"}, 1),
        ({"POPRUN_LOG_LEVEL": "TRACE", "POPRUN_VERBOSITY": ""}, 2),
    ],
)
def test_poprun_s_log_level_is_the_verbosity(environ, level):
    assert from_environment(environ)[0]["verbosity"][0] == level


def test_an_unknown_variable_gives_a_warning_with_the_nearest_name():
    assert from_environment({"POPRUN_NUM_INSTANCE": "2", "POPRUN_ZZZZZZZZ": "1"})[1] == (
        "POPRUN_NUM_INSTANCE is not an option of poprun-py; did you mean POPRUN_NUM_INSTANCES?",
        "POPRUN_ZZZZZZZZ is not an option of poprun-py",
    )
    # These options cannot be given by a variable.
    assert from_environment({"POPRUN_STACKS": "1", "POPRUN_FROM_PLAN": "p"})[1] == (
        "POPRUN_FROM_PLAN is not an option of poprun-py; give --from-plan on the command line",
        "POPRUN_STACKS is not an option of poprun-py; give --stacks on the command line",
    )


def test_only_a_newline_separates_the_values_of_a_variable():
    text = "A=one\u2028two\x0bthree\r\n\nB=2\n"
    assert variables(POPRUN_ENV=text)["env"][0] == ("A=one\u2028two\x0bthree", "B=2")


def test_no_option_takes_the_name_of_a_variable_between_launcher_and_wrapper():
    assert not {name for name in INTERNAL_VARIABLES if is_option_variable(name)}
    named = set()
    for file in (ROOT / "poprun_py").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"\bPOPRUN_[A-Z_]*[A-Z]\b", node.value))
    unknown = {n for n in named - INTERNAL_VARIABLES - POD_VARIABLES if not is_option_variable(n)}
    assert unknown == set(), "neither an option nor one of INTERNAL_VARIABLES or POD_VARIABLES"


@given(
    st.dictionaries(
        st.sampled_from(sorted(OPTION_VARIABLES)),
        st.sampled_from(["", "0", "1", "2", "yes", "a", "a,b", "5m", "auto", "A=1\nB=2", "é[", "-"])
        | st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=8),
        max_size=6,
    )
)
def test_random_variables_are_options_or_an_error(environ):
    with contextlib.suppress(UsageError):
        merged_config(from_environment(environ)[0])


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "\nnum-replicaz = 2",
            "pyproject.toml, line 5: unknown option 'num-replicaz'; did you mean num-replicas?",
        ),
        ("timeout = 'x'", "pyproject.toml, line 4: timeout 'x': expected a number of seconds"),
        ("num-replicas = ", "pyproject.toml: the file is not valid TOML"),
        (
            "dry-run = true",
            "line 4: 'dry-run' cannot be set in a configuration file; give",
        ),
    ],
)
def test_an_error_in_the_project_file_has_a_line_number(text, said):
    before = "[tool.other]\nnum-replicaz = 1\n"
    with pytest.raises(UsageError) as caught:
        parse_project_file(f"{before}[tool.poprun-py]\n{text}", "pyproject.toml")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[tool.ruff]\n",
        "[tool]\nother = 1\n",
        "tool = 3 # poprun-py = \n",
        "broken but not about us = = =",
        '[tool.ruff.per-file-ignores]\n"poprun_py/x.py" = []\n',
    ],
)
def test_a_project_file_without_our_table_is_ignored(text):
    assert parse_project_file(text, "pyproject.toml") is None


@pytest.mark.parametrize(
    "text",
    [
        "[tool.poprun-py]\ngrace = '1m'",
        '[tool."poprun-py"]\ngrace = 60',
        "[tool]\npoprun-py = {grace = 60}",
        "[tool]\npoprun-py.grace = 60",
        "[ tool . poprun-py ]\ngrace = 60.0",
    ],
)
def test_every_spelling_of_the_table_is_found(text):
    assert parse_project_file(text, "pyproject.toml")["grace"][0] == 60


def test_a_misspelled_table_is_an_error():
    with pytest.raises(UsageError, match=re.escape("did you mean [tool.poprun-py]?")):
        parse_project_file("[tool.poprun_py]\nnum-instances = 2\n", "pyproject.toml")


def test_times_and_indices_may_be_texts_or_numbers_in_a_file():
    config = config_from(
        {"num-instances": 4, "timeout": "1h30m", "grace": 2.5, "hang-timeout": "auto",
         "only-output-from-instance": "0,2-3"}
    )  # fmt: skip
    assert (config.timeout, config.grace, config.hang_timeout) == (5400, 2.5, "auto")
    assert config.only_output_from_instance == (0, 2, 3)
    for value, kept in ((2, (2,)), ([3, 0, 3], (0, 3)), ("all", None)):
        data = {"num-instances": 4, "only-output-from-instance": value}
        assert config_from(data).only_output_from_instance == kept
    for value in ([], [-1], ["1"], True, 1.0):
        with pytest.raises(UsageError, match="expected indices of instances"):
            config_from({"num-instances": 4, "only-output-from-instance": value})


@pytest.mark.parametrize("path", ["c.toml", "c.json"])
def test_an_export_has_the_source_of_each_value_and_is_read_again(path):
    config = merged_config(
        project("grace = 2\nprogram = ['x']"),
        variables(POPRUN_ENV="A=1"),
        from_command_line({"num_instances": 1, "only_output_from_instance": None}),
    )
    text = dump_config(config, path)
    if path == "c.toml":
        assert text.splitlines() == [
            'program = ["x"]',
            "num-instances = 1  # command line",
            'only-output-from-instance = "all"  # command line',
            "grace = 2  # pyproject.toml",
            'env = ["A=1"]  # POPRUN_ENV',
            "# num-replicas = 1 (as many as instances)",
        ]
    else:
        assert json.loads(text)["sources"] == {
            "num_instances": "command line",
            "only_output_from_instance": "command line",
            "grace": "pyproject.toml",
            "env": "POPRUN_ENV",
            "num_replicas": "1, as many as instances",
        }
    assert merged_config(parse_config(text, path)) == config


def test_a_path_with_a_line_break_stays_on_one_line_of_an_export():
    values = parse_config('{"grace": 2}', "a\nb.json")
    assert dump_config(merged_config(values), "c.toml") == "grace = 2  # a b.json\n"
