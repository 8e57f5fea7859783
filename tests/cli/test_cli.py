"""The `packs` command on a small pack: what it prints, what JSON it gives, how it exits."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import click
import mlx.nn as nn
import pytest
from click.testing import CliRunner, Result
from mlx_lm.utils import load

from mlx_packs import LoRAConfig, TrainConfig, train_pack
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.chips import CHIPS
from mlx_packs.cli.doctor import report_lines
from mlx_packs.cli.main import COMMANDS, packs
from mlx_packs.ops import _backend, diagnostics
from mlx_packs.ops.diagnostics import examine_kernel, examine_machine, kernel_instances
from mlx_packs.reading import sealed
from mlx_packs.runtime import mx
from tests.helpers.bases import copy_tiny
from tests.helpers.checkpoints import write_checkpoint, write_quantized
from tests.helpers.emulation import emulation
from tests.helpers.errors import check
from tests.helpers.gguf_base import write_gguf
from tests.helpers.packs import edit_manifest
from tests.helpers.rows import CHATS, chat, write_rows
from tests.helpers.variants import slow_except
from tests.ops.cases import with_workload


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Path:
    """A folder with rows and a pack trained on them."""
    folder = tmp_path_factory.mktemp("trained")
    rows = [chat(f"What is {n}?", f"It is {n} and {n}.") for n in ("one", "two", "three", "four")]
    write_rows(folder / "rows", train=rows, valid=rows[:2], test=rows[2:])
    settings = {"iters": 3, "batch_size": 4, "learning_rate": 5e-3, "matmul_path": "dense"}
    train = TrainConfig(**settings, warmup_steps=0)
    train_pack("tiny", folder / "rows", LoRAConfig(rank=4), train, folder / "pack")
    return folder


def invoke(*arguments) -> Result:
    result = CliRunner().invoke(packs, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_inspect_prints_the_manifest_with_hashes(answers):
    manifest = json.loads(invoke("inspect", answers / "pack", "--json").stdout)
    assert sealed(manifest) == json.loads((answers / "pack" / "pack.json").read_text())
    assert set(manifest["files"]) == {"adapters.safetensors", "adapter_config.json", "README.md"}
    text = invoke("inspect", answers / "pack").stdout
    assert "rank 4 · scale 2.0" in text and manifest["files"]["README.md"]["sha256"] in text


@pytest.mark.slow
def test_inspect_on_a_base_says_what_apply_says(answers):
    applied = json.loads(invoke("apply", answers / "pack", "--model", "tiny", "--json").stdout)
    assert applied["fits"] and applied["projections"] == 42 and "largest_logit_change" in applied
    inspect = ("inspect", answers / "pack", "--on", "tiny")
    assert json.loads(invoke(*inspect, "--json").stdout)["fit"] == applied
    text = invoke(*inspect, "--dry-run").stdout
    assert "rank 4" in text and "fits    " in text and "applied" not in text
    result = invoke(*inspect, "--dry-run", "--max-pack-mb", "0.01")
    assert result.exit_code == 1 and "--max-pack-mb failed" in result.stderr


def test_commands_that_are_not_listed_still_work(answers):
    listed = invoke("--help").stdout
    for name in ("apply", "completion"):
        assert f"\n  {name} " not in listed
        assert invoke(name, "--help").exit_code == 0


def test_eval_agrees_with_stock_mlx_lm_on_the_same_rows(answers):
    """Perplexity of base and pack by mlx-lm's loader and forward, row by row."""
    evaluated = ("eval", answers / "pack", "--data", answers / "rows", "--json")
    report = json.loads(invoke(*evaluated).stdout)

    for name, adapter in (("base", None), ("pack", str(answers / "pack"))):
        model, tokenizer = load(str(tiny_checkpoint()), adapter_path=adapter)
        total = 0.0
        count = 0
        for line in (answers / "rows" / "test.jsonl").read_text().splitlines():
            messages = json.loads(line)["messages"]
            tokens = tokenizer.apply_chat_template(messages)
            start = len(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True))
            end = len(tokens) - 1  # the newline after the end of the turn is not learned
            logits = model(mx.array([tokens[:-1]]))[0]
            nll = nn.losses.cross_entropy(logits, mx.array(tokens[1:]))[start - 1 : end - 1]
            total += nll.sum().item()
            count += nll.size

        assert count == report[name]["targets"]
        assert abs(mx.exp(mx.array(total / count)).item() / report[name]["ppl"] - 1) < 1e-4


