"""llama.cpp itself, with an exported adapter, writes what mlx_packs writes.

Run by hand where `llama-completion` is on PATH: ``pytest -m llama_cpp``.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from mlx_packs import load_base
from mlx_packs.bases.files import resolve_checkpoint
from mlx_packs.convert.interop import export_pack
from mlx_packs.inference.generate import complete
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_base import write_gguf
from tests.helpers.packs import random_pack

PROMPT = "It was a truth that"
TINY = resolve_checkpoint("tiny")


def llama(folder: Path) -> Path:
    """A random llama with the tokenizer of the tiny base."""
    write_checkpoint(folder, "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 4091}))
    return folder


def written(model: Path, *arguments: object) -> str:
    command = ["llama-completion", "-m", model, "-p", PROMPT, "-n", 26, "--temp", 0, *arguments]
    quiet = ["-no-cnv", "--no-warmup", "-t", 2, "--simple-io", "--no-display-prompt"]
    exact = ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    result = subprocess.run(
        list(map(str, [*command, *quiet, *exact])),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return result.stdout.decode(errors="replace").strip()


def check_text(expected: str, model: Path, *arguments: object) -> None:
    """Check what llama.cpp writes; the end of it may be lost when the program exits.

    What it writes is compared up to the bytes at the end that only begin a character.
    """
    expected = expected.strip().rstrip("\ufffd")
    texts = []
    while not texts or (not texts[-1].startswith(expected) and len(texts) < 10):
        texts.append(written(model, *arguments).rstrip("\ufffd"))
        assert expected.startswith(texts[-1]) or texts[-1].startswith(expected), texts[-1]
    assert texts[-1].startswith(expected), texts


@pytest.mark.llama_cpp
@pytest.mark.parametrize("targets", [(), ("q_proj",), ("k_proj",), ("v_proj", "down_proj")])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_llama_cpp_writes_the_same_text(family, targets, tmp_path):
    folder = TINY if family == "qwen3" else llama(tmp_path / "llama")
    base = load_base(str(folder))
    ranks = {} if "q_proj" in targets or "k_proj" in targets else {"v_proj": 3}
    pack = random_pack(base, 1, 8, targets, alpha=12.0, rank_pattern=ranks)
    export_pack(pack.save(tmp_path / "pack"), "gguf", tmp_path / "out")

    model = write_gguf(folder, tmp_path / "base.gguf")
    tokens = base.tokenizer.encode(PROMPT)
    plain = complete(base, tokens, 24)
    check_text(plain, model)

    with base.applied(pack):
        expected = complete(base, tokens, 24)
    assert expected != plain
    check_text(expected, model, "--lora", tmp_path / "out" / "out.gguf")
