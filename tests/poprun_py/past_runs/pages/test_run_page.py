"""The page of a run, its content for complete and damaged runs, and its display in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from urllib.parse import unquote

import pytest
from support.launcher.made_runs import made_run
from support.launcher.run_folders import BEGAN, a_plan, make_run

from poprun_py.display.formatting import iso_time
from poprun_py.past_runs import recorded_run
from poprun_py.past_runs.pages.run_page import page_text, run_page, write_page
from poprun_py.past_runs.pages.timeline_excerpt import Excerpt, TraceSpan
from poprun_py.past_runs.recorded_run import read_run
from poprun_py.running.watch.records import StepRecord
from poprun_py.running.watch.stragglers import waited_for
from tools.running.browser import CHROMIUM, open_browser

FAILURE = {
    "index": 1, "name": "instance 1 (replicas 2-3)", "host": "localhost", "ended_by": "exit code 1",
    "diagnosis": "ValueError: <script>alert(1)</script>",
    "traceback": "Traceback (most recent call last):\n  File \"train.py\"\nValueError: </script>",
    "stderr": ["one", "two"],
}  # fmt: skip
SECTIONS = ["Training", "Step time", "Where time went", "CPU and memory", "Emulated IPUs",
            "Placement", "Attempts", "Run it again", "Environment"]  # fmt: skip


def drawn(files) -> str:
    return run_page(read_run(files), iso_time(BEGAN + 3600))


def words(page: str) -> str:
    """Return the text of a page without its scripts and styles."""
    text = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub("<[^>]*>", " ", text).split())


def titles(page: str) -> list[str]:
    return re.findall(r"<h2[^>]*>([^<]*)<", page)


def figures(page: str) -> list[dict]:
    return json.loads(re.search(r'id="figures">(.*?)</script>', page)[1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return drawn(make_run(tmp_path_factory.mktemp("run")))


def test_sections_follow_an_engineers_questions(whole):
    assert titles(whole) == SECTIONS


def test_headline(whole):
    text = words(whole)
    assert "train.py: 20260921-133320-1a2b3c Completed after 49" in text
    assert "Instance 2 on localhost is slow" in text
    for fact in ("samples/s in total 4,8", "instances 4 on localhost",
                 "replicas 8 1 IPU each, 8 in total", "attempts 2"):  # fmt: skip
        assert fact in text


def test_tags_and_the_note_are_text(tmp_path):
    run = read_run(make_run(tmp_path / "run", instances=1, attempts=1, steps=0))
    labels = {"tags": {"lr": "0.1", "data": "<b>"}, "note": "first\n<i>second"}
    page = run_page(replace(run, report={**run.report, **labels}), iso_time(BEGAN))
    assert "tags: lr=0.1, data=&lt;b&gt;" in page
    assert "note: first" in page
    assert "&lt;i&gt;second" in page


def test_charts(whole):
    captions = re.findall(r"<figcaption>([^<]*)<", whole)
    assert captions == [
        "Throughput of each instance", "Loss", "accuracy", "Waiting for other instances",
        "Step time",
        "Step time without waiting", "Activities of each instance", "CPUs in use", "Memory",
        "Memory of each IPU: Net, training", "Schedule of Net, training",
    ]  # fmt: skip
    throughput, loss, *_ = figures(whole)
    assert [trace["name"] for trace in throughput["data"]] == [f"instance {i}" for i in range(4)]
    assert [each["text"] for each in throughput["layout"]["annotations"]] == ["attempt 2"]
    assert throughput["layout"]["shapes"][0]["x0"] == pytest.approx(24.6, abs=0.5)
    assert throughput["layout"]["xaxis"]["title"]["text"] == "seconds since the first step"
    assert throughput["data"][0]["x"][0] == pytest.approx(0, abs=0.5)
    # The line has a gap between two attempts.
    assert throughput["data"][0]["y"].count(None) == 1
    steps = loss["data"][0]["x"]
    assert (steps[0], steps[-1]) == (1, 700)
    assert sorted(steps) != steps


def with_phases(files, **phases):
    """Let the program of a made run spend the given time in each phase."""
    report = json.loads(files.report.read_text())
    for state in report["attempts"][-1]["observation"]["instances"]:
        state["phases"] = {
            "launch": 0.4, "imports": 20.0, "has_joined": True, "program": 32.0,
            "before_steps": {"other": 1.5}, "in_steps": {"other": 9.0, "computing": 1.0},
            "after_steps": {}, **phases,
        }  # fmt: skip
    report["attempts"][0]["queue_seconds"] = 30.0
    report["attempts"][0]["machine_at_start"] = {"load": 3.5, "num_cpus": 8}
    files.report.write_text(json.dumps(report))
    return drawn(files)


def test_imports_and_training_are_named_apart(tmp_path):
    page = with_phases(make_run(tmp_path, attempts=1))
    text = words(page)
    assert (
        "training 10 s before it: queue for cores and IPUs 30 s, launch 0.4 s, imports 20 s, "
        "preparation 1.5 s" in text
    )
    assert "imports 20 s, preparation 1.5 s, training 10 s." in text
    assert "load average at the start 3.5; the machine has 8 CPUs" in text
    assert "On average own code 90%, computing 10%. Own code is the program" in text
    chart = next(each for each in figures(page) if each["layout"].get("barmode") == "stack"
                 and each["data"][0]["name"].startswith("queue"))  # fmt: skip
    assert [(each["name"], each["x"][0]) for each in chart["data"]] == [
        ("queue for cores and IPUs", 30.0), ("launch", 0.4), ("imports", 20.0),
        ("preparation", 1.5), ("training", 10.0),
    ]  # fmt: skip


def test_a_program_without_init_has_no_imports_of_its_own(tmp_path):
    text = words(with_phases(make_run(tmp_path, attempts=1), has_joined=False))
    assert "imports and preparation 20 s" in text


def test_a_program_without_steps_spent_no_time_in_training(tmp_path):
    page = with_phases(make_run(tmp_path, attempts=1), in_steps={}, after_steps={})
    text = words(page)
    assert "imports 20 s, preparation 1.5 s." in text
    assert "training 10 s" not in text
    assert "% of the time since the program began" in json.dumps(figures(page))


def test_equal_throughput_is_stated_once_for_all_instances(tmp_path):
    even = words(drawn(made_run(tmp_path, "even", instances=2).files))
    assert re.search(
        r"Each instance has [\d.]+ samples/s on average\. The time for compiling", even
    )


def test_figures_are_accepted_by_plotly(whole):
    import plotly.graph_objects as go

    for figure in figures(whole):
        go.Figure(figure)


def test_slowest_instance_stands_out(whole):
    (row,) = re.findall(r'<tr class="pp-marked">(<td class="pp-number">.*?)</tr>', whole)[:1]
    assert words(row).startswith("2 800")


def test_scripts_in_the_picture_of_a_schedule_do_not_run(whole):
    assert "taken over" not in whole
    assert whole.count('<img src="data:image/svg+xml;base64,') == 1


def test_failure_comes_first(tmp_path):
    text = words(drawn(make_run(tmp_path, attempts=1, failure=FAILURE)))
    opening, _, rest = text.partition("samples/s in total")
    assert "Failed with exit code 1 after" in opening
    assert "instance 1 (replicas 2-3) on localhost failed first: ValueError:" in opening
    assert "Traceback (most recent call last)" in opening
    assert "The end of its stderr one two" in opening
    assert "Traceback" not in rest


def test_links_to_outputs_are_relative_to_the_page(tmp_path):
    files = make_run(tmp_path / "a run", attempts=1, failure=FAILURE)
    own = tmp_path / "a run" / "attempt-1"
    (own / "instance-1.stderr").write_text("Traceback")
    (own / "instance-1.stdout").write_text("")
    (own / "instance-3.stdout").write_text("done")
    for path, folder in ((None, ""), (tmp_path / "page.html", "a%20run/")):
        text = write_page(files, path).read_text()
        links = re.findall(r'<a href="([^"#]+)">([^<]+)</a>', text)
        failed = (f"{folder}attempt-1/instance-1.stderr", "stderr")
        assert links == [failed, failed, (f"{folder}attempt-1/instance-3.stdout", "stdout")]
        written = files.page if path is None else path
        assert all((written.parent / unquote(address)).is_file() for address, _ in links)


def test_copied_files_and_broken_links_are_left_out(tmp_path):
    files = make_run(tmp_path, attempts=1)
    for kind in ("stdout", "values.jsonl", "device.json"):
        (tmp_path / "attempt-1" / f"instance-old.{kind}").write_text("{}")
    (tmp_path / "attempt-1" / "instance-0.stderr").symlink_to("gone")
    assert "instance-old" not in page_text(files)


@pytest.mark.parametrize(("ending", "badge"), [
    ({"exit_code": 0}, '<span class="pp-badge pp-good">Completed</span> after'),
    ({"exit_code": 75}, '<span class="pp-badge pp-half">Stopped at a checkpoint</span> after'),
    ({"exit_code": 3, "attempts": []},
     '<span class="pp-badge pp-bad">Failed</span> with exit code 3'),
    ({"exit_code": 124, "attempts": [{"number": 1, "cause": "time_limit"}]},
     '<span class="pp-badge pp-bad">Time limit</span> with exit code 124 after'),
    ({"state": "running"}, '<span class="pp-badge pp-going">Running</span> for'),
])  # fmt: skip
def test_badge_tells_how_the_run_ended(tmp_path, ending, badge):
    files = make_run(tmp_path, attempts=1, instances=2, steps=0)
    files.report.write_text(json.dumps(json.loads(files.report.read_text()) | ending))
    assert badge in page_text(files)


def test_first_steps_without_a_time_do_not_change_the_speed(tmp_path):
    files = make_run(tmp_path, attempts=1, instances=2, steps=2)
    lines = [
        StepRecord(at=BEGAN + step, instance=instance, step=step, seconds=0.5 * (step > 1),
                   own_seconds=0.5 * (step > 1), samples=100)
        for instance in range(2) for step in (1, 2, 3)
    ]  # fmt: skip
    (tmp_path / "attempt-1" / "steps.jsonl").write_text(
        "".join(json.dumps(each.to_json()) + "\n" for each in lines)
    )
    text = words(drawn(files))
    assert "samples/s in total 400 600 samples in total" in text
    assert "Each instance has 200 samples/s on average" in text


def test_running_job(tmp_path):
    text = words(drawn(make_run(tmp_path, attempts=1, is_running=True)))
    assert "Running for 1 h 0 min" in text
    assert "The run has not ended" in text


def test_job_without_steps_has_no_charts(tmp_path):
    page = drawn(make_run(tmp_path, attempts=1, steps=0))
    assert "<script" not in page
    assert len(page) < 60_000
    assert titles(page) == ["Training", *SECTIONS[5:6], "Attempt and instances", *SECTIONS[7:]]
    assert "popdist_py.heartbeat.step()" in words(page)


def test_a_page_is_made_of_the_report_alone(tmp_path):
    files = make_run(tmp_path, attempts=1)
    for path in (tmp_path / "attempt-1").iterdir():
        path.unlink()
    text = words(drawn(files))
    assert "Where time went" in text
    assert "The program was: python3 train.py" in text


def test_values_of_env_are_not_shown(tmp_path):
    planned = a_plan(2, env=("TOKEN=hush", "SIZE=whisper"), program=("python3", "train.py"))
    page = drawn(make_run(tmp_path, instances=2, attempts=1, steps=5, planned=planned))
    assert "hush" not in page
    assert "whisper" not in page
    assert "The values of --env are not shown" in page


@pytest.mark.parametrize(("name", "text"), [
    ("instance-0.device.json", '{"version": 1, "models": [{"name": "x"}, 3, null]}'),
    ("instance-0.device.json", '{"models": 7}'),
    ("plan.json", '{"version": 99}'),
    ("plan.json", "[]"),
    ("plan.json", '{"version": 2, "instances": [1]}'),
    ("looks.jsonl", '{"at": 1, "instances": [{}]}\n'),
    ("steps.jsonl", '{"at": NaN, "instance": 0, "step": 1, "seconds": NaN, "own_seconds": Infinity,'
                    ' "samples": 1, "loss": NaN}\n'),
    ("steps.jsonl", '{"at": 1, "instance": 0, "step": 1, "seconds": -1, "own_seconds": 0,'
                    ' "samples": 0}\n'),
    ("instance-0.values.jsonl", '{"at": 1, "step": 1, "values": {"a": Infinity, "<b>": NaN}}\n'),
])  # fmt: skip
def test_values_of_damaged_files_are_left_out(tmp_path, name, text):
    files = make_run(tmp_path, attempts=1, instances=2, steps=20)
    (tmp_path / "attempt-1" / name).write_text(text)
    assert "Environment" in titles(drawn(files))


def test_a_module_without_observations_has_its_name(tmp_path):
    files = make_run(tmp_path, attempts=1, instances=2, steps=20)
    (tmp_path / "attempt-1" / "looks.jsonl").unlink()
    program = {"program": ["python3", "-m", "package.train"], "attempts": [{"number": 1}]}
    files.report.write_text(json.dumps(json.loads(files.report.read_text()) | program))
    assert "<title>-m package.train: " in page_text(files)


@pytest.mark.parametrize("report", [
    {"attempts": [{"number": 1}]}, {"attempts": []},
    {"attempts": [{"number": 1, "cause": "failed"}]},
    {"versions": None, "launcher": None, "program": None, "began_at": "yesterday"},
    {"exit_code": 75}, {"exit_code": "x"}, {"plan": {"num_instances": "many"}},
    {"attempts": [{"number": 1, "observation": {"x": 1}, "first_failure": {}, "stacks": [1],
                   "instances": [{}, 4]}], "exit_code": 1},
])  # fmt: skip
def test_values_of_a_report_may_be_missing(tmp_path, report):
    files = make_run(tmp_path, attempts=1, instances=2, steps=20)
    files.report.write_text(json.dumps(json.loads(files.report.read_text()) | report))
    assert "</html>" in page_text(files)


def test_many_instances_are_thinned(tmp_path):
    page = drawn(make_run(tmp_path, attempts=1, instances=100, steps=4, planned=a_plan(2)))
    throughput, *_ = figures(page)
    assert len(throughput["data"]) == 64
    assert throughput["layout"]["showlegend"] is False
    steps = [
        each for each in figures(page) if each["layout"]["yaxis"]["title"]["text"] == "% of steps"
    ]
    assert [len(each["data"]) for each in steps] == [8, 8]


def test_the_slow_instance_of_many_is_drawn(tmp_path):
    # The 64 evenly spaced instances of 130 are 0, 2, 4, 6, ..., without 1.
    files = make_run(tmp_path, attempts=1, instances=2, steps=2, planned=a_plan(2))
    (tmp_path / "attempt-1" / "steps.jsonl").write_text("".join(
        json.dumps(StepRecord(at=BEGAN + 1, instance=i, step=1, seconds=0.05, samples=1,
                              own_seconds=0.05 if i == 1 else 0.02).to_json()) + "\n"
        for i in range(130)
    ))  # fmt: skip
    page = drawn(files)
    (waits,) = (f for f in figures(page) if f["data"][-1]["name"] == "waiting for others")
    slow = waits["data"][1]
    assert slow["name"] == "own time, slow"
    assert [name for name, x in zip(slow["y"], slow["x"], strict=True) if x] == ["instance 1"]
    assert page.count('<tr class="pp-marked">') == 1


@pytest.mark.sweep
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: make system-packages")
def test_in_a_browser(tmp_path, whole):
    path = tmp_path / "report.html"
    path.write_text(whole)
    count = len(figures(whole))
    with open_browser(tmp_path / "profile") as page:
        for is_dark, width in ((False, 1200), (True, 1200), (False, 400)):
            page.look(dark=is_dark, width=width)
            page.open(path, "document.documentElement.dataset.drawn")
            assert page.value("document.documentElement.dataset.drawn") == str(count)
            shapes = page.value(
                "[...document.querySelectorAll('.pp-plot')].map((plot) => plot.querySelectorAll("
                "'svg.main-svg .trace path, svg.main-svg .point path').length)"
            )
            assert len(shapes) == count
            assert min(shapes) > 0
            assert page.value("document.documentElement.scrollWidth") <= width
            lines = page.value("getComputedStyle(document.querySelector('.js-line')).stroke")
            assert lines == ("rgb(104, 173, 255)" if is_dark else "rgb(0, 86, 180)")
            assert page.value("document.title") == "train.py: 20260921-133320-1a2b3c"
        # The colour scheme changes while the page is open.
        page.look(dark=True, width=400)
        page.wait_for(
            "getComputedStyle(document.querySelector('.js-line')).stroke === 'rgb(104, 173, 255)'"
        )
        assert page.problems == []
        schemes = {request.partition(":")[0] for request in page.requests}
        assert schemes == {"file", "data", "blob"}
        assert {r for r in page.requests if r.startswith("file:")} == {path.as_uri()}


def test_timeline(tmp_path):
    import plotly.graph_objects as go

    files = make_run(tmp_path, attempts=1, instances=2, steps=20)
    spans = tuple(
        TraceSpan(f"instance {i}: <device>", name, 0.001 * step, 0.0005, depth)
        for i in range(2)
        for step in range(3)
        for depth, name in enumerate(("step", "<b>update"))
    )
    page = run_page(read_run(files), iso_time(BEGAN), Excerpt(1.0, 0.003, 3, spans))
    assert "Timeline" in titles(page)
    assert f"The whole timeline is {files.timeline}: open it at ui.perfetto.dev." in words(page)
    (figure,) = (each for each in figures(page) if each["layout"].get("barmode") == "overlay")
    go.Figure(figure)
    outer, inner = figure["data"]
    assert (outer["name"], inner["name"]) == ("step", "&lt;b&gt;update")
    assert max(inner["width"]) < min(outer["width"])
    assert "<" not in json.dumps(figure["data"]).replace("<br>", "")
    assert set(outer["y"]) == set(figure["layout"]["yaxis"]["categoryarray"])


def test_evenly_spaced_steps_of_very_long_runs_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_run, "_MOST_STEPS", 100)
    monkeypatch.setattr(recorded_run, "_MOST_STATES", 20)
    monkeypatch.setattr(recorded_run, "_LEAST_OBSERVATIONS", 5)
    run = read_run(make_run(tmp_path, attempts=1, instances=2, steps=400))
    (attempt,) = run.attempts
    assert {each.every for each in attempt.steps} == {8}
    assert [each.step for each in attempt.steps if each.instance == 1] == list(range(8, 401, 8))
    ats = [round(at - BEGAN) for at, _ in attempt.observations]
    assert ats == list(range(1, 22, 4))
    # The numbers on the page count all steps.
    text = words(run_page(run, iso_time(BEGAN)))
    assert "1 400 5" in text
    assert "one of 8 at the end" in text
    assert "51,200 samples in total" in text


def test_an_instance_that_waits_for_a_slower_one_is_not_marked_as_slow():
    own = (0.0088, 0.0064, 0.0660, 0.0064)
    assert waited_for({i: (each, 0.066) for i, each in enumerate(own)}) == {2}
    assert waited_for({i: (each, each) for i, each in enumerate(own)}) == set()


def test_the_changes_of_hosts_are_a_table(tmp_path, whole):
    files = make_run(tmp_path / "run", instances=1, attempts=2, steps=0)
    report = json.loads(files.report.read_text())
    change = {
        **{"lost": ["node1"], "joined": [], "is_deterministic": False},
        **{"num_instances_before": 2, "num_instances": 1},
    }
    report["attempts"][1] |= {
        "host_change": change,
        "restart": {"seconds": 2.5, "num_repeated_steps": 1},
    }
    files.report.write_text(json.dumps(report))
    text = words(drawn(files))
    assert "node1 - 2 to 1 2.5 s 1 The number of replicas stayed the same" in text
    assert (
        "the same bits with deterministic reduction, and agree up to rounding without it." in text
    )
    report["attempts"][1]["host_change"]["is_deterministic"] = True
    files.report.write_text(json.dumps(report))
    assert "so the results have the same bits." in words(drawn(files))
    assert "Changes of hosts" not in words(whole)


def test_the_cost_of_restarts_is_a_table(tmp_path, whole):
    files = make_run(tmp_path / "run", instances=1, attempts=2, steps=0)
    report = json.loads(files.report.read_text())
    cost = {"seconds": 2.5, "ending": 0.25, "imports": 1.75, "num_repeated_steps": 1}
    report["attempts"][1]["restart"] = cost
    files.report.write_text(json.dumps(report))
    text = words(drawn(files))
    assert "from the failure to the end of the next training step: attempt all ending" in text
    assert "steps computed again 2 2.5 s 0.25 s - - 1.75 s" in text
    assert "steps computed again" not in words(whole)
