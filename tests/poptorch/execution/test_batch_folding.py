"""Folded operations: on all replicas at once they compute what each computes alone."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from popdist_py.poptorch.execution.batch_folding import folded_batches

REPLICAS = 3
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SHAPES = [(4, 5), (2, 3, 7), (2, 4, 3, 5), (1, 3, 4, 4), (3, 5, 2, 2), (2, 2, 3, 2, 2)]
SETTINGS = list(itertools.product((True, False), (True, False), (0.1, 0.7), (True, False)))


def norm_for(shape, **settings):
    kind = NORMS[max(1, len(shape) - 2)]
    norm = kind(shape[1], **settings)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def buffers_of_replicas(norm, dtype):
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.rand(REPLICAS, *buffer.shape, generator=generator).to(buffer.dtype)
        for name, buffer in norm.named_buffers()
    }


def alone(norm, x, buffers):
    """Run replica after replica; return results, gradients and statistics."""
    x = x.clone().requires_grad_()
    results, own = [], {name: [] for name in buffers}
    for replica in range(REPLICAS):
        mine = {name: stack[replica].clone() for name, stack in buffers.items()}
        results.append(torch.func.functional_call(norm, mine, x[replica]))
        for name, value in mine.items():
            own[name].append(value)
    return backward(norm, x, torch.stack(results)), {k: torch.stack(v) for k, v in own.items()}


def together(norm, x, buffers, dim):
    """Run all replicas at once, with theirs along dimension ``dim`` of the samples."""
    x = x.clone().requires_grad_()
    own = {name: stack.clone() for name, stack in buffers.items()}

    def run(x, buffers):
        return torch.func.functional_call(norm, buffers, x)

    with folded_batches():
        result = torch.func.vmap(run, (dim, 0))(x.movedim(0, dim), own)
    return backward(norm, x, result), own


def backward(norm, x, result):
    norm.zero_grad()
    weights = torch.arange(result.numel(), dtype=result.dtype).view(result.shape).sin()
    (result * weights).sum().backward()
    return [result.detach(), x.grad, *(p.grad.clone() for p in norm.parameters())]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_replica_normalises_over_its_own_samples(shape, dtype):
    torch.manual_seed(0)
    for affine, tracks, momentum, training in SETTINGS:
        settings = {"affine": affine, "track_running_stats": tracks, "momentum": momentum}
        norm = norm_for(shape, **settings).to(dtype).train(training)
        buffers = buffers_of_replicas(norm, dtype)
        x = torch.randn(REPLICAS, *shape, dtype=dtype)
        values, statistics = alone(norm, x, buffers)
        for dim in (0, 1):
            ours, own = together(norm, x, buffers, dim)
            torch.testing.assert_close(ours, values, rtol=1e-4, atol=1e-5)
            assert own.keys() == statistics.keys()
            for name, expected in statistics.items():
                torch.testing.assert_close(own[name], expected, rtol=1e-5, atol=1e-6)


def test_common_statistics_make_one_batch_of_the_replicas():
    torch.manual_seed(0)
    norm = norm_for((2, 4, 3, 3)).eval()
    x = torch.randn(REPLICAS, 2, 4, 3, 3)
    with folded_batches():
        result = torch.func.vmap(norm)(x)
    torch.testing.assert_close(result, norm(x.flatten(0, 1)).view_as(x))


def test_one_sample_of_one_value_is_refused_as_by_torch():
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    with folded_batches(), pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.func.vmap(norm)(torch.randn(REPLICAS, 1, 4))


def test_layouts_in_memory_do_not_matter_to_norms():
    torch.manual_seed(0)
    norm = norm_for((2, 4, 3, 3), track_running_stats=False)
    x = torch.randn(REPLICAS, 2, 4, 3, 3)
    values, _ = alone(norm, x, {})
    last = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    ours, _ = together(norm, last, {}, 0)
    torch.testing.assert_close(ours, values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changed", [torch.relu_, F.relu6, lambda x: x[:, 1:].mul_(2)])
def test_what_a_norm_returns_may_be_changed_in_place(changed):
    torch.manual_seed(0)
    norm = nn.Sequential(norm_for((2, 4, 3, 3), track_running_stats=False), InPlace(changed))
    x = torch.randn(REPLICAS, 2, 4, 3, 3)
    values, _ = alone(norm, x, {})
    for dim in (0, 1):
        ours, _ = together(norm, x, {}, dim)
        torch.testing.assert_close(ours, values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(-1,), (8, 9), (-1, 3, 3), (2, 2, 2, 9)])
def test_what_a_norm_returns_may_be_viewed_as_that_of_one_replica(shape):
    torch.manual_seed(0)
    norm = norm_for((2, 4, 3, 3), track_running_stats=False)
    x = torch.randn(REPLICAS, 2, 4, 3, 3)
    viewed = nn.Sequential(norm, Viewed(shape))
    values, _ = alone(viewed, x, {})
    for dim in (0, 1):
        ours, _ = together(viewed, x, {}, dim)
        torch.testing.assert_close(ours, values, rtol=1e-4, atol=1e-5)


def test_a_product_lies_in_memory_as_its_larger_factor():
    samples = torch.randn(2, 3, 4, 2, 2).movedim(1, 0)  # the replicas side by side
    scales = torch.randn(3, 2, 4, 1, 1)
    for left, right in ((samples, scales), (scales, samples)):
        with folded_batches():
            product = torch.func.vmap(lambda x, y: x * y)(left, right)
        assert torch.equal(product, samples * scales)
        assert product.stride() == samples.stride()


class Viewed(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def forward(self, x):
        return x.view(self.shape)


class InPlace(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        self.change(x, inplace=True) if self.change is F.relu6 else self.change(x)
        return x


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("settings", [{}, {"ignore_index": 2}, {"reduction": "sum"},
                                      {"reduction": "none"}, {"label_smoothing": 0.1},
                                      {"weight": CLASS_WEIGHTS}],
                         ids=str)  # fmt: skip
def test_losses_are_those_of_each_replica(settings):
    torch.manual_seed(0)
    scores, classes = torch.randn(REPLICAS, 6, 4), torch.randint(0, 4, (REPLICAS, 6))

    def loss(scores, classes):
        return F.cross_entropy(scores, classes, **settings)

    with folded_batches():
        ours = torch.func.vmap(loss)(scores, classes)
    expected = torch.stack([loss(*pair) for pair in zip(scores, classes, strict=True)])
    torch.testing.assert_close(ours, expected)


def test_negative_log_likelihoods_weigh_the_classes_of_each_replica():
    torch.manual_seed(0)
    scores, classes = torch.randn(REPLICAS, 6, 4), torch.randint(0, 4, (REPLICAS, 6))
    loss = nn.NLLLoss(weight=CLASS_WEIGHTS)
    with folded_batches():
        ours = torch.func.vmap(loss)(scores, classes)
    expected = torch.stack([loss(*pair) for pair in zip(scores, classes, strict=True)])
    torch.testing.assert_close(ours, expected)


def test_torch_is_itself_again_afterwards():
    before = F.batch_norm, F.cross_entropy, F.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), folded_batches():
        raise ZeroDivisionError
    assert before == (F.batch_norm, F.cross_entropy, F.scaled_dot_product_attention)


def test_torch_warns_of_slow_operations_in_the_users_own_vmap_only(recwarn):
    def slow(x):
        return torch.histc(x, 4)

    with folded_batches():
        torch.func.vmap(slow)(torch.ones(2, 3))
    assert not recwarn
    torch.func.vmap(slow)(torch.ones(2, 3))
    assert "performance drop" in str(recwarn.pop(UserWarning).message)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 3, 8, 8), (3, 8, 8)], ids=str)
def test_images_of_all_replicas_go_through_convolutions_and_pools_at_once(shape):
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(4), nn.ReLU(inplace=True)] if len(shape) == 4 else [nn.ReLU()]
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), *norms, nn.MaxPool2d(2), nn.Conv2d(4, 5, 1), nn.AvgPool2d(2)
    ).double()
    buffers = buffers_of_replicas(net, torch.float64)
    x = torch.randn(REPLICAS, *shape, dtype=torch.float64)
    values, statistics = alone(net, x, buffers)
    for dim in (0, 1):
        ours, own = together(net, x, buffers, dim)
        torch.testing.assert_close(ours, values)
        torch.testing.assert_close(own, statistics)
