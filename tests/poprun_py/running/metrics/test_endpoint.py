"""The metrics that the endpoint makes of the recorder's documents."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from poprun_py.running.metrics.endpoint import metric_families
from poprun_py.running.metrics.metrics_feed import BOUNDS, EndpointRecorder
from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.phases import ACTIVITIES
from poprun_py.running.watch.records import StepRecord
from poprun_py.running.watch.stragglers import Straggler

FIRST = {"run_id": "20260101-120000-abcdef", "program": "train.py", "began": 1.7e9,
         "num_instances": 2}  # fmt: skip
SECONDS = tuple(float(number) for number in range(len(ACTIVITIES)))


def instance(index, **changes):
    state = InstanceState(
        index=index, host="node1", phase="training", step=12, num_steps=11, num_samples=96,
        own_seconds=0.01, cpu=0.5, num_cpus=4, memory_bytes=1 << 20, seconds=SECONDS, loss=0.25,
    )  # fmt: skip
    return replace(state, **changes)


def view(*states, worst=None):
    return JobView(
        run_id=FIRST["run_id"], pid=1, program="train.py", seconds=3, instances=states, worst=worst
    )


def step(instance, seconds, **changes):
    record = StepRecord(
        at=1.7e9, instance=instance, step=1, seconds=seconds, own_seconds=seconds / 2, samples=8
    )
    return replace(record, **changes)


def shown(last, encode=openmetrics.generate_latest):
    """Return the metrics of a document as text, after a round trip through JSON."""

    class Numbers(Collector):
        def collect(self):
            return metric_families(FIRST, json.loads(json.dumps(last)))

    registry = CollectorRegistry()
    registry.register(Numbers())
    return encode(registry).decode()


def samples(last):
    """Return the values that a scraper reads, by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(shown(last))
        for sample in family.samples
    }


def document(*states, records=(), worst=None, restarts=0):
    sent = []
    recorder = EndpointRecorder(sent.append, restarts)
    recorder.steps(records)
    recorder.view(view(*states, worst=worst), 1.7e9)
    return json.loads(sent[-1])


def test_new_steps_continue_sending_the_last_document():
    calls = []
    recorder = EndpointRecorder(lambda _: None, 0, lambda: calls.append(True))
    recorder.steps([step(0, 0.0), step(0, 0.02)])
    recorder.steps([step(1, 0.0)])
    assert len(calls) == 2


SLOW = Straggler(instance=1, host="node1", own_seconds=0.03, median_seconds=0.01, is_slow=True)
JOB = document(
    instance(0),
    instance(1, own_seconds=0.03, swap_bytes=4096),
    records=[step(0, 0.0), step(0, 0.02), step(0, 0.001), step(1, 0.03), step(1, 1000.0)],
    worst=SLOW,
    restarts=1,
)


def test_openmetrics_and_prometheus_texts(golden):
    text = shown(JOB)
    golden("openmetrics.txt", text)
    older = shown(JOB, generate_latest)
    difference = difflib.unified_diff(text.splitlines(), older.splitlines(), n=0, lineterm="")
    golden("prometheus_differs.txt", "\n".join([*difference][2:]) + "\n")


def test_the_run_is_shown_before_the_first_view():
    found = samples({"restarts": 0})
    assert found["poprun_instances",] == 2
    assert found["poprun_instances_running",] == 0
    assert found["poprun_run_info", ("program", "train.py"), ("run_id", FIRST["run_id"])] == 1


def test_an_ended_instance_keeps_its_counters_but_not_its_resource_use():
    found = samples(document(instance(0, phase="ended"), instance(1)))
    labels = (("host", "node1"), ("instance", "0"))
    assert found["poprun_instances_running",] == 1
    assert found["poprun_samples_total", *labels] == 96
    assert found["poprun_loss", *labels] == 0.25
    assert ("poprun_memory_bytes", *labels) not in found
    assert ("poprun_cpus_used", *labels) not in found


def test_unknown_values_are_left_out():
    found = samples(document(instance(0, loss=None, step=None)))
    assert not {name for name, *_ in found} & {"poprun_loss", "poprun_step"}
    assert ("poprun_slowest_step_ratio",) not in found


def test_a_loss_may_be_nan_or_infinite():
    found = samples(document(instance(0, loss=math.nan), instance(1, loss=-math.inf)))
    losses = [value for (name, *_), value in found.items() if name == "poprun_loss"]
    assert math.isnan(losses[0])
    assert losses[1] == -math.inf


def test_the_first_step_counts_and_has_no_duration():
    found = samples(document(instance(0, num_steps=1), records=[step(0, 0.0), step(0, 0.5)]))
    labels = (("host", "node1"), ("instance", "0"))
    assert found["poprun_steps_total", *labels] == 2
    assert found["poprun_step_duration_seconds_count", *labels] == 1
    assert found["poprun_step_own_duration_seconds_sum", *labels] == 0.25


def test_names_that_need_quotes_are_read_back(monkeypatch):
    strange = 'a"b\\c\nd'
    monkeypatch.setitem(FIRST, "program", strange)
    assert ("poprun_run_info", ("program", strange), ("run_id", FIRST["run_id"])) in samples(JOB)


def test_tags_are_labels_of_the_run(monkeypatch):
    monkeypatch.setitem(FIRST, "tags", {"lr": "0.1", "data.set": "a b"})
    labels = (("program", "train.py"), ("run_id", FIRST["run_id"]))
    tags = (("tag_data_set", "a b"), ("tag_lr", "0.1"))
    assert samples(JOB)["poprun_run_info", *labels, *tags] == 1


@given(st.lists(st.floats(1e-6, 1e4), min_size=1), st.integers(1, 64))
def test_buckets_are_cumulative_and_hold_every_step(seconds, every):
    found = samples(document(instance(0), records=[step(0, s, every=every) for s in seconds]))
    labels = (("host", "node1"), ("instance", "0"))
    name = "poprun_step_duration_seconds"
    for bound in BOUNDS:
        within = every * sum(each <= bound for each in seconds)
        assert found[f"{name}_bucket", *labels, ("le", str(bound))] == within
    assert found[f"{name}_bucket", *labels, ("le", "+Inf")] == every * len(seconds)
    assert found[f"{name}_count", *labels] == every * len(seconds)
