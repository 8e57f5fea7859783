"""Tables of the latest run of every task, from the history: printed, or put into the READMEs.

In a README a table stands between two marks, the first of which names its task; a test holds what
stands there to the history.

    python -m benchmarks report [--task TEXT]    # print
    python -m benchmarks report --write          # the READMEs, and images/ratios.png
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from . import figures, history
from .apple_gpu import goals
from .history import Record

_CHECKOUT = Path(__file__).parent.parent
READMES = (
    _CHECKOUT / "README.md",
    _CHECKOUT / "benchmarks" / "README.md",
    _CHECKOUT / "docs" / "performance.md",
)
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
        _line(["workload", "target", "measured", "of", "", "on", "commit"]),
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


def plot(records: list[Record], file: Path) -> bool:
    """How many times mlx-lm stock: speeds of a step, and its memory; whether there was any."""
    panels = {
        "times its speed": _ratios(records, "train_step "),
        "times its transient memory": _ratios(records, "memory "),
    }
    panels = {title: results for title, results in panels.items() if results}
    if not panels:
        return False
    several = len({r.device for results in panels.values() for r in results}) > 1
    height = 0.22 * max(len(results) for results in panels.values())
    with figures.saved(file, columns=len(panels), height=height) as axes:
        for ax, (title, results) in zip(axes, panels.items(), strict=True):
            names = [
                f"{r.task.split(maxsplit=1)[1]} · {r.implementation}"
                + (f" · {r.device}" if several else "")
                for r in results
            ]
            colours = ["C0" if "mlx_packs" in name else "0.6" for name in names]
            bars = ax.barh(names, [r.ratio for r in results], color=colours)
            ax.bar_label(bars, [f"{r.ratio:.3g}" for r in results], padding=3, fontsize="small")
            ax.axvline(1, color="k", lw=0.8)
            ax.set(xlabel=f"{title} (mlx-lm stock is 1)", xscale="log")
            ax.tick_params(axis="y", labelsize="small")
            ax.invert_yaxis()
            ax.margins(x=0.12)
    return True


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
