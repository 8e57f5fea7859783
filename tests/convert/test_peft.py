"""Packs beside peft and transformers themselves: the same logits in fp32, both ways."""

import copy
import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from mlx import nn
from mlx_lm.utils import MODEL_REMAPPING

from mlx_packs import Pack, PackError, load_base
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.bases.geometry import is_router
from mlx_packs.config.choices import architecture_of
from mlx_packs.config.schema import DataConfig
from mlx_packs.convert import peft as peft_format
from mlx_packs.convert.interop import export_pack, import_adapter
from mlx_packs.data.encoding import encode
from mlx_packs.data.formats import COMPLETION, Row
from mlx_packs.data.labels import SINGLE, Classes
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.quantized import QUANTIZED
from mlx_packs.packs.making import untrained_pack
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import attached_logits
from tests.helpers.packs import random_pack

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]
TOKENS = range(1, 33)
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = ("qwen3", "gpt2", "tied")


@pytest.fixture(scope="module", params=FAMILIES)
def transformers_base(request, tmp_path_factory) -> Path:
    """A checkpoint that transformers made; its name is the family's."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    tied = request.param == "tied"

    if request.param == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128}
        sizes |= {"vocab_size": 4096, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    else:
        config = transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=tied)
        model = transformers.Qwen3ForCausalLM(config)

    folder = tmp_path_factory.mktemp("peft") / request.param
    for parameter in model.parameters():  # norms and biases too
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.to(torch.float32).save_pretrained(folder)

    if request.param == "gpt2":  # mlx-lm knows the names of the official files alone
        file = str(folder / "model.safetensors")
        named = {n.removeprefix("transformer."): t for n, t in mx.load(file).items()}
        mx.save_safetensors(file, named, {"format": "pt"})
        stated = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**stated, "n_ctx": 128}))

    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint() / file, folder)
    return folder


def transformers_model(folder: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_there(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(TOKENS)])).logits.numpy()


def with_peft(folder: Path, adapter: Path) -> np.ndarray:
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(transformers_model(folder), str(adapter)).eval()
    return logits_there(loaded)


TARGETS = {"gpt2": ("c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_a_folder_from_here_has_the_same_logits_in_peft(transformers_base, tmp_path):
    targets = TARGETS.get(transformers_base.name, ALL)
    pack = random_pack(load_base(transformers_base), targets=targets).save(tmp_path / "pack")
    export_pack(pack, "peft", tmp_path / "out")
    expected = attached_logits(pack, transformers_base)
    there = with_peft(transformers_base, tmp_path / "out")
    assert np.abs(there - logits_there(transformers_model(transformers_base))).max() > 0.05
    assert np.abs(there - expected).max() < 1e-4


@pytest.mark.parametrize("transformers_base", ["qwen3"], indirect=True)
def test_over_the_dequantized_base_of_a_4_bit_pack_too(transformers_base, tmp_path):
    import torch

    loaded = load_base(transformers_base, quantize="affine4")
    pack = random_pack(loaded, targets=ALL).save(tmp_path / "pack")
    export_pack(pack, "peft", tmp_path / "out")
    there = transformers_model(transformers_base)
    state = there.state_dict()
    for path, module in loaded.model.named_modules():
        if isinstance(module, QUANTIZED):
            weight = np.array(frozen_weight(module).dense().astype(mx.float32))
            state[f"{path}.weight"] = torch.tensor(weight)
    there.load_state_dict(state)
    there.save_pretrained(tmp_path / "dense")
    result = with_peft(tmp_path / "dense", tmp_path / "out")
    assert np.abs(result - attached_logits(pack, transformers_base)).max() < 1e-4


def peft_folder(base: Path, out: Path, **options) -> np.ndarray:
    """An adapter that peft made and saved, with random factors; its logits."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    gpt2 = base.name == "gpt2"
    config = LoraConfig(
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        fan_in_fan_out=gpt2,
        **{"r": 4, "lora_alpha": 6, "target_modules": list(TARGETS.get(base.name, ALL)), **options},
    )
    model = get_peft_model(transformers_model(base), copy.deepcopy(config)).eval()
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name or "magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.rand_like(parameter)
    model.save_pretrained(out)
    return logits_there(model)


CASES = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2, "c_fc": 3}, "alpha_pattern": {"up_proj": 9}},
    "last layer": {"layers_to_transform": [1]},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_from_peft_has_the_same_logits_here(case, transformers_base, tmp_path):
    options = dict(CASES[case])
    if case == "last layer":
        options["layers_pattern"] = "h" if transformers_base.name == "gpt2" else "layers"
    theirs = peft_folder(transformers_base, tmp_path / "in", **options)
    import_adapter(tmp_path / "in", tmp_path / "pack", transformers_base)
    pack = Pack.open(tmp_path / "pack")
    assert np.abs(attached_logits(pack, transformers_base) - theirs).max() < 1e-4
    export_pack(pack, "peft", tmp_path / "out")  # and back again
    assert np.abs(with_peft(transformers_base, tmp_path / "out") - theirs).max() < 1e-4


