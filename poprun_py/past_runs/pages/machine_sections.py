"""What ran where: the memory and schedule of the emulated IPUs, and the placement on hosts.

The documents of the device (``instance-I.device.json``) and of the plan come from files that
anybody may have edited: what cannot be drawn is left out, and its picture is shown as an image.
Pure. Nothing here reads files or writes HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from popdist_py.errors import plural
from poprun_py.errors import UsageError
from poprun_py.html.page import Code, Drawings, Part, Picture, Section, Sentence
from poprun_py.past_runs.recorded_run import RecordedAttempt, RecordedRun
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_file import plan_from_json
from poprun_py.texts import bytes_text, milliseconds_text, number_text

_MIB = 1 << 20
_FAR = 0.2


# --- the device ---------------------------------------------------------------------------------


def device_section(run: RecordedRun) -> Section:
    """Return the memory of each IPU and the schedule of each model, by the device's model."""
    documents = [attempt.devices for attempt in run.attempts if attempt.devices]
    parts: list[Part] = []
    for _, document in sorted(documents[-1].items())[:1] if documents else ():
        models = document.get("models")
        for model in models if isinstance(models, list) else ():
            try:
                parts += _model(model)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                parts.append(Sentence("A model of the device file cannot be drawn."))
    return Section("Emulated IPUs", tuple(parts))


def _model(model: Mapping[str, Any]) -> Iterator[Part]:
    # Most runs have no such file, and need no charts then.
    from poprun_py.html.charts import Bars, Mark, bars

    device, memory = model["device"], model["memory"]
    title = f"{model['name']}, {model['mode']}"
    which = device["name"] if device["is_named"] else f"{device['name']} (assumed)"
    ipus = memory["ipus"]
    fullest = max(ipus, key=lambda own: own["needed"] / own["capacity"])
    told = (
        f"IPU {fullest['ipu']} of each replica needs {bytes_text(fullest['needed'])} of "
        f"{bytes_text(fullest['capacity'])} ({fullest['needed'] / fullest['capacity']:.0%}) on the "
        f"{which}"
    )
    told += "." if memory["fits"] else ": the model does not fit."
    capacity = min(own["capacity"] for own in ipus)
    needed = max(own["needed"] for own in ipus)
    names = list(dict.fromkeys(name for own in ipus for name in own["by_category"]))
    shown = [name for name in names if any(own["by_category"].get(name) for own in ipus)]
    yield bars(
        f"Memory of each IPU: {title}",
        told,
        [f"IPU {own['ipu']}" for own in ipus],
        [Bars(name, [own["by_category"].get(name, 0) / _MIB for own in ipus]) for name in shown],
        unit="MiB",
        # Where the line would press the bars together, the sentence has to do.
        marks=[Mark(capacity / _MIB, "capacity")] if needed > _FAR * capacity else [],
    )
    call = model.get("call")
    if call:
        yield Sentence(
            "By the model of the device a call takes "
            f"{milliseconds_text(float(call['seconds']))} for "
            f"{number_text(float(call['samples']))} {plural('sample', call['samples'])} on each "
            "replica."
        )
    schedule = model.get("schedule") or {}
    if isinstance(schedule.get("svg"), str) and schedule["svg"]:
        whole = "" if schedule.get("is_whole", True) else " (the first steps)"
        yield Picture(schedule["svg"], f"Schedule of {title}{whole}")


# --- placement and command ----------------------------------------------------------------------


def read_plan(run: RecordedRun) -> tuple[LaunchPlan | None, RecordedAttempt | None]:
    """Return the plan of the last attempt that has one; values of --env are not in it."""
    for attempt in reversed(run.attempts):
        if attempt.plan is None:
            continue
        try:
            bare = [{**each, "user_env": {}} for each in attempt.plan["instances"]]
            return plan_from_json({**attempt.plan, "instances": bare}, {}), attempt
        except (UsageError, KeyError, TypeError):
            return None, attempt
    return None, None


def placement_section(plan: LaunchPlan | None) -> Section:
    """Return where instances, replicas and IPUs are."""
    if plan is None:
        return Section("Placement", ())
    from poprun_py.planning.views.plan_svg import host_pictures, legend
    from poprun_py.planning.views.plan_tree import plan_tree

    tree = plan_tree(plan)
    drawings = Drawings(list(host_pictures(tree)))
    return Section("Placement", (Sentence(f"{tree.headline}."), drawings, Sentence(legend(tree))))


def rerun_section(
    run: RecordedRun, plan: LaunchPlan | None, attempt: RecordedAttempt | None
) -> Section:
    """Return how to run the same again, of what ``read_plan`` returned."""
    import shlex

    if attempt is None:
        words = run.report.get("program")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return Section("Run it again", ())
        return Section("Run it again", (Sentence("The program was:"), Code(shlex.join(words))))
    from poprun_py.planning.views.command_text import launch_command

    path = run.files.folder / f"attempt-{attempt.number}" / "plan.json"
    parts: list[Part] = [
        Sentence("The same plan, from any folder:"),
        Code(f"poprun-py --from-plan {shlex.quote(str(path))}"),
    ]
    if plan is not None:
        if any(each.get("user_env") for each in (attempt.plan or {}).get("instances", ())):
            parts.append(Sentence("Values of --env are not shown: set these variables first."))
        parts += [
            Sentence("With options, to change some of them:"),
            Code(launch_command(replace(plan.config, from_plan=None))),
        ]
    return Section("Run it again", tuple(parts))
