"""docs/performance.md: its figures are those of benchmarks/results.json."""

from __future__ import annotations

import json
import re

from support.repository import ROOT

PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
# Figures that no row of the results has: start-up times of benchmarks/launch.py.
ELSEWHERE = {"0.14", "0.17", "0.55", "0.72"}
KIB, MIB = 1 << 10, 1 << 20
SIZES = {"4 KiB": 4 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "95 MiB": 100_000_000}
LINKS = (("1gbit", "1 Gbit/s"), ("10gbit", "10 Gbit/s"))


def found(name, **keys):
    """Return the rows of a benchmark that have some values."""
    return [row for row in rows_of(name) if all(row.get(key) == keys[key] for key in keys)]


def rows_of(name):
    part, _, key = name.partition(".")
    return RESULTS[part][key] if key else RESULTS[part]


def one(name, key, **keys):
    (row,) = found(name, **keys)
    return row[key]


def starts():
    for count in (1, 64):
        for program in ("sleep", "init"):
            keys = {"program": program, "instances": count}
            ours, mpi = (
                one("many.jobs", "seconds_to_last_line", way=way, **keys)
                for way in ("ours", "mpirun")
            )
            yield program, count, f"{ours:.2f}", f"{mpi:.2f}"


def training_steps():
    for row in RESULTS["train_step"]:
        times = [f"{row[f'{way}_ms']:.0f}" for way in ("ours", "ddp", "unconnected")]
        yield row["model"], *times, f"{row['ours/ddp']:.2f}"


def models():
    for model in dict.fromkeys(row["model"] for row in RESULTS["models"]):
        rows = [found("models", model=model, replicas=count)[0] for count in (1, 8)]
        yield (
            model,
            *(f"{row['ours/plain']:.2f}" for row in rows),
            f"{rows[0]['compile_s']:.1f}",
            f"{rows[0]['second_s']:.1f}",
            f"{rows[0]['memory']:.2f}",
        )


def ddp_steps():
    for row in found("torch_ddp", instances=2):
        times = [f"{row[f'{way}_ms']:.0f}" for way in ("popdist", "gloo", "none")]
        yield row["model"], *times, f"{row['gloo/popdist']:.2f}"


def collectives():
    for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter"):
        for size in ("4 KiB", "1 MiB", "95 MiB"):
            keys = {"collective": collective, "setting": "hot", "instances": 2}
            keys["bytes"] = SIZES[size]
            (row,) = found("allreduce", **keys)
            times = [f"{row[f'{way}_us']:,.0f}" for way in ("ours", "mpi")]
            yield collective, size, *times, f"{row['ours/mpi']:.1f}"


def hosts():
    for rate, link in LINKS:
        for count in (1, 2):
            rows = found("multi_host", rate=rate, per_host=count)
            (row,) = (row for row in rows if "fp16_ms" in row)
            ways = ("ours", "ddp", "fp16", "powersgd")
            yield link, count, *(f"{row[f'{way}_ms']:.0f}" for way in ways)


def loading():
    for data in ("tutorial", "images"):
        for workers in (0, 2):
            keys = {"case": data, "workers": workers, "loader": "Async"}
            shares = (
                one("dataloader", "against_torch", loop=loop, **keys)
                for loop in ("reading", "computing")
            )
            bound = one("dataloader", "against_synthetic", case=data, workers=workers, data="Async")
            yield data, workers, *(f"{each:.2f}" for each in (*shares, bound))


# By the first two titles of a table, its rows.
TABLES = {
    "program | instances": starts,
    "model | poprun-py": training_steps,
    "model | 1 replica": models,
    "model | popdist": ddp_steps,
    "collective | size": collectives,
    "link | instances per host": hosts,
    "data | workers": loading,
}


