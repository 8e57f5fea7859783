"""Tables of the latest run of every task, from the history: printed, or put into the READMEs.

In a README a table is between two markers, the first of which names its task; a test compares the
table with the history.

    python -m benchmarks report [--task TEXT]    # print
    python -m benchmarks report --write          # the READMEs, and images/ratios.png
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from . import figures, history
from .apple_gpu import goals
from .history import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CHECKOUT = Path(__file__).parent.parent
READMES = (_CHECKOUT / "benchmarks" / "README.md",)
_MARKED = re.compile(r"(<!-- measured: (.+?) -->\n).*?(<!-- end of measured -->)", re.DOTALL)


def latest(records: Iterable[Record]) -> list[list[Record]]:
    """The records of the latest run of each task on each device, in order of first appearance."""
    runs: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        run = runs.setdefault((record.task, record.device, record.os), [])
        if run and run[0].date != record.date:
            if record.date < run[0].date:
                continue
            run.clear()
        run.append(record)
    return list(runs.values())


def render(records: Iterable[Record]) -> str:
    """A table for each task and device, with the place and versions of its run above it."""
    return "\n\n".join(_section(run) for run in latest(records))


def _section(run: list[Record]) -> str:
    first = run[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    head = f"**{first.task}** on {first.device} · {first.os} · {versions} · commit {first.commit}"
    lines = [f"{head} · {first.date[:10]} · p50 (p20 to p80)", "", *_table(run)]
    if notes := list(dict.fromkeys(r.note for r in run if r.note)):
        lines += ["", *notes]
    return "\n".join(lines)


def _table(run: list[Record]) -> list[str]:
    """One row for each implementation and shape, one column for each metric of the run."""
    metrics = list(dict.fromkeys((r.metric, r.unit) for r in run))
    rows: dict[tuple[str, str, str], dict[str, Record]] = {}
    for r in run:
        rows.setdefault((r.implementation, r.shape, r.dtype), {})[r.metric] = r
    titles = ["implementation", "BLAS", "shape", "dtype"]
    titles += [", ".join(filter(None, pair)) for pair in metrics]
    has_ratio = any(r.ratio is not None for r in run)
    has_peak = any(r.peak_mb is not None for r in run)
    titles += [f"times {run[0].baseline}"] * has_ratio + ["peak MB"] * has_peak
    lines = [_line(titles), _line("---" for _ in titles)]
    for (implementation, shape, dtype), results in rows.items():
        any_record = next(iter(results.values()))
        ratio = next((r.ratio for r in results.values() if r.ratio is not None), None)
        cells = [implementation, _blas(any_record), shape, dtype]
        cells += [_spread(results.get(metric)) for metric, _ in metrics]
        cells += ["" if ratio is None else f"{ratio:.2f}x"] * has_ratio
        cells += ["" if any_record.peak_mb is None else f"{any_record.peak_mb:,.0f}"] * has_peak
        lines.append(_line(cells))
    return lines


def targets(records: Iterable[Record]) -> str:
    """Each target and whether it was met, by the latest run of its workload on each device."""
    results: dict[tuple[str, str], dict[str, Record]] = {}
    for r in records:
        if r.task == "targets":
            results.setdefault((r.shape, r.device), {})[r.metric] = r
    if not results:
        return ""
    lines = [
        _line(["workload", "target", "measured", "implementation", "", "on", "commit"]),
        _line(["---"] * 7),
    ]
    for (workload, device), parts in results.items():
        figure = parts.pop("figure")
        (bound, limit), *_ = parts.items()
        met = figure.p50 >= limit.p50 if bound == "at least" else figure.p50 <= limit.p50
        wanted = f"{bound} {_number(limit.p50)} {limit.unit}"
        shown = f"{_number(figure.p50)} {figure.unit}"
        verdict = "met" if met else "**missed**"
        lines.append(
            _line([workload, wanted, shown, figure.implementation, verdict, device, figure.commit])
        )
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _blas(record: Record) -> str:
    threads = record.blas_threads
    return record.blas if threads is None else f"{record.blas}, {threads} thread(s)"


def _spread(record: Record | None) -> str:
    if record is None:
        return ""
    if record.p20 == record.p80:
        return _number(record.p50)
    return f"{_number(record.p50)} ({_number(record.p20)} to {_number(record.p80)})"


def _number(value: float) -> str:
    """Three digits that matter, thousands parted."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def with_tables(text: str, records: list[Record]) -> str:
    """A README with the table of each task between its marks; nothing there if it has not run."""

    def table(results: re.Match) -> str:
        named = [r for r in records if r.task == results[2]]
        if results[2] == "goals on Apple GPUs":
            shown = goals.table(records)
        else:
            shown = targets(named) if results[2] == "targets" else render(named)
        return results[1] + (f"\n{shown}\n\n" if shown else "") + results[3]

    return _MARKED.sub(table, text)


