"""ResNet-101 over two IPUs, from out of memory to fitting, with one option changed at a time.

The run has 64 x 64 images, micro-batches of 64, AdamW, and the second IPU from ``layer3.8`` on.
Each expected figure has the measurement on hardware beside it.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.reports import execution_page
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import ADAM, HALF_ADAM, Settings
from popdist_py.ipu.specification import MK2
from popdist_py.ipu.transfers import host_traffic
from tools.device.ipu_graphs import resnet, with_8_bit_input

FLOAT = resnet([3, 4, 23, 3], 64, 64)
HALF = FLOAT.cast(data="float16", weights="float16")
PLACEMENT = Placement.cut(FLOAT, ["layer3.8"])


def test_graph_is_torchvision_s():
    """The names and sizes of torchvision's weights and module outputs, from meta tensors."""
    torch = pytest.importorskip("torch")
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        model = models.resnet101()
    weights = {name: value.numel() for name, value in model.state_dict().items()}
    ours = {weight.name: weight.elements for weight in FLOAT.weights}
    assert ours == {n: size for n, size in weights.items() if "num_batches" not in n}
    assert sum(w.elements for w in FLOAT.weights if w.is_trained) == 44_549_160
    made = {}
    for name, module in model.named_modules():
        kinds = torch.nn.Conv2d | torch.nn.BatchNorm2d | torch.nn.Linear | torch.nn.MaxPool2d
        if isinstance(module, kinds):
            module.register_forward_hook(
                lambda _m, _i, result, name=name: made.__setitem__(name, result.numel())
            )
    model(torch.empty(1, 3, 64, 64, device="meta"))
    outputs = {o.name: o.output.elements for o in FLOAT.operations}
    assert {name: outputs[name] for name in made} == made


def test_float_runs_out_of_memory():
    report = memory(FLOAT, PLACEMENT, Settings(accumulation=3, optimizer=ADAM), MK2)
    assert not report.fits


@pytest.mark.parametrize(
    "options",
    [{"accumulation": 3}, {"accumulation": 8}, {"accumulation": 8, "device_iterations": 4}],
    ids=str,
)
def test_half_fits(options):
    assert memory(HALF, PLACEMENT, Settings(optimizer=HALF_ADAM, **options), MK2).fits
    assert memory(HALF, PLACEMENT, Settings(optimizer=ADAM, **options), MK2).fits


def test_half_without_recomputation_does_not_fit():
    options = Settings(accumulation=3, optimizer=HALF_ADAM, recompute="none")
    assert not memory(HALF, PLACEMENT, options, MK2).fits


# Each row has accumulation, device iterations, 8-bit input, cycles, and MiB that the first IPU
# receives.
RUNS = [
    (3, 1, False, 60_111_417, 4.5),
    (8, 1, False, 95_653_315, 12.0),
    (8, 4, False, 283_021_420, 48.0),
    (8, 4, True, 278_393_266, 24.0),
]


def run(accumulation, iterations, is_8_bit):
    graph = with_8_bit_input(HALF) if is_8_bit else HALF
    settings = Settings(
        accumulation=accumulation, device_iterations=iterations, optimizer=HALF_ADAM
    )
    return graph, Placement.cut(graph, ["layer3.8"]), settings


@pytest.mark.parametrize(("accumulation", "iterations", "is_8_bit", "cycles_", "mib"), RUNS)
def test_received_bytes_are_those_of_hardware(accumulation, iterations, is_8_bit, cycles_, mib):
    first, second = host_traffic(*run(accumulation, iterations, is_8_bit))
    assert first.received == mib * 2**20
    # Hardware shows 768 B and 2.0 kB of labels.
    assert second.received == accumulation * iterations * 64 * 4


@pytest.mark.parametrize(
    ("row", "first", "second"),
    list(zip(RUNS, (51.8, 138, 552, 551), (141, 141, 142, 142), strict=True)),
)
def test_sent_bytes_are_those_of_hardware(row, first, second):
    """The profile's kB have 1,024 bytes, as its 768 B and 4.5 MB show."""
    ipus = execution_page(Run(*run(*row[:3]), MK2)).ipus
    assert [one.sent / 1024 for one in ipus] == pytest.approx([first, second], rel=0.002)


def test_tiles_are_nearly_as_balanced_as_on_hardware():
    """In the profile of hardware, both IPUs have 100.00 %."""
    page = execution_page(Run(*run(8, 4, True), MK2))
    assert all(0.99 < one.tile_balance <= 1 for one in page.ipus)


def test_cycles_are_close_to_those_of_hardware():
    theirs = [row[3] for row in RUNS]
    ours = [cycles(*run(*row[:3]), MK2).total for row in RUNS]
    for their, our in zip(theirs, ours, strict=True):
        assert our / their == pytest.approx(1, abs=0.02)
    for (t1, o1), (t2, o2) in combinations(zip(theirs, ours, strict=True), 2):
        assert (o2 / o1) / (t2 / t1) == pytest.approx(1, abs=0.03)
