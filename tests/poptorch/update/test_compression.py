"""Compressed sums between hosts, with threads as hosts that sockets connect."""

from __future__ import annotations

import math
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from popdist_py.collectives.between_hosts.tcp import TcpMesh
from popdist_py.poptorch.update.compressed import rounded_sums
from popdist_py.poptorch.update.compressed.compression import CompressedGradients
from popdist_py.poptorch.update.compressed.error_feedback import ErrorFeedback
from popdist_py.poptorch.update.compressed.power_sgd import PowerSgd, PowerSgdSettings
from popdist_py.poptorch.update.compressed.rounded_sums import RoundedSums

KINDS = ("fp16", "bf16")
# What is left of a value when it is rounded to so many bits, as a part of the piece's largest.
PRECISION = {"fp16": 2**-11, "bf16": 2**-8}


def meshes(count):
    ends = [({}, {}) for _ in range(count)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for first, second in combinations(range(count), 2):
            for kind in (0, 1):
                ends[first][kind][second] = socket.create_connection(listener.getsockname())
                ends[second][kind][first] = listener.accept()[0]
    return [TcpMesh(rank, *kinds) for rank, kinds in enumerate(ends)]


def reduced(make, steps):
    """Return each host's sums of every step.

    Args:
        make: makes the compression of one host.
        steps: [steps, hosts, elements].
    """

    def host(mesh):
        compression = make()
        sums = steps[:, mesh.rank].copy()
        for values in sums:
            reduce(compression, values, mesh)
        return sums

    return on_hosts(steps.shape[1], host)


def reduce(compression, values, mesh, owner=0, num_owners=1):
    for part in compression.parts(owner, num_owners):
        for one in compression.rounds(part, values[part], mesh.rank, mesh.size):
            request = mesh.start_round(one)
            while not request.is_done:
                mesh.progress(0.1)


def on_hosts(count, host):
    """Return what ``host`` returns for each mesh."""
    connected = meshes(count)
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(host, connected))
    for mesh in connected:
        mesh.close()
    return results


def rounded(kind, size):
    return lambda: RoundedSums(kind, size, ErrorFeedback(size))


def power_sgd(shapes, **changes):
    chosen = PowerSgdSettings(**{"rank": 2, "start_step": 0, "warm_start": True, **changes})
    return lambda: PowerSgd(chosen, shapes, ErrorFeedback(sum(map(math.prod, shapes))))


def assert_equal_bits(results):
    for other in results[1:]:
        assert np.array_equal(results[0].view(np.uint32), other.view(np.uint32))


@given(
    kind=st.sampled_from(KINDS),
    hosts=st.integers(2, 4),
    size=st.sampled_from([1, 3, 1000, 5001]),
    num_steps=st.integers(1, 8),
    exponent=st.integers(-120, 120),
    seed=st.integers(0, 99),
)
def test_what_a_step_leaves_out_comes_with_the_next(kind, hosts, size, num_steps, exponent, seed):
    steps = np.random.default_rng(seed).normal(size=(num_steps, hosts, size))
    steps = (steps * 2.0**exponent).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounded_sums, "_PIECE", 2000)
        results = reduced(rounded(kind, size), steps)
    assert_equal_bits(results)
    wanted = steps.astype(np.float64).sum((0, 1))
    missing = np.abs(results[0].astype(np.float64).sum(0) - wanted)
    # One rounding on each host and one of the sum, whatever the number of steps.
    largest = 2 * hosts * np.abs(steps).max()
    assert (missing <= 2 * hosts * PRECISION[kind] * largest).all()


@pytest.mark.parametrize("kind", KINDS)
def test_large_gradients_do_not_overflow_and_small_ones_do_not_vanish(kind):
    for size in (1e38, 1e6, 1.0, 1e-12, 1e-37):
        steps = np.full((1, 2, 10), size, np.float32)
        assert reduced(rounded(kind, 10), steps)[0][0] == pytest.approx(2 * size, rel=1e-2)


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_finite_values_stay_finite(kind, hosts):
    steps = np.zeros((2, hosts, 8), np.float32)
    steps[0, 0, :2] = np.finfo(np.float32).max * np.array([1, -1], np.float32)
    results = reduced(rounded(kind, 8), steps)
    assert_equal_bits(results)
    assert results[0][0] == pytest.approx(steps[0, 0], rel=1e-2)
    assert np.isfinite(results[0][1]).all()


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_infinite_values_pass_on_and_leave_nothing(kind, hosts):
    steps = np.ones((2, hosts, 12), np.float32)
    steps[0, 0, 3], steps[0, 1, 5], steps[0, 1, 7] = np.inf, -np.inf, np.nan
    results = reduced(rounded(kind, 12), steps)
    assert_equal_bits(results)
    first, second = results[0]
    assert (first[3], first[5]) == (np.inf, -np.inf)
    assert np.isnan(first[7])
    assert np.isfinite(first[[0, 1, 2, 4, 6, 8, 9, 10, 11]]).all()
    assert second == pytest.approx(np.full(12, hosts), rel=1e-2)


