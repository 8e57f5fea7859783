"""What rows say beside the text of messages: marks on answers, system prompts, repeated prompts."""

import json
from datetime import date

import pytest

from mlx_packs.config.schema import DataConfig
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.formats import PREFERENCE, Chat, Row, format_of
from mlx_packs.data.messages import THOUGHTS, turns_of
from mlx_packs.data.preferences import RATED, encode_preferences
from mlx_packs.data.prompts import encode_prompts
from mlx_packs.data.token_store import masked
from tests.helpers.errors import raises
from tests.helpers.rows import chat

COLUMNS = DataConfig()
USER, SYSTEM = {"role": "user", "content": "Name a red fruit."}, "Answer as a pirate."
ANSWER = {"role": "assistant", "content": "A cherry."}
LIME = {"role": "assistant", "content": "A lime."}
SHOWN = "<|im_start|>{}\n{}<|im_end|>\n".format


def rendered(tokenizer, row: dict, task: str = "lm", columns: DataConfig = COLUMNS, **options):
    """Return the text of an example and its targets; of preferences those of the chosen side."""
    rows, options = [Row("f:1", row)], EncodingOptions(**options)
    if task == "lm":
        example = encode(rows, tokenizer, columns, options).items[0]
    else:
        row_format = RATED if task == "kto" else PREFERENCE
        example = encode_preferences(rows, tokenizer, columns, options, row_format).items[0]
    spans = masked(example, tokenizer)["spans"]
    text = "".join(span["text"] for span in spans)
    return text, [span["text"].rstrip("\n") for span in spans if span["learned"]]


def marked(**marks) -> dict:
    row = chat("Capital?", "Rome.", "Really?", "Paris.")
    row["messages"][1] |= marks
    return row


@pytest.mark.parametrize(
    "marks", [{"weight": 0.0}, {"train": False, "loss": None}, {"masked": True}]
)
def test_a_marked_answer_is_context(tokenizer, marks):
    text, targets = rendered(tokenizer, marked(**marks))
    same = rendered(tokenizer, marked(weight=1, masked=False, loss=None))
    assert same == rendered(tokenizer, marked())
    assert text == same[0] and targets == ["Paris.<|im_end|>"]
    turns = [{"from": m["role"], "value": m["content"]} for m in marked()["messages"]]
    turns[1] |= marks
    assert rendered(tokenizer, {"conversations": turns}) == (text, targets)
    row_format, row = Chat(), Row("f:1", marked(**marks))
    assert row_format.read(row, COLUMNS).answer == "Paris."
    assert "Really?" in row_format.read(row, COLUMNS, tokenizer).prompt()[0]


def test_other_marks_and_those_that_leave_no_target_are_rejected(tokenizer):
    for marks, fault in (
        ({"weight": 0.5}, "'weight' of a message must be 0 or 1"),
        ({"weight": 0, "train": True}, "contradict"),
        ({"mask": True}, "'mask' of a message is not supported"),
    ):
        with raises("data", None, "f:1", fault):
            rendered(tokenizer, marked(**marks))

    row = chat("Capital?", "Rome.")
    row["messages"][1]["weight"] = 0

    for loss_on, fault in (
        ("assistant", "every answer is marked"),
        ("completion", "the completion is marked"),
        ("all", "--loss-on assistant"),
    ):
        with raises("data", None, "f:1", fault):
            rendered(tokenizer, row, loss_on=loss_on)

    rated = {"prompt": "a", "completion": [row["messages"][1]], "label": True}
    with raises("data", None, "the completion is marked"):
        rendered(tokenizer, rated, "kto")

    row["messages"][0]["weight"] = 1
    with raises("data", None, "marks a message of user as a target"):
        rendered(tokenizer, row)


