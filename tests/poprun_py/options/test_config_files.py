"""The content of configuration files, and messages about mistakes in them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.errors import UsageError
from poprun_py.options.config_files import checked_values, parse_config
from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.launch_config import LaunchConfig, config_to_dict, merged_config


def config_from(data):
    return merged_config(checked_values(data, "configuration"))


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({"num-replicaz": 2}, "did you mean num-replicas?"),
        ({"num-replicas": "2"}, "a whole number"),
        ({"num-replicas": True}, "a whole number"),
        ({"program": "x"}, "a list of texts"),
        ({"print-topology": "yes"}, "give --print-topology on the command line"),
        ({"smt": "maybe"}, "expected yes or no"),
        ({"timeout": 10**400}, "configuration: timeout a huge number"),
        ({"num-replicas": 1 << 20_000}, "configuration: num-replicas a huge number"),
        ({"program": ["\ud800"]}, "program"),
        ({"host": "\ud800"}, "configuration: host"),
        ({"num_replicas": 2, "num-replicas": 2}, "given twice"),
        ([], "expected a table"),
        ({"mpi-global-args": "x"}, "expected a list"),
        ({"tag": {"lr": [1]}}, "configuration: tag: the value of lr is of type list: expected a"),
        ({"tag": {"amp": True}}, "tag: the value of amp is of type bool"),
        ({"tag": {"n": 1 << 20_000}}, "tag: the value of n is of type int"),
        ({"tag": {"a b": "c"}}, "tag 'a b=c': expected KEY=VALUE"),
    ],
)
def test_bad_configuration_files(data, part):
    with pytest.raises(UsageError, match=None) as caught:
        config_from(data)
    assert part in str(caught.value)


def test_tags_may_be_a_table_in_a_file():
    source = parse_config("tag = {lr = 0.1, model = 'tiny', n = 3}", "job.toml")
    assert merged_config(source).tag == ("lr=0.1", "model=tiny", "n=3")


def test_yes_and_no_may_be_written_in_a_file_as_on_the_command_line():
    config = config_from({"smt": "yes", "remove-partition": "Off", "oversubscribe": "true"})
    assert (config.smt, config.remove_partition, config.oversubscribe) == (True, False, True)


@pytest.mark.parametrize(
    ("value", "mode"),
    [(True, "yes"), (False, "no"), ("auto", "auto"), ("On", "yes"), ("no", "no")],
)
def test_a_choice_with_yes_and_no_may_be_a_boolean_in_a_file(value, mode):
    assert config_from({"sdk-names": value}).sdk_names == mode
    # Older versions wrote share-cores = true or false.
    assert config_from({"share-cores": value}).share_cores == mode
    for other in ("maybe", 1):
        with pytest.raises(UsageError, match="expected auto, yes or no"):
            config_from({"sdk-names": other})


@pytest.mark.parametrize(
    ("text", "path", "part"),
    [
        ("num-replicas = " + "9" * 5000, "c.toml", "c.toml: the file is not valid TOML"),
        ('{"num-replicas": 2, "num-replicas": 4}', "c.json", "'num-replicas' is given twice"),
        ('{"num-replicas": true}', "c.json", "c.json, line 1: num-replicas True"),
    ],
)
def test_mistakes_in_a_configuration_file_name_the_file(text, path, part):
    with pytest.raises(UsageError) as caught:
        parse_config(text, path)
    assert part in str(caught.value)


@given(st.text(max_size=40), st.sampled_from(["c.toml", "c.json", "c.yaml", "c"]))
def test_random_text_is_a_configuration_or_an_error(text, path):
    with contextlib.suppress(UsageError):
        merged_config(parse_config(text, path))


def test_saved_options_are_those_that_decide_a_run():
    assert {name for name, opt in OPTIONS.items() if not opt.saved} == {
        "print_topology", "print_hardware", "dry_run", "export_plan", "from_plan",
        "import_config", "export_config", "overwrite_config", "check", "stacks", "run",
            "status", "status_format", "live", "print_leases", "add_host",
    }  # fmt: skip
    assert config_to_dict(LaunchConfig()) == {}


def test_repr_shows_given_options_but_no_secrets():
    config = LaunchConfig(num_instances=2, num_replicas=4, env=("HF_TOKEN=hush",))
    assert repr(config) == "LaunchConfig(num_instances=2, num_replicas=4, env=...)"
