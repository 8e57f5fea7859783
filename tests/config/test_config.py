"""Configuration: typed on reading, checked at once, later layers override earlier ones."""

import json
from pathlib import Path

import pytest

from mlx_packs.config.external import translate
from mlx_packs.config.fields import read_settings
from mlx_packs.config.recipe import Recipe, resolve
from mlx_packs.config.schema import DataConfig, LoRAConfig, TrainConfig
from tests.helpers.errors import raises


def yaml_of(tmp_path, text: str) -> dict:
    (tmp_path / "c.yaml").write_text(text)
    return read_settings(tmp_path / "c.yaml")


def test_resolve_types_what_flags_say_as_text():
    flags = {"learning_rate": "1e-5", "iters": "1e3", "rank": "8", "alpha": "20"}
    recipe = resolve({**flags, "target_modules": "q_proj, v_proj", "max_grad_norm": "0"})
    assert recipe.train.learning_rate == 1e-5 and recipe.train.iters == 1000
    assert recipe.lora == LoRAConfig(rank=8, alpha=20.0, target_modules=("q_proj", "v_proj"))
    assert recipe.train.max_grad_norm == 0.0


@pytest.mark.parametrize(
    ("values", "code", "flag", "shown"),
    [
        ({"rank_pattern": "q_proj=8, q_proj=2"}, "conflict", "rank_pattern", "'q_proj'"),
        ({"lr_schedule": 5}, "invalid", "lr_schedule", "5"),
        ({"dropout": "1"}, "invalid", "dropout", "[0, 1)"),
        ({"rank_pattern": {"q_proj": 0}}, "invalid", "rank_pattern", "q_proj"),
        ({"rank_pattern": {"(q_proj": 4}}, "invalid", "rank_pattern", "'(q_proj'"),
        ({"clear_cache_threshold": "2 parsecs"}, "invalid", "clear_cache_threshold", "2 parsecs"),
        ({"scale": 20}, "unknown", "scale", "alpha"),
        ({5: 1}, "unknown", "5", "5"),
        ({"phases": [{"replay": 2}]}, "invalid", "replay", "phases[0]: replay"),
        ({"phases": [{"nam": "x"}]}, "unknown", "nam", "'name'"),
        ({"phases": ["x"]}, "invalid", "phases", "phases[0]"),
        ({"grad_checkpoint": True, "recompute": "none"}, "conflict", "grad_checkpoint", "none"),
        ({"fim_rate": 0.5, "max_seq_length": 31}, "conflict", "fim_rate", "32"),
        ({"fim_rate": 0.5, "fim_tokens": "a,b,a"}, "invalid", "fim_tokens", "a, b, a"),
        ({"method": "full", "quantize": "nf4"}, "conflict", "quantize", "--method full"),
        ({"method": "full", "train_fp16_fallback": True}, "conflict", "train_fp16_fallback", ""),
        ({"objective": "projection-stack", "method": "full"}, "conflict", "method", "projection"),
        ({"objective": "projection-stack", "cache_frozen": "on"}, "conflict", "cache_frozen", ""),
    ],
)
def test_resolve_names_what_is_wrong(values, code, flag, shown):
    with raises(code, flag, shown):
        resolve(values)


def test_error_of_a_file_names_keys_and_no_flags():
    with raises("conflict", "keep", "c.yaml: keep: ", " quantize") as error:
        resolve({"keep": ["lm_head"]}, "c.yaml")
    assert "--" not in error.value.message


def test_resolve_values_override_those_under_them_and_other_spellings():
    under = [{"rank": 4, "iters": 5, "model": "a"}, {"iters": 6}]
    recipe = resolve({"model": "b"}, under=under)
    assert (recipe.lora.rank, recipe.train.iters, recipe.run) == (4, 6, {"model": "b"})

    file = {"lora_parameters": {"rank": 8, "scale": 20.0}, "mask_prompt": True, "adapter_path": "a"}
    recipe = resolve({"alpha": "8", "loss_on": "all", "out": "b"}, under=[file])
    assert recipe.lora == LoRAConfig(rank=8, alpha=8.0)
    assert (recipe.train.loss_on, recipe.run["out"]) == ("all", "b")
    assert resolve({}, under=[{"rank": 16, "alpha": 32}, file]).lora == LoRAConfig(8, 160.0)
    assert resolve({"rank": "4"}, under=[file]).lora == LoRAConfig(4, 80.0)


def test_resolve_none_says_nothing():
    under = [{"resume_adapter_file": None, "lr_schedule": None, "lora_parameters": None}]
    defaults = Recipe(LoRAConfig(), TrainConfig(), DataConfig(), {})
    assert resolve({"iters": None}, under=under) == resolve({}) == defaults


