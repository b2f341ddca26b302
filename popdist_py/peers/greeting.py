"""The greeting: each end of a connection shows the other that it knows the secret of the job.

    caller -> listener   a nonce
    listener -> caller   a nonce, and the listener's proof
    caller -> listener   the caller's proof, and its claim: what it says of itself
    listener -> caller   that it is let in

A proof is an HMAC over both nonces. So who does not know the secret learns nothing from either end,
and what somebody has recorded proves nothing another time. The wrapper of an instance has a
caller's half of its own (``poprun_py/instance/launcher_channel.py``).

Pure functions of bytes: nothing here reads or writes a connection.
"""

from __future__ import annotations

import hmac

__all__ = [
    "ANSWER_BYTES",
    "LET_IN",
    "NONCE_BYTES",
    "PROOF_BYTES",
    "RefusedError",
    "answer",
    "claim_of",
    "joined",
    "proof",
]

NONCE_BYTES = 16
PROOF_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
LET_IN = b"\1"
_HASH = "sha256"


class RefusedError(Exception):
    """The other end has not shown that it knows the secret."""


def joined(secret: bytes, other: bytes) -> bytes:
    """Return a secret that only those know who know both; ``other`` may be empty."""
    return hmac.digest(other, secret, _HASH) if other else secret


def answer(secret: bytes, called: bytes, nonce: bytes) -> bytes:
    """Return what a listener says to a caller.

    Args:
        secret: of the job.
        called: the caller's nonce.
        nonce: the listener's, never used before.
    """
    return nonce + _mac(secret, b"listener", called, nonce)


def proof(secret: bytes, called: bytes, answered: bytes, claim: bytes) -> bytes:
    """Return what a caller says to the listener's answer.

    Raises:
        RefusedError: the listener does not know the secret.
    """
    nonce = answered[:NONCE_BYTES]
    if not hmac.compare_digest(answered, answer(secret, called, nonce)):
        raise RefusedError
    return _mac(secret, b"caller", called, nonce, claim) + claim


def claim_of(secret: bytes, called: bytes, nonce: bytes, shown: bytes) -> bytes:
    """Return what a caller says of itself, once it has shown that it knows the secret.

    Args:
        secret: of the job.
        called: the caller's nonce.
        nonce: the listener's.
        shown: what the caller says to the listener's answer.

    Raises:
        RefusedError: the caller does not know the secret.
    """
    claim = shown[PROOF_BYTES:]
    expected = _mac(secret, b"caller", called, nonce, claim)
    if not hmac.compare_digest(shown[:PROOF_BYTES], expected):
        raise RefusedError
    return claim


def _mac(secret: bytes, *parts: bytes) -> bytes:
    # Nonces have one length, so that the parts cannot be cut in another way.
    return hmac.digest(secret, b" ".join(parts), _HASH)