_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_PANELS = {  # kind of task -> title, what its axis says, and which direction is better
    "train_step ": ("Speed of a training step", "times the speed of stock mlx-lm", "faster →"),
    "memory ": ("Transient memory", "times the memory of stock mlx-lm", "← less memory"),
}


def plot(records: list[Record], file: Path) -> bool:
    """How many times mlx-lm stock: speeds of a step, and its memory; whether there was any.

    Bars begin at 1, where nothing differs, on a logarithmic axis: twice and half are as long.
    """
    panels = {task: _ratios(records, task) for task in _PANELS}
    panels = {task: results for task, results in panels.items() if results}
    if not panels:
        return False
    rows = max(len(results) + len({r.task for r in results}) for results in panels.values())
    with figures.saved(file, columns=len(panels), height=0.24 * rows) as axes:
        for ax, (task, results) in zip(axes, panels.items(), strict=True):
            _plot_ratios(ax, results)
            title, label, better = _PANELS[task]
            devices = ", ".join(dict.fromkeys(r.device for r in results))
            ax.set_title(f"{title} · {devices}", loc="left", fontweight="bold", fontsize="medium")
            ax.set_xlabel(f"{label}, log scale · {better}")
    return True


def _plot_ratios(ax: "Axes", results: list[Record]) -> None:
    """A bar from 1 for each implementation, below the name of its workload."""
    several = len({r.device for r in results}) > 1
    names, places = [], []
    for place, (row, r) in enumerate(_by_workload(results)):
        names.append(row if r is None else f"{row} · {r.device}" if several else row)
        places.append(place)
        if r is None:
            continue
        colour = "#2b63c6" if "mlx_packs" in row else "0.62"
        ax.barh(place, r.ratio - 1, left=1, color=colour, height=0.72)
        outside = 1 if r.ratio >= 1 else -1
        ax.annotate(
            f"{r.ratio:.3g}×",
            (r.ratio, place),
            (4 * outside, 0),
            textcoords="offset points",
            ha="left" if outside > 0 else "right",
            va="center",
            fontsize="small",
        )
    ratios = [r.ratio for r in results]
    low, high = min([*ratios, 0.8]), max([*ratios, 1.25])
    margin = (high / low) ** 0.16
    ax.set_xscale("log")
    ax.set_xlim(low / margin if low < 0.8 else low, high * margin if high > 1.25 else high)
    shown = [tick for tick in _TICKS if ax.get_xlim()[0] <= tick <= ax.get_xlim()[1]]
    ax.set_xticks(shown, [f"{tick:g}×" for tick in shown])
    ax.minorticks_off()
    ax.axvline(1, color="k", lw=1.2)
    ax.set_yticks(places, names, fontsize="small")
    for label, (_, r) in zip(ax.get_yticklabels(), _by_workload(results), strict=True):
        label.set_fontweight("bold" if r is None else "normal")
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.set_ylim(len(places) - 0.3, -0.8)


def _by_workload(results: list[Record]) -> list[tuple[str, Record | None]]:
    """Rows of a panel: each workload, then its implementations but the one that is 1."""
    rows: list[tuple[str, Record | None]] = []
    for task in dict.fromkeys(r.task for r in results):
        rows.append((task.split(maxsplit=1)[1], None))
        rows += [
            (r.implementation, r)
            for r in results
            if r.task == task and r.implementation != "mlx-lm stock"
        ]
    return rows


def _ratios(records: list[Record], task: str) -> list[Record]:
    """The latest records with a ratio, of tasks that begin so."""
    runs = latest(r for r in records if r.task.startswith(task))
    return [r for run in runs for r in run if r.ratio is not None]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks report", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--history",
        type=Path,
        default=history.HISTORY,
        metavar="FILE",
        help="records to show [benchmarks/history.jsonl]",
    )
    parser.add_argument("--task", default="", metavar="TEXT", help="tasks that contain TEXT")
    parser.add_argument("--write", action="store_true", help="put tables and plot in their places")
    options = parser.parse_args(arguments)
    if options.task and options.write:
        parser.error("--task: chooses what is printed; --write takes all")
    records = [r for r in history.read(options.history) if options.task in r.task]
    if not records:
        print("no such records there yet: python -m benchmarks.train_step", file=sys.stderr)
        return 2
    if not options.write:
        print(render(records))
        return 0
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        readme.write_text(with_tables(text, records), encoding="utf-8")
    plot(records, figures.IMAGES / "ratios.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
