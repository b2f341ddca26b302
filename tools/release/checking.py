"""What every step works with: the release that is checked, and the ways in which a step ends."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


class Red(Exception):
    """A step found what must not be released; the message says what, and what to do."""


class LeftOut(Exception):
    """A step cannot be done on this machine; the message says why."""


@dataclass(frozen=True)
class Release:
    """The tree that is checked, where results go, and the Pythons that it is installed for.

    Attributes:
        root: the project.
        out: folder for what is built.
        environments: folder outside the project, for those that the wheel is installed into.
        pythons: executables, one of each version, for the fresh environments.
        quick: what takes longest is left out.
    """

    root: Path
    out: Path
    environments: Path
    pythons: tuple[str, ...]
    quick: bool = False

    @property
    def source(self) -> Path:
        """The clean tree that is built: a clone of the commit, without what git ignores."""
        return self.out / "source"

    @property
    def dist(self) -> Path:
        """Where the archive of sources and the wheel are."""
        return self.out / "dist"

    @property
    def wheel(self) -> Path:
        """The wheel that the step ``build`` made."""
        return self._built("*.whl")

    @property
    def sources(self) -> Path:
        """The archive of sources that the step ``build`` made."""
        return self._built("*.tar.gz")

    def _built(self, pattern: str) -> Path:
        found = sorted(self.dist.glob(pattern))
        if len(found) != 1:
            raise Red(f"{self.dist} has {len(found)} files {pattern}, not one; first: --only build")
        return found[0]


def run(
    *command: str | Path,
    cwd: Path,
    env: dict[str, str] | None = None,
    seconds: float = 600,
    code: int = 0,
) -> str:
    """Run a command and return what it prints; Red with its last lines where it fails."""
    words = [str(word) for word in command]
    # An installed package must not find the checkout, nor pip ask whether it is new.
    around = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    around |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "NO_COLOR": "1", **(env or {})}
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=around,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Red(f"{' '.join(words)}: took more than {seconds:.0f} s") from None
    except FileNotFoundError:
        raise Red(f"{words[0]} is not installed") from None
    if done.returncode != code:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise Red(f"{' '.join(words)}: exit code {done.returncode}\n{last}")
    return done.stdout
