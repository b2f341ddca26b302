"""The conversion of keyword arguments to options, their errors, and their types."""

from __future__ import annotations

import re
import traceback
from dataclasses import fields
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from poprun_py import LaunchConfig, UsageError
from poprun_py.options.keyword_types import LaunchOptions
from poprun_py.options.launch_config import changed_config
from poprun_py.options.python_keywords import COMMAND_LINE_ONLY, KEYWORDS


def made(*program, **options):
    return changed_config(LaunchConfig(), options, program or ("train.py",))


def test_words_are_texts_numbers_and_paths():
    words = (Path("train.py"), "--lr", 0.1, 3, 1e-05, np.int64(4), np.float32(0.5), Decimal("1.50"))
    assert made(*words).program == (
        *("train.py", "--lr", "0.1", "3", "1e-05", "4", "0.5", "1.50"),
    )  # fmt: skip


def test_keywords_are_the_options_of_the_command_line_and_hosts_and_env():
    config = made(
        hosts=["a", "b:2"], env={"SEED": 1, "DATA": Path("d")}, timeout="5m", numa_aware="no",
        only_output_from_instance="0,2-3", num_instances=4, output_dir=Path("runs"),
        pod=Path("pod"),
    )  # fmt: skip
    assert config == LaunchConfig(
        program=("train.py",), host="a,b:2", env=("SEED=1", "DATA=d"), timeout=300,
        numa_aware=False, only_output_from_instance=(0, 2, 3), num_instances=4, output_dir="runs",
        pod="pod",
    )  # fmt: skip
    assert made(hosts="n[0-3]").host == "n[0-3]"
    assert made(env=["SEED"]).env == ("SEED",)
    assert made(timeout=None, num_replicas=None, hosts=None) == made()
    # A number of replicas that was given does not follow the instances.
    assert made(num_instances=2, num_replicas=2).is_given("num_replicas")


@pytest.mark.parametrize(
    ("program", "options", "said"),
    [
        ("train.py --lr 0.1", {}, "program 'train.py --lr 0.1': expected a list of words"),
        (["a", True], {}, "word 1 of the program is True: expected a text, a number or a path"),
        (["a", None], {}, "word 1 of the program is of type NoneType: expected"),
        (["a"], {"num_instnces": 2}, "unknown option 'num_instnces'; did you mean num_instances?"),
        (["a"], {"NUM-INSTANCE": 2}, "did you mean num_instances?"),
        (["a"], {"descriptor": 2}, "unknown option 'descriptor'; did you mean descriptors?"),
        (["a"], {"show": True}, "show is not an option of a launch, and this function does not"),
        (["a", np.True_], {}, "word 1 of the program is True: expected a text, a number or a path"),
        (["a", np.ones(2)], {}, "word 1 of the program is of type ndarray: expected a text"),
        (["a"], {"num_instances": True}, "num_instances True: expected a whole number"),
        (["a"], {"num_instances": np.True_}, "num_instances np.True_: expected a whole number"),
        (["a"], {"num_instances": np.float64(2)}, "expected a whole number"),
        (["a"], {"timeout": True}, "timeout True: expected a number of seconds"),
        (["a"], {"hang_timeout": np.ones(2)}, "expected a number of seconds"),
        (["a"], {"sync_type": np.ones(2)}, "expected one of"),
        (["a"], {"zzz": 2}, "unknown option 'zzz'; poprun-py --help all lists all"),
        (["a"], {"num_instances": "2"}, "num_instances '2': expected a whole number"),
        (["a"], {"timeout": "soon"}, "timeout 'soon': expected a number of seconds"),
        (["a"], {"hosts": []}, "hosts is an empty list: expected at least one host"),
        (["a"], {"hosts": ["a", 1]}, "hosts ['a', 1]: expected a list of names"),
        (["a"], {"hosts": ["a"], "host": "b"}, "host and hosts cannot be used together"),
        (["a"], {"hosts": ["a"], "host_file": "b"}, "hosts and host_file cannot be used together"),
        (["a"], {"env": {"A=B": 1}}, "env: 'A=B' is not the name of a variable"),
        (
            ["a"],
            {"dry_run": True},
            "dry_run is an option of the command poprun-py only: poprun",
        ),
        (["a"], {"import_config": "f"}, "LaunchConfig.from_file(...) reads a configuration file"),
        (["a"], {"num_instances": 3, "num_replicas": 4}, "num_replicas=4 cannot be split evenly"),
    ],
)
def test_errors_are_one_line(program, options, said):
    with pytest.raises(UsageError) as refused:
        changed_config(LaunchConfig(), options, program)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_numbers_of_numpy_and_torch_are_converted():
    config = made(
        *("a", torch.tensor(2), np.array(3), np.str_("b")), env={"N": torch.tensor(1.5)},
        num_instances=np.int64(4), num_replicas=torch.tensor(8), timeout=np.float32(0.5),
        numa_aware=np.bool_(False), only_output_from_instance=np.array([0, 2]),
        stdin_instance=np.int8(1),
    )  # fmt: skip
    assert config == made(
        *("a", 2, 3, "b"), env={"N": 1.5}, num_instances=4, num_replicas=8, timeout=0.5,
        numa_aware=False, only_output_from_instance=[0, 2], stdin_instance=1,
    )  # fmt: skip
    assert "np." not in repr(config)
    assert "tensor" not in repr(config)
    assert made(num_instances=3, only_output_from_instance=range(2)) == made(
        num_instances=3, only_output_from_instance=(0, 1)
    )


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"TOKEN": ["s3cret"]}, "variable TOKEN of env is of type list: expected"),
        ({"TOKEN": "s3cret\0"}, "variable TOKEN of env: expected"),
        ({"TOKEN": "s3cret\ud800"}, "env 'TOKEN'=...: expected"),
        (["TOKEN=s3cret\0"], "env 'TOKEN'=...: expected"),
        (["TOKEN", ["s3cret"]], "env of type list: expected"),
        ("TOKEN=s3cret", "env of type str: expected a list"),
    ],
)
def test_an_error_never_contains_the_value_of_a_variable(env, said):
    ways = [
        partial(made, env=env),
        partial(LaunchConfig(program=("a",)).replace, env=env),
        partial(LaunchConfig, env=env),
    ]
    for way in ways:
        with pytest.raises(UsageError) as told:
            way()
        assert "s3cret" not in "".join(traceback.format_exception_only(told.value))
    with pytest.raises(UsageError, match=re.escape(said)):
        ways[0]()


