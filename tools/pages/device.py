"""The generated blocks of docs/device.md, computed by the device model."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from click.testing import CliRunner

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import ESTIMATES, memory
from popdist_py.ipu.memory_contents import UNCERTAINTY
from popdist_py.ipu.reports import execution_page, memory_page
from popdist_py.ipu.schedule import least_accumulation, schedule
from popdist_py.ipu.schedule_views import grid
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import ADAM, HALF_ADAM, Settings
from popdist_py.ipu.specification import IPUS, MK2, sources
from popdist_py.poptorch.on_ipu.command import COMMAND
from tools.device.ipu_graphs import resnet, with_8_bit_input
from tools.device.ipu_judges import ALL_RUNS
from tools.device.ipu_published import PUBLISHED, Published
from tools.device.ipu_throughputs import THROUGHPUTS, mean_ratio

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "device.md"
# Options of each run: precision, accumulation, device iterations, 8-bit input. Then measurements on
# hardware: cycles, MiB that the first IPU received, KiB that the first and the second IPU sent.
RUNS = (
    ("32.32", 3, 1, False, None, None, None),
    ("16.16", 3, 1, False, 60_111_417, 4.5, "51.8, 141"),
    ("16.16", 8, 1, False, 95_653_315, 12.0, "138, 141"),
    ("16.16", 8, 4, False, 283_021_420, 48.0, "552, 142"),
    ("16.16", 8, 4, True, 278_393_266, 24.0, "551, 142"),
)
# The first command line of the page. The page shows its answer up to the section "By category".
QUESTION = (
    "torchvision.models:resnet101 --input 3x64x64 --batch 64 --optimizer adamw --split layer3.8"
)
# The command lines that search for a run that fits.
SEARCHES = (
    "torchvision.models:resnet50 --input 3x224x224 --precision 16.16 --optimizer momentum "
    "--find batch",
    "torchvision.models:resnet50 --input 3x224x224 --batch 8 --precision 16.16 "
    "--find splits --ipus 4",
    "torchvision.models:resnet50 --input 3x224x224 --batch 8 --precision 16.16 "
    "--optimizer momentum --accumulation 8 --find ipus",
)


def run_of(precision: str, accumulation: int, iterations: int, is_8_bit: bool) -> Run:
    """Return the run of ResNet-101 over two IPUs for one row of the ladder (its table)."""
    graph = resnet([3, 4, 23, 3], 64, 64)
    optimizer = ADAM
    if precision == "16.16":
        graph, optimizer = graph.cast(data="float16", weights="float16"), HALF_ADAM
    if is_8_bit:
        graph = with_8_bit_input(graph)
    settings = Settings(
        accumulation=accumulation, device_iterations=iterations, optimizer=optimizer
    )
    return Run(graph, Placement.cut(graph, ["layer3.8"]), settings, MK2)


def ladder() -> str:
    """Return the table of ResNet-101 with measurements on hardware and estimates."""
    lines = [
        "| precision | accumulation | device iterations | input | memory, hardware "
        "| model, fullest tile | received MiB, hardware | model | sent KiB, hardware | model "
        "| cycles, hardware | model | ratio |",
        "|---" * 13 + "|",
    ]
    for precision, accumulation, iterations, is_8_bit, theirs, received, sent in RUNS:
        run = run_of(precision, accumulation, iterations, is_8_bit)
        own = memory(run.graph, run.placement, run.settings, MK2).fullest
        share = f"{own.fullest_tile / own.tile_bytes:.0%}"
        first = [precision, str(accumulation), str(iterations), "8-bit" if is_8_bit else "16-bit"]
        if theirs is None:
            first[-1] = "32-bit"
            lines.append("| " + " | ".join([*first, "too large", share, *["–"] * 7]) + " |")
            continue
        ours = cycles(run.graph, run.placement, run.settings, MK2).total
        ipus = execution_page(run).ipus
        rest = [f"{received}", f"{ipus[0].received / 2**20}", sent]
        rest.append(", ".join(f"{one.sent / 1024:.3g}" for one in ipus))
        rest += [f"{theirs:,}", f"{ours:,}"]
        lines.append(
            "| " + " | ".join([*first, "fits", share, *rest, f"{ours / theirs:.3f}"]) + " |"
        )
    return "\n".join(lines) + "\n"


def grids() -> str:
    """Return grids of three IPUs: PopART's pipeline by cycle and step, and an interleaved one."""
    line = Placement((0, 1, 2), (0, 1, 2))
    grouped = schedule(line, Settings(accumulation=5, recompute="none"))
    turns = Settings(accumulation=5, recompute="none", strategy="interleaved")
    parts = (
        ("grouped, a column for each cycle", grid(grouped, by="cycle")),
        ("grouped, a column for each step", grid(grouped)),
        ("interleaved", grid(schedule(line, turns))),
    )
    return "```\n" + "\n".join(f"{title}\n{text}" for title, text in parts) + "```\n"


