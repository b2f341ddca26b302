"""Options of the CNN programs that change memory, schedule or time, in the model of the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from examples import cnn_programs as cnns
from popdist_py import poptorch
from popdist_py.ipu.placed_stage import stage_of
from popdist_py.poptorch.on_ipu.graph_of_model import graph_of_model
from popdist_py.poptorch.on_ipu.run_from_options import run_from_options

ON_HOST = SimpleNamespace(mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.3), normalised_on_host=True)

pytestmark = [pytest.mark.examples, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def modules():
    with cnns.imported():
        yield


def arguments(*argv, batch_size, accumulation):
    """Return arguments with the values that configurations would have filled in."""
    args = cnns.module("arguments").make_parser("", "").parse_args(["--device", "mk2", *argv])
    args.dataset, args.model_size, args.norm, args.image_size = "cifar-10", "8", "batch", 32
    args.batch_size, args.gradient_accumulation_count, args.seed = batch_size, accumulation, 1
    return args


def placed(args):
    """Return the module for training, cut into the stages that the arguments give."""
    models = cnns.module("models")
    network = models.create(args, 10)
    models.place(network, args)
    return models.ForTraining(network, args, ON_HOST)


# Options for two IPUs with each pipeline schedule, and for one IPU.
CUT = ("--pipeline", "--shards", "2", "--pipeline-splits", "layer2.0")
ORDERS = {
    "Grouped": CUT,
    "Interleaved": (*CUT, "--pipeline-schedule", "Interleaved"),
    "Sequential": (*CUT, "--pipeline-schedule", "Sequential"),
    "shards": ("--shards", "2"),
    "one IPU": (),
    "one IPU, cut": (
        *("--pipeline", "--pipeline-schedule", "sequential"),
        *("--pipeline-splits", "layer2.0", "layer3.0"),
    ),
}


def modelled(*words):
    """Return the reports of memory and time of a program with these options."""
    args = arguments(*words, batch_size=16, accumulation=4)
    module = placed(args)
    options = cnns.module("ipu_options").training_options(args)
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.1)
    training = poptorch.trainingModel(module, options, optimizer=optimizer)
    images = torch.zeros(64, 3, 32, 32), torch.zeros(64, dtype=torch.long)
    report = training.memoryReport(*images)
    return report.ipus, training.executionReport(*images)


def stash(ipus):
    return [ipu.by_category().get("stash", 0) for ipu in ipus]


@pytest.mark.parametrize("order", ORDERS)
def test_recomputation_saves_memory_and_takes_time_in_every_order(order):
    plain, slow = (modelled(*ORDERS[order], *more) for more in ((), ("--enable-recompute",)))
    needed, less = ([ipu.needed for ipu in report[0]] for report in (plain, slow))
    assert all(one <= other for one, other in zip(less, needed, strict=True))
    assert sum(less) < sum(needed)
    assert slow[1].report.total > plain[1].report.total


def test_each_order_of_a_pipeline_has_its_memory_time_and_schedule():
    found = [modelled(*ORDERS[order]) for order in ("Grouped", "Interleaved", "Sequential")]
    (grouped, turns, single), times = zip(*found, strict=True)
    assert stash(grouped)[0] > stash(turns)[0] > stash(single)[0] == 0
    assert [time.report.total for time in times] == sorted(time.report.total for time in times)
    assert len({time.report.total for time in times}) == 3
    assert len({str(time) for time in times}) == 3


@pytest.mark.parametrize("words", [(), CUT], ids=["one IPU", "pipeline"])
def test_the_second_value_of_each_stage_is_that_of_matrix_products(words):
    def shares(*values):
        args = arguments(
            *words, "--available-memory-proportion", *values, batch_size=2, accumulation=4
        )
        module, options = placed(args), cnns.module("ipu_options").training_options(args)
        sizes = torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)
        model_graph = graph_of_model(module, options, sizes, training=True)
        run = run_from_options(model_graph, options, None, training=True)
        found = {}
        for stage in range(run.placement.num_stages):
            here = stage_of(run.graph, run.placement, run.settings, run.ipu, stage)
            found |= {o.name: here.limit(o) for o in here.operations if o.product}
        return found

    values = ["0.2", "0.3"] if not words else ["0.2", "0.3", "0.4", "0.5"]
    before, after = shares(*values), shares(*values[:-1], "0.05")
    assert [name for name in before if before[name] != after[name]] == ["network.fc"]
    values[-2] = "0.1"
    after = shares(*values)
    changed = {name for name in before if before[name] > after[name]}
    assert "network.fc" not in changed
    assert "network.layer3.0.conv1" in changed
    assert ("network.conv1" in changed) == (not words)
