"""Forward passes without values: tensors that keep values, and reports for inputs of every type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from popdist_py import poptorch
from popdist_py.poptorch.on_ipu.fake_tensors import UnknownValues
from popdist_py.poptorch.on_ipu.graph_of_model import graph_of_model

transforms = pytest.importorskip("torchvision.transforms")
STATISTICS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


class Normalized(nn.Module):
    """A model that casts and transforms images on the IPU, as with 8-bit I/O."""

    def __init__(self, transform: object, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.transform, self.dtype = transform, dtype
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> object:
        made = self.layer(self.transform(images.to(self.dtype))).mean((2, 3))
        return made, nn.functional.cross_entropy(made, labels)


def wrapped(transform: object, dtype: torch.dtype = torch.float32) -> poptorch.PoplarExecutor:
    model = Normalized(transform, dtype).to(dtype)
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, options, optimizer)


def call(dtype: torch.dtype, device: str = "meta") -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.zeros(2, 3, 8, 8, device=device).to(dtype),
        torch.zeros(2, dtype=torch.int64, device=device),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_report_takes_inputs_of_every_type(dtype):
    model = wrapped(transforms.Normalize(**STATISTICS), torch.float16)
    for report in (model.memoryReport(*call(dtype)), model.executionReport(*call(dtype))):
        assert str(report)
        assert report.to_json()
        assert report._repr_html_()
    received = model.executionReport(*call(dtype)).ipus[0].received
    width = {torch.int64: 4, torch.float64: 4, torch.bfloat16: 4}.get(dtype, dtype.itemsize)
    assert received == 2 * 3 * 8 * 8 * width + 2 * 4
    assert str(model.schedule(*call(dtype)))


def test_shapes_give_the_same_graph_as_compilation():
    model = wrapped(transforms.Normalize(**STATISTICS))
    asked = [model.memoryReport(*call(torch.uint8)), model.executionReport(*call(torch.uint8))]
    model.compile(*call(torch.uint8, "cpu"))
    assert [model.memoryReport(), model.executionReport()] == asked


@pytest.mark.parametrize(
    "transform",
    [
        transforms.Compose(
            [transforms.ConvertImageDtype(torch.float32), transforms.Normalize(**STATISTICS)]
        ),
        transforms.GaussianBlur(3, (0.5, 1.0)),
        transforms.RandomHorizontalFlip(),
        transforms.RandomResizedCrop(6),
        transforms.ColorJitter(0.1),
        transforms.RandomErasing(1.0),
    ],
    ids=lambda one: type(one).__name__,
)
def test_transforms_that_read_values_of_their_own(transform):
    model = wrapped(transform)
    before = torch.get_rng_state()
    assert str(model.memoryReport(*call(torch.uint8)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_reads_its_input_is_refused():
    model = wrapped(lambda images: images if images.sum() > 0 else -images)
    with pytest.raises(poptorch.Error, match="needs the value of a tensor"):
        model.memoryReport(*call(torch.uint8))


def test_small_tensors_that_depend_on_no_input_have_values():
    with UnknownValues() as mode:
        given = mode.unknown((3,), torch.float32)
        steps = torch.arange(4) * 2
        assert steps.tolist() == [0, 2, 4, 6]
        steps[0] = 5
        assert steps.tolist() == [5, 2, 4, 6]
        for lost in (given, given.half(), given + torch.ones(3), torch.zeros(2000)):
            with pytest.raises(Exception, match="_local_scalar_dense"):
                lost.sum().item()
        mixed = torch.zeros(3)
        mixed[0] = given[0]  # from now on, the values of ``mixed`` depend on an input
        with pytest.raises(Exception, match="_local_scalar_dense"):
            mixed.sum().item()


def test_tensors_of_the_program_stay_as_they_are():
    own = torch.ones(3)
    with UnknownValues():
        assert (own == 1).all()
        own.add_(1)
        own.view(3, 1).mul_(2)
    assert own.tolist() == [1, 1, 1]


class Speech(nn.Module):
    """A speech model of one layer with a CTC loss, whose inputs are frames and transcriptions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)

    def forward(
        self, frames: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        shares = self.layer(frames).log_softmax(-1).transpose(0, 1)
        steps = torch.full_like(lengths, frames.shape[1])
        return nn.functional.ctc_loss(shares, targets, steps, lengths)


def test_a_model_with_a_ctc_loss_is_reported_before_it_is_compiled():
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    batch, steps, longest = 3, 50, 7
    call = (
        torch.zeros(batch, steps, 16, device="meta"),
        torch.zeros(batch, longest, dtype=torch.int32, device="meta"),
        torch.zeros(batch, dtype=torch.int32, device="meta"),
    )
    graph = graph_of_model(Speech(), options, call, training=True).graph
    # The backward pass reads the probabilities. PopART does not merge a CTC loss with its softmax.
    (softmax,) = (each for each in graph.operations if each.kind == "softmax")
    (loss,) = (each for each in graph.operations if each.kind == "loss")
    assert graph.root_of[softmax.output.name] in {graph.root_of[name] for name in loss.saved}
    assert softmax.output.elements == steps * 32
    assert str(poptorch.trainingModel(Speech(), options).memoryReport(*call))


LOGITS, LABELS = torch.randn(20, 4, 10), torch.randint(1, 10, (4, 5))
STEPS, LENGTHS = torch.full((4,), 20), torch.full((4,), 5)
CTC_CALLS = {
    "tensors": (LOGITS, LABELS, STEPS, LENGTHS),
    "numbers": (LOGITS, LABELS, [20] * 4, [5] * 4),
    "one target": (LOGITS, LABELS.flatten(), STEPS, LENGTHS),
    "one sample": (LOGITS[:, 0], LABELS[0], STEPS[0], LENGTHS[0]),
}


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("call", CTC_CALLS.values(), ids=CTC_CALLS)
def test_a_ctc_loss_has_the_same_shape_without_values(call, reduction):
    def loss(logits: torch.Tensor, *others: object) -> torch.Tensor:
        shares = logits.log_softmax(-1)
        return nn.functional.ctc_loss(shares, *others, reduction=reduction)

    expected = loss(*call)
    with UnknownValues() as mode:
        unknown = [
            mode.unknown(each.shape, each.dtype) if isinstance(each, torch.Tensor) else each
            for each in call
        ]
        found = loss(*unknown)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
