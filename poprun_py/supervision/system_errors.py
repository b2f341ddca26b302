"""What the system refuses the launcher, as a line that says what to do."""

from __future__ import annotations

import errno

__all__ = ["explain_os_error"]


def explain_os_error(error: OSError, problem: str) -> str:
    """Return ``problem`` with the system's reason, and what to do where that is known."""
    said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    if error.errno == errno.EMFILE:
        # The soft limit is the hard one already.
        return (
            f"{problem} ({said}): raise the hard limit of open files (ulimit -n N as root, or "
            "/etc/security/limits.conf), or start fewer instances"
        )
    if error.errno == errno.ENFILE:
        return f"{problem} ({said}): raise the limit of the whole machine (sysctl fs.file-max)"
    return f"{problem} ({said})"
