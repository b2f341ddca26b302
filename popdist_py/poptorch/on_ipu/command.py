"""The command ``python -m popdist_py.ipu``, which predicts the memory and time of a model.

The command does not train the model. The module ``command`` defines its options and exit codes. The
module ``model_factories`` makes the user's model, and the package ``popdist_py.ipu`` estimates
memory and time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import click
from rich.console import Console

from popdist_py.ipu.memory_contents import Verdict
from popdist_py.ipu.page import Planned
from popdist_py.ipu.reports import ExecutionPage, MemoryPage
from popdist_py.ipu.runs.model_graph import ModelGraph
from popdist_py.ipu.runs.run_from_command import (
    OPTIMIZERS,
    PRECISIONS,
    STRATEGIES,
    CommandOptions,
    run_from_command,
)
from popdist_py.ipu.searches import Run
from popdist_py.ipu.searches.search_answers import (
    Answer,
    find_batch,
    find_ipus,
    find_recomputation,
    find_splits,
)
from popdist_py.ipu.specification import IPUS, MK2
from popdist_py.poptorch.on_ipu.graph_of_model import traced_graph
from popdist_py.poptorch.on_ipu.help_and_exit import ReportCommand
from popdist_py.poptorch.on_ipu.model_factories import Example, InputSpec, made_example
from popdist_py.poptorch.on_ipu.model_losses import LOSSES, OWN_LOSS, with_loss
from popdist_py.poptorch.on_ipu.plan_page_options import WantedPage, planned_run, wanted_page
from popdist_py.poptorch.on_ipu.user_failures import FactoryError, user_code
from popdist_py.poptorch.options.options import Options

__all__ = ["COMMAND", "main"]

_NAME: Final = "python -m popdist_py.ipu"
# The exit codes of the command ``python -m popdist_py.ipu``. The library click also exits with code
# 2 if a command-line option is wrong.
_FITS, _TOO_LARGE, _CANNOT_TELL, _CLOSE = 0, 1, 2, 4
_COMMAND_LINE: Final = click.core.ParameterSource.COMMANDLINE
_CODES: Final[dict[Verdict, int]] = {"fits": _FITS, "close": _CLOSE, "does not fit": _TOO_LARGE}

_HELP: Final = """\
Estimate whether a model fits into the memory of IPUs, which parts of the model need the memory, and
how long a call of the model takes. The command does not train the model, and it needs no IPU.

MODEL is the name of a function or class that makes the model: package.module:function or
path/to/file.py:function. The command calls the function with the arguments of --set. The function
returns a torch.nn.Module, or a tuple of a module and its inputs. The module's inputs are those of
one micro-batch: a tensor, a tuple, or a dict of keyword arguments. If the function returns no
inputs, --input gives the shapes of the inputs. The function may make the module on torch's device
"meta", which needs no memory for weights.

If the module marks stages with poptorch.BeginBlock or poptorch.Block, the option --split replaces
the marked stages.

\b
Exit codes:
  0  the model fits
  1  the model does not fit
  2  an option is wrong, or the model cannot be estimated
  4  the model is close to the limit: the fullest tile needs 95 to 105 % of its memory

\b
Examples: a model on one IPU, a model on two IPUs, and a search for the best stages on four IPUs
  python -m popdist_py.ipu torchvision.models:resnet50 --input 3x224x224 --batch 16 \\
      --precision 16.16 --accumulation 8 --optimizer momentum
  python -m popdist_py.ipu torchvision.models:resnet101 --input 3x64x64 --batch 64 \\
      --split layer3.8 --accumulation 8 --optimizer adamw
  python -m popdist_py.ipu my_models.py:encoder --set layers=12 --input 128:int64 \\
      --loss token-cross-entropy --find splits --ipus 4