def test_patterns_are_flags_too_and_say_what_the_mapping_says():
    flags = {"rank_pattern": "c_attn.q=8, c_attn.v=2", "alpha_pattern": r"h\.(0|1)\.mlp.*=0.5"}
    mapping = {
        "rank_pattern": {"c_attn.q": 8, "c_attn.v": 2},
        "alpha_pattern": {r"h\.(0|1)\.mlp.*": 0.5},
    }
    assert resolve(flags) == resolve(mapping, "c.yaml")
    assert resolve({"rank_pattern": ""}).lora.rank_pattern == {}


def test_recipe_to_json_is_resolved_to_the_same():
    values = {"rank": 4, "alpha": 8.0, "dropout": 0.1, "target_modules": ["q_proj"]}
    values |= {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 1.0}, "rslora": True}
    values |= {"lr_schedule": {"name": "step_decay", "arguments": [1e-3, 0.5, 10]}}
    values |= {"optimizer_config": {"adamw": {"betas": [0.9, 0.98]}}, "clear_cache_threshold": 5}
    recipe = resolve(values | {"data": "d", "hf_dataset": [{"path": "a/b"}]})
    back = resolve(json.loads(json.dumps(recipe.to_json())))
    assert (back.lora, back.train, back.data) == (recipe.lora, recipe.train, recipe.data)
    assert back.to_json() == recipe.to_json()
    off = resolve(Recipe(train=TrainConfig(max_grad_norm=None)).to_json())
    assert off.train.max_grad_norm == 0.0  # as None is


def test_read_yaml_reads_numbers_without_a_dot_wherever_they_stand(tmp_path):
    values = yaml_of(tmp_path, "learning_rate: 1e-5\na: {b: [1e3, -2.5E+2, .5e1]}\nc: 1e\nd: e5")
    assert values == {"learning_rate": 1e-5, "a": {"b": [1e3, -250.0, 5.0]}, "c": "1e", "d": "e5"}


def test_read_yaml_reads_json_and_nothing_and_names_what_is_wrong(tmp_path):
    for path, code in ((tmp_path / "none.yaml", "not-found"), (tmp_path, "unreadable")):
        with raises(code, "config", str(path)):
            read_settings(path)
    (tmp_path / "c.json").write_text('{"iters": 5}')
    assert read_settings(tmp_path / "c.json") == {"iters": 5}
    assert yaml_of(tmp_path, "# only a comment\n") == {}
    for text, shown in (("a: [1", "line 1"), ("- a", "list"), ("!!python/object:os.x []", "os.x")):
        with raises("unreadable", "config", "c.yaml: ", shown):
            yaml_of(tmp_path, text)


@pytest.mark.parametrize("name", ["cache_frozen", "offload_base"])
def test_on_and_off_of_yaml_are_no_booleans(name, tmp_path):
    for value in ("on", "off"):
        recipe = resolve(yaml_of(tmp_path, f"{name}: {value}"), "c.yaml")
        assert getattr(recipe.train, name) == value


EXAMPLES = Path(__file__).parents[2] / "examples"
NF4 = {"quant_type": "nf4"}
TARGETS = "q_proj k_proj v_proj o_proj up_proj down_proj gate_proj".split()


def of_recipe(values):
    return resolve(translate(values, "recipe"), "recipe")


def test_the_qlora_example_means_what_the_layout_says():
    resolved = of_recipe(read_settings(EXAMPLES / "llama3_8b_qlora.yaml"))
    assert resolved.lora.rank == 16 and resolved.lora.alpha == 16 and resolved.lora.dropout == 0.05
    assert list(resolved.lora.target_modules) == TARGETS
    assert (resolved.train.quantize, resolved.train.double_quant) == ("nf4", True)
    assert resolved.train.compute_dtype == "bfloat16"
    assert resolved.train.keep == ("lm_head", "embed_tokens")  # transformers leaves them dense
    default = of_recipe({"bnb_4bit": NF4}).train
    assert (default.double_quant, default.compute_dtype) == (False, "float32")


@pytest.mark.parametrize(
    ("values", "code", "key", "shown"),
    [
        ({"bnb_4bit": {}}, "unsupported", "bnb_4bit", "'fp4'"),  # bitsandbytes' default
        ({"bnb_4bit": NF4 | {"compute_dtype": "int8"}}, "unsupported", "bnb_4bit", "'int8'"),
        ({"bnb_4bit": NF4, "quantize": "nf4"}, "conflict", "quantize", "bnb_4"),
        ({"lora": {"rank": 8}}, "unknown", "rank", "lora.rank"),
        ({"lora": {"bias": "all"}}, "unsupported", "bias", "'all'"),
        ({"peft_type": "LORA", "r": 8}, "unknown", "peft_type", "'method'"),
        ({"load_in_4bit": True}, "unknown", "load_in_4bit", "quantize='nf4'"),
    ],
)
def test_what_would_mean_something_else_is_an_error(values, code, key, shown):
    with raises(code, key, "recipe: ", shown):
        of_recipe(values)
