"""Annotations, strategies and operations inside wrapped models: results and refusals."""

import pytest
import torch
from torch import nn

from popdist_py import poptorch

torch.set_num_threads(1)


def options(**settings):
    made = poptorch.Options().showCompilationProgressBar(False)
    for name, value in settings.items():
        getattr(made, name)(value)
    return made


class Net(nn.Module):
    def __init__(self, annotated):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.loss = nn.CrossEntropyLoss()
        self.keep = lambda x: x
        if annotated:
            poptorch.BeginBlock(self.first, "a", ipu_id=0)
            poptorch.BeginBlock(self.second, "b", ipu_id=1)
            self.keep = poptorch.recomputationCheckpoint

    def forward(self, x, labels):
        x = self.second(torch.relu(self.keep(self.first(x))))
        return x, self.loss(x, labels)


def trained(model, opts):
    opts.Training.gradientAccumulation(4)
    wrapped = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        wrapped(
            torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        )
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_no_strategy_changes_a_result():
    expected = trained(Net(annotated=False), options())
    for strategy in (
        poptorch.PipelinedExecution(),
        poptorch.PipelinedExecution("a", "b"),
        poptorch.ShardedExecution(poptorch.AutoStage.AutoIncrement),
        poptorch.SerialPhasedExecution("a", ["b"]),
        poptorch.ParallelPhasedExecution(poptorch.Phase("a"), poptorch.Phase("b")),
    ):
        result = trained(Net(annotated=True), options(setExecutionStrategy=strategy))
        assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_removing_blocks_makes_it_one_stage():
    model = Net(annotated=True)
    poptorch.removeBlocks(model)
    wrapped = poptorch.trainingModel(model, options())
    wrapped(torch.ones(2, 8), torch.tensor([0, 1]))  # no pipeline that would need accumulation


def run(forward, *inputs, **settings):
    class Model(nn.Module):
        def forward(self, *args):
            return forward(*args)

    return poptorch.inferenceModel(Model(), options(**settings))(*inputs)


X = torch.arange(8.0).reshape(2, 4)


@pytest.mark.parametrize("replicas", [1, 2])
def test_operations_compute_what_pytorch_does(replicas):
    def forward(x):
        doubled, count = poptorch.for_loop(3, lambda t, n: (t * 2, n + 1), [x, x[:, 0]])
        sliced = poptorch.dynamic_slice(x, 1, torch.tensor([2]), 2, 1)
        updated = poptorch.dynamic_update(x, -sliced, 1, torch.tensor(0), 2)
        product = poptorch.serializedMatMul(x, x.T, poptorch.MatMulSerializationMode.ReducingDim, 2)
        return doubled, count, sliced, updated, product, poptorch.nop(x)

    results = run(forward, X, replicationFactor=replicas)
    parts = X.chunk(replicas)
    expected = (
        X * 8,
        X[:, 0] + 3,
        X[:, 2:],
        torch.cat([-X[:, 2:], X[:, 2:]], 1),
        torch.cat([part @ part.T for part in parts]),
        X,
    )
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)


def test_cond_decides_at_run_time():
    class Model(nn.Module):
        def forward(self, condition, x):
            return poptorch.cond(condition, lambda t: t + 1, [x], lambda t: t - 1, [x])[0]

    model = poptorch.inferenceModel(Model(), options())
    for truth in (True, False, True):
        result = model(torch.tensor([truth]), X[:1])
        assert torch.equal(result, X[:1] + (1 if truth else -1))


def test_printing_happens_once_a_run(capsys):
    model = poptorch.inferenceModel(lambda x: poptorch.ipu_print_tensor(x, "x") + 1, options())
    for _ in range(3):
        model(X)
    assert capsys.readouterr().err.count("x: (") == 3


def test_the_host_takes_part_in_inference():
    result = run(lambda x: poptorch.CPU(lambda t: t * len(t.tolist()), "host")(x), X)
    assert torch.equal(result, X * 2)


def test_a_custom_operation():
    poptorch.registerCustomOp("AddScalar", "test.models", lambda x, value: x + value)

    def forward(x):
        return poptorch.custom_op([x], "AddScalar", "test.models", 1, [x], {"value": 3.0})[0]

    assert torch.equal(run(forward, X), X + 3)


def test_overlapped_io():
    mode = poptorch.OverlapMode.OverlapDeviceIterationLoop

    def forward(x):
        return poptorch.set_overlap_for_output(poptorch.set_overlap_for_input(x, mode) * 2, mode)

    opts = options(setExecutionStrategy=poptorch.ShardedExecution())
    opts.TensorLocations.numIOTiles(32)

    class Model(nn.Module):
        def forward(self, x):
            return forward(x)

    assert torch.equal(poptorch.inferenceModel(Model(), opts)(X), X * 2)
    with pytest.raises(poptorch.Error, match="No IO tiles allocated"):
        run(forward, X, setExecutionStrategy=poptorch.ShardedExecution())


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: x[x > 1], "boolean mask"),
        (lambda x: x if x.sum() > 0 else -x, "Python condition"),
        (lambda x: torch.topk(x, 2, sorted=False)[0], "sorted=False"),
    ],
)
def test_what_cannot_be_compiled(forward, message):
    with pytest.raises(poptorch.Error, match=message):
        run(forward, X)
