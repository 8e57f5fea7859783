"""`packs plan`: what is recommended, in which order, and the commands that it prints."""

import dataclasses
import functools
import json
import shlex
from pathlib import Path

import pytest

from benchmarks.plan_table import CONFIGS, headers_of, rows
from mlx_packs import LoRAConfig, TrainConfig, runtime
from mlx_packs.cli import plan
from mlx_packs.cli.recipe import read_recipes, recipe_of
from mlx_packs.cli.train import train as train_command
from mlx_packs.memory import pressure
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.memory.read import read_headers
from mlx_packs.memory.recommend import PlanOption, recommend
from tests.helpers.errors import check
from tests.helpers.headers import dense_headers, write_headers

MEMORIES = (8, 24)  # GB
RECIPE = {"batch_size": 2, "lora_parameters": {"rank": 32, "scale": 2.0}, "grad_checkpoint": True}


@functools.cache
def by_memory(name: str, device: str) -> list[list[PlanOption]]:
    """The recommendations for each of ``MEMORIES``, and for one that fits everything."""
    with runtime.assumed_device(device):
        return [recommend(dense_headers(name), int(gb * 1e9)) for gb in (*MEMORIES, 4096)]


def learned(option: PlanOption) -> tuple:
    """What an option learns, and with which precision of the base, as one order."""
    return option.lora.rank, option.train.max_seq_length, option.method != "qlora"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["small", "qwen3-4b"])
def test_more_memory_never_recommends_less(name, device):
    best = [options[0] for options in by_memory(name, device)]
    assert all(option.fits for option in best)
    assert [learned(option) for option in best] == sorted(map(learned, best))
    assert learned(best[-1]) == (LoRAConfig().rank, TrainConfig().max_seq_length, True)
    assert (best[0].method == "qlora") == (name != "small")


def test_recommend_puts_what_fits_first_and_rank_before_precision():
    for *ways, full in by_memory("qwen3-4b", "gpu"):
        states = [("fits", "tight", "no").index(option.fit) for option in ways]
        assert states == sorted(states) and full.method == "full"
        fitting = [(-o.lora.rank, -o.train.max_seq_length) for o in ways if o.fits]
        assert fitting == sorted(fitting)


@pytest.mark.slow
def test_batch_gives_way_before_time_length_and_rank():
    memories = [256 / 1.7**i for i in range(8)] + [4 / 1.06**i for i in range(9)]
    headers, train = dense_headers("qwen3-4b"), TrainConfig(quantize="nf4")
    best = [
        recommend(headers, int(gb * 1e9), train=train, specified=frozenset({"quantize"}))[0]
        for gb in memories
    ]
    options = [option for option in best if option.fits]

    policies = ("none", "selective", "block")
    given_up = [
        (
            -option.lora.rank,
            -option.train.max_seq_length,
            policies.index(option.train.recomputes),
            -option.train.batch_size,
        )
        for option in options
    ]
    assert given_up == sorted(given_up)

    assert given_up[0] == (-16, -2048, 0, -4)
    assert all(len({*values}) > 1 for values in zip(*given_up, strict=True)), "all give way"

    reduced = next(option for option in options if option.train.batch_size == 2)
    assert "batch 2 instead of 4" in reduced.why


def test_rows_are_planned_no_longer_than_the_base_reads():
    headers = dense_headers("small")
    headers.config["max_position_embeddings"] = 512
    assert recommend(headers, int(64e9))[0].train.max_seq_length == 512


def test_full_fine_tuning_is_planned_beside_settings_of_adapters():
    train = TrainConfig(loraplus_lr_ratio=4.0)
    *ways, full = recommend(dense_headers("small"), int(16e9), train=train)
    assert all(way.train.loraplus_lr_ratio == 4 for way in ways)
    assert full.method == "full" and full.train.loraplus_lr_ratio == TrainConfig.loraplus_lr_ratio


