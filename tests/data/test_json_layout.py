"""The layout of the JSON in training rows, which packs record."""

import json

import pytest

from mlx_packs.config.schema import DataConfig
from mlx_packs.data.json_layout import json_layout
from tests.helpers.rows import chat, train_split

NAMES = DataConfig()
VALUES = [{"spam": True, "amount": "£5", "to": {"town": "Bath, a: b"}}, {"spam": False, "to": {}}]
SPACES = {"item_separator": ", ", "key_separator": ": "}


def layout_of(*answers: str) -> dict:
    rows = [{"prompt": "Extract.", "completion": answer} for answer in answers]
    return json_layout(train_split(rows), NAMES)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({}, SPACES),
        ({"separators": (",", ":")}, {"item_separator": ",", "key_separator": ":"}),
        ({"indent": 2}, {"item_separator": ",", "key_separator": ": ", "inside": "\n  "}),
        ({"separators": (" , ", " : ")}, {"item_separator": " , ", "key_separator": " : "}),
    ],
)
def test_separators_and_indentation_are_those_of_the_rows(options, layout):
    answers = [json.dumps(value, **options) for value in VALUES] * 2
    measured = layout_of(*answers)
    assert set(measured.pop("keys")) == {"spam", "amount", "to", "town"}
    assert measured == layout


def test_rows_that_are_not_json_do_not_count():
    assert layout_of("red", "blue", "green") == {}
    others = ["No JSON: {a}", "[1, ", '{"a" 1}', "[1,\\"]
    measured = layout_of(*[json.dumps(VALUES[0])] * 2, *others)
    keys = measured.pop("keys")
    assert measured == SPACES
    assert [key for key in keys if key in VALUES[0]] == list(VALUES[0])


def test_a_part_is_exact_where_nearly_all_rows_agree():
    spaces = json.dumps(VALUES[0])
    compact = json.dumps(VALUES[0], separators=(",", ":"))
    assert layout_of(*[spaces] * 19, compact) == layout_of(spaces)
    assert set(layout_of(spaces, compact)) == {"keys"}
    lines = json.dumps(VALUES[0], indent=2)
    assert layout_of(*[spaces] * 3, lines)["inside"] == "\n  "


@pytest.mark.parametrize(
    ("answer", "opening"), [("```json\n{}\n```", "```json\n"), (" {}\n", " "), ("\n{}", "\n")]
)
def test_what_stands_before_the_json(answer, opening):
    layout = layout_of(*[answer.replace("{}", '{ "a": 1 }')] * 3)
    assert layout.pop("opening") == opening
    assert layout == {"key_separator": ": ", "inside": " ", "keys": ["a"]}
    layout = {"key_separator": ": ", "keys": ["a"]}
    for thought in ("<think>\nWhich {one}?\n</think>\n\n", "Is it?</think>"):
        assert layout_of(*[thought + '{"a": 1}'] * 3) == layout | {"thoughts": True}
        assert layout_of(thought + '{"a": 1}', *['{"a": 1}'] * 20) == layout


def test_the_optional_keys_of_rows_have_one_order():
    answers = ['{"a": 1, "c": 3}', '{"b": 2, "c": 3}', '{"a": 1, "b": 2}']
    assert layout_of(*answers * 2)["keys"] == ["a", "b", "c"]
    assert "keys" not in layout_of('{"a": 1, "b": 2}', '{"b": 1, "a": 2}', '{"a": 1}')
    many = [json.dumps({f"name {i}": i}) for i in range(300)]  # keys that are values
    assert layout_of(*many) == {"key_separator": ": "}


def test_chats_chosen_completions_and_calls_have_one():
    """In another order of keys, a call would have the values of other keys."""
    pair = {"prompt": "?", "chosen": '{"a": 1}', "rejected": '{"a":1}'}
    for row in (chat("?", '{"a": 1}'), pair):
        assert json_layout(train_split([row] * 4), NAMES) == {"key_separator": ": ", "keys": ["a"]}
    function = {"name": "f", "arguments": {"word": "a", "at": {"n": 1}}}
    row = chat("?", "")
    row["messages"][1]["tool_calls"] = [{"type": "function", "function": function}]
    keys = json_layout(train_split([row] * 3), NAMES)["keys"]
    assert set(keys) == {"word", "at", "n"} and keys.index("word") < keys.index("at")
