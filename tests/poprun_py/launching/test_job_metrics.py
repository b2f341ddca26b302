"""What is refused of a run's numbers before anything starts."""

from __future__ import annotations

import os
import re
from importlib.machinery import ModuleSpec

import pytest
from support.launcher.consoles import KeptConsole

from poprun_py import plan
from poprun_py.errors import UsageError
from poprun_py.launching import job_metrics
from poprun_py.launching.launch import Request, launch
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.running.metrics import metrics_feed


def test_wandb_gets_the_tags_and_the_note(monkeypatch):
    documents = []
    monkeypatch.setattr(job_metrics, "_require_wandb", lambda _: None)
    monkeypatch.setattr(
        metrics_feed, "MetricsProcess", lambda *words, **_: documents.append(words[2]) or Ended()
    )
    planned = plan(LaunchConfig(program=("train.py",), metrics_to=("wandb",)))
    for labels in ({"tags": {"lr": "0.1"}, "note": "why"}, {}):
        metrics = job_metrics.JobMetrics(planned)
        metrics.start("night-7", labels, None, print)
        metrics.close()
    known, plain = (document["sinks"][0]["wandb"] for document in documents)
    assert (known["config"]["tags"], known["notes"]) == ({"lr": "0.1"}, "why")
    assert known["name"] == plain["name"] == "night-7"
    assert "notes" not in plain
    assert plain["config"].keys() == {"run_id", "program", "num_instances"}


class Ended:
    """A process of metrics that needs no end."""

    def close(self):
        pass


@pytest.mark.parametrize("spec", [None, ModuleSpec("wandb", None)])
def test_a_missing_wandb_is_refused_with_what_to_install(monkeypatch, spec):
    # A folder ``wandb`` of earlier runs looks like a package without an origin.
    monkeypatch.setattr(job_metrics, "find_spec", lambda _: spec)
    planned = plan(LaunchConfig(program=("true",), metrics_to=("wandb:digits",)))
    with pytest.raises(UsageError) as caught:
        launch(Request(planned), KeptConsole())
    assert str(caught.value) == (
        "metrics_to=wandb:digits: the package wandb is not installed; run pip install wandb"
    )


def test_a_missing_package_for_served_metrics_is_refused_with_what_to_install(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_metrics, "find_spec", lambda _: None)
    planned = plan(LaunchConfig(program=("touch", "started"), metrics_port=0))
    with pytest.raises(UsageError) as caught:
        launch(Request(planned), KeptConsole())
    assert str(caught.value) == (
        "metrics_port=0: the server of --metrics-port needs the package prometheus_client, which "
        "is not installed: pip install prometheus-client"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["csv:mine.csv"], "csv:mine.csv: the file exists already: name another file, or remove"),
        (
            ["jsonl:no/such/file"],
            ("expected the path of a file in an existing folder with write permission"),
        ),
        (["csv:."], "expected the path of a file in an existing folder with write permission"),
        (["csv:pipe"], "pipe is not a regular file; give the path of a regular file"),
        (
            ["csv:x", "jsonl:x"],
            (
                "csv:x: two destinations of the metrics name this file; give "
                "each destination its own file"
            ),
        ),
    ],
)
def test_a_file_that_is_not_new_is_refused_before_the_job(given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("step,loss\n1,0.5\n")
    os.mkfifo(tmp_path / "pipe")
    planned = plan(LaunchConfig(program=("touch", "started"), metrics_to=given))
    with pytest.raises(UsageError, match=re.escape(said)):
        launch(Request(planned), KeptConsole())
    assert (tmp_path / "mine.csv").read_text() == "step,loss\n1,0.5\n"
    assert not (tmp_path / "started").exists()
