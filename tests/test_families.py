"""Every architecture of mlx-lm trains: finite, with the gradients of plain LoRA, and detaches.

`families.py` builds them small. Those that cannot be trained are in mlx_packs/families.py, with the
reason; docs/families.md has all of them.
"""

import importlib
import json
import re
import shutil
from importlib import metadata
from pathlib import Path

import mlx.nn as nn
import pytest
from conftest import write_rows
from families import SIZES, architectures, base_of, config_of, expert_paths, table
from mlx.utils import tree_flatten

from mlx_packs import adapters
from mlx_packs.adapters import attach
from mlx_packs.config import LoRAConfig
from mlx_packs.errors import PackError
from mlx_packs.families import UNTRAINABLE, check_trainable
from mlx_packs.loading import tiny_base_path
from mlx_packs.nn.quantized import replace_modules
from mlx_packs.pack import Pack
from mlx_packs.runtime import mx, on_cpu

RANK = 2
TOKENS = mx.array([[(5 * i + 3) % 127 for i in range(37)]])
LEVEL = 1e-4
DOCS = Path(__file__).parent.parent / "docs" / "families.md"
ROWS = re.findall(r"^\| ([\w.-]+) \| (\w[^|]*) \|", DOCS.read_text(), re.M)[1:]
DOCUMENTED = dict(ROWS)
IS_DOCUMENTED = f"mlx-lm {metadata.version('mlx-lm')}:" in DOCS.read_text()
# With another mlx-lm than that of the table, those that both know.
FAMILIES = [f for f in architectures() if f in DOCUMENTED and f not in UNTRAINABLE]
MOE = [f for f in FAMILIES if "MoE" in DOCUMENTED[f]]


class PlainLoRA(nn.Module):
    """y + (scale * (x A)) B, with A and B as they lie on disk; nothing of mlx_packs in it."""

    def __init__(self, linear: nn.Module, a: mx.array, b: mx.array, scale: mx.array):
        super().__init__()
        self.linear = linear
        self.a, self.b = a, b
        self._scale = scale

    def __call__(self, x, *indices, sorted_indices=False):
        if indices:  # one expert for each row
            a, b = self.a[indices[0]], self.b[indices[0]]
            delta = self._scale * (x @ a.swapaxes(-1, -2)) @ b.swapaxes(-1, -2)
            return self.linear(x, *indices, sorted_indices=sorted_indices) + delta
        y, delta = self.linear(x), ((x @ self.a) * self._scale) @ self.b
        if isinstance(y, list):
            ends = [sum(part.shape[-1] for part in y[: i + 1]) for i in range(len(y) - 1)]
            return [part + d for part, d in zip(y, mx.split(delta, ends, axis=-1), strict=True)]
        return y + delta


def step(model: nn.Module) -> tuple[float, dict[str, mx.array]]:
    """Loss and gradients of one step in training mode."""
    model.train()
    value, gradients = _value_and_grad(model)(TOKENS)
    mx.eval(value, gradients)
    model.eval()
    return value.item(), gradients


def trace(model: nn.Module) -> None:
    """Trace a compiled step, as GPUs have it; it is not run. On CPUs steps are not compiled."""
    model.train()
    mx.enable_compile()
    parameters, state = model.parameters(), [model.state]
    try:
        mx.compile(_value_and_grad(model), inputs=state, outputs=state)(TOKENS)
    finally:
        if on_cpu():
            mx.disable_compile()
        model.update(parameters)  # the trace has put its own in their place
        model.eval()


def _value_and_grad(model: nn.Module):
    def loss(tokens):
        logits = model(tokens[:, :-1]).astype(mx.float32)
        return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")

    return nn.value_and_grad(model, loss)


def randomized(attached) -> dict[str, mx.array]:
    """Give every adapter values that matter, B included; as they lie on disk."""
    for slot in attached.slots.values():
        for arrays in (slot.lora.lora_a, slot.lora.lora_b):
            arrays[:] = [mx.random.normal(t.shape) * 0.1 for t in arrays]
    return attached.tensors()


