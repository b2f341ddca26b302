"""Who is asked for stacks, and when a collection is over."""

from __future__ import annotations

from poprun_py.running.supervise.stacks import StackRequests

NEVER = float("inf")


def test_a_collection_is_over_when_all_have_answered():
    requests = StackRequests()
    assert requests.next_deadline() == NEVER
    requests.begin((0, 1), 10.0, print)
    requests.take(0, [{"pid": 1}])
    assert requests.on_time(10.1) == []
    requests.take(1, None)
    requests.take(7, [{"pid": 7}])
    (request,) = requests.on_time(10.2)
    assert request.answers == {0: [{"pid": 1}], 1: None}
    assert requests.on_time(99.0) == []


def test_an_instance_that_does_not_answer_is_not_waited_for():
    requests = StackRequests()
    requests.begin((0, 1), 10.0, print)
    requests.take(1, [])
    assert requests.on_time(12.9) == []
    (request,) = requests.on_time(requests.next_deadline())
    assert request.answers == {0: None, 1: []}


def test_with_nobody_to_ask_there_is_nothing_to_wait_for():
    requests = StackRequests()
    requests.begin((), 10.0, print)
    assert requests.next_deadline() < 10.0
    (request,) = requests.on_time(10.0)
    assert (request.answers, request.reply) == ({}, print)


def test_one_answer_serves_every_collection_that_waits_for_it():
    requests = StackRequests()
    requests.begin((0,), 10.0, print)
    requests.begin((0, 1), 11.0, print)
    requests.take(0, [])
    assert len(requests.on_time(11.0)) == 1
    requests.take(1, [])
    assert len(requests.on_time(11.0)) == 1
