"""Bad input through the command line: one clear line, exit 2, nothing half-written."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_packs import LoRAConfig, TrainConfig, train_pack
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.runtime import mx
from tests.helpers.errors import check, raises
from tests.helpers.rows import chat, write_rows

GOOD = [chat("Say hi.", "Hi there, friend."), chat("Say yes.", "Yes, I will.")] * 4
VALID = GOOD[:2]
SETTINGS = LoRAConfig(rank=2, num_layers=1), TrainConfig(iters=2, batch_size=2, save_every=1)
TRAIN = ("train", "-q", "--data", "d", "--iters", "2", "--out", "o")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to stand in, with a good data set in ``d``."""
    write_rows(tmp_path / "d", train=GOOD, valid=VALID)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(run, here):
    """Run `packs ARGS`, which must fail in one line and leave every file as it was."""

    def go(*args) -> str:
        before = files(here)
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert err.startswith("packs: ") and err.endswith("\n") and err.count("\n") == 1
        assert files(here) == before
        return err.removeprefix("packs: ").rstrip("\n")

    return go


def files(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [}', "d/train.jsonl:9: is not valid JSON"),
        ('{"messages": [{"role": "user", "conte', "d/train.jsonl:9: is not valid JSON"),
        ('["a"]', "d/train.jsonl:9: must be a JSON object, but is a list"),
        ('{"text": "a"}', "d/train.jsonl:9: mixed formats: this row is text"),
        ('{"messages": "Hi"}', "d/train.jsonl:9: 'messages' must be a list of {role, content}"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "d/train.jsonl:9: nothing to superv"),
        (
            '{"words": "a"}',
            "d/train.jsonl:9: must have the columns {prompt, completion} or {messages}",
        ),
        ('{"prompt": "a\\ud800", "completion": "b"}', "d/train.jsonl:9: mixed formats"),
    ],
)
def test_train_names_file_and_line_of_a_bad_row(here, refused, line, message):
    with (here / "d" / "train.jsonl").open("a") as f:
        f.write(line)
    assert refused(*TRAIN).startswith(message)


def test_train_names_file_and_line_in_other_splits(here, refused):
    (here / "d" / "valid.jsonl").write_text('{"messages": []}\n{')
    assert refused(*TRAIN).startswith("d/valid.jsonl:2: is not valid JSON")


def test_train_refuses_text_that_is_not_utf8(here, refused):
    (here / "d" / "train.jsonl").write_bytes(b'{"text": "\xff"}')
    assert refused(*TRAIN) == "d/train.jsonl: is not UTF-8 text (byte 10)."


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_train_refuses_an_empty_split(here, refused, split, content):
    (here / "d" / f"{split}.jsonl").write_text(content)
    assert refused(*TRAIN) == f"d/{split}.jsonl: holds no rows."


def test_train_refuses_a_folder_without_training_rows(here, refused):
    (here / "d" / "train.jsonl").unlink()
    assert refused(*TRAIN) == "--data d: the train split is empty."


def test_train_refuses_one_row_alone(here, refused):
    write_rows(here / "d", train=GOOD[:1])
    (here / "d" / "valid.jsonl").unlink()
    assert "one row is too few: some must be held out" in refused(*TRAIN)


def test_train_refuses_splits_of_different_formats(here, refused):
    write_rows(here / "d", valid=[{"text": "a"}])
    assert refused(*TRAIN).startswith("d/valid.jsonl:1: mixed formats")


def test_train_refuses_rows_that_lose_every_target(refused):
    message = refused(*TRAIN, "--max-seq-length", "8")
    assert message == "d/train.jsonl:1: no row has a target within 8 tokens."


def test_train_counts_and_says_what_is_cut(here, run):
    write_rows(here / "d", train=[*GOOD, chat("Say it.", "word " * 60), chat("long " * 60, "Yes.")])
    args = ("--out", "o", "--iters", "1", "--max-seq-length", "40")
    code, _, err = run("train", "--data", "d", *args)
    assert code == 0
    (line,) = (line for line in err.splitlines() if "--max-seq-length" in line)
    assert "2 rows" in line and "40 tokens" in line and "1 of them" in line and "dropped" in line


