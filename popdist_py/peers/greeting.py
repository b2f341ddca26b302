"""The greeting, a handshake in which both ends prove that they know the secret of the job.

    caller -> listener   a nonce
    listener -> caller   a nonce, and the listener's proof
    caller -> listener   the caller's proof, and its claim, which identifies the caller
    listener -> caller   the acceptance

To prove that it knows the secret, each end sends an HMAC over both nonces. A process without the
secret learns nothing from either end. A recorded proof is not valid for another connection. The
launcher's wrapper of an instance has its own copy of the functions for callers
(``poprun_py/instance/launcher_channel.py``).

The functions of this module only compute bytes. The callers of these functions send and receive the
bytes.
"""

from __future__ import annotations

import hmac

NONCE_BYTES = 16
PROOF_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
LET_IN = b"\1"
_HASH = "sha256"


class RefusedError(Exception):
    """The other end did not prove that it knows the secret."""


def joined(secret: bytes, other: bytes) -> bytes:
    """Return a secret that is derived from two secrets. ``other`` may be empty."""
    return hmac.digest(other, secret, _HASH) if other else secret


def answer(secret: bytes, caller_nonce: bytes, nonce: bytes) -> bytes:
    """Return the listener's answer to the caller's nonce.

    Args:
        secret: The secret of the job.
        caller_nonce: The nonce from the caller.
        nonce: The listener's nonce, which must be new for each connection.
    """
    return nonce + _mac(secret, b"listener", caller_nonce, nonce)


def proof(secret: bytes, caller_nonce: bytes, answered: bytes, claim: bytes) -> bytes:
    """Return the caller's proof that it knows the secret, followed by the caller's claim.

    Args:
        secret: The secret of the job.
        caller_nonce: The nonce that the caller sent.
        answered: The listener's answer to the caller's nonce.
        claim: The bytes that identify the caller.

    Raises:
        RefusedError: The listener does not know the secret.
    """
    nonce = answered[:NONCE_BYTES]
    if not hmac.compare_digest(answered, answer(secret, caller_nonce, nonce)):
        raise RefusedError
    return _mac(secret, b"caller", caller_nonce, nonce, claim) + claim


def claim_of(secret: bytes, caller_nonce: bytes, nonce: bytes, proven: bytes) -> bytes:
    """Return the claim of a caller after checking its proof.

    Args:
        secret: The secret of the job.
        caller_nonce: The nonce from the caller.
        nonce: The nonce that the listener sent.
        proven: The caller's proof and claim.

    Raises:
        RefusedError: The caller does not know the secret.
    """
    claim = proven[PROOF_BYTES:]
    expected = _mac(secret, b"caller", caller_nonce, nonce, claim)
    if not hmac.compare_digest(proven[:PROOF_BYTES], expected):
        raise RefusedError
    return claim


def _mac(secret: bytes, *parts: bytes) -> bytes:
    # All nonces have the same length, so joining two different lists of parts never gives the same
    # bytes.
    return hmac.digest(secret, b" ".join(parts), _HASH)
