"""What the command line says about typical mistakes, word by word, in error_texts.txt.

`MLX_PACKS_UPDATE_TEXTS=1 python -m pytest tests/cli/test_error_texts.py` writes the file anew from
the command lines in it; a new mistake is a new line that begins with `$ packs`.
"""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.cli.main import packs
from mlx_packs.errors import PackError
from tests.helpers.checkpoints import write_dense

TEXTS = Path(__file__).with_name("error_texts.txt")
UPDATE = bool(os.environ.get("MLX_PACKS_UPDATE_TEXTS"))
FILES = {
    "broken.jsonl": '{"messages": [}\n',
    "list.jsonl": '["a"]\n',
    "empty.jsonl": "",
    "columns.jsonl": '{"words": "a"}\n',
    "mixed.jsonl": '{"text": "a"}\n{"prompt": "a", "completion": "b"}\n' * 4,
    "no_answer.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n' * 4,
    "one.jsonl": '{"text": "a b c"}\n',
    "typo.yaml": "learnin_rate: 1\n",
    "nested.yaml": "lora_parameters: {rnak: 1}\n",
    "zero.yaml": "rank: 0\n",
    "half.yaml": "double_quant: false\n",
    "other_half.yaml": "quantize: nf4\n",
    "alone/valid.jsonl": '{"text": "a b c"}\n',
}


def texts() -> dict[str, str]:
    """Command lines, and the line that each prints; empty for one that was added by hand."""
    entries: dict[str, str] = {}
    for line in TEXTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("$ "):
            command = line
            entries[command] = ""
        elif line and not line.startswith("#"):
            entries[command] += line + "\n"
    return entries


@pytest.fixture(scope="module")
def mistakes(trained, encoder, tmp_path_factory) -> Path:
    """A folder with rows in ``d``, a pack ``o``, a run ``o-run``, bases, and files with mistakes."""
    folder = tmp_path_factory.mktemp("texts")
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    shutil.copytree(tiny_checkpoint(), folder / "base")
    shutil.copytree(encoder, folder / "encoder")
    write_dense(folder / "dense")
    (folder / "alone").mkdir()
    (folder / "other").mkdir()
    (folder / "other" / "thesis.txt").write_text("mine")
    for name, content in FILES.items():
        (folder / name).write_text(content)
    return folder


@pytest.fixture(scope="module", autouse=True)
def updated() -> Iterator[dict[str, str]]:
    """Collects what was printed, for the file."""
    printed: dict[str, str] = {}
    yield printed
    if UPDATE:
        head = [line for line in TEXTS.read_text().splitlines() if line.startswith("#")]
        entries = [f"{command}\n{text}" for command, text in printed.items()]
        TEXTS.write_text("\n".join(["\n".join(head) + "\n", *entries]), encoding="utf-8")


def states(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of every file; a run that starts writes its own folder, and how it ended."""
    written = ("new-run", "status.json")
    files = [path for path in folder.rglob("*") if not set(path.parts) & set(written)]
    files.remove(folder / "o-run")  # whose time is that of the status
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("command", texts())
def test_error_text_is_the_one_in_the_file(mistakes, updated, monkeypatch, command):
    """And nothing is written; exit code and standard error: tests/cli/test_main.py."""
    monkeypatch.chdir(mistakes)
    before = states(mistakes)
    arguments = shlex.split(command.removeprefix("$ packs"))
    error = CliRunner().invoke(packs, arguments, standalone_mode=False).exception
    assert isinstance(error, PackError), error
    text = error.format_message()
    assert "\n" not in text and states(mistakes) == before
    updated[command] = f"{text}\n"
    assert UPDATE or updated[command] == texts()[command]