@settings(max_examples=6)
@given(
    hosts=st.integers(2, 4),
    rank=st.integers(1, 3),
    warm_start=st.booleans(),
    seed=st.integers(0, 99),
)
def test_power_sgd_brings_all_gradients_in_time(hosts, rank, warm_start, seed):
    shapes = [(16, 4, 8), (16,), (30, 40), (2, 2)]
    size = sum(map(math.prod, shapes))
    one = np.random.default_rng(seed).normal(size=(hosts, size)).astype(np.float32)
    steps = np.repeat(one[None], 60, axis=0)
    results = reduced(power_sgd(shapes, rank=rank, warm_start=warm_start), steps)
    assert_equal_bits(results)
    wanted = one.astype(np.float64).sum(0)
    mean = results[0].astype(np.float64).mean(0)
    exact = slice(512, 528), slice(1728, 1732)
    for part in exact:
        assert results[0][0, part] == pytest.approx(wanted[part], abs=1e-5)
    assert np.linalg.norm(mean - wanted) < 0.6 * np.linalg.norm(wanted)
    assert np.linalg.norm(results[0][0] - wanted) > 0.2 * np.linalg.norm(wanted)


def test_power_sgd_of_a_thin_matrix_loses_nothing():
    left, right = np.random.default_rng(0).normal(size=(2, 40, 2))
    matrix = (left @ right.T).astype(np.float32).reshape(-1)
    steps = np.stack([np.stack([matrix, 2 * matrix])] * 2)
    results = reduced(power_sgd([(40, 40)]), steps)
    assert_equal_bits(results)
    assert results[0][1] == pytest.approx(3 * matrix, abs=1e-4)


def test_power_sgd_sends_the_first_steps_as_they_are():
    steps = np.random.default_rng(0).normal(size=(3, 3, 1600)).astype(np.float32)
    result = reduced(power_sgd([(40, 40)], start_step=2), steps)[0]
    wanted = steps.sum(1)
    assert result[:2] == pytest.approx(wanted[:2], abs=1e-5)
    assert result[2] != pytest.approx(wanted[2], abs=0.1)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_power_sgd_starts_anew_after_an_infinite_value(bad):
    steps = np.random.default_rng(0).normal(size=(3, 2, 1600)).astype(np.float32)
    steps[1, 0, 7] = bad
    results = reduced(power_sgd([(40, 40)]), steps)
    assert_equal_bits(results)
    assert not np.isfinite(results[0][1]).any()
    assert np.isfinite(results[0][2]).all()


def test_power_sgd_of_zeros_stays_able_to_learn():
    steps = np.zeros((4, 2, 1600), np.float32)
    steps[3] = 1.0
    assert reduced(power_sgd([(40, 40)]), steps)[0][3] == pytest.approx(2.0, abs=1e-4)


def saved(instances):
    return [instance.state() for instance in instances]


@pytest.mark.parametrize("bad", [None, np.nan])
def test_power_sgd_goes_on_as_its_owners_did_however_often_it_is_resumed(bad):
    shapes = [(40, 40)] * 2
    steps = np.random.default_rng(0).normal(size=(4, 2, 3200)).astype(np.float32)
    if bad is not None:
        steps[1, 0, [7, 1607]] = bad  # no factors are left of either matrix

    def host(mesh, resumed):
        # Two owners, and an instance that owns nothing; error feedback is saved apart.
        feedback = [ErrorFeedback(3200) for _ in range(3)]
        settings = power_sgd(shapes)()._settings
        instances = [PowerSgd(settings, shapes, each) for each in feedback]
        sums = steps[:, mesh.rank].copy()
        for number, values in enumerate(sums):
            if resumed and number:
                states = saved(instances)
                instances = [PowerSgd(settings, shapes, each) for each in feedback]
                for instance in instances:
                    instance.load_states(states)
            for owner in range(2):
                reduce(instances[owner], values, mesh, owner, 2)
        return sums

    straight, resumed = (on_hosts(2, lambda mesh, r=r: host(mesh, r)) for r in (False, True))
    assert_equal_bits([*straight, *resumed])


