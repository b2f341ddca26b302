"""The sink that writes metrics to a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class WandbSink:
    """Writes metrics to a run of Weights & Biases, which begins with the first write.

    Args:
        arguments: The arguments of ``wandb.init``, such as ``project``, ``name`` and ``config``.
            ``mode="offline"`` works without a network or an account. The command ``wandb sync``
            sends an offline run later.

    Raises:
        ModuleNotFoundError: wandb is not installed.
    """

    def __init__(self, **arguments: Any) -> None:
        spec = find_spec("wandb")
        # A module ``wandb`` without an origin is not the package, but a folder that the package
        # made for runs.
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(
                "WandbSink needs the package wandb, which is not installed: pip install wandb"
            )
        self._arguments = arguments
        self._run: Any = None
        self._start_error: Exception | None = None

    def __repr__(self) -> str:
        arguments = (f"{name}={value!r}" for name, value in self._arguments.items())
        return f"WandbSink({', '.join(arguments)})"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step.

        Raises:
            wandb.Error: The run cannot begin, for example without an account.
        """
        if self._start_error is not None:
            raise self._start_error  # a second attempt to begin the run would wait again
        if self._run is None:
            try:
                self._run = import_module("wandb").init(**self._arguments)
            except Exception as error:
                self._start_error = error
                raise
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run after all values have been sent, or written to the disk in offline mode."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
