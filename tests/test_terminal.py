"""What reaches a terminal: no character that could steer it, from whatever source."""

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from rich.console import Console

from mlx_packs.display import NORMAL, Display
from mlx_packs.terminal import (
    Guarded,
    escaped,
    guard,
    guarded,
    guarded_native,
    printable,
    printable_text,
)

STEERING = [
    *map(chr, [*range(0x20), *range(0x7F, 0xA0)]),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
    *"\u206a\u206f\ufff9\ufffb\U000e0001\U000e0041\U000e007f\ud800\udc9b\udfff",
]
TEXTS = ["é → a·b", "👩‍👩‍👧 ❤️ 🇩🇪", "क्षि می‌خواهم שלום", "a\u200bb\xad", "e\u0301", "\ue000"]
HOSTILE = "a\x1b]0;owned\x07b\x9b31mc\u202ed\u2066e\u061cf\udc9b"
SAFE = "a?]0;owned?b?31mc?d?e?f?"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminals(monkeypatch) -> Callable[[], tuple[Terminal, Terminal]]:
    """Makes a terminal of stdout and one of stderr; pytest sets both anew before each test."""

    def go() -> tuple[Terminal, Terminal]:
        streams = Terminal(), Terminal()
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            monkeypatch.setattr(sys, name, stream)
        return streams

    return go


def test_steering_characters_are_replaced_and_escaped():
    for char in STEERING:
        assert printable(f"a{char}b") == "a?b", ascii(char)
        assert printable_text(f"a{char}b") == (f"a{char}b" if char in "\n\t" else "a?b"), ascii(
            char
        )
        document = escaped(json.dumps({f"k{char}": f"a{char}b"}, ensure_ascii=False))
        assert char not in document and json.loads(document) == {f"k{char}": f"a{char}b"}


def test_text_of_every_script_stays_as_it_is():
    for text in TEXTS:
        assert printable(text) == printable_text(text) == text
        assert escaped(json.dumps(text, ensure_ascii=False)) == f'"{text}"'


def test_bars_of_libraries_go_on_to_move(terminals):
    from tqdm import tqdm

    streams = terminals()
    with guarded():
        for _ in tqdm(range(2), desc=HOSTILE, position=1, leave=False):
            pass
    shown = streams[1].getvalue()
    assert SAFE in shown and "\r" in shown and "\x1b[A" in shown
    left = shown.replace("\r", "").replace("\x1b[A", "").replace("\n", "")
    assert printable(left) == left


def test_text_that_only_resembles_a_bar_is_replaced(terminals):
    streams = terminals()
    with guarded():
        for text in ("a\r", "\x1b[A ", "\x1b[Aa", " \x1b[A", "\x1b[2A"):
            sys.stderr.write(text)
        sys.stdout.write("\r")
    assert "\x1b" not in streams[1].getvalue() and "a\r" not in streams[1].getvalue()
    assert streams[0].getvalue() == "?"


def test_guards_are_put_on_once_and_taken_off(terminals):
    streams = terminals()
    with guarded():
        outer = sys.stdout, sys.stderr
        guard()
        assert (sys.stdout, sys.stderr) == outer
        with guarded():
            assert (sys.stdout, sys.stderr) == outer
        assert all(isinstance(stream, Guarded) for stream in outer)
        assert sys.stdout.isatty() and not hasattr(sys.stdout, "nothing")
    assert (sys.stdout, sys.stderr) == streams


def test_colours_of_our_own_pass_and_those_of_data_do_not(terminals, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    streams = terminals()
    with guarded():
        Console(highlight=False).print("own", style="bold")
        Display().line("label", HOSTILE)
    out, err = (stream.getvalue() for stream in streams)
    assert out == "\x1b[1mown\x1b[0m\n" and SAFE in err
    assert err.startswith("\x1b[1mlabel") and "\x1b]" not in err


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_bar_shows_text_and_no_markup_of_data(terminals, monkeypatch, is_guarded):
    monkeypatch.setenv("TERM", "xterm")
    streams = out, err = terminals()

    with guarded() if is_guarded else nullcontext():
        display = Display(NORMAL)
        with display.task("train", 3, f"unit [red]{HOSTILE}") as bar:
            bar.advance(f"[link=x]text[/link] {HOSTILE}")
            if is_guarded:
                print(f"of a library {HOSTILE}")
                print(f"of a library {HOSTILE}", file=sys.stderr)
            Display(NORMAL).line("of", "another display")
            bar.bar.refresh()
        with display.working("base", f"[red]{HOSTILE}"):
            pass

    shown = err.getvalue() + out.getvalue()
    assert "\x1b[1mof     \x1b[0m another display" in shown
    assert "[red]" in shown and "[link=x]" in shown and SAFE in shown
    assert ("of a library" in shown) == is_guarded
    for text in ("\x1b]", "\x9b", "\u202e", "\u2066", "\u061c", "\udc9b", "\x07", "\x1b[31m"):
        assert text not in shown
    assert (sys.stdout, sys.stderr) == streams


def test_what_native_code_writes_is_safe_and_no_result(capfd):
    with guarded_native():
        for number in (1, 2):
            os.write(number, f"{HOSTILE.encode(errors='replace').decode()}\n".encode())
    os.write(1, b"result\n")
    out, err = capfd.readouterr()
    assert out == "result\n" and err == f"{SAFE}\n" * 2

    with pytest.raises(KeyError), guarded_native():
        raise KeyError
    os.write(2, b"later")
    assert capfd.readouterr().err == "later"
