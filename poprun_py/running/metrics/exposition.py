"""What the endpoint shows: families of metrics, named as Prometheus asks for.

Pure: the documents of EndpointRecorder in, families out. Source of the names:
https://prometheus.io/docs/practices/naming (base units, ``_total``, ``_info``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from poprun_py.running.metrics.endpoint_recorder import BOUNDS

_LABELS: Final = ("instance", "host")
_ENDED: Final = "ended"
# Of each instance: the name, the key in its state, and the help.
_GAUGES: Final = (
    ("poprun_step", "step", "Training steps done, those before a checkpoint resumed from too."),
    ("poprun_loss", "loss", "Loss of the last training step."),
    ("poprun_cpus_used", "cpus_used", "CPUs that it used on average since the last look."),
    ("poprun_cpus", "num_cpus", "CPUs that it may use."),
    ("poprun_memory_bytes", "memory_bytes", "Memory of its processes, shared memory once."),
    ("poprun_swap_bytes", "swap_bytes", "Memory of its processes that is on the disk."),
)
# What stays true of an instance that has ended.
_LASTING: Final = ("poprun_step", "poprun_loss")


def families(first: Mapping[str, Any], last: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield all metrics.

    Args:
        first: what is known from the start: ``run_id``, ``program``, ``began`` (seconds since the
            epoch) and ``num_instances``.
        last: the last document of the recorder.
    """
    facts = {name: str(first[name]) for name in ("run_id", "program")}
    yield InfoMetricFamily("poprun_run", "The run.", value=facts)
    yield GaugeMetricFamily(
        "poprun_run_start_time_seconds",
        "When the run began, in seconds since the epoch.",
        value=first["began"],
    )
    yield CounterMetricFamily(
        "poprun_restarts", "Restarts after a failure.", value=last.get("restarts", 0)
    )
    yield GaugeMetricFamily("poprun_instances", "Instances.", value=first["num_instances"])
    view = last.get("view") or {"instances": [], "slowest": None}
    states: list[dict[str, Any]] = view["instances"]
    running = [state for state in states if state["phase"] != _ENDED]
    yield GaugeMetricFamily(
        "poprun_instances_running", "Instances whose program runs.", value=len(running)
    )
    steps: dict[str, Any] = last.get("steps", {})
    yield from _counters(states, steps)
    yield from _gauges(states)
    yield from _durations(states, steps)
    yield from _slowness(view["slowest"], states)


def _counters(states: list[dict[str, Any]], steps: dict[str, Any]) -> Iterator[Metric]:
    made = CounterMetricFamily(
        "poprun_steps", "Training steps made in this attempt.", labels=_LABELS
    )
    samples = CounterMetricFamily(
        "poprun_samples", "Samples trained on in this attempt.", labels=_LABELS
    )
    for state in states:
        recorded = steps.get(str(state["index"]), {}).get("count", 0)
        made.add_metric(_labels(state), max(recorded, state["num_timed_steps"]))
        samples.add_metric(_labels(state), state["num_samples"])
    yield made
    yield samples
    seconds = CounterMetricFamily(
        "poprun_activity_seconds",
        "Time spent on each activity in this attempt.",
        labels=(*_LABELS, "activity"),
        unit="seconds",
    )
    for state in states:
        for activity, spent in state["seconds"].items():
            seconds.add_metric([*_labels(state), activity], spent)
    yield seconds


def _gauges(states: list[dict[str, Any]]) -> Iterator[Metric]:
    for name, key, text in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        for state in states:
            is_true = state["phase"] != _ENDED or name in _LASTING
            if is_true and state[key] is not None:
                gauge.add_metric(_labels(state), float(state[key]))
        yield gauge


def _durations(states: list[dict[str, Any]], steps: dict[str, Any]) -> Iterator[Metric]:
    for name, key, text in (
        (
            "poprun_step_duration_seconds",
            "seconds",
            "From the end of one training step to the next.",
        ),
        (
            "poprun_step_own_duration_seconds",
            "own_seconds",
            "The same without waiting for other instances.",
        ),
    ):
        histogram = HistogramMetricFamily(name, text, labels=_LABELS, unit="seconds")
        for state in states:
            if (of_instance := steps.get(str(state["index"]))) is not None:
                found = of_instance[key]
                counts = accumulate(found["counts"])
                bounds = (*map(str, BOUNDS), "+Inf")
                buckets = list(zip(bounds, counts, strict=True))
                histogram.add_metric(_labels(state), buckets, found["sum"])
        yield histogram


def _slowness(slowest: dict[str, Any] | None, states: list[dict[str, Any]]) -> Iterator[Metric]:
    ratio = GaugeMetricFamily(
        "poprun_slowest_step_ratio",
        "Step of the slowest instance without waiting for others, over that of the median one.",
    )
    if slowest is not None and slowest["median_of_all"]:
        ratio.add_metric((), slowest["step_seconds_without_waiting"] / slowest["median_of_all"])
    yield ratio
    straggler = GaugeMetricFamily(
        "poprun_straggler", "1 for the instance that the others wait for, else 0.", labels=_LABELS
    )
    slow = slowest["instance"] if slowest is not None and slowest["is_straggler"] else None
    for state in states:
        straggler.add_metric(_labels(state), int(state["index"] == slow))
    yield straggler


def _labels(state: Mapping[str, Any]) -> list[str]:
    return [str(state["index"]), str(state["host"])]
