"""Draws what the first command changes: answers before and after, and how many are right, as SVG.

    packs train --json > run.json
    python make_picture.py run.json

Everything in the picture is from the report of the run. Needs Python alone.
"""

import argparse
import json
import textwrap
from html import escape
from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / "docs" / "images" / "first_run.svg"
WIDTH, MARGIN, GAP = 880, 28, 20
COLUMN = (WIDTH - 2 * MARGIN - GAP) // 2
LINE, CHARACTERS = 20, 48  # height of a line, and what fits on one of a column
WRONG, RIGHT, INK, MUTED = "#b3261e", "#1a7f37", "#1f2328", "#59636e"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SANS = "-apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"


def text(x: float, y: float, words: str, size: int = 14, color: str = INK, **more: str) -> str:
    """Return a line of text."""
    rest = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}"{rest}>{escape(words)}</text>'


def box(x: float, y: float, height: float, color: str) -> str:
    """Return the background of an answer, with a bar at its left."""
    return (
        f'<rect x="{x}" y="{y}" width="{COLUMN}" height="{height}" rx="6" fill="{color}" '
        f'fill-opacity="0.07"/><rect x="{x}" y="{y}" width="4" height="{height}" fill="{color}"/>'
    )


def sample(shown: dict[str, str], y: float) -> tuple[list[str], float]:
    """Return a prompt with the answers below it, and where the next one begins."""
    parts = [text(MARGIN, y + 15, f"“{shown['prompt']}”", 15, font_weight="600")]
    y += 26
    answers = [textwrap.wrap(shown[when], CHARACTERS) for when in ("before", "after")]
    height = LINE * max(map(len, answers)) + 14
    for i, (lines, color) in enumerate(zip(answers, (WRONG, RIGHT), strict=True)):
        x = MARGIN + i * (COLUMN + GAP)
        parts.append(box(x, y, height, color))
        for n, line in enumerate(lines):
            parts.append(text(x + 16, y + 21 + n * LINE, line, 13, font_family=MONO))
    return parts, y + height + 22


def score(x: float, title: str, accuracy: dict[str, float], color: str) -> list[str]:
    """Return the share of right answers, large, under a title."""
    error = f" ± {100 * accuracy['se']:.1f}" if accuracy["se"] else ""
    return [
        text(x, 44, title, 14, MUTED, font_weight="600"),
        text(x, 88, f"{100 * accuracy['share']:.1f}{error} %", 38, color, font_weight="700"),
    ]


def picture(report: dict) -> str:
    """Return the picture of a run."""
    answers, x = report["answers"], MARGIN + COLUMN + GAP
    parts = [
        *score(MARGIN, "BASE MODEL, 6.6 M PARAMETERS", answers["before"], WRONG),
        *score(x, f"WITH THE PACK, {report['pack_mb']:.1f} MB", answers["after"], RIGHT),
        text(
            MARGIN,
            116,
            f"exact answers to {answers['rows']} held-out reminders, in wordings that were not trained on",
            14,
            MUTED,
        ),
    ]
    y = 148.0
    for shown in report["samples"]:
        lines, y = sample(shown, y)
        parts += lines
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:.0f}" '
            f'viewBox="0 0 {WIDTH} {y:.0f}" font-family="{SANS}" role="img">',
            "<title>Answers of the tiny base model before and after training a pack</title>",
            f'<rect width="{WIDTH}" height="{y:.0f}" rx="10" fill="#ffffff" stroke="#d1d9e0"/>',
            *parts,
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("report", type=Path, help="what `packs train --json` printed")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(picture(json.loads(args.report.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
