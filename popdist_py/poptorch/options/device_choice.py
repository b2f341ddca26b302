"""Which IPU's memory and time a program has, and what happens if the memory is too small.

The rules between program, launcher and environment, as values. The module does not call the model
of the device, and gets ``os.environ`` and ``sys.modules`` as arguments.
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
    "OFFLINE_TARGETS",
    "DeviceEnvironment",
    "MemoryMode",
    "has_sdk_names",
    "ipu_of",
    "mode_of",
]

MemoryMode: TypeAlias = Literal["enforce", "warn", "off"]

# The IPU whose memory is checked if no device is named, and the device of programs of the SDK.
ASSUMED_IPU: Final = MK2
# By the numbers of ``Options.useOfflineIpuTarget``.
OFFLINE_TARGETS: Final[Mapping[int, IPU]] = {1: MK1, 2: MK2, 21: BOW}

# PopTorch's own variables: whether the software model of a device is used, and which.
_USES_MODEL: Final = "POPTORCH_IPU_MODEL"
_MODEL_VERSION: Final = "POPTORCH_IPU_MODEL_VERSION"
_VERSIONS: Final[Mapping[str, IPU]] = {f"ipu{n}": ipu for n, ipu in OFFLINE_TARGETS.items()}

# The SDK's names for PopTorch, and our folder with packages of these names.
_SDK_NAMES: Final = ("poptorch", "popdist.poptorch")
_SDK_FOLDER: Final = Path(__file__).parents[2] / "sdk_names"


def ipu_of(call: str, given: object) -> IPU:
    """Return the IPU that a name or a value stands for.

    Args:
        call: how it was given, for the message.
        given: the name of an IPU, or an :class:`IPU`.

    Raises:
        ValueError: neither.
    """
    if isinstance(given, IPU):
        return given
    if not isinstance(given, str) or given not in IPUS:
        raise ValueError(f"{call}: expected {_one_of(IPUS)}, or a popdist_py.ipu IPU")
    return IPUS[given]


def mode_of(call: str, given: object) -> MemoryMode:
    """Return what is done about a model that does not fit.

    Raises:
        ValueError: not one of the modes.
    """
    if given not in get_args(MemoryMode):
        raise ValueError(f"{call}: expected {_one_of(get_args(MemoryMode))}")
    return cast(MemoryMode, given)


def has_sdk_names(modules: Mapping[str, ModuleType]) -> bool:
    """Tell whether a program has imported this PopTorch by one of the SDK's names.

    Args:
        modules: the modules of the program, as in ``sys.modules``.
    """
    files = (getattr(modules.get(name), "__file__", None) for name in _SDK_NAMES)
    return any(file is not None and _SDK_FOLDER in Path(file).parents for file in files)


@dataclass(frozen=True, slots=True)
class DeviceEnvironment:
    """What variables say of the device; a program's own words win over them.

    Attributes:
        ipu: of ``POPDIST_IPU``, which the launcher's ``--ipu-model`` sets.
        uses_model: whether ``POPTORCH_IPU_MODEL`` is set.
        model: which one that is: ``POPTORCH_IPU_MODEL_VERSION``, Mk2 if it is not set.
        memory: of ``POPDIST_IPU_MEMORY``.
        is_sdk_program: whether ``poprun`` or ``python -m popdist_py`` started the program and it
            imports the SDK's names, so that it runs as on hardware.
    """

    ipu: IPU | None = None
    uses_model: bool = False
    model: IPU = ASSUMED_IPU
    memory: MemoryMode | None = None
    is_sdk_program: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str], modules: Mapping[str, ModuleType]) -> DeviceEnvironment:
        """Read the variables; an empty one counts as unset.

        Args:
            environ: the variables.
            modules: the modules of the program, as in ``sys.modules``.

        Raises:
            ValueError: a value that is not known.
        """
        ipu, memory = environ.get(IPU_MODEL), environ.get(IPU_MEMORY)
        version = environ.get(_MODEL_VERSION) or "ipu2"
        if version not in _VERSIONS:
            raise ValueError(f"{_MODEL_VERSION}={version}: expected {_one_of(_VERSIONS)}")
        if ipu and ipu not in IPUS:
            raise ValueError(f"{IPU_MODEL}={ipu}: expected {_one_of(IPUS)}")
        return cls(
            ipu=IPUS[ipu] if ipu else None,
            uses_model=environ.get(_USES_MODEL, "") not in ("", "0"),
            model=_VERSIONS[version],
            memory=mode_of(f"{IPU_MEMORY}={memory}", memory) if memory else None,
            is_sdk_program=environ.get(SDK_COMMAND) == "1" and has_sdk_names(modules),
        )

    def named(self, *, uses_model: bool | None) -> IPU | None:
        """Return the IPU that is named where the program does not name one by itself.

        Args:
            uses_model: what ``Options.useIpuModel`` says; None if it was not called.
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
