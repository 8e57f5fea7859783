"""Image files and tokenizers of strangers that cost too much end with one line, and others go on."""

import io
import json
import struct
from pathlib import Path

import pytest
from PIL import Image

from mlx_packs.bases.sandboxed_tokenizer import SandboxedTokenizer, with_offsets
from mlx_packs.bases.tokenizer import load_tokenizer, tokenizer_errors
from mlx_packs.errors import PackError
from mlx_packs.sandbox import process
from mlx_packs.vision.pictures import ImageSource, open_picture
from tests.helpers.bases import copy_tiny

GROWS = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 9
LATER = [{"type": "Replace", "pattern": {"String": "z"}, "content": "a"}, *GROWS]  # no probe has it
ENDLESS = {"pattern": {"Regex": r"(\p{L}+|\p{L}\p{L})+\d"}, "behavior": "Isolated", "invert": False}
TEXT = "an apple a day, in a basket"
CHANGES = {
    "a normalizer that grows": {"normalizer": {"type": "Sequence", "normalizers": GROWS}},
    "a decoder that grows": {"decoder": {"type": "Sequence", "decoders": GROWS}},
    "a decoder that grows later": {"decoder": {"type": "Sequence", "decoders": LATER}},
    "a normalizer that grows later": {"normalizer": {"type": "Sequence", "normalizers": LATER}},
    "a pattern without end": {"pre_tokenizer": {"type": "Split", **ENDLESS}},
}


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(process, "CPU_S", 0.3)
    monkeypatch.setattr(process, "MEMORY_BYTES", 96 << 20)


def progressive_jpeg(side: int, scans: int) -> bytes:
    """A JPEG of few bytes that is decoded for a time of ``scans`` times its pixels."""

    def segment(mark: int, content: bytes) -> bytes:
        return bytes([0xFF, mark]) + struct.pack(">H", len(content) + 2) + content

    blocks = (side // 8) ** 2
    bits = ("0" + "1" * 14) * -(-blocks // 32767)
    bits += "1" * (-len(bits) % 8)
    coded = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\x00")
    scan = segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + coded
    start = [
        segment(0xDB, b"\x00" + bytes([1] * 64)),
        segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + bytes([1, 0x11, 0])),
        segment(0xC4, b"\x00" + bytes([1] + [0] * 15) + b"\x00"),
        segment(0xC4, b"\x10" + bytes([1] + [0] * 15) + b"\xe0"),
        segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + bytes(blocks // 8 + 1),
    ]
    return b"\xff\xd8" + b"".join(start) + scan * scans + b"\xff\xd9"


def test_an_image_is_bounded(small_limits):
    assert open_picture(ImageSource(progressive_jpeg(64, 3))).image.width == 64
    with pytest.raises(ValueError, match="takes more than .* to decode. Save it again"):
        open_picture(ImageSource(progressive_jpeg(4000, 3000)))
    assert open_picture(ImageSource(progressive_jpeg(64, 3))).image.width == 64


def test_an_image_is_read_at_the_limit_of_pixels_and_no_larger():
    file = io.BytesIO()
    Image.new("RGB", (6000, 4000)).save(file, "JPEG")
    assert open_picture(ImageSource(file.getvalue())).image.width == 3000

    file = io.BytesIO()
    Image.new("L", (5000, 4000)).save(file, "PNG")
    with pytest.raises(ValueError, match="more than 16 million pixels"):
        open_picture(ImageSource(file.getvalue()))


def hostile_tokenizer(tmp_path, name: str) -> tuple[Path, dict]:
    """A folder whose tokenizer is changed, and its config."""
    file = copy_tiny(tmp_path / "b") / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CHANGES[name]))
    return file.parent, json.loads(file.with_name("config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_tokenizer_is_bounded(tmp_path, small_limits, name):
    folder, config = hostile_tokenizer(tmp_path, name)
    with pytest.raises(PackError) as caught:
        tokenizer = load_tokenizer(folder, config, False)
        with tokenizer_errors(tokenizer):
            tokens = tokenizer.encode("z" * 90 + "ya" * 200)
            tokenizer.decode(tokens * 9)
    assert caught.value.code == "unreadable"
    assert str(tmp_path / "b") in caught.value.message
    assert "\n" not in caught.value.message


def test_a_tokenizer_file_that_takes_too_much_is_not_read_in_this_process(
    tmp_path, small_limits, monkeypatch
):
    folder, _ = hostile_tokenizer(tmp_path, "a normalizer that grows")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    with pytest.raises(PackError, match="the tokenizer cannot be loaded: it (takes|needs) more"):
        load_tokenizer(folder, {}, False)


def test_a_confined_tokenizer_is_equal_to_the_plain_one(tokenizer):
    confined = tokenizer._tokenizer
    backend = confined._tokenizer
    assert isinstance(backend, SandboxedTokenizer)
    plain = backend._backend
    texts = [TEXT, "", "Grüße, 世界 🙂\n\n  x", "<|im_start|>user\nHi<|im_end|>"]

    for options in ({}, {"add_special_tokens": False}):
        batches = backend.encode_batch(texts, **options), plain.encode_batch(texts, **options)
        for ours, theirs in zip(*batches, strict=True):
            for name in ("ids", "offsets", "type_ids", "attention_mask", "special_tokens_mask"):
                assert getattr(ours, name) == getattr(theirs, name), name

    ids = plain.encode(texts[2]).ids
    assert backend.decode(ids) == plain.decode(ids)
    with with_offsets(False):
        assert backend.encode(TEXT).ids == plain.encode(TEXT).ids


def test_settings_of_a_call_reach_the_sandbox(tokenizer):
    confined = tokenizer._tokenizer
    cut = confined([TEXT, "a"], truncation=True, max_length=3, padding=True)
    assert [len(ids) for ids in cut["input_ids"]] == [3, 3]
    assert cut["attention_mask"][1] == [0, 0, 1] or cut["attention_mask"][1] == [1, 0, 0]
    assert len(confined(TEXT)["input_ids"]) > 3


def test_a_change_of_the_tokenizer_reaches_the_sandbox(tmp_path):
    folder = copy_tiny(tmp_path / "b")
    tokenizer = load_tokenizer(folder, json.loads((folder / "config.json").read_text()), False)
    assert len(tokenizer.encode("xyzzyplugh")) > 1
    tokenizer._tokenizer.add_tokens(["xyzzyplugh"])
    assert len(tokenizer.encode("xyzzyplugh")) == 1


def test_many_tokenizers_take_turns_in_the_sandbox_and_work_on_after_its_end(tokenizer):
    backend = tokenizer._tokenizer._tokenizer
    several = [SandboxedTokenizer(backend._backend, backend._folder) for _ in range(6)]
    expected = backend.encode(TEXT).ids
    for each in (*several, *several):
        assert each.encode(TEXT).ids == expected
    process.TOKENIZERS.end()
    assert backend.encode(TEXT).ids == expected
