"""Configuration: typed on reading, checked at once, later layers override earlier ones."""

import json

import pytest
import yaml

from mlx_packs.config.fields import read_settings
from mlx_packs.config.recipe import Recipe, resolve
from mlx_packs.config.schema import DataConfig, LoRAConfig, TrainConfig
from mlx_packs.errors import PackError
from tests.helpers.errors import raises


def yaml_of(tmp_path, text: str) -> dict:
    (tmp_path / "c.yaml").write_text(text)
    return read_settings(tmp_path / "c.yaml")


def test_resolve_of_nothing_is_the_defaults():
    assert resolve({}) == Recipe(LoRAConfig(), TrainConfig(), DataConfig(), {})


def test_resolve_types_what_flags_say_as_text():
    recipe = resolve(
        {
            "learning_rate": "1e-5",
            "iters": "1e3",
            "rank": "8",
            "alpha": "20",
            "target_modules": "q_proj, v_proj",
            "max_grad_norm": "0",
        }
    )
    assert recipe.train.learning_rate == 1e-5 and recipe.train.iters == 1000
    assert recipe.lora == LoRAConfig(rank=8, alpha=20.0, target_modules=("q_proj", "v_proj"))
    assert recipe.train.max_grad_norm == 0.0


@pytest.mark.parametrize(
    ("values", "code", "flag", "shown"),
    [
        ({"iters": "ten"}, "invalid", "iters", "'ten'"),
        ({"iters": "1.5"}, "invalid", "iters", "'1.5'"),
        ({"iters": True}, "invalid", "iters", "True"),
        ({"iters": "1e999"}, "invalid", "iters", "'1e999'"),
        ({"learning_rate": "fast"}, "invalid", "learning_rate", "'fast'"),
        ({"rank_pattern": {"q_proj": "x"}}, "invalid", "rank_pattern", "q_proj"),
        ({"rank_pattern": "q_proj"}, "invalid", "rank_pattern", "'q_proj'"),
        ({"rank_pattern": "q_proj=8,=2"}, "invalid", "rank_pattern", "'q_proj=8,=2'"),
        ({"rank_pattern": "q_proj=x"}, "invalid", "rank_pattern", "'x'"),
        ({"rank_pattern": "q_proj=8, q_proj=2"}, "conflict", "rank_pattern", "'q_proj'"),
        ({"objective": "stack"}, "unknown", "objective", "projection-stack"),
        ({"grad_checkpoint": "yes"}, "invalid", "grad_checkpoint", "'yes'"),
        ({"lr_schedule": 5}, "invalid", "lr_schedule", "5"),
        ({"model": 5}, "invalid", "model", "5"),
        ({"resume": "no"}, "invalid", "resume", "'no'"),
        ({"iters": "0"}, "invalid", "iters", "0"),
        ({"rank": "0"}, "invalid", "rank", "0"),
        ({"rank": "-4"}, "invalid", "rank", "-4"),
        ({"num_layers": "-2"}, "invalid", "num_layers", "-2"),
        ({"alpha": "nan"}, "invalid", "alpha", "nan"),
        ({"alpha": "0"}, "invalid", "alpha", "0"),
        ({"dropout": "1"}, "invalid", "dropout", "[0, 1)"),
        ({"dropout": "nan"}, "invalid", "dropout", "nan"),
        ({"rank_pattern": {"q_proj": 0}}, "invalid", "rank_pattern", "q_proj"),
        ({"alpha_pattern": {"q_proj": -1}}, "invalid", "alpha_pattern", "q_proj"),
        ({"rank_pattern": {"(q_proj": 4}}, "invalid", "rank_pattern", "'(q_proj'"),
        ({"learning_rate": "-1"}, "invalid", "learning_rate", "-1"),
        ({"learning_rate": "nan"}, "invalid", "learning_rate", "nan"),
        ({"learning_rate": "inf"}, "invalid", "learning_rate", "inf"),
        ({"warmup_steps": "-1"}, "invalid", "warmup_steps", "-1"),
        ({"max_seq_length": "1"}, "invalid", "max_seq_length", "2"),
        ({"max_grad_norm": "-1"}, "invalid", "max_grad_norm", "-1"),
        ({"max_grad_norm": "nan"}, "invalid", "max_grad_norm", "nan"),
        ({"ce_last_k": "0"}, "invalid", "ce_last_k", "0"),
        ({"z_loss": "inf"}, "invalid", "z_loss", "inf"),
        ({"label_smoothing": "1"}, "invalid", "label_smoothing", "[0, 1)"),
        ({"fim_rate": "1.5"}, "invalid", "fim_rate", "[0, 1]"),
        ({"val_batches": "-2"}, "invalid", "val_batches", "-2"),
        ({"test_batches": "0"}, "invalid", "test_batches", "-1"),
        ({"test_batches": "-2"}, "invalid", "test_batches", "-2"),
        ({"seed": "-1"}, "invalid", "seed", "4294967296"),
        ({"seed": 2**32}, "invalid", "seed", "4294967296"),
        ({"max_pack_mb": "-1"}, "invalid", "max_pack_mb", "-1"),
        ({"max_ppl_ratio": "nan"}, "invalid", "max_ppl_ratio", "nan"),
        ({"min_tps_ratio": "0"}, "invalid", "min_tps_ratio", "0"),
        ({"optimizer": "adamx"}, "unknown", "optimizer", "adamw_8bit"),
        ({"matmul_path": "fast"}, "unknown", "matmul_path", "transient"),
        ({"loss_on": "answers"}, "unknown", "loss_on", "assistant"),
        ({"quantize": "nf5"}, "unknown", "quantize", "nf4"),
        ({"lr_schedule": "cosin"}, "unknown", "lr_schedule", "cosine"),
        ({"clear_cache_threshold": "2 parsecs"}, "invalid", "clear_cache_threshold", "2 parsecs"),
        ({"clear_cache_threshold": "-5"}, "invalid", "clear_cache_threshold", "-5"),
        ({"clear_cache_threshold": -5}, "invalid", "clear_cache_threshold", "-5"),
        ({"learnin_rate": 1}, "unknown", "learnin_rate", "'learning_rate'"),
        ({"scale": 20}, "unknown", "scale", "alpha"),
        ({5: 1}, "unknown", "5", "5"),
        ({"phases": []}, "invalid", "phases", "phases"),
        ({"phases": [{"replay": 2}]}, "invalid", "replay", "phases[0]: replay"),
        ({"phases": [{"optimizer_state": "x"}]}, "unknown", "optimizer_state", "fresh"),
        ({"phases": [{"nam": "x"}]}, "unknown", "nam", "'name'"),
        ({"phases": ["x"]}, "invalid", "phases", "phases[0]"),
        ({"grad_checkpoint": True, "recompute": "none"}, "conflict", "grad_checkpoint", "none"),
        ({"double_quant": False}, "conflict", "double_quant", "nf4"),
        ({"keep": "lm_head"}, "conflict", "keep", "--quantize"),
        ({"fim_tokens": "a,b,c"}, "conflict", "fim_tokens", "--fim-rate"),
        ({"fim_spm_rate": 0.1}, "conflict", "fim_spm_rate", "--fim-rate"),
        ({"fim_rate": 0.5, "max_seq_length": 31}, "conflict", "fim_rate", "32"),
        ({"fim_rate": 0.5, "fim_tokens": "a,b,a"}, "invalid", "fim_tokens", "a, b, a"),
        ({"triplet_margin": 1}, "conflict", "triplet_margin", "--task embedding"),
        ({"method": "full", "quantize": "nf4"}, "conflict", "quantize", "--method full"),
        ({"method": "full", "train_fp16_fallback": True}, "conflict", "train_fp16_fallback", ""),
        ({"objective": "projection-stack", "method": "full"}, "conflict", "method", "projection"),
        ({"objective": "projection-stack", "recompute": "block"}, "conflict", "recompute", ""),
        ({"objective": "projection-stack", "cache_frozen": "on"}, "conflict", "cache_frozen", ""),
    ],
)
def test_resolve_names_what_is_wrong(values, code, flag, shown):
    with raises(code, flag, shown):
        resolve(values)


