"""What a command prints on a terminal, as SVG: light and dark, without fonts from elsewhere."""

import io
import re
from xml.sax.saxutils import escape

from rich.color import Color
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

# Page, text, and the eight colours of a terminal.
LIGHT = "#ffffff #1f2430 #1f2430 #b3261e #1a7f37 #8a5a00 #2b63c6 #8250df #0b7285 #5b6270".split()
DARK = "#181c23 #e7eaee #a0a9b8 #ff8a80 #7ee2a0 #f4d190 #7fb0ff #d2a8ff #76d9e6 #e7eaee".split()
ASPECT = 0.602  # width by height of a character, in Menlo and DejaVu Sans Mono
MARGIN = 20
FONT = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'


def picture(command: str, printed: str, columns: int) -> str:
    """Return a command and what it printed, with the colours of a terminal."""
    console = Console(
        file=io.StringIO(), record=True, width=columns, force_terminal=True, highlight=False
    )
    console.print(Text.assemble(("$ ", "dim"), (command, "bold")))
    console.print(Text.from_ansi(printed.rstrip()))

    size = _export(console, LIGHT, "{terminal_width} {terminal_height}")
    width, height = (round(float(each)) + 2 * MARGIN for each in size.split())
    lines = re.findall(r"<text .*?</text>", _export(console, LIGHT, "{matrix}"))
    lines = [re.sub(r' clip-path="[^"]*"', "", line) for line in lines]

    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(command)}</title>",
            "<style>",
            f"text {{ font: 20px {FONT} }}",
            *_rules(console, LIGHT, "#d9dce3"),
            "@media (prefers-color-scheme: dark) {",
            *_rules(console, DARK, "#3a4250"),
            "}",
            "</style>",
            f'<rect class="page" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12"/>',
            f'<g transform="translate({MARGIN} {MARGIN - 4})">',
            *lines,
            "</g>",
            "</svg>\n",
        ]
    )


def _rules(console: Console, colours: list[str], edge: str) -> list[str]:
    page = f".page {{ fill: {colours[0]}; stroke: {edge} }}"
    return [page, _export(console, colours, "{styles}")]


def _export(console: Console, colours: list[str], part: str) -> str:
    """Return a part of rich's export, such as its styles."""
    page, text, *rest = (tuple(Color.parse(each).get_truecolor()) for each in colours)
    theme = TerminalTheme(page, text, rest)
    return console.export_svg(
        theme=theme, clear=False, code_format=part, font_aspect_ratio=ASPECT, unique_id="t"
    )
