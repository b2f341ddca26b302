"""Charts on the pages of comparisons and scalings, and escaping of texts."""

from __future__ import annotations

import html
import json
import re

import pytest
from support.launcher.made_runs import MadeAttempt, made_run

from poprun_py.past_runs.comparison import compare
from poprun_py.past_runs.measured_run import measure, parse_target
from poprun_py.past_runs.pages.comparison_page import comparison_page, scaling_page
from tools.running.browser import CHROMIUM, open_browser

LOSSES = [2 / step for step in range(1, 21)]
VALUES = {10: {"accuracy": 0.8, "loss": 0.4}, 20: {"accuracy": 0.92, "loss": 0.2}}


def figures_of(page):
    text = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    return json.loads(text[1])


def titles_of(page):
    return re.findall(r"<figcaption>(.*?)<span>", page)


def runs_of(folder, **attempt):
    attempts = (MadeAttempt(losses=LOSSES, values=VALUES, **attempt),)
    return [
        made_run(folder, "one", attempts=attempts),
        made_run(folder, "two", instances=2, attempts=attempts),
    ]


def test_a_comparison_has_its_charts(tmp_path):
    runs = runs_of(tmp_path)
    target = parse_target("accuracy=0.9")
    comparison = compare([measure(run, target) for run in runs], target=target, remarks=["unfair"])
    page = comparison_page(comparison, runs)
    assert titles_of(page) == [
        "Speed", "Scaling efficiency", "Loss over time", "Loss over samples", "accuracy",
    ]  # fmt: skip
    assert "unfair" in page
    speed, efficiency, over_time, over_samples, accuracy = figures_of(page)
    assert speed["data"][0]["x"] == pytest.approx([80, 160])
    assert efficiency["data"][0]["y"] == pytest.approx([100, 100])
    assert efficiency["layout"]["xaxis"]["tickvals"] == [1, 2]
    assert [line["name"] for line in over_time["data"]] == ["one", "two"]
    assert over_time["data"][0]["x"][:2] == pytest.approx([0, 0.1], abs=0.01)
    assert over_time["layout"]["xaxis"]["title"]["text"] == "seconds since the first step"
    # Two instances see twice the samples in each step.
    assert [line["x"][-1] for line in over_samples["data"]] == [160, 320]
    assert accuracy["data"][0]["y"] == [0.8, 0.92]
    assert accuracy["layout"]["shapes"][0]["y0"] == 0.9


def test_runs_with_equal_names_have_a_bar_each(tmp_path):
    attempts = (MadeAttempt(losses=LOSSES), MadeAttempt(losses=LOSSES, step_seconds=0.2))
    runs = [made_run(tmp_path / str(i), "one", attempts=(each,)) for i, each in enumerate(attempts)]
    comparison = compare([measure(run) for run in runs])
    speed = figures_of(comparison_page(comparison, runs))[0]
    assert speed["data"][0]["x"] == pytest.approx([80, 40])
    assert speed["data"][0]["y"] == ["one", "one"]


def test_times_count_from_the_begin_of_a_run_if_another_run_has_no_steps(tmp_path):
    runs = [
        made_run(tmp_path, "one", attempts=(MadeAttempt(losses=LOSSES, values=VALUES),)),
        made_run(tmp_path, "two", attempts=(MadeAttempt(steps=0, values=VALUES),)),
    ]
    page = comparison_page(compare([measure(run) for run in runs]), runs)
    accuracy = figures_of(page)[-1]
    assert accuracy["layout"]["xaxis"]["title"]["text"] == "seconds since the run began"
    assert accuracy["data"][0]["x"][0] == pytest.approx(2, abs=0.01)


