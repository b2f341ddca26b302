"""The conversion of the options of ``python -m popdist_py.ipu`` to a configuration of a run.

The module ``poptorch.on_ipu.command`` parses the command line. The module ``command`` passes the
options to the module ``run_from_command``, together with the graph of the user's model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from popdist_py.errors import counted
from popdist_py.ipu.graph import Graph, Placement, Type
from popdist_py.ipu.runs.model_graph import ModelGraph
from popdist_py.ipu.schedule import least_accumulation
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Location, Optimizer, OutputMode, Recompute, Settings, Strategy
from popdist_py.ipu.specification import IPUS

__all__ = ["OPTIMIZERS", "PRECISIONS", "STRATEGIES", "CommandOptions", "Sort", "run_from_command"]

Sort: TypeAlias = Literal["weights", "accumulators", "optimizer", "activations"]

# The types of activations and weights for each value of the option ``--precision``.
PRECISIONS: Final[Mapping[str, tuple[Type, Type]]] = MappingProxyType(
    {
        "16.16": ("float16", "float16"),
        "16.32": ("float16", "float32"),
        "32.32": ("float32", "float32"),
    }
)
# The moments that each optimiser stores for every element of a weight: 1 stands for a first-order
# moment, and 2 for a second-order moment.
OPTIMIZERS: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {
        "sgd": (),
        "momentum": (1,),
        "rmsprop": (2,),
        "adam": (1, 2),
        "adamw": (1, 2),
        "adamax": (1, 2),
        "lamb": (1, 2),
        "lars": (1,),
    }
)
STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {
        "grouped": "grouped",
        "interleaved": "interleaved",
        "sequential": "sequential",
        "sharded": "sharded",
        "serial-phased": "serial phased",
        "parallel-phased": "parallel phased",
    }
)
# For each phased execution strategy (which loads and runs parts of the model in turn), a function
# that returns the number of a phase's IPU. In serial phased execution, all phases run on IPU 0. In
# parallel phased execution, the phases alternate between two IPUs.
_IPU_OF_PHASE: Final[Mapping[str, Callable[[int], int]]] = MappingProxyType(
    {"serial-phased": lambda _: 0, "parallel-phased": lambda phase: phase % 2}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandOptions:
    """The options of ``python -m popdist_py.ipu`` that describe a run.

    The module ``poptorch.on_ipu.command`` parses the command line and sets the default of each
    option. An option with the default None gets a value that depends on other options.
    """

    inference: bool
    precision: str | None
    optimizer: str
    accum_type: Type
    first_order_momentum_accum_type: Type
    second_order_momentum_accum_type: Type
    accumulation: int | None
    device_iterations: int | None
    replicas: int
    split: Sequence[str]
    strategy: str
    recompute: Recompute
    checkpoint: Sequence[str]
    device: str
    io_tiles: int
    available_memory_proportion: Sequence[float]
    partials: Type
    matmul_partials: Type | None
    off_chip: Sequence[Sort]
    sharded: Sequence[Sort]
    output_mode: OutputMode | None
    synthetic_data: bool
    ipus: int | None


def run_from_command(model: ModelGraph, options: CommandOptions) -> Run:
    """Return the configuration of a run, from a model's graph and the options of the command line.

    Raises:
        ValueError: The graph does not contain a submodule that an option names, or options
            contradict each other.
    """
    graph = model.graph
    if options.precision is not None:
        data, weights = PRECISIONS[options.precision]
        graph = graph.cast(data=data, weights=weights)
    graph = _with_checkpoints(graph, options.checkpoint)
    placement = _placement(graph, options) if options.split else model.placement
    _check_proportions(options.available_memory_proportion, options.ipus or placement.num_ipus)
    last = placement.operations_of(graph, placement.num_stages - 1)
    accumulation, device_iterations = _micro_batches(options, options.ipus or placement.num_stages)
    ipu = IPUS[options.device]
    settings = Settings(
        is_training=not options.inference,
        strategy=STRATEGIES[options.strategy],
        accumulation=accumulation,
        device_iterations=device_iterations,
        replicas=options.replicas,
        optimizer=_optimizer(options),
        recompute=options.recompute,
        recomputes_last=any(operation.is_checkpoint for operation in last),
        weight_location=_location("weights", options),
        accumulator_location=_location("accumulators", options),
        optimizer_location=_location("optimizer", options),
        activation_location=_location("activations", options),
        partials=options.partials,
        matmul_partials=options.matmul_partials,
        memory_proportion=tuple(options.available_memory_proportion),
        io_tiles=options.io_tiles,
        output_mode=options.output_mode,
        synthetic_data=options.synthetic_data,
    )
    return Run(graph, placement, settings, ipu)


def _micro_batches(options: CommandOptions, stages: int) -> tuple[int, int]:
    """Return the number of accumulated micro-batches and the number of device iterations.

    If the command line does not give the number of micro-batches, a pipeline gets the smallest
    possible number.

    Raises:
        ValueError: An option sets fewer micro-batches than a pipeline needs, or gradient
            accumulation is above 1 for inference.
    """
    pipelined = STRATEGIES[options.strategy] in ("grouped", "interleaved")
    least = least_accumulation(stages, is_training=not options.inference) if pipelined else 1
    if options.inference:
        given, name = options.device_iterations, "--device-iterations"
    else:
        given, name = options.accumulation, "--accumulation"
    if given is not None and given < least:
        raise ValueError(
            f"{name} is {given}: expected at least {least} for a pipeline of {stages} stages"
        )
    filling = given or least
    if options.inference:
        if (options.accumulation or 1) > 1:
            raise ValueError(
                "--accumulation can only be used for training, because inference has no weight "
                "updates: omit --accumulation or --inference"
            )
        return 1, filling
    return filling, options.device_iterations or 1


def _optimizer(options: CommandOptions) -> Optimizer:
    types = {
        1: options.first_order_momentum_accum_type,
        2: options.second_order_momentum_accum_type,
    }
    state = tuple(types[order] for order in OPTIMIZERS[options.optimizer])
    return Optimizer(state=state, accumulator=options.accum_type)


def _location(sort: Sort, options: CommandOptions) -> Location:
    return Location(on_chip=sort not in options.off_chip, is_sharded=sort in options.sharded)


def _placement(graph: Graph, options: CommandOptions) -> Placement:
    parts = [word.partition("@") for word in options.split]
    starts = _stage_starts(graph, [module for module, _, _ in parts])
    ipu_of = _IPU_OF_PHASE.get(options.strategy)
    if ipu_of is None:
        ipus = _ipus_of_stages([(module, ipu if at else None) for module, at, ipu in parts])
    elif any(at for _, at, _ in parts):
        raise ValueError(
            f"--split cannot give an IPU with @, because --strategy {options.strategy} chooses the "
            "IPUs: give --split only the names of modules"
        )
    else:
        ipus = list(map(ipu_of, range(len(starts) + 1)))
    stages = (bisect_right(starts, index) for index in range(len(graph.operations)))
    return Placement(tuple(stages), tuple(ipus))


def _ipus_of_stages(given: Sequence[tuple[str, str | None]]) -> list[int]:
    """Return the IPU of each stage: the given one, or else the next IPU without a stage.

    Args:
        given: For each stage but the first, its module and the word behind ``@`` of ``--split``.

    Raises:
        ValueError: The word is not the number of the next IPU or of an IPU that has a stage, or two
            consecutive stages are on the same IPU.
    """
    ipus = [0]
    for module, word in given:
        following = max(ipus) + 1
        if word is None:
            ipus.append(following)
            continue
        allowed = [ipu for ipu in range(following + 1) if ipu != ipus[-1]]
        if word not in map(str, allowed):
            numbers = ", ".join(map(str, allowed))
            raise ValueError(
                f"--split gives {module}@{word}: the stage that begins with {module} cannot run on "
                f"IPU {word}; expected one of {numbers} after the @"
            )
        ipus.append(int(word))
    return ipus


def _stage_starts(graph: Graph, modules: Sequence[str]) -> list[int]:
    """Return the numbers of the operations with which the second and further stages begin.

    A stage begins where the forward pass enters its module. If the forward pass enters the module
    several times, the stage begins at the first entrance after the beginning of the stage before.

    Raises:
        ValueError: A module does not run, is given twice, or runs before the module of an earlier
            stage. Two modules begin with the same operation, or the first stage has no operation.
    """
    starts: list[int] = []
    for number, module in enumerate(modules):
        entrances = _entrances(graph, module)
        if module in modules[:number]:
            raise ValueError(f"--split gives the module {module} twice: give each module once")
        before = starts[-1] if starts else 0
        start = next((index for index in entrances if index > before), None)
        is_wrong = _contains(module, modules[number - 1]) if starts else entrances[0] == 0
        if start is None or is_wrong:
            raise ValueError(_split_problem(graph, modules, number, entrances[0], before))
        starts.append(start)
    return starts


def _split_problem(
    graph: Graph, modules: Sequence[str], number: int, first: int, before: int
) -> str:
    """Return the reason why the stage of ``modules[number]`` cannot begin.

    Args:
        graph: The graph of the model.
        modules: The modules with which stages begin, as the command line gives them.
        number: The index of the module whose stage cannot begin.
        first: The number of the module's first operation.
        before: The number of the first operation of the stage before.
    """
    module = modules[number]
    if not number:
        return (
            f"--split cannot contain {module}, because the model begins with this module, and the "
            f"first IPU would have no operations: remove {module} from --split"
        )
    earlier = modules[number - 1]
    if first == before:
        return (
            f"--split gives the modules {earlier} and {module}, which begin with the same "
            "operation: remove one of these modules"
        )
    entrance = {each: _entrances(graph, each)[0] for each in modules}
    ordered = sorted((each for each in modules if entrance[each]), key=entrance.__getitem__)
    return (
        f"--split gives {module} after {earlier}, but {module} runs before {earlier}: give the "
        f"modules in execution order, {','.join(ordered)}"
    )


def _entrances(graph: Graph, module: str) -> list[int]:
    """Return the numbers of the operations with which the forward pass enters a module.

    Raises:
        ValueError: The forward pass does not run the module.
    """
    _first_of(graph, module)
    own = [_contains(module, operation.name) for operation in graph.operations]
    return [i for i, is_own in enumerate(own) if is_own and not (i and own[i - 1])]


def _check_proportions(given: Sequence[float], ipus: int) -> None:
    if len(given) not in (1, ipus):
        raise ValueError(
            f"--available-memory-proportion gives {counted(len(given), 'number')} for "
            f"{counted(ipus, 'IPU')}: expected one number for all IPUs, or one number for each IPU"
        )


def _with_checkpoints(graph: Graph, modules: Sequence[str]) -> Graph:
    """Return a graph that keeps the output of each given submodule for the backward pass.

    The last operation of each submodule in ``modules`` becomes a recomputation checkpoint.
    """
    last: dict[str, str] = {}
    for module in modules:
        _first_of(graph, module)
        own = [o.name for o in graph.operations if _contains(module, o.name)]
        last[module] = own[-1]
    kept = set(last.values())
    return replace(
        graph,
        operations=tuple(
            replace(o, is_checkpoint=o.is_checkpoint or o.name in kept) for o in graph.operations
        ),
    )


def _contains(module: str, name: str) -> bool:
    """Return whether an operation or a submodule with this name belongs to the module."""
    return f"{name}.".startswith(f"{module}.")


def _first_of(graph: Graph, module: str) -> str:
    """Return the name of the first operation of a submodule.

    Raises:
        ValueError: The forward pass does not run the submodule. The message of the ValueError lists
            submodules with similar names.
    """
    for operation in graph.operations:
        if _contains(module, operation.name):
            return operation.name
    parts = [operation.name.split(".") for operation in graph.operations]
    known = dict.fromkeys(".".join(p[:depth]) for p in parts for depth in range(1, len(p) + 1))
    # A user may forget the beginning of a name, as in "3" instead of "blocks.3".
    inner = sorted(
        (name for name in known if name.endswith(f".{module}")), key=lambda name: name.count(".")
    )
    close = inner[:3] or get_close_matches(module, known) or list(known)[:3]
    raise ValueError(
        f"the forward pass runs no module named {module}; existing modules: {', '.join(close)}"
    )