def test_generate_streams_and_the_pack_changes_the_text(answers):
    arguments = ("generate", "--prompt", "What is one?", "--max-tokens", "8")
    plain, packed = invoke(*arguments), invoke(*arguments, "--pack", answers / "pack")
    assert plain.exit_code == packed.exit_code == 0
    assert plain.stdout.strip() and plain.stdout != packed.stdout


@pytest.fixture
def nothing_timed(monkeypatch):
    """Doctor checks kernels, and times each once."""
    monkeypatch.setattr(diagnostics.chips, "product_tflops", lambda _: 1e-3)
    monkeypatch.setattr(diagnostics, "COPIES", 1)
    monkeypatch.setattr(diagnostics.chips, "_REPEATS", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_timed")
def test_doctor_shows_a_failing_kernel_and_exits_with_1(monkeypatch):
    instances = [i for i in diagnostics.kernel_instances() if "float32 rank 8 4096" in i.name][:1]
    monkeypatch.setattr(diagnostics, "kernel_instances", lambda: instances)

    with emulation("metal", orders=("forward",)):
        small = [with_workload(i, lambda b, *_, i=i: i.checks(b)[0]) for i in instances]
        monkeypatch.setattr(diagnostics, "kernel_instances", lambda: small)
        good = invoke("doctor")
        assert good.exit_code == 0 and "kernels metal" in good.stdout
        assert good.stdout.count(" ok\n") == len(small) and "GFLOP/s" in good.stdout

        monkeypatch.setitem(_backend.MAKERS, "metal", lambda **_: 1 / 0)
        _backend._built.cache_clear()
        bad = invoke("doctor")
        assert bad.exit_code == 1 and "  -  " in bad.stdout
        assert bad.stdout.count("ZeroDivisionError") == len(small)
        assert "a kernel is wrong on this machine" in bad.stderr


@pytest.mark.usefixtures("nothing_timed")
def test_doctor_takes_the_sizes_of_a_base(here, run):
    flags = ("--model", "tiny", "--rank", 8, "--json", "--report", "report.json")
    code, out, _ = run("doctor", *flags)
    report = json.loads(out)
    assert report == json.loads(Path("report.json").read_text())
    assert {"device", "versions", "blas", "memory"} <= set(report) and report["versions"]["mlx"]
    assert len(report_lines(report, verbose=True)) == 6 + len(report["kernels"])
    assert all(k["ok"] and k["backend"] == "reference" for k in report["kernels"])
    names = [kernel["instance"] for kernel in report["kernels"]]
    assert code == 0 and names[0] == "float32 rank 8 256 to 512/128/128 rows 1", names
    assert len(names) == len(set(names)) == 4 * 4  # q/k/v, o, gate/up, down; 1 and 32 rows, 1 and 8


@pytest.mark.usefixtures("nothing_timed")
def test_doctor_measures_the_weights_of_an_nf4_base(tmp_path, run):
    write_quantized(tmp_path / "nf4", write_checkpoint(tmp_path / "dense"), mode="nf4")
    _, out, _ = run("doctor", "--model", tmp_path / "nf4", "--json")
    kernels = json.loads(out)["kernels"]
    assert all(kernel["ok"] for kernel in kernels)
    ops = [kernel["op"] for kernel in kernels]
    assert ops.count("grouped_lora") == 6 and ops.count("nf4") >= 6


def test_doctor_shows_the_rates_of_a_gpu():
    kernels = [examine_kernel(kernel_instances()[0])]
    report = examine_machine() | {"kernels": kernels}
    assert report["chip"] is None
    for chip, line in {
        "Apple M5 Max": "614 GB/s · 22.8 TFLOP/s float32, 73.6 half · bfloat16 native · matrix units",
        "Apple M1": "bfloat16 emulated · no matrix units",
    }.items():
        report["chip"] = asdict(CHIPS[chip])
        assert line in report_lines(report, verbose=False)[1]


def test_a_run_on_texts_ends_with_a_command_that_continues_one(tmp_path):
    text = "Once there was a fox who lived by the river and sang all day long."
    (tmp_path / "train.jsonl").write_text((json.dumps({"text": text}) + "\n") * 8)
    out = tmp_path / "pack"
    few = ("--iters", 1, "--batch-size", 1, "--matmul-path", "dense", "--num-layers", 1)
    result = invoke(
        "train", "--model", "tiny", "--data", tmp_path / "train.jsonl", *few, "--out", out
    )
    last = result.stdout.splitlines()[-1]
    assert last.startswith(f"packs generate {out} --raw --prompt 'Once there was"), last
    shown = invoke(*shlex.split(last)[1:], "--max-tokens", 2)
    assert shown.exit_code == 0 and shown.stdout.strip()


@pytest.mark.slow
def test_a_run_starts_with_base_data_and_plan_in_80_columns(tmp_path):
    few = ("--iters", 1, "--warmup-steps", 0, "--batch-size", 1, "--num-layers", 1)
    fast = ("--matmul-path", "dense", "--test-batches", 1, "--val-batches", 1, "--metric", "none")
    result = invoke("train", *few, *fast, "--out", tmp_path / "pack")

    first = result.stderr.partition("\ntrain ")[0].splitlines()
    starts = dict.fromkeys(line.partition(" ")[0] for line in first if line[:1].strip())
    assert result.exit_code == 0 and list(starts) == ["base", "data", "plan"], first
    assert max(map(len, first)) <= 80


def test_show_mask_marks_what_is_learned(answers):
    result = invoke("train", "--model", "tiny", "--data", answers / "rows", "--show-mask")
    assert "⟦It is one and one.<|im_end|>⟧" in result.stdout
    assert "loss on assistant; --loss-on all, completion or assistant" in result.stderr


def test_show_mask_shows_the_format_that_the_task_trains_on(tmp_path):
    file = tmp_path / "rows.jsonl"
    sides = {"prompt": "Name a fruit.", "chosen": "A lime.", "rejected": "A stone."}
    file.write_text(json.dumps({**sides, "text": "A text.", **chat("Hi", "Hello.")}) + "\n")
    shown = invoke(
        "train", "--model", "tiny", "--data", file, "--task", "dpo", "--show-mask"
    ).output
    assert "⟦A lime.<|im_end|>" in shown and "⟦A stone.<|im_end|>" in shown
    assert "Hello" not in shown and "A text" not in shown and "--loss-on" not in shown

    file.write_text(json.dumps(sides) + "\n")
    rejected = invoke("train", "--model", "tiny", "--data", file, "--show-mask")
    assert rejected.exit_code == 2 and "--task dpo" in rejected.stderr


def test_quiet_prints_the_result_line_only(answers):
    few = ("--iters", 1, "--num-layers", 1, "--matmul-path", "dense", "--test-batches", 1)
    result = invoke(
        "train",
        "--model",
        "tiny",
        "-q",
        "--data",
        answers / "rows",
        *few,
        "--out",
        answers / "quiet",
    )
    assert result.stdout.count("\n") == 1 and result.stdout.startswith("done")
    assert not result.stderr


def test_manifest_and_card_hold_no_path_of_this_machine(answers):
    for name in ("pack.json", "README.md", "adapter_config.json"):
        assert str(answers) not in (answers / "pack" / name).read_text()


def test_train_counts_and_says_what_is_cut(tmp_path):
    long = [chat("Say it.", "word " * 60), chat("long " * 60, "Yes.")]
    data = write_rows(tmp_path / "d", train=[*CHATS, *long], valid=CHATS[:2])
    few = ("--iters", 2, "--num-layers", 1, "--matmul-path", "dense", "--test-batches", 1)
    out = ("--out", tmp_path / "o", "--max-seq-length", 40)
    result = invoke("train", "--model", "tiny", "--data", data, *few, *out)
    (line,) = (line for line in result.stderr.splitlines() if "--max-seq-length" in line)
    assert all(part in line for part in ("2 examples cut", "40 tokens", "1 examples dropped"))


# On the pack `o`, which was trained on `d`.
CASES = {
    "train": ("--show-mask", "--data", "d"),
    "plan": ("--memory", "16"),
    "data": ("d",),
    "list": (".",),
    "inspect": ("o",),
    "diff": ("o", "o"),
    "report": ("o", "--out", "page.html"),
    "export": ("o", "--to", "mlx-lm", "--out", "x"),
    "eval": ("o", "--data", "d"),
    "eval-batch": ("o", "--data", "d", "--batch-size", "1", "--max-tokens", "2", "--rounds", "1"),
    "generate": ("--prompt", "Hi", "--max-tokens", "1"),
}
# Those that take longer, or need a network or other packages; `print_report` checks them too.
OTHERS = {
    *("bench", "combine", "doctor", "eval-tasks", "import", "init", "learn"),
    *("merge", "pull", "push", "quantize", "serve", "sweep"),
}


def test_every_command_with_json_is_listed():
    root = click.Context(packs)
    with_json = {
        name
        for section in COMMANDS.values()
        for name in section
        if any("--json" in each.opts for each in packs.get_command(root, name).params)
    }
    assert with_json == CASES.keys() | OTHERS


@pytest.mark.parametrize("command", slow_except(CASES, *CASES.keys() - {"eval", "generate"}))
def test_json_is_one_object(command, trained_copy, run):
    code, out, err = run(command, *CASES[command], "--json")
    assert code == 0, err
    assert isinstance(json.loads(out), dict)


def test_a_checkpoint_is_described(run):
    code, out, _ = run("inspect", "tiny")
    assert code == 0
    assert "tiny · qwen3 · 6 blocks · affine 4-bit g64 · 4.1 MB" in out
    assert "4,096 tokens · with a chat template · an answer ends with <|im_end|>" in out

    code, out, _ = run("inspect", "tiny", "--json")
    facts = json.loads(out)
    assert (code, facts["model_type"], facts["vocab_size"]) == (0, "qwen3", 4096)
    assert facts["has_chat_template"] and facts["answer_end"] == "<|im_end|>"


def test_a_gguf_file_is_described_with_its_own_fingerprint(run, here):
    file = write_gguf(tiny_checkpoint(), here / "model.gguf")
    code, out, _ = run("inspect", file, "--json")
    facts = json.loads(out)
    assert (code, facts["base"], facts["model_type"]) == (0, "model.gguf", "qwen3")
    assert facts["fingerprint"] != json.loads(run("inspect", "tiny", "--json")[1])["fingerprint"]


def test_a_base_without_a_chat_template_says_so(run, here, encoder):
    (copy_tiny(here / "base") / "chat_template.jinja").unlink()
    assert "no chat template" in run("inspect", "base")[1]
    code, out, _ = run("inspect", encoder)
    assert code == 0 and "bert" in out and "template" not in out


@pytest.mark.parametrize(
    ("files", "code", "file", "name"),
    [
        ({"../x": {"bytes": 1, "sha256": "0"}}, "unreadable", "pack.json", "../x"),
        ({"x": {"bytes": 1, "sha256": "0"}}, "not-found", "x", "pack.json"),
        ({"README.md": 5}, "unreadable", "pack.json", "README.md"),
    ],
)
def test_a_pack_with_a_wrong_list_of_files(trained_copy, rejected, files, code, file, name):
    edit_manifest(trained_copy / "o", lambda manifest: manifest["files"].update(files))
    check(rejected("inspect", "o"), code, None, f"o/{file}: ", name)