def test_doubtful_numbers_and_ranges_are_aligned_as_numbers(tmp_path):
    attempts = [MadeAttempt(steps=3, step_seconds=seconds) for seconds in (0.1, 0.2)]
    runs = [made_run(tmp_path, f"run-{i}", attempts=(own,)) for i, own in enumerate(attempts)]
    page = scaling_page(compare([measure(run) for run in runs], grouped=True), (1,))
    cells = re.findall(r"<td([^>]*)>([^<]*)</td>", page)
    assert [kind for kind, text in cells if text in ("1.00x*", "40-80")] == [
        ' class="pp-number"', ' class="pp-number"',
    ]  # fmt: skip


def test_without_samples_the_loss_is_over_steps(tmp_path):
    runs = runs_of(tmp_path, samples=0)
    page = comparison_page(compare([measure(run) for run in runs]), runs)
    assert "Loss over steps" in titles_of(page)
    assert "Loss over samples" not in titles_of(page)


def test_runs_without_any_numbers_have_a_page(tmp_path):
    attempts = (MadeAttempt(steps=0),)
    runs = [made_run(tmp_path, n, attempts=attempts, seconds=None) for n in ("a", "b")]
    page = comparison_page(compare([measure(run) for run in runs]), runs)
    assert titles_of(page) == []
    assert "2 runs compared" in page


def scaling_of(folder, **attempt):
    runs = [
        made_run(
            folder, f"n{count}-{repeat}", instances=count, seconds=8.0 / count + repeat,
            attempts=(MadeAttempt(step_seconds=0.1 + repeat / 100, **attempt),),
        )
        for repeat in (0, 1, 2)
        for count in (1, 2)
    ]  # fmt: skip
    return compare([measure(run) for run in runs], grouped=True)


def test_a_scaling_has_error_bars_and_an_ideal_line(tmp_path):
    page = scaling_page(scaling_of(tmp_path), (1, 2))
    assert titles_of(page) == ["Speed", "Scaling efficiency", "Time of a step"]
    speed = figures_of(page)[0]
    measured, ideal = speed["data"]
    low, middle, high = (8 / (0.1 + repeat / 100) for repeat in (2, 1, 0))
    assert measured["y"] == pytest.approx([middle, 2 * middle])
    assert measured["error_y"]["array"][0] == pytest.approx(high - middle)
    assert measured["error_y"]["arrayminus"][0] == pytest.approx(middle - low)
    assert ideal["y"] == pytest.approx([middle, 2 * middle])


def test_a_scaling_of_whole_runs_is_drawn_in_seconds(tmp_path):
    page = scaling_page(scaling_of(tmp_path, steps=0), (1, 2))
    assert titles_of(page) == ["Time of the whole run", "Scaling efficiency"]
    measured, ideal = figures_of(page)[0]["data"]
    assert measured["y"] == [9.0, 5.0]
    assert ideal["y"] == [9.0, 4.5]


def test_names_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    runs = [
        made_run(
            tmp_path, name, program=(evil, evil), attempts=(MadeAttempt(values={1: {evil: 1}}),)
        )
        for name in ("a", "b")
    ]
    comparison = compare([measure(run) for run in runs], remarks=[evil])
    for page in (comparison_page(comparison, runs), scaling_page(comparison, (1,))):
        assert evil not in page
        assert html.escape(evil) in page


@pytest.mark.sweep
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: make system-packages")
def test_in_a_browser(tmp_path):
    runs = runs_of(tmp_path / "runs")
    pages = {
        "compared.html": comparison_page(compare([measure(run) for run in runs]), runs),
        "scaled.html": scaling_page(scaling_of(tmp_path / "scaled"), (1, 2)),
    }
    with open_browser(tmp_path / "profile") as page:
        for name, text in pages.items():
            (tmp_path / name).write_text(text)
            for width in (1200, 400):
                page.look(width=width)
                page.open(tmp_path / name, "document.documentElement.dataset.drawn")
                drawn = page.value("document.documentElement.dataset.drawn")
                assert drawn == str(len(figures_of(text)))
                assert page.value("document.documentElement.scrollWidth") <= width
        assert page.problems == []
        asked = {each for each in page.requests if each.startswith(("file:", "http"))}
        assert asked == {(tmp_path / name).as_uri() for name in pages}
