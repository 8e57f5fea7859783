"""Bad input through the command line: one line, exit code 2, nothing half-written.

What the lines say is in error_texts.txt.
"""

import json
import shutil
from pathlib import Path

import pytest

from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.errors import PackError
from mlx_packs.runtime import mx
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


@pytest.mark.parametrize(
    ("line", "code", "names"),
    [
        ('{"messages": [{"role": "user", "conte', "unreadable", ["JSON"]),
        ('{"text": "a"}', "data", ["text", "d/train.jsonl:1"]),
    ],
)
def test_train_names_file_and_line_of_a_bad_row(data_here, untouched, line, code, names):
    with (data_here / "d" / "train.jsonl").open("a") as f:
        f.write(line)
    error = untouched(*COMMAND)
    check(error, code, None, *names)
    assert error.message.startswith(f"d/train.jsonl:{len(CHATS) + 1}: ")


def test_train_rejects_an_empty_split(data_here, untouched):
    (data_here / "d" / "valid.jsonl").write_text("\n\n")
    check(untouched(*COMMAND), "data", None, "d/valid.jsonl: ")


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
    assert all(part in line for part in ("2 examples", "40 tokens", "1 of them", "dropped"))


def test_train_rejects_tokens_beyond_the_vocabulary(data_here, untouched):
    shutil.copytree(tiny_checkpoint(), data_here / "base")
    tokenizer = json.loads((data_here / "base" / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] == "<|im_end|>":
            token["content"] = "<|old_end|>"
    added = dict(tokenizer["added_tokens"][-1], id=4096, content="<|im_end|>")
    tokenizer["added_tokens"].append(added)
    (data_here / "base" / "tokenizer.json").write_text(json.dumps(tokenizer))
    check(untouched(*COMMAND, "--model", "base"), "mismatch", None, "d/train.jsonl:1: ", "4096")


@pytest.mark.parametrize(
    ("args", "code", "flag", "name"),
    [
        ("--data nope/train.jsonl", "not-found", "data", "nope/train.jsonl"),
        ("--model d/train.jsonl", "unsupported", None, "d/train.jsonl"),
        ("--resume-adapter-file d/train.jsonl", "unreadable", "resume_adapter_file", "d/train"),
        ("what", "invalid", None, "what"),
    ],
)
def test_train_names_the_flag(untouched, args, code, flag, name):
    check(untouched(*COMMAND, *args.split()), code, flag, name)


@pytest.mark.parametrize(
    ("text", "code", "flag", "names"),
    [
        ("rank: [1", "unreadable", None, ["c.yaml: "]),
        ("optimizer_config: {adamw: {bets: 1}}", "unknown", "optimizer_config", ["bets"]),
        ("lr_schedule: {name: cosine}", "unknown", "lr_schedule", ["'cosine'"]),
    ],
)
def test_train_names_file_and_key_of_a_configuration(data_here, untouched, text, code, flag, names):
    (data_here / "c.yaml").write_text(text)
    check(untouched(*COMMAND, "-c", "c.yaml"), code, flag, *names)


def test_configuration_may_be_completed_by_flags_and_files(data_here, untouched):
    (data_here / "c.yaml").write_text("double_quant: false\n")
    (data_here / "more.yaml").write_text("quantize: nf4\n")
    args = (*COMMAND, "--model", "nowhere", "-c", "c.yaml")
    check(untouched(*args), "conflict", "double_quant", "c.yaml: ")
    for corrected in ((*args, "--quantize", "nf4"), (*args, "-c", "more.yaml")):
        check(untouched(*corrected), "not-found", "model", "nowhere")


def test_a_fault_names_the_file_that_it_is_in(data_here, untouched):
    (data_here / "good.yaml").write_text("rank: 4\n")
    (data_here / "c.yaml").write_text("iters: x\n")
    files = ("-c", "good.yaml", "-c", "c.yaml")
    assert untouched(*COMMAND, *files, "--rank", "0").message.startswith("c.yaml: iters: ")
    error = untouched(*COMMAND, "-c", "good.yaml", "--rank", "0")
    assert error.message.startswith("--rank: ")


def test_train_never_writes_into_a_folder_of_something_else(data_here, untouched):
    (data_here / "o").mkdir()
    (data_here / "o" / "thesis.txt").write_text("mine")
    check(untouched(*COMMAND, "--overwrite"), "exists", "out", "--out o: ")


@pytest.mark.parametrize(("out", "code"), [("/", "invalid"), ("d/train.jsonl/x", "unwritable")])
def test_train_rejects_an_output_that_cannot_be_made(untouched, out, code):
    check(untouched(*COMMAND[:-1], out), code, "out", f"--out {out}: ")


def test_train_last_update_that_breaks_the_model_makes_no_pack(data_here, run):
    """Nor a checkpoint; without one due: error_texts.txt."""
    broken = ("--iters", "1", "--learning-rate", "1e30", "--warmup-steps", "0")
    code, out, err = run(*COMMAND, *broken, "--save-every", "1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    check(run.error, "diverged", None, "step 1: ", "nan")
    assert not (data_here / "o").exists() and not list((data_here / "o-run").glob("*step*"))


def test_train_full_disk_leaves_the_last_checkpoint_and_no_pack(data_here, run, monkeypatch):
    real, written = mx.save_safetensors, []

    def save(file, tensors, metadata):
        written.append(file)
        if len(written) > 2:  # the first checkpoint is two files
            Path(file).write_bytes(b"part")
            raise RuntimeError("[write] Unable to write 611 bytes to file.")
        real(file, tensors, metadata)

    monkeypatch.setattr(mx, "save_safetensors", save)
    code, out, err = run(*COMMAND, "--save-every", "1", "--batch-size", "1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    check(run.error, "unwritable", None, "[write] Unable to write 611 bytes")
    assert sorted(p.name for p in data_here.iterdir()) == ["d", "o-run"]
    steps = [p.name for p in (data_here / "o-run").iterdir() if p.is_dir()]
    assert steps == ["step-000001"]


@pytest.fixture
def trained_pack(trained_copy) -> Path:
    """A copy of the trained pack at ``o``, its run at ``o-run``."""
    return trained_copy / "o"


def _slice(manifest: dict) -> dict:
    return manifest["adapters"]["modules"][0]["slices"][0]


@pytest.mark.parametrize("use", ["apply o --dry-run", "generate --pack o --prompt Hi"])
def test_pack_of_another_base_is_rejected(trained_pack, untouched, use):
    edit_manifest(trained_pack, lambda m: m["base"].update(fingerprint="0" * 64, id="other"))
    error = untouched(*use.split(), "--model", "tiny")
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
    trained_pack, untouched, files, code, file, name
):
    """The other keys of a manifest: tests/packs/test_pack.py."""
    edit_manifest(trained_pack, lambda m: m["files"].update(files))
    check(untouched("inspect", "o"), code, None, f"o/{file}: ", name)


def test_pack_manifest_that_contradicts_the_adapters_is_rejected(trained_pack, untouched):
    edit_manifest(trained_pack, lambda m: _slice(m).update(rank=1))
    check(untouched("apply", "o", "--dry-run"), "mismatch", None, "o", "(256, 1)")