def test_resolve_lists_all_faults_of_a_config_at_once():
    with raises("invalid", "iters", "--iters: ", "--batch-size: ", "--seed: "):
        resolve({"iters": 0, "batch_size": 0, "seed": -1})


@pytest.mark.parametrize(
    "values", [{"rank": 0}, {"rank": "x"}, {"rnak": 1}, {"lora_parameters": 5}, {"model": 5}]
)
def test_resolve_names_the_file_that_a_fault_stands_in(values):
    with pytest.raises(PackError) as error:
        resolve(values, "my.yaml")
    assert error.value.message.startswith(f"my.yaml: {next(iter(values))}: ")


def test_error_of_a_file_names_keys_and_no_flags():
    with raises("conflict", "keep", "c.yaml: keep: ", " quantize") as error:
        resolve({"keep": ["lm_head"]}, "c.yaml")
    assert "--" not in error.value.message


def test_resolve_values_override_those_under_them():
    under = [{"rank": 4, "iters": 5, "model": "a"}, {"iters": 6}]
    recipe = resolve({"model": "b"}, under=under)
    assert (recipe.lora.rank, recipe.train.iters, recipe.run) == (4, 6, {"model": "b"})


def test_resolve_values_override_other_spellings_under_them():
    file = {"lora_parameters": {"rank": 8, "scale": 20.0}, "mask_prompt": True, "adapter_path": "a"}
    recipe = resolve({"alpha": "8", "loss_on": "all", "out": "b"}, under=[file])
    assert recipe.lora == LoRAConfig(rank=8, alpha=8.0)
    assert (recipe.train.loss_on, recipe.run["out"]) == ("all", "b")


