"""Metrics that a sweep compares trials by: held-out results of a run."""

from collections.abc import Mapping

from ..config.choices import PREFERENCE_TASKS, TASKS
from ..report.facts import number

# Names of a report, without `_after`, by task; the first that a report has is the default.
_PREFERENCES = ("preference_accuracy", "reward_margin", "loss", "chosen_ppl")
METRICS: dict[str, tuple[str, ...]] = {
    "lm": ("ppl", "accuracy", "answers"),
    **dict.fromkeys(PREFERENCE_TASKS, _PREFERENCES),
    "grpo": ("reward",),
    "embedding": (
        "spearman",
        "ndcg_at_10",
        "triplet_accuracy",
        "pearson",
        "mrr_at_10",
        "recall_at_1",
    ),
}
_LOWER = ("ppl", "chosen_ppl", "loss")


def metrics_of(task: str) -> tuple[str, ...]:
    """Return the metrics of a task; a plug-in has those of the task whose settings it has."""
    return METRICS.get(task) or METRICS.get(TASKS[task].settings_of or "", ())


def is_lower_better(metric: str) -> bool:
    return metric in _LOWER


def measured(report: Mapping) -> dict[str, float]:
    """Return the finite metrics after training in the report of a run.

    ``answers`` is the share of right answers (``--metric``).
    """
    answers = report.get("answers") or {}
    values = {
        name: report.get(f"{name}_after") for name in dict.fromkeys(sum(METRICS.values(), ()))
    }
    values["answers"] = (answers.get("after") or {}).get("share")
    return {name: value for name, v in values.items() if (value := number(v)) is not None}
