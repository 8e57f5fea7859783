"""Results of the parts, kept in a work folder, and the tables, records and picture made of them."""

import json
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..history import Environment, Record, record

FILE = "results.jsonl"


class Results:
    """Results by part, size, seed and trainer; a later one of the same key replaces the earlier."""

    def __init__(self, work: Path) -> None:
        self._file = work / FILE
        self._entries: dict[tuple, dict[str, Any]] = {}
        if self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                self._keep(json.loads(line))

    def add(self, entry: dict[str, Any]) -> None:
        """Keep a result, also for later runs."""
        self._keep(entry)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def get(self, part: str, size: str, seed: int, trainer: str) -> dict[str, Any] | None:
        """Return a result, None where there is none."""
        return self._entries.get((part, size, seed, trainer))

    def select(self, part: str, size: str, seeds: Sequence[int]) -> dict[str, list[dict]]:
        """Return the results of a part by trainer, one for each of the seeds that it has."""
        chosen: dict[str, list[dict]] = {}
        for (of_part, of_size, seed, trainer), entry in sorted(self._entries.items()):
            if (of_part, of_size) == (part, size) and seed in seeds:
                chosen.setdefault(trainer, []).append(entry)
        return chosen

    def _keep(self, entry: dict[str, Any]) -> None:
        key = entry["part"], entry["size"], entry["seed"], entry["trainer"]
        self._entries[key] = entry


def step_seconds(entry: dict[str, Any]) -> list[float]:
    """Return the seconds of a step in each turn; the first turn, which may compile, only if alone."""
    turns = entry["turns"][1:] or entry["turns"]
    return [turn["seconds"] / len(turn["losses"]) for turn in turns]


def cpu_seconds(entry: dict[str, Any]) -> list[float]:
    """Return the CPU seconds of a step in each turn, as `step_seconds`."""
    turns = entry["turns"][1:] or entry["turns"]
    return [turn["cpu_seconds"] / len(turn["losses"]) for turn in turns]


def peak_gb(entry: dict[str, Any]) -> float:
    """Return the peak resident memory of a trainer's process, in 10^9 bytes."""
    return entry["turns"][-1]["peak_bytes"] / 1e9


def losses(entry: dict[str, Any]) -> list[float]:
    """Return the loss of every step."""
    return [loss for turn in entry["turns"] for loss in turn["losses"]]


def metrics(entry: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return each metric before and after training."""
    score = entry["score"]
    if "before" in score:
        return {"1-NN accuracy, %": (100 * score["before"], 100 * score["after"])}

    shown = {}
    if answers := score["answers"]:
        shares = answers["before"]["share"], answers["after"]["share"]
        shown["exact answers, %"] = (100 * shares[0], 100 * shares[1])
    shown["perplexity"] = (score["base"]["ppl"], score["pack"]["ppl"])
    return shown


def answers_error(entries: Sequence[dict[str, Any]]) -> float:
    """Return the standard error over the rows of the share of right answers; 0 without answers."""
    answers = entries[0]["score"].get("answers")
    return answers["after"]["se"] if answers else 0.0


def table(by_trainer: dict[str, list[dict]]) -> str:
    """Return the results of a part as Markdown: mean and standard deviation over the seeds."""
    names = list(metrics(next(iter(by_trainer.values()))[0]))
    heads = [f"{name} before → after" for name in names]
    titles = ["trainer", *heads, "s per step", "CPU s per step", "peak GB", "seeds"]
    lines = [_line(titles), _line(["---"] * len(titles))]
    for trainer, entries in by_trainer.items():
        cells = [trainer]
        for name in names:
            before, after = zip(*(metrics(entry)[name] for entry in entries), strict=True)
            cells.append(f"{statistics.mean(before):,.4g} → {spread(after)}")
        cells.append(f"{statistics.median(_joined(step_seconds, entries)):.2f}")
        cells.append(f"{statistics.median(_joined(cpu_seconds, entries)):.2f}")
        cells.append(f"{max(map(peak_gb, entries)):.2f}")
        lines.append(_line([*cells, str(len(entries))]))
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Return mean ± standard deviation; only the value if there is one."""
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{statistics.mean(values):.4g} ± {statistics.stdev(values):.2g}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _joined(values: Any, entries: Sequence[dict]) -> list[float]:
    return [value for entry in entries for value in values(entry)]


def records(
    part: str, shape: str, by_trainer: dict[str, list[dict]], baseline: str, note: str
) -> list[Record]:
    """Return the records of a part; a sample is a seed, of times a turn.

    Where ``baseline`` is not among the trainers, it is the first of them.
    """
    here = Environment.here()
    if baseline not in by_trainer:
        baseline = next(iter(by_trainer))
    reference = statistics.median(_joined(step_seconds, by_trainer[baseline]))

    lines = []
    for trainer, entries in by_trainer.items():
        of = partial(record, here, f"real {part}", trainer, shape, baseline=baseline, note=note)
        for name in metrics(entries[0]):
            before, after = zip(*(metrics(entry)[name] for entry in entries), strict=True)
            label, _, unit = name.partition(", ")
            lines.append(of(f"{label} before", unit, before))
            lines.append(of(f"{label} after", unit, after))
        seconds = _joined(step_seconds, entries)
        ratio = reference / statistics.median(seconds)
        lines.append(of("step", "s", seconds, ratio=ratio))
        lines.append(of("CPU time of a step", "s", _joined(cpu_seconds, entries)))
        lines.append(of("peak of the process", "GB", [peak_gb(entry) for entry in entries]))
        lines.append(of("last loss", "", [losses(entry)[-1] for entry in entries]))
    return lines


def draw(by_trainer: dict[str, list[dict]], title: str, file: Path) -> None:
    """Draw the loss of every trainer, and the first metric before and after with its errors."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "real"  # the same picture each time
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    widths = range(2 * len(by_trainer) - 1, 0, -2)  # curves on top of each other stay visible
    for width, (trainer, entries) in zip(widths, by_trainer.items(), strict=True):
        curves = np.array([losses(entry) for entry in entries])
        steps = np.arange(1, curves.shape[1] + 1)
        (line,) = left.plot(steps, curves.mean(axis=0), lw=width, label=trainer)
        low, high = curves.min(axis=0), curves.max(axis=0)
        left.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, lw=0)
    left.set_yscale("log")
    left.set_xlabel("step")
    left.set_ylabel("training loss")
    left.legend(fontsize=8)

    name = next(iter(metrics(next(iter(by_trainer.values()))[0])))
    first = next(iter(by_trainer.values()))
    bars = {"base model": [metrics(entry)[name][0] for entry in first]}
    for trainer, entries in by_trainer.items():
        seconds = statistics.median(_joined(step_seconds, entries))
        label = f"{trainer}\n{seconds:.1f} s per step, {max(map(peak_gb, entries)):.1f} GB"
        bars[label] = [metrics(entry)[name][1] for entry in entries]
    means = [statistics.mean(values) for values in bars.values()]
    of_rows = [0.0, *(100 * answers_error(entries) for entries in by_trainer.values())]
    errors = [
        statistics.stdev(values) if len(values) > 1 else error
        for values, error in zip(bars.values(), of_rows, strict=True)
    ]
    right.barh(list(bars), means, xerr=errors, capsize=3, color="#2b63c6", height=0.6)
    right.invert_yaxis()
    right.set_xlabel(f"{name} ({title})")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(file, metadata={"Date": None})
