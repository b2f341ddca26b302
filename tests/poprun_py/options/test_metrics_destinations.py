"""The values of --metrics-to."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.errors import UsageError
from poprun_py.options.gathered_options import gather_options
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import MetricsDestination, read_destinations


@pytest.mark.parametrize(
    ("text", "tool", "where"),
    [
        ("tensorboard", "tensorboard", ""),
        ("TensorBoard:a/b:c", "tensorboard", "a/b:c"),
        ("wandb", "wandb", ""),
        ("wandb:team/digits", "wandb", "team/digits"),
        ("csv", "csv", ""),
        ("CSV:a b.csv", "csv", "a b.csv"),
        ("jsonl:x", "jsonl", "x"),
    ],
)
def test_a_tool_and_its_folder_or_project(text, tool, where):
    assert MetricsDestination.read(text) == MetricsDestination(tool, where)


@given(
    st.sampled_from(["tensorboard", "wandb", "csv", "jsonl"]), st.text(min_size=1).filter(str.strip)
)
def test_the_text_of_a_destination_is_read_again(tool, where):
    destination = MetricsDestination(tool, where)
    assert MetricsDestination.read(str(destination)) == destination


@pytest.mark.parametrize(
    "text", ["", "json", "csv:", "wandb:", "tensorboard: ", ":x", "tensorboard/x", "tenſorboard", 3]
)
def test_an_error_lists_the_accepted_values(text):
    with pytest.raises(UsageError, match=r"expected tensorboard, tensorboard:DIR, wandb, wandb:"):
        LaunchConfig(program=("x",), metrics_to=(text,))


def test_repeated_destinations_count_once():
    config = LaunchConfig(program=("x",), metrics_to=("wandb", "wandb:a", "WANDB"))
    assert [str(each) for each in read_destinations(config.metrics_to)] == ["wandb", "wandb:a"]


def test_folders_of_a_file_are_relative_to_it(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "below").mkdir()
    (tmp_path / "pyproject.toml").write_text(
        '[tool.poprun-py]\nmetrics-to = ["tensorboard:charts", "tensorboard:/charts", "wandb:x",'
        ' "csv:a.csv"]\n'
    )
    monkeypatch.chdir(tmp_path / "below")
    config = gather_options({}, {}).config
    destinations = [f"tensorboard:{tmp_path / 'charts'}", "tensorboard:/charts", "wandb:x"]
    destinations.append(f"csv:{tmp_path / 'a.csv'}")
    assert list(config.metrics_to) == destinations
    assert Path(read_destinations(config.metrics_to)[1].where).is_absolute()


@pytest.mark.parametrize("where", ["tensorboard:DIR", "csv:FILE", "jsonl:FILE"])
def test_what_writes_files_needs_a_folder(where):
    tool = where.partition(":")[0]
    with pytest.raises(
        UsageError, match=f"the run has no folder for the metrics: give {where}, or"
    ):
        LaunchConfig(program=("x",), metrics_to=(tool,))
    LaunchConfig(program=("x",), metrics_to=(tool,), output_dir="runs")
    LaunchConfig(program=("x",), metrics_to=(where,))


@pytest.mark.parametrize("port", [-1, 65_536, True, "8000"])
def test_the_port_of_the_metrics_must_be_a_port_number(port):
    with pytest.raises(UsageError, match="at least 0 and at most 65535"):
        LaunchConfig(program=("x",), metrics_port=port)