def test_resolve_scale_of_a_file_overrides_alpha_under_it():
    file = {"lora_parameters": {"rank": 8, "scale": 20.0}}
    assert resolve({}, under=[{"rank": 16, "alpha": 32}, file]).lora == LoRAConfig(8, 160.0)


def test_resolve_scale_of_a_file_is_kept_when_a_flag_changes_the_rank():
    file = {"lora_parameters": {"rank": 8, "scale": 20.0}}
    assert resolve({"rank": "4"}, under=[file]).lora == LoRAConfig(4, 80.0)


def test_resolve_none_says_nothing():
    under = [{"resume_adapter_file": None, "lr_schedule": None, "lora_parameters": None}]
    assert resolve({"iters": None}, under=under) == resolve({})


def test_patterns_are_flags_too_and_say_what_the_mapping_says():
    flags = {"rank_pattern": "c_attn.q=8, c_attn.v=2", "alpha_pattern": r"h\.(0|1)\.mlp.*=0.5"}
    mapping = {
        "rank_pattern": {"c_attn.q": 8, "c_attn.v": 2},
        "alpha_pattern": {r"h\.(0|1)\.mlp.*": 0.5},
    }
    assert resolve(flags) == resolve(mapping, "c.yaml")
    assert resolve({"rank_pattern": ""}).lora.rank_pattern == {}


def test_recipe_to_json_is_json_and_comes_back():
    recipe = resolve({"rank": 4, "model": "m", "rank_pattern": {"q_proj": 2}, "resume": False})
    written = json.loads(json.dumps(recipe.to_json()))
    assert written["model"] == "m" and "resume" not in written
    back = resolve(written)
    assert (back.lora, back.train, back.data) == (recipe.lora, recipe.train, recipe.data)


def test_recipe_to_json_of_every_field_is_resolved_to_the_same():
    recipe = Recipe(
        LoRAConfig(4, 8.0, 0.1, ("q_proj",), 2, {"q_proj": 2}, {"q_proj": 1.0}, True),
        TrainConfig(
            lr_schedule={"name": "step_decay", "arguments": [1e-3, 0.5, 10]},
            optimizer_config={"adamw": {"betas": [0.9, 0.98]}},
            clear_cache_threshold=5,
            max_grad_norm=None,
        ),
        DataConfig("d", hf_dataset=[{"path": "a/b"}]),
    )
    written = json.loads(json.dumps(recipe.to_json()))
    back = resolve(written)
    assert (back.lora, back.data) == (recipe.lora, recipe.data)
    assert back.train.max_grad_norm == 0.0  # off, as None is
    assert (
        back.to_json()
        == resolve(back.to_json()).to_json()
        == recipe.to_json() | {"target_modules": ("q_proj",)}
    )


def test_read_yaml_reads_numbers_without_a_dot_wherever_they_stand(tmp_path):
    values = yaml_of(tmp_path, "learning_rate: 1e-5\na: {b: [1e3, -2.5E+2, .5e1]}\nc: 1e\nd: e5")
    assert values == {
        "learning_rate": 1e-5,
        "a": {"b": [1000.0, -250.0, 5.0]},
        "c": "1e",
        "d": "e5",
    }


def test_read_yaml_does_not_change_pyyaml_itself(tmp_path):
    before = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    yaml_of(tmp_path, "a: 1e-5")
    assert before == {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}


def test_read_yaml_empty_file_says_nothing(tmp_path):
    assert yaml_of(tmp_path, "# only a comment\n") == {}


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a: [1", "line 1"), ("- a", "list"), ("!!python/object/apply:os.getcwd []", "os.getcwd")],
)
def test_read_yaml_names_the_file(tmp_path, text, shown):
    with raises("unreadable", "config", "c.yaml: ", shown):
        yaml_of(tmp_path, text)


def test_read_yaml_missing_file_or_folder(tmp_path):
    for path, code in ((tmp_path / "none.yaml", "not-found"), (tmp_path, "unreadable")):
        with raises(code, "config", str(path)):
            read_settings(path)


def test_read_yaml_reads_json(tmp_path):
    (tmp_path / "c.json").write_text('{"iters": 5}')
    assert read_settings(tmp_path / "c.json") == {"iters": 5}
