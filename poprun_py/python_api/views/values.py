"""Which view a value has: what ``str`` and ``_repr_html_`` return, and why a job failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.python_api.views import configs, job_views, plans, results
from poprun_py.running.supervise.job import InstanceResult, LaunchResult
from poprun_py.running.watch.job_view import JobView

if TYPE_CHECKING:
    from collections.abc import Callable

_TEXTS: dict[type, Callable[..., str]] = {
    LaunchConfig: configs.config_text,
    LaunchPlan: plans.plan_text,
    LaunchResult: results.result_text,
    InstanceResult: results.instance_text,
    JobView: job_views.view_text,
}
_PAGES: dict[type, Callable[..., str]] = {
    LaunchConfig: configs.config_html,
    LaunchPlan: plans.plan_html,
    LaunchResult: results.result_html,
    InstanceResult: results.instance_html,
    JobView: job_views.view_html,
}


def text_of(value: object) -> str:
    """Return what ``str(value)`` is."""
    return _TEXTS[type(value)](value)


def html_of(value: object) -> str:
    """Return what a notebook shows: a part of a page that needs nothing else."""
    return _PAGES[type(value)](value)