def test_full_fine_tuning_is_planned_with_16_bytes_a_weight():
    train = TrainConfig(method="full")
    with runtime.assumed_device("gpu"):
        (full,) = recommend(dense_headers("qwen3-4b"), int(16e9), train=train)
    weights, parts = full.plan.base_weights, full.plan.parts()
    assert (parts["optimizer"], parts["adapters"]) == (8 * weights, 4 * weights)
    assert parts["base"] == pytest.approx(2 * weights, rel=0.01)  # as stored, in bfloat16
    moments = full.plan.moments.values()
    assert max(of["gradients"] for of in moments) == 4 * weights
    assert full.train.batch_size == 1 and "16 bytes" in full.why
    # inputs of 36 blocks of one row, in float32
    activations = max(of["activations"] for of in moments)
    assert activations > 36 * (full.train.max_seq_length - 1) * 2560 * 4
    assert full.plan.peak_bytes > 18 * weights and "--method full" in full.command("m")


def test_a_reward_model_has_no_plan_of_full_fine_tuning():
    options = recommend(dense_headers("small"), int(4e9), train=TrainConfig(task="reward"))
    assert options and all(option.method != "full" for option in options)


def test_what_is_specified_is_not_searched():
    train = TrainConfig(batch_size=3, max_seq_length=300)
    specified = frozenset({"batch_size", "max_seq_length"})
    for option in recommend(read_headers("tiny"), int(4e9), train=train, specified=specified):
        assert (option.train.batch_size, option.train.max_seq_length) == (3, 300)


def peak_of(command: str, headers: Headers) -> float:
    """The estimate for a `packs train` as its own command line reads it."""
    words = shlex.split(command)
    assert words[:2] == ["packs", "train"]
    arguments = dict(train_command.make_context("train", words[2:]).params)
    settings = read_recipes(arguments.pop("configs"))
    names = {f.name for c in (LoRAConfig, TrainConfig) for f in dataclasses.fields(c)} | {"model"}
    flags = {k: v for k, v in arguments.items() if v is not None and k in names}
    recipe = recipe_of(flags, settings)
    assert recipe.run["model"] == headers.name
    return estimate(headers, recipe.lora, recipe.train).peak_gb


@pytest.mark.parametrize(
    ("device", "flags"),
    [
        ("cpu", "--memory 0.3"),
        ("gpu", "--memory 16 --optimizer adamw_8bit --num-layers 2"),
        ("cpu", "--memory 16 --grad-accumulation-steps 4 --target-modules q_proj,v_proj -c FILE"),
        ("gpu", "--memory 16 -c FILE --no-grad-checkpoint"),
        ("cpu", "--memory 8 --model DENSE --quantize nf4 --keep embed_tokens --no-double-quant"),
        ("cpu", "--memory 8 --model DENSE --compute-dtype float32 -c FILE"),
        ("gpu", "--memory 4 --model DENSE --rank-pattern q_proj=64,v_proj=2"),
    ],
)
def test_the_printed_command_has_the_peak_that_is_shown(flags, device, run, tmp_path):
    folder = write_headers(tmp_path / "a dense base", dense_headers("small"))
    (tmp_path / "c.yaml").write_text(json.dumps(RECIPE))
    names = {"FILE": str(tmp_path / "c.yaml"), "DENSE": str(folder)}
    arguments = [names.get(word, word) for word in flags.split()]
    with runtime.assumed_device(device):
        code, out, err = run("plan", "--json", *arguments)
        assert code == 0, err
        headers = read_headers(folder if "DENSE" in flags else "tiny")
        *ways, _ = json.loads(out)["options"]
        for option in ways:
            assert peak_of(option["command"], headers) == option["peak_gb"], option["command"]
        _, out, _ = run("plan", *arguments)
    assert out.splitlines()[-1] == f"try:    {ways[0]['command']}"


def test_flags_and_files_are_what_is_planned(run, tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps(RECIPE))
    code, out, _ = run("plan", "--memory", "64", "--json", "-c", tmp_path / "c.yaml")
    best = json.loads(out)["options"][0]
    assert code == 0
    assert (best["rank"], best["batch_size"], best["recompute"]) == (32, 2, "block")
    plain, accumulated = (
        json.loads(run("plan", "--json", "--memory", "64", *more)[1])["options"][0]
        for more in ((), ("--grad-accumulation-steps", "4"))
    )
    more = accumulated["parts"]["gradients"] - plain["parts"]["gradients"]
    assert more == 4 * plain["adapter_weights"]


