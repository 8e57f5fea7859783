"""Draw the diagrams of the documentation: ``python docs/images/diagrams.py`` writes pack.svg and run.svg."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
STYLE = dedent("""\
    text { font: 15px system-ui, sans-serif; fill: #1f2430; text-anchor: middle }
    .small { font-size: 13px; fill: #5b6270 }
    .code { font-family: ui-monospace, monospace; font-size: 13px }
    .start { text-anchor: start }
    .page { fill: #ffffff; stroke: #d9dce3 }
    .frozen { fill: #e8ebf1; stroke: #9aa2b1 }
    .trained { fill: #d8e8ff; stroke: #3f6fd1 }
    .folder { fill: #f6f9ff; stroke: #3f6fd1; stroke-dasharray: 5 4 }
    path { fill: none; stroke: #5b6270; stroke-width: 1.5; marker-end: url(#tip) }
    .attach { stroke: #3f6fd1; stroke-dasharray: 5 4 }""")


def box(x: int, y: int, width: int, height: int, kind: str) -> str:
    """Return a rectangle with round corners."""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'


def text(x: int, y: int, words: str, kind: str = "") -> str:
    """Return a line of text."""
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'


def arrow(line: str, kind: str = "") -> str:
    """Return an arrow along a path of SVG."""
    return f'<path class="{kind}" d="{line}"/>'


def document(width: int, height: int, title: str, *shapes: str) -> str:
    """Return an SVG document on a page of its own, so that it can be read in dark mode too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" style="fill: #5b6270; '
        'stroke: none; marker-end: none"/></marker>'
    )
    page = box(1, 1, width - 2, height - 2, "page")
    parts = [head, f"<title>{title}</title>", f"<style>\n{STYLE}\n</style>", tip, page, *shapes]
    return "\n".join([*parts, "</svg>\n"])


def pack() -> str:
    """Return what a pack is, and how it is attached to a base model."""
    return document(
        720,
        340,
        "A pack and a base model",
        text(190, 34, "base model, frozen"),
        box(40, 50, 300, 260, "frozen"),
        text(190, 76, "each projection of a block", "small"),
        text(95, 296, "x"),
        arrow("M95 278 V226"),
        arrow("M105 292 H222 V262"),
        box(60, 140, 80, 84, "page"),
        text(100, 178, "W"),
        text(100, 200, "4-bit", "small"),
        box(182, 216, 80, 44, "trained"),
        text(222, 243, "A"),
        arrow("M222 216 V182"),
        box(182, 136, 80, 44, "trained"),
        text(222, 163, "B"),
        text(180, 203, "rank 16", "small"),
        arrow("M100 140 V112 H150"),
        arrow("M222 136 V112 H172"),
        text(161, 118, "+"),
        arrow("M161 104 V92 H300"),
        text(316, 97, "y"),
        text(540, 34, "pack, a folder"),
        box(420, 50, 260, 260, "folder"),
        box(440, 72, 220, 62, "trained"),
        text(550, 98, "adapters.safetensors", "code"),
        text(550, 120, "A and B of every projection", "small"),
        arrow("M438 103 H392 V198 H232", "attach"),
        text(366, 190, "attach", "small"),
        text(440, 170, "pack.json", "code start"),
        text(440, 190, "base, ranks, results, hashes", "small start"),
        text(440, 222, "adapter_config.json", "code start"),
        text(440, 242, "for stock mlx-lm", "small start"),
        text(440, 274, "README.md", "code start"),
        text(440, 294, "model card", "small start"),
    )


STEPS = (
    ("check", "settings, data,", "memory plan"),
    ("load", "base model,", "true sizes"),
    ("choose", "matmul path,", "checkpointing"),
    ("evaluate", "held-out", "examples: before"),
    ("train", "steps, validation,", "metrics"),
    ("evaluate", "same examples:", "after; gates"),
    ("write", "pack", "and report"),
)


def _steps() -> Iterator[str]:
    for number, (name, *lines) in enumerate(STEPS):
        row, column = divmod(number, 4)
        x, y = 30 + 172 * column, 30 + 160 * row
        yield box(x, y, 144, 92, "trained" if name in ("train", "write") else "frozen")
        yield text(x + 72, y + 32, name)
        for line, words in enumerate(lines):
            yield text(x + 72, y + 56 + 20 * line, words, "small")
        if column < 3 and number + 1 < len(STEPS):
            yield arrow(f"M{x + 146} {y + 46} H{x + 170}")


def run() -> str:
    """Return the phases of a run."""
    return document(
        720,
        340,
        "The phases of a training run",
        *_steps(),
        arrow("M618 122 V156 H102 V188"),
        arrow("M72 282 V312 H132 V286", "attach"),
        text(
            148,
            316,
            "checkpoints in <pack>-run; --resume continues from the last one",
            "small start",
        ),
    )


def main() -> None:
    """Write the files."""
    for draw in (pack, run):
        (FOLDER / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
