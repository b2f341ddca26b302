"""Published runs, compared with the device model: memory, throughput and order by speed.

One set of constants holds for all runs. ``docs/device.md`` summarises the agreement.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import pytest

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.settings import MOMENTUM
from popdist_py.ipu.specification import BOW, MK1, MK2
from popdist_py.ipu.transfers import host_traffic
from tools.device.conformer import conformer
from tools.device.ipu_graphs import resnet, with_8_bit_input
from tools.device.ipu_judges import ALL_RUNS
from tools.device.ipu_models import (
    Transformer,
    bert,
    efficientnet,
    encoder_decoder,
    gpt,
    unet,
    vgg_16,
    vit,
)
from tools.device.ipu_published import PUBLISHED
from tools.device.ipu_throughputs import THROUGHPUTS, mean_ratio

VERDICTS = ("fits", "close", "does not fit")
# Each of these runs has to be right.
EVIDENCE = [published for published in PUBLISHED if published.is_evidence]
MEASURED = [known for known in THROUGHPUTS if known.is_evidence]
RUNS = {published.name: published.run for published in PUBLISHED}
RESNET_50 = RUNS["ResNet-50, half, batch 20, recomputation"]
BERT = RUNS["BERT-base, 128 tokens, batch 16"]


@pytest.mark.parametrize(
    ("graph", "parameters"),
    [
        (resnet([3, 4, 6, 3], 224, 1), 25_557_032),
        (resnet([3, 4, 23, 3], 224, 1, groups=32), 44_177_704),
        (efficientnet((1.0, 1.0), 224, 1), 5_288_548),
        (efficientnet((1.4, 1.8), 380, 1), 19_341_616),
        (vgg_16(1), 138_357_544),
        (unet(572, 1), 31_030_658),
        (vit(12, 768, 1), 86_567_656),
        (bert(Transformer(12, 768, 128), 1), 110_106_428),
        (bert(Transformer(24, 1024, 128, serial=2), 1), 336_226_108),
        (
            encoder_decoder(Transformer(24, 768, 1500, words=51_865), 224, 1, hears=True),
            # Whisper has 241,734,912 parameters. The graph lacks the positions of 448 words and of
            # the encoder's 1,500 places. The graph also has a bias for each of the 36 matrix
            # products of keys.
            241_734_912 - 448 * 768 - 1500 * 768 + 36 * 768,
        ),
        (gpt(Transformer(12, 768, 1024, words=50_257, serial=4), 1), 124_439_808),
        (gpt(Transformer(24, 1024, 1024, words=50_257), 1), 354_823_168),
        (gpt(Transformer(36, 1280, 1024, words=50_257), 1), 774_030_080),
    ],
    ids=[
        "ResNet-50", "ResNeXt-101", "B0", "B4", "VGG-16", "U-Net", "ViT-base", "BERT-base",
        "BERT-large", "Whisper-small", "GPT-2 small", "GPT-2 medium", "GPT-2 large",
    ],
)  # fmt: skip
def test_models_have_their_published_parameters(graph, parameters):
    assert sum(weight.elements for weight in graph.weights if weight.is_trained) == parameters


def test_the_conformer_has_its_published_size():
    """WeNet and ESPnet give 46.2 million parameters for AISHELL-1."""
    weights = conformer(1500, 1).weights
    assert sum(weight.elements for weight in weights) == pytest.approx(46.2e6, rel=0.002)


def test_each_run_has_its_own_name():
    assert len(RUNS) == len(PUBLISHED)


def test_the_runs_that_judge_have_their_own_names():
    assert len({known.name for known in ALL_RUNS}) == len(ALL_RUNS)


def test_a_verdict_close_to_the_limit_contradicts_no_run():
    ran, too_large = (next(one for one in ALL_RUNS if one.ran == ran) for ran in (True, False))
    assert [ran.is_right(verdict) for verdict in VERDICTS] == [True, True, False]
    assert [too_large.is_right(verdict) for verdict in VERDICTS] == [False, True, True]


def test_nearly_all_runs_that_judge_are_right():
    judges = [known for known in ALL_RUNS if known.role == "judges"]
    wrong = [known.name for known in judges if not known.is_right(known.run.fullest.verdict)]
    assert len(wrong) <= 0.05 * len(judges), wrong


def test_only_published_runs_calibrate():
    """A recalled run may be wrong, so it must not fix a constant."""
    calibrating = [known for known in ALL_RUNS if known.role == "calibrates"]
    assert {known.certainty for known in calibrating} == {"published"}
    assert len(ALL_RUNS) > 20 * len(calibrating)


def test_recalled_and_inferred_runs_are_not_evidence():
    assert {known.certainty for known in EVIDENCE} == {"published"}
    assert {known.ran for known in EVIDENCE} == {True, False}
    assert {known.published.certainty for known in THROUGHPUTS if known.is_evidence} == {
        "published"
    }


@pytest.mark.parametrize("published", EVIDENCE, ids=lambda published: published.name)
def test_runs_fit_if_they_ran_on_hardware(published):
    own = RUNS[published.name].fullest
    # No published run is close to the limit.
    assert own.verdict == ("fits" if published.ran else "does not fit"), (
        f"{own.fullest_tile / own.tile_bytes:.0%}: {own.by_category()}"
    )


@pytest.mark.parametrize(
    "known", MEASURED, ids=lambda k: f"{k.title}, {k.ipu.name}, {k.replicas} replicas"
)
def test_throughput_is_near_the_published_one(known):
    assert known_throughput(known) == pytest.approx(known.samples, rel=0.25)


def test_systems_rank_as_published():
    """All pairs of systems where one is at least 20 % faster for each IPU."""
    ours = [known_throughput(k) / k.num_ipus for k in MEASURED]
    theirs = [k.samples / k.num_ipus for k in MEASURED]
    order = sorted(range(len(theirs)), key=lambda index: theirs[index])
    for slower, faster in pairwise(order):
        if theirs[faster] > 1.2 * theirs[slower]:
            assert ours[faster] > ours[slower], (MEASURED[slower], MEASURED[faster])


def test_ratios_to_published_throughputs_are_near_one():
    """The rows that judge are held to the same limits as those that fixed constants."""
    ours = [known_throughput(known) for known in THROUGHPUTS]
    ratios = {k.title: own / k.samples for k, own in zip(THROUGHPUTS, ours, strict=True)}
    assert all(0.75 <= ratio <= 1.35 for ratio in ratios.values()), ratios
    for role in ("calibrates", "judges"):
        assert mean_ratio(ours, THROUGHPUTS, role) == pytest.approx(1, abs=0.1)


def test_throughputs_per_ipu_are_ordered_as_published():
    """Spearman's rank correlation over the rows that only judge."""
    judges = [known for known in THROUGHPUTS if known.role == "judges"]
    ours = ranks([known_throughput(known) / known.num_ipus for known in judges])
    theirs = ranks([known.samples / known.num_ipus for known in judges])
    count = len(judges)
    apart = sum((one - other) ** 2 for one, other in zip(ours, theirs, strict=True))
    assert 1 - 6 * apart / (count**3 - count) > 0.98