@pytest.mark.parametrize(
    ("columns", "memory", "shown"), [(60, "0.05", "50.0 MB"), (100, "8", "8.00 GB")]
)
def test_the_table_fits_the_terminal(columns, memory, shown, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("plan", "--memory", memory)[1].splitlines()
    assert max(len(line) for line in lines[:-1]) <= columns  # the command is one line, to be copied
    assert shown in next(line for line in lines if line.startswith("fits "))


def test_the_command_has_epochs_in_the_place_of_iters(run):
    last = run("plan", "--epochs", "2", "--time", "5m", "--memory", "8")[1].splitlines()[-1]
    assert "--epochs 2" in last and "--time 5m" in last and "--iters" not in last


def test_the_plan_has_this_machine_unless_it_is_for_another(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pressure, "free_memory", lambda: 5 * 10**9)
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 7 * 10**9)
    machine = json.loads(run("plan", "--json")[1])["machine"]
    expected = {"free_memory_gb": 5.0, "free_disk_gb": 7.0, "out": "packs"}
    assert machine.items() >= expected.items()
    assert machine["chip"] == runtime.device_name()
    assert machine["memory_gb"] == runtime.total_memory() / 1e9
    (tmp_path / "c.yaml").write_text("out: there/x\n")
    assert json.loads(run("plan", "--json", "-c", "c.yaml")[1])["machine"]["out"] == "there/x"

    line = run("plan")[1].splitlines()[1]
    assert line.startswith("machine ") and "5.00 GB" in line and "7.00 GB" in line
    assert "machine " not in run("plan", "--memory", "8")[1]
    monkeypatch.setattr(pressure, "free_memory", lambda: None)
    assert json.loads(run("plan", "--json")[1])["machine"]["free_memory_gb"] is None


