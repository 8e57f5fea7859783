"""Tokens kept on disk: the same as encoded again, or encoded again."""

import dataclasses
import os
import time

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, train_pack
from mlx_packs.config.schema import DataConfig
from mlx_packs.data import token_cache
from mlx_packs.data.encoding import encode
from mlx_packs.data.rows import Row
from mlx_packs.data.token_cache import encode_cached
from mlx_packs.errors import PackError
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.helpers.rows import chat, write_rows

CONFIG = DataConfig()
ROWS = [Row(f"x:{i}", chat(f"Say {i}.", "yes, I will " * (i % 9 + 1))) for i in range(30)]
OPTIONS = {"max_seq_length": 40, "vocab_size": 5000}


@pytest.fixture(scope="module")
def tokenizer():
    return load_base("tiny").tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache that keeps the smallest splits."""
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_cache, "_WORTHWHILE_BYTES", 1)
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def no_encoding(monkeypatch):
    """From here on everything must come from the cache."""

    def refuse():
        def fail(*_, **__):
            raise AssertionError("encoded again")

        monkeypatch.setattr(token_cache, "encode", fail)

    return refuse


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for name in ("format", "loss_on", "cut", "dropped", "targets"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.lengths.tolist() == wanted.lengths.tolist()
    for a, b in zip(found.items, wanted.items, strict=True):
        assert a.where == b.where
        assert a.tokens.dtype == b.tokens.dtype and np.array_equal(a.tokens, b.tokens)
        assert a.target.dtype == b.target.dtype and np.array_equal(a.target, b.target)


@pytest.mark.parametrize("options", [OPTIONS, {"loss_on": "all", "ce_last_k": 3}], ids=str)
def test_cached_tokens_are_those_encoded_and_are_not_encoded_again(
    tokenizer, folder, no_encoding, options
):
    rows = [*ROWS, Row("x:long", chat("word " * 60, "too late"))]  # loses every target
    wanted = encode(rows, tokenizer, CONFIG, **options)
    assert wanted.dropped == ("max_seq_length" in options)
    assert_same(encode_cached(rows, tokenizer, CONFIG, **options)[0], wanted)
    no_encoding()
    found, file = encode_cached(rows, tokenizer, CONFIG, **options)
    assert_same(found, wanted)
    assert [file] == list(folder.iterdir())
    assert isinstance(found.items[-1].tokens.base.base, np.memmap)
    assert found.items[-1].where == wanted.items[-1].where


def changed(tokenizer):
    rows = [*ROWS[:-1], Row("x:29", chat("Say 29.", "no"))]
    reordered = [Row(r.where, {**r.value, "tools": [{"b": 1, "a": 2}]}) for r in ROWS]
    return {
        "options": (ROWS, CONFIG, {**OPTIONS, "max_seq_length": 41}),
        "last k": (ROWS, CONFIG, {**OPTIONS, "ce_last_k": 2}),
        "loss on": (ROWS, CONFIG, {**OPTIONS, "loss_on": "all"}),
        "vocabulary": (ROWS, CONFIG, {**OPTIONS, "vocab_size": 5001}),
        "columns": (ROWS, DataConfig(text_feature="body"), OPTIONS),
        "rows": (rows, CONFIG, OPTIONS),
        "order": (ROWS[::-1], CONFIG, OPTIONS),
        "tools": (reordered, CONFIG, OPTIONS),
        "order of keys": (
            [Row(r.where, {**r.value, "tools": [{"a": 2, "b": 1}]}) for r in ROWS],
            CONFIG,
            OPTIONS,
        ),
    }


def test_key_changes_with_everything_that_tokens_depend_on(tokenizer, monkeypatch):
    keys = [token_cache.cache_key(ROWS, tokenizer, CONFIG, OPTIONS)]
    assert keys[0] == token_cache.cache_key(list(ROWS), tokenizer, CONFIG, dict(OPTIONS))
    for rows, config, options in changed(tokenizer).values():
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


@pytest.mark.parametrize("how", ["cut short", "one bit", "foreign", "empty", "another key"])
def test_damaged_entry_is_encoded_again_and_replaced(tokenizer, folder, no_encoding, how):
    wanted, file = encode_cached(ROWS, tokenizer, CONFIG, **OPTIONS)
    whole = file.read_bytes()
    if how == "another key":  # a whole entry under a wrong name
        _, other = encode_cached(ROWS[:5], tokenizer, CONFIG, **OPTIONS)
        damaged = other.read_bytes()
    else:
        flipped = whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:]
        damaged = {"cut short": whole[:-9], "one bit": flipped, "foreign": b"{}", "empty": b""}[how]
    file.unlink()  # not in place: it is mapped
    file.write_bytes(damaged)
    found, _ = encode_cached(ROWS, tokenizer, CONFIG, **OPTIONS)
    assert_same(found, wanted)
    assert file.read_bytes() == whole
    no_encoding()
    assert_same(encode_cached(ROWS, tokenizer, CONFIG, **OPTIONS)[0], wanted)


def test_cache_that_cannot_be_written_stops_nothing(tokenizer, tmp_path, folder, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "file"))
    found, file = encode_cached(ROWS, tokenizer, CONFIG, **OPTIONS)
    assert file is None and len(found) == 30


def test_cache_is_for_large_splits_and_can_be_off(tokenizer, folder, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", "off")
    assert encode_cached(ROWS, tokenizer, CONFIG, **OPTIONS)[1] is None
    monkeypatch.setenv("MLX_PACKS_CACHE", str(folder.parent))
    monkeypatch.setattr(token_cache, "_WORTHWHILE_BYTES", 10**5)
    assert encode_cached(ROWS, tokenizer, CONFIG, **OPTIONS)[1] is None
    assert not folder.exists()


def test_what_the_key_cannot_cover_is_not_kept(tokenizer, folder):
    odd = [Row("x:0", {**ROWS[0].value, "made": object()})]
    assert token_cache.cache_key(odd, tokenizer, CONFIG, OPTIONS) is None

    class OwnCode(type(tokenizer._tokenizer)):
        pass

    own = dataclasses.make_dataclass("Wrapper", ["_tokenizer"])(OwnCode.__new__(OwnCode))
    own._tokenizer._tokenizer = tokenizer._tokenizer._tokenizer
    assert token_cache.cache_key(ROWS, own, CONFIG, OPTIONS) is None


def test_bad_row_is_named_with_a_cache_too(tokenizer, folder):
    rows = [*ROWS, Row("x:31", {"messages": []})]
    for _ in range(2):
        with pytest.raises(PackError, match="x:31"):
            encode_cached(rows, tokenizer, CONFIG, **OPTIONS)


def test_entries_unread_for_a_month_are_removed(tokenizer, folder):
    files = [encode_cached(ROWS[:n], tokenizer, CONFIG, **OPTIONS)[1] for n in (5, 6)]
    month_ago = time.time() - 31 * 24 * 3600
    for file in files:
        os.utime(file, (month_ago, month_ago))
    encode_cached(ROWS[:5], tokenizer, CONFIG, **OPTIONS)  # read: it stays
    encode_cached(ROWS[:7], tokenizer, CONFIG, **OPTIONS)
    assert files[0].exists() and not files[1].exists() and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("packing", [False, True])
def test_run_from_cached_tokens_equals_one_without(tmp_path, monkeypatch, packing):
    rows = write_rows(tmp_path / "d", train=[dict(r.value) for r in ROWS], valid=[ROWS[0].value])
    train = TrainConfig(
        iters=2, batch_size=2, max_seq_length=64, matmul_path="dense", packing=packing
    )
    lora, packs = LoRAConfig(rank=2, num_layers=1), []
    packs.append(train_pack("tiny", rows, lora, train, tmp_path / "without").pack)
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_cache, "_WORTHWHILE_BYTES", 1)
    for name in ("written", "read"):
        packs.append(train_pack("tiny", rows, lora, train, tmp_path / name).pack)
    for pack in packs[1:]:
        for name, tensor in packs[0].tensors.items():
            assert mx.array_equal(tensor, pack.tensors[name]).item(), name