def test_power_sgd_state_may_be_saved_before_the_first_step_since_loading():
    steps = np.random.default_rng(0).normal(size=(2, 1600)).astype(np.float32)

    def host(mesh):
        trained, loaded = (power_sgd([(40, 40)])() for _ in range(2))
        reduce(trained, steps[mesh.rank], mesh)
        loaded.load_states(saved([trained]))
        return trained.state(), loaded.state()

    for first, second in on_hosts(2, host):
        assert first["steps"] == second["steps"] == 1
        assert torch.equal(first["factors"][0], second["factors"][0])


def test_power_sgd_of_parameters_without_elements():
    steps = np.ones((1, 2, 1603), np.float32)
    result = reduced(power_sgd([(40, 40), (0, 5), (0, 5), (3,), (5, 0)]), steps)[0]
    assert result[0] == pytest.approx(np.full(1603, 2.0), abs=1e-4)


def test_owners_share_all_parts():
    shapes = [(16, 32), (16,), (30, 40), (2, 2), (300, 300)]
    size = sum(map(math.prod, shapes))
    for make in (rounded("fp16", size), power_sgd(shapes), power_sgd(shapes, start_step=9)):
        covered = np.zeros(size, int)
        for owner in range(3):
            for part in make().parts(owner, 3):
                covered[part] += 1
        assert (covered == 1).all()


def test_feedback_follows_the_loss_scale():
    feedback = ErrorFeedback(10)
    feedback.rescale(4.0)
    feedback.values(slice(2, 5))[:] = 8.0
    feedback.rescale(1.0)
    assert feedback.values(slice(0, 10)).tolist() == [0, 0, 2, 2, 2, 0, 0, 0, 0, 0]


def test_feedback_is_saved_and_loaded():
    feedback, loaded = ErrorFeedback(10), ErrorFeedback(10)
    feedback.rescale(4.0)
    feedback.values(slice(2, 5))[:] = 8.0
    feedback.sums(slice(3, 4))[:] = 1.0
    loaded.load_state(feedback.state())
    loaded.rescale(2.0)
    assert loaded.values(slice(0, 10)).tolist() == [0, 0, 4, 4, 4, 0, 0, 0, 0, 0]
    assert loaded.sums(slice(3, 4)).tolist() == [0.5]


def compressed(method, shapes, **settings):
    """Return the compressions of one array on the first of two hosts."""
    links = SimpleNamespace(
        hosts=[[0], [1]], start_compressed=lambda *_: None, finish_compressed=lambda: None
    )
    made = CompressedGradients(method, settings, SimpleNamespace(instance_index=0), links)
    made.reduction(np.zeros(sum(map(math.prod, shapes)), np.float32), shapes)
    return made


def with_rank(rank, shapes):
    return compressed("powersgd", shapes, rank=rank, start_step=0, warm_start=True)


def trained_with_rank(rank, shapes):
    """Return compressions that have done a step, and have left something out."""
    trained = with_rank(rank, shapes)
    ((compression, feedback, _),) = trained._made
    compression.parts(0, 1)
    (matrix,) = compression._matrices.values()
    compression._factors[matrix.index] = np.ones((matrix.columns, rank), np.float32)
    feedback.values(slice(0, 4))[:] = 1.0
    return trained


def is_anew(compressions):
    ((compression, feedback, _),) = compressions._made
    state = compression.state()
    return not state["steps"] and not state["factors"] and not feedback.state()["values"]


@pytest.mark.parametrize("other", [with_rank(6, [(40, 60)]), with_rank(2, [(60, 40)])])
def test_power_sgd_starts_anew_with_another_rank_or_another_shape(other):
    trained = trained_with_rank(2, [(40, 60)])
    other.load_states([trained.state()] * 2)
    assert is_anew(other)
    other.take_over(trained)
    assert is_anew(other)


def test_power_sgd_goes_on_with_the_same_rank_and_shapes():
    trained = trained_with_rank(2, [(40, 60)])
    for go_on in ("load", "take over"):
        same = with_rank(2, [(40, 60)])
        if go_on == "load":
            same.load_states([trained.state()] * 2)
        else:
            same.take_over(trained)
        ((compression, feedback, _),) = same._made
        assert compression.state()["steps"] == 1
        assert (compression.state()["factors"][0] == 1).all()
        assert feedback.values(slice(0, 5)).tolist() == [1, 1, 1, 1, 0]