def test_several_models_are_planned_in_one_call(run, tmp_path):
    write_headers(tmp_path / "small", dense_headers("small"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    names = [str(tmp_path / "small"), str(tmp_path / "bad"), "tiny"]
    arguments = [word for name in names for word in ("--model", name)]
    code, out, err = run("plan", "--memory", "16", *arguments, "--json")
    small, bad, tiny = json.loads(out)["models"]
    assert code == 0, err
    assert [entry["model"] for entry in (small, bad, tiny)] == names
    assert tiny["fits"] and not bad["fits"] and not bad["options"]
    assert bad["error"]["code"] == "unreadable" and "config.json" in bad["error"]["message"]
    alone = json.loads(run("plan", "--memory", "16", "--model", names[0], "--json")[1])
    del alone["machine"]
    assert small == alone

    code, out, _ = run("plan", "--memory", "16", *arguments)
    head, *rows, _, _, fault = out.splitlines()[2:]
    assert code == 0 and len(rows) == 2 and rows[1].startswith("tiny ") and head.endswith("fits")
    assert out.count("run     not known: ") == 2 and fault.startswith("no plan ")


@pytest.mark.slow
def test_several_models_that_do_not_fit_or_are_wrong(run, rejected, tmp_path):
    write_headers(tmp_path / "small", dense_headers("small"))
    two = ("--model", "tiny", "--model", tmp_path / "small")
    code, out, err = run("plan", "--memory", "0.001", *two)
    assert code == 1 and out.count(" no\n") == 2 and "none of the 2 models" in err
    gone = rejected("plan", "--data", tmp_path / "none", "--hf-dataset", "a/b", *two)
    assert gone.flag in ("data", "hf_dataset")
    check(rejected("plan", "--machines", 2, *two), "conflict", "machines")


def test_seeds_are_in_the_command(run):
    assert run("plan", "--seeds", "3")[1].splitlines()[-1].endswith("--seeds 3 --out DIR")


@pytest.mark.slow
def test_the_base_is_on_disk_where_nothing_else_fits():
    kinds = {option.kind: option.fit for option in recommend(dense_headers("qwen3-4b"), int(4e9))}
    assert kinds["lora-fp32 on disk"] == "fits" and kinds["lora-fp32"] == "no"
    train = TrainConfig(offload_base="on")
    first, full = recommend(dense_headers("qwen3-4b"), int(4e9), train=train)
    assert (first.quantize, full.method) == ("none", "full") and first.plan.offload is not None


def test_where_nothing_fits_it_says_what_is_left_to_do(run):
    last = run("plan", "--memory", "0.02")[1].splitlines()[-1]
    assert last == "try:    a smaller base or more memory"
    specified = ["--batch-size", "4", "--no-grad-checkpoint", "--rank", "16"]
    last = run("plan", "--memory", "0.02", *specified)[1].splitlines()[-1]
    assert "--batch-size" in last and "--recompute" not in last and "--quantize" not in last


def test_plan_says_that_a_base_brings_code(run, tmp_path):
    write_headers(tmp_path / "plain", dense_headers("small"))
    headers = dense_headers("small")
    own = dataclasses.replace(headers, config=headers.config | {"model_file": "own\x1b.py"})
    write_headers(tmp_path / "own", own)
    outputs = {name: run("plan", "--model", tmp_path / name)[1] for name in ("plain", "own")}
    assert "code    " not in outputs["plain"]
    line = outputs["own"].splitlines()[1]
    assert line.startswith("code    ") and "own?.py" in line and "--trust-remote-code" in line
    plans = {n: json.loads(run("plan", "--model", tmp_path / n, "--json")[1]) for n in outputs}
    reports = {name: plan["options"] for name, plan in plans.items()}
    assert {o["code"] for o in reports["plain"]} == {None}
    assert {o["code"] for o in reports["own"]} == {"own\x1b.py"}


def test_plan_knows_an_nf4_base_as_it_is_stored(run, tmp_path):
    dense = write_headers(tmp_path / "dense", dense_headers("small", 1024))
    out = tmp_path / "nf4"
    assert run("quantize", "--model", dense, "--out", out)[0] == 0
    arguments = ["plan", "--model", out, "--memory", "64"]
    code, report, _ = run(*arguments, "--json")
    assert code == 0
    for option in json.loads(report)["options"][:-1]:
        assert peak_of(option["command"], read_headers(out)) == option["peak_gb"]
    assert run(*arguments, "--quantize", "nf4")[0] == 2
    check(run.error, "conflict", "quantize", "quantized already")


@pytest.mark.parametrize(
    ("wrong", "code", "flag"),
    [
        ("--memory nan", "invalid", "memory"),
        ("--num-layers 99", "mismatch", "num_layers"),
        ("--target-modules q_prj", "unknown", "target_modules"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(wrong, code, flag, rejected):
    check(rejected("plan", *wrong.split()), code, flag)


def test_a_plan_for_another_device_is_that_of_the_device(tmp_path, run):
    base = write_headers(tmp_path / "base", dense_headers("small"))
    plan = ["plan", "--model", base, "--memory", 16, "--batch-size", 1, "--max-seq-length", 512]
    plan += ["--recompute", "none", "--rank", 8, "--json"]

    def options(*more) -> list[dict]:
        return json.loads(run(*plan, *more)[1])["options"]

    reports = {device: options("--device", device) for device in ("cpu", "gpu")}
    assert reports["cpu"] == options() != reports["gpu"]
    assert runtime.on_cpu()
    with runtime.assumed_device("gpu"):
        assert options() == reports["gpu"]
    assert run("plan", "--model", base, "--device", "gpu")[0] == 2
    check(run.error, "conflict", "device", "--memory")


@pytest.mark.slow
def test_the_table_of_bases_in_the_docs_is_what_is_planned():
    docs = (Path(__file__).parents[2] / "docs" / "systems.md").read_text(encoding="utf-8")
    with runtime.assumed_device("gpu"):
        for name in CONFIGS:
            for line in rows(headers_of(name), [8, 16, 24, 64]):
                assert line in docs, name


def test_the_smallest_change_of_what_was_specified_is_named(run):
    command = ["plan", "--budget", "1GB", "--device", "cpu", "--batch-size", 40_000, "--rank", 4]
    code, out, _ = run(*command)
    (line,) = [line for line in out.splitlines() if line.startswith("fits    with --batch-size ")]
    assert code == 1 and "--rank" not in line

    code, out, _ = run(*command, "--json")
    report = json.loads(out)
    least = report["smallest_change"]
    assert (code, report["fits"], list(least["changes"])) == (1, False, ["batch_size"])
    assert f"--batch-size {least['batch_size']}: " in line
    assert [option["fit"] for option in report["options"]].count("no") == len(report["options"])

    options = shlex.split(least["command"])[2:]
    assert json.loads(run("plan", "--budget", "1GB", "--device", "cpu", *options, "--json")[1])[
        "fits"
    ]


def test_what_fits_needs_no_change(run):
    least = json.loads(run("plan", "--budget", "8GB", "--device", "cpu", "--json")[1])[
        "smallest_change"
    ]
    assert least["changes"] == {} and least["fit"] == "fits"
