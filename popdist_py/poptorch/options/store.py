"""The class OptionStore, a set of named option values that can be frozen.

This module contains the rules that all groups of options share. The class Options and the classes
of the groups define the options themselves.
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

    # -- values -------------------------------------------------------------------------------

    def set(self, **values: Any) -> None:
        """Change existing options. If one value is invalid, no option changes.

        Raises:
            AttributeError: The options are frozen.
            AssertionError: A name is unknown, a value has another type than the present value, or
                the option does not accept the value.
            ValueError: The values of several options do not fit together.
        """
        self.checkIsFrozen()
        with self._checked():
            for name, value in values.items():
                self._change(name, value)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Check the values after the ``with`` block, and restore the old values after an error."""
        before = dict(self._values)
        try:
            yield
            self._check()
        except BaseException:
            self._values.clear()
            self._values.update(before)
            raise

    def _check(self) -> None:
        """Check that the values are valid and fit together. Subclasses define the rules."""

    def _change(self, name: str, value: Any) -> None:
        """Set one existing option to a value of the same type."""
        assert name in self._values, (
            f"Invalid option {name}: valid options are {', '.join(sorted(self._values))}"
        )
        expected = type(self._values[name])
        assert isinstance(value, expected), (
            f"Unexpected type {type(value)} for option {name}. Expected {expected}"
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
        """Return the options whose values differ from their defaults, or that have no default."""
        defaults = self._default_values()
        return {
            name: value
            for name, value in self._values.items()
            if name not in defaults or value != defaults[name]
        }

    def _default_values(self) -> dict[str, Any]:
        """Return the default values, or an empty dictionary for objects that old versions saved."""
        return cast(dict[str, Any], self.__dict__.get("_defaults", {}))

    def exists(self, name: str) -> bool:
        """Tell whether an option with this name exists."""
        return name in self._values

    def deleteIfExists(self, name: str) -> None:
        """Delete the option with this name, if it exists."""
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
                f"Invalid private attribute {name!r}: {type(self).__name__} takes no new ones"
            )
        else:
            self.checkIsFrozen()
            with self._checked():
                self._change(name, value)

    def _declare(self, **attributes: Any) -> None:
        """Set private attributes and groups of options. Constructors call this method."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    # -- freezing and copying -----------------------------------------------------------------

    def checkIsFrozen(self, option: str | None = None) -> None:
        """Check that the options may be changed.

        Args:
            option: The name of the attribute that is about to change.

        Raises:
            AttributeError: The options are frozen, because a data loader or a model uses them.
        """
        if self._is_frozen and option != "_is_frozen":
            raise AttributeError(
                f"Can't modify frozen Options: a data loader or a model uses this "
                f"{type(self).__name__} already; change a clone() of it and make a new one"
            )

    def _groups(self) -> dict[str, OptionStore]:
        """Return the groups of options that this object contains, by attribute name."""
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
        """Return the values of this object, without the values of its groups."""
        return dict(self._values)

    def _description(self) -> tuple[Any, ...]:
        """Return all values of this object and its groups, for comparisons with other options."""
        groups = [(name, group._description()) for name, group in self._groups().items()]
        return (type(self).__name__, sorted(self._values.items()), sorted(groups))

    def __repr__(self) -> str:
        return printed.options_text(self)


def check_count(setter: str, given: int) -> None:
    """Check that the value of an option is at least 1.

    Args:
        setter: The name of the option's setter, for the error message.
        given: The value.

    Raises:
        AssertionError: The value is below 1.
    """
    assert given >= 1, f"{setter}({given}): expected 1 or more"


def check_type(setter: str, value: Any, expected: Any) -> None:
    """Check the type of a value, for an option without a default.

    Args:
        setter: The name of the option's setter, for the error message.
        value: The value.
        expected: The type, or a union of types.

    Raises:
        AssertionError: The value has another type.
    """
    assert isinstance(value, expected), (
        f"Unexpected type {type(value)} for {setter}({value!r}). Expected {expected}"
    )
