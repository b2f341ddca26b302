"""Does nn.DataParallel make inference faster, and which batch size is large enough?

python examples/course/data_parallel.py
python examples/course/data_parallel.py --compute host --backward -n_reps 20
python examples/course/data_parallel.py --devices 4 --figure data-parallel.svg

torch's nn.DataParallel needs GPUs. This program performs the steps of nn.DataParallel one by one on
emulated IPUs, each with its own copy of the network. It counts the transferred bytes, and compares
the result with that of one device. The time of a transfer is modelled. The time of computing is
modelled for an IPU (--compute ipu), or measured on one core of this host (--compute host).
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fashion_mnist import IS_FIRST, FashionCNN, load
from torch import nn

from popdist_py import poptorch
from popdist_py.ipu.cycles import CYCLE_MODEL
from popdist_py.ipu.specification import MK2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import HelpFormat, Parser, figure_file, positive
from common.running import run

FORWARD_STEPS = ("scatter batch", "replicate model", "gather outputs")
BACKWARD_STEPS = ("scatter gradients", "reduce gradients")
COMPUTING = "compute"


@dataclass(frozen=True)
class Transfer:
    """A transfer of tensors between the primary device and ``device``, in one call."""

    step: str
    device: int
    bytes: int

    @property
    def seconds(self) -> float:
        """The modelled time to start a program on the device and to transfer the data.

        The links of the primary device carry all transfers of a step, one after another. Each
        direction has half of the bandwidth. Data that stays on the primary takes no time.
        """
        if self.device == 0:
            return 0.0
        return CYCLE_MODEL.operation_cycles / MK2.clock + self.bytes / (MK2.link_bandwidth / 2)


class DataParallel:
    """The steps of nn.DataParallel in a call, on emulated devices. Device 0 is the primary.

    The model is in evaluation mode, so the results of a batch's samples do not depend on each
    other. In training mode, a replica's BatchNorm would only use the replica's share of the batch,
    as in nn.DataParallel.
    """

    def __init__(self, model: nn.Module, devices: int) -> None:
        self.model = model.eval()
        self.devices = devices
        self.transfers: list[Transfer] = []
        self.replicas: list[nn.Module] = []
        self.outputs: list[torch.Tensor] = []
        #: The computing time of each device in seconds.
        self.seconds: list[float] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the scores [N, classes] of ``batch`` on the primary."""
        self.transfers.clear()
        shares = [
            self._sent("scatter batch", device, share)
            for device, share in enumerate(batch.tensor_split(self.devices))
        ]
        self.replicas = [self._replica(device) for device in range(self.devices)]
        self.outputs, self.seconds = [], []
        for replica, share in zip(self.replicas, shares, strict=True):
            output, seconds = timed(lambda replica=replica, share=share: replica(share))
            self.outputs.append(output)
            self.seconds.append(seconds)
        parts = [self._sent("gather outputs", *part) for part in enumerate(self.outputs)]
        return torch.cat(parts).requires_grad_(torch.is_grad_enabled())

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the sums of the replicas' gradients, given the gradient of the gathered scores."""
        sizes = [len(output) for output in self.outputs]
        shares = [
            self._sent("scatter gradients", device, share)
            for device, share in enumerate(gradient.split(sizes))
        ]
        for device, (output, share) in enumerate(zip(self.outputs, shares, strict=True)):
            _, seconds = timed(lambda output=output, share=share: output.backward(share))
            self.seconds[device] += seconds
        total = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        for device, replica in enumerate(self.replicas):
            gradients = [parameter.grad for parameter in replica.parameters()]
            self._count("reduce gradients", device, gradients)
            for sum_, own in zip(total, gradients, strict=True):
                sum_ += own
        self.replicas = []  # like nn.DataParallel, whose replicas last one step
        return total

    def _replica(self, device: int) -> nn.Module:
        replica = copy.deepcopy(self.model)
        self._count("replicate model", device, replica.state_dict().values())
        return replica

    def _sent(self, step: str, device: int, tensor: torch.Tensor) -> torch.Tensor:
        self._count(step, device, [tensor])
        return tensor.detach().clone()

    def _count(self, step: str, device: int, tensors: Iterable[torch.Tensor]) -> None:
        self.transfers.append(Transfer(step, device, sum(t.nbytes for t in tensors)))


@dataclass(frozen=True)
class Comparison:
    """The seconds of one device, and of each step with ``devices``, for one batch size."""

    batch_size: int
    devices: int
    one_device: float
    steps: dict[str, float]
    transfers: tuple[Transfer, ...]
    largest_difference: float

    @property
    def speed_up(self) -> float:
        """The time of one device, divided by the time of all devices."""
        return self.one_device / sum(self.steps.values())


