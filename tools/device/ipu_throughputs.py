"""Published throughputs of systems of IPUs, with their role: to fix a constant or only to judge.

The rows that calibrate fixed constants of the model of time, together with the cycles of ResNet-101
over two IPUs. All other rows only judge the model. Most micro-batches and splits are recalled.
Nothing here computes the time of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.searches import Run
from popdist_py.ipu.specification import BOW, IPU, MK2
from tools.device.ipu_published import PUBLISHED, Published, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The samples per second that a whole system trained, as Graphcore published them.

    Attributes:
        name: The name of the run in ``PUBLISHED``.
        ipu: The type of the system's IPUs.
        replicas: The number of replicas over the whole system.
        global_batch: The number of samples of one update, or of packs if samples are packed.
        samples: The published number of samples per second.
        role: Whether a constant of the model is fitted to the row, or the row only judges it.
        samples_per_pack: The mean number of samples that a pack contains; 1 without packing.
        device_iterations: The weight updates of one call of the model. Most sources do not give
            this number. The default is so large that the host's work for a call is negligible.
        synthetic_data: Whether the data was made on the IPUs.
    """

    name: str
    ipu: IPU
    replicas: int
    global_batch: int
    samples: int
    role: Role = "judges"
    samples_per_pack: float = 1.0
    device_iterations: int = 1000
    synthetic_data: bool = False

    @property
    def title(self) -> str:
        """The name of the run, with notes on packing and synthetic data."""
        notes = [", packed"] if self.samples_per_pack > 1 else []
        notes += [", synthetic data"] if self.synthetic_data else []
        return self.name + "".join(notes)

    @property
    def published(self) -> Published:
        """The run in ``PUBLISHED``."""
        (found,) = (published for published in PUBLISHED if published.name == self.name)
        return found

    @property
    def is_evidence(self) -> bool:
        """Whether a document at hand gives the micro-batch and the split of the run."""
        return self.published.is_evidence

    @property
    def run(self) -> Run:
        """The configuration of the run for the device model."""
        run = self.published.run
        settings = replace(
            run.settings,
            replicas=self.replicas,
            accumulation=self.global_batch // (self.replicas * run.graph.batch),
            device_iterations=self.device_iterations,
            synthetic_data=self.synthetic_data,
        )
        return replace(run, settings=settings, ipu=self.ipu)

    @property
    def num_ipus(self) -> int:
        """The number of IPUs of the whole system."""
        return self.replicas * self.run.placement.num_ipus

    @property
    def estimate(self) -> float:
        """The samples per second that the device model estimates."""
        run = self.run
        found = cycles(run.graph, run.placement, run.settings, run.ipu, run.model)
        return self.samples_per_pack * found.throughput


def mean_ratio(estimates: Sequence[float], known: Sequence[Throughput], role: Role) -> float:
    """Return the mean of estimated over published throughputs, over the rows of one role."""
    pairs = zip(estimates, known, strict=True)
    return fmean(estimate / row.samples for estimate, row in pairs if row.role == role)


_RESNET: Final = "ResNet-50, half, batch 20, recomputation"
_B4: Final = "EfficientNet-B4 G16, half, group norm, batch 6, four IPUs"
_LARGE: Final = "BERT-large, 128 tokens, batch 8"
_LONG: Final = "BERT-large, 512 tokens, batch 2"
_CONFORMER: Final = "Conformer, 1500 frames, batch 4, two IPUs"
_LOADING: Final = "Classifier of 128 x 128 images, float, batch 16"
# The mean number of Wikipedia's sequences in a pack. 56,064 packs of 128 tokens have as many
# sequences as the global batch of 65,536 without packing. A pack of 512 tokens contains 2.0
# sequences on average, as recalled from the paper.
_SHORT_PACKS: Final = 65_536 / 56_064
_LONG_PACKS: Final = 2.0


def _row(name: str, ipu: IPU, replicas: int, batch: int, samples: int) -> Throughput:
    return Throughput(name=name, ipu=ipu, replicas=replicas, global_batch=batch, samples=samples)


def _packed(
    name: str, replicas: int, batch: int, samples: int, samples_per_pack: float
) -> Throughput:
    return replace(_row(name, BOW, replicas, batch, samples), samples_per_pack=samples_per_pack)


def _loading(replicas: int, samples: int, role: Role, *, synthetic: bool) -> Throughput:
    return replace(
        _row(_LOADING, MK2, replicas, 16 * replicas, samples),
        role=role,
        device_iterations=50,
        synthetic_data=synthetic,
    )


def _conformer(ipu: IPU, replicas: int, samples: int) -> Throughput:
    # Neither the global batch nor the micro-batch and the split are published. The split was chosen
    # with the throughput in view, so only the ratios between these rows judge the model.
    return _row(_CONFORMER, ipu, replicas, 64 * replicas, samples)


THROUGHPUTS: Final = (
    _loading(1, 22_170, "calibrates", synthetic=True),
    _loading(1, 17_150, "calibrates", synthetic=False),
    _loading(4, 40_773, "calibrates", synthetic=True),
    _loading(4, 36_542, "judges", synthetic=False),
    # Epochs of 15 calls took 1.00 seconds. Each call has 4,000 images.
    replace(_row("MNIST, float, batch 40, four IPUs", MK2, 1, 400, 60_000), device_iterations=10),
    _row(_RESNET, MK2, 16, 1920, 30_000),
    _row(_RESNET, BOW, 16, 1920, 42_029),
    _row(_RESNET, BOW, 64, 2560, 145_287),
    _row(_B4, BOW, 4, 6144, 8_936),
    _row(_B4, BOW, 16, 6144, 34_943),
    _row(_LARGE, BOW, 4, 65_536, 5_179),
    _row(_LARGE, BOW, 16, 65_536, 19_353),
    _packed(_LARGE, 4, 56_064, 5_600, _SHORT_PACKS),
    _packed(_LARGE, 16, 56_064, 18_442, _SHORT_PACKS),
    _row("BERT-large, 384 tokens, batch 3", BOW, 4, 16_384, 1_470),
    _packed(_LONG, 4, 8192, 1_973, _LONG_PACKS),
    _packed(_LONG, 16, 8192, 6_543, _LONG_PACKS),
    _row("BERT-base, 128 tokens, batch 32", BOW, 4, 65_536, 16_391),
    _row("BERT-base, 128 tokens, batch 32", BOW, 4, 65_536, 15_911),
    _row("BERT-base, 512 tokens, batch 8", BOW, 4, 16_384, 3_656),
    _conformer(MK2, 2, 819),
    _conformer(MK2, 8, 3_163),
    _conformer(MK2, 32, 11_689),
    _conformer(BOW, 2, 1_126),
    _conformer(BOW, 8, 4_302),
    _conformer(BOW, 32, 15_815),
)
