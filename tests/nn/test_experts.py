"""Adapters on the experts of a mixture: where they sit, how they lie on disk, merged, in the CLI.

Not collected with an mlx-lm that cannot train mixtures (conftest.py).
"""

import json

import pytest
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.utils import load_adapters

from mlx_packs.adapters.attach import attach
from mlx_packs.config.schema import LoRAConfig
from mlx_packs.nn.surgery import replace_modules
from mlx_packs.packs.making import attach_pack, pack_of
from mlx_packs.packs.pack import Pack
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_checkpoint, write_quantized
from tests.helpers.errors import raises
from tests.helpers.families import expert_paths, family_base, randomized, targets_of
from tests.helpers.packs import merged_weights
from tests.helpers.rows import write_rows

RANK = 2
TOKENS = mx.array([[(5 * i + 3) % 127 for i in range(37)]])


def test_experts_routers_and_indexers_have_adapters_only_where_named():
    base = family_base("deepseek_v32")
    attached = attach(base, LoRAConfig(rank=RANK))
    assert not any("switch_mlp" in p or "indexer" in p for p in attached.specs)
    assert any("shared_experts.up_proj" in p for p in attached.specs)
    assert attached.notes == [
        "experts get adapters only where named: --target-modules down_proj,gate_proj,up_proj"
    ]
    attached.detach()
    attached = attach(base, LoRAConfig(rank=RANK, target_modules=("up_proj", "indexer.wk")))
    assert sum("switch_mlp.up_proj" in p for p in attached.specs) == 1
    assert sum("indexer.wk" in p for p in attached.specs) == 2 and attached.notes == []


def test_linears_narrower_than_the_rank_are_left_out_unless_named():
    base = family_base("qwen2_moe")
    attached = attach(base, LoRAConfig(rank=8))
    assert not any("shared_expert_gate" in p for p in attached.specs)
    assert "shared_expert_gate: narrower than rank 8, have no adapter" in attached.notes
    attached.detach()
    with raises("invalid", "rank", "shared_expert_gate", "64 x 1"):
        attach(base, LoRAConfig(rank=8, target_modules=("shared_expert_gate",)))


def test_attach_names_a_module_without_adapter_and_its_type():
    with raises("unsupported", "target_modules", "embed_q", "MultiLinear"):
        attach(family_base("deepseek_v3"), LoRAConfig(target_modules=("embed_q",)))
    with raises("unsupported", "target_modules", "prediction_coefs", "Linear"):
        attach(family_base("gemma3n"), LoRAConfig(target_modules=("prediction_coefs",)))


def test_a_switch_linear_whose_tensors_contradict_is_named():
    base = family_base("qwen3_moe", 4)
    path = expert_paths(base.model)[0]
    module = dict(base.model.named_modules())[path]
    module.scales = module.scales[..., :1]
    for fallback in (False, True):
        with raises("unreadable", None, path, "scales [4, "):
            attach(base, LoRAConfig(rank=RANK, target_modules=(path,)), fp16_fallback=fallback)


@pytest.mark.parametrize(
    ("family", "tokens"),  # below 64 rows experts are not sorted
    [("qwen3_moe", 5), ("qwen3_moe", 37), ("nemotron_h", 37), ("longcat_flash", 5)],
)
def test_stock_mlx_lm_opens_a_pack_with_experts(family, tokens, tmp_path):
    base = family_base(family, 4)
    targets = targets_of(base, RANK)
    path = expert_paths(base.model)[0]
    attached = attach(base, LoRAConfig(rank=RANK, target_modules=targets))
    tensors = randomized(attached)
    experts, out, width = merged_weights(attached)[path].shape
    assert tensors[f"{path}.lora_a"].shape == (experts, RANK, width)
    assert tensors[f"{path}.lora_b"].shape == (experts, out, RANK)

    expected = base.model(TOKENS[:, :tokens])
    pack_of(attached).save(tmp_path / "pack")
    attached.detach()

    pack = Pack.open(tmp_path / "pack")
    assert pack.specs == attached.specs and pack.specs[path].experts == experts
    again = attach_pack(base, pack)
    assert mx.array_equal(base.model(TOKENS[:, :tokens]), expected).item()
    again.detach()

    model = load_adapters(family_base(family, 4).model, str(tmp_path / "pack"))
    assert mx.abs(model(TOKENS[:, :tokens]) - expected).max().item() < 1e-4


def test_train_inspect_apply_and_generate_with_experts(run, tmp_path):
    """The commands one after another on a checkpoint on disk, with recomputed blocks and dropout."""
    folder, pack = tmp_path / "moe", tmp_path / "pack"
    write_quantized(folder, write_checkpoint(tmp_path / "dense", "qwen3_moe"))
    data = write_rows(tmp_path / "data", train=[{"text": "one two"}] * 4, valid=[{"text": "one"}])
    options = "--iters 1 --batch-size 2 --max-seq-length 64 --rank 2 --dropout 0.1"
    options += " --target-modules q_proj,up_proj,down_proj --matmul-path quantized"
    places = ("--model", folder, "--data", data, "--out", pack)

    code, _, err = run("train", *places, *options.split(), "--grad-checkpoint")
    assert code == 0, err

    code, out, err = run("inspect", pack, "--json")
    modules = {m["path"]: m for m in json.loads(out)["adapters"]["modules"]}
    assert modules["model.layers.1.mlp.switch_mlp.up_proj"]["experts"] == 4
    assert "experts" not in modules["model.layers.1.self_attn.q_proj"]

    code, out, err = run("apply", pack, "--model", folder, "--dry-run", "--json")
    assert code == 0 and json.loads(out)["geometry"] == "checked", err
    code, _, err = run(
        *("generate", "--model", folder, "--pack", pack),
        *("--prompt", "a", "--max-tokens", 3, "--raw"),
    )
    assert code == 0, err


@pytest.mark.parametrize("bits", [None, 4])
def test_merged_experts_give_the_attached_forward(bits):
    base = family_base("gpt_oss", bits)  # its experts have a bias
    attached = attach(base, LoRAConfig(rank=RANK, target_modules=expert_paths(base.model)))
    randomized(attached)
    expected = base.model(TOKENS)
    merged = merged_weights(attached)
    attached.detach()

    modules = dict(base.model.named_modules())
    replaced = []
    for path, weight in merged.items():
        experts, out, width = weight.shape
        linear = SwitchLinear(width, out, experts)
        linear.weight = weight
        linear.bias = modules[path].bias
        replaced.append((path, linear))
    replace_modules(base.model, replaced)

    assert mx.abs(base.model(TOKENS) - expected).max().item() < 1e-5
