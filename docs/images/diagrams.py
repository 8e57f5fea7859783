"""Draw the diagrams of the documentation: ``python docs/images/diagrams.py`` writes `DRAWN` as SVG.

Each file has a light and a dark style, of which a browser shows the one that the reader prefers.
"""

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
    .end { text-anchor: end }
    .page { fill: #ffffff; stroke: #d9dce3 }
    .frozen { fill: #e8ebf1; stroke: #9aa2b1 }
    .trained { fill: #d8e8ff; stroke: #3f6fd1 }
    .folder { fill: #f6f9ff; stroke: #3f6fd1; stroke-dasharray: 5 4 }
    path { fill: none; stroke: #5b6270; stroke-width: 1.5; marker-end: url(#tip) }
    .attach { stroke: #3f6fd1; stroke-dasharray: 5 4 }
    .line { marker-end: none }
    .tip { fill: #5b6270; stroke: none; marker-end: none }
    .token { stroke: #ffffff; stroke-width: 1 }
    .common { fill: #9aa2b1 }
    .own { fill: #3f6fd1 }
    .padding { fill: #ffffff; stroke: #c3c8d2; stroke-dasharray: 2 2 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e7eaee }
      .small { fill: #a0a9b8 }
      .page { fill: #181c23; stroke: #3a4250 }
      .frozen { fill: #2b313b; stroke: #6b7688 }
      .trained { fill: #1d3357; stroke: #7fb0ff }
      .folder { fill: #1b2331; stroke: #7fb0ff }
      path { stroke: #a0a9b8 }
      .attach { stroke: #7fb0ff }
      .tip { fill: #a0a9b8; stroke: none }
      .token { stroke: #181c23 }
      .common { fill: #6b7688 }
      .own { fill: #7fb0ff }
      .padding { fill: #181c23; stroke: #4a5362 }
    }""")


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
    """Return an SVG document on a page of its own, which does not depend on what is around it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
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
    ("read", "examples: tokens,", "targets"),
    ("choose", "matmul path,", "checkpointing"),
    ("train", "steps, validation,", "metrics"),
    ("evaluate", "held-out: before,", "after; gates"),
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


SQUARE, ROW = 14, 19  # a square of `batches` and the height of a row of them
TOKENS = 16  # of a square
PREFIX = 8  # squares that begin every example
RESTS = (5, 2, 4, 1)  # squares that only one example has


def _squares(x: int, y: int, count: int, kind: str) -> Iterator[str]:
    for number in range(count):
        left = x + SQUARE * number
        yield f'<rect class="token {kind}" x="{left}" y="{y}" width="{SQUARE}" height="{ROW - 5}"/>'


def _example(x: int, y: int, rest: int, longest: int = 0) -> Iterator[str]:
    """Draw an example, with padding up to the longest one."""
    yield from _squares(x, y, PREFIX, "common")
    yield from _squares(x + SQUARE * PREFIX, y, rest, "own")
    yield from _squares(x + SQUARE * (PREFIX + rest), y, longest - rest, "padding")


def _branch(x: int, y: int, row: int) -> str:
    """Draw the line from a prefix to a row."""
    middle = y + (ROW - 5) // 2
    return arrow(f"M{x} {middle} H{x + 12} V{middle + ROW * row} H{x + 26}", "line")


def _padded(x: int, y: int) -> Iterator[str]:
    for row, rest in enumerate(RESTS):
        yield from _example(x, y + ROW * row, rest, max(RESTS))


def _packed(x: int, y: int) -> Iterator[str]:
    for row, pair in enumerate(((5, 1), (4, 2))):
        left = x
        for rest in pair:
            yield from _example(left, y + ROW * row, rest)
            left += SQUARE * (PREFIX + rest) + 4


def _shared(x: int, y: int) -> Iterator[str]:
    yield from _squares(x, y, PREFIX, "common")
    for row, rest in enumerate(RESTS):
        left = x + SQUARE * PREFIX
        yield _branch(left, y, row)
        yield from _squares(left + 30, y + ROW * row, rest, "own")
        yield from _squares(left + 30 + SQUARE * rest, y + ROW * row, max(RESTS) - rest, "padding")


def _shared_and_packed(x: int, y: int) -> Iterator[str]:
    yield from _squares(x, y, PREFIX, "common")
    left = x + SQUARE * PREFIX
    yield _branch(left, y, 0)
    left += 30
    for rest in RESTS:
        yield from _squares(left, y, rest, "own")
        left += SQUARE * rest + 4


def batches() -> str:
    """Return four batches of the same examples: padded, packed, and both with a shared prefix."""
    count, longest, own = len(RESTS), max(RESTS), sum(RESTS)
    panels = (
        ("Padded", "--share-prefix off", _padded, count * (PREFIX + longest), 4),
        ("Packed", "--packing --share-prefix off", _packed, count * PREFIX + own, 2),
        ("Shared prefix", "the default, if it pays", _shared, PREFIX + count * longest, 4),
        ("Packed, shared prefix", "--packing", _shared_and_packed, PREFIX + own, 1),
    )
    shapes, y = [], 30
    for title, flags, draw, inputs, rows in panels:
        height = max(44, ROW * rows)
        shapes += [
            text(28, y + 13, title, "start"),
            text(28, y + 35, flags, "code small start"),
            *draw(262, y),
            text(692, y + 13, f"{inputs * TOKENS} inputs", "end"),
        ]
        y += height + 26

    shapes += [
        *_squares(28, y, 1, "common"),
        text(50, y + 12, "tokens of every example", "small start"),
        *_squares(246, y, 1, "own"),
        text(268, y + 12, "tokens of one example", "small start"),
        *_squares(442, y, 1, "padding"),
        text(464, y + 12, "padding", "small start"),
        text(692, y + 12, f"a square: {TOKENS} tokens", "small end"),
    ]
    return document(720, y + 36, "Four batches of the same four examples", *shapes)


# What the model should give, what the examples have, and the task.
TASKS = (
    (
        ("Text",),
        (
            ("good answers, or plain text", "lm", "the default"),
            ("prompts, and a larger model to copy", "distill", ""),
            ("pairs of a better and a worse answer", "dpo", "orpo · simpo · cpo"),
            ("answers that people rated good or bad", "kto", ""),
            ("prompts, and code that scores answers", "grpo", ""),
        ),
    ),
    (
        ("A label", "or a number"),
        (
            ("texts with labels, grades or scores", "classify", ""),
            ("pairs of a better and a worse answer", "reward", ""),
        ),
    ),
    (
        ("Vectors", "or a ranking"),
        (
            ("pairs of texts that are alike", "embedding", ""),
            ("queries with relevant documents", "rerank", ""),
        ),
    ),
)


def _results(wanted: tuple[str, ...], examples: tuple, y: int) -> Iterator[str]:
    """Draw a result that is wanted, the examples that lead to it, and their tasks."""
    middle = y + 44 * len(examples) // 2 - 4
    yield box(28, middle - 26, 120, 52, "frozen")
    for line, words in enumerate(wanted):
        yield text(88, middle + 5 - 10 * (len(wanted) - 1) + 20 * line, words)

    for number, (has, task, others) in enumerate(examples):
        top = y + 44 * number
        yield arrow(f"M148 {middle} H166 V{top + 18} H184")
        yield box(186, top, 294, 36, "page")
        yield text(198, top + 23, has, "small start")
        yield arrow(f"M480 {top + 18} H508")
        yield box(510, top, 182, 36, "trained")
        yield text(522, top + 23, task, "code start")
        yield text(682, top + 23, others, "small end")


def tasks() -> str:
    """Return which task suits which result and which examples."""
    shapes, y = [], 54
    for wanted, examples in TASKS:
        shapes += _results(wanted, examples, y)
        y += 44 * len(examples) + 16

    return document(
        720,
        y + 4,
        "Which task?",
        text(28, 34, "The model gives", "start"),
        text(186, 34, "Your examples have", "start"),
        text(510, 34, "--task", "code start"),
        *shapes,
    )


DRAWN = (pack, run, batches, tasks)


def main() -> None:
    """Write the files."""
    for draw in DRAWN:
        (FOLDER / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