def reports() -> str:
    """Return the reports about the second row of the ladder, which fits."""
    run = run_of(*RUNS[1][:4])
    return f"```\n{memory_page(run)}\n\n{execution_page(run)}\n```\n"


def question() -> str:
    """Return the first command line of the page, with the beginning of its answer."""
    answer, _, _ = _answered(QUESTION).partition("\nBy category")
    return f"```console\n{answer}...\n```\n"


def searches() -> str:
    """Return the command lines of searches, with their answers."""
    return f"```console\n{''.join(map(_answered, SEARCHES))}```\n"


def _answered(words: str) -> str:
    """Return a command line with all lines that the command prints."""
    done = CliRunner().invoke(COMMAND, shlex.split(words))
    note = f"  # exit code {done.exit_code}" if done.exit_code else ""
    return f"$ python -m popdist_py.ipu {words}{note}\n{done.stdout}"


def counts() -> str:
    """Return a table of the cycle and the step from which every IPU of a pipeline works."""
    lines = [
        "| IPUs (N) | smallest accumulation | grouped: full from cycle | full after steps "
        "| interleaved: full from step | micro-batch 1 has passed, IPU0 goes on in step | 2N + 1 |",
        "|---" * 7 + "|",
    ]
    for ipus in (2, 3, 4, 8):
        line = Placement(tuple(range(ipus)), tuple(range(ipus)))
        settings = Settings(accumulation=3 * ipus, recompute="none")
        grouped = schedule(line, settings)
        turns = schedule(line, replace(settings, strategy="interleaved"))
        passed = next(c.step for c in turns.rows[0] if (c.action, c.micro_batch) == ("backward", 1))
        least = least_accumulation(ipus, is_training=True)
        found = [ipus, least, grouped.full_from, grouped.steps_until_full, turns.full_from]
        lines.append(f"| {' | '.join(map(str, [*found, passed + 1, 2 * ipus + 1]))} |")
    return "\n".join(lines) + "\n"


def published() -> str:
    """Return the table of known runs, with whether each ran and its estimated memory."""
    lines = [
        "| run | IPUs | on hardware | model, fullest tile | verdict | role | certainty |",
        "|---" * 7 + "|",
    ]
    right = Counter[str]()
    for known in ALL_RUNS:
        run, own = known.run, known.run.fullest
        right[known.role] += known.is_right(own.verdict)
        theirs = "ran" if known.ran else "too large"
        verdict = own.verdict if known.is_right(own.verdict) else f"**{own.verdict}**"
        lines.append(
            f"| {known.name} | {run.placement.num_ipus} {run.ipu.name} | {theirs} "
            f"| {own.share:.0%} ± {UNCERTAINTY:.0%} | {verdict} | {known.role} "
            f"| {known.certainty} |"
        )
    all_of = Counter(known.role for known in ALL_RUNS)
    judges, calibrating = (f"{right[role]} of {all_of[role]}" for role in ("judges", "calibrates"))
    told = (
        f"Right: {judges} runs that only judge, and {calibrating} runs that calibrate. A verdict\n"
        "that contradicts the run is in bold."
    )
    return "\n".join([*lines, "", told]) + "\n"


def throughputs() -> str:
    """Return the table of published and estimated throughputs, and the mean ratios."""
    lines = [
        "| run | IPUs | global batch | published | model | ratio | role | splits |",
        "|---" * 8 + "|",
    ]
    estimates = [known.estimate for known in THROUGHPUTS]
    for known, estimate in zip(THROUGHPUTS, estimates, strict=True):
        lines.append(
            f"| {known.title} | {known.num_ipus} {known.ipu.name} | {known.global_batch:,} "
            f"| {known.samples:,} | {estimate:,.0f} | {estimate / known.samples:.2f} "
            f"| {known.role} | {known.published.certainty} |"
        )
    fitted, judged = (mean_ratio(estimates, THROUGHPUTS, role) for role in ("calibrates", "judges"))
    means = f"The mean ratio is {judged:.2f} of the rows that judge, {fitted:.2f} of the others."
    return "\n".join([*lines, "", means]) + "\n"