def test_train_refuses_tokens_beyond_the_vocabulary(here, refused):
    shutil.copytree(tiny_checkpoint(), here / "base")
    tokenizer = json.loads((here / "base" / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] == "<|im_end|>":
            token["content"] = "<|old_end|>"
    added = dict(tokenizer["added_tokens"][-1], id=4096, content="<|im_end|>")
    tokenizer["added_tokens"].append(added)
    (here / "base" / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refused(*TRAIN, "--model", "base")
    assert message.startswith("d/train.jsonl:1: token 4096 lies beyond the base's vocabulary of 40")


def test_train_refuses_chats_for_a_base_without_chat_template(here, refused):
    shutil.copytree(tiny_checkpoint(), here / "base")
    (here / "base" / "chat_template.jinja").unlink()
    message = refused(*TRAIN, "--model", "base")
    assert message.startswith("d/train.jsonl:1: the base's tokenizer has no chat template")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--learning-rat", "1"],
            "--learning-rat: no such option. Use --learning-rate",
        ),
        (["--rank"], "Option '--rank' requires an argument."),
        (["--iters", "many"], "--iters: must be an integer, but is 'many'."),
        (["--rank", "0"], "--rank: must be at least 1, but is 0."),
        (["--rank", "400"], "--rank 400: model.layers.0.self_attn.q_proj is 256 x 512"),
        (["--learning-rate", "-1"], "--learning-rate: must be above 0, but is -1.0."),
        (["--learning-rate", "nan"], "--learning-rate: must be above 0, but is nan."),
        (["--optimizer", "adamm"], "--optimizer: must be one of adamw, adamw_8bit,"),
        (["--target-modules", "q_pro"], "--target-modules q_pro: no such projection. Did you mean"),
        (["--num-layers", "99"], "--num-layers 99: the base has only 6 blocks."),
        (["--quantize", "affine4"], "--quantize affine4: the base is quantized already"),
        (["--data", "nope"], "--data nope: no such folder or file"),
        (["--data", "nope/train.jsonl"], "--data nope/train.jsonl: no such folder or file"),
        (["--model", "d"], "d: is not a checkpoint, it has no config.json."),
        (["--model", "d/train.jsonl"], "d/train.jsonl: must be a checkpoint folder"),
        (["--model", "nope"], "--model nope: no such folder"),
        (["-c", "nope.yaml"], "nope.yaml: cannot be read (No such file or directory)."),
        (["--resume"], "--resume: o-run has no checkpoint to continue from."),
        (["--resume-adapter-file", "nope"], "--resume-adapter-file nope: no such file."),
        (["--resume-adapter-file", "d/train.jsonl"], "--resume-adapter-file d/train.jsonl: "),
        (["--fine-tune-type", "dora"], "--fine-tune-type: dora is not trained here"),
        (["what"], "Got unexpected extra argument (what)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_train_names_the_flag(refused, args, message):
    assert refused(*TRAIN, *args).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learnin_rate: 1",
            "c.yaml: learnin_rate: is not a setting. Did you mean 'learning_rate'?",
        ),
        (
            "lora_parameters: {rnak: 1}",
            "c.yaml: lora_parameters.rnak: is not a setting. Did you mean",
        ),
        ("rank: 0", "c.yaml: rank: must be at least 1, but is 0."),
        ("rank: [1", "c.yaml: is not valid YAML"),
        ("rank_pattern: {no_proj: 4}", "--rank-pattern: 'no_proj' fits no projection"),
        ("optimizer_config: {adamw: {bets: 1}}", "optimizer_config.adamw.bets: is not an argument"),
        ("lr_schedule: {name: cosine}", "lr_schedule.name: must be one of"),
    ],
)
def test_train_names_file_and_key_of_a_configuration(here, refused, text, message):
    (here / "c.yaml").write_text(text)
    assert refused(*TRAIN, "-c", "c.yaml").startswith(message)


def test_what_a_configuration_lacks_may_be_said_by_a_flag_or_another_file(here, refused):
    (here / "c.yaml").write_text("double_quant: false\n")
    (here / "more.yaml").write_text("quantize: nf4\n")
    args = (*TRAIN, "--model", "nowhere", "-c", "c.yaml")
    assert refused(*args).startswith("c.yaml: double_quant: ")
    for mended in ((*args, "--quantize", "nf4"), (*args, "-c", "more.yaml")):
        assert "nowhere" in refused(*mended) and "double" not in refused(*mended)


def test_packs_names_the_nearest_command(refused):
    assert refused("trian") == "no such command 'trian'. Did you mean 'train'?"


