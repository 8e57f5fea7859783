"""Tokens kept on disk: the same as encoded again, or encoded again."""

import dataclasses
import hashlib
import os
import time
from dataclasses import replace

import numpy as np
import pytest

from mlx_packs import TrainConfig, train_pack
from mlx_packs.config.schema import DataConfig
from mlx_packs.data import token_cache
from mlx_packs.data.encoding import ENCODING_VERSION, EncodingOptions, encode
from mlx_packs.data.fim import FillInTheMiddle
from mlx_packs.data.formats import Row
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.helpers.rows import chat, write_rows
from tests.helpers.runs import LORA

CONFIG = DataConfig()
ROWS = [Row(f"x:{i}", chat(f"Say {i}.", "yes, I will " * (i % 9 + 1))) for i in range(30)]
OPTIONS = EncodingOptions(max_seq_length=40, vocab_size=5000)


@pytest.fixture
def token_folder(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def encode_cached(rows, tokenizer, options=OPTIONS, least_bytes=1):
    return token_cache.encode_cached(rows, tokenizer, CONFIG, options, least_bytes)


@pytest.fixture
def no_encoding(monkeypatch):
    """From here on everything must come from the cache."""

    def refuse():
        def fail(*_, **__):
            raise AssertionError("encoded again")

        monkeypatch.setattr(token_cache, "encode", fail)

    return refuse


def assert_same_examples(cached, wanted):
    assert len(cached) == len(wanted)
    for name in ("format", "loss_on", "cut", "dropped", "targets"):
        assert getattr(cached, name) == getattr(wanted, name), name
    assert cached.lengths.tolist() == wanted.lengths.tolist()
    for a, b in zip(cached.items, wanted.items, strict=True):
        assert a.where == b.where
        assert a.tokens.dtype == b.tokens.dtype and np.array_equal(a.tokens, b.tokens)
        assert a.target.dtype == b.target.dtype and np.array_equal(a.target, b.target)


def test_cached_tokens_are_those_encoded_once(tokenizer, token_folder, no_encoding):
    options = replace(OPTIONS, ce_last_k=3)
    rows = [*ROWS, Row("x:long", chat("word " * 60, "too late"))]  # loses every target
    wanted = encode(rows, tokenizer, CONFIG, options)
    assert wanted.dropped == 1
    assert_same_examples(encode_cached(rows, tokenizer, options)[0], wanted)
    no_encoding()
    cached, file = encode_cached(rows, tokenizer, options)
    assert_same_examples(cached, wanted)
    assert [file] == list(token_folder.iterdir())
    assert isinstance(cached.items[-1].tokens.base.base, np.memmap)
    assert cached.items[-1].where == wanted.items[-1].where


def other_requests():
    """Rows, columns and options of which one thing is not as usual."""
    for change in (
        {"max_seq_length": 41},
        {"ce_last_k": 2},
        {"loss_on": "all"},
        {"vocab_size": 5001},
        {"long_rows": "split"},
        {"fim": FillInTheMiddle(0.5, 0.5, 0)},
        {"fim": FillInTheMiddle(0.6, 0.5, 0)},
        {"fim": FillInTheMiddle(0.5, 0.4, 0)},
        {"fim": FillInTheMiddle(0.5, 0.5, 1)},
        {"fim": FillInTheMiddle(0.5, 0.5, 0, ("a", "b", "c"))},
    ):
        yield ROWS, CONFIG, replace(OPTIONS, **change)

    yield ROWS, DataConfig(text_feature="body"), OPTIONS
    yield [*ROWS[:-1], Row("x:29", chat("Say 29.", "no"))], CONFIG, OPTIONS
    yield ROWS[::-1], CONFIG, OPTIONS

    for tool in ({"b": 1, "a": 2}, {"a": 2, "b": 1}):  # templates see the order of keys
        yield [Row(r.where, {**r.value, "tools": [tool]}) for r in ROWS], CONFIG, OPTIONS


def test_key_changes_with_everything_that_tokens_depend_on(tokenizer, monkeypatch):
    keys = [token_cache.cache_key(ROWS, tokenizer, CONFIG, OPTIONS)]
    assert keys[0] == token_cache.cache_key(list(ROWS), tokenizer, CONFIG, replace(OPTIONS))
    for rows, config, options in other_requests():
        keys.append(token_cache.cache_key(rows, tokenizer, config, options))

    plain = tokenizer._tokenizer
    with monkeypatch.context() as patch:
        patch.setattr(plain, "chat_template", plain.chat_template + " ")
        keys.append(token_cache.cache_key(ROWS, tokenizer, CONFIG, OPTIONS))
        patch.setattr(plain, "chat_template", "{{ strftime_now('%d') }}")
        for day in ("2026-11-21", "2026-11-22"):
            patch.setattr(token_cache.time, "strftime", lambda _, day=day: day)
            keys.append(token_cache.cache_key(ROWS, tokenizer, CONFIG, OPTIONS))

    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "version", lambda name: f"another {name}")
        keys.append(token_cache.cache_key(ROWS, tokenizer, CONFIG, OPTIONS))

    other = load_base("tiny").tokenizer
    other._tokenizer.add_tokens(["zebra crossing"])
    keys.append(token_cache.cache_key(ROWS, other, CONFIG, OPTIONS))

    assert None not in keys and len(set(keys)) == len(keys)


