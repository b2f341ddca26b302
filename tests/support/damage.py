"""Files that are no longer as written: a bit is another one, an end is gone, or more follows."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["damaged"]


def damaged(data: bytes, *, every: int = 1) -> Iterator[tuple[str, bytes]]:
    """Yield what a file may have become, and in words how.

    Every byte has another bit than its neighbours changed, so that all eight come in turn.

    Args:
        data: what was written.
        every: take so many-th offsets and lengths only.
    """
    for at in range(0, len(data), every):
        changed = bytearray(data)
        changed[at] ^= 1 << (at // every) % 8
        yield f"byte {at} is changed", bytes(changed)
    for length in range(0, len(data), every):
        yield f"{length} bytes are left", data[:length]
    for more in (b"\0", b"\n", b"}", data):
        yield f"{more[:4]!r} follows", data + more
