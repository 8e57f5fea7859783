"""Every flag and key of the installed mlx-lm is understood here, and stands in the docs."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from mlx_lm import lora as theirs
from mlx_lm.tuner import callbacks
from mlx_lm.tuner import datasets as their_data
from mlx_lm.tuner import utils as their_tuner
from mlx_lm.utils import _parse_size

from mlx_packs.adapters.attach import attach
from mlx_packs.bases.geometry import select_targets
from mlx_packs.cli.train import train as command
from mlx_packs.config.external import translate
from mlx_packs.config.fields import read_settings
from mlx_packs.config.recipe import resolve, tiny_recipe
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.display import NORMAL, Display
from mlx_packs.errors import PackError
from mlx_packs.optim import make_optimizer, schedule
from mlx_packs.runtime import mx
from mlx_packs.training.attached import _describe
from mlx_packs.vision import tokenizer
from tests.helpers.errors import raises
from tests.helpers.models import base_of, model_of

ACTIONS = {a.dest: a for a in theirs.build_parser()._actions if a.dest != "help"}
OPTIONS = {name: p for p in command.params for name in p.opts}
TABLE = Path(__file__).parents[2] / "examples" / "coming_from_mlx_lm.md"
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in TABLE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
    for cells in [[c.strip() for c in line.strip("| ").split(" | ")]]
}
NOT_FIELDS = {
    "model": "tiny",
    "data": "tiny",
    "train": True,
    "fine_tune_type": "lora",
    "trust_remote_code": False,
}


class Recorded(dict):
    """A mapping that records which of its keys are read, by name or as an attribute."""

    def __init__(self, **values):
        super().__init__(values)
        self.reads = set()

    def __getitem__(self, key):
        self.reads.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.reads.add(key)
        return super().get(key, default)

    def __getattr__(self, key):
        self.reads.add(key)
        raise AttributeError(key)


def recipe_of(*args: str, under=()):
    """The recipe that `packs train ARGS` resolves to."""
    params = command.make_context("train", list(args)).params
    other = {"configs", "force", "show_mask", "rows", "as_json", "verbose", "quiet", "opens"}
    flags = {k: v for k, v in params.items() if v is not None and k not in other}
    return resolve(flags, under=under)


@pytest.mark.parametrize("dest", ACTIONS)
def test_command_has_every_flag_of_mlx_lm(dest):
    for flag in ACTIONS[dest].option_strings:
        assert flag in OPTIONS, f"mlx-lm has {flag}: add it to packs train and to {TABLE.name}"
        assert OPTIONS[flag].is_flag == (ACTIONS[dest].nargs == 0)


SAMPLES = {  # where mlx-lm's default is None, which says nothing, or asks for no training
    "config": {"config": "c.yaml"},
    "lr_schedule": {"lr_schedule": {"name": "cosine_decay", "arguments": [1e-5, 10]}},
    "project_name": {"project_name": "p"},
    "report_to": {"report_to": "wandb"},
    "resume_adapter_file": {"resume_adapter_file": "a.safetensors"},
    "test": {"test": True, "train": True},
    "train": {"train": True},
}


@pytest.mark.parametrize("key", sorted(set(theirs.CONFIG_DEFAULTS) | set(ACTIONS)))
def test_resolve_understands_every_key_of_mlx_lm(key):
    values = SAMPLES.get(key) or {key: theirs.CONFIG_DEFAULTS[key]}
    assert values[key] is not None
    for where in ("theirs.yaml", ""):
        resolve(values, where)
        with raises("unknown", f"{key}_"):
            resolve({f"{key}_": values[key]}, where)


NEW_IN_0_32 = {"--trust-remote-code"}


def test_table_has_a_row_for_every_flag_of_mlx_lm():
    flags = {max(a.option_strings, key=len) for a in ACTIONS.values()}
    rows = {row for row in ROWS if row.startswith("--")}
    assert flags <= rows
    assert rows - flags <= NEW_IN_0_32  # Python 3.10 gets mlx-lm 0.31
    named = {f for row in ROWS.values() for f in re.findall(r"--[a-z-]+", row[1])}
    assert named and named <= set(OPTIONS)


def test_table_has_a_row_for_every_key_without_a_flag(monkeypatch):
    library = SimpleNamespace(load_dataset=lambda *_, **__: [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "datasets", library)
    scheduled = Recorded(name="cosine_decay", arguments=[1e-5, 10], warmup=2, warmup_init=0.0)
    their_tuner.build_schedule(scheduled)
    adapted = Recorded(rank=2, scale=1.0, dropout=0.0, keys=None)
    their_tuner.linear_to_lora_layers(model_of("qwen3")[0], 1, adapted)
    loaded, columns = Recorded(path="owner/name"), Recorded()
    asked = SimpleNamespace(hf_dataset=loaded, train=True, test=True, mask_prompt=False)
    their_data.load_custom_hf_dataset(asked, None)
    their_data.create_dataset([{"text": "a"}], None, columns)

    nested = {
        "hf_dataset": loaded.reads | {"mask_prompt"},
        "lr_schedule": scheduled.reads,
        "lora_parameters": adapted.reads,
    }
    assert set(theirs.CONFIG_DEFAULTS["lora_parameters"]) <= nested["lora_parameters"]
    wanted = {f"{parent}.{key}" for parent, keys in nested.items() for key in keys}
    wanted |= columns.reads - {"mask_prompt"}
    wanted |= set(theirs.CONFIG_DEFAULTS) - set(ACTIONS) - set(nested)
    assert wanted == {row for row in ROWS if not row.startswith("--")}


def shown(value) -> str:
    """A default as the table writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "—"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


