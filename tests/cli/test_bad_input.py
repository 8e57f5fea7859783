"""Bad input through the command line: one line, exit code 2, nothing half-written.

What the lines say is in error_texts.txt.
"""

from pathlib import Path

import pytest

from mlx_packs.errors import PackError
from tests.helpers.errors import check
from tests.helpers.packs import edit_manifest
from tests.helpers.rows import CHATS, chat, write_rows

SETTINGS = "--matmul-path dense --num-layers 1 --val-batches 0 --test-batches 1 --iters 2"
COMMAND = ("train", "-q", *SETTINGS.split(), "--data", "d", "--out", "o")


@pytest.fixture
def data_here(here):
    """An empty folder to stand in, with a good data set in ``d``."""
    write_rows(here / "d", train=CHATS, valid=CHATS[:2])
    return here


@pytest.fixture
def untouched(run, data_here):
    """Run `packs ARGS`, which must fail in one line and leave every file as it was."""

    def go(*args) -> PackError:
        before = files(data_here)
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert err == f"packs: {run.error.format_message()}\n" and err.count("\n") == 1
        assert files(data_here) == before
        return run.error

    return go


def files(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


def test_train_rejects_a_folder_without_training_rows(data_here, untouched):
    (data_here / "d" / "train.jsonl").unlink()
    check(untouched(*COMMAND), "data", "data", "--data d: ", "train")


def test_train_counts_and_says_what_is_cut(data_here, run):
    long = [chat("Say it.", "word " * 60), chat("long " * 60, "Yes.")]
    write_rows(data_here / "d", train=[*CHATS, *long])
    args = ("--data", "d", "--out", "o", "--max-seq-length", "40")
    code, _, err = run("train", *SETTINGS.split(), *args)
    assert code == 0
    (line,) = (line for line in err.splitlines() if "--max-seq-length" in line)
    assert all(part in line for part in ("2 examples cut", "40 tokens", "1 examples dropped"))


def test_configuration_may_be_completed_by_flags_and_files(data_here, untouched):
    (data_here / "c.yaml").write_text("double_quant: false\n")
    (data_here / "more.yaml").write_text("quantize: nf4\n")
    args = (*COMMAND, "--model", "nowhere", "-c", "c.yaml")
    check(untouched(*args), "conflict", "double_quant", "c.yaml: ")
    for corrected in ((*args, "--quantize", "nf4"), (*args, "-c", "more.yaml")):
        check(untouched(*corrected), "not-found", "model", "nowhere")


def test_train_never_writes_into_a_folder_of_something_else(data_here, untouched):
    (data_here / "o").mkdir()
    (data_here / "o" / "thesis.txt").write_text("mine")
    check(untouched(*COMMAND, "--overwrite"), "exists", "out", "--out o: ")


def test_pack_of_another_base_is_rejected(trained_copy, untouched):
    other = {"fingerprint": "0" * 64, "id": "other"}
    edit_manifest(trained_copy / "o", lambda manifest: manifest["base"].update(other))
    error = untouched("generate", "--pack", "o", "--prompt", "Hi", "--model", "tiny")
    check(error, "mismatch", None, "o: ", "other", "000000000000", "tiny")


@pytest.mark.parametrize(
    ("files", "code", "file", "name"),
    [
        ({"../x": {"bytes": 1, "sha256": "0"}}, "unreadable", "pack.json", "../x"),
        ({"x": {"bytes": 1, "sha256": "0"}}, "not-found", "x", "pack.json"),
        ({"README.md": 5}, "unreadable", "pack.json", "README.md"),
    ],
)
def test_pack_with_a_wrong_list_of_files_is_rejected(
    trained_copy, untouched, files, code, file, name
):
    """The other keys of a manifest: tests/packs/test_pack.py."""
    edit_manifest(trained_copy / "o", lambda m: m["files"].update(files))
    check(untouched("inspect", "o"), code, None, f"o/{file}: ", name)
