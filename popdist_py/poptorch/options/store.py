"""The class ``OptionStore``, a set of named option values that can be frozen (made read-only).

The module ``store`` contains the rules for changing and freezing options, which all groups of
options share. The class ``Options`` and the classes of its groups define the options themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, cast

from popdist_py.poptorch import old_spellings
from popdist_py.poptorch.options import printed

__all__ = ["OptionStore", "check_count", "check_type"]

Store = TypeVar("Store", bound="OptionStore")


class OptionStore:
    """Named option values, with PopTorch's rules for changing and freezing them."""

    # The name of this group of options in the table of old spellings.
    _place: ClassVar[str] = ""

    def __init__(self, **defaults: Any) -> None:
        object.__setattr__(self, "_values", defaults)
        object.__setattr__(self, "_defaults", copy.deepcopy(defaults))
        object.__setattr__(self, "_is_frozen", False)

    # -- Option values ------------------------------------------------------------------------

    def set(self, **values: Any) -> None:
        """Change existing options. If one of the values is invalid, none of the options changes.

        Raises:
            AttributeError: The options are frozen, because a model or a data loader uses them.
            AssertionError: An option name is unknown, a value has another type than the option's
                present value, or the option does not accept the value.
            ValueError: The values of several options contradict each other.
        """
        self.checkIsFrozen()
        with self._checked():
            for name, value in values.items():
                self._change(name, value)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Check option values after the ``with`` block, and restore the old values on an error."""
        before = dict(self._values)
        try:
            yield
            self._check()
        except BaseException:
            self._values.clear()
            self._values.update(before)
            raise

    def _check(self) -> None:
        """Check that the option values are valid and consistent; subclasses define the rules."""

    def _change(self, name: str, value: Any) -> None:
        """Set one existing option to a value of the same type."""
        assert name in self._values, (
            f"Invalid option {name}: valid options are {', '.join(sorted(self._values))}"
        )
        expected = type(self._values[name])
        assert isinstance(value, expected), (
            f"Unexpected type {type(value).__name__} of the value {value!r} for the option "
            f"{name}: expected {expected.__name__}"
        )
        self._values[name] = value

    def createOrSet(self, **values: Any) -> None:
        """Change options, and create the options that do not exist yet."""
        self.checkIsFrozen()
        with self._checked():
            for name, value in values.items():
                if name in self._values:
                    self._change(name, value)
                else:
                    self._values[name] = value

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, and the options without a default."""
        defaults = self._default_values()
        return {
            name: value
            for name, value in self._values.items()
            if name not in defaults or value != defaults[name]
        }

    def _default_values(self) -> dict[str, Any]:
        """Return the options' default values, or an empty dict for old versions' objects."""
        return cast(dict[str, Any], self.__dict__.get("_defaults", {}))

    def exists(self, name: str) -> bool:
        """Tell whether an option with the given name exists."""
        return name in self._values

    def deleteIfExists(self, name: str) -> None:
        """Delete the option with the given name, if it exists."""
        self.checkIsFrozen()
        self._values.pop(name, None)

    def __call__(self, name: str) -> Any:
        """Return the value of the option ``name``.

        Raises:
            AssertionError: The option does not exist.
        """
        assert name in self._values, (
            f"Invalid option {name}: valid options are {', '.join(sorted(self._values))}"
        )
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        fixed = printed.fixed_fields(type(self).__name__)
        if name in fixed:
            return fixed[name]
        old = old_spellings.find(self._place, name)
        if old is not None:
            return old_spellings.attribute(old, self)
        raise AttributeError(
            f"Invalid attribute {name!r} of {type(self).__name__}: valid options are "
            f"{', '.join(sorted(values))}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        old = old_spellings.find(self._place, name)
        if old is not None and old.new:
            name = old_spellings.current_name(old)
        if name in self.__dict__:
            self.checkIsFrozen(name)
            object.__setattr__(self, name, value)
        elif name.startswith("_") and name not in self._values:
            raise AttributeError(
                f"Invalid private attribute {name!r}: {type(self).__name__} accepts no new "
                "private attributes"
            )
        else:
            self.checkIsFrozen()
            with self._checked():
                self._change(name, value)

    def _declare(self, **attributes: Any) -> None:
        """Set private attributes and groups of options, which only a constructor may do."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    # -- Freezing and copying of options ------------------------------------------------------

    def checkIsFrozen(self, option: str | None = None) -> None:
        """Check that the options are not frozen, so that the program may still change them.

        Args:
            option: The name of the option that is about to change.

        Raises:
            AttributeError: The options are frozen, because a data loader or a model uses them.
        """
        if self._is_frozen and option != "_is_frozen":
            raise AttributeError(
                "Can't modify frozen Options: a data loader or a model already uses this "
                f"{type(self).__name__}. Copy the options with clone(), change the copy, and make "
                "a new data loader or model with the copy"
            )

    def _groups(self) -> dict[str, OptionStore]:
        """Return the groups of options that the object contains, by attribute name."""
        return {n: value for n, value in self.__dict__.items() if isinstance(value, OptionStore)}

    def _freeze(self) -> None:
        self._mark_frozen(True)

    def _unfreeze(self) -> None:
        self._mark_frozen(False)

    def _mark_frozen(self, frozen: bool) -> None:
        object.__setattr__(self, "_is_frozen", frozen)
        for group in self._groups().values():
            group._mark_frozen(frozen)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __deepcopy__(self: Store, memo: dict[int, Any]) -> Store:
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        for name, value in self.__dict__.items():
            object.__setattr__(duplicate, name, copy.deepcopy(value, memo))
        object.__setattr__(duplicate, "_is_frozen", False)
        return duplicate

    def toDict(self) -> dict[str, Any]:
        """Return the option values of the object, without the values of its groups."""
        return dict(self._values)

    def _description(self) -> tuple[Any, ...]:
        """Return all option values of the object and its groups, for comparisons."""
        groups = [(name, group._description()) for name, group in self._groups().items()]
        return (type(self).__name__, sorted(self._values.items()), sorted(groups))

    def __repr__(self) -> str:
        return printed.options_text(self)


def check_count(setter: str, given: int) -> None:
    """Check that the value of an option is at least 1.

    Args:
        setter: The name of the option's setter, for the error message.
        given: The option value to check.

    Raises:
        AssertionError: The value of the option is below 1.
    """
    assert given >= 1, f"{setter}({given}) is too small: expected 1 or more"


def check_type(setter: str, value: Any, expected: Any) -> None:
    """Check the type of an option's value, for an option without a default.

    Args:
        setter: The name of the option's setter, for the error message.
        value: The option value to check.
        expected: The accepted type, or a union of types.

    Raises:
        AssertionError: The value of the option has another type.
    """
    assert isinstance(value, expected), (
        f"Unexpected type {type(value).__name__} of the argument in {setter}({value!r}): expected "
        f"{getattr(expected, '__name__', expected)}"
    )
