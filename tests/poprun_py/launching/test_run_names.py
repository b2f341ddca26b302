"""The names, tags and notes of runs: what is accepted, and names that exist already."""

from __future__ import annotations

import json

import pytest
from support.launcher.consoles import KeptConsole
from support.launcher.plans import plan_blindly

from popdist_py.environment import InstanceEnvironment
from poprun_py.errors import UsageError
from poprun_py.launching.run_names import RunName, choose_run_name
from poprun_py.launching.run_record import RunRecord
from poprun_py.options.command_line import parse
from poprun_py.options.gathered_options import gather_options
from poprun_py.options.launch_config import LaunchConfig

INSIDE = InstanceEnvironment().to_environ()


def plan_of(folder, **options):
    return plan_blindly(LaunchConfig(program=("x",), output_dir=str(folder), **options))


def record(console, folder, environ=None, **options):
    """Record a run without attempts that fail, and return its report."""
    planned = plan_of(folder, **options)
    if environ is not None:
        planned = plan_blindly(planned.config, environ=environ)
    with RunRecord(planned, console) as run:
        run.begin(planned, 0)
        run.finish(0, "")
    return json.loads((folder / run.run_id / "report.json").read_text())


def test_a_new_run_never_mixes_with_a_run_of_its_name(tmp_path):
    console = KeptConsole()
    names = [record(console, tmp_path, run_name="base")["run_id"] for _ in range(3)]
    assert names == ["base", "base-2", "base-3"]
    assert str((tmp_path / "latest").readlink()) == "base-3"
    assert [len(list((tmp_path / name).glob("attempt-*"))) for name in names] == [1, 1, 1]
    told = [sentence for kind, sentence in console.said if kind == "tell"]
    assert told == [
        f"the name of the run is {name}, because {tmp_path}/base already exists "
        "(POPRUN_RUN_ID=base continues the run base)"
        for name in names[1:]
    ]


def test_a_file_of_the_name_is_not_a_run_to_continue(tmp_path):
    (tmp_path / "base").write_text("mine")
    console = KeptConsole()
    assert record(console, tmp_path, run_name="base")["run_id"] == "base-2"
    assert (
        "tell",
        f"the name of the run is base-2, because {tmp_path}/base already exists",
    ) in console.said
    assert (tmp_path / "base").read_text() == "mine"


def test_a_refused_launch_leaves_its_name_free(tmp_path):
    record(KeptConsole(), tmp_path, run_name="first")
    with RunRecord(plan_of(tmp_path, run_name="base"), KeptConsole()) as refused:
        assert (tmp_path / "base").is_dir()
    assert refused.report is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "latest"]
    assert str((tmp_path / "latest").readlink()) == "first"
    assert record(KeptConsole(), tmp_path, run_name="base")["run_id"] == "base"


def test_the_variable_still_continues_a_run_and_keeps_its_labels(tmp_path):
    console = KeptConsole()
    record(console, tmp_path, run_name="base", tag=("lr=0.1", "data=a"), note="first")
    again = record(console, tmp_path, {"POPRUN_RUN_ID": "base"}, tag=("data=b",))
    assert [attempt["number"] for attempt in again["attempts"]] == [1, 2]
    assert (again["tags"], again["note"]) == ({"lr": "0.1", "data": "b"}, "first")


def test_a_run_without_labels_has_no_keys_for_them(tmp_path):
    assert {"tags", "note"}.isdisjoint(record(KeptConsole(), tmp_path))


def config_of(words, environ):
    return gather_options(parse(words.split()), environ).config


@pytest.mark.parametrize(
    ("words", "environ", "name"),
    [
        ("--run-name a x", {}, RunName("a", is_for_new_run=True)),
        ("x", {"POPRUN_RUN_NAME": "a"}, RunName("a", is_for_new_run=True)),
        ("x", {"POPRUN_RUN_ID": "a"}, RunName("a")),
        # An instance has the variables of its job, but a job inside it is another run.
        ("--run-name a x", {**INSIDE, "POPRUN_RUN_ID": "b"}, RunName("a", is_for_new_run=True)),
    ],
)
def test_the_name_of_a_run(words, environ, name):
    assert choose_run_name(config_of(words, environ), environ) == name


def test_a_job_inside_an_instance_does_not_take_the_name_of_its_job():
    environ = {**INSIDE, "POPRUN_RUN_ID": "outer", "POPRUN_RUN_NAME": "outer"}
    assert "outer" not in choose_run_name(config_of("x", environ), environ).text


def test_a_new_run_and_the_continuation_of_one_exclude_each_other():
    environ = {"POPRUN_RUN_ID": "b"}
    with pytest.raises(UsageError) as caught:
        choose_run_name(config_of("--run-name a x", environ), environ)
    assert str(caught.value) == (
        "--run-name a and POPRUN_RUN_ID=b cannot be used together; give only --run-name to "
        "start a new run, or only POPRUN_RUN_ID to continue a run"
    )


@pytest.mark.parametrize(
    "options",
    [
        *({"run_name": each} for each in ("", "latest", "newest", "12", "a/b", ".a", "x" * 121)),
        *({"tag": (each,)} for each in ("", "lr", "=1", "1a=b", "a b=c", "a=\x1b[1m", "a=\n")),
        *({"note": each} for each in ("\x1b[2J", "x" * 2001)),
        {"tag": ("lr=1", "lr=2")},
    ],
)
def test_names_tags_and_notes_that_are_refused(options):
    (name,) = options
    with pytest.raises(UsageError, match=f"^{name} .*(expected|given twice)"):
        LaunchConfig(program=("x",), **options)


def test_tags_from_python_are_a_mapping_or_texts():
    config = LaunchConfig().replace(tag={"lr": 0.1, "data": "a b"}, note="one\n\ttwo")
    assert config.tag == ("lr=0.1", "data=a b")
    assert LaunchConfig().replace(tag=["lr=0.1"]).tag == ("lr=0.1",)