@pytest.mark.parametrize("dest", ACTIONS)
def test_table_states_both_defaults(dest):
    _, _, there, here, *_ = ROWS[max(ACTIONS[dest].option_strings, key=len)]
    recipe = resolve({})
    known = {**recipe.to_json(), **NOT_FIELDS}
    assert there == shown(theirs.CONFIG_DEFAULTS[dest])
    assert here == shown(known.get(dest))


def test_command_takes_a_whole_command_line_of_mlx_lm():
    line = """--model m --train --data d --fine-tune-type lora --optimizer muon --mask-prompt
    --num-layers 4 --batch-size 2 --iters 30 --val-batches 3 --learning-rate 1e-4 --seed 5
    --steps-per-report 5 --steps-per-eval 15 --grad-accumulation-steps 2 --resume-adapter-file r
    --adapter-path a --save-every 10 --test --test-batches 7 --max-seq-length 128 --grad-checkpoint
    --clear-cache-threshold 2GB --report-to wandb --project-name p --trust-remote-code""".split()

    parsed = vars(theirs.build_parser().parse_known_args(line)[0])
    recipe = recipe_of(*line)
    run = recipe.run

    same = [k for k in parsed if hasattr(recipe.train, k)]
    assert len(same) == 14
    assert {k: getattr(recipe.train, k) for k in same} == {k: parsed[k] for k in same}

    assert (recipe.data.data, recipe.lora.num_layers) == ("d", 4)
    assert recipe.train.loss_on == "completion"
    assert run == {
        "model": "m",
        "out": "a",
        "resume_adapter_file": "r",
        "report_to": "wandb",
        "project_name": "p",
        "trust_remote_code": True,
    }


YAML = """
model: m
train: true
fine_tune_type: lora
optimizer: adamw
optimizer_config:
  adamw: {betas: [0.9, 0.98], eps: 1e-6, weight_decay: 0.05, bias_correction: true}
data: d
num_layers: 1
learning_rate: 1e-5
resume_adapter_file: null
adapter_path: adapters
test: true
lora_parameters:
  keys: [self_attn.q_proj, self_attn.v_proj]
  rank: 8
  scale: 20.0
  dropout: 0.1
lr_schedule:
  name: cosine_decay
  warmup: 10
  warmup_init: 1e-7
  arguments: [1e-5, 100, 1e-7]
hf_dataset:
  path: billsum
  train_split: "train[:1000]"
  valid_split: "train[-100:]"
  prompt_feature: text
  completion_feature: summary
"""


def test_resolve_reads_a_whole_yaml_of_mlx_lm(tmp_path):
    (tmp_path / "lora.yaml").write_text(YAML)
    recipe = resolve(read_settings(tmp_path / "lora.yaml"))
    lora = recipe.lora
    assert (lora.rank, lora.alpha / lora.rank, lora.dropout, lora.num_layers) == (8, 20.0, 0.1, 1)
    assert lora.target_modules == ("self_attn.q_proj", "self_attn.v_proj")
    assert recipe.run == {"model": "m", "out": "adapters"}
    assert recipe.data.hf_dataset["completion_feature"] == "summary"
    adamw = make_optimizer(recipe.train)
    assert (adamw.betas, adamw.eps, adamw.weight_decay) == ([0.9, 0.98], 1e-6, 0.05)
    assert adamw.bias_correction