def targets_of(base) -> tuple[str, ...]:
    """The default projections and the experts."""
    attached = attach(base, LoRAConfig(rank=RANK))
    paths = (*attached.specs, *expert_paths(base.model))
    attached.detach()
    return paths


def check(family: str, bits: int | None) -> None:
    """Attach, hold one step against plain LoRA on every projection and expert, detach."""
    base = base_of(family, bits)
    before = base.model(TOKENS)
    attached = attach(base, LoRAConfig(rank=RANK, target_modules=targets_of(base)))
    specs = attached.specs
    assert mx.array_equal(base.model(TOKENS), before).item()
    tensors = randomized(attached)
    trace(base.model)
    loss, gradients = step(base.model)
    base.model.update(gradients)  # so that tensors() lays gradients out by their names on disk
    ours = attached.tensors()
    attached.detach()
    assert mx.array_equal(base.model(TOKENS), before).item()

    modules = dict(base.model.named_modules())
    plain = []
    for path, spec in specs.items():
        scale = mx.concatenate([mx.full((s.rank,), s.scale) for s in spec.slices])
        adapters = (tensors[f"{path}.lora_a"], tensors[f"{path}.lora_b"])
        plain.append((path, PlainLoRA(modules[path], *adapters, scale)))
    replace_modules(base.model, plain)
    expected_loss, expected = step(base.model)
    expected = dict(tree_flatten(expected))
    assert abs(loss - expected_loss) < LEVEL * abs(expected_loss)
    assert set(expected) == {f"{path}.{name}" for path in specs for name in "ab"}
    for path in specs:
        for name, on_disk in (("a", "lora_a"), ("b", "lora_b")):
            found, wanted = ours[f"{path}.{on_disk}"], expected[f"{path}.{name}"]
            if name == "b" and len(specs[path].slices) > 1:  # block-diagonal
                wanted = wanted * (tensors[f"{path}.lora_b"] != 0)
            assert mx.isfinite(found).all().item(), path
            largest = mx.abs(wanted).max().item()
            assert largest > 0, f"{path}.{on_disk}: no gradient reaches it"
            assert mx.abs(found - wanted).max().item() <= LEVEL * largest, f"{path}.{on_disk}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_has_the_gradients_of_plain_lora_and_detaches(family):
    check(family, None)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "afm7"])  # mlx cannot quantize it