def test_module_exit_code_is_2_and_stdout_empty(here):
    done = subprocess.run(
        [sys.executable, "-m", "mlx_packs.train", "--learning-rat", "4"],
        capture_output=True,
        text=True,
        cwd=here,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("packs: --learning-rat: no such option.")
    assert done.stderr.count("\n") == 1


def test_train_never_writes_into_a_folder_that_holds_something_else(here, refused, run):
    (here / "o").mkdir()
    (here / "o" / "thesis.txt").write_text("mine")
    for args in (TRAIN, (*TRAIN, "--overwrite")):
        refused(*args)
        check(run.error, "exists", "out", "--out o:")


def test_train_never_writes_over_a_file(refused, run):
    refused(*TRAIN[:-1], "d/train.jsonl")
    check(run.error, "exists", "out", "d/train.jsonl")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (".", "--out .: must name a folder of its own."),
        ("/", "--out /: must name a folder of its own."),
        ("d/train.jsonl/x", "--out d/train.jsonl/x: cannot be written"),
    ],
)
def test_train_refuses_an_output_that_cannot_be_made(refused, out, message):
    assert refused(*TRAIN[:-1], out).startswith(message)


@pytest.mark.parametrize("name", ["o-run"])
def test_train_never_mixes_a_run_with_something_else(here, refused, name):
    (here / name).mkdir()
    (here / name / "thesis.txt").write_text("mine")
    assert refused(*TRAIN).startswith("o-run: is there and holds something else")


@pytest.mark.parametrize("service", ["nonsense", "wandb"])
def test_train_unknown_or_absent_reporter_leaves_nothing(refused, monkeypatch, service):
    monkeypatch.setattr("mlx_lm.tuner.callbacks.wandb", None)
    assert refused(*TRAIN, "--report-to", service).startswith(f"--report-to {service}: ")


def test_train_nan_loss_names_the_step_and_keeps_a_good_checkpoint(here, run):
    # the rate grows a million times a step: the first is harmless, the later ones are not
    growing = "lr_schedule: {name: exponential_decay, arguments: [1e-3, 1e6]}"
    (here / "c.yaml").write_text(growing)
    code, out, err = run(*TRAIN, "-c", "c.yaml", "--save-every", "1", "--iters", "9")
    assert (code, out, err.count("\n")) == (2, "", 1)
    found = re.fullmatch(r"packs: step (\d+): the (loss|gradient) is .*; stopped\. (.*)\n", err)
    assert found and 1 < int(found[1]) < 9
    assert not (here / "o").exists()
    latest = (here / "o-run" / "latest").read_text().strip()
    assert f"The last good checkpoint is o-run/{latest}." in found[3]
    assert int(latest.removeprefix("step-")) < int(found[1])
    kept = mx.load(f"o-run/{latest}/adapters.safetensors")
    assert all(mx.isfinite(t).all().item() for t in kept.values())


@pytest.mark.parametrize("save_every", ["1", "100"])
def test_train_last_update_that_breaks_the_model_makes_no_pack(here, run, save_every):
    broken = ("--iters", "1", "--learning-rate", "1e30", "--warmup-steps", "0")
    code, out, err = run(*TRAIN, *broken, "--save-every", save_every)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("packs: step 1: the loss is nan; stopped.")
    assert not (here / "o").exists() and not list((here / "o-run").glob("*step*"))


@pytest.mark.parametrize(("every", "steps"), [("2", ["step-000003", "step-000006"])])
def test_train_checkpoint_due_within_an_update_comes_after_it(here, run, every, steps):
    accumulate = ("--grad-accumulation-steps", "3", "--batch-size", "2", "--iters", "6")
    code, _, _ = run(*TRAIN, *accumulate, "--save-every", every)
    assert code == 0
    assert sorted(p.name for p in (here / "o-run").glob("step-*")) == steps


