"""The CTC beam search decoder against every alignment, counted one by one."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.poptorch import ops


def labels_of(alignment, blank):
    return tuple(label for label, _ in itertools.groupby(alignment) if label != blank)


@given(st.integers(1, 4), st.integers(2, 3), st.integers(0, 1), st.integers(0, 10_000))
def test_ctc_decoding_finds_the_most_likely_labels(time, classes, blank, seed):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(time, 1, classes, generator=generator).log_softmax(-1)
    likelihood = {}
    for alignment in itertools.product(range(classes), repeat=time):
        log = sum(probs[t, 0, label].item() for t, label in enumerate(alignment))
        labels = labels_of(alignment, blank)
        likelihood[labels] = likelihood.get(labels, 0.0) + math.exp(log)
    ranking = sorted(likelihood.values(), reverse=True)
    paths = min(2, len(ranking))
    scores, lengths, labels = ops.ctc_beam_search_decoder(
        probs, torch.tensor([time]), blank=blank, top_paths=paths
    )
    assert (scores.shape, lengths.shape, labels.shape) == ((1, paths), (1, paths), (1, paths, time))
    assert labels.dtype == lengths.dtype == torch.int32
    torch.testing.assert_close(scores[0].exp(), torch.tensor(ranking[:paths]))
    found = tuple(labels[0, 0, : lengths[0, 0]].tolist())
    assert math.isclose(likelihood[found], ranking[0], rel_tol=1e-5)


def test_ctc_decoding_reads_only_the_valid_time_steps():
    probs = torch.full((3, 1, 2), -10.0)
    probs[:, 0, 1] = -0.001
    _, lengths, _ = ops.ctc_beam_search_decoder(probs, torch.tensor([0]))
    assert lengths.item() == 0
