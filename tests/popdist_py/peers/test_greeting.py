"""The greeting as bytes: who knows the secret is let in; another's words do not help."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.peers import greeting
from popdist_py.peers.greeting import ANSWER_BYTES, NONCE_BYTES, PROOF_BYTES, RefusedError

SECRETS = st.binary(min_size=1, max_size=80)
NONCES = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)
CLAIMS = st.binary(max_size=20)


@given(SECRETS, NONCES, NONCES, CLAIMS)
def test_two_ends_that_know_the_secret_understand_one_another(secret, called, nonce, claim):
    answered = greeting.answer(secret, called, nonce)
    assert len(answered) == ANSWER_BYTES
    shown = greeting.proof(secret, called, answered, claim)
    assert len(shown) == PROOF_BYTES + len(claim)
    assert greeting.claim_of(secret, called, nonce, shown) == claim


@given(SECRETS, NONCES, st.binary(max_size=200), CLAIMS)
def test_a_listener_that_says_anything_else_learns_nothing(secret, called, answered, claim):
    with pytest.raises(RefusedError):
        greeting.proof(secret, called, answered, claim)


@given(SECRETS, NONCES, NONCES, st.binary(max_size=200))
def test_a_caller_that_says_anything_else_is_refused(secret, called, nonce, shown):
    with pytest.raises(RefusedError):
        greeting.claim_of(secret, called, nonce, shown)


@given(SECRETS, st.tuples(NONCES, NONCES), st.tuples(NONCES, NONCES), st.binary(min_size=1))
def test_what_was_recorded_proves_nothing_another_time(secret, before, now, claim):
    recorded = greeting.answer(secret, *before)
    shown = greeting.proof(secret, before[0], recorded, claim)
    if before[0] != now[0]:
        with pytest.raises(RefusedError):
            greeting.proof(secret, now[0], recorded, claim)
    if before != now:
        with pytest.raises(RefusedError):
            greeting.claim_of(secret, *now, shown)
    # Nor does one end's proof stand for the other's, or for another claim.
    with pytest.raises(RefusedError):
        greeting.claim_of(secret, *before, recorded[NONCE_BYTES:] + claim)
    with pytest.raises(RefusedError):
        greeting.claim_of(secret, *before, shown[:-1] + bytes([shown[-1] ^ 1]))


def test_a_secret_of_two_is_known_to_who_knows_both():
    both = greeting.joined(b"one", b"two")
    assert both not in (greeting.joined(b"one", b"too"), greeting.joined(b"won", b"two"))
    assert greeting.joined(b"one", b"") == b"one"
