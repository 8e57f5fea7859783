"""`packs eval-batch` as a command; what it does is `comparison.evaluate_batch`."""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ..display import Display
from ..errors import PackError, printable
from ..evaluation.compare import (
    BASE,
    BATCH_SIZES,
    Compared,
    as_csv,
    evaluate_batch,
    failed,
    named_packs,
)
from ..files import atomic_write
from ..packs.base import load_base_for
from ..packs.manifest import shown_perplexity
from ..packs.weighted_sum import open_weighted, weighted_sum
from . import options


@click.command("eval-batch")
@click.argument("more", nargs=-1, metavar="[PACK]...")
@click.option("--model", default="tiny", metavar="M", help="Base of the packs. [tiny]")
@click.option(
    "--pack",
    "packs",
    multiple=True,
    metavar="P",
    help="Pack to compare, repeatable; P=0.5 takes half of its delta.",
)
@click.option("--data", default="tiny", metavar="D", help="Rows: folder, file or 'tiny'. [tiny]")
@click.option("--split", default="test", help="Split of a folder; valid if there is no test.")
@click.option(
    "--batch-size",
    "sizes",
    default=",".join(map(str, BATCH_SIZES)),
    show_default=True,
    metavar="N,N",
    help="Prompts that are answered together.",
)
@click.option(
    "--sequence-length",
    type=int,
    metavar="N",
    help="Rows are cut to N tokens, prompts have N. [as packs were trained]",
)
@click.option("--max-tokens", default=32, show_default=True, help="Tokens of each answer.")
@click.option("--rounds", default=3, show_default=True, help="How often a speed is taken.")
@click.option("--limit", default=-1, metavar="N", help="At most so many rows.")
@click.option("--loss-on", type=click.Choice(["all", "completion", "assistant"]))
@click.option(
    "--matmul-path", default="auto", type=click.Choice(["auto", "quantized", "transient", "dense"])
)
@options.gates
@click.option("--csv", "csv_file", metavar="FILE", help="Write every figure as CSV too.")
@options.trust_remote_code()
@options.backend
@click.option("--json", "as_json", is_flag=True, help="Print a list, an object a line of speed.")
def command(more, model, packs, data, split, sizes, csv_file, trust_remote_code, as_json, **how):
    """Base and packs side by side, with gates.

    One load of the base, the same rows: perplexity and the paired difference, token accuracy,
    speed of whole batches of answers, memory, size. Exit code 1 if a pack fails a gate.
    """
    csv_path = _writable(csv_file)
    chosen = named_packs([weighted_sum([open_weighted(text)]) for text in (*packs, *more)])
    batch_sizes = _numbers(sizes)
    first = chosen[0][1] if chosen else None
    display = Display()
    with display.working("base", f"loading {model}"):
        base = load_base_for(first, model, trust_remote_code)
    display.line("base", base.summary())
    found = evaluate_batch(
        base, [pack for _, pack in chosen], data, split, batch_sizes, display=display, **how
    )
    if csv_path is not None:
        atomic_write(csv_path, as_csv(found))
    if as_json:
        click.echo(json.dumps([one.to_json() for one in found], indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(map(printable, _lines(found, csv_path))))
    options.exit_by(failed(found))


def _writable(file: str | None) -> Path | None:
    """Raises: PackError before anything is measured, if the CSV has no folder to go to."""
    if file is None:
        return None
    path = Path(file).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise PackError(f"--csv {file}: {what}.")
    return path


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PackError(f"--batch-size {text}: must be numbers above 0, as in 1,4,8.") from None


def _lines(found: Sequence[Compared], csv_path: Path | None) -> list[str]:
    """Two tables, of quality and of speed, and what they were made of."""
    first = found[0]
    quality = [one for one in found if one.batch_size == first.batch_size]
    lines = [
        f"rows    {first.rows} of at most {first.sequence_length} tokens · {first.targets:,} "
        f"targets · scored {first.scoring}, {first.scoring_path}",
        *_table(["", "PPL", "ratio", "accuracy", "MB"], [_quality(one) for one in quality]),
        f"speed   prompts of {first.sequence_length} tokens, a batch together, "
        f"{first.generation_path}; first token, peak",
        *_table(
            ["", "batch", "prompt/s", "decode/s", "ratio", "ms", "GB"],
            [_speed(one) for one in found],
        ),
    ]
    if csv_path is not None:
        lines.append(f"csv     {csv_path}")
    if any(one.gates for one in found):
        lines.append(f"gates   {'FAILED' if failed(found) else 'ok'}")
    return lines


def _quality(one: Compared) -> list[str]:
    if one.name == BASE:
        return [one.name, shown_perplexity(one.ppl, one.ppl_se), "", f"{one.accuracy:.1%}", ""]
    return [
        one.name,
        shown_perplexity(one.ppl, one.ppl_se),
        shown_perplexity(one.ppl_ratio, one.ppl_ratio_se, 3),
        f"{one.accuracy:.1%}",
        f"{one.pack_mb:.2f}",
    ]


def _speed(one: Compared) -> list[str]:
    return [
        one.name,
        str(one.batch_size),
        f"{one.prompt_tps:,.0f}",
        f"{one.decode_tps:,.0f}",
        "" if one.name == BASE else f"{one.tps_ratio:.2f}",
        f"{one.first_token_ms:,.0f}",
        f"{one.peak_gb:.2f}",
    ]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Plain lines as wide as the terminal at most; colour is left to terminals."""
    from rich.console import Console
    from rich.table import Table

    width = max(60, min(100, shutil.get_terminal_size((80, 24)).columns))
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    most = max(8, width - sum(w + 2 for w in widths[1:]))  # names are cut, figures never
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, title in enumerate(head):
        table.add_column(title, justify="right" if i else "left", no_wrap=True)
    for name, *figures in rows:
        table.add_row(name if len(name) <= most else name[: most - 1] + "…", *figures)
    console = Console(width=2 * width + sum(widths), highlight=False, file=sys.stdout)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
