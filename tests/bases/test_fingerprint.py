"""The fingerprint of a base: every byte of its tensors, kept while its files stay as they are."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from mlx_packs import train_pack
from mlx_packs.bases import fingerprint as fingerprints
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.bases.fingerprint import changed_texts, fingerprint, text_hashes
from mlx_packs.packs.base import load_base
from mlx_packs.reading import read_header
from mlx_packs.runtime import mx
from tests.helpers.damage import flip_bit
from tests.helpers.errors import check, raises
from tests.helpers.runs import LORA, TRAIN

TENSORS = {
    "a.weight": mx.arange(5000, dtype=mx.float32),
    "b.weight": mx.arange(12, dtype=mx.uint32).reshape(3, 4),
    "empty": mx.zeros((0, 4)),
    "one": mx.array(1, mx.float16),
}


def checkpoint(folder: Path, shards: int = 1) -> Path:
    folder.mkdir()
    tensors = list(TENSORS.items())
    for i in range(shards):
        mx.save_safetensors(str(folder / f"model-{i}.safetensors"), dict(tensors[i::shards]))
    return folder


def written_out(folder: Path, piece: int) -> str:
    """What the module's docstring says a fingerprint is, in its own words."""
    tensors = []
    for file in folder.glob("model*.safetensors"):
        header, start = read_header(file)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            data = file.read_bytes()[start + begin : start + end]
            parts = [data[at : at + piece] for at in range(0, len(data), piece)]
            hashes = [hashlib.sha256(part).hexdigest() for part in parts]
            tensors.append([name, tensor["dtype"], tensor["shape"], hashes])
    text = json.dumps(sorted(tensors), separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(("piece", "buffer"), [(1000, 7), (4096, 1 << 20), (16 << 20, 1 << 20)])
def test_a_fingerprint_is_what_its_docstring_says(tmp_path, monkeypatch, piece, buffer):
    monkeypatch.setattr(fingerprints, "_PIECE_BYTES", piece)
    monkeypatch.setattr(fingerprints, "_BUFFER_BYTES", buffer)
    folder = checkpoint(tmp_path / "base")
    assert fingerprint(folder) == written_out(folder, piece)
    assert fingerprint(checkpoint(tmp_path / "sharded", shards=3)) == fingerprint(folder)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache, which takes files that were written a moment ago."""
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "_SETTLED_SECONDS", -1)
    return tmp_path / "cache" / "fingerprints"


def test_the_second_fingerprint_reads_no_weights(tmp_path, cache, monkeypatch):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "base")
    first = fingerprint(folder)
    monkeypatch.setattr(fingerprints, "_hash_tensors", lambda files: pytest.fail("read again"))
    assert fingerprint(folder) == first


def test_a_file_changed_in_place_is_noticed_by_its_ctime(tmp_path, cache):
    folder = checkpoint(tmp_path / "base")
    file = folder / "model-0.safetensors"
    first, before = fingerprint(folder), file.stat()
    flip_bit(file, 8 * before.st_size - 1)
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # within a step of the clock
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    for name in ("st_mtime_ns", "st_size", "st_ino"):
        assert getattr(after, name) == getattr(before, name)
    assert fingerprint(folder) not in (first, None)
    assert len(list(cache.iterdir())) == 1  # a folder has one entry


def test_a_file_that_was_just_written_is_not_kept(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(fingerprints, "_SETTLED_SECONDS", 3600)
    fingerprint(checkpoint(tmp_path / "base"))
    assert not cache.exists()


def test_weights_that_change_while_they_are_read_are_rejected(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "base")
    hash_tensors = fingerprints._hash_tensors

    def slow(files):
        value = hash_tensors(files)
        os.utime(files[0], (1, 1))
        return value

    monkeypatch.setattr(fingerprints, "_hash_tensors", slow)
    with raises("unreadable", None, str(folder)):
        fingerprint(folder)


def test_a_file_that_is_cut_short_meanwhile_is_one_line(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "base")
    file = folder / "model-0.safetensors"
    read = fingerprints.read_header

    def cutting(path):
        header = read(path)
        os.truncate(path, path.stat().st_size - 100)
        return header

    monkeypatch.setattr(fingerprints, "read_header", cutting)
    with raises("unreadable", None, str(file)):
        fingerprint(folder)


@pytest.fixture
def base_here(trained_copy) -> Path:
    """A copy ``bx`` of the tiny base, beside a pack ``o`` and its run."""
    return shutil.copytree(tiny_checkpoint(), trained_copy / "bx")


def test_apply_and_resume_notice_200_changed_bytes(base_here, rejected):
    file = base_here / "model.safetensors"
    header, start = read_header(file)
    begin = start + header["model.embed_tokens.weight"]["data_offsets"][0]
    for place in range(begin, begin + 200):
        flip_bit(file, 8 * place)
    check(rejected("apply", "o", "--model", "bx", "--dry-run"), "mismatch", None, "another base")
    with raises("mismatch", None, "another base"), load_base("bx").applied("o"):
        pass
    with raises("mismatch", "model", "--resume", "another base"):
        train_pack("bx", "d", LORA, TRAIN, "o", resume=True)


TEXTS = [f.name for f in tiny_checkpoint().iterdir() if f.suffix in (".json", ".jinja")]


@pytest.mark.parametrize("name", TEXTS)
def test_each_text_of_a_base_has_a_hash(tmp_path, name):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "base")
    recorded = text_hashes(folder)
    assert set(recorded) == set(TEXTS) and changed_texts(folder, recorded) == []
    for bit in (0, 8 * (folder / name).stat().st_size - 1):
        flip_bit(folder / name, bit)
        assert changed_texts(folder, recorded) == [name]
    (folder / name).unlink()
    assert changed_texts(folder, recorded) == [name]
    assert changed_texts(folder, recorded | {"\x1b[31m.json": "0"})[0] == "?[31m.json"


def test_resume_rejects_another_template_and_apply_says_so(base_here, run, caplog):
    template = base_here / "chat_template.jinja"
    template.write_text(template.read_text() + "\n{# another #}")
    with raises("mismatch", "model", "--resume", "chat_template.jinja"):
        train_pack("bx", "d", LORA, TRAIN, "o", resume=True)
    assert run("apply", "o", "--model", "bx", "--dry-run")[0] == 0
    assert "o: was trained with another chat_template.jinja than bx has" in caplog.text