def ranks(values):
    return [sorted(values).index(value) for value in values]


def test_few_rows_calibrate():
    calibrating = [known for known in THROUGHPUTS if known.role == "calibrates"]
    assert len(calibrating) <= 5
    assert len(THROUGHPUTS) >= 5 * len(calibrating)
    # A constant that is fitted to a recalled row would hide errors of the memory.
    assert all(known.is_evidence for known in calibrating)


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("ResNet-50, half, batch 20, recomputation", (3.3, 3.6)),
        ("EfficientNet-B4 G16, half, group norm, batch 6, four IPUs", (3.7, 3.95)),
    ],
)
def test_systems_of_64_ipus_scale_as_published(name, limits):
    """64 IPUs are 3.46 times as fast as 16 for ResNet-50, and 3.91 times for EfficientNet-B4."""
    small, large = (
        known_throughput(k)
        for ipus in (16, 64)
        for k in THROUGHPUTS
        if k.name == name and k.ipu is BOW and k.num_ipus == ipus
    )
    assert limits[0] < large / small < limits[1]


@functools.cache
def known_throughput(known):
    return known.estimate


def throughput(run):
    return cycles(run.graph, run.placement, run.settings, run.ipu, run.model).throughput


def changed(run, **settings):
    return replace(run, settings=replace(run.settings, **settings))


# Rankings: one test for each change that Graphcore's documents call faster.


