"""Lines on a terminal: wrapped between words below their label, and a history above the bar."""

import io
import re
import sys

import pytest

from mlx_packs.cli import output
from mlx_packs.display import NORMAL, QUIET, Display, display_of, hanging, wrapped
from mlx_packs.training.observers import Console, ObservedRun

LORA = (
    "516,096 trainable parameters (7.87 % of 6.6 M) · rank 16 · geometry probed, "
    "42 projections in 24 groups"
)


@pytest.fixture
def terminal(monkeypatch):
    """A display on a terminal of some width, and a function for what it shows, without colours."""

    def make(width: int):
        display, file = Display(), io.StringIO()
        monkeypatch.setattr(display.console, "_force_terminal", True)
        display.console.file, display.console.width = file, width
        display.live = True
        return display, lambda: re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())

    return make


@pytest.mark.parametrize("width", [40, 100])
def test_a_line_is_wrapped_between_words_below_its_label(terminal, width):
    display, shown = terminal(width)
    display.line("lora", LORA)
    lines = shown().splitlines()
    assert max(map(len, lines)) <= width and len(lines) > 1
    assert lines[0].startswith("lora    516,096") and all(x[:8] == " " * 8 for x in lines[1:])
    assert " ".join(line[8:] for line in lines) == LORA


def test_a_file_gets_whole_lines():
    display, file = Display(), io.StringIO()
    display.console.file = file
    display.line("lora", LORA)
    assert file.getvalue() == f"lora    {LORA}\n"


@pytest.mark.parametrize("variable", [None, "FORCE_COLOR", "JPY_PARENT_PID"])
def test_nothing_moves_in_a_notebook(monkeypatch, variable):
    for name in ("FORCE_COLOR", "JPY_PARENT_PID", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-color")
    if variable:
        monkeypatch.setenv(variable, "1")
    display = Display()
    assert display.console.is_terminal and display.live == (variable is None)


def test_words_stay_whole():
    path = "/a/very/long/path/that/nobody/wants/to/copy/in/pieces"
    assert wrapped(f"see {path} now", 20) == ["see", path, "now"]
    assert wrapped("", 9) == [""] and wrapped("a    b", 9) == ["a    b"]


def test_only_lines_with_a_label_are_wrapped():
    for line in ("layer        |A|     |B|   |A-B|", "packs/notes  tiny  2.1  16"):
        assert hanging(line, 20) == line
    assert hanging("sample  one two three", 15) == "sample  one two\n        three"
    assert hanging("        one two three", 15) == "        one two\n        three"


def test_results_are_wrapped_on_a_terminal_alone(monkeypatch):
    line = f"lora    {LORA}"
    assert output._fitted(line) == line
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    fitted = output._fitted(line).splitlines()
    assert len(fitted) > 1 and max(map(len, fitted)) <= 60


def test_reports_stay_above_the_bar(terminal):
    display, shown = terminal(100)
    curve = [{"batch": 2, "valid_loss": 3.5}]
    run = type("Run", (), {"display": display})()
    console = Console(ObservedRun(run, "tokens", {}, curve))
    line = {"loss": 4.25, "tokens_per_s": 300.0, "peak_gb": 0.2, "learning_rate": 1e-3}

    console.on_phase_start(4, 0)
    for batch in range(1, 5):
        console.on_step(line | {"batch": batch})
        if batch % 2 == 0:
            console.on_report(line | {"batch": batch, "loss": 4.0}, 1.0)
    console.on_phase_end()

    expected = "train   batch {}: loss 4.000  valid 3.500  300 tok/s  lr 1.00e-03"
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", shown())]
    assert lines.index(expected.format(2)) < lines.index(expected.format(4))

    display.live = False
    console.on_report(line | {"batch": 9}, 1.0)
    assert "batch 9" not in shown()  # a file has lines of the bar instead


def test_the_time_left_is_at_the_mean_pace_after_the_first_step(monkeypatch):
    """The first step compiles, and says nothing about the next ones."""
    now = [0.0]
    monkeypatch.setattr("mlx_packs.display.time.monotonic", lambda: now[0])
    with Display(QUIET).task("train", 10) as task:
        for seconds, left in ((84.0, None), (1.0, 8), (3.0, 14)):
            now[0] += seconds
            task.advance()
            assert task.left() == left


def test_progress_is_a_switch_or_a_display_of_ones_own():
    own = Display(QUIET)
    assert display_of(own) is own
    assert (display_of(True).level, display_of(False).level) == (NORMAL, QUIET)
