"""The progress bar of notebooks."""

import sys
from types import ModuleType

import pytest

from mlx_packs import display
from mlx_packs.display import NORMAL, QUIET, Display, NotebookBar, display_of


class ZMQInteractiveShell:
    """The shell of a notebook's kernel, by its name."""


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    """The lines that a notebook shows, one after the other in one place."""
    lines: list[str] = []

    class DisplayHandle:
        def display(self, bundle: dict, raw: bool) -> None:
            assert raw
            lines.append(bundle["text/plain"])

        update = display

    ipython, its_display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = ZMQInteractiveShell  # type: ignore[attr-defined]
    its_display.DisplayHandle = DisplayHandle  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", its_display)
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    monkeypatch.setattr(display, "_NOTEBOOK_SECONDS", 0.0)
    return lines


def test_a_notebook_shows_one_bar_that_moves(shown, capsys):
    with Display(NORMAL).task("train", 4, "steps") as task:
        for loss in (3, 2, 1, 0):
            task.advance(f"loss {loss}")
    assert shown[0] == f"train   {'─' * 30} 0/4 steps"
    assert f"train   {'━' * 15}{'─' * 15} 2/4 loss 2  0:00 left" in shown
    assert shown[-1] == f"train   {'━' * 30} 4/4 loss 0"
    assert capsys.readouterr().err == ""


def test_progress_is_a_switch_or_a_display_of_ones_own(shown):
    with display_of(False).task("train", 2) as task:
        task.advance()
    assert shown == []

    own = Display(QUIET)
    assert display_of(own) is own
    assert (display_of(True).level, display_of(False).level) == (NORMAL, QUIET)


def test_there_is_no_bar_outside_of_notebooks(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not display.in_notebook()
    assert not isinstance(display.Task(Display(NORMAL), "train", 2, "", 0).bar, NotebookBar)
