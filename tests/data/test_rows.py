"""Reading rows, what of them is learned, and rows by number, which read as those of a list."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset, TextDataset
from mlx_lm.utils import load_tokenizer

from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.bases.turns import AnswerEnd, TurnStyle
from mlx_packs.config.schema import DataConfig
from mlx_packs.data import rows as data
from mlx_packs.data import sources
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.formats import Chat, Row, format_of
from mlx_packs.data.json_lines import JsonLines
from mlx_packs.data.rows import load_rows
from mlx_packs.data.sources import RowList, Rows, ValueList, as_rows
from mlx_packs.data.token_store import masked
from tests.helpers.errors import raises
from tests.helpers.rows import chat, write_rows

COLUMNS = DataConfig()
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One and one?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ],
    "tools": [{"type": "function", "function": {"name": "add"}}],
}

# As Qwen3: thoughts of turns before the last question are dropped, the last turn always has some.
THINKING = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')
    if '</think>' in m.content else '' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\n') %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought + '\n</think>\n\n' }}
{%- endif %}
{{- said }}
{%- for call in m.tool_calls or [] %}
{%- if said or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>' + call.function.name + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


def with_template(template: str | None):
    """A fresh tokenizer of the tiny base with another chat template."""
    tokenizer = load_tokenizer(tiny_checkpoint())
    tokenizer._tokenizer.chat_template = template
    return tokenizer


def encoded(tokenizer, *rows: dict, columns: DataConfig = COLUMNS, **options):
    rows = [Row(f"rows:{i}", row) for i, row in enumerate(rows)]
    return encode(rows, tokenizer, columns, EncodingOptions(**options))


def learned(tokenizer, row: dict, **options) -> list[str]:
    """The runs of supervised tokens of a row, decoded."""
    (example,) = encoded(tokenizer, row, **options).items
    return [span["text"] for span in masked(example, tokenizer)["spans"] if span["learned"]]


def test_load_rows_keeps_train_whole_beside_a_test_split_of_its_format(tmp_path):
    folder = write_rows(tmp_path, train=[{"text": "a"}] * 30, test=[{"text": "b"}])
    assert len(load_rows(DataConfig(data=str(folder))).rows["train"]) == 30
    write_rows(tmp_path, test=[chat("a", "b")])
    with raises("data", None, "test.jsonl:1", "chat", "train.jsonl:1", "text"):
        load_rows(DataConfig(data=str(tmp_path)))


@pytest.mark.interop
def test_read_rows_parquet_is_read_a_batch_at_a_time(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    values, file = [{"text": letter} for letter in "abcde"], tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), file, row_group_size=3)
    monkeypatch.setattr(sources, "_PARQUET_ROWS", 2)
    rows = data.read_rows(file)
    for start, stop in ((0, 5), (1, 2), (2, 4), (3, 5), (4, 4)):
        part = list(rows[start:stop])
        assert [row.value for row in part] == values[start:stop]
        assert [row.where for row in part] == [rows.where(i) for i in range(start, stop)]
    assert rows[-1].where.endswith("rows.parquet[4]") and rows.nbytes() > 0
    file.write_bytes(b"text, and no parquet")
    with raises("unreadable", None, "rows.parquet", "magic bytes not found in footer. Either"):
        data.read_rows(file)


def test_read_rows_parquet_names_the_library_that_is_missing(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises("dependency", None, "rows.parquet", "`pip install pyarrow`"):
        data.read_rows(tmp_path / "rows.parquet")


@pytest.fixture
def datasets_library(monkeypatch):
    """A substitute for the `datasets` library with one data set; records its arguments."""
    stored = {
        "train": [{"q": "1", "a": "one"}, {"q": "2", "a": "two"}],
        "validation": [{"q": "3", "a": "three"}],
        "test": [{"q": "4", "a": "four"}],
    }

    def load_dataset(path, split=None, **arguments):
        module.asked.append((path, split, arguments))
        return stored if split is None else stored[split.split("[")[0]]

    exceptions = SimpleNamespace(DatasetNotFoundError=FileNotFoundError)
    module = SimpleNamespace(asked=[], load_dataset=load_dataset, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_load_rows_missing_file_is_not_taken_for_a_hub_id(datasets_library, monkeypatch):
    with raises("not-found", "data", "rows/train.jsonl"):
        load_rows(DataConfig(data="rows/train.jsonl"))
    assert datasets_library.asked == []
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises("dependency", "data", "some/set", "`pip install datasets`"):
        load_rows(DataConfig(data="some/set"))


def test_encode_assistant_reads_tools_calls_and_results(tokenizer):
    (example,) = encoded(tokenizer, TOOL_CHAT).items
    whole = tokenizer.decode(example.tokens.tolist())
    assert "<tools>" in whole and "<tool_response>\n2" in whole
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert learned(tokenizer, TOOL_CHAT) == [call, "Two.<|im_end|>"]


def test_load_rows_hub_id_and_hf_dataset(datasets_library):
    names = {"prompt_feature": "q", "completion_feature": "a"}
    rows = load_rows(DataConfig(data="some/set", **names)).rows
    assert [len(rows[s]) for s in ("train", "valid", "test")] == [2, 1, 1]
    assert rows["valid"][0].where == "some/set/valid[0]"

    datasets_library.asked.clear()
    entry = {"path": "some/set", "valid_split": "validation", "config": {"name": "main"}, **names}
    rows = load_rows(DataConfig(hf_dataset=[entry, entry])).rows
    assert [r.value for r in rows["valid"]] == [{"prompt": "3", "completion": "three"}] * 2
    assert datasets_library.asked[0] == ("some/set", "train[:80%]", {"name": "main"})
    for entry, code, named in (
        ({"path": "some/set", "prompt_featur": "q"}, "unknown", "'prompt_feature'"),
        ({"train_split": "train"}, "invalid", "'path'"),
        (["some/set"], "invalid", "'some/set'"),
    ):
        with raises(code, "hf_dataset", named):
            load_rows(DataConfig(hf_dataset=entry))


OPENING = {"role": "assistant", "content": "I begin."}
KIND = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("row", "options", "targets"),
    [
        (
            {"messages": [KIND, *chat("Hi.", "Hello!", "And?", "Bye.")["messages"]]},
            {},
            ["Hello!", "Bye."],
        ),
        ({"messages": [OPENING, *chat("Go", "On")["messages"]]}, {}, ["I begin.", "On"]),
        (chat("née 🙂", "🙂 é\u2028漢", "🙂", "naïve 🤷🏽‍♀️"), {}, ["🙂 é\u2028漢", "naïve 🤷🏽‍♀️"]),
        (chat("yes", "yes", "assistant\nyes", "assistant\nyes"), {}, ["yes", "assistant\nyes"]),
        (chat("Hi.", "one two three"), {"ce_last_k": 2}, [" three"]),
    ],
    ids=["chat", "opened", "several tokens a character", "as the template", "last k"],
)
def test_encode_assistant_takes_each_answer_with_its_end_alone(tokenizer, row, options, targets):
    assert learned(tokenizer, row, **options) == [f"{target}<|im_end|>" for target in targets]


def test_encode_completion_finds_answers_or_says_that_a_template_hides_them(tokenizer):
    lone = learned(tokenizer, {"messages": [OPENING]}, loss_on="completion")
    assert lone == ["I begin.<|im_end|>\n"]
    rewrites = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    row = chat("a", "b")
    assert learned(with_template(rewrites), row, loss_on="completion") == ["b<|im_end|>"]
    hides = rewrites.replace("content", "content | upper") + "{{ messages[-1].content | length }}"
    with raises("data", "loss_on", "rows:0"):
        encoded(with_template(hides), row, loss_on="completion")


def test_encode_assistant_follows_the_thoughts_that_a_template_keeps():
    tokenizer = with_template(THINKING)
    row = chat("a?", "<think>\nhm\n</think>\n\nA", "b?", "<think>\nso\n</think>\n\nB")
    wanted = ["A<|im_end|>", "<think>\nso\n</think>\n\nB<|im_end|>"]
    assert learned(tokenizer, row) == wanted
    called = ["<tool_call>add</tool_call><|im_end|>", "<think>\n\n</think>\n\nTwo.<|im_end|>"]
    assert learned(tokenizer, {"messages": TOOL_CHAT["messages"][1:]}) == called


@pytest.mark.parametrize(
    "row",
    [
        chat("Hi.", "Hello!", "And?"),
        TOOL_CHAT,
        chat("🙂", "🙂\n\n"),
        {"prompt": "Two and two?", "completion": "Four. 🙂"},
    ],
    ids=["user_last", "tools", "emoji", "pair"],
)
def test_encode_completion_is_mask_prompt_of_mlx_lm(tokenizer, row):
    if "messages" in row:
        theirs = ChatDataset([row], tokenizer, mask_prompt=True)
    else:
        theirs = CompletionsDataset([row], tokenizer, "prompt", "completion", mask_prompt=True)
    tokens, offset = theirs.process(row)
    (example,) = encoded(tokenizer, row, loss_on="completion").items
    assert example.tokens.tolist() == tokens
    assert np.flatnonzero(example.target).tolist() == list(range(offset, len(tokens)))


@pytest.mark.parametrize("text", ["Once upon a time", "ends itself<|im_end|>"])
def test_encode_text_is_what_mlx_lm_encodes(tokenizer, text):
    tokens, _ = TextDataset([], tokenizer).process({"text": text})
    (example,) = encoded(tokenizer, {"text": text}).items
    assert example.tokens.tolist() == tokens and example.target[1:].all()


def test_encode_finds_columns_under_other_names(tokenizer):
    columns = DataConfig(prompt_feature="q", completion_feature="a", chat_feature="turns")
    pair = {"q": "One?", "a": "1", "text": "not this"}
    plain = {"prompt": "One?", "completion": "1"}
    (renamed,) = encoded(tokenizer, pair, columns=columns).items
    (usual,) = encoded(tokenizer, plain).items
    assert renamed.tokens.tolist() == usual.tokens.tolist()
    turns = {"turns": chat("One?", "1")["messages"]}
    assert encoded(tokenizer, turns, columns=columns).format == "chat"


def test_encode_counts_rows_that_are_cut_or_lose_every_target(tokenizer):
    short, long_answer = chat("Hi.", "Yes."), chat("Hi.", "word " * 50)
    long_prompt = chat("word " * 50, "Yes.")
    examples = encoded(tokenizer, short, long_answer, long_prompt, max_seq_length=30)
    assert (len(examples), examples.cut, examples.dropped) == (2, 2, 1)
    assert max(len(e.tokens) for e in examples.items) == 30
    (example,) = encoded(tokenizer, long_answer, max_seq_length=20, ce_last_k=3).items
    assert np.flatnonzero(example.target).tolist() == [17, 18, 19]


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"messages": [{"content": "a"}]}, ["'role'", '{"content": "a"}']),
        ({"messages": [{"role": "user", "content": ["a"]}]}, ["'content'", '["a"]']),
        ({"text": ""}, ["'text'", "empty"]),
        ({**chat("a", "b"), "tools": "{"}, ["'tools'", "JSON"]),
        ({"instruction": "Q", "output": float("nan")}, ["'output' must be a text, but is nan"]),
    ],
)
def test_encode_names_row_and_fault(tokenizer, row, names):
    with raises("data", None, "rows:0", *names):
        encoded(tokenizer, row)


def test_encode_rejects_what_a_format_does_not_have(tokenizer):
    with raises("conflict", "loss_on", "assistant"):
        encoded(tokenizer, {"text": "a"}, loss_on="assistant")
    with raises("conflict", "task", "rows:0", "pairs"):
        encoded(tokenizer, {"anchor": "a", "positive": "b"})
    with raises("conflict", "long_rows", "rows:0", "chat"):
        encoded(tokenizer, chat("a", "b"), long_rows="split")


def test_encode_without_chat_template_says_what_to_do():
    plain = with_template(None)
    plain.has_chat_template = False
    with raises("unsupported", None, "rows:0", "chat template", "'text'"):
        encoded(plain, chat("a", "b"))
    assert len(encoded(plain, {"text": "a"})) == 1


def test_encode_slow_tokenizer_says_what_to_do():
    def refuse(*_, **arguments):
        if arguments["return_offsets_mapping"]:
            raise NotImplementedError
        return {"input_ids": [[5, 6, 7]]}

    class Slow:
        eos_token_ids, all_special_ids, has_chat_template = {7}, [], True
        _tokenizer = staticmethod(refuse)
        _chat_template = staticmethod(lambda messages, **_: "x" * len(messages))
        _turn_style = (None, TurnStyle(AnswerEnd(7)))

    with raises("unsupported", "loss_on", "--loss-on all"):
        encoded(Slow, chat("a", "b"), loss_on="completion")
    assert len(encoded(Slow, chat("a", "b"), loss_on="all")) == 1


@pytest.mark.parametrize(
    ("row", "shown", "asked"),
    [
        (chat("Hi.", "Ho.", "And?", "No."), "Hi.", "user\nHi."),
        ({"prompt": "One?", "completion": "1"}, "One?", "user\nOne?"),
        (TOOL_CHAT, "One and one?", "<tools>"),
    ],
    ids=["chat", "completion", "tools"],
)
def test_prompt_is_what_stands_before_the_first_answer(tokenizer, row, shown, asked):
    row = Row("x", row)
    text, tokens = format_of(row, COLUMNS).read(row, COLUMNS, tokenizer).prompt()
    rendered = tokenizer.decode(tokens)
    assert text == shown and asked in rendered
    assert rendered.endswith("assistant\n") and rendered.count("<|im_start|>assistant") == 1


TURNS = chat("Q1", "A1", "Q2", "A2")["messages"]


@pytest.mark.parametrize("answers", [1, 2])
def test_of_a_completion_after_several_turns_the_last_answer_is_asked(tokenizer, answers):
    at = 3 if answers == 1 else 1
    row = Row("x", {"prompt": TURNS[:at], "completion": TURNS[at:]})
    row_format = format_of(row, COLUMNS)
    shown, tokens = row_format.read(row, COLUMNS, tokenizer).prompt()
    assert (shown, row_format.read(row, COLUMNS).answer) == ("Q2", "A2")
    (example,) = encoded(tokenizer, row.value).items
    assert example.tokens[: len(tokens)].tolist() == tokens
    assert not example.target[: len(tokens)].any() and example.target[len(tokens) :].all()


def test_prompt_of_a_text_is_its_beginning_and_of_an_opened_chat_its_first_question(tokenizer):
    row = Row("x", {"text": "word " * 80})
    text, tokens = format_of(row, COLUMNS).read(row, COLUMNS, tokenizer).prompt()
    assert row.value["text"].startswith(text) and len(tokens) == 32
    short = Row("x", {"text": "In the beginning God"})
    count = len(tokenizer.encode(short.value["text"]))
    assert len(format_of(short, COLUMNS).read(short, COLUMNS, tokenizer).prompt()[1]) == count // 2
    row = Row("x", {"messages": [OPENING, *chat("Q", "A")["messages"]]})
    assert Chat().read(row, COLUMNS).answer == "A"
    assert Chat().read(row, COLUMNS, tokenizer).prompt()[0] == "Q"


@pytest.mark.parametrize("empty", [None, "", float("nan")])
def test_optional_columns_may_be_empty(tokenizer, empty):
    row = {"instruction": "Q", "output": "A"}
    expected = encoded(tokenizer, row).items[0].tokens.tolist()
    more = dict.fromkeys(("input", "system", "history", "tools"), empty)
    assert encoded(tokenizer, {**row, **more}).items[0].tokens.tolist() == expected
    named = DataConfig(prompt_feature="instruction", completion_feature="output")
    whole = Row("x", {**row, "input": empty})
    assert format_of(whole, named).read(whole, named).answer == "A"


MESSAGES = chat("Hi", "ok")["messages"]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [], "prompt": "a", "completion": "b"}, "completion"),
        ({"anchor": "a", "positive": "b", "negative": "c"}, "triplets"),
        ({"sentence1": "a", "sentence2": "b", "score": 1}, "scored pairs"),
        ({"prompt": None, "completion": None, "messages": MESSAGES}, "chat"),  # null is no column
        ({"messages": None}, "chat"),  # which then names the fault
    ],
)
def test_a_row_has_the_first_format_that_it_matches(row, name):
    assert format_of(Row("x", row), COLUMNS).name == name


@pytest.fixture
def row_sources(tmp_path):
    """A file, a list of rows, one without rows, and a list of values: the numbers from 0 to 999."""
    values = [{"text": str(i)} for i in range(1000)]
    lines = "".join(json.dumps(value) + "\n" for value in values[:400])
    (tmp_path / "rows.jsonl").write_text(lines)
    listed = [Row(f"list:{i}", values[i]) for i in range(400, 640)]
    return [
        JsonLines(tmp_path / "rows.jsonl"),
        RowList(listed),
        RowList([]),
        ValueList("values", values[640:], dict),
    ]


def numbers(rows) -> list[int]:
    return [int(row.value["text"]) for row in rows]


def test_rows_are_those_of_one_source_after_another(row_sources):
    rows = Rows(row_sources)
    assert numbers(rows) == list(range(1000)) and len(rows) == 1000

    edges = [rows.where(i).rpartition("/")[2] for i in (0, 399, 400, 639, 640, 999)]
    assert edges[:3] == ["rows.jsonl:1", "rows.jsonl:400", "list:400"]
    assert edges[3:] == ["list:639", "values[0]", "values[359]"]

    assert [rows[i].where for i in range(1000)] == [rows.where(i) for i in range(1000)]
    assert rows[-1].value == {"text": "999"} and numbers(rows[398:402]) == [398, 399, 400, 401]

    with pytest.raises(IndexError):
        _ = rows[1000]


@pytest.mark.parametrize(
    "indices",
    [[], [999], [399, 400, 639, 640], [3, 4, 5, 50, 51, 700]],
)
def test_selected_rows_are_read_in_any_part(row_sources, indices):
    rows = Rows(row_sources)
    selected = rows.select(np.array(indices, int))
    for part in (slice(None), slice(1, 3), slice(2, 100), slice(-2, None), slice(5, 2)):
        assert numbers(selected[part]) == indices[part]
    places = [selected.where(i) for i in range(len(selected))]
    assert places == [row.where for row in selected] == [rows.where(i) for i in indices]
    assert 0 < selected.nbytes() <= rows.nbytes() or not indices
    if indices:
        assert selected[-1].value == {"text": str(indices[-1])}
    part = rows[350:700].select(np.arange(0, 350, 3))[10:90]
    assert numbers(part) == list(range(350, 700, 3))[10:90]
    assert numbers(part.select(np.array([0, 5, 79]))) == [380, 395, 617]


def test_key_is_that_of_the_content_and_the_selection_and_the_fingerprint_of_the_content(
    row_sources,
):
    rows = Rows(row_sources)
    parts = [rows, rows[:5], rows[1:], rows.select(np.array([1, 5])), Rows(row_sources[:2])]
    keys = [part.content_key() for part in parts]
    assert None not in keys and len(set(keys)) == len(keys)
    assert keys[3] == rows.select(np.array([1, 5], np.int32)).content_key()
    assert as_rows([Row("x", {"text": object()})]).content_key() is None
    rows = [Row("a:1", {"text": "x"}), Row("a:2", {"text": "y"})]
    moved = [Row("b:9", {"text": "x"}), Row("c:1", {"text": "y"})]
    own, same, other = (as_rows(each).fingerprint() for each in (rows, moved, rows[::-1]))
    assert own == same != other
