"""Tokens kept on disk: the same as encoded again, by however many processes, and after a kill."""

import dataclasses
import hashlib
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mlx_packs import TrainConfig, train_pack
from mlx_packs.config.schema import DataConfig
from mlx_packs.data import token_cache
from mlx_packs.data.encoding import ENCODING_VERSION, EncodingOptions, encode
from mlx_packs.data.fim import FillInTheMiddle
from mlx_packs.data.formats import Row, format_of
from mlx_packs.data.json_lines import JsonLines
from mlx_packs.data.sources import Rows, as_rows
from mlx_packs.data.token_cache import Encoder, encode_parts, parts_of, process_count
from mlx_packs.packs.base import load_base
from tests.helpers.errors import raises
from tests.helpers.rows import chat, write_rows
from tests.helpers.runs import LORA

ROWS = [Row(f"x:{i}", chat(f"Say {i}.", "yes, I will " * (i % 9 + 1))) for i in range(30)]
OPTIONS = EncodingOptions(max_seq_length=40, vocab_size=5000)
FIM = FillInTheMiddle(0.5, tokens=("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
PIECES = EncodingOptions(max_seq_length=32, long_rows="split", fim=FIM)
CONFIG, COLUMNS = DataConfig(), DataConfig(on_bad_row="skip")
CHATS = [chat(f"Say {i}.", "yes, I will " * (i % 14 + 1)) for i in range(30)]
CHATS[7:7] = [{"messages": []}, chat("word " * 60, "too late")]  # a bad row, one without targets
TEXTS = [{"text": "one two three " * (5 * i + 1)} for i in range(20)]


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of a few rows."""
    monkeypatch.setattr(token_cache, "PART_BYTES", 500)


def shards(folder, rows):
    """The rows of three files."""
    files = [folder / f"{i}.jsonl" for i in range(3)]
    for i, file in enumerate(files):
        lines = rows[len(rows) * i // 3 : len(rows) * (i + 1) // 3]
        file.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return Rows([JsonLines(file) for file in files])


def job_of(rows, tokenizer, options=OPTIONS, columns=COLUMNS):
    row_format = format_of(rows[0], columns)
    return partial(Encoder, rows, tokenizer, columns, options, row_format, rows.where(0))


def encoded(job, folder, num_proc=1):
    parts = parts_of(job.args[0], folder, "key")
    assert len(parts) > 4
    return encode_parts(job, parts, num_proc, lambda: None)


def assert_same(examples, wanted):
    for name in ("format", "loss_on", "cut", "dropped", "targets", "fingerprint"):
        assert getattr(examples, name) == getattr(wanted, name), name
    for name, array in wanted.items.parts.items():
        assert examples.items.parts[name].tolist() == array.tolist(), name
    assert examples.bad.to_json() == wanted.bad.to_json()
    assert [e.where for e in examples.items] == [e.where for e in wanted.items]


@pytest.mark.parametrize(
    ("rows", "options", "num_proc"),
    [
        (CHATS, replace(OPTIONS, ce_last_k=2), 1),
        (TEXTS, PIECES, 1),
        pytest.param(CHATS, OPTIONS, 2, marks=pytest.mark.slow),
    ],
)
def test_parts_give_the_same_as_one_piece(
    tmp_path, tokenizer, small_parts, rows, options, num_proc
):
    rows = shards(tmp_path, rows)
    assert process_count(rows, 5, num_proc) == num_proc
    wanted = encode(rows, tokenizer, COLUMNS, options)
    assert wanted.cut and (options is PIECES or (wanted.dropped == 1 and len(wanted.bad) == 1))
    assert_same(encoded(job_of(rows, tokenizer, options), tmp_path / "parts", num_proc), wanted)


def test_finished_parts_are_not_encoded_again(tmp_path, tokenizer, small_parts, monkeypatch):
    """The run was killed before the fourth; the second is damaged."""
    rows = shards(tmp_path, CHATS)
    job = job_of(rows, tokenizer)
    wanted = encoded(job, tmp_path / "parts")
    files = sorted((tmp_path / "parts").iterdir())
    files[3].unlink()
    content = files[1].read_bytes()
    files[1].unlink()
    files[1].write_bytes(content[:-50] + bytes(50))
    ranges, whole = [], token_cache.Encoder.encode

    def encode(self, start, stop):
        ranges.append((start, stop))
        whole(self, start, stop)

    monkeypatch.setattr(token_cache.Encoder, "encode", encode)
    assert_same(encoded(job, tmp_path / "parts"), wanted)
    parts = parts_of(rows, tmp_path / "parts", "key")
    assert ranges == [(parts[i].start, parts[i].stop) for i in (1, 3)]


def test_first_bad_row_stops_and_parts_before_it_stay(tmp_path, tokenizer, small_parts):
    rows = [*CHATS[:6], *CHATS[9:], {"messages": []}, *CHATS[:5], {"messages": 1}]
    rows = shards(tmp_path, rows)
    job = job_of(rows, tokenizer, columns=DataConfig())
    with raises("data", None, "2.jsonl:6"):
        encoded(job, tmp_path / "parts")
    done = [part.file.exists() for part in parts_of(rows, tmp_path / "parts", "key")]
    assert done == sorted(done, reverse=True) and len(set(done)) == 2


def test_killed_process_is_an_error_of_one_line(tmp_path, tokenizer, small_parts, monkeypatch):
    job = job_of(shards(tmp_path, CHATS), tokenizer)
    monkeypatch.setattr(token_cache, "_CODE", "import os; os.kill(os.getpid(), 9)")
    with raises("interrupted", "num_proc", "ended by SIGKILL"):
        encoded(job, tmp_path / "parts", 2)


def test_run_takes_at_most_the_wanted_processes(tmp_path, monkeypatch, small_parts):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_cache.encode_cached, "__defaults__", (1, None, None, None))
    wanted = []
    monkeypatch.setattr(token_cache, "process_count", lambda *args: wanted.append(args[1:]) or 1)
    data = write_rows(tmp_path / "d", train=TEXTS, valid=TEXTS[:2])
    train = TrainConfig(iters=1, batch_size=1, max_seq_length=64, num_proc=3, matmul_path="dense")
    train_pack("tiny", data, LORA, train, tmp_path / "pack")
    assert len(wanted) == 1 and wanted[0][0] > 4 and wanted[0][1] == 3


def test_number_of_processes(tmp_path):
    rows = shards(tmp_path, TEXTS)
    assert [process_count(rows, parts, 8) for parts in (0, 1, 3, 4, 40)] == [1, 1, 1, 2, 8]
    assert process_count(rows, 40, None) == token_cache.default_processes() >= 1
    assert process_count(as_rows(list(rows)), 40, 8) == 1  # they would be copied to each
    assert process_count(rows[1:15], 40, 8) == 8


def test_cached_tokens_are_those_encoded_once(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    rows, options = shards(tmp_path, CHATS), replace(OPTIONS, ce_last_k=3)
    wanted = encode(rows, tokenizer, COLUMNS, options)

    def cached(least_bytes=1):
        return token_cache.encode_cached(rows, tokenizer, COLUMNS, options, least_bytes, num_proc=1)

    assert cached(10**5)[1] is None and not (tmp_path / "cache").exists()  # it is for large splits
    monkeypatch.setattr(token_cache, "PART_BYTES", 500)
    examples, file = cached()
    assert_same(examples, wanted)
    assert [file] == list((tmp_path / "cache" / "tokens").iterdir())  # no parts are left
    content = file.read_bytes()

    monkeypatch.setattr(token_cache, "encode_parts", None)
    examples, same = cached()
    assert_same(examples, wanted)
    assert file == same and isinstance(examples.items[-1].tokens.base.base, np.memmap)
    with raises("data", None, "0.jsonl:8"):  # the rows that were left out are remembered
        token_cache.encode_cached(rows, tokenizer, CONFIG, options, 1)
    monkeypatch.undo()
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "whole"))
    assert cached()[1].read_bytes() == content
    monkeypatch.setenv("MLX_PACKS_CACHE", "off")
    assert cached()[1] is None


def test_key_changes_with_everything_that_tokens_depend_on(tokenizer, monkeypatch):
    keys = []

    def add(rows=ROWS, columns=CONFIG, own=tokenizer, **changes):
        keys.append(token_cache.cache_key(rows, own, columns, replace(OPTIONS, **changes)))

    add()
    assert keys[0] == token_cache.cache_key(list(ROWS), tokenizer, CONFIG, replace(OPTIONS))
    for change in (
        {"max_seq_length": 41},
        {"ce_last_k": 2},
        {"loss_on": "all"},
        {"vocab_size": 5001},
        {"long_rows": "split"},
        {"fim": FillInTheMiddle(0.5, 0.5, 0)},
        {"fim": FillInTheMiddle(0.5, 0.5, 1)},
    ):
        add(**change)

    add(columns=DataConfig(text_feature="body"))
    add([*ROWS[:-1], Row("x:29", chat("Say 29.", "no"))])
    add(ROWS[::-1])
    for tool in ({"b": 1, "a": 2}, {"a": 2, "b": 1}):  # templates see the order of keys
        add([Row(r.where, {**r.value, "tools": [tool]}) for r in ROWS])

    plain = tokenizer._tokenizer
    with monkeypatch.context() as patch:
        patch.setattr(plain, "chat_template", plain.chat_template + " ")
        add()
        patch.setattr(plain, "chat_template", "{{ strftime_now('%d') }}")
        for day in ("2026-11-21", "2026-11-22"):
            patch.setattr(token_cache.time, "strftime", lambda _, day=day: day)
            add()

    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "version", lambda name: f"another {name}")
        add()

    other = load_base("tiny").tokenizer
    other._tokenizer.add_tokens(["zebra crossing"])
    add(own=other)
    assert None not in keys and len(set(keys)) == len(keys)


def test_encoding_has_not_changed_since_its_version(tokenizer):
    """Other tokens or targets need another ENCODING_VERSION: else caches give those of before."""
    texts = [Row(f"x:{i}", {"text": "one two three " * (5 * i + 1)}) for i in range(9)]
    pairs = [Row(f"x:{i}", {"prompt": f"{i}?", "completion": "no " * i + "."}) for i in range(9)]
    digest = hashlib.sha256()
    for rows, options in (
        (ROWS, OPTIONS),
        (ROWS, EncodingOptions(loss_on="completion", ce_last_k=4)),
        (pairs, OPTIONS),
        (pairs, EncodingOptions(loss_on="all")),
        (texts, OPTIONS),
        (texts, PIECES),
    ):
        for example in encode(rows, tokenizer, CONFIG, options).items:
            digest.update(example.tokens.tobytes() + example.target.tobytes())

    assert (ENCODING_VERSION, digest.hexdigest()) == (
        5,
        "a8128330e54336797a577075f47005db67aabab0871ec9dcb902100d5b3f0f85",
    )


def test_what_the_key_cannot_cover_is_not_kept(tokenizer):
    odd = [Row("x:0", {**ROWS[0].value, "made": object()})]
    assert token_cache.cache_key(odd, tokenizer, CONFIG, OPTIONS) is None

    class OwnCode(type(tokenizer._tokenizer)):
        pass

    own = dataclasses.make_dataclass("Wrapper", ["_tokenizer"])(OwnCode.__new__(OwnCode))
    own._tokenizer._tokenizer = tokenizer._tokenizer._tokenizer
    assert token_cache.cache_key(ROWS, own, CONFIG, OPTIONS) is None