Q, A = USER["content"], ANSWER["content"]
TURNS = [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]
ROWS = {
    "chat": ({"messages": [USER, ANSWER]}, "lm"),
    "completion": ({"prompt": Q, "completion": A}, "lm"),
    "sharegpt": ({"conversations": TURNS}, "lm"),
    "dpo": ({"prompt": Q, "chosen": A, "rejected": "A lime."}, "dpo"),
    "implicit": ({"chosen": [USER, ANSWER], "rejected": [USER, LIME]}, "dpo"),
    "kto": ({"prompt": Q, "completion": A, "label": True}, "kto"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_system_prompt_in_a_column_is_the_first_message(tokenizer, name):
    row, task = ROWS[name]
    for column in ("system", "system_prompt", "system_message"):
        text, targets = rendered(tokenizer, {column: SYSTEM, **row}, task)
        assert text.startswith(SHOWN("system", SYSTEM) + SHOWN("user", Q))
        assert targets == ["A cherry.<|im_end|>"]
    for nothing in (None, "", float("nan")):
        assert rendered(tokenizer, {column: nothing, **row}, task) == rendered(tokenizer, row, task)
    with raises("data", None, f"'{column}' must be a text"):
        rendered(tokenizer, {column: 5, **row}, task)


def test_a_system_prompt_is_in_prompts_and_with_other_column_names(tokenizer):
    rows = [Row("f:1", {"system": SYSTEM, "question": "Hello?"})]
    columns = DataConfig(prompt_feature="question")
    tokens = encode_prompts(rows, tokenizer, columns, 64).tokens[0]
    expected = SHOWN("system", SYSTEM) + SHOWN("user", "Hello?") + "<|im_start|>assistant\n"
    assert tokenizer.decode(tokens) == expected
    row = {"system": SYSTEM, "question": "Hello?", "chosen": "Ahoy!", "rejected": "Good day."}
    text, _ = rendered(tokenizer, row, "dpo", columns)
    assert text == expected + "Ahoy!<|im_end|>\n"


def test_one_system_message_is_rendered_once_and_two_are_rejected(tokenizer):
    messages = [{"role": "system", "content": SYSTEM}, USER, ANSWER]
    same, row = {"system": SYSTEM, "messages": messages}, {"messages": messages}
    assert rendered(tokenizer, same) == rendered(tokenizer, row)
    with raises("data", None, "f:1: has a system message, and another one in a column"):
        rendered(tokenizer, {"system": "Be brief.", "messages": messages})
    with raises("data", None, "has system and system_prompt. Remove"):
        rendered(tokenizer, {"system": "a", "system_prompt": "b", "messages": [USER, ANSWER]})


def test_tools_are_in_one_column(tokenizer):
    one, two = ([{"name": name, "parameters": {}}] for name in ("one", "two"))
    row = {"messages": [USER, ANSWER]}
    text, _ = rendered(tokenizer, {**row, "tools": one})
    assert '"name": "one"' in text
    for columns in ({"functions": one}, {"tools": "[]", "functions": json.dumps(one)}):
        assert rendered(tokenizer, {**row, **columns})[0] == text
    with raises("data", None, "f:1: has tools and functions. Remove one of them."):
        rendered(tokenizer, {**row, "tools": one, "functions": two})


def test_variables_are_as_json_has_them(tokenizer):
    row = {"messages": [USER, ANSWER], "documents": "[]"}
    row |= {"chat_template_kwargs": {"of": date(2026, 5, 1), "x": None}}
    conversation = Chat().read(Row("f:1", row), COLUMNS, tokenizer)
    assert conversation.variables == {"of": "2026-05-01"}
    with raises("data", None, "f:1: 'chat_template_kwargs' has, in 'day', a bytes"):
        rendered(tokenizer, {**row, "chat_template_kwargs": {"day": b"x"}})
    with raises("data", None, "f:1: has 'documents'", "Write them into the messages"):
        rendered(tokenizer, {**row, "documents": [{"text": "a"}]})


ONCE = SHOWN("user", USER["content"]) + SHOWN("assistant", "A cherry.")
FIRST = {"role": "system", "content": SYSTEM}


@pytest.mark.parametrize(
    ("prompt", "before", "expected"),
    [
        (USER["content"], [USER], ONCE),
        ([USER], [{"role": "user", "content": USER["content"] + "\n"}], ONCE),
        ([FIRST, USER], [FIRST, USER], SHOWN("system", SYSTEM) + ONCE),
        (USER["content"], [FIRST, USER], SHOWN("system", SYSTEM) + ONCE),
        ([USER, LIME, USER], [USER], SHOWN("user", Q) + SHOWN("assistant", "A lime.") + ONCE),
    ],
)
def test_a_prompt_that_a_completion_repeats_is_rendered_once(tokenizer, prompt, before, expected):
    chosen, rejected = [*before, ANSWER], [*before, LIME]
    for row, task in (
        ({"prompt": prompt, "chosen": chosen, "rejected": rejected}, "dpo"),
        ({"prompt": prompt, "completion": chosen}, "lm"),
        ({"prompt": prompt, "completion": chosen, "label": True}, "kto"),
    ):
        assert rendered(tokenizer, row, task) == (expected, ["A cherry.<|im_end|>"])
    row = Row("f:1", {"prompt": prompt, "completion": chosen})
    assert format_of(row, COLUMNS).read(row, COLUMNS).answer == "A cherry."


def test_a_text_that_repeats_its_prompt_is_rejected(tokenizer):
    twice = f"{USER['content']} A cherry."
    for row, task, column in (
        ({"prompt": USER["content"], "chosen": twice, "rejected": "No."}, "dpo", "chosen"),
        ({"prompt": [USER], "completion": twice}, "lm", "completion"),
        ({"prompt": USER["content"], "completion": twice, "label": False}, "kto", "completion"),
    ):
        with raises("data", None, f"f:1: '{column}' starts with the text of the prompt"):
            rendered(tokenizer, row, task)
    for answer in ("It rains a lot", "It rains a lot."):  # which is no prompt repeated
        _, targets = rendered(tokenizer, {"prompt": "It rains a lot", "completion": answer})
        assert targets == [answer + "<|im_end|>"]


def test_an_empty_answer_before_the_last_one_is_named(tokenizer):
    for answer in ("", " \n"):
        with raises("data", None, "f:1: answer 1 is empty (message 2)", "'weight': 0"):
            rendered(tokenizer, chat("Hello", answer, "There?", "Yes."))
    row = chat("Hello", "", "There?", "Yes.")
    row["messages"][1]["weight"] = 0
    assert rendered(tokenizer, row)[1] == ["Yes.<|im_end|>"]


def test_thoughts_have_every_name_that_templates_know_and_need_no_content():
    for key in THOUGHTS:
        message = turns_of([{"role": "assistant", "content": None, key: "Hm."}])[0].message
        assert message == {"role": "assistant", "content": "", **dict.fromkeys(THOUGHTS, "Hm.")}
    with pytest.raises(ValueError, match="'content' of a message must be a text"):
        turns_of([{"role": "user", "content": None, "reasoning": "Hm."}])
    written = {**ANSWER, "content": "<think>\nHm.\n</think>\n\nA cherry.", "reasoning": "Hm."}
    with pytest.raises(ValueError, match="in its content and in 'reasoning_content'. Keep one"):
        turns_of([written])
    empty = {**written, "content": "<think>\n\n</think>\n\nA cherry."}
    assert turns_of([empty])[0].message["content"] == empty["content"]
