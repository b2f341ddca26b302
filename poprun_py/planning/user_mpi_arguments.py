"""The user's MPI arguments, split into words for mpirun and for each instance.

The functions here only compute values. mpi_commands.py writes the words into the mpirun command.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from poprun_py.errors import UsageError
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_origins import Origin

_OUTPUT_FILENAME = "output-filename"


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiArguments:
    """The words of --mpi-global-args, --mpi-local-args and --instance-mpi-local-args.

    ``of_instance`` maps the indices of instances to the words for these instances only.
    """

    for_mpirun: tuple[str, ...] = ()
    of_every_instance: tuple[str, ...] = ()
    of_instance: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def local(self, index: int) -> tuple[str, ...]:
        """Return the user's MPI arguments for one instance."""
        return (*self.of_every_instance, *self.of_instance.get(index, ()))

    def variables(self, index: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that the MPI arguments for one instance set."""
        return variables_set_by(self.local(index), environ)

    def names_for_any(self, environ: Mapping[str, str]) -> frozenset[str]:
        """Return the names of all variables that MPI arguments set for at least one instance."""
        words = (self.of_every_instance, *self.of_instance.values())
        return frozenset(name for each in words for name in variables_set_by(each, environ))


def split_mpi_arguments(config: LaunchConfig) -> tuple[LaunchConfig, MpiArguments]:
    """Split the MPI arguments of ``config`` into words.

    The output of the instances does not pass through mpirun, so Open MPI's argument
    ``--output-filename DIR`` would not have an effect. The argument is removed, and DIR becomes the
    value of the option ``--output-dir`` unless the user gave that option.

    Returns:
        A pair of the options, with the folder of ``--output-filename`` as ``output_dir``, and the
        words without ``--output-filename``.

    Raises:
        UsageError: A quotation mark is missing, or an argument is for an instance that does not
            exist.
    """
    folder, by_option = None, []
    for text in config.mpi_global_args:
        words, named = _without_output_filename(split_args(text, config.named("mpi_global_args")))
        by_option.append(words)
        folder = named if named is not None else folder
    arguments = MpiArguments(
        for_mpirun=tuple(word for words in by_option for word in words),
        of_every_instance=tuple(
            word
            for text in config.mpi_local_args
            for word in split_args(text, config.named("mpi_local_args"))
        ),
        of_instance=_by_instance(config),
    )
    if folder is None:
        return config, arguments
    origin = Origin(config.origin("mpi_global_args").source, "--output-filename")
    config = replace(
        config,
        mpi_global_args=tuple(map(shlex.join, by_option)),
        output_dir=config.output_dir or folder,
        origins=config.origins if config.output_dir else {**config.origins, "output_dir": origin},
    )
    return config, arguments


def split_args(text: str, option: str) -> tuple[str, ...]:
    """Split a string of arguments into words, as a shell would.

    Raises:
        UsageError: A quotation mark is missing in the value of the option ``option``.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"{option} {text!r}: {str(error).lower()}; expected arguments quoted as in a shell"
        ) from None


def _without_output_filename(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Return a pair of the words without ``--output-filename FOLDER`` and the last FOLDER."""
    rest, others, folder = list(words), [], None
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        is_option = name.startswith("-") and name.lstrip("-") == _OUTPUT_FILENAME
        if is_option and (equals or rest):
            folder = (value if equals else rest.pop(0)).partition(":")[0]
        else:
            others.append(word)
    return others, folder


def _by_instance(config: LaunchConfig) -> dict[int, tuple[str, ...]]:
    """Return the words of --instance-mpi-local-args, with the indices of instances as keys."""
    option = config.named("instance_mpi_local_args")
    by_instance: dict[int, tuple[str, ...]] = {}
    for entry in config.instance_mpi_local_args:
        index, colon, text = entry.partition(":")
        if not colon or not index.isascii() or not index.isdigit() or len(index) > 9:
            raise UsageError(f'{option} {entry!r}: expected INDEX:"ARGS"')
        if int(index) >= config.num_instances:
            raise UsageError(
                f"{option} {entry!r}: expected an index from 0 to {config.num_instances - 1}"
            )
        words = split_args(text, option)
        by_instance[int(index)] = (*by_instance.get(int(index), ()), *words)
    return by_instance


def variables_set_by(local_args: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``-x NAME=VALUE`` and ``-x NAME`` arguments set, with their values.

    For ``-x NAME``, the value is that of NAME in ``environ``. A NAME that is not set in ``environ``
    is left out. If a variable is given twice, its first value counts, as in Open MPI.
    """
    variables: dict[str, str] = {}
    for option, argument in pairwise(local_args):
        name, equals, value = argument.partition("=")
        if option in {"-x", "--x"} and (equals or name in environ):
            variables.setdefault(name, value if equals else environ[name])
    return variables