def margins() -> str:
    """Return a table of the bounds of each memory constant.

    Outside its bounds, a constant contradicts a published run, if all other constants stay.
    """
    evidence = [known for known in PUBLISHED if known.is_evidence]
    lines = [
        "| constant | value | least | which run would fit | most | which run would not |",
        "|---" * 6 + "|",
    ]
    for name in ("base_code", "distinct_code", "call_code", "gaps"):
        limits = [(_limit(known, name), known) for known in evidence]
        lines.append(_margin(f"`{name}`", getattr(ESTIMATES, name), limits))
    limits = [(own.tile_bytes / own.fullest_tile, k) for k in evidence for own in (k.run.fullest,)]
    lines.append(_margin("everything, times", 1.0, limits))
    return "\n".join(lines) + "\n"


def _margin(name: str, value: float, limits: Sequence[tuple[float, Published]]) -> str:
    """Return a table row with a constant's bounds, and the run that each bound comes from."""
    least, fits = max(
        ((at, known.name) for at, known in limits if not known.ran and at > 0), default=(0.0, "–")
    )
    most, does_not = min((at, known.name) for at, known in limits if known.ran)
    digits = 0 if isinstance(value, int) else 3
    return (
        f"| {name} | {value:,} | {least:,.{digits}f} | {fits} | {most:,.{digits}f} | {does_not} |"
    )


def _limit(known: Published, name: str) -> float:
    """Return the largest value of a constant with which a run fits.

    The memory of a run is a linear function of each constant.
    """
    run, value = known.run, getattr(ESTIMATES, name)
    step = max(1, value) if isinstance(value, int) else value
    more = replace(ESTIMATES, **{name: value + step})
    now, then = (
        memory(run.graph, run.placement, run.settings, run.ipu, estimates).ipus
        for estimates in (ESTIMATES, more)
    )
    return min(
        value
        + step
        * (before.tile_bytes - before.fullest_tile)
        / (after.fullest_tile - before.fullest_tile)
        for before, after in zip(now, then, strict=True)
        if after.fullest_tile > before.fullest_tile
    )


def proportions() -> str:
    """Return a table of ResNet-50's memory and cycles with each available memory proportion."""
    graph = resnet([3, 4, 6, 3], 224, 8, "float16")
    lines = ["| proportion | working set at the peak, MB | needed, MB | cycles |", "|---" * 4 + "|"]
    for share in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        settings = Settings(accumulation=8, recompute="stage", memory_proportion=share)
        run = Run(graph, Placement.cut(graph), settings, MK2)
        own = run.fullest
        sizes = (own.by_category()["working set"] / 1e6, own.needed / 1e6)
        cells = (f"{share:g}", *(f"{size:.1f}" for size in sizes), f"{run.cycles:,}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def figures() -> str:
    """Return the table of the figures of each type of IPU, with the source for Mk2."""
    lines = [f"| figure | {' | '.join(IPUS)} | source (mk2) |", "|---" * (len(IPUS) + 2) + "|"]
    where = sources(MK2)
    for field in fields(MK2):
        if field.name != "name":
            values = [f"{getattr(ipu, field.name):,.10g}" for ipu in IPUS.values()]
            lines.append(f"| `{field.name}` | {' | '.join(values)} | {where[field.name]} |")
    return "\n".join(lines) + "\n"


# The functions that make the generated blocks, in the order of the page.
PARTS = (
    *(question, searches, proportions, reports, published, margins, ladder, throughputs),
    *(grids, counts, figures),
)


def files() -> dict[Path, str]:
    """Return the page with all generated blocks made again."""
    page = PAGE.read_text(encoding="utf-8")
    for part in PARTS:
        marks = re.compile(rf"(?<=<!-- {part.__name__} -->\n).*?(?=<!-- end -->)", re.DOTALL)
        made = part()
        page, found = marks.subn(lambda _, made=made: made, page, count=1)
        assert found == 1, part.__name__
    return {PAGE: page}
