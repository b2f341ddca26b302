"""Decoding of CTC (connectionist temporal classification) outputs by beam search.

The decoder runs a prefix beam search without a language model, as in section 7.5 of Graves,
"Supervised Sequence Labelling", 2012.
"""

from __future__ import annotations

from math import exp, inf, log1p
from typing import Any

import torch

from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.tracing.block_recorder import on_host

__all__ = ["ctc_beam_search_decoder"]

_Prefix = tuple[int, ...]


def ctc_beam_search_decoder(
    probs: torch.Tensor,
    lengths: torch.Tensor,
    blank: int = 0,
    beam_width: int = 100,
    top_paths: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the most likely label sequences for each element of a batch.

    Args:
        probs: The log-probabilities with shape [time, batch, classes].
        lengths: The number of valid time steps of each batch element, with shape [batch].
        blank: The index of the blank class, which stands for the absence of a label.
        beam_width: The number of label prefixes that the search keeps at every time step.
        top_paths: The number of sequences to return, which is at most ``beam_width``.

    Returns:
        The log-probabilities [batch, paths], the sequence lengths [batch, paths] (int32), and the
        labels [batch, paths, time] (int32). The label tensor contains ``blank`` after the end of
        each sequence.

    Raises:
        Error: ``probs`` or ``lengths`` is not a tensor.
    """
    for name, value in (("probs", probs), ("lengths", lengths)):
        if not isinstance(value, torch.Tensor):
            raise Error(
                f"ctc_beam_search_decoder: {name} must be a torch.Tensor, got "
                f"{type(value).__name__}"
            )
    assert 0 <= blank < probs.shape[2], (
        f"ctc_beam_search_decoder got blank={blank}: expected the index of a class, 0 to "
        f"{probs.shape[2] - 1}"
    )
    assert 1 <= top_paths <= beam_width, (
        f"ctc_beam_search_decoder got top_paths={top_paths}: expected 1 to beam_width, which is "
        f"{beam_width}"
    )
    time, batch, _ = probs.shape
    scores = torch.full((batch, top_paths), -inf, dtype=torch.float32)
    path_lengths = torch.zeros((batch, top_paths), dtype=torch.int32)
    paths = torch.full((batch, top_paths, time), blank, dtype=torch.int32)
    with on_host():
        values: Any = probs.detach().float().transpose(0, 1).tolist()
        num_steps: Any = lengths.tolist()
    for element, (steps, length) in enumerate(zip(values, num_steps, strict=True)):
        beam = _search(steps[:length], blank, beam_width)
        for rank, (prefix, score) in enumerate(beam[:top_paths]):
            scores[element, rank] = score
            path_lengths[element, rank] = len(prefix)
            paths[element, rank, : len(prefix)] = torch.tensor(prefix, dtype=torch.int32)
    return scores, path_lengths, paths


def _search(steps: list[list[float]], blank: int, width: int) -> list[tuple[_Prefix, float]]:
    """Return label prefixes and their log-probabilities, beginning with the most likely prefix."""
    # For each label prefix, ``beam`` contains two log-probabilities. The first log-probability of a
    # prefix is that of all alignments that end in a blank. The second log-probability of a prefix
    # is that of all alignments that end in the prefix's last label.
    beam: dict[_Prefix, tuple[float, float]] = {(): (0.0, -inf)}
    for step in steps:
        following: dict[_Prefix, tuple[float, float]] = {}
        for prefix, (in_blank, in_label) in beam.items():
            both = _add(in_blank, in_label)
            _extend(following, prefix, ends_in_blank=both + step[blank])
            for label, value in enumerate(step):
                if label == blank:
                    continue
                if prefix and prefix[-1] == label:
                    # The same label at two consecutive time steps is one label of the sequence. A
                    # repeated label counts twice only if a blank lies between its two time steps.
                    _extend(following, prefix, ends_in_label=in_label + value)
                    _extend(following, (*prefix, label), ends_in_label=in_blank + value)
                else:
                    _extend(following, (*prefix, label), ends_in_label=both + value)
        ranked = sorted(following.items(), key=lambda entry: -_add(*entry[1]))
        beam = dict(ranked[:width])
    return [(prefix, _add(*ends)) for prefix, ends in beam.items()]


def _extend(
    beam: dict[_Prefix, tuple[float, float]],
    prefix: _Prefix,
    ends_in_blank: float = -inf,
    ends_in_label: float = -inf,
) -> None:
    in_blank, in_label = beam.get(prefix, (-inf, -inf))
    beam[prefix] = (_add(in_blank, ends_in_blank), _add(in_label, ends_in_label))


def _add(a: float, b: float) -> float:
    """Return log(exp(a) + exp(b)), computed without overflow."""
    high, low = (a, b) if a > b else (b, a)
    return high if low == -inf else high + log1p(exp(low - high))
