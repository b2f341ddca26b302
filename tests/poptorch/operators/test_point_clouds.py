"""Farthest point sampling and nearest neighbours."""

import torch

from popdist_py.poptorch import ops


def test_farthest_points():
    line = torch.tensor([[0.0], [1.0], [10.0], [4.0], [0.0], [5.0]])
    assert ops.fps(line, [0, 4], ratio=0.75).tolist() == [0, 2, 3]
    assert ops.fps(line, [0, 4, 6], ratio=0.5).tolist() == [0, 2, 4]
    assert 0 <= ops.fps(line, [0, 6], ratio=0.1, random_start=True).item() < 6


def test_nearest_points():
    x, y = torch.tensor([[0.0], [9.0]]), torch.tensor([[8.0], [1.0], [0.5]])
    assert ops.nearest(x, y).tolist() == [2, 0]
    batch_x, batch_y = torch.tensor([0, 1]), torch.tensor([0, 0, 1])
    assert ops.nearest(x, y, batch_x, batch_y).tolist() == [1, 2]
