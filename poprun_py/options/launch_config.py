"""LaunchConfig, which holds the program and the checked options of a launch.

``declared_options.py`` declares the options. This module does not read environment variables, and
only ``from_file`` reads a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fsdecode, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from popdist_py.device_numbers import LINK_DOMAIN_IPUS
from popdist_py.errors import counted
from poprun_py.display.public_values import Displayed
from poprun_py.errors import UsageError, explain_os_error
from poprun_py.options.config_files import parse_config
from poprun_py.options.declared_options import EXCLUSIVE, MAX_IPUS, OPTIONS, DeclaredOptions
from poprun_py.options.option_origins import Origin, Source, from_python
from poprun_py.options.option_types import METRICS_PATHS, is_word
from poprun_py.options.python_keywords import from_keywords
from poprun_py.options.run_labels import read_tags

if TYPE_CHECKING:
    from typing import Unpack

    from poprun_py.options.keyword_types import LaunchOptions, Word

# With these values of --print-topology, the launcher writes a whole svg or html file to standard
# output, which must not contain other text.
_TOPOLOGY_FILES = ("svg", "html")
_MOST_SUGGESTED = 4


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchConfig(DeclaredOptions, Displayed):
    """The program and the options of a launch.

    ``program`` may start with ``-m`` and the name of a Python module. If ``num_replicas`` is not
    given, it equals ``num_instances``. With ``nproc_per_node``, the numbers of instances and
    replicas are unknown until ``on_hosts`` is called with the number of hosts. ``origins`` maps
    each option to the place where its value was given.

    Raises:
        UsageError: A value is not accepted, or values contradict one another.
    """

    program: tuple[str, ...] = field(default=())
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name, opt in OPTIONS.items():
            value = getattr(self, name)
            if value is not None or opt.default is not None:
                object.__setattr__(self, name, opt.check(self.named(name), value))
        # A string is rejected as ``program``, because ``program`` must be a list of words.
        words = self.program if isinstance(self.program, list | tuple) else [None]
        words = tuple(fspath(w) if isinstance(w, PathLike) else w for w in words)
        if not all(map(is_word, words)):
            raise UsageError(
                f"program is {self.program!r}: expected a list with the program and its arguments, "
                "which are texts without NUL characters"
            )
        object.__setattr__(self, "program", words)
        self._check_combinations()
        if self.nproc_per_node is None:
            replicas: int | None = self.num_replicas
            if replicas is None:
                object.__setattr__(self, "num_replicas", self.num_instances)
            self._check_counts()

    @classmethod
    def from_file(
        cls,
        path: str | PathLike[str],
        *,
        program: Sequence[Word] | None = None,
        **options: Unpack[LaunchOptions],
    ) -> LaunchConfig:
        """Return the configuration in a TOML or JSON file, as --import-config reads it.

        The arguments of ``from_file`` take precedence over the values in the file.

        Raises:
            UsageError: The file cannot be read, or a value is not accepted.
        """
        if not isinstance(path, str | bytes | PathLike) or "\0" in fsdecode(path):
            raise UsageError(f"{path!r}: expected the path of a .toml or .json file")
        name = fsdecode(path)
        try:
            text = Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{name}: the file is not UTF-8 text ({error.reason})") from None
        except OSError as error:
            raise UsageError(explain_os_error(error, "the configuration cannot be read")) from None
        return merged_config(parse_config(text, name), from_keywords(options, program))

    def replace(
        self, *, program: Sequence[Word] | None = None, **options: Unpack[LaunchOptions]
    ) -> LaunchConfig:
        """Return a copy of this configuration with other values; None restores an option's default.

        If a new option and an old option exclude each other, the old option is removed. If the
        number of replicas was not given, it changes with the number of instances.

        Raises:
            UsageError: A value is not accepted, or values contradict one another.
        """
        return changed_config(self, options, program)

    def __repr__(self) -> str:
        # Logs may contain the repr of a LaunchConfig, so secret option values are hidden here.
        shown = [f"program={self.program!r}"] if self.program else []
        for name, opt in OPTIONS.items():
            value = getattr(self, name)
            if value not in (opt.default, self._default(name)):
                shown.append(f"{name}={'...' if opt.secret else repr(value)}")
        return f"LaunchConfig({', '.join(shown)})"

    # --- origins of values --------------------------------------------------------------------

    def _default(self, name: str) -> Any:
        return self.num_instances if name == "num_replicas" else OPTIONS[name].default

    def is_given(self, name: str) -> bool:
        """Tell whether an option has an origin, or a value other than its default."""
        value = getattr(self, name)
        return name in self.origins or value not in (self._default(name), OPTIONS[name].default)

    def origin(self, name: str) -> Origin:
        """Return the origin of an option's value: its recorded origin, else Python or a default."""
        if name in self.origins:
            return self.origins[name]
        if self.is_given(name):
            return from_python(name)
        reason = "as many as instances" if name == "num_replicas" else "the default"
        return Origin("default", name.replace("_", "-"), " = ", f" ({reason})")

    def named(self, name: str) -> str:
        """Return an option's name as it was written, such as ``--host`` or ``POPRUN_HOST``."""
        return self.origin(name).named

    def shown(self, name: str) -> str:
        """Return an option and its value as the user wrote them: ``POPRUN_NUM_INSTANCES=2``."""
        value = getattr(self, name)
        if isinstance(value, bool):
            value = "yes" if value else "no"
        return self.origin(name).shown(value)

    def on_hosts(self, num_hosts: int, cpus: int = 1) -> LaunchConfig:
        """Return the configuration with ``num_instances`` in place of ``nproc_per_node``.

        Args:
            num_hosts: The number of hosts.
            cpus: The number of CPUs of a host, for ``nproc_per_node="auto"``.

        Raises:
            UsageError: The numbers of instances, replicas and IPUs contradict one another.
        """
        if self.nproc_per_node is None:
            return self
        share = self.nproc_per_node if isinstance(self.nproc_per_node, int) else cpus
        given = self.origin("nproc_per_node").shown(self.nproc_per_node)
        means = "" if share == self.nproc_per_node else f" ({counted(share, 'CPU')})"
        hosts = f" x {num_hosts} hosts" if num_hosts > 1 else ""
        return replace(
            self,
            num_instances=share * num_hosts,
            nproc_per_node=None,
            origins={
                **{name: o for name, o in self.origins.items() if name != "nproc_per_node"},
                "num_instances": Origin(
                    self.origin("nproc_per_node").source, given + means + hosts, " = ", " instances"
                ),
            },
        )

    @property
    def prints_file(self) -> bool:
        """Whether --print-topology prints a whole svg or html file instead of starting a job."""
        return self.print_topology in _TOPOLOGY_FILES

    # --- checks of values ---------------------------------------------------------------------

    def _check_counts(self) -> None:
        instances, replicas = self.num_instances, self.num_replicas
        if replicas % instances:
            divisors = [n for n in range(1, min(replicas, 4096) + 1) if replicas % n == 0]
            nearby = sorted(sorted(divisors, key=lambda n: abs(n - instances))[:4])
            raise UsageError(
                f"{self.shown('num_replicas')} cannot be split evenly over "
                f"{self.shown('num_instances')} ({replicas} / {instances} = "
                f"{replicas / instances:.3g}): expected a number of instances that divides "
                f"{replicas}, such as {', '.join(map(str, nearby))}"
            )
        width = self.ipus_per_replica
        if width & (width - 1):
            raise UsageError(
                f"{self.shown('ipus_per_replica')}: expected a power of two (1, 2, 4, 8, ...), "
                "because IPUs are allocated in groups of these sizes"
            )
        if replicas * width > MAX_IPUS:
            raise UsageError(
                f"{self.shown('num_replicas')} x {self.shown('ipus_per_replica')} = "
                f"{replicas * width} IPUs: expected at most {MAX_IPUS} IPUs"
            )
        if self.num_ilds is not None:
            self._check_link_domains(self.num_ilds, replicas * width)
        for name in ("only_output_from_instance", "stdin_instance"):
            given = getattr(self, name)
            last = max(given or (0,)) if isinstance(given, tuple) else given or 0
            if last >= instances:
                raise UsageError(
                    f"{self.origin(name).shown(last)}: expected an index of an instance "
                    f"from 0 to {instances - 1} ({self.shown('num_instances')})"
                )

    def _check_link_domains(self, num_ilds: int, num_ipus: int) -> None:
        if self.num_instances % num_ilds:
            raise UsageError(
                f"{self.shown('num_instances')} cannot be split evenly over "
                f"{self.shown('num_ilds')}: expected a number of instances that is a multiple of "
                f"{num_ilds}, because each IPU-Link domain has the same number of instances"
            )
        if num_ipus > num_ilds * LINK_DOMAIN_IPUS:
            fitting = _sufficient_link_domains(self.num_instances, num_ipus)
            least = -(-num_ipus // LINK_DOMAIN_IPUS)
            expected = (
                f"expected {' or '.join(map(str, fitting))} domains, a number that divides "
                f"{self.shown('num_instances')}"
                if fitting
                else f"expected {least} or more domains, and a multiple of that number of instances"
            )
            raise UsageError(
                f"{self.shown('num_ilds')} puts {num_ipus // num_ilds} of {num_ipus} IPUs into "
                f"each IPU-Link domain, but a domain has at most {LINK_DOMAIN_IPUS} IPUs:"
                f" {expected}"
            )

    def _check_combinations(self) -> None:
        for one, other in EXCLUSIVE:
            if other == "share_cores" and self.share_cores == "no":
                continue  # A job that does not share cores may wait for free cores.
            if self.is_given(one) and self.is_given(other):
                raise UsageError(
                    f"{self.named(one)} and {self.named(other)} cannot be used together: give one "
                    "of them"
                )
        for tool, place in METRICS_PATHS.items():
            if self.output_dir is None and tool in self.metrics_to:
                raise UsageError(
                    f"{self.origin('metrics_to').shown(tool)}: the run has no folder for the "
                    f"metrics: give {tool}:{place}, or --output-dir"
                )
        read_tags(self.tag, self.named("tag"))
        for other in ("run", "print_hardware"):
            if self.prints_file and self.is_given(other):
                raise UsageError(
                    f"{self.shown('print_topology')} and {self.named(other)} cannot be used"
                    " together, "
                    "because standard output then contains only a picture: give one of them"
                )


def merged_config(*sources: Source) -> LaunchConfig:
    """Return a LaunchConfig from the option values of ``sources``; later sources take precedence.

    If several sources give a list for an option, only the last list is used. If two sources give
    options that exclude each other, only the option of the later source is kept.

    Raises:
        UsageError: A value is not accepted, or values contradict one another.
    """
    merged: Source = {}
    for source in sources:
        for pair in EXCLUSIVE:
            if not source.keys().isdisjoint(pair):
                merged = {name: given for name, given in merged.items() if name not in pair}
        merged |= source
    return LaunchConfig(
        **{name: value for name, (value, _) in merged.items()},
        origins={name: origin for name, (_, origin) in merged.items() if name in OPTIONS},
    )


def changed_config(
    config: LaunchConfig, keywords: Mapping[str, object], program: Sequence[object] | None = None
) -> LaunchConfig:
    """Return a copy of a configuration with other values, as ``LaunchConfig.replace`` does.

    Raises:
        UsageError: A keyword is unknown, a value is not accepted, or values contradict one another.
    """
    changed = {"host" if name == "hosts" else name for name in keywords}
    kept: Source = {
        name: (getattr(config, name), config.origin(name))
        for name in OPTIONS
        if config.is_given(name) and name not in changed
    }
    kept["program"] = config.program, from_python("program")
    return merged_config(kept, from_keywords(keywords, program))


def config_to_dict(config: LaunchConfig) -> dict[str, Any]:
    """Return the program and the options that were given, for configuration files and plans."""
    values: dict[str, Any] = {"program": config.program} if config.program else {}
    for name, opt in OPTIONS.items():
        if opt.saved and config.is_given(name):
            value = getattr(config, name)
            # If an option was given as None, it selects instances, and None means all instances.
            values[name] = "all" if value is None else value
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


# --- IPU-Link domains ---------------------------------------------------------------------------

# An IPU-Link domain is a rack with 64 IPUs. All IPUs of an instance are in one IPU-Link domain, and
# all domains have the same number of instances.


def fewest_link_domains(num_instances: int, num_ipus: int) -> int:
    """Return the smallest number of IPU-Link domains that the instances and IPUs fit into.

    An instance with more than 64 IPUs does not fit into an IPU-Link domain. If a job on CPU hosts
    has instances with more than 64 IPUs, each of its instances counts as one domain.
    """
    return next(iter(_sufficient_link_domains(num_instances, num_ipus)), num_instances)


def _sufficient_link_domains(num_instances: int, num_ipus: int) -> list[int]:
    """Return up to four possible numbers of IPU-Link domains, in ascending order.

    A number is possible if so many domains have enough IPUs, and the instances can be divided
    evenly among the domains.
    """
    least = -(-num_ipus // LINK_DOMAIN_IPUS)
    divisors = (n for n in range(least, num_instances + 1) if num_instances % n == 0)
    return list(itertools.islice(divisors, _MOST_SUGGESTED))
