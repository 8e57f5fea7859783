"""Several packs in one batch: each is what it is alone, resumes to the bit, and opens as any pack."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_packs import LoRAConfig, Pack, train_pack, train_seeds
from mlx_packs.adapters.attach import adapted_paths
from mlx_packs.cli.main import main
from mlx_packs.config.data import DataConfig
from mlx_packs.config.recipe import Recipe
from mlx_packs.config.schema import TrainConfig
from mlx_packs.config.together import OWN, check_together
from mlx_packs.display import QUIET, Display
from mlx_packs.errors import RunStopped
from mlx_packs.nn.joint_lora import copied, joint_model
from mlx_packs.packs.base import Base, load_base
from mlx_packs.runtime import mx
from mlx_packs.training.joint_step import JointStepper, check_same_modules
from mlx_packs.training.run import train_request
from mlx_packs.training.run_folder import checkpoints, common_batch
from mlx_packs.training.seeds import statistics, train_with_seeds
from mlx_packs.training.settings import Request
from mlx_packs.training.together import train_together
from mlx_packs.training.update_guard import UpdateGuard
from tests.bases.test_geometry import FAULTY, pruned_base
from tests.helpers.errors import raises
from tests.helpers.families import build, config_of
from tests.helpers.observers import observe
from tests.helpers.preferences import preference, rated
from tests.helpers.rows import chat, write_rows
from tests.helpers.runs import Lines
from tests.helpers.variants import nightly_except

WORDS = "one two six ten red sun".split()
CHATS = [chat(f"Say {w}{' again' * n}.", f"Yes, I say {w} to you.") for n, w in enumerate(WORDS)]
TRAIN = TrainConfig(
    iters=3,
    batch_size=2,
    max_seq_length=64,
    save_every=1,
    steps_per_report=1,
    steps_per_eval=1,
    optimizer="sgd",
    learning_rate=0.1,
    cache_frozen="off",
    share_prefix="off",
)


@pytest.fixture
def rows(here) -> Path:
    """A folder with chats, preferences and rated completions, which is the current one."""
    write_rows(here / "chats", train=CHATS, valid=CHATS[:1])
    pairs = [preference(i) for i in range(6)]
    write_rows(here / "pairs", train=pairs, valid=pairs[:1])
    completions = [rated(i) for i in range(6)]
    write_rows(here / "rated", train=completions, valid=completions[:1])
    return here


@pytest.fixture
def request_of(small):
    """Return a request for a pack ``out`` of `small`, with settings besides `TRAIN`."""

    def request(out, data="chats", lora=None, display=None, **settings) -> Request:
        options = {"model": "small", "out": str(out)}
        options |= {key: settings.pop(key) for key in ("seeds", "resume") if key in settings}
        recipe = Recipe(
            lora or LoRAConfig(rank=2),
            replace(TRAIN, **settings),
            DataConfig(data=data),
            run=options,
            names_data=True,
        )
        return Request(recipe, small, display or Display(QUIET))

    return request


def adapters(run: str, batch: int = 3) -> dict[str, mx.array]:
    return mx.load(f"{run}-run/step-{batch:06d}/adapters.safetensors")


def difference(run: str, other: str, batch: int = 3) -> float:
    """How far the adapters of two runs are apart, as a share of the length of all numbers."""
    ours = adapters(run, batch)
    theirs = adapters(other, batch)
    assert set(ours) == set(theirs)
    apart = sum((ours[name] - theirs[name]).square().sum().item() for name in ours)
    return (apart / sum(value.square().sum().item() for value in theirs.values())) ** 0.5


def train_both(request_of, **settings) -> list[float]:
    """Train three packs of other seeds, ranks and rates together and alone; return differences."""

    def requests(where: str) -> list[Request]:
        return [
            request_of(
                f"{where}-{i}",
                lora=LoRAConfig(rank=2 + i, alpha=4.0 + i),
                **{"seed": i, "learning_rate": 0.1 / (1 + i), **settings},
            )
            for i in range(3)
        ]

    batch = settings.get("iters", TRAIN.iters)
    train_together(requests("together"))
    for request in requests("alone"):
        train_request(request)
    return [difference(f"together-{i}", f"alone-{i}", batch) for i in range(3)]


def test_packs_of_chats_are_what_they_are_alone(rows, request_of):
    assert max(train_both(request_of)) < 1e-6
    for i in range(3):
        lines = Path(f"together-{i}-run/metrics.jsonl").read_text().splitlines()
        alone = Path(f"alone-{i}-run/metrics.jsonl").read_text().splitlines()
        for ours, theirs in zip(map(json.loads, lines), map(json.loads, alone), strict=True):
            assert set(ours) == set(theirs)
            for name in {"loss", "valid_loss", "grad_norm", "learning_rate"} & set(ours):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


LM = [
    {"iters": 2, "label_smoothing": 0.1, "warmup_steps": 2},
    {"optimizer": "lion", "weight_decay": 0.1, "betas": (0.8, 0.9), "lora": {"rslora": True}},
    {"z_loss": 0.1, "max_grad_norm": 0.1, "lora": {"rank_pattern": {"v_proj": 4}, "rank": 1}},
]
DPO = [
    {"beta": 0.3, "loraplus_lr_ratio": 4.0, "lr_schedule": "constant"},
    {"label_smoothing": 0.1, "warmup_ratio": 0.5},
    {"lora": {"alpha_pattern": {"q_proj": 1.0}}, "warmup_from_zero": True, "warmup_steps": 1},
]
KTO = [{"desirable_weight": 0.5}, {"undesirable_weight": 2.0}, {"beta": 0.5}]
SIMPO = [{"simpo_gamma": 0.1}, {"beta": 3.0}]
CPO = [{"cpo_alpha": 0.1}, {"label_smoothing": 0.2}]


@pytest.mark.parametrize(
    ("task", "data", "settings"),
    [
        ("lm", "chats", LM),
        ("dpo", "pairs", DPO),
        ("kto", "rated", KTO),
        ("simpo", "pairs", SIMPO),
        ("cpo", "pairs", CPO),
    ],
)
def test_packs_have_settings_of_their_own(rows, request_of, task, data, settings):
    def requests(where: str) -> list[Request]:
        own = [(each.pop("lora", {}), each) for each in map(dict, settings)]
        return [
            request_of(f"{where}-{i}", data, LoRAConfig(**{"rank": 2, **lora}), task=task, **train)
            for i, (lora, train) in enumerate(own)
        ]

    assert {name for each in settings for name in each} - {"lora"} <= OWN
    train_together(requests("together"))
    for i, request in enumerate(requests("alone")):
        train_request(request)
        batches = request.recipe.train.iters
        assert difference(f"together-{i}", f"alone-{i}", batches) < 1e-6


def test_packs_of_packed_pairs_are_what_they_are_alone(rows, request_of):
    settings = {"data": "pairs", "task": "dpo", "packing": True, "recompute": "block"}
    assert max(train_both(request_of, **settings, grad_accumulation_steps=2)) < 1e-6


@pytest.mark.parametrize("packing", [False, True])  # 6 runs of 20 batches each: 4 s
@pytest.mark.parametrize("task", nightly_except(["lm", "dpo", "orpo", "kto"], "lm", "dpo"))
def test_twenty_steps_are_what_they_are_alone(rows, request_of, task, packing):
    data = {"lm": "chats", "kto": "rated"}
    settings = {
        "data": data.get(task, "pairs"),
        "task": task,
        "packing": packing,
        "iters": 20,
        "save_every": 20,
    }
    assert max(train_both(request_of, **settings)) < 1e-6


@pytest.mark.slow  # 24 runs of 20 batches: 20 s
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("task", ["lm", "dpo"])
def test_twenty_steps_of_adamw_are_what_they_are_alone(rows, request_of, task, packing):
    settings = {"data": "chats" if task == "lm" else "pairs", "task": task, "packing": packing}
    settings |= {"iters": 20, "save_every": 20, "optimizer": "adamw", "learning_rate": 3e-4}
    assert max(train_both(request_of, **settings)) < 1e-6


def test_a_step_of_adamw_from_the_same_state_differs_where_gradients_are_nearly_zero(
    rows, request_of
):
    """Adam divides by the root of the second moment, which makes rounding there large.

    The rate is ten times a usual one. In the second step, the first in which A has a gradient, the
    whole difference is in a few parameters.
    """
    rate = 1e-2
    settings = {"data": "pairs", "task": "dpo", "optimizer": "adamw", "lr_schedule": "constant"}

    def requests(where: str, batches: int) -> list[Request]:
        own = {"iters": batches, "resume": batches > 1, "learning_rate": rate, **settings}
        return [request_of(f"{where}-{i}", seed=i, **own) for i in range(3)]

    for batches in (1, 2, 3):
        if batches > 1:  # both from the state of the pack alone
            for i in range(3):
                shutil.rmtree(f"together-{i}-run")
                shutil.copytree(f"alone-{i}-run", f"together-{i}-run")
        train_together(requests("together", batches))
        for request in requests("alone", batches):
            train_request(request)

        for i in range(3):
            ours, theirs = (moments(f"{name}-{i}", batches) for name in ("together", "alone"))
            for ours_of, theirs_of in zip(ours, theirs, strict=True):
                difference = mx.linalg.norm(ours_of - theirs_of) / mx.linalg.norm(theirs_of)
                assert difference.item() < 2e-6

            apart = rate * (update_of(ours) - update_of(theirs))
            clear = mx.sqrt(theirs[1]) > 1e-4 * mx.sqrt(theirs[1].max())
            length = sum(a.square().sum().item() for a in adapters(f"alone-{i}", batches).values())
            assert mx.linalg.norm(apart * clear).item() < 1e-6 * length**0.5
            if batches > 1:
                assert clear.mean().item() > 0.99


def moments(run: str, batch: int) -> tuple[mx.array, mx.array]:
    """All first moments of a checkpoint, and all second ones."""
    state = mx.load(f"{run}-run/step-{batch:06d}/optimizer.safetensors")
    names = sorted(name for name in state if name.endswith(".v"))
    first = mx.concatenate([state[f"{name[:-1]}m"].reshape(-1) for name in names])
    return first, mx.concatenate([state[name].reshape(-1) for name in names])


def update_of(of_run: tuple[mx.array, mx.array]) -> mx.array:
    return of_run[0] / (mx.sqrt(of_run[1]) + 1e-8)


@pytest.mark.slow  # 6 runs of 20 batches, on a quantized base
def test_a_dense_copy_of_the_base_is_shared(rows, request_of):
    """Adam divides gradients near zero by their size, so that rounding shows more than by SGD."""
    settings = {"iters": 20, "save_every": 20, "matmul_path": "dense", "optimizer": "adamw"}
    assert max(train_both(request_of, **settings, learning_rate=1e-3)) < 1e-4


def test_seeds_have_a_pack_each_and_their_mean(rows, request_of):
    display = Lines()
    result = train_with_seeds(request_of("out", seeds=2, seed=3, display=display))
    assert [line for line in display.lines if line.startswith("seeds 2 packs in one batch")]

    stored = json.loads(Path("out/seeds.json").read_text())
    assert stored == json.loads(json.dumps(result.to_json()))
    assert stored["seeds"] == [3, 4]
    losses = [Pack.open(f"out/seed-{seed}").manifest["eval"]["ppl_after"] for seed in (3, 4)]
    assert stored["mean"]["ppl_after"] == pytest.approx(sum(losses) / 2)
    error = abs(losses[0] - losses[1]) / 2
    assert stored["standard_error"]["ppl_after"] == pytest.approx(error)
    recipe = Pack.open("out/seed-4").manifest["recipe"]
    assert recipe["seed"] == 4 and "seeds" not in recipe


def test_python_trains_seeds_on_a_loaded_base_and_examples_in_memory(here, small):
    data = {"train": iter(CHATS), "valid": CHATS[:1]}
    lora = LoRAConfig(rank=2)
    runs = train_seeds(small, data, lora, TRAIN, "out", seeds=2, progress=False)

    assert list(runs.runs) == [0, 1]
    assert [pack.path for pack in runs.packs] == [Path("out/seed-0"), Path("out/seed-1")]
    assert runs.mean["ppl_after"] == pytest.approx(
        sum(run.report["ppl_after"] for run in runs.runs.values()) / 2
    )
    assert runs.standard_error["ppl_after"] > 0
    assert repr(runs).startswith("SeedRuns(2 seeds, ppl ") and "±" in repr(runs)
    assert str(runs).startswith("mean    ppl ")
    assert runs.to_json() == json.loads(Path("out/seeds.json").read_text())

    data = {"train": CHATS, "valid": CHATS[:1]}
    alone = train_pack(small, data, lora, replace(TRAIN, seed=1), "alone", progress=False)
    assert difference("out/seed-1", "alone") < 1e-6
    assert runs.runs[1].report["ppl_after"] == pytest.approx(alone.report["ppl_after"], rel=1e-5)


def test_python_says_what_seeds_need(here, small):
    for seeds in (1, 65):
        with raises("invalid", "seeds", "[2, 64]", str(seeds)):
            train_seeds(small, CHATS, out="out", seeds=seeds)
    assert not Path("out").exists()
    with raises("conflict", "out"):
        train_seeds(small, CHATS)
    with raises("unknown", "seed", "train=mp.TrainConfig(seed=...)"):
        train_seeds(small, CHATS, out="out", seed=1)


def test_mean_and_standard_error_are_of_numbers_that_all_have():
    reports = [
        {"loss": 1.0, "held_out": {"rows": 3}, "own": 1, "name": "a", "gates": True},
        {"loss": 2.0, "held_out": {"rows": 3}, "name": "b", "gates": True},
        {"loss": 6.0, "held_out": {"rows": 3}, "name": "c", "gates": True},
    ]
    found = statistics(reports)
    assert found["mean"] == {"loss": 3.0, "held_out.rows": 3.0}
    assert found["standard_error"] == pytest.approx(
        {"loss": (14 / 2 / 3) ** 0.5, "held_out.rows": 0}
    )


def test_the_time_of_a_pack_has_no_validation_of_another(rows, request_of, monkeypatch):
    validate = UpdateGuard.validate

    def slowly(*args):
        time.sleep(0.15)
        return validate(*args)

    monkeypatch.setattr(UpdateGuard, "validate", slowly)
    runs = train_together([request_of(f"out-{i}", seed=i) for i in range(3)])
    spent = [run.report["train_s"] for run in runs]
    assert max(spent) - min(spent) < 0.15

    for run in runs:
        rates = [line["tokens_per_s"] for line in run.curve if "loss" in line]
        tokens = run.report["trained_tokens"] / len(rates)
        assert tokens / max(rates) < 0.15  # a step after the first, which compiles


@pytest.mark.parametrize(("task", "data"), [("lm", "lengths"), ("dpo", "pairs")])
def test_steps_of_packs_have_few_shapes(rows, request_of, monkeypatch, task, data):
    """Each set of shapes is compiled: those of three packs are not all combinations of theirs."""
    chats = [chat("Say" + f" {word}" * 4 * n, f"I say {word}" * n) for n, word in enumerate(WORDS)]
    write_rows(rows / "lengths", train=chats, valid=CHATS[:1])
    steps = []
    whole = JointStepper.whole

    def observed(self, steppers, shared, own):
        shapes = [tuple(v.shape for v in arrays.values()) for arrays in [shared, *own]]
        assert len(set(shapes[1:])) == 1
        steps.append(tuple(shapes))
        return whole(self, steppers, shared, own)

    monkeypatch.setattr(JointStepper, "whole", observed)
    settings = {"task": task, "iters": 12, "batch_size": 1, "steps_per_eval": 12, "save_every": 12}
    train_together([request_of(f"out-{i}", data, seed=i, **settings) for i in range(3)])
    assert len(steps) == 12
    assert len(set(steps)) <= 6


def test_a_signal_saves_every_pack_and_resuming_changes_no_bit(rows, request_of, monkeypatch):
    whole = request_of("whole", seeds=2)
    train_with_seeds(whole)

    sent = []

    def interrupt(line):
        if line["batch"] == 2 and not sent:
            sent.append(line)
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        observe(patch, on_step=interrupt)
        with pytest.raises(RunStopped) as stopped:
            train_with_seeds(request_of("out", seeds=2))
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert common_batch([Path(f"out/seed-{seed}-run") for seed in (0, 1)]) == 2

    # as if it had been killed while it saved: one run is a checkpoint ahead
    newest = Path("out/seed-0-run/step-000002")
    newest.rename("elsewhere")
    assert common_batch([Path(f"out/seed-{seed}-run") for seed in (0, 1)]) == 1

    train_with_seeds(request_of("out", seeds=2, resume=True))
    for seed in (0, 1):
        ours = Path(f"out/seed-{seed}-run/step-000003/adapters.safetensors").read_bytes()
        theirs = Path(f"whole/seed-{seed}-run/step-000003/adapters.safetensors").read_bytes()
        assert ours == theirs

    again = train_with_seeds(request_of("out", seeds=2, resume=True))  # which takes no step
    assert [run.report["batches"] for run in again.runs.values()] == [3, 3]


def test_a_pack_that_fails_leaves_the_others_to_their_end(rows, request_of):
    fails = request_of("fails", learning_rate=1e30)
    with raises("diverged", None, "fails: "):
        train_together([fails, request_of("trains", seed=1)])
    assert Pack.open("trains").manifest["eval"]
    assert not Path("fails").exists()


def test_a_signal_saves_the_others_after_the_first_has_failed(rows, request_of, monkeypatch):
    fails = request_of("fails", learning_rate=1e30, iters=9, save_every=9)
    trains = request_of("trains", seed=1, iters=9, save_every=9)

    def interrupt(line):
        if line["batch"] == 5:  # the first has failed
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        observe(patch, on_step=interrupt)
        with pytest.raises(RunStopped) as stopped:
            train_together([fails, trains])
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert [folder.name for folder in checkpoints(Path("trains-run"))] == ["step-000005"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("method", "dora"),
        ("dropout", 0.1),
        ("modules_to_save", ("norm",)),
        ("task", "reward"),
        ("micro_batches", 2),
        ("share_prefix", "on"),
        ("patience", 2),
        ("time", "1h"),
        ("on_nan", "back-off"),
        ("report_to", "wandb"),
    ],
)
def test_settings_of_one_pack_alone_are_refused(setting, value):
    lora = LoRAConfig()
    train = TrainConfig()
    run = {}
    if hasattr(lora, setting):
        lora = replace(lora, **{setting: value})
    elif hasattr(train, setting):
        train = replace(train, **{setting: value})
    else:
        run[setting] = value
    with raises("conflict", setting):
        check_together(Recipe(lora, train, run=run))


def test_adapters_of_embeddings_are_refused_before_anything_is_written(rows, request_of):
    lora = LoRAConfig(target_modules=("embed_tokens",))
    with raises("unsupported", "seeds", "embed_tokens"):
        train_with_seeds(request_of("out", seeds=2, lora=lora))
    assert not Path("out").exists()


def test_packs_of_which_one_lacks_a_narrow_layer_are_refused(rows, request_of, monkeypatch):
    """The gate of a mixture has one output: it has an adapter of rank 1, and none of rank 8."""
    tokenizer = load_base("tiny").tokenizer
    model, config = build("qwen2_moe", {**config_of("qwen2_moe"), "vocab_size": 4096})
    base = Base("mixture", Path("nowhere"), model, tokenizer, config, "0" * 64)
    requests = [
        replace(request_of(f"rank-{rank}", lora=LoRAConfig(rank=rank)), base=base)
        for rank in (8, 1)
    ]
    attached = []
    monkeypatch.setattr("mlx_packs.training.run.attach_method", attached.append)
    with raises("unsupported", "seeds", "shared_expert_gate", "narrower"):
        train_together(requests)
    assert not attached
    assert not Path("rank-1").exists()


def test_layers_that_cannot_be_probed_are_compared_if_they_are_adapted():
    base = pruned_base()
    loras = [LoRAConfig(rank=2), LoRAConfig(rank=4)]
    check_same_modules(base, loras, fp16_fallback=True)
    assert set(FAULTY) <= adapted_paths(base, loras[0], fp16_fallback=True)
    with raises("unreadable", None, "--train-fp16-fallback"):
        check_same_modules(base, loras, fp16_fallback=False)


def test_a_folder_is_needed_that_is_no_pack(rows, request_of):
    request = request_of("out", seeds=2)
    nameless = replace(request.recipe, run={"seeds": 2, "model": "small"})
    with raises("conflict", "out"):
        train_with_seeds(replace(request, recipe=nameless))

    train_request(request_of("pack"))
    with raises("exists", "out", "pack"):
        train_with_seeds(request_of("pack", seeds=2))


def test_copies_of_a_model_have_its_weights(small):
    other = copied(small.model)
    assert other is not small.model and other.layers[0] is not small.model.layers[0]
    assert other.layers[0].self_attn.q_proj is small.model.layers[0].self_attn.q_proj

    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(other(tokens), small.model(tokens))
    joint, copies = joint_model(small.model)
    assert copies[id(small.model)] is joint


def test_the_command_prints_the_mean(rows, small_folder, capsys):
    arguments = f"train --model {small_folder} --data chats --seeds 2 --out out --iters 2 --rank 2"
    arguments += " --batch-size 2 --max-seq-length 64 --matmul-path dense"
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mean ") and "±" in lines[0] and "2 seeds" in lines[0]
    assert [line.split()[0] for line in lines[1:5]] == ["loss", "speed", "seed-0", "seed-1"]

    with pytest.raises(SystemExit) as ended:
        main([*arguments.replace("--seeds 2", "--seeds 300").split(), "--overwrite"])
    assert ended.value.code == 2
    assert "--seeds: must be in [2, 64], but is 300" in capsys.readouterr().err

    longer = f"train --seeds 2 --out out --resume --iters 3 --model {small_folder}"
    with pytest.raises(SystemExit) as ended:
        main(longer.split())
    assert not ended.value.code
    assert Path("out/seed-1-run/step-000003").is_dir()
