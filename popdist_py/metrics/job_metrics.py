"""The class ``Metrics``, which reduces numbers of all instances and writes them to sinks.

Only the methods ``compute``, ``log`` and ``state_dict`` communicate with other instances.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, get_args

from popdist_py import activities, context
from popdist_py.errors import CollectiveMismatchError
from popdist_py.metrics.accumulated import Accumulated, Reduction, merged, one_number
from popdist_py.metrics.sink import STEP_COLUMN, MetricsSink
from popdist_py.run_files.logged_values import log_values

_REDUCTIONS = get_args(Reduction)
# The number of values that ``update`` collects before it reads them from their device. Reading many
# tensors together avoids a wait for the device in every ``update``.
_MAX_WAITING = 1000


class Metrics:
    """Weighted means over the steps and instances of a job, written to sinks by one instance.

    ``update`` does not communicate. ``compute`` and ``log`` are collective, so all instances must
    call them. An instance without numbers for a name, for example with an empty shard, does not
    affect the result for that name. If a number is NaN, the result is NaN.

    Args:
        sinks: One or several sinks for ``log``, such as ``CsvSink("metrics.csv")``.
        reductions: The reduction of each metric by name: ``mean`` (the default), ``sum``, ``min``,
            ``max`` or ``last``. The reduction ``last`` takes the last number of the first instance
            that has a number. All instances must give the same reductions.

    Raises:
        TypeError: ``sinks`` contains an object that is not a sink.
        ValueError: A reduction is unknown.
    """

    def __init__(
        self,
        sinks: MetricsSink | Iterable[MetricsSink] = (),
        *,
        reductions: Mapping[str, Reduction] | None = None,
    ) -> None:
        self._sinks = tuple(sinks) if isinstance(sinks, Iterable) else (sinks,)
        for sink in self._sinks:
            if isinstance(sink, type) or not (hasattr(sink, "write") and hasattr(sink, "close")):
                raise TypeError(
                    f"Metrics(sinks=...): {sink!r} is not a sink: expected objects with the "
                    "methods write() and close(), such as CsvSink('metrics.csv')"
                )
        self._failed: set[int] = set()  # ids of sinks, because a sink may be unhashable
        self._reductions = dict(reductions or {})
        for name, reduction in self._reductions.items():
            _check_name(name)
            if reduction not in _REDUCTIONS:
                raise ValueError(
                    f"Metrics(reductions={{{name!r}: {reduction!r}}}): expected one of "
                    f"{', '.join(_REDUCTIONS)}"
                )
        self._so_far: dict[str, Accumulated] = {}
        self._waiting: list[tuple[str, Any, float]] = []

    def update(
        self, values: Mapping[str, Any] | None = None, /, *, weight: float = 1.0, **named: Any
    ) -> None:
        """Add numbers of this instance, without communication.

        Args:
            values: Numbers by name, for names that are not Python identifiers, such as
                ``{"train/loss": loss}``.
            weight: The weight of these numbers in means, such as the number of samples in the
                batch. Numbers with the weight 0 are ignored.
            named: Numbers by name. The elements of an array or tensor are first reduced to one
                number, which by default is their mean. The call does not wait for a device to
                compute a tensor.

        Raises:
            TypeError: A value is not a number, array or tensor. If an error is raised, no number is
                added.
            ValueError: ``weight`` is negative or not finite, or a name is empty, "step" or given
                twice.
        """
        weight = _checked_weight(weight)
        given = []
        for name, value in _joined(values, named).items():
            _check_name(name)
            try:
                number = one_number(value, self._reductions.get(name, "mean"))
            except (TypeError, ValueError, RuntimeError) as error:  # torch raises RuntimeError
                text, reason = " ".join(repr(value).split()), str(error).partition("\n")[0]
                raise TypeError(
                    f"update: the value of {name!r} is a {type(value).__name__}, {text:.40}: "
                    f"{reason:.200}"
                ) from None
            if number is not None and weight:
                given.append((name, number, weight))
        self._waiting += given
        if len(self._waiting) >= _MAX_WAITING:
            self._add_up()

    def compute(self) -> dict[str, float]:
        """Return the reduced numbers of all instances, by the names of the metrics.

        All instances must call this method, and all get the same result. The numbers are kept and
        are part of later results.

        Raises:
            CollectiveMismatchError: The instances give different reductions for a name.
        """
        return self._results("metrics")

    def log(self, step: int) -> dict[str, float]:
        """Write the result of ``compute`` to the sinks, discard the numbers, and return the result.

        All instances must call this method. Only the first instance writes to the sinks. With the
        launcher's option --output-dir, the first instance also writes to the folder of the run. The
        first error of each sink is logged as a warning.

        Args:
            step: The number of training steps that are done.

        Raises:
            TypeError: ``step`` is not a whole number.
            CollectiveMismatchError: The instances are at different steps, or give different
                reductions for a name.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise TypeError(f"log(step={step!r}): expected an integer") from None
        values = self._results(f"metrics at step {step}")
        self.reset()
        if values and context.communicator().instance_index == 0:
            log_values(step, values)
            for sink in self._sinks:
                self._guard(sink, f"write step {step}", partial(sink.write, step, dict(values)))
        return values

    def reset(self) -> None:
        """Discard the numbers of this instance, without communication."""
        self._so_far.clear()
        self._waiting.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of all instances since the last ``log``.

        All instances must call this method. All instances get the same state, so any instance can
        save it.
        """
        whole = self._of_all_instances("state of metrics")
        return {"so_far": {name: list(accumulated) for name, accumulated in whole.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned in a job with any number of instances.

        All instances must call this method. The first instance restores the numbers of all
        instances. The other instances start without numbers.

        Raises:
            ValueError: ``state`` is not a state of ``Metrics``.
        """
        try:
            so_far = {name: Accumulated(*parts) for name, parts in state["so_far"].items()}
        except (KeyError, TypeError, AttributeError):
            raise ValueError(
                f"load_state_dict({state!r:.40}): expected a state from Metrics.state_dict()"
            ) from None
        self.reset()
        if context.communicator().instance_index == 0:
            self._so_far = so_far

    def close(self) -> None:
        """Close the sinks. A second call does nothing."""
        for sink in self._sinks:
            self._guard(sink, "close", sink.close)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _add_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        for name, number, weight in waiting:
            new = Accumulated.of(self._reductions.get(name, "mean"), float(number), weight)
            old = self._so_far.get(name)
            self._so_far[name] = old.followed_by(new) if old else new

    def _results(self, call: str) -> dict[str, float]:
        return {name: whole.result for name, whole in self._of_all_instances(call).items()}

    def _of_all_instances(self, call: str) -> dict[str, Accumulated]:
        """Return the combined values of all instances, by the names of the metrics.

        A single all-gather sends both names and values, because an instance may not have all names.
        The all-gather fails if the text ``call`` differs between instances.
        """
        self._add_up()
        communicator = context.communicator()
        own = {name: tuple(accumulated) for name, accumulated in self._so_far.items()}
        with activities.doing(activities.REDUCING, "metrics"):
            gathered = communicator.all_gather_object(own, call)
        parts: dict[str, dict[int, Accumulated]] = {}
        for instance, numbers in zip(communicator.instances, gathered, strict=True):
            for name, number in numbers.items():
                parts.setdefault(name, {})[instance] = Accumulated(*number)
        for name, by_instance in parts.items():
            _check_reductions(name, by_instance)
        return {name: merged(by_instance.values()) for name, by_instance in parts.items()}

    def _guard(self, sink: MetricsSink, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # an error of a sink must not end the program
            if id(sink) not in self._failed:
                self._failed.add(id(sink))
                logging.getLogger("popdist").warning(
                    "the metrics sink %r failed to %s: %s: %s; training continues, and further "
                    "errors of this sink are not reported",
                    sink, what, type(error).__name__, error,
                )  # fmt: skip


def _joined(values: Mapping[str, Any] | None, named: dict[str, Any]) -> dict[str, Any]:
    if values is None:
        return named
    if not isinstance(values, Mapping):
        raise TypeError(
            f"update({values!r:.40}): expected a mapping from names to numbers, or keyword "
            "arguments, such as update(loss=0.5) or "
            'update({"train/loss": 0.5})'
        )
    if twice := [name for name in named if name in values]:
        raise ValueError(
            f"update: the metric {twice[0]!r} is given twice, in the mapping and as a keyword "
            "argument"
        )
    return {**values, **named}


def _checked_weight(weight: Any) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"update(weight={weight!r:.40}): expected a finite number of at least 0")
    return number


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or name == STEP_COLUMN:
        raise ValueError(
            f"the metric name {name!r} is invalid: expected a string that is not empty and not "
            f"{STEP_COLUMN!r}"
        )


def _check_reductions(name: str, by_instance: Mapping[int, Accumulated]) -> None:
    ways = {accumulated.reduction: instance for instance, accumulated in by_instance.items()}
    if len(ways) > 1:
        said = ", ".join(f"{way!r} on instance {instance}" for way, instance in ways.items())
        raise CollectiveMismatchError(
            f"the reduction of the metric {name!r} differs between instances ({said}): give all "
            "instances the same reductions"
        )
