"""The choice of the emulated IPU, and of the reaction to a model that is too large for its memory.

The program, the launcher and environment variables can each name an IPU. The module
``device_choice`` decides which of the named IPUs is emulated. The module ``device_choice`` does not
compute the memory and the time that a model needs on the IPU. Callers of the class method
``DeviceEnvironment.of`` pass ``os.environ`` and ``sys.modules`` as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final, Literal, TypeAlias, cast, get_args

from popdist_py.environment import IPU_MEMORY, IPU_MODEL, SDK_COMMAND
from popdist_py.ipu.specification import BOW, IPU, IPUS, MK1, MK2

__all__ = [
    "ASSUMED_IPU",
    "DeviceEnvironment",
    "MemoryMode",
    "has_sdk_names",
    "ipu_of",
    "mode_of",
    "offline_ipu",
]

MemoryMode: TypeAlias = Literal["enforce", "warn", "off"]

# If the user does not name an IPU, the memory that a model needs is compared with the memory of
# ``ASSUMED_IPU``. Programs that import the SDK's package names, such as ``poptorch``, emulate
# ``ASSUMED_IPU`` by default.
ASSUMED_IPU: Final = MK2
# The type of IPU for each version number that ``Options.useOfflineIpuTarget`` accepts.
_OFFLINE_TARGETS: Final[Mapping[int, IPU]] = {1: MK1, 2: MK2, 21: BOW}

# The names of PopTorch's environment variables for the software model of an IPU. One environment
# variable switches the software model of an IPU on, and the other chooses the version of the IPU.
_USES_MODEL: Final = "POPTORCH_IPU_MODEL"
_MODEL_VERSION: Final = "POPTORCH_IPU_MODEL_VERSION"
_VERSIONS: Final[Mapping[str, IPU]] = {f"ipu{n}": ipu for n, ipu in _OFFLINE_TARGETS.items()}

# The SDK's names for PopTorch, and the folder of this library that contains packages of these
# names.
_SDK_NAMES: Final = ("poptorch", "popdist.poptorch")
_SDK_FOLDER: Final = Path(__file__).parents[2] / "sdk_names"


def ipu_of(call: str, given: object) -> IPU:
    """Return the IPU with a given name, or the given :class:`IPU` itself.

    Args:
        call: The text of the setter call that received ``given``, for the error message.
        given: The name of an IPU, or an :class:`IPU`.

    Raises:
        ValueError: ``given`` is neither an :class:`IPU` nor the name of an IPU.
    """
    if isinstance(given, IPU):
        return given
    if not isinstance(given, str) or given not in IPUS:
        raise ValueError(
            f"{call} names an unknown IPU: expected {_one_of(IPUS)}, or a "
            "popdist_py.ipu.specification.IPU"
        )
    return IPUS[given]


def offline_ipu(version: int) -> IPU:
    """Return the IPU with a version number of ``Options.useOfflineIpuTarget``.

    Raises:
        ValueError: ``version`` is not one of the accepted version numbers (1, 2 and 21).
    """
    if version not in _OFFLINE_TARGETS:
        raise ValueError(
            f"useOfflineIpuTarget({version}) names an unknown IPU version: expected one of "
            f"{tuple(_OFFLINE_TARGETS)}"
        )
    return _OFFLINE_TARGETS[version]


def mode_of(call: str, given: object) -> MemoryMode:
    """Return the given memory mode (``enforce``, ``warn`` or ``off``), if its name is valid.

    Args:
        call: The text of the setter call or environment variable that contains ``given``, for the
            error message.
        given: The memory mode to check.

    Raises:
        ValueError: ``given`` is not one of the memory modes.
    """
    if given not in get_args(MemoryMode):
        raise ValueError(
            f"{call} is not a mode of the memory check: expected {_one_of(get_args(MemoryMode))}"
        )
    return cast(MemoryMode, given)


def has_sdk_names(modules: Mapping[str, ModuleType]) -> bool:
    """Tell whether a program has imported this library as ``poptorch`` or ``popdist.poptorch``.

    Args:
        modules: The modules that the program has imported, as in ``sys.modules``.
    """
    files = (getattr(modules.get(name), "__file__", None) for name in _SDK_NAMES)
    return any(file is not None and _SDK_FOLDER in Path(file).parents for file in files)


@dataclass(frozen=True, slots=True)
class DeviceEnvironment:
    """Settings of the emulated device from environment variables; the program can override them.

    Attributes:
        ipu: The IPU that the environment variable ``POPDIST_IPU`` names. The launcher's option
            ``--ipu-model`` sets ``POPDIST_IPU``.
        uses_model: Whether ``POPTORCH_IPU_MODEL`` switches on the software model of an IPU.
        model: The IPU of PopTorch's software model, from ``POPTORCH_IPU_MODEL_VERSION``; by default
            an Mk2.
        memory: The memory mode (``enforce``, ``warn`` or ``off``) in ``POPDIST_IPU_MEMORY``.
        is_sdk_program: Whether the program imports the SDK's package names and was started by
            ``poprun`` or ``python -m popdist_py``. If ``is_sdk_program`` is True, the program
            emulates an Mk2 by default.
    """

    ipu: IPU | None = None
    uses_model: bool = False
    model: IPU = ASSUMED_IPU
    memory: MemoryMode | None = None
    is_sdk_program: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str], modules: Mapping[str, ModuleType]) -> DeviceEnvironment:
        """Read the settings of the emulated device from environment variables.

        An empty environment variable counts as not set.

        Args:
            environ: The environment variables, as in ``os.environ``.
            modules: The modules that the program has imported, as in ``sys.modules``.

        Raises:
            ValueError: An environment variable for the device has an unknown value.
        """
        ipu, memory = environ.get(IPU_MODEL), environ.get(IPU_MEMORY)
        version = environ.get(_MODEL_VERSION) or "ipu2"
        if version not in _VERSIONS:
            raise ValueError(
                f"{_MODEL_VERSION}={version} names an unknown IPU version: expected "
                f"{_one_of(_VERSIONS)}"
            )
        if ipu and ipu not in IPUS:
            raise ValueError(f"{IPU_MODEL}={ipu} names an unknown IPU: expected {_one_of(IPUS)}")
        return cls(
            ipu=IPUS[ipu] if ipu else None,
            uses_model=environ.get(_USES_MODEL, "") not in ("", "0"),
            model=_VERSIONS[version],
            memory=mode_of(f"{IPU_MEMORY}={memory}", memory) if memory else None,
            is_sdk_program=environ.get(SDK_COMMAND) == "1" and has_sdk_names(modules),
        )

    def named(self, *, uses_model: bool | None) -> IPU | None:
        """Return the IPU for a program that does not call the setter ``Options.Emulator.device``.

        ``named`` returns None if environment variables and the launcher do not name an IPU either.

        Args:
            uses_model: The argument of ``Options.useIpuModel``, or None if it was not called.
        """
        if self.ipu is not None:
            return self.ipu
        wanted = self.uses_model if uses_model is None else uses_model
        if wanted:
            return self.model
        return ASSUMED_IPU if self.is_sdk_program else None


def _one_of(words: Mapping[str, object] | tuple[str, ...]) -> str:
    *others, last = map(repr, words)
    return f"{', '.join(others)} or {last}"