def sentences():
    """Return the parts of sentences that have figures, each as the results make it."""
    hot = {"collective": "all_reduce", "setting": "hot", "instances": 2}
    window = [one("allreduce", "window/mpi", bytes=SIZES[size], **hot) for size in list(SIZES)[1:]]
    backend = [
        one("torch_backend", "popdist/gloo", collective="all_reduce", instances=2, bytes=count)
        for count in (4 * KIB, 100_000_000)
    ]
    ratios = [row["popdist/gloo"] for row in RESULTS["torch_backend"]]
    between = {row["per_host"]: row for row in found("torch_hosts", model="mlp")}
    jobs = {"program": "sleep", "way": "ours", "instances": 64}
    largest = {"collective": "all_gather", "setting": "hot", "bytes": 400_000_000}
    slow = [1 / one("allreduce", "ours/mpi", instances=count, **largest) for count in (2, 4)]
    (digits,) = found("multi_host", example="digits")
    (plan,) = found("many.plans", instances=4096)
    halves = [row["half/float"] for row in RESULTS["models"] if "half/float" in row]
    sums = [row["deterministic_ms"] / row["ours_ms"] for row in RESULTS["train_step"]]
    cnns = [row["ours/reference"] for row in RESULTS["cnns"]]
    steps = [row["end/start"] for row in RESULTS["long_run"]["instances"]]
    private = [row["private_bytes"][1] / MIB for row in RESULTS["long_run"]["processes"]]
    return (
        f"takes {one('many.jobs', 'mb', **jobs) / 64:.1f} MB and "
        f"{one('many.jobs', 'descriptors', **jobs) / 64:.0f} open files",
        f"takes {plan['seconds']:.2f} s and {plan['mb']:.0f} MB",
        f"between {min(sums):.2f} and {max(sums):.2f} times as long",
        f"between {min(cnns):.2f} and {max(cnns):.2f} times as fast",
        f"from {min(halves):.2f} to {max(halves):.2f} times",
        f"{window[0]:.1f} times as fast as MPI at 1 MiB, {window[1]:.1f} times at 16 MiB and "
        f"{window[2]:.1f} times at 95 MiB",
        f"{backend[0]:.0f} times as fast as gloo at 4 KiB and {backend[1]:.0f} times at 95 MiB",
        f"at least {min(ratios):.1f} times as fast",
        f"{between[1]['gloo/popdist']:.1f} times as fast with one instance per host, and "
        f"{between[2]['gloo/popdist']:.1f} times with two",
        f"{digits['none_percent']:.2f} % without compression, {digits['fp16_percent']:.2f} % "
        f"with fp16 and {digits['powersgd_percent']:.2f} % with powersgd",
        f"{slow[0]:.1f} times as long as MPI's on two instances and {slow[1]:.0f} times on four",
        f"{RESULTS['long_run']['instances'][0]['steps']:,} steps",
        f"{min(steps):.3f} and {max(steps):.3f} of their time at the start",
        f"{private[0]:.0f} MB in the launcher and {max(private):.0f} MB in each program",
    )  # fmt: skip


def tables(page):
    """Yield the rows of every table of a page, without the line below the titles."""
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        rows = [tuple(line.strip("| ").split(" | ")) for line in table.splitlines()]
        yield rows[0], rows[2:]


def test_every_table_has_the_rows_of_the_results():
    shown = {" | ".join(titles[:2]): rows for titles, rows in tables(PAGE)}
    assert shown == {
        titles: [tuple(map(str, row)) for row in rows()] for titles, rows in TABLES.items()
    }


def test_every_sentence_has_the_figures_of_the_results():
    page = " ".join(PAGE.split())
    assert [sentence for sentence in sentences() if sentence not in page] == []


def test_no_other_figure_is_on_the_page():
    prose = " ".join(re.sub(r"^\|.*\n", "", PAGE, flags=re.MULTILINE).split())
    for sentence in sentences():
        prose = prose.replace(sentence, "")
    assert set(re.findall(r"\d+\.\d+", prose)) == ELSEWHERE


def test_the_machines_are_named():
    for machine in RESULTS["machines"].values():
        assert machine["cpu"] in PAGE
        assert machine["cores"] == 2