def test_a_step_on_packed_weights_has_the_gradients_of_plain_lora(family):
    check(family, 4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("base_path", ["transient", "dense"])
def test_base_paths_agree_and_detach(family, base_path):
    base = base_of(family, None if family == "afm7" else 4)
    before = base.model(TOKENS)
    attached = attach(base, LoRAConfig(rank=RANK), base_path=base_path)
    finite = mx.where(mx.isfinite(before), before, 0)  # some families mask unused tokens
    apart = mx.abs(mx.where(mx.isfinite(before), base.model(TOKENS), 0) - finite).max().item()
    assert apart < 1e-3 * mx.abs(finite).max().item()
    attached.detach()
    assert mx.array_equal(base.model(TOKENS), before).item()


def test_the_table_says_what_is_true_of_the_installed_mlx_lm():
    if IS_DOCUMENTED:
        assert DOCS.read_text() == table()
    assert len(DOCUMENTED) > 100 and set(UNTRAINABLE) <= set(DOCUMENTED)
    for family in UNTRAINABLE:
        assert DOCUMENTED[family] == "not supported"


@pytest.mark.parametrize("family", [f for f in UNTRAINABLE if f in architectures()])
def test_what_is_said_to_be_untrainable_is_refused_by_name_and_does_not_train(family, monkeypatch):
    if architectures()[family] is None:
        with pytest.raises(SystemExit):
            importlib.import_module(f"mlx_lm.models.{family}")
        return
    if family == "recurrent_gemma":  # cannot be frozen
        with pytest.raises(AttributeError, match="_no_grad"):
            base_of(family)
        return
    base = base_of(family)
    with pytest.raises(
        PackError, match=f"{family} cannot carry adapters: {re.escape(UNTRAINABLE[family])}"
    ):
        attach(base)
    monkeypatch.setattr(adapters, "check_trainable", lambda *_: None)
    said = {
        "bitnet": "No Metal back-end|no gradient|[Nn]ot implemented|no projection",
        "dbrx": "Attempting to eval an array",
        "deepseek_v41": "VJP with respect to indices",
        "muse_spark": "No Metal back-end|no gradient|[Nn]ot implemented",
        "prism_hadamard_qwen35": "no projection carries an adapter",
    }
    with pytest.raises((RuntimeError, ValueError, PackError), match=said[family]):
        check(family, None)


def test_a_family_whose_kernel_for_metal_has_no_gradient_is_refused_there_alone(monkeypatch):
    base = base_of("rwkv7")
    check_trainable("base", base.model)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with pytest.raises(PackError, match="rwkv7 cannot carry adapters: .*a CPU or CUDA trains it"):
        check_trainable("base", base.model)


def test_mistral_is_grouped_as_llama_is():
    from mlx_lm.utils import _get_classes

    model, _ = _get_classes({"model_type": "mistral"})
    assert model.__module__ == "mlx_lm.models.llama" and DOCUMENTED["llama"] == "grouped"


# ── experts ──────────────────────────────────────────────────────────────────────────────────────


def test_experts_routers_and_indexers_carry_adapters_only_where_named():
    base = base_of("deepseek_v32")
    attached = attach(base, LoRAConfig(rank=RANK))
    assert not any("switch_mlp" in p or "indexer" in p for p in attached.specs)
    assert any("shared_experts.up_proj" in p for p in attached.specs)
    assert attached.notes == [
        "experts carry adapters only where named: --target-modules down_proj,gate_proj,up_proj"
    ]
    attached.detach()
    attached = attach(base, LoRAConfig(rank=RANK, target_modules=("up_proj", "indexer.wk")))
    assert sum("switch_mlp.up_proj" in p for p in attached.specs) == 1
    assert sum("indexer.wk" in p for p in attached.specs) == 2 and attached.notes == []


def test_linears_narrower_than_the_rank_are_left_out_unless_named():
    base = base_of("qwen2_moe")
    attached = attach(base, LoRAConfig(rank=8))
    assert not any("shared_expert_gate" in p for p in attached.specs)
    assert "shared_expert_gate: narrower than rank 8, carry no adapter" in attached.notes
    attached.detach()
    with pytest.raises(PackError, match="shared_expert_gate is 64 x 1, so its rank can be at most"):
        attach(base, LoRAConfig(rank=8, target_modules=("shared_expert_gate",)))


def test_a_module_that_carries_no_adapter_is_named_with_its_type():
    with pytest.raises(PackError, match="embed_q: is of type MultiLinear and cannot carry"):
        attach(base_of("deepseek_v3"), LoRAConfig(target_modules=("embed_q",)))
    with pytest.raises(PackError, match="prediction_coefs: is of type Linear and cannot carry"):
        attach(base_of("gemma3n"), LoRAConfig(target_modules=("prediction_coefs",)))


def test_a_switch_linear_whose_tensors_contradict_is_named():
    base = base_of("qwen3_moe", 4)
    path = expert_paths(base.model)[0]
    module = dict(base.model.named_modules())[path]
    module.scales = module.scales[..., :1]
    for fallback in (False, True):
        with pytest.raises(PackError, match=rf"{re.escape(path)}: .* asks for scales \[4, "):
            attach(base, LoRAConfig(rank=RANK, target_modules=(path,)), fp16_fallback=fallback)


@pytest.mark.parametrize("bits", [None, 4])
def test_merged_experts_give_the_attached_forward(bits):
    from mlx_lm.models.switch_layers import SwitchLinear

    base = base_of("gpt_oss", bits)  # its experts have a bias
    attached = attach(base, LoRAConfig(rank=RANK, target_modules=expert_paths(base.model)))
    randomized(attached)
    expected, merged = base.model(TOKENS), attached.merged_weights()
    attached.detach()
    modules = dict(base.model.named_modules())
    replaced = []
    for path, weight in merged.items():
        experts, out, width = weight.shape
        linear = SwitchLinear(width, out, experts)
        linear.weight, linear.bias = weight, modules[path].bias
        replaced.append((path, linear))
    replace_modules(base.model, replaced)
    assert mx.abs(base.model(TOKENS) - expected).max().item() < 1e-5


@pytest.mark.parametrize("tokens", [5, 37])  # below 64 rows experts are not sorted
@pytest.mark.parametrize("family", ["qwen3_moe", "nemotron_h", "longcat_flash"])
def test_stock_mlx_lm_opens_a_pack_with_experts(family, tokens, tmp_path):
    from mlx_lm.tuner.utils import load_adapters

    base = base_of(family, 4)
    targets, path = targets_of(base), expert_paths(base.model)[0]
    attached = attach(base, LoRAConfig(rank=RANK, target_modules=targets))
    tensors = randomized(attached)
    experts, out, width = attached.merged_weights()[path].shape
    assert tensors[f"{path}.lora_a"].shape == (experts, RANK, width)
    assert tensors[f"{path}.lora_b"].shape == (experts, out, RANK)
    expected = base.model(TOKENS[:, :tokens])
    Pack.of(attached).save(tmp_path / "pack")
    attached.detach()
    pack = Pack.open(tmp_path / "pack")
    assert pack.specs == attached.specs and pack.specs[path].experts == experts
    again = pack.attach(base)
    assert mx.array_equal(base.model(TOKENS[:, :tokens]), expected).item()
    again.detach()
    model = load_adapters(base_of(family, 4).model, str(tmp_path / "pack"))
    assert mx.abs(model(TOKENS[:, :tokens]) - expected).max().item() < 1e-4


def test_train_inspect_apply_and_generate_with_experts(run, tmp_path):
    """The whole way on a checkpoint on disk, with recomputed blocks and dropout."""
    from mlx_lm.utils import save_config

    tiny, folder, pack = tiny_base_path(), tmp_path / "moe", tmp_path / "pack"
    folder.mkdir()
    for file in tiny.glob("*token*"):
        shutil.copy(file, folder)
    vocab = json.loads((tiny / "config.json").read_text())["vocab_size"]
    config = config_of("qwen3_moe") | {"vocab_size": vocab, "max_position_embeddings": 512}
    module = architectures()["qwen3_moe"]
    model = module.Model(module.ModelArgs.from_dict(config))
    nn.quantize(model, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    model.save_weights(str(folder / "model.safetensors"))
    save_config(config | {"quantization": {"group_size": 32, "bits": 4}}, folder / "config.json")

    options = (
        "--iters 2 --batch-size 2 --max-seq-length 64 --rank 2 --dropout 0.1 --grad-checkpoint"
    )
    options += " --target-modules q_proj,up_proj,down_proj --base-path quantized --json"
    data = write_rows(tmp_path / "data", train=[{"text": "one two"}] * 4, valid=[{"text": "one"}])
    code, out, err = run(
        "train", "--model", folder, "--data", data, "--out", pack, *options.split()
    )
    assert code == 0, err
    code, out, err = run("inspect", pack, "--json")
    modules = {m["path"]: m for m in json.loads(out)["adapters"]["modules"]}
    assert modules["model.layers.1.mlp.switch_mlp.up_proj"]["experts"] == SIZES["num_experts"]
    assert "experts" not in modules["model.layers.1.self_attn.q_proj"]
    code, out, err = run("apply", pack, "--model", folder, "--dry-run", "--json")
    assert code == 0 and json.loads(out)["geometry"] == "checked", err
    code, out, err = run(
        "generate", "--model", folder, "--pack", pack, "--prompt", "a", "--max-tokens", 3, "--raw"
    )
    assert code == 0, err

    manifest = json.loads((pack / "pack.json").read_text())
    for entry in manifest["adapters"]["modules"]:
        if "experts" in entry:
            entry["experts"] = 5
    (pack / "pack.json").write_text(json.dumps(manifest))
    code, out, err = run("apply", pack, "--model", folder, "--dry-run")
    assert code == 2 and "manifest says" in err and "Traceback" not in err