def test_the_text_of_a_configuration_never_contains_the_value_of_a_variable():
    config = made(env={"TOKEN": "s3cret"})
    for shown in (repr(config), str(config), config._repr_html_(), repr(config.origins)):
        assert "s3cret" not in shown
    assert "TOKEN" in str(config)


# --- files and changes --------------------------------------------------------------------------


def test_keywords_take_precedence_over_a_file(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('program = ["a.py"]\nnum-instances = 2\nhost = "a,b"\ngrace = "2s"\n')
    assert LaunchConfig.from_file(file) == LaunchConfig(
        program=("a.py",), num_instances=2, host="a,b", grace=2
    )
    changed = LaunchConfig.from_file(file, program=["b.py", 3], hosts=["c"], num_replicas=4)
    assert (changed.program, changed.host, changed.num_replicas) == (("b.py", "3"), "c", 4)
    assert LaunchConfig.from_file(file, host_file="hosts.txt").host is None


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.toml", None, "the configuration cannot be read"),
        ("job.toml", b"\xff", "not UTF-8 text"),
        ("job.toml", b"num-instnces = 2", "did you mean num-instances?"),
        ("job.yaml", b"", "expected a file name that ends in .toml or .json"),
    ],
)
def test_errors_in_a_file_name_the_file(name, text, said, tmp_path):
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(UsageError) as refused:
        LaunchConfig.from_file(tmp_path / name)
    assert said in str(refused.value)
    assert name in str(refused.value)


@pytest.mark.parametrize("path", [None, 3, "job\0.toml"])
def test_the_path_of_a_file_must_be_a_path(path):
    with pytest.raises(UsageError, match="expected the path of a"):
        LaunchConfig.from_file(path)


def test_a_changed_configuration():
    config = LaunchConfig(program=("a",), num_instances=2, host="h", timeout=4, env=("A=1",))
    # The number of replicas was not given, so it follows the number of instances.
    assert config.replace(num_instances=4).num_replicas == 4
    assert config.replace(timeout=None, hosts=None) == LaunchConfig(
        program=("a",), num_instances=2, env=("A=1",)
    )
    assert config.replace(host_file="f").host is None
    assert config.replace(program=["b", 1], env={"B": 2}).env == ("B=2",)
    assert config.replace(nproc_per_node=3).nproc_per_node == 3
    assert config.replace() == config
    given = made(num_instances=2, num_replicas=2).replace(num_instances=1)
    assert given.num_replicas == 2
    with pytest.raises(UsageError, match="unknown option 'timeot'; did you mean timeout"):
        config.replace(timeot=3)


# --- types --------------------------------------------------------------------------------------


def test_every_option_has_a_type():
    names = {field.name for field in fields(LaunchConfig)} - {"program", "origins"}
    assert {*LaunchOptions.__annotations__} == names - {*COMMAND_LINE_ONLY} | {"hosts"}
    assert {*LaunchOptions.__annotations__} == {*KEYWORDS}
