"""A set of named option values: typed, readable as attributes, freezable.

The rules that all groups of options share; which options exist is said in ``options.py`` and
``groups.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, cast

from popdist_py.poptorch import old_spellings
from popdist_py.poptorch.options import printed

__all__ = ["OptionStore", "check_count"]

Store = TypeVar("Store", bound="OptionStore")


class OptionStore:
    """Named values with PopTorch's rules for setting and freezing them."""

    # As the table of old spellings calls this kind of options.
    _place: ClassVar[str] = ""

    def __init__(self, **defaults: Any) -> None:
        object.__setattr__(self, "_values", defaults)
        object.__setattr__(self, "_defaults", copy.deepcopy(defaults))
        object.__setattr__(self, "_is_frozen", False)

    # -- values -------------------------------------------------------------------------------

    def set(self, **values: Any) -> None:
        """Change existing options: all that are given or, where one is refused, none.

        Raises:
            AttributeError: the options are frozen.
            AssertionError: an unknown name, a value of another type than the present one, or one
                that the option does not take.
            ValueError: options that do not fit one another.
        """
        self.checkIsFrozen()
        with self._checked():
            for name, value in values.items():
                self._change(name, value)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Check the values after they were changed; leave them as they were if they are refused."""
        before = dict(self._values)
        try:
            yield
            self._check()
        except BaseException:
            self._values.clear()
            self._values.update(before)
            raise

    def _check(self) -> None:
        """Check that the values are allowed and fit one another, if a kind of options has rules."""

    def _change(self, name: str, value: Any) -> None:
        """Change one existing option, whose type stays."""
        assert name in self._values, (
            f"Invalid option {name}: valid options are {', '.join(sorted(self._values))}"
        )
        expected = type(self._values[name])
        assert isinstance(value, expected), (
            f"Unexpected type {type(value)} for option {name}. Expected {expected}"
        )
        self._values[name] = value

    def createOrSet(self, **values: Any) -> None:
        """Change options, making those that do not exist yet."""
        self.checkIsFrozen()
        with self._checked():
            for name, value in values.items():
                if name in self._values:
                    self._change(name, value)
                else:
                    self._values[name] = value

    def changed(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, or have none."""
        defaults = self._default_values()
        return {
            name: value
            for name, value in self._values.items()
            if name not in defaults or value != defaults[name]
        }

    def _default_values(self) -> dict[str, Any]:
        """Return the default values; empty for objects that older versions saved."""
        return cast(dict[str, Any], self.__dict__.get("_defaults", {}))

    def exists(self, name: str) -> bool:
        """Tell whether an option of this name has a value."""
        return name in self._values

    def deleteIfExists(self, name: str) -> None:
        """Forget the option of this name, if there is one."""
        self.checkIsFrozen()
        self._values.pop(name, None)

    def __call__(self, name: str) -> Any:
        """Return the value of the option ``name``.

        Raises:
            AssertionError: there is no such option.
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
        """Give the object its private attributes and groups, in a constructor."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    # -- freezing and copying -----------------------------------------------------------------

    def checkIsFrozen(self, option: str | None = None) -> None:
        """Do nothing unless the options are frozen.

        Raises:
            AttributeError: the options are frozen.
        """
        if self._is_frozen and option != "_is_frozen":
            raise AttributeError(
                f"Can't modify frozen Options: a data loader or a model uses this "
                f"{type(self).__name__} already; change a clone() of it and make a new one"
            )

    def _groups(self) -> dict[str, OptionStore]:
        """Return the stores that are part of this one, by attribute."""
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
        """Return the values of this object, without those of its groups."""
        return dict(self._values)

    def _description(self) -> tuple[Any, ...]:
        """Return all values, those of the groups included: equal for options that are set alike."""
        groups = [(name, group._description()) for name, group in self._groups().items()]
        return (type(self).__name__, sorted(self._values.items()), sorted(groups))

    def __repr__(self) -> str:
        return printed.options_text(self)


def check_count(setter: str, given: int) -> None:
    """Check the value of an option that counts.

    Raises:
        AssertionError: it is below 1.
    """
    assert given >= 1, f"{setter}({given}): expected 1 or more"