"""


class _CannotTell(click.ClickException):
    exit_code = _CANNOT_TELL


# ``ParamType`` has a type parameter only in click 8.4 and later.
class _InputType(click.ParamType):  # type: ignore[type-arg]
    name = "SHAPE[:TYPE]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> InputSpec:
        try:
            return InputSpec.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _SettingType(click.ParamType):  # type: ignore[type-arg]
    name = "NAME=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        name, equals, word = value.partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"{value!r} does not have the form NAME=VALUE, such as layers=12", param, ctx)
        return name, word


class _ListType(click.ParamType):  # type: ignore[type-arg]
    """A type of command-line option: values of the same type, separated by commas."""

    def __init__(self, of: click.ParamType[Any], name: str) -> None:
        self.of = of
        self.name = name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        if not all(word.strip() for word in value.split(",")):
            self.fail(
                f"{value!r} contains an empty value: expected values that are separated by single "
                "commas",
                param,
                ctx,
            )
        return tuple(self.of.convert(word.strip(), param, ctx) for word in value.split(","))


class _CountType(click.ParamType):  # type: ignore[type-arg]
    """A type of command-line option: numbers from 1 to the largest 32-bit integer."""

    name = "N"
    _range: Final = click.IntRange(1, 2**31 - 1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return self._range.convert(value, param, ctx)


_COUNT: Final = _CountType()
_FLOAT_TYPE: Final = click.Choice(["float32", "float16"])
_SORTS: Final = click.Choice(["weights", "accumulators", "optimizer", "activations"])
_MODULES: Final = _ListType(click.STRING, "MODULE[,...]")
_SORT_LIST: Final = _ListType(_SORTS, "KIND[,...]")
_PATH: Final = click.Path(path_type=Path)
_SORT_HELP: Final = "weights, accumulators, optimizer, activations"


def _option(*names: str, **settings: Any) -> click.Option:
    settings.setdefault("show_default", settings.get("default") not in (None, (), False))
    return click.Option(names, **settings)


_OPTIONS: Final = (
    _option(
        "--set", "words", type=_SettingType(), multiple=True,
        help="Set an argument of MODEL's function to a Python literal or a text, as in layers=12. "
        "Repeat --set for each argument.",
    ),
    _option(
        "--input", "inputs", type=_InputType(), multiple=True,
        help="The shape of one sample of a model input, without the micro-batch, and the type of "
        "the input, as in 3x224x224, 128:int64 or :int64. Repeat --input for each input.",
    ),
    _option("--batch", type=_COUNT, default=1, help="The number of samples in a micro-batch."),
    _option(
        "--inference", is_flag=True,
        help="Estimate inference, which has no backward pass and no weight update.",
    ),
    _option(
        "--loss", type=click.Choice([*LOSSES, OWN_LOSS]),
        help="The loss function for the model's first output and for labels from the host. --loss "
        "cross-entropy expects the classes in dimension 1 of the output. --loss "
        "token-cross-entropy expects the classes in the last dimension of the output. --loss own "
        "means that the model's forward returns its own loss. [default: cross-entropy; own if "
        "MODEL's function returns inputs]",
    ),
    _option(
        "--precision", type=click.Choice(list(PRECISIONS)),
        help="The number of bits of each activation and of each weight: 16.32 means float16 "
        "activations and float32 weights. [default: the model's own types]",
    ),
    _option(
        "--optimizer", type=click.Choice(list(OPTIMIZERS)), default="sgd",
        help="The optimizer, which determines the state tensors of each weight.",
    ),
    *(
        _option(f"--{name}", type=_FLOAT_TYPE, default="float32", help=f"The data type of {what}.")
        for name, what in (
            ("accum-type", "accumulated gradients"),
            ("first-order-momentum-accum-type", "the optimizer's momentum or first moments"),
            ("second-order-momentum-accum-type", "the optimizer's second moments"),
        )
    ),
    _option(
        "--accumulation", type=_COUNT,
        help="The number of micro-batches in a weight update. [default: 1, or the smallest number "
        "that a pipeline needs]",
    ),
    _option(
        "--device-iterations", type=_COUNT,
        help="The number of weight updates in a call of a training model, or the number of "
        "micro-batches in a call of an inference model. [default: 1; for inference in a "
        "pipeline, the smallest number that the pipeline needs]",
    ),
    _option(
        "--replicas", type=_COUNT, default=1, help="The number of replicas in all instances."
    ),
    _option(
        "--split", type=_MODULES, default=(),
        help="The modules that begin the second and each further IPU (or phase), in the order in "
        "which the modules run. A module name with @0, as in head@0, begins a stage on "
        "IPU 0 again.",
    ),
    _option(
        "--strategy", type=click.Choice(list(STRATEGIES)), default="grouped",
        help="The execution strategy, which determines the order in which stages run. "
        "--strategy grouped is PopART's pipeline.",
    ),
    _option(
        "--recompute", default="default",
        type=click.Choice(["default", "none", "norm", "standard", "stage"]),
        show_default=False,
        help="The tensors that the backward pass computes again, so that the forward pass does not "
        "store them. --recompute stage recomputes all tensors except the inputs of stages and the "
        "outputs of --checkpoint. --recompute standard recomputes all tensors except the "
        "checkpoints that PopART chooses. --recompute norm recomputes normalisations and the "
        "element-wise operations after normalisations. --recompute default means stage in "
        "pipelines, and none otherwise.",
    ),
    _option(
        "--checkpoint", type=_MODULES, default=(),
        help="The modules whose outputs are stored for the backward pass, even with --recompute.",
    ),
    _option(
        "--device", type=click.Choice(list(IPUS)), default=MK2.name, help="The type of the IPUs."
    ),
    _option(
        "--io-tiles", type=click.INT, metavar="N", default=0,
        help="The number of tiles that only transfer data: 0, or an even number from 32 to 192.",
    ),
    _option(
        "--available-memory-proportion",
        type=_ListType(click.FloatRange(0, 1, min_open=True), "SHARE[,...]"), default=(0.6,),
        show_default=False,
        help="The share of an IPU's memory for the temporary data of a matrix product: one number "
        "for all IPUs, or one number for each IPU. [default: 0.6]",
    ),
    _option(
        "--partials", type=_FLOAT_TYPE, default="float32",
        help="The data type of partial sums in convolutions and other matrix products.",
    ),
    _option(
        "--matmul-partials", type=_FLOAT_TYPE,
        help="The data type of partial sums in matrix products other than convolutions. [default: "
        "the type of --partials]",
    ),
    _option(
        "--off-chip", type=_SORT_LIST, default=(),
        help="The kinds of tensors to store in Streaming Memory, outside the chip: any of "
        f"{_SORT_HELP}.",
    ),
    _option(
        "--sharded", type=_SORT_LIST, default=(),
        help=f"The kinds of tensors to divide among the replicas: any of {_SORT_HELP}.",
    ),
    _option(
        "--output-mode", type=click.Choice(["final", "all", "sum"]),
        help="The outputs that the host receives from a call of the model. [default: final for "
        "training, all for inference]",
    ),
    _option(
        "--synthetic-data", is_flag=True,
        help="Estimate a run with synthetic data, without transfers from or to the host.",
    ),
    _option(
        "--find", type=click.Choice(["batch", "splits", "recompute", "ipus"]),
        help="Search for options with which the model fits into memory. --find batch finds the "
        "largest micro-batch. --find splits finds the best splits over --ipus IPUs. --find "
        "recompute finds the cheapest recomputation. --find ipus finds the fewest IPUs (a power of "
        "two), with splits, recomputation and memory outside the chip.",
    ),
    _option(
        "--ipus", type=_COUNT,
        help="The number of IPUs for --find splits, or the largest number of IPUs for --find ipus.",
    ),
    _option("--json", "as_json", is_flag=True, help="Print the results as JSON."),
    _option(
        "--page", type=_PATH, metavar="FILE.html",
        help="Also write an HTML page about the model's memory, liveness, operations, time, and "
        "alternatives.",
    ),
    _option(
        "--beside", type=_PATH, metavar="FILE.json",
        help="Compare the run with a saved report on the page of --page. FILE.json contains the "
        "report that an earlier command printed with --json.",
    ),
)  # fmt: skip

# The options of each section of the help.
_GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "The model and its inputs": ("--set", "--input", "--batch", "--inference", "--loss"),
    "Number types and optimizer": (
        *("--precision", "--partials", "--matmul-partials", "--optimizer", "--accum-type"),
        *("--first-order-momentum-accum-type", "--second-order-momentum-accum-type"),
    ),
    "A call of the model": (
        *("--accumulation", "--device-iterations", "--replicas", "--output-mode"),
        "--synthetic-data",
    ),
    "IPUs and stages": ("--device", "--io-tiles", "--split", "--strategy"),
    "Memory": (
        *("--recompute", "--checkpoint", "--off-chip", "--sharded"),
        "--available-memory-proportion",
    ),
    "Searches": ("--find", "--ipus"),
    "Output": ("--json", "--page", "--beside"),
}


def _command(
    model: str,
    words: Sequence[tuple[str, str]],
    inputs: Sequence[InputSpec],
    batch: int,
    loss: str | None,
    find: Literal["batch", "splits", "recompute", "ipus"] | None,
    ipus: int | None,
    as_json: bool,
    page: Path | None,
    beside: Path | None,
    **options: Any,
) -> None:
    """Print the reports or the search result that a command line requests, and exit.

    With ``--page``, also write the page of the run that was described or found.
    """
    wanted = wanted_page(page, beside)
    if ipus is None and find == "splits":
        raise click.UsageError("--find splits needs the number of IPUs: add --ipus N")
    if ipus is not None and find not in ("splits", "ipus"):
        raise click.UsageError("--ipus can be used only with --find splits or --find ipus")
    if options["inference"] and loss is not None:
        raise click.UsageError(
            "--loss and --inference cannot be used together, because inference has no loss"
        )
    asked = CommandOptions(**options, ipus=ipus if find == "splits" else None)
    context = click.get_current_context()
    try:
        # Text that the user's code prints must not mix with the report, which programs may read.
        with redirect_stdout(sys.stderr):
            example = made_example(model, dict(words), inputs, batch)
            if example.has_inputs and context.get_parameter_source("batch") == _COMMAND_LINE:
                raise FactoryError(
                    f"--batch cannot be used, because {model} also returned the inputs of a whole "
                    "micro-batch: remove --batch"
                )
            model_graph = _model_graph(example, loss, training=not asked.inference)
        run = run_from_command(model_graph, asked)
    except (FactoryError, ValueError) as error:
        raise _CannotTell(str(error)) from error
    told: Answer | Planned
    planned: Planned | None = None
    if find is None:
        told = planned = planned_run(run, context)
    else:
        told = _answer(run, find, ipus)
        if wanted is not None:
            planned = replace(planned_run(told.run or run, context), answer=told)
    # The page is written before the report is printed, because the reader of the output may end
    # early.
    problem = None if wanted is None or planned is None else _problem_of_page(wanted, planned)
    code = _tell(told, as_json=as_json)
    if problem is not None:
        raise _CannotTell(problem)
    if wanted is not None and not as_json:
        click.echo(f"\nThe page was written to {wanted.path}")
    context.exit(code)


def _problem_of_page(wanted: WantedPage, planned: Planned) -> str | None:
    """Write a page; return an error message if its file cannot be written."""
    try:
        wanted.write(planned)
    except OSError as error:
        return f"cannot write the file {wanted.path} of --page: {error.strerror or error}"
    return None


def _model_graph(example: Example, loss: str | None, *, training: bool) -> ModelGraph:
    default = OWN_LOSS if example.has_inputs or not training else "cross-entropy"
    if not training:
        example.module.eval()
    with (
        with_loss(example, loss or default) as called,
        user_code("the model's forward", example.described),
    ):
        return traced_graph(called.module, Options(), called.args, called.kwargs, training=training)


def _answer(run: Run, find: str, ipus: int | None) -> Answer:
    if find == "batch":
        return find_batch(run)
    if find == "ipus":
        return find_ipus(run, ipus)
    return find_recomputation(run) if ipus is None else find_splits(run, ipus)


def _tell(told: Answer | Planned, *, as_json: bool) -> int:
    """Print reports or the result of a search, and return the exit code of its verdict."""
    if as_json:
        click.echo(json.dumps(told.to_json()))
    elif isinstance(told, Answer):
        _show(told)
    else:
        _show(told.memory, told.execution)
    return _CODES[told.verdict if isinstance(told, Answer) else told.memory.verdict]


def _show(*reports: MemoryPage | ExecutionPage | Answer) -> None:
    """Print reports to standard output, with colours if the output is a terminal."""
    console = Console()
    for number, report in enumerate(reports):
        if number:
            click.echo()
        if console.is_terminal:
            # Rich's own print would exit with code 1 if the reader of the output has ended.
            with console.capture() as printed:
                console.print(report)
            click.echo(printed.get(), nl=False, color=True)
        else:
            click.echo(str(report))


COMMAND: Final = ReportCommand(
    _NAME,
    help=_HELP,
    params=[click.Argument(["model"]), *_OPTIONS],
    groups=_GROUPS,
    callback=_command,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main() -> NoReturn:
    """Run the command ``python -m popdist_py.ipu`` and exit."""
    COMMAND.main(prog_name=_NAME)


if __name__ == "__main__":
    main()
