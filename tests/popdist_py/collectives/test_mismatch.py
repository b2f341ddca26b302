"""Calls that do not fit together end with an error that names both sides, on all instances."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest

pytestmark = pytest.mark.mpi
EXPECTED = [
    "shape: {first} called all_reduce(op=sum, shape=(2,), dtype=float64); {last} called "
    "all_reduce(op=sum, shape=(3,), dtype=float64): all instances must make the same call",
    "large shape: {first} called all_reduce(op=sum, shape=(1000000,), dtype=float64); {last} "
    "called all_reduce(op=sum, shape=(1000001,), dtype=float64): all instances must make the same "
    "call",
    "name: {first} called all_reduce(name='accuracy', op=sum, shape=(1,), dtype=float64); {last} "
    "called all_reduce(name='loss', op=sum, shape=(1,), dtype=float64): all instances must make "
    "the same call",
    "keys: all_reduce(op=sum, of a dict): the instances differ in x['c'] ({first}: a number "
    "(int64); {last}: missing), x['b'] ({first}: missing; {last}: a number (int64)): all instances "
    "must make the same call",
    "nested: all_reduce(name='m', op=sum, of a dict): the instances differ in m['loss']['b'][0] "
    "({first}: float64 of shape (2,); {last}: float64 of shape (3,)), m['new'] ({first}: missing; "
    "{last}: a number (float64)): all instances must make the same call",
    "text: all_reduce(name='metrics', op=sum, of a dict): the instances differ in metrics['loss'] "
    "({first}: a number (float64); {last}: a str, 'low': expected a number, an array or a tensor): "
    "all instances must make the same call",
    "text alone: {first} called all_reduce(op=sum, shape=(1,), dtype=float64); {last} called "
    "all_reduce(op=sum, of a str, 'low': expected a number, an array or a tensor): all instances "
    "must make the same call",
    *(
        f"many: all_reduce(op=sum, of a dict): the instances differ in x['weight 0'] {sizes}, "
        f"x['weight 1'] {sizes}, x['weight 2'] {sizes}, and 6 more: all instances must make the "
        "same call"
        for sizes in ["({first}: float64 of shape (2,); {last}: float64 of shape (3,))"]
    ),
    "sent: broadcast(root=0, of a dict): the instances differ in x['a'] ({first}: a pickled "
    "object; {last}: float64 of shape (1,)): all instances must make the same call",
    "frozen: {first} called broadcast(root=0, shape=(2,), dtype=float64); {last} called "
    "broadcast(root=0, of a read-only array: pass a copy of the array): all instances must make "
    "the same call",
    "block: {first} called reduce_scatter(name='n', op=sum, shape=(6,), dtype=float64); {last} "
    "called all_reduce(name='n', op=sum, shape=(6,), dtype=float64): all instances must make the "
    "same call",
    "call: {first} called all_reduce(op=sum, shape=(1000000,), dtype=float64); {last} called "
    "barrier(): all instances must make the same call",
]


# With three instances, the message names the instances of the same call together.
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_every_instance_hears_what_the_others_called(instances, count):
    ways = ("", "TEST_NUM_HOSTS=2", "POPDIST_SHARED_MEMORY=0")
    names = {"first": "instance 0" if count == 2 else "instances 0, 1"}
    names["last"] = f"instance {count - 1}"
    for found in instances.run(_messages_by_way, *ways, count=count):
        for way in ways:
            said = [f"{case}: {text}" for case, text in found[way].items()]
            assert {text.format(**names) for text in EXPECTED} <= set(said), way
            assert len(said) == 20
            assert all("all instances must make the same call" in text for text in said), said


def _messages_by_way(*words):
    with mock.patch.object(sys, "path", [str(Path(__file__).parent), *sys.path]):
        import mismatch_program
    return mismatch_program.messages_by_way(*words)