def timed(call: Callable[[], object]) -> tuple:
    """Return the result of ``call`` and its duration in seconds."""
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def modelled_seconds(model: nn.Module, batch: torch.Tensor, *, backward: bool) -> float:
    """Return the modelled seconds of a forward pass on an emulated IPU.

    With ``backward``, the result includes the backward pass.
    """
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    if backward:
        executor = poptorch.trainingModel(WithLossOnSecondIpu(copy.deepcopy(model)), options)
    else:
        executor = poptorch.inferenceModel(copy.deepcopy(model), options)
    first = executor.executionReport(batch).report.stages[0]
    return (first.forward + first.backward) / MK2.clock


class WithLossOnSecondIpu(nn.Module):
    """A model with a loss on a second IPU, so that the first IPU computes only the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        scores = self.model(batch)
        poptorch.Block.start(ipu_id=1)
        return poptorch.identity_loss(scores, reduction="mean")


def compare(
    model: nn.Module,
    batch: torch.Tensor,
    devices: int,
    n_reps: int,
    *,
    compute: str,
    backward: bool,
) -> Comparison:
    """Run ``batch`` on one device and on ``devices`` devices, in turn.

    With ``host``, this is repeated ``n_reps`` times.
    """
    one, many = DataParallel(model, 1), DataParallel(model, devices)
    alone, together = [], []
    with torch.set_grad_enabled(backward):
        for _ in range(n_reps if compute == "host" else 1):
            results = []
            for emulated, seconds in ((one, alone), (many, together)):
                scores = emulated.forward(batch)
                if backward:
                    # The primary has all scores, so it computes the loss.
                    scores.square().mean().backward()
                    results.append([scores, *emulated.backward(scores.grad)])
                else:
                    results.append([scores])
                seconds.append(max(emulated.seconds))  # devices compute at the same time
    one_device, share = statistics.median(alone), statistics.median(together)
    if compute == "ipu":
        one_device = modelled_seconds(model, batch, backward=backward)
        largest_share = batch.tensor_split(devices)[0]
        share = modelled_seconds(model, largest_share, backward=backward)
    steps = {}
    for step in (*FORWARD_STEPS, *(BACKWARD_STEPS if backward else ())):
        steps[step] = sum(t.seconds for t in many.transfers if t.step == step)
        if step == "replicate model":
            steps[COMPUTING] = share
    difference = max(float((a - b).detach().abs().max()) for a, b in zip(*results, strict=True))
    return Comparison(len(batch), devices, one_device, steps, tuple(many.transfers), difference)


def forwards_of_torch(model: nn.Module, batch: torch.Tensor) -> int:
    """Return the number of times that nn.DataParallel runs ``model`` for a batch on this host."""
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(None))
    with torch.no_grad():
        nn.DataParallel(model)(batch)
    hook.remove()
    return len(calls)


def print_table(found: Sequence[Comparison]) -> None:
    """Print the times in microseconds and the speed-up of each batch size."""
    steps = list(found[0].steps)
    print(
        "microseconds".rjust(12), "one device".rjust(12), *(f"{s:>17}" for s in steps), "speed-up"
    )
    for one in found:
        times = (f"{1e6 * one.steps[step]:17,.1f}" for step in steps)
        print(f"batch {one.batch_size:6}", f"{1e6 * one.one_device:12,.1f}", *times,
              f"{one.speed_up:8.2f}")  # fmt: skip


def print_transfers(one: Comparison) -> None:
    """Print the numbers of transfers of a call, and compare them with the course's 3 x M."""
    print(f"\ntransfers of a call with batch {one.batch_size} over M = {one.devices} devices:")
    for step in dict.fromkeys(transfer.step for transfer in one.transfers):
        of_step = [transfer for transfer in one.transfers if transfer.step == step]
        crossing = [transfer.bytes for transfer in of_step if transfer.device != 0]
        print(f"  {step:17} {len(of_step)}, of which {len(crossing)} cross a link, "
              f"{sum(crossing):,} bytes")  # fmt: skip
    forward = [t for t in one.transfers if t.step in FORWARD_STEPS]
    crossing = sum(t.device != 0 for t in forward)
    print(f"  forward: {len(forward)} = 3 x M with what the primary keeps; {crossing} cross a link")