def test_modules_to_save_and_embeddings_of_peft(transformers_base, tmp_path):
    table = "embed_tokens"
    targets = [*ALL, table]
    whole = ["lm_head", "norm"]
    if transformers_base.name == "gpt2":  # a square Conv1D and one that is not come whole
        table = "wte"
        targets = ["c_attn", "mlp.c_fc", table]
        whole = ["ln_f", "attn.c_proj", "mlp.c_proj"]
    elif transformers_base.name == "tied":
        whole = ["norm"]

    options = {"target_modules": targets, "modules_to_save": whole}
    theirs = peft_folder(transformers_base, tmp_path / "in", **options)
    import_adapter(tmp_path / "in", tmp_path / "pack", transformers_base)
    pack = Pack.open(tmp_path / "pack")

    kinds = {path: spec.kind for path, spec in pack.specs.items()}
    assert kinds[f"model.{table}"] == "embedding" and len(pack.manifest["adapters"]["replaced"])
    assert np.abs(attached_logits(pack, transformers_base) - theirs).max() < 1e-4

    export_pack(pack, "peft", tmp_path / "out")
    assert np.abs(with_peft(transformers_base, tmp_path / "out") - theirs).max() < 1e-4


# of encoders, which mlx-lm has not: test_encoder_interop.py
@pytest.mark.parametrize(
    "family", [f for f in peft_format._SAME_NAMES if architecture_of(f) == "decoder"]
)
def test_mlx_lm_and_transformers_name_modules_alike(family):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    some = {"num_experts": 4, "num_local_experts": 4, "head_dim": 128} if "mo" in family else {}
    config = AutoConfig.for_model(family, num_hidden_layers=1, **some)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    there = {n for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    sizes = {**config.to_dict(), **(getattr(config, "rope_parameters", None) or {}), **some}
    sizes |= {"n_ctx": 1024, "num_attention_heads": config.num_attention_heads}
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(family, family)}")
    here = module.Model(module.ModelArgs.from_dict(sizes))
    ours = {n for n, m in here.named_modules() if isinstance(m, nn.Linear) and not is_router(n)}
    assert {peft_format.path_there(path, family) for path in ours} <= there and ours


def with_head(folder: Path, out: Path, labels: int, **facts):
    """A base, a pack on it with a head of ``labels``, its export, and that opened by PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = load_base(folder)
    base.tokenizer = load_base("tiny").tokenizer  # the same, with a chat template
    pack = random_pack(base, targets=TARGETS.get(folder.name, ALL))
    weight = mx.random.normal((labels, 64), key=mx.random.key(5))
    pack = untrained_pack(base, pack.specs, pack.tensors, {"score.weight": weight}, **facts)

    report = export_pack(pack.save(out / "pack"), "peft", out / "out")
    config = json.loads((out / "out" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert any(f"num_labels={labels}" in note for note in report["notes"])
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=labels, dtype=torch.float32
    )
    return base, pack, PeftModel.from_pretrained(model, str(out / "out")).eval()


def test_a_reward_model_has_the_same_scores_in_peft(transformers_base, tmp_path):
    import torch

    base, pack, there = with_head(transformers_base, tmp_path, 1)
    rows = [{"prompt": "Say red.", "completion": c} for c in ("red.", "No, blue it is.")]
    scores = base.rewards(rows, pack)
    places = [Row(f"f:{i}", row) for i, row in enumerate(rows)]
    encoded = encode(places, base.tokenizer, DataConfig(), row_format=COMPLETION)
    for example, score in zip(encoded.items, scores, strict=True):
        with torch.no_grad():
            logits = there(torch.tensor([example.tokens.tolist()])).logits
        assert logits.shape == (1, 1) and abs(logits.item() - score) < 1e-4
    assert abs(scores[0] - scores[1]) > 1e-3

    import_adapter(tmp_path / "out", tmp_path / "back", transformers_base)
    (tmp_path / "out" / "mlx_packs.json").unlink()  # as PEFT itself would write it
    import_adapter(tmp_path / "out", tmp_path / "read", transformers_base)
    for name in ("back", "read"):
        again = base.rewards(rows, Pack.open(tmp_path / name))
        np.testing.assert_allclose(again, scores, atol=1e-4)


def test_a_classifier_has_the_same_logits_in_peft(transformers_base, tmp_path):
    """PEFT opens the head and the adapters; what PEFT wrote itself is a classifier here."""
    import torch

    classes = Classes(SINGLE, ("red", "green", "blue"), temperature=2.0)
    base, pack, there = with_head(transformers_base, tmp_path, 3, classifier=classes.to_json())

    texts = ["Say red.", "No, blue it is."]
    for text, prediction in zip(texts, base.classify(texts, pack), strict=True):
        with torch.no_grad():
            logits = there(torch.tensor([base.tokenizer.encode(text)])).logits
        likely = torch.softmax(logits[0] / 2.0, 0).tolist()
        ours = [prediction.probabilities[label] for label in classes.labels]
        np.testing.assert_allclose(ours, likely, atol=1e-4)

    import_adapter(tmp_path / "out", tmp_path / "back", transformers_base)
    assert Pack.open(tmp_path / "back").manifest["classifier"] == classes.to_json()
    there.save_pretrained(tmp_path / "theirs")
    names = ["a", "b", "c"]
    import_adapter(tmp_path / "theirs", tmp_path / "read", transformers_base, labels=names)
    for name, labels in (("back", classes.labels), ("read", names)):
        again = base.classify(texts, tmp_path / name)
        order = np.argsort([labels.index(each.label) for each in again])
        first = np.argsort([classes.labels.index(p.label) for p in base.classify(texts, pack)])
        assert order.tolist() == first.tolist()

    with pytest.raises(PackError, match="3 outputs"):
        import_adapter(tmp_path / "theirs", tmp_path / "no", transformers_base, labels=["a"])
    import_adapter(tmp_path / "theirs", tmp_path / "unnamed", transformers_base)
    labels = Pack.open(tmp_path / "unnamed").manifest["classifier"]["labels"]
    assert labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
