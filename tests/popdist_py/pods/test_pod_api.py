"""The values of a pod as JSON: there and back, and what is refused with the field's name."""

from __future__ import annotations

import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.pods.model.json_values import decode, encode, from_json, to_json
from popdist_py.pods.model.pod_errors import InvalidRequestError
from popdist_py.pods.model.pod_parts import (
    Attachment,
    Cluster,
    Holder,
    Partition,
    PartitionRequest,
    Pod,
)
from popdist_py.pods.model.pod_store import PodStore
from popdist_py.pods.server import pod_api

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NUMBERS = st.floats(-1e299, 1e299)
INTEGERS = st.integers(-(1 << 53) + 1, (1 << 53) - 1)
for _kind, _strategy in ((str, TEXTS), (float, NUMBERS), (int, INTEGERS)):
    st.register_type_strategy(_kind, _strategy)
KINDS = (
    Pod,
    Partition,
    PartitionRequest,
    Attachment,
    Cluster,
    pod_api.Lease,
    pod_api.Refusal,
)


@given(st.one_of(*map(st.from_type, KINDS)))
def test_every_value_comes_back_as_it_was(value):
    sent = encode(to_json(value))
    assert from_json(type(value), decode(sent), "value") == value


@given(
    st.binary(max_size=60) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace"))
)
def test_any_body_is_decoded_or_refused(body):
    value, message = tried(decode, body)
    assert "\n" not in message
    assert json.dumps(value)


def tried(reader, value):
    """Return what a reader returns, or None and why it refuses."""
    try:
        return reader(value), ""
    except InvalidRequestError as error:
        return None, str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "size", "ipus", "holder", "x"]), inner, max_size=3
        )
    ),
)


@given(st.sampled_from(pod_api.CALLS), JSON)
def test_arguments_are_read_or_refused(call, value):
    arguments, message = tried(call.read_arguments, value)
    assert "\n" not in message
    assert len(message) < 1000
    assert arguments is None or set(arguments) == set(call.arguments)


HOLDER = {"host": "h", "pid": 1, "user": "u", "program": "p", "run_id": ""}


@pytest.mark.parametrize(
    ("call", "value", "said"),
    [
        (pod_api.CREATE_PARTITION, [], "create-partition is an array: expected an object"),
        (pod_api.CREATE_PARTITION, {}, "create-partition.request is missing"),
        (pod_api.CREATE_PARTITION, {"request": {"name": "p"}}, "request.size is missing"),
        (pod_api.CREATE_PARTITION, {"request": {"name": 4, "size": 4}}, "name is 4: expected t"),
        (pod_api.CREATE_PARTITION, {"request": {"name": "p", "size": True}}, "is true: exp"),
        (pod_api.CREATE_PARTITION, {"request": {"name": "p", "size": 4.0}}, "is 4.0: expect"),
        (pod_api.CREATE_PARTITION, {"request": {"name": "p", "size": 1 << 60}}, "beyond 2^53"),
        (pod_api.CREATE_PARTITION, {"request": {"name": "p", "size": 4, "gcds": 1}}, '"gcds"; the'),
        (
            pod_api.CREATE_PARTITION,
            {"request": {"name": "p", "size": 4, "sync_type": "fast"}},
            'sync_type is "fast": expected one of ST_GS2_DEFAULT',
        ),
        (pod_api.CREATE_PARTITION, {"request": {"name": "a\0", "size": 4}}, "without NUL"),
        (pod_api.CREATE_PARTITION, {"request": {"name": "\ud800", "size": 4}}, "surrogates"),
        (pod_api.CREATE_PARTITION, {"request": {"name": "a" * 5000, "size": 4}}, "5000 characters"),
        (pod_api.REMOVE_PARTITION, {"name": "p", "force": 1}, "force is 1: expected true or false"),
        (
            pod_api.ATTACH,
            {"partition": "p", "num_ipus": 1, "holder": HOLDER, "ipus": [0, "1"]},
            'attach.ipus[1] is "1": expected an integer',
        ),
        (pod_api.ATTACH, {"partition": "p", "num_ipus": 1, "holder": {}, "ipus": None}, "holder.h"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(call, value, said):
    with pytest.raises(InvalidRequestError) as refused:
        call.read_arguments(value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "body", [b'{"a":1,"a":2}', b"NaN", b"[1e999]", b"[" * 100000, b"1" * 5000, b"\xff", b""]
)
def test_what_is_no_json_is_refused(body):
    with pytest.raises(InvalidRequestError):
        from_json(tuple[float, ...], decode(body), "numbers")


@pytest.mark.parametrize("value", [float("nan"), "\ud800"])
def test_what_json_cannot_say_is_not_sent(value):
    with pytest.raises(InvalidRequestError):
        encode([value])


def test_a_field_that_stands_twice_is_refused():
    with pytest.raises(InvalidRequestError, match='the field "name" occurs twice'):
        decode(b'{"name": "a", "name": "b"}')


def test_fields_with_a_default_may_be_missing():
    read = from_json(Holder, {k: v for k, v in HOLDER.items() if k != "run_id"}, "holder")
    assert read == Holder(host="h", pid=1, user="u", program="p")


def test_every_method_of_a_store_is_a_call_with_its_arguments():
    methods = {
        name: method
        for name, method in vars(PodStore).items()
        if callable(method) and not name.startswith("_") and name != "close"
    }
    calls = {call.name.replace("-", "_"): call for call in pod_api.CALLS}
    assert {*methods, "renew"} == set(calls)
    for name, method in methods.items():
        hints = typing.get_type_hints(method)
        hints.pop("return")
        assert set(hints) == set(calls[name].arguments)
