"""Text rows for code corpora: long ones split, and the middle of some put last."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_packs import DataConfig, LoRAConfig, TrainConfig, train_pack
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.bases.tokenizer import load_tokenizer
from mlx_packs.data.conversations import continued
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.fim import SPELLINGS, FillInTheMiddle, sentinels
from mlx_packs.data.formats import Chat, Row, Text
from mlx_packs.tasks.tokens import encoding_options
from tests.helpers.errors import check, raises
from tests.helpers.rows import write_rows

CONFIG = DataConfig()
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa é 日本 \U0001f600".split()
TEXTS = [
    " ".join(np.random.default_rng(i).choice(WORDS, 5 + 3 * (i % 7)).tolist()) + f"\n\treturn {i}"
    for i in range(60)
]
ROWS = [Row(f"x:{i}", {"text": text}) for i, text in enumerate(TEXTS)]
NAMED = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LONG = Row("x:long", {"text": " ".join(f"word{i} = {i * i};" for i in range(400))})


def knowing(names):
    """The tiny tokenizer with more tokens."""
    path = tiny_checkpoint()
    tokenizer = load_tokenizer(path, json.loads((path / "config.json").read_text()), False)
    tokenizer._tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    return tokenizer


@pytest.fixture(scope="module")
def bare():
    return knowing(())


@pytest.fixture(scope="module")
def fim_tokenizer():
    return knowing(SPELLINGS[0])


def texts_of(tokenizer, tokens) -> tuple[bool, str, str, str] | None:
    """What an example says of itself: suffix first, prefix, middle, suffix."""
    before, after, between, end = sentinels(tokenizer)
    tokens = list(tokens)
    if tokens[0] != before:
        return None
    assert tokens[-1] == end and [tokens.count(t) for t in (before, after, between)] == [1, 1, 1]
    one, two = tokens.index(after), tokens.index(between)
    parts = tokens[1:one], tokens[one + 1 : two], tokens[two + 1 : -1]
    first, second, third = (tokenizer.decode(part) for part in parts)
    return one == 1, first, second, third


def test_rearranged_rows_have_the_same_text_all_of_it_trained(fim_tokenizer):
    fim = FillInTheMiddle(1.0, 0.5, seed=3)
    examples = encode(ROWS, fim_tokenizer, CONFIG, EncodingOptions(fim=fim))

    kinds = set()
    for row, (text, example) in enumerate(zip(TEXTS, examples.items, strict=True)):
        suffix_first, first, second, third = texts_of(fim_tokenizer, example.tokens)
        kinds.add(suffix_first)
        _, prefix, middle, suffix = fim.parts(text, row, 0)
        if suffix_first:
            assert (first, second, third) == ("", suffix, prefix + middle)
        else:
            assert (first, second, third) == (prefix, suffix, middle)
        assert prefix + middle + suffix == text
        assert example.target[1:].all() and not example.target[0]

    assert kinds == {False, True}


def test_cuts_lie_between_any_two_characters():
    cuts = [FillInTheMiddle(1.0, 0.0, seed).parts("abcd", 0, 0)[1:] for seed in range(200)]
    assert {"".join(parts) for parts in cuts} == {"abcd"}
    assert len(set(cuts)) == 15  # 5 places for two cuts, in order


def test_rates_are_shares_of_rows_that_seed_and_number_choose():
    parts = [FillInTheMiddle(0.3, 0.25, 5).parts("some text", i, 0) for i in range(2000)]
    chosen = [p for p in parts if p]
    assert len(chosen) / 2000 == pytest.approx(0.3, abs=0.03)
    assert sum(p[0] for p in chosen) / len(chosen) == pytest.approx(0.25, abs=0.05)
    for seed, same in ((5, True), (6, False)):
        again = [FillInTheMiddle(0.3, 0.25, seed).parts("some text", i, 0) for i in range(20)]
        assert (again == parts[:20]) == same


@pytest.mark.parametrize("names", SPELLINGS, ids=lambda names: names[0])
def test_sentinels_are_found_by_their_known_spellings(names):
    tokenizer = knowing(names)
    wanted = tokenizer._tokenizer.convert_tokens_to_ids(list(names))
    assert list(sentinels(tokenizer)) == (wanted + [tokenizer.eos_token_id])[:4]


def test_tokenizer_without_sentinels_is_rejected_unless_named(bare):
    with raises("unsupported", "fim_rate", "--fim-tokens PREFIX,SUFFIX,MIDDLE"):
        encode(ROWS, bare, CONFIG, EncodingOptions(fim=FillInTheMiddle(0.5)))
    with raises("unknown", "fim_tokens", "a,b,<x>"):
        named = FillInTheMiddle(0.5, tokens=("a", "b", "<x>"))
        encode(ROWS, bare, CONFIG, EncodingOptions(fim=named))
    ids = bare._tokenizer.convert_tokens_to_ids(list(NAMED))
    assert sentinels(bare, NAMED) == (*ids, bare.eos_token_id)


def test_split_rows_train_every_token_once(bare):
    whole = encode([LONG], bare, CONFIG, EncodingOptions(max_seq_length=100_000)).items[0].tokens
    rows = [ROWS[0], LONG, ROWS[1]]
    examples = encode(rows, bare, CONFIG, EncodingOptions(max_seq_length=100, long_rows="split"))
    pieces = [e for e in examples.items if e.where == "x:long"]
    assert len(pieces) == -(-(len(whole) - 1) // 99) and examples.cut == 1
    learned = np.concatenate([e.tokens[e.target] for e in pieces])
    assert np.array_equal(learned, whole[1:])
    assert all(len(e.tokens) <= 100 for e in examples.items) and len(examples) == len(pieces) + 2
    cut = encode(rows, bare, CONFIG, EncodingOptions(max_seq_length=100))
    assert len(cut) == 3 and cut.cut == 1 and np.array_equal(cut.items[1].tokens, whole[:100])


@pytest.mark.parametrize("length", [32, 101])
def test_split_rows_that_are_rearranged_fit_and_lose_nothing(fim_tokenizer, length):
    fim = FillInTheMiddle(0.5, 0.5, seed=1)
    options = EncodingOptions(max_seq_length=length, long_rows="split", fim=fim)
    examples = encode([LONG], fim_tokenizer, CONFIG, options)

    text = LONG.value["text"]
    kinds = set()
    at = 0  # how much of the text the pieces have covered
    for example in examples.items:
        assert len(example.tokens) <= length
        parts = texts_of(fim_tokenizer, example.tokens)
        kinds.add(parts is not None)

        if parts is None:
            own = [t for t in example.tokens if t != fim_tokenizer.eos_token_id]
            piece = fim_tokenizer.decode(own)
        elif parts[0]:  # where the middle follows its prefix, both are before the suffix
            piece = parts[3] + parts[2]
        else:
            piece = parts[1] + parts[3] + parts[2]

        start = text.find(piece)
        assert 0 <= start <= at
        at = max(at, start + len(piece))

    assert at == len(text) and kinds == {False, True}

    options = EncodingOptions(max_seq_length=length, fim=FillInTheMiddle(1.0, 0.0))
    examples = encode([LONG], fim_tokenizer, CONFIG, options)  # cut: the beginning stays
    _, prefix, suffix, middle = texts_of(fim_tokenizer, examples.items[0].tokens)
    assert text.startswith(prefix + middle + suffix)
    assert examples.cut == 1 and length - 14 < len(examples.items[0].tokens) <= length


def test_part_of_a_text_has_no_space_of_the_tokenizer():
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "\n": 4, "▁a": 5}
    metaspace = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    metaspace.decoder = decoders.Metaspace()

    class Wrapped:
        _tokenizer = PreTrainedTokenizerFast(tokenizer_object=metaspace)

    assert Wrapped._tokenizer("ab")["input_ids"] == [5, 3]
    encoded = continued(Wrapped, ["ab", "b a", ""])
    assert [tokens for tokens, _ in encoded] == [[2, 3], [3, 5], []]


def test_held_out_rows_and_chats_stay_as_they_are():
    train = TrainConfig(fim_rate=0.5, long_rows="split", ce_last_k=3)
    options = encoding_options(train, "train", Text(), 500)
    assert options.fim.rate == 0.5 and options.long_rows == "split"
    plain = EncodingOptions(vocab_size=500)
    assert encoding_options(train, "valid", Text(), 500) == plain
    assert encoding_options(train, "train", Chat(), 500) == replace(plain, ce_last_k=3)


def test_chats_are_not_rearranged(rejected, here):
    check(rejected("train", "-q", "--fim-rate", 0.5, "--out", "o"), "conflict", "fim_rate", "chat")
    assert not list(here.iterdir())


def test_run_on_code_resumes_with_the_same_layout_only(tmp_path):
    rows = [{"text": text} for text in [*TEXTS, LONG.value["text"]]]
    data = write_rows(tmp_path / "d", train=rows, valid=rows[:2])
    settings = {"iters": 1, "batch_size": 1, "max_seq_length": 64, "packing": True}
    settings |= {"matmul_path": "dense", "fim_rate": 0.5, "long_rows": "split", "test_batches": 1}

    def train(**changes):
        lora = LoRAConfig(rank=2, num_layers=1)
        return train_pack("tiny", data, lora, settings, tmp_path / "o", **changes)

    with raises("unsupported", "fim_rate", "--fim-tokens PREFIX"):
        train()
    settings["fim_tokens"] = NAMED
    manifest = train().pack.manifest
    assert manifest["recipe"]["fim_rate"] == 0.5
    assert manifest["data"]["rows"]["train"] > 61 + 20  # pieces
    settings["fim_rate"] = 0.25
    with raises("mismatch", "fim_rate"):
        train(resume=True)
