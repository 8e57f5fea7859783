"""Methods beside PEFT's own, on one small model: what they begin with, logits and gradients."""

import shutil

import mlx.nn as nn
import numpy as np
import pytest

from mlx_packs import Pack, load_base
from mlx_packs.adapters.method import find_method
from mlx_packs.adapters.saved_modules import attach_method
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.convert.interop import export_pack, import_adapter
from mlx_packs.packs.making import pack_of
from mlx_packs.runtime import mx

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]
TOKENS = [list(range(7, 39)), list(range(90, 122))]
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
RANK, ALPHA = 4, 6.0
PEFT_OPTIONS = {
    "lora": {},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama of transformers, with biases, and its tokenizer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        vocab_size=4096,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("methods") / "llama"
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint() / file, folder)
    return folder


def in_peft(checkpoint, **options):
    """The same model with PEFT's adapters."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM", **options
    )
    return get_peft_model(model, config).eval()


def here(checkpoint, method: str):
    """The same base with our adapters."""
    base = load_base(checkpoint)
    lora = LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=TARGETS)
    train = TrainConfig(method=method)
    return base, find_method(method).attach(base, lora, train, "quantized")


def parameters_of(trainable) -> dict[str, mx.array]:
    """What is trained, by PEFT's names."""
    named = {}
    for path, slot in trainable.slots.items():
        named[f"{path}.lora_A"] = slot.lora.lora_a[slot.first].T
        named[f"{path}.lora_B"] = slot.lora.lora_b[slot.first].T
        if trainable.method == "dora":
            named[f"{path}.lora_magnitude_vector"] = slot.lora.magnitude[slot.first]
    return named


def set_parameters(trainable, named) -> None:
    for path, slot in trainable.slots.items():
        slot.lora.lora_a[slot.first] = named[f"{path}.lora_A"].T
        slot.lora.lora_b[slot.first] = named[f"{path}.lora_B"].T
        if trainable.method == "dora":
            slot.lora.magnitude[slot.first] = named[f"{path}.lora_magnitude_vector"]