def test_train_full_disk_leaves_the_last_checkpoint_and_no_pack(here, run, monkeypatch):
    real, written = mx.save_safetensors, []

    def save(file, tensors, metadata):
        written.append(file)
        if len(written) > 2:  # the first checkpoint is two files
            Path(file).write_bytes(b"part")
            raise RuntimeError("[write] Unable to write 611 bytes to file.")
        real(file, tensors, metadata)

    monkeypatch.setattr(mx, "save_safetensors", save)
    code, out, err = run(*TRAIN, "--save-every", "1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot be written ([write] Unable to write 611 bytes" in err
    assert sorted(p.name for p in here.iterdir()) == ["d", "o-run"]
    steps = [p.name for p in (here / "o-run").iterdir() if p.is_dir()]
    assert steps == ["step-000001"]


def test_train_full_disk_that_mlx_does_not_report_is_found(here, run, monkeypatch):
    real = mx.save_safetensors

    def save(file, tensors, metadata):
        real(file, tensors, metadata)
        Path(file).write_bytes(Path(file).read_bytes()[:-100])

    monkeypatch.setattr(mx, "save_safetensors", save)
    code, _, err = run(*TRAIN)
    assert code == 2 and "is truncated" in err and err.count("\n") == 1
    assert not (here / "o").exists() and not list((here / "o-run").glob("*step*"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A pack of two steps on the tiny base, made once; tests work on copies."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_rows(folder / "d", train=GOOD, valid=VALID)
    train_pack("tiny", data, *SETTINGS, out=folder / "o")
    return folder


@pytest.fixture
def pack(trained, here) -> Path:
    """A copy of the trained pack at ``o``, its run at ``o-run``."""
    shutil.copytree(trained / "o-run", here / "o-run")
    return Path(shutil.copytree(trained / "o", here / "o"))


def edit(pack: Path, change) -> None:
    manifest = json.loads((pack / "pack.json").read_text())
    change(manifest)
    (pack / "pack.json").write_text(json.dumps(manifest))


def _slice(manifest: dict) -> dict:
    return manifest["adapters"]["modules"][0]["slices"][0]


USES = (
    ("apply", "o", "--dry-run"),
    ("eval", "o", "--data", "d"),
    ("generate", "--pack", "o", "--prompt", "Hi"),
)


@pytest.mark.parametrize("use", USES, ids=lambda use: use[0])
def test_pack_of_another_base_is_refused(pack, refused, use):
    edit(pack, lambda m: m["base"].update(fingerprint="0" * 64, id="other"))
    assert refused(*use).startswith("o: was trained on other (fingerprint 000000000000), but tiny")


@pytest.mark.parametrize("use", [("inspect", "o"), *USES], ids=lambda use: use[0])
def test_pack_with_changed_adapters_is_refused(pack, refused, use):
    file = pack / "adapters.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 255
    file.write_bytes(content)
    message = refused(*use)
    assert message.startswith("o/adapters.safetensors: sha256 is ") and "damaged" in message


def test_pack_with_truncated_adapters_is_refused(pack, refused):
    file = pack / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert refused("inspect", "o").startswith("o/adapters.safetensors: has ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format_version=9), "o/pack.json: format 9 is newer"),
        (lambda m: m.pop("files"), "o/pack.json: is not a manifest"),
        (
            lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": "0"}}),
            "o/pack.json: names a file outside",
        ),
        (
            lambda m: m["files"].update({"x": {"bytes": 1, "sha256": "0"}}),
            "o/x: is named in pack.json but is not",
        ),
        (lambda m: m.pop("base"), "o/pack.json: is not a manifest"),
        (lambda m: m.update(format_version="x"), "o/pack.json: is not a manifest"),
        (lambda m: m["files"].update({"README.md": 5}), "o/pack.json: is not a manifest"),
        (lambda m: m["files"].pop("adapters.safetensors"), "o/pack.json: is not a manifest"),
        (lambda m: _slice(m).update(rank="x"), "o/pack.json: is not a manifest"),
    ],
)
def test_pack_with_a_wrong_manifest_is_refused(pack, refused, change, message):
    edit(pack, change)
    assert refused("inspect", "o").startswith(message)


def test_pack_manifest_that_contradicts_the_adapters_is_refused(pack, refused):
    edit(pack, lambda m: _slice(m).update(rank=1))
    assert "but the manifest says [256, 1]" in refused("apply", "o", "--dry-run")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("inspect", "nope"), "nope: no such pack folder."),
        (("inspect", "d"), "d: is not a pack: it has no pack.json."),
        (("eval", "o", "--data", "d", "--split", "foo"), "--data d: has no foo rows."),
        (("eval", "o", "--data", "nope"), "--data nope: no such folder or file"),
        (("eval", "o", "--data", "d", "--limit", "0"), "--limit 0: must be positive"),
        (("generate", "--prompt", " "), "--prompt: is empty."),
        ((*TRAIN,), "--out o: is a pack already. Choose another path or pass --overwrite."),
        ((*TRAIN, "--resume", "--rank", "4"), "--resume: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_packs_says_what_is_wrong_beside_a_pack(pack, refused, args, message):
    assert refused(*args).startswith(message)


@pytest.mark.parametrize("name", ["state.json", "optimizer.safetensors", "adapters.safetensors"])
def test_resume_refuses_a_damaged_checkpoint(trained, pack, here, name):
    shutil.rmtree(pack)
    (here / "o-run" / "step-000002" / name).write_bytes(b"{")
    with raises("unreadable", None, "o-run/step-000002"):
        train_pack("tiny", trained / "d", *SETTINGS, out="o", resume=True)
    assert not pack.exists()
