"""Reading rows, and what of them is learned."""

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
from mlx_packs.data.rows import load_rows
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
LLAMA = """
{{- '<|endoftext|>' }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""


def with_template(template: str | None, *specials: str):
    """A fresh tokenizer of the tiny base with another chat template and more special tokens."""
    tokenizer = load_tokenizer(tiny_checkpoint())
    tokenizer._tokenizer.chat_template = template
    tokenizer._tokenizer.add_tokens(list(specials), special_tokens=True)
    return tokenizer


def encoded(tokenizer, *rows: dict, columns: DataConfig = COLUMNS, **options):
    rows = [Row(f"rows:{i}", row) for i, row in enumerate(rows)]
    return encode(rows, tokenizer, columns, EncodingOptions(**options))


def learned(tokenizer, row: dict, **options) -> list[str]:
    """The runs of supervised tokens of a row, decoded."""
    (example,) = encoded(tokenizer, row, **options).items
    runs, last = [], False
    for token, target in zip(example.tokens.tolist(), example.target.tolist(), strict=True):
        if target:
            runs = [*runs[:-1], [*runs[-1], token]] if last else [*runs, [token]]
        last = target
    return [tokenizer.decode(run) for run in runs]


def test_load_rows_keeps_train_whole_beside_a_test_split(tmp_path):
    folder = write_rows(tmp_path, train=[{"text": "a"}] * 30, test=[{"text": "b"}])
    assert len(load_rows(DataConfig(data=str(folder))).rows["train"]) == 30


def test_load_rows_rejects_splits_of_different_formats(tmp_path):
    write_rows(tmp_path, train=[chat("a", "b")], test=[{"text": "c"}])
    with raises("data", None, "test.jsonl:1", "text", "train.jsonl:1", "chat"):
        load_rows(DataConfig(data=str(tmp_path)))


def test_read_rows_keeps_line_separators_inside_strings(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a\u2028b\x85c"}\r\n\n{"text": "d"}', "utf-8")
    rows = data.read_rows(tmp_path / "rows.jsonl")
    assert [r.value["text"] for r in rows] == ["a\u2028b\x85c", "d"]
    assert rows[1].where.endswith("rows.jsonl:3")


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


def test_load_rows_hub_id_takes_validation_for_valid(datasets_library):
    columns = DataConfig(data="some/set", prompt_feature="q", completion_feature="a")
    rows = load_rows(columns).rows
    assert [len(rows[s]) for s in ("train", "valid", "test")] == [2, 1, 1]
    assert rows["valid"][0].where == "some/set/valid[0]"


def test_load_rows_hf_dataset_renames_columns_and_joins_entries(datasets_library):
    entry = {"path": "some/set", "valid_split": "validation", "config": {"name": "main"}}
    entry |= {"prompt_feature": "q", "completion_feature": "a"}
    rows = load_rows(DataConfig(hf_dataset=[entry, entry])).rows
    assert [r.value for r in rows["valid"]] == [{"prompt": "3", "completion": "three"}] * 2
    assert datasets_library.asked[0] == ("some/set", "train[:80%]", {"name": "main"})


@pytest.mark.parametrize(
    ("entry", "code", "names"),
    [
        ({"path": "some/set", "prompt_featur": "q"}, "unknown", "'prompt_feature'"),
        ({"train_split": "train"}, "invalid", "'path'"),
        (["some/set"], "invalid", "'some/set'"),
    ],
)
def test_load_rows_hf_dataset_names_what_is_wrong(datasets_library, entry, code, names):
    with raises(code, "hf_dataset", names):
        load_rows(DataConfig(hf_dataset=entry))


def test_encode_assistant_reads_tools_calls_and_results(tokenizer):
    (example,) = encoded(tokenizer, TOOL_CHAT).items
    whole = tokenizer.decode(example.tokens.tolist())
    assert "<tools>" in whole and "<tool_response>\n2" in whole
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert learned(tokenizer, TOOL_CHAT) == [call, "Two.<|im_end|>"]


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


def test_encode_assistant_follows_a_template_of_headers_and_eot():
    llama = with_template(LLAMA, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    llama.add_eos_token("<|eot_id|>")
    row = chat("a?", " A ", "b?", "B")
    assert learned(llama, row) == ["A<|eot_id|>", "B<|eot_id|>"]


def test_encode_takes_the_first_token_from_the_template_alone():
    llama = with_template(LLAMA)
    (example,) = encoded(llama, chat("a?", "A"), loss_on="all").items
    start = llama.convert_tokens_to_ids("<|endoftext|>")
    assert example.tokens.tolist().count(start) == 1 and example.tokens[0] == start
    assert not example.target[0] and example.target[1:].all()


@pytest.mark.parametrize(
    "row",
    [
        chat("Hi.", "Hello!", "And?", "Bye."),
        chat("Hi.", "Hello!", "And?"),
        TOOL_CHAT,
        chat("🙂", "🙂\n\n"),
        {"prompt": "Two and two?", "completion": "Four. 🙂"},
    ],
    ids=["turns", "user_last", "tools", "emoji", "pair"],
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


def test_encode_ce_last_k_counts_from_the_end_of_a_cut_row(tokenizer):
    row = chat("Hi.", "word " * 50)
    (example,) = encoded(tokenizer, row, max_seq_length=20, ce_last_k=3).items
    assert np.flatnonzero(example.target).tolist() == [17, 18, 19]


@pytest.mark.parametrize(
    ("row", "options", "names"),
    [
        ({"messages": "Hi"}, {}, ["'messages'", '"Hi"']),
        ({"messages": [{"content": "a"}]}, {}, ["'role'", '{"content": "a"}']),
        ({"messages": [{"role": "user", "content": ["a"]}]}, {}, ["'content'", '["a"]']),
        ({"text": ""}, {}, ["'text'", "empty"]),
        ({**chat("a", "b"), "tools": "{"}, {}, ["'tools'", "JSON"]),
        ({"instruction": "Q", "output": float("nan")}, {}, ["'output' must be a text, but is nan"]),
        (chat("a" * 99, "b"), {"max_seq_length": 8}, ["--max-seq-length 8"]),
    ],
)
def test_encode_names_row_and_fault(tokenizer, row, options, names):
    with raises("data", None, "rows:0", *names):
        encoded(tokenizer, row, **options)


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


def test_a_chat_that_the_assistant_opens_is_asked_for_its_first_reply(tokenizer):
    turns = [{"role": "assistant", "content": "Hello."}, *chat("Q", "A")["messages"]]
    row = Row("x", {"messages": turns})
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


def test_prompt_of_a_text_is_its_beginning(tokenizer):
    row = Row("x", {"text": "word " * 80})
    text, tokens = format_of(row, COLUMNS).read(row, COLUMNS, tokenizer).prompt()
    assert row.value["text"].startswith(text) and len(tokens) == 32
    short = Row("x", {"text": "In the beginning God"})
    count = len(tokenizer.encode(short.value["text"]))
    assert len(format_of(short, COLUMNS).read(short, COLUMNS, tokenizer).prompt()[1]) == count // 2


MESSAGES = chat("Hi", "ok")["messages"]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [], "text": "a"}, "chat"),
        ({"messages": [], "prompt": "a", "completion": "b"}, "completion"),
        ({"anchor": "a", "positive": "b", "negative": "c"}, "triplets"),
        ({"anchor": "a", "positive": "b", "score": 1}, "pairs"),
        ({"sentence1": "a", "sentence2": "b", "score": 1}, "scored pairs"),
        ({"prompt": None, "completion": None, "messages": MESSAGES}, "chat"),  # null is no column
        ({"messages": None}, "chat"),  # which then names the fault
    ],
)
def test_a_row_has_the_first_format_that_it_matches(row, name):
    assert format_of(Row("x", row), COLUMNS).name == name
