"""Bad input through the command line: one line, exit code 2, nothing half-written.

What the lines say is in error_texts.txt.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from mlx_packs import train_pack
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.errors import PackError
from mlx_packs.runtime import mx
from mlx_packs.training.run_folder import latest_checkpoint
from tests.helpers.errors import check, raises
from tests.helpers.packs import edit_manifest
from tests.helpers.rows import CHATS, chat, write_rows
from tests.helpers.runs import LORA, TRAIN

COMMAND = ("train", "-q", "--matmul-path", "dense", "--data", "d", "--iters", "2", "--out", "o")


@pytest.fixture
def data_here(tmp_path, monkeypatch):
    """An empty folder to stand in, with a good data set in ``d``."""
    write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:2])
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        ('{"messages": [}', "unreadable", ["JSON"]),
        ('{"messages": [{"role": "user", "conte', "unreadable", ["JSON"]),
        ('["a"]', "data", ["list"]),
        ('{"text": "a"}', "data", ["text", "d/train.jsonl:1"]),
        ('{"messages": "Hi"}', "data", ["'messages'"]),
        ('{"messages": [{"role": "user", "content": "a"}]}', "data", ["assistant"]),
        ('{"words": "a"}', "data", ["messages"]),
        ('{"prompt": "a\\ud800", "completion": "b"}', "data", ["completion", "d/train.jsonl:1"]),
    ],
)
def test_train_names_file_and_line_of_a_bad_row(data_here, untouched, line, code, names):
    with (data_here / "d" / "train.jsonl").open("a") as f:
        f.write(line)
    error = untouched(*COMMAND)
    check(error, code, None, *names)
    assert error.message.startswith(f"d/train.jsonl:{len(CHATS) + 1}: ")


def test_train_names_file_and_line_in_other_splits(data_here, untouched):
    (data_here / "d" / "valid.jsonl").write_text(json.dumps(CHATS[0]) + "\n{")
    check(untouched(*COMMAND), "unreadable", None, "d/valid.jsonl:2: ", "JSON")


def test_train_rejects_text_that_is_not_utf8(data_here, untouched):
    (data_here / "d" / "train.jsonl").write_bytes(b'{"text": "\xff"}')
    check(untouched(*COMMAND), "unreadable", None, "d/train.jsonl:1: ", "UTF-8", "byte 11")


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_train_rejects_an_empty_split(data_here, untouched, split, content):
    (data_here / "d" / f"{split}.jsonl").write_text(content)
    check(untouched(*COMMAND), "data", None, f"d/{split}.jsonl: ")


def test_train_rejects_a_folder_without_training_rows(data_here, untouched):
    (data_here / "d" / "train.jsonl").unlink()
    check(untouched(*COMMAND), "data", "data", "--data d: ", "train")


def test_train_rejects_one_row_alone(data_here, untouched):
    write_rows(data_here / "d", train=CHATS[:1])
    (data_here / "d" / "valid.jsonl").unlink()
    check(untouched(*COMMAND), "data", "data", "valid.jsonl")


def test_train_rejects_splits_of_different_formats(data_here, untouched):
    write_rows(data_here / "d", valid=[{"text": "a"}])
    check(untouched(*COMMAND), "data", None, "d/valid.jsonl:1: ", "text")


def test_train_rejects_rows_that_lose_every_target(untouched):
    error = untouched(*COMMAND, "--max-seq-length", "8")
    check(error, "data", None, "d/train.jsonl:1: ", " 8 tokens")


def test_train_counts_and_says_what_is_cut(data_here, run):
    write_rows(
        data_here / "d", train=[*CHATS, chat("Say it.", "word " * 60), chat("long " * 60, "Yes.")]
    )
    args = ("--out", "o", "--iters", "1", "--max-seq-length", "40", "--matmul-path", "dense")
    code, _, err = run("train", "--data", "d", *args, "--num-layers", "1")
    assert code == 0
    (line,) = (line for line in err.splitlines() if "--max-seq-length" in line)
    assert (
        "2 examples" in line and "40 tokens" in line and "1 of them" in line and "dropped" in line
    )


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


def test_train_rejects_chats_for_a_base_without_chat_template(data_here, untouched):
    shutil.copytree(tiny_checkpoint(), data_here / "base")
    (data_here / "base" / "chat_template.jinja").unlink()
    check(
        untouched(*COMMAND, "--model", "base"), "unsupported", None, "d/train.jsonl:1: ", "template"
    )


@pytest.mark.parametrize(
    ("args", "code", "flag", "names"),
    [
        (["--learning-rat", "1"], "unknown", "learning_rat", ["--learning-rate"]),
        (["--rank"], "invalid", "rank", []),
        (["--iters", "many"], "invalid", "iters", ["'many'"]),
        (["--rank", "0"], "invalid", "rank", ["0"]),
        (["--rank", "400"], "invalid", "rank", ["layers.0.self_attn.q_proj", "256"]),
        (["--learning-rate", "-1"], "invalid", "learning_rate", ["-1.0"]),
        (["--learning-rate", "nan"], "invalid", "learning_rate", ["nan"]),
        (["--optimizer", "adamm"], "unknown", "optimizer", ["adamw", "adamw_8bit"]),
        (["--target-modules", "q_pro"], "unknown", "target_modules", ["q_pro", "'q_proj'"]),
        (["--num-layers", "99"], "mismatch", "num_layers", ["99", "6"]),
        (["--quantize", "affine4"], "conflict", "quantize", ["affine"]),
        (["--data", "nope"], "not-found", "data", ["nope"]),
        (["--data", "nope/train.jsonl"], "not-found", "data", ["nope/train.jsonl"]),
        (["--model", "d"], "not-found", None, ["d: ", "config.json"]),
        (["--model", "d/train.jsonl"], "unsupported", None, ["d/train.jsonl"]),
        (["--model", "nope"], "not-found", "model", ["nope"]),
        (["-c", "nope.yaml"], "not-found", None, ["nope.yaml: "]),
        (["--resume"], "not-found", "resume", ["o-run"]),
        (["--resume-adapter-file", "nope"], "not-found", "resume_adapter_file", ["nope"]),
        (
            ["--resume-adapter-file", "d/train.jsonl"],
            "unreadable",
            "resume_adapter_file",
            ["d/train.jsonl"],
        ),
        (["--fine-tune-type", "ia3"], "unknown", "fine_tune_type", ["ia3", "dora"]),
        (["what"], "invalid", None, ["what"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_train_names_the_flag(untouched, args, code, flag, names):
    check(untouched(*COMMAND, *args), code, flag, *names)


@pytest.mark.parametrize(
    ("text", "code", "flag", "names"),
    [
        ("learnin_rate: 1", "unknown", "learnin_rate", ["c.yaml: ", "'learning_rate'"]),
        ("lora_parameters: {rnak: 1}", "unknown", None, ["c.yaml: ", "lora_parameters.rnak"]),
        ("rank: 0", "invalid", "rank", ["c.yaml: ", "0"]),
        ("rank: [1", "unreadable", None, ["c.yaml: "]),
        ("rank_pattern: {no_proj: 4}", "unknown", "rank_pattern", ["'no_proj'"]),
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


def test_packs_names_the_nearest_command(untouched):
    check(untouched("trian"), "unknown", "command", "'trian'", "'train'")


def test_train_never_writes_into_a_folder_of_something_else(data_here, untouched):
    (data_here / "o").mkdir()
    (data_here / "o" / "thesis.txt").write_text("mine")
    for overwrite in ((), ("--overwrite",)):
        check(untouched(*COMMAND, *overwrite), "exists", "out", "--out o: ")


def test_train_never_writes_over_a_file(untouched):
    check(untouched(*COMMAND[:-1], "d/train.jsonl"), "exists", "out", "--out d/train.jsonl: ")


@pytest.mark.parametrize(
    ("out", "code"), [(".", "invalid"), ("/", "invalid"), ("d/train.jsonl/x", "unwritable")]
)
def test_train_rejects_an_output_that_cannot_be_made(untouched, out, code):
    check(untouched(*COMMAND[:-1], out), code, "out", f"--out {out}: ")


@pytest.mark.parametrize("name", ["o-run"])
def test_train_never_mixes_a_run_with_something_else(data_here, untouched, name):
    (data_here / name).mkdir()
    (data_here / name / "thesis.txt").write_text("mine")
    check(untouched(*COMMAND), "exists", None, "o-run: ")


@pytest.mark.parametrize(("service", "code"), [("nonsense", "unknown"), ("wandb", "dependency")])
def test_train_unknown_or_absent_reporter_leaves_nothing(untouched, monkeypatch, service, code):
    monkeypatch.setattr("mlx_lm.tuner.callbacks.wandb", None)
    check(untouched(*COMMAND, "--report-to", service), code, "report_to", service)


def test_train_nan_loss_names_the_step_and_keeps_a_checkpoint(data_here, run):
    # the rate grows a million times a step: the first is harmless, the later ones are not
    growing = "lr_schedule: {name: exponential_decay, arguments: [1e-3, 1e6]}"
    (data_here / "c.yaml").write_text(growing)
    code, out, err = run(*COMMAND, "-c", "c.yaml", "--save-every", "1", "--iters", "9")
    assert (code, out, err.count("\n")) == (2, "", 1)
    latest = latest_checkpoint(data_here / "o-run").name
    check(run.error, "diverged", None, f"o-run/{latest}")
    step = int(re.match(r"step (\d+): ", run.error.message)[1])
    assert 1 < step < 9 and int(latest.removeprefix("step-")) < step
    assert not (data_here / "o").exists()
    tensors = mx.load(f"o-run/{latest}/adapters.safetensors")
    assert all(mx.isfinite(t).all().item() for t in tensors.values())


@pytest.mark.parametrize("save_every", ["1", "100"])
def test_train_last_update_that_breaks_the_model_makes_no_pack(data_here, run, save_every):
    broken = ("--iters", "1", "--learning-rate", "1e30", "--warmup-steps", "0")
    code, out, err = run(*COMMAND, *broken, "--save-every", save_every)
    assert (code, out, err.count("\n")) == (2, "", 1)
    check(run.error, "diverged", None, "step 1: ", "nan")
    assert not (data_here / "o").exists() and not list((data_here / "o-run").glob("*step*"))


@pytest.mark.parametrize(("every", "steps"), [("2", ["step-000003", "step-000006"])])
def test_train_checkpoint_due_within_an_update_comes_after_it(data_here, run, every, steps):
    accumulate = ("--grad-accumulation-steps", "3", "--batch-size", "1", "--iters", "6")
    code, _, _ = run(*COMMAND, *accumulate, "--save-every", every)
    assert code == 0
    assert sorted(p.name for p in (data_here / "o-run").glob("step-*")) == steps


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


def test_train_full_disk_that_mlx_does_not_report_is_found(data_here, run, monkeypatch):
    real = mx.save_safetensors

    def save(file, tensors, metadata):
        real(file, tensors, metadata)
        Path(file).write_bytes(Path(file).read_bytes()[:-100])

    monkeypatch.setattr(mx, "save_safetensors", save)
    code, _, err = run(*COMMAND)
    assert code == 2 and err.count("\n") == 1
    check(run.error, "unwritable", None, "adapters.safetensors")
    assert not (data_here / "o").exists() and not list((data_here / "o-run").glob("*step*"))


@pytest.fixture
def trained_pack(trained_copy) -> Path:
    """A copy of the trained pack at ``o``, its run at ``o-run``."""
    return trained_copy / "o"


def _slice(manifest: dict) -> dict:
    return manifest["adapters"]["modules"][0]["slices"][0]


USES = (
    ("apply", "o", "--dry-run"),
    ("eval", "o", "--data", "d"),
    ("generate", "--pack", "o", "--prompt", "Hi"),
)


@pytest.mark.parametrize("use", USES, ids=lambda use: use[0])
def test_pack_of_another_base_is_rejected(trained_pack, untouched, use):
    edit_manifest(trained_pack, lambda m: m["base"].update(fingerprint="0" * 64, id="other"))
    check(
        untouched(*use, "--model", "tiny"), "mismatch", None, "o: ", "other", "000000000000", "tiny"
    )


@pytest.mark.parametrize("use", [("inspect", "o"), *USES], ids=lambda use: use[0])
def test_pack_with_changed_adapters_is_rejected(trained_pack, untouched, use):
    file = trained_pack / "adapters.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 255
    file.write_bytes(content)
    check(untouched(*use), "unreadable", None, "o/adapters.safetensors: ", "sha256")


def test_pack_with_truncated_adapters_is_rejected(trained_pack, untouched):
    file = trained_pack / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    check(untouched("inspect", "o"), "unreadable", None, "o/adapters.safetensors: ")


@pytest.mark.parametrize(
    ("change", "code", "file", "name"),
    [
        (lambda m: m.update(format_version=9), "unsupported", "pack.json", "9"),
        (lambda m: m.pop("files"), "unreadable", "pack.json", "files"),
        (
            lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": "0"}}),
            "unreadable",
            "pack.json",
            "../x",
        ),
        (
            lambda m: m["files"].update({"x": {"bytes": 1, "sha256": "0"}}),
            "not-found",
            "x",
            "pack.json",
        ),
        (lambda m: m.pop("base"), "unreadable", "pack.json", "base"),
        (lambda m: m.update(format_version="x"), "unreadable", "pack.json", "format_version"),
        (lambda m: m["files"].update({"README.md": 5}), "unreadable", "pack.json", "README.md"),
        (lambda m: m["files"].pop("adapters.safetensors"), "unreadable", "pack.json", "adapters"),
        (lambda m: _slice(m).update(rank="x"), "unreadable", "pack.json", "rank"),
    ],
)
def test_pack_with_a_wrong_manifest_is_rejected(trained_pack, untouched, change, code, file, name):
    edit_manifest(trained_pack, change)
    check(untouched("inspect", "o"), code, None, f"o/{file}: ", name)


def test_pack_manifest_that_contradicts_the_adapters_is_rejected(trained_pack, untouched):
    edit_manifest(trained_pack, lambda m: _slice(m).update(rank=1))
    check(untouched("apply", "o", "--dry-run"), "mismatch", None, "o", "(256, 1)")


@pytest.mark.parametrize(
    ("args", "code", "flag", "name"),
    [
        (("inspect", "nope"), "not-found", None, "nope: "),
        (("inspect", "d"), "not-found", None, "d: "),
        (("eval", "o", "--data", "d", "--split", "foo"), "data", "split", "foo"),
        (("eval", "o", "--data", "nope"), "not-found", "data", "nope"),
        (("eval", "o", "--data", "d", "--limit", "0"), "invalid", "limit", "0"),
        (("generate", "--prompt", " "), "invalid", "prompt", ""),
        ((*COMMAND,), "exists", "out", "--overwrite"),
        ((*COMMAND, "--resume", "--rank", "4"), "mismatch", None, "rank"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_error_beside_a_pack(trained_pack, untouched, args, code, flag, name):
    check(untouched(*args), code, flag, name)


@pytest.mark.parametrize("name", ["state.json", "optimizer.safetensors", "adapters.safetensors"])
def test_resume_rejects_a_damaged_checkpoint(trained_pack, data_here, name):
    shutil.rmtree(trained_pack)
    shutil.rmtree(data_here / "o-run" / "step-000001", ignore_errors=True)
    (data_here / "o-run" / "step-000002" / name).write_bytes(b"{")
    with raises("unreadable", None, "o-run/step-000002"):
        train_pack("tiny", "d", LORA, TRAIN, out="o", resume=True)
    assert not trained_pack.exists()
