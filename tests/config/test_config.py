"""Configuration: typed on reading, checked at once, later layers override earlier ones."""

import json

import pytest

from mlx_packs.config.schema import (
    DataConfig,
    LoRAConfig,
    Recipe,
    TrainConfig,
    read_yaml,
    resolve,
)
from mlx_packs.errors import PackError


def yaml_of(tmp_path, text: str) -> dict:
    (tmp_path / "c.yaml").write_text(text)
    return read_yaml(tmp_path / "c.yaml")


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
    ("values", "message"),
    [
        ({"iters": "ten"}, "--iters must be of type int, but got 'ten'"),
        ({"iters": "1.5"}, "--iters must be of type int"),
        ({"iters": True}, "--iters must be of type int"),
        ({"iters": "1e999"}, "--iters must be of type int"),
        ({"learning_rate": "fast"}, "--learning-rate must be of type float"),
        ({"rank_pattern": {"q_proj": "x"}}, "--rank-pattern.q_proj must be of type int"),
        ({"rank_pattern": "q_proj"}, "--rank-pattern must be of the form name=number,name=numb"),
        ({"rank_pattern": "q_proj=8,=2"}, "--rank-pattern must be of the form name=number"),
        ({"rank_pattern": "q_proj=x"}, "--rank-pattern.q_proj must be of type int, but got 'x'"),
        ({"rank_pattern": "q_proj=8, q_proj=2"}, "--rank-pattern: says two numbers for 'q_proj'"),
        ({"objective": "stack"}, "objective is one of transformer, projection-stack; got 'stack'"),
        ({"grad_checkpoint": "yes"}, "--grad-checkpoint must be of type bool"),
        ({"lr_schedule": 5}, "--lr-schedule must be str or dict"),
        ({"model": 5}, "--model must be of type str"),
        ({"resume": "no"}, "--resume must be of type bool"),
        ({"iters": "0"}, "iters must be positive, but got 0"),
        ({"rank": "0"}, "rank must be positive, but got 0"),
        ({"rank": "-4"}, "rank must be positive, but got -4"),
        ({"num_layers": "-2"}, "num_layers must be positive, or -1 for all blocks, but got -2"),
        ({"alpha": "nan"}, "alpha must be positive"),
        ({"alpha": "0"}, "alpha must be positive"),
        ({"dropout": "1"}, r"dropout must be in \[0, 1\)"),
        ({"dropout": "nan"}, "dropout must be in"),
        ({"rank_pattern": {"q_proj": 0}}, "every rank of rank_pattern must be positive"),
        ({"alpha_pattern": {"q_proj": -1}}, "every alpha of alpha_pattern must be positive"),
        ({"rank_pattern": {"(q_proj": 4}}, r"'\(q_proj' in rank_pattern must be a module path"),
        ({"learning_rate": "-1"}, "learning_rate must be positive, but got -1"),
        ({"learning_rate": "nan"}, "learning_rate must be positive, but got nan"),
        ({"learning_rate": "inf"}, "learning_rate must be positive, but got inf"),
        ({"warmup_steps": "-1"}, "warmup_steps must be 0 or more"),
        ({"max_seq_length": "1"}, "max_seq_length must be above 1"),
        ({"max_grad_norm": "-1"}, "max_grad_norm must be 0"),
        ({"ce_last_k": "0"}, "ce_last_k must be positive"),
        ({"val_batches": "-2"}, "val_batches must be -1 or more"),
        ({"test_batches": "0"}, "test_batches must be positive, or -1"),
        ({"seed": "-1"}, r"seed must be in \[0, 2\^32\)"),
        ({"max_pack_mb": "-1"}, "max_pack_mb must be positive"),
        ({"max_ppl_ratio": "nan"}, "max_ppl_ratio must be positive"),
        ({"min_tps_ratio": "0"}, "min_tps_ratio must be positive"),
        ({"optimizer": "adamx"}, "optimizer is one of adamw, .*; got 'adamx'"),
        ({"matmul_path": "fast"}, "matmul_path is one of auto, .*; got 'fast'"),
        ({"loss_on": "answers"}, "loss_on is one of all, .*; got 'answers'"),
        ({"quantize": "nf5"}, "quantize is one of none, .*; got 'nf5'"),
        ({"lr_schedule": "cosin"}, "lr_schedule is one of cosine, .*; got 'cosin'"),
        ({"clear_cache_threshold": "2 parsecs"}, "--clear-cache-threshold must be a size"),
        ({"clear_cache_threshold": "-5"}, "--clear-cache-threshold must be a size"),
        ({"clear_cache_threshold": -5}, "clear_cache_threshold must be 0 or more"),
        ({"learnin_rate": 1}, "unknown key 'learnin_rate'. Did you mean 'learning_rate'?"),
        ({"scale": 20}, r"unknown key 'scale'. Write alpha \(scale x rank\)"),
        ({5: 1}, "unknown key '5'"),
    ],
)
def test_resolve_names_what_is_wrong(values, message):
    with pytest.raises(PackError, match=message):
        resolve(values)


def test_resolve_lists_all_faults_of_a_config_at_once():
    with pytest.raises(PackError, match="iters must be .* batch_size must be .* seed must be"):
        resolve({"iters": 0, "batch_size": 0, "seed": -1})


@pytest.mark.parametrize(
    "values", [{"rank": 0}, {"rank": "x"}, {"rnak": 1}, {"lora_parameters": 5}, {"model": 5}]
)
def test_resolve_names_the_file_that_a_fault_stands_in(values):
    with pytest.raises(PackError, match=r"^my\.yaml: "):
        resolve(values, "my.yaml")


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
    said = {
        "rank_pattern": {"c_attn.q": 8, "c_attn.v": 2},
        "alpha_pattern": {r"h\.(0|1)\.mlp.*": 0.5},
    }
    assert resolve(flags) == resolve(said, "c.yaml")
    assert resolve({"rank_pattern": ""}).lora.rank_pattern == {}


def test_recipe_to_json_is_json_and_comes_back():
    recipe = resolve({"rank": 4, "model": "m", "rank_pattern": {"q_proj": 2}, "resume": False})
    written = json.loads(json.dumps(recipe.to_json()))
    assert written["model"] == "m" and "resume" not in written
    back = resolve(written)
    assert (back.lora, back.train, back.data) == (recipe.lora, recipe.train, recipe.data)


def test_recipe_to_json_of_every_field_is_resolved_to_the_same():
    recipe = Recipe(
        LoRAConfig(4, 8.0, 0.1, ("q_proj",), 2, {"q_proj": 2}, {"q_proj": 1.0}),
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
    import yaml

    before = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    yaml_of(tmp_path, "a: 1e-5")
    assert before == {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}


def test_read_yaml_empty_file_says_nothing(tmp_path):
    assert yaml_of(tmp_path, "# only a comment\n") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", r"c\.yaml: is not valid YAML: .*line 1"),
        ("- a", r"c\.yaml: must hold keys and values, but holds a list"),
        ("!!python/object/apply:os.getcwd []", r"c\.yaml: is not valid YAML"),
    ],
)
def test_read_yaml_names_the_file(tmp_path, text, message):
    with pytest.raises(PackError, match=message):
        yaml_of(tmp_path, text)


def test_read_yaml_missing_file_or_folder(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(PackError, match="cannot be read"):
            read_yaml(path)


def test_read_yaml_reads_json(tmp_path):
    (tmp_path / "c.json").write_text('{"iters": 5}')
    assert read_yaml(tmp_path / "c.json") == {"iters": 5}