def verdict(found: Sequence[Comparison]) -> str:
    """Return a line with the batch sizes at which data parallel is faster, and the reason."""
    last = found[-1]
    sent = sum(seconds for step, seconds in last.steps.items() if step != COMPUTING)
    saved = last.one_device - last.steps[COMPUTING]
    reason = (
        f"with batch {last.batch_size}, {last.devices} devices save {1e6 * saved:,.1f} us of "
        f"computing and spend {1e6 * sent:,.1f} us on transfers, "
        f"{100 * last.steps['replicate model'] / sent:.0f} % of it on the model"
    )
    slower = [index for index, one in enumerate(found) if one.speed_up <= 1]
    if not slower:
        return f"faster at every batch size: {reason}"
    if slower[-1] + 1 < len(found):
        return f"faster from batch {found[slower[-1] + 1].batch_size} on: {reason}"
    return f"not faster at the largest batch: {reason}"


def draw(found: Sequence[Comparison], compute: str, path: Path) -> None:
    """Draw the time of each step for each batch size, as a share of one device's time."""
    from common.drawing import COLOURS, NEUTRAL, mark, new_figure, save

    figure = new_figure(7.5, 4)
    axes = figure.add_subplot()
    colours = (COLOURS[1], COLOURS[3], COLOURS[0], COLOURS[4], COLOURS[2], COLOURS[5])
    base = [0.0] * len(found)
    places = range(len(found))
    for step, colour in zip(found[0].steps, colours, strict=False):
        heights = [one.steps[step] / one.one_device for one in found]
        bars = axes.bar(places, heights, 0.6, bottom=base, color=colour, label=step)
        mark(bars[0], step.replace(" ", "-"))
        base = [low + height for low, height in zip(base, heights, strict=True)]
    line = axes.axhline(1, color=NEUTRAL, linestyle="--")
    mark(line, "one-device")
    axes.text(len(found) - 0.6, 1.02, "one device", color=NEUTRAL, ha="right")
    for place, top, one in zip(places, base, found, strict=True):
        axes.text(place, top, f"{one.speed_up:.2f}×", ha="center", va="bottom")
    axes.set_xticks(places, [str(one.batch_size) for one in found])
    axes.set_xlabel("batch size")
    axes.set_ylabel("share of one device's time")
    source = "modelled" if compute == "ipu" else "measured on one core"
    title = f"Data parallel over {found[0].devices} IPUs: computing {source}, transfers modelled"
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    save(figure, path)


def arguments(argv: list[str] | None):
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    sizes = [8, 32, 128, 512, 2048]
    add("--batch-size", type=positive, nargs="+", default=sizes, help="images of a call")
    add("-n_reps", "--n-reps", type=positive, default=5, help="calls measured with --compute host")
    add("--devices", type=positive, default=2, help="emulated IPUs")
    add("--compute", choices=["ipu", "host"], default="ipu", help="whose time computing takes")
    add("--backward", action="store_true", help="a training step: the way back as well")
    add("--data-dir", type=Path, default="data", help="where FashionMNIST is, or is made")
    add("--figure", type=figure_file, help="also draw the table")
    args = parser.parse_args(argv)
    if args.devices < 2:
        parser.error(f"--devices {args.devices}: 2 or more are compared with one")
    if min(args.batch_size) < args.devices:
        parser.error(
            f"--batch-size {min(args.batch_size)}: each of the {args.devices} devices needs an "
            f"image, give {args.devices} or more"
        )
    parser.say_idle(args, (args.compute == "ipu", "times are modelled", "n_reps"))
    args.batch_size = sorted(set(args.batch_size))
    return args


def main(argv: list[str] | None = None) -> list[Comparison]:
    """Compare, print and return the comparison of each batch size."""
    args = arguments(argv)
    if not IS_FIRST:
        return []  # One process emulates all devices, so other instances leave.
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a device is a core
    images = load(args.data_dir)[0].tensors[0]
    model = FashionCNN().eval()
    found = []
    for size in args.batch_size:
        batch = images[torch.arange(size) % len(images)]
        found.append(
            compare(model, batch, args.devices, args.n_reps,
                    compute=args.compute, backward=args.backward)
        )  # fmt: skip
    print_table(found)
    print_transfers(found[-1])
    print(f"\nlargest difference from one device: {max(f.largest_difference for f in found):.1e}")
    calls = forwards_of_torch(model, batch)
    print(f"torch's own nn.DataParallel ran the model {calls} time(s): without GPUs it passes on")
    print(verdict(found))
    if args.figure:
        try:
            draw(found, args.compute, args.figure)
        except OSError as error:
            sys.exit(f"--figure {args.figure}: {error.strerror}; give a place that can be written")
    return found


if __name__ == "__main__":
    run(main)
