"""Tokens kept on disk: the same as encoded again, or encoded again."""

import dataclasses
import hashlib
from dataclasses import replace

import numpy as np
import pytest

from mlx_packs.config.schema import DataConfig
from mlx_packs.data import token_cache
from mlx_packs.data.encoding import ENCODING_VERSION, EncodingOptions, encode
from mlx_packs.data.fim import FillInTheMiddle
from mlx_packs.data.formats import Row
from mlx_packs.packs.base import load_base
from tests.helpers.rows import chat

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
    return lambda: monkeypatch.setattr(token_cache, "encode", None)


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


def other_requests():
    """Rows, columns and options of which one thing is not as usual."""
    for change in (
        {"max_seq_length": 41},
        {"ce_last_k": 2},
        {"loss_on": "all"},
        {"vocab_size": 5001},
        {"long_rows": "split"},
        {"fim": FillInTheMiddle(0.5, 0.5, 0)},
        {"fim": FillInTheMiddle(0.5, 0.5, 1)},
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