@pytest.mark.parametrize(
    ("keys", "num_layers"),
    [((), 0), ((), -1), ((), 2), (("self_attn.q_proj", "self_attn.v_proj"), 1)],
)
def test_keys_and_num_layers_choose_the_modules_that_mlx_lm_adapts(keys, num_layers):
    model, _ = model_of("qwen3")
    targets = {path for path, _ in select_targets(model, keys, num_layers)}
    parameters = {"rank": 2, "scale": 1.0, "dropout": 0.0} | ({"keys": list(keys)} if keys else {})
    their_tuner.linear_to_lora_layers(model, num_layers, parameters)
    kind = their_tuner.LoRALinear
    assert targets == {path for path, m in model.named_modules() if isinstance(m, kind)}
    assert len(targets) == 2 or not keys


@pytest.mark.parametrize(
    "wanted",
    [
        {"name": "cosine_decay", "arguments": [1e-5, 100, 1e-7], "warmup": 10, "warmup_init": 1e-7},
        {"name": "linear_schedule", "arguments": [1e-3, 1e-5, 50]},
        {"name": "exponential_decay", "arguments": [1e-3, 0.9], "warmup": 3},
        {"name": "step_decay", "arguments": [1e-3, 0.5, 10]},
    ],
)
def test_schedule_equals_build_schedule_of_mlx_lm(wanted):
    ours, reference = schedule(TrainConfig(lr_schedule=wanted)), their_tuner.build_schedule(wanted)
    for step in (0, 1, 5, 9, 10, 11, 12, 60, 200):
        now = mx.array(step)
        assert ours(now).item() == pytest.approx(reference(now).item(), rel=1e-6)


@pytest.mark.parametrize("size", ["0", "123", "1.5 gb", "500M"])
def test_clear_cache_threshold_takes_the_sizes_of_mlx_lm(size):
    recipe = recipe_of("--clear-cache-threshold", size)
    assert recipe.train.clear_cache_threshold == _parse_size(size)


def test_optimizers_fine_tune_type_and_mask_prompt_mean_what_they_mean_there():
    for optimizer in ACTIONS["optimizer"].choices:
        cls = type(make_optimizer(recipe_of("--optimizer", optimizer).train))
        assert cls.__name__.lower() == optimizer
    for kind in ACTIONS["fine_tune_type"].choices:
        assert recipe_of("--fine-tune-type", kind) == recipe_of("--method", kind)
    for value, loss_on in ((True, "completion"), (False, "all")):
        assert resolve({"mask_prompt": value}).train.loss_on == loss_on


def test_evaluation_alone_is_an_error_with_what_to_write():
    with raises("conflict", "test", "`packs eval`"):
        resolve({"train": False})


def invoke_train(*args: str):
    """`packs train ARGS`."""
    return CliRunner().invoke(command, list(args), standalone_mode=False)


def test_show_mask_prints_json_and_loads_no_weights(nothing_is_loaded):
    result = invoke_train("--show-mask", "--json")
    rows = json.loads(result.stdout)["examples"]
    assert {"where", "learned", "total", "spans"} == set(rows[0]) and len(rows) == 5
    assert 0 < rows[0]["learned"] < rows[0]["total"]
    assert {span["learned"] for span in rows[0]["spans"]} == {True, False}


def test_show_mask_passes_trust_remote_code(monkeypatch):
    passed = []
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda *args: passed.append(args) or 1 / 0)
    invoke_train("--show-mask")
    invoke_train("--show-mask", "--trust-remote-code")
    assert [args[-1] for args in passed] == [False, True]


def test_help_shows_what_the_tiny_base_changes():
    recipe, shown = tiny_recipe(), " ".join(invoke_train("--help", "--all").stdout.split())
    assert recipe["iters"] != TrainConfig.iters
    assert f"Batches to train on. [default: 600; tiny: {recipe['iters']}]" in shown
    assert "dropout. [default: 0]" in shown


def test_training_says_when_stock_mlx_lm_cannot_open_the_pack(capsys):
    for pattern, warns in (({}, False), ({"down_proj": 2}, True)):
        trainable = attach(base_of("qwen3"), LoRAConfig(rank=4, rank_pattern=pattern))
        _describe(trainable, Display(NORMAL), base_weights=100_000)
        assert ("packs export --to mlx-lm" in capsys.readouterr().err) == warns


def test_examples_make_packs_that_stock_mlx_lm_opens():
    for file in TABLE.parent.glob("*.yaml"):
        recipe = resolve(translate(read_settings(file), str(file)), str(file))
        assert not recipe.lora.rank_pattern


def test_report_to_is_an_error_before_anything_is_loaded(monkeypatch, nothing_is_loaded):
    monkeypatch.setattr(callbacks, "wandb", None)
    error = invoke_train("--report-to", "wandb").exception
    assert isinstance(error, PackError) and error.message.startswith("--report-to wandb: ")