def torch_parameters(model) -> dict:
    """The trained parameters of a model with PEFT's adapters."""
    return {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@pytest.mark.parametrize("method", PEFT_OPTIONS)
def test_a_method_is_that_of_peft(checkpoint, method):
    import torch

    base, trainable = here(checkpoint, method)
    model = in_peft(checkpoint, **PEFT_OPTIONS[method])
    theirs, tokens = torch_parameters(model), torch.tensor(TOKENS)
    ours = parameters_of(trainable)
    assert {n: tuple(p.shape) for n, p in theirs.items()} == {n: p.shape for n, p in ours.items()}
    if method in ("pissa", "olora"):  # factors of either sign
        for path in trainable.slots:
            a, b = (theirs[f"{path}.lora_{x}"].detach().numpy() for x in "AB")
            product = np.array(ours[f"{path}.lora_B"] @ ours[f"{path}.lora_A"])
            np.testing.assert_allclose(product, b @ a, atol=1e-4)
    with torch.no_grad():
        begun = model(tokens).logits.numpy()
    np.testing.assert_allclose(np.array(base.model(mx.array(TOKENS))), begun, atol=1e-4)

    mx.random.seed(5)
    moved = {n: p + 0.1 * mx.random.normal(p.shape) for n, p in ours.items()}
    for name, parameter in theirs.items():
        parameter.data = torch.tensor(np.array(moved[name]))
    loss = model(tokens, labels=tokens).loss
    loss.backward()

    def our_loss(named):
        set_parameters(trainable, named)
        logits = base.model(mx.array(TOKENS))[:, :-1]
        return nn.losses.cross_entropy(logits, mx.array(TOKENS)[:, 1:], reduction="mean")

    base.model.train()
    value, gradients = mx.value_and_grad(our_loss)(moved)
    assert value.item() == pytest.approx(loss.item(), abs=1e-4)
    for name, parameter in theirs.items():
        np.testing.assert_allclose(np.array(gradients[name]), parameter.grad.numpy(), atol=1e-4)


@pytest.mark.parametrize("method", PEFT_OPTIONS)
def test_an_export_of_a_method_has_the_same_logits_in_peft(checkpoint, method, tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, trainable = here(checkpoint, method)
    moved = {
        n: t + 0.05 * mx.random.normal(t.shape) * (t.size > 1)
        for n, t in trainable.tensors().items()
    }
    trainable.load(moved, "test")
    expected = np.array(base.model(mx.array(TOKENS)))
    pack = pack_of(trainable).save(tmp_path / "pack")
    trainable.detach()
    export_pack(pack, "peft", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(model, str(tmp_path / "out")).eval()
    with torch.no_grad():
        logits = loaded(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_rslora_has_the_scale_of_peft(checkpoint):
    model = in_peft(checkpoint, use_rslora=True)
    scaling = (getattr(m, "scaling", None) for m in model.modules())
    scales = {each["default"] for each in scaling if isinstance(each, dict)}
    base = load_base(checkpoint)
    lora = LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=TARGETS, rslora=True)
    trainable = find_method("lora").attach(base, lora, TrainConfig(), "quantized")
    ours = {part.scale for spec in trainable.specs.values() for part in spec.slices}
    assert sorted(ours) == pytest.approx(sorted(scales))


PLACES = {  # targets and modules to save; PEFT takes the ends of paths without their dots
    "embedding": (("embed_tokens", "q_proj"), ()),
    "head": (("lm_head", "q_proj"), ()),
    "saved": (("q_proj", "v_proj"), ("embed_tokens", "lm_head", "model.norm", "o_proj")),
    "tied embedding": (("embed_tokens", "q_proj"), ()),
    "tied saved": (("q_proj",), ("embed_tokens", "model.norm")),
}


@pytest.fixture(scope="module")
def tied_checkpoint(checkpoint, tmp_path_factory):
    """The same with one table."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(checkpoint, tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("methods") / "tied"
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint() / file, folder)
    return folder


@pytest.fixture(params=PLACES)
def place(request, checkpoint, tied_checkpoint):
    """A checkpoint, targets and modules to save."""
    return tied_checkpoint if "tied" in request.param else checkpoint, *PLACES[request.param]


def with_places(folder, targets, saved):
    """A base with adapters and saved modules, their trainable, and its arrays by name on disk."""
    lora = LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=targets, modules_to_save=saved)
    base = load_base(folder)
    trainable = attach_method(base, lora, TrainConfig(), "quantized")
    arrays = {}
    for path, slot in getattr(trainable, "adapters", trainable).slots.items():
        arrays[f"{path}.lora_a"] = slot.lora.lora_a, slot.first
        arrays[f"{path}.lora_b"] = slot.lora.lora_b, slot.first
    for name, each in getattr(trainable, "_copies", {}).items():
        arrays[name] = each.module, each.key
    return base, trainable, arrays


def named_as_here(model) -> dict:
    """PEFT's trained parameters, laid out and named as on disk here; of a tied head none."""
    import torch

    named = {}
    for name, parameter in torch_parameters(model).items():
        path, _, part = name.removesuffix(".default").partition(".lora_")
        if path == "lm_head" and model.config.tie_word_embeddings:
            continue
        if part:
            named[f"{path}.lora_{part[-1].lower()}"] = parameter, torch.t
        else:
            full = name.replace(".modules_to_save", "").replace(".default", "")
            full += "" if full.endswith((".weight", ".bias")) else ".weight"
            named[full] = parameter, lambda tensor: tensor
    return named


def test_embeddings_and_saved_modules_are_those_of_peft(place):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder, targets, saved = place
    base, trainable, arrays = with_places(*place)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tied = model.config.tie_word_embeddings
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=list(targets),
        modules_to_save=list(saved) or None,
        task_type="CAUSAL_LM",
        ensure_weight_tying=tied,
    )
    model = get_peft_model(model, config).eval()
    theirs, ours, tokens = named_as_here(model), trainable.tensors(), torch.tensor(TOKENS)
    assert {n: tuple(turn(p).shape) for n, (p, turn) in theirs.items()} == {
        n: t.shape for n, t in ours.items()
    }
    for name, (parameter, turn) in theirs.items():  # how each begins: zero, random, the base's own
        if name == "model.embed_tokens.lora_b":
            if tied:  # PEFT begins it as A of the head, which has the same memory
                continue
            stds = turn(parameter).std().item(), ours[name].square().mean().sqrt().item()
            assert stds == (pytest.approx(1, abs=0.15), pytest.approx(1, abs=0.15))
        elif "embed_tokens" in name or ".lora_" not in name or name.endswith("lora_b"):
            np.testing.assert_allclose(np.array(ours[name]), turn(parameter).detach(), atol=1e-6)
    with torch.no_grad():
        begun = model(tokens).logits.numpy()
    np.testing.assert_allclose(np.array(base.model(mx.array(TOKENS))), begun, atol=1e-4)

    mx.random.seed(5)
    moved = {n: p + 0.1 * mx.random.normal(p.shape) for n, p in ours.items()}
    for name, (parameter, turn) in theirs.items():  # in place: a tied head has the same memory
        parameter.data.copy_(turn(torch.tensor(np.array(moved[name]))))
    loss = model(tokens, labels=tokens).loss
    loss.backward()

    def our_loss(named):
        for name, (owner, key) in arrays.items():
            owner[key] = named[name]
        logits = base.model(mx.array(TOKENS))[:, :-1]
        return nn.losses.cross_entropy(logits, mx.array(TOKENS)[:, 1:], reduction="mean")

    base.model.train()
    value, gradients = mx.value_and_grad(our_loss)(moved)
    assert value.item() == pytest.approx(loss.item(), abs=1e-4)
    everything = torch_parameters(model)
    for name, (parameter, turn) in theirs.items():
        gradient = turn(parameter.grad)
        if tied and name.startswith("model.embed_tokens.lora_"):  # PEFT has two parameters there
            other = "lm_head.lora_B" if name.endswith("a") else "lm_head.lora_A"
            of_head = everything[other].grad
            gradient = gradient + of_head
        np.testing.assert_allclose(np.array(gradients[name]), gradient.numpy(), atol=1e-4)


def test_exports_of_embeddings_and_saved_modules_open_in_peft(place, tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, *_ = place
    base, trainable, _ = with_places(*place)
    moved = {
        n: t + 0.05 * mx.random.normal(t.shape, key=mx.random.key(i))
        for i, (n, t) in enumerate(trainable.tensors().items())
    }
    trainable.load(moved, "test")
    expected = np.array(base.model(mx.array(TOKENS)))
    pack = pack_of(trainable).save(tmp_path / "pack")
    trainable.detach()
    export_pack(pack, "peft", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(model, str(tmp_path / "out")).eval()
    with torch.no_grad():
        logits = loaded(torch.tensor(TOKENS)).logits.numpy()
        np.testing.assert_allclose(logits, expected, atol=1e-4)
    loaded.save_pretrained(tmp_path / "theirs")  # and what PEFT writes opens here
    import_adapter(tmp_path / "theirs", tmp_path / "back", folder)
    base = load_base(folder)
    with base.applied(Pack.open(tmp_path / "back")):
        ours = np.array(base.model(mx.array(TOKENS)))
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    if "lm_head" in dict(base.model.named_modules()):  # PEFT adds to a tied table twice
        with torch.no_grad():
            merged = loaded.merge_and_unload()(torch.tensor(TOKENS)).logits.numpy()
        np.testing.assert_allclose(merged, expected, atol=1e-4)
