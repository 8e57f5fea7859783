"""Markdown tables of the latest run of every task, from records."""

from collections.abc import Iterable

from .history import Record


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
    for (implementation, shape, dtype), found in rows.items():
        any_record = next(iter(found.values()))
        ratio = next((r.ratio for r in found.values() if r.ratio is not None), None)
        cells = [implementation, _blas(any_record), shape, dtype]
        cells += [_spread(found.get(metric)) for metric, _ in metrics]
        cells += ["" if ratio is None else f"{ratio:.2f}x"] * has_ratio
        cells += ["" if any_record.peak_mb is None else f"{any_record.peak_mb:,.0f}"] * has_peak
        lines.append(_line(cells))
    return lines


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
