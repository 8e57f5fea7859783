"""`--on-bad-row`: rows that cannot be used stop a run, or are left out and counted."""

import json

import pytest
from mlx_lm.utils import load_tokenizer

from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.formats import Row
from mlx_packs.data.rows import load_rows, read_rows
from tests.helpers.errors import raises
from tests.helpers.rows import chat, write_rows

GOOD = [chat(f"Say {i}.", "Yes, I will.") for i in range(8)]
BAD = {
    "not JSON": b'{"messages": ',
    "not UTF-8": b'{"messages": "\xff"}',
    "too deep": b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}",
    "integer too long": b'{"messages": ' + b"1" * 5000 + b"}",
    "not an object": b"[]",
    "missing columns": b'{"words": "a"}',
    "another format": b'{"text": "a"}',
    "wrong type": b'{"messages": 5}',
    "half a surrogate pair": json.dumps(chat("a", "b \ud800")).encode(),
    "rejected by the chat template": json.dumps(chat("reject", "b")).encode(),
    "no target": json.dumps(chat("a")).encode(),
}
_REJECTS = "{%- if messages[0].content == 'reject' %}{{ raise_exception('No.') }}{%- endif %}"
SKIP, STOP = DataConfig(on_bad_row="skip"), DataConfig()


@pytest.fixture(scope="module")
def tokenizer():
    """The tokenizer of the embedded base, whose template rejects a conversation."""
    tokenizer = load_tokenizer(tiny_checkpoint())
    tokenizer._tokenizer.chat_template = _REJECTS + tokenizer._tokenizer.chat_template
    return tokenizer


def test_skip_leaves_out_every_kind_of_bad_row(tmp_path, tokenizer):
    lines = [json.dumps(row).encode() for row in GOOD]
    for i, line in enumerate(BAD.values()):  # before each good row, and more behind
        lines.insert(2 * i, line)
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"\n".join(lines))
    examples = encode(read_rows(file), tokenizer, SKIP)
    wanted = encode([Row("x", row) for row in GOOD], tokenizer, STOP)
    assert [e.tokens.tolist() for e in examples.items] == [e.tokens.tolist() for e in wanted.items]
    assert examples.fingerprint == wanted.fingerprint
    assert examples.bad.counts() == dict.fromkeys(BAD, 1)
    assert [i for i, _ in examples.bad.errors] == sorted(i for i, _ in examples.bad.errors)
    assert [e.where for e in examples.items][0] == f"{file}:2"


@pytest.mark.parametrize("reason", BAD)
def test_stop_names_the_row(tmp_path, tokenizer, reason):
    file = tmp_path / "train.jsonl"
    file.write_bytes(json.dumps(GOOD[0]).encode() + b"\n\n" + BAD[reason])
    unreadable = ("not JSON", "not UTF-8", "too deep", "integer too long")
    with raises("unreadable" if reason in unreadable else "data", None, f"{file}:3") as caught:
        encode(read_rows(file), tokenizer, STOP)
    assert caught.value.reason == reason


def test_split_of_bad_rows_alone_is_an_error(tmp_path, tokenizer):
    rows = [Row(f"x:{i}", {"text": 5}) for i in range(3)]
    with raises("data", "data", "none of 3", "3 wrong type", "x:0"):
        encode(rows, tokenizer, SKIP)
    (tmp_path / "train.jsonl").write_text("{\n[\n")
    with raises("unreadable", None, "train.jsonl:1"):
        load_rows(DataConfig(data=str(tmp_path), on_bad_row="skip"))
    with raises("mismatch", None, "x:0", "vocabulary"):  # a setting that fits no row
        encode([Row("x:0", GOOD[0])], tokenizer, SKIP, EncodingOptions(vocab_size=9))


def test_run_counts_what_it_leaves_out(here, run):
    write_rows(here / "d", train=GOOD, valid=GOOD[:2])
    train, valid = (here / "d" / f"{split}.jsonl" for split in ("train", "valid"))
    train.write_bytes(BAD["not JSON"] + b"\n" + train.read_bytes() + BAD["no target"] + b"\n")
    valid.write_bytes(valid.read_bytes() + BAD["not UTF-8"])

    args = "train --data d --iters 1 --rank 2 --num-layers 1 --matmul-path dense --batch-size 2"
    args = [*args.split(), "--save-every", 1, "--out", "p", "--on-bad-row", "skip"]
    code, out, err = run(*args)
    assert code == 0 and "2 of 10 train examples left out: 1 not JSON, 1 no target" in err
    assert "bad     1 valid examples left out: 1 not UTF-8" in out

    code, out, _ = run(*args, "--resume", "--json")
    assert code == 0 and json.loads(out)["bad_rows"]["valid"] == {"not UTF-8": 1}
    train.write_bytes(train.read_bytes().replace(b"Say 3", b"Say 4"))
    assert run(*args, "--resume")[0] == 2