@pytest.mark.parametrize("name", ["ResNet-50, half, batch 20, recomputation",
                                  "BERT-large, 128 tokens, batch 8"])  # fmt: skip
def test_bow_is_faster_by_no_more_than_its_clock(name):
    run = changed(RUNS[name], device_iterations=1000)
    ratio = throughput(replace(run, ipu=BOW)) / throughput(run)
    assert 1.3 < ratio <= BOW.clock / MK2.clock
    assert throughput(run) > throughput(replace(run, ipu=MK1))


def test_a_pipeline_is_faster_than_shards():
    # With shards, one of four IPUs works at a time. In a pipeline, all four work together.
    gain = throughput(BERT) / throughput(changed(BERT, strategy="sharded"))
    assert 2.5 < gain <= 4


@pytest.mark.parametrize("run", [RESNET_50, BERT], ids=["ResNet-50", "BERT"])
def test_half_is_faster_than_float(run):
    run = changed(run, partials="float32")
    single = replace(run, graph=run.graph.cast(data="float32", weights="float32"))
    assert 1.3 < throughput(run) / throughput(single) < 4
    assert throughput(changed(run, partials="float16")) > throughput(run)


def test_more_accumulation_raises_the_busy_share():
    busy = []
    for count in (16, 64, 512):
        run = changed(BERT, accumulation=count, synthetic_data=True)
        busy.append(min(cycles(run.graph, run.placement, run.settings, run.ipu).busy))
    assert busy == sorted(busy)
    assert busy[0] < 0.9 * busy[-1]


def test_device_iterations_share_the_host_s_work_for_a_call():
    def host(iterations):
        run = changed(RESNET_50, device_iterations=iterations)
        report = cycles(run.graph, run.placement, run.settings, run.ipu)
        return report.call / report.total

    assert host(1) > 10 * host(100)


def test_8_bit_input_halves_the_received_bytes():
    small = with_8_bit_input(RESNET_50.graph)
    received = [
        host_traffic(graph, Placement.cut(graph), RESNET_50.settings)[0].received
        for graph in (RESNET_50.graph, small)
    ]
    labels = RESNET_50.settings.micro_batches * 20 * 4
    assert received[0] - labels == 2 * (received[1] - labels)
    assert throughput(replace(RESNET_50, graph=small, placement=Placement.cut(small))) > throughput(
        RESNET_50
    )


def test_more_replicas_raise_the_share_of_the_all_reduce():
    shares = []
    for replicas in (1, 2, 16, 64):
        run = changed(RESNET_50, replicas=replicas)
        report = cycles(run.graph, run.placement, run.settings, run.ipu)
        shares.append(report.stages[0].all_reduce / report.window)
    assert shares[0] == 0
    assert shares == sorted(shares)
    # More replicas with the same global batch have fewer micro-batches for each all-reduce.
    many = changed(RESNET_50, replicas=64, accumulation=2)
    report = cycles(many.graph, many.placement, many.settings, many.ipu)
    assert report.stages[0].all_reduce / report.window > 2 * shares[2]


@pytest.mark.parametrize("run", [RESNET_50, BERT], ids=["ResNet-50", "BERT"])
def test_recomputation_costs_about_a_third(run):
    stage = cycles(run.graph, run.placement, run.settings, run.ipu).stages[0]
    assert stage.recompute / (stage.forward + stage.backward) == pytest.approx(1 / 3, abs=0.08)
    assert throughput(run) < throughput(changed(run, recompute="none"))


def test_balanced_splits_are_faster():
    def with_layers(*starts):
        cut = Placement.cut(BERT.graph, [f"layers.{start}" for start in starts])
        return throughput(replace(BERT, placement=cut))

    assert with_layers(3, 6, 9) > with_layers(2, 6, 9) > with_layers(1, 2, 9)


def test_state_outside_the_chip_saves_memory_and_costs_time():
    here = changed(RUNS["BERT-large, 128 tokens, batch 8"], optimizer=MOMENTUM, accumulation=16)
    assert not here.settings.optimizer_location.on_chip
    on_chip = changed(here, optimizer_location=type(here.settings.optimizer_location)())
    assert throughput(on_chip) > throughput(here)
    first, second = (memory(r.graph, r.placement, r.settings, r.ipu) for r in (here, on_chip))
    assert first.fullest.always_live < second.fullest.always_live