def test_encoding_has_not_changed_since_its_version(tokenizer):
    """Other tokens or targets need another ENCODING_VERSION: else caches give those of before."""
    texts = [Row(f"x:{i}", {"text": "one two three " * (5 * i + 1)}) for i in range(9)]
    pairs = [Row(f"x:{i}", {"prompt": f"{i}?", "completion": "no " * i + "."}) for i in range(9)]
    fim = FillInTheMiddle(0.5, tokens=("<|im_start|>", "<|im_end|>", "<|endoftext|>"))

    digest = hashlib.sha256()
    for rows, options in (
        (ROWS, OPTIONS),
        (ROWS, EncodingOptions(loss_on="completion", ce_last_k=4)),
        (pairs, OPTIONS),
        (pairs, EncodingOptions(loss_on="all")),
        (texts, OPTIONS),
        (texts, EncodingOptions(max_seq_length=32, long_rows="split", fim=fim)),
    ):
        for example in encode(rows, tokenizer, CONFIG, options).items:
            digest.update(example.tokens.tobytes() + example.target.tobytes())

    assert (ENCODING_VERSION, digest.hexdigest()) == (
        5,
        "a8128330e54336797a577075f47005db67aabab0871ec9dcb902100d5b3f0f85",
    )


@pytest.mark.parametrize("how", ["one bit", "another key"])
def test_damaged_entry_is_encoded_again_and_replaced(tokenizer, token_folder, no_encoding, how):
    wanted, file = encode_cached(ROWS, tokenizer)
    whole = file.read_bytes()
    damaged = whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:]
    if how == "another key":  # a whole entry under a wrong name
        damaged = encode_cached(ROWS[:5], tokenizer)[1].read_bytes()
    file.unlink()  # not in place: it is mapped
    file.write_bytes(damaged)
    cached, _ = encode_cached(ROWS, tokenizer)
    assert_same_examples(cached, wanted)
    assert file.read_bytes() == whole
    no_encoding()
    assert_same_examples(encode_cached(ROWS, tokenizer)[0], wanted)


def test_cache_that_cannot_be_written_stops_nothing(tokenizer, tmp_path, token_folder, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "file"))
    cached, file = encode_cached(ROWS, tokenizer)
    assert file is None and len(cached) == 30


def test_cache_is_for_large_splits_and_can_be_off(tokenizer, token_folder, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", "off")
    assert encode_cached(ROWS, tokenizer)[1] is None
    monkeypatch.setenv("MLX_PACKS_CACHE", str(token_folder.parent))
    assert encode_cached(ROWS, tokenizer, least_bytes=10**5)[1] is None
    assert not token_folder.exists()


def test_what_the_key_cannot_cover_is_not_kept(tokenizer, token_folder):
    odd = [Row("x:0", {**ROWS[0].value, "made": object()})]
    assert token_cache.cache_key(odd, tokenizer, CONFIG, OPTIONS) is None

    class OwnCode(type(tokenizer._tokenizer)):
        pass

    own = dataclasses.make_dataclass("Wrapper", ["_tokenizer"])(OwnCode.__new__(OwnCode))
    own._tokenizer._tokenizer = tokenizer._tokenizer._tokenizer
    assert token_cache.cache_key(ROWS, own, CONFIG, OPTIONS) is None


def test_entries_unread_for_a_month_are_removed(tokenizer, token_folder):
    files = [encode_cached(ROWS[:n], tokenizer)[1] for n in (5, 6)]
    files.append(token_folder / "of-an-earlier-version.safetensors")
    files[-1].touch()
    month_ago = time.time() - 31 * 24 * 3600
    for file in files:
        os.utime(file, (month_ago, month_ago))
    encode_cached(ROWS[:5], tokenizer)  # read: it stays
    encode_cached(ROWS[:7], tokenizer)
    assert [file.exists() for file in files] == [True, False, False]
    assert len(list(token_folder.iterdir())) == 2


def test_run_from_cached_tokens_equals_one_without(tmp_path, monkeypatch):
    note = "x" * (token_cache.WORTHWHILE_BYTES // 29)  # in no template: a split worth a cache
    rows = [{**r.value, "note": note} for r in ROWS]
    data = write_rows(tmp_path / "d", train=rows, valid=[ROWS[0].value])
    settings = {"iters": 1, "batch_size": 2, "max_seq_length": 64, "matmul_path": "dense"}
    train = TrainConfig(**settings, packing=True)
    expected = train_pack("tiny", data, LORA, train, tmp_path / "without").pack.tensors
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    tensors = train_pack("tiny", data, LORA, train, tmp_path / "mapped").pack.tensors
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1
    for name, tensor in expected.items():
        assert mx.array_equal(tensor, tensors[name]).item(), name
