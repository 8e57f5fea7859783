"""Methods beside PEFT's own, on one small model: what they begin with, logits and gradients."""

import shutil

import mlx.nn as nn
import numpy as np
import pytest

from mlx_packs import Pack, load_base
from mlx_packs.adapters.saved_modules import attach_method
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.convert.interop import export_pack, import_adapter
from mlx_packs.packs.making import pack_of
from mlx_packs.runtime import mx
from tests.helpers.errors import raises

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
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(0)

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    more = {"vocab_size": 4096, "max_position_embeddings": 128, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(attention_bias=True, **sizes, **heads, **more)
    model = transformers.LlamaForCausalLM(config).to(torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)

    folder = tmp_path_factory.mktemp("methods") / "llama"
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint() / file, folder)
    return folder


def dense_in_torch(folder):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def in_peft(folder, targets=TARGETS, **options):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(targets), task_type="CAUSAL_LM", **options
    )
    return get_peft_model(dense_in_torch(folder), config).eval()


def here(folder, targets=TARGETS, saved=(), method="lora", **lora):
    """A base, what is trained on it, and the owner and key of each array by its name on disk."""
    lora = LoRAConfig(RANK, ALPHA, target_modules=targets, modules_to_save=saved, **lora)
    base = load_base(folder)
    trainable = attach_method(base, lora, TrainConfig(method=method), "quantized")
    arrays = {}
    for path, place in getattr(trainable, "adapters", trainable).places.items():
        arrays[f"{path}.lora_a"] = place.lora.lora_a, place.first
        arrays[f"{path}.lora_b"] = place.lora.lora_b, place.first
        if method == "dora":
            arrays[f"{path}.m"] = place.lora.magnitude, place.first
    for name, each in getattr(trainable, "_weights", {}).items():
        arrays[name] = each.module, each.key
    return base, trainable, arrays


def torch_parameters(model) -> dict:
    return {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def named_as_here(model) -> dict:
    """PEFT's trained parameters by our names, and what gives them our layout; of a tied head none."""
    import torch

    named = {}
    for name, parameter in torch_parameters(model).items():
        path, _, part = name.removesuffix(".default").partition(".lora_")
        if path == "lm_head" and model.config.tie_word_embeddings:
            continue
        if part == "magnitude_vector":
            named[f"{path}.m"] = parameter, lambda tensor: tensor
        elif part:
            named[f"{path}.lora_{part[-1].lower()}"] = parameter, torch.t
        else:
            full = name.replace(".modules_to_save", "").replace(".default", "")
            full += "" if full.endswith((".weight", ".bias")) else ".weight"
            named[full] = parameter, lambda tensor: tensor
    return named


def logits_here(base) -> np.ndarray:
    return np.array(base.model(mx.array(TOKENS)))


def logits_in(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def check_same_shapes(arrays, theirs) -> None:
    assert {n: tuple(turn(p).shape) for n, (p, turn) in theirs.items()} == {
        n: owner[key].shape for n, (owner, key) in arrays.items()
    }


def check_gradients(base, arrays, model) -> None:
    """Once all that is trained has moved, the loss and its gradients are PEFT's."""
    import torch

    theirs, tokens = named_as_here(model), torch.tensor(TOKENS)
    mx.random.seed(5)
    moved = {
        name: owner[key] + 0.1 * mx.random.normal(owner[key].shape)
        for name, (owner, key) in arrays.items()
    }
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
    everything, tied = torch_parameters(model), model.config.tie_word_embeddings
    for name, (parameter, turn) in theirs.items():
        gradient = turn(parameter.grad)
        if tied and name.startswith("model.embed_tokens.lora_"):  # PEFT has two parameters there
            other = "lm_head.lora_B" if name.endswith("a") else "lm_head.lora_A"
            gradient = gradient + everything[other].grad
        np.testing.assert_allclose(np.array(gradients[name]), gradient.numpy(), atol=1e-4)


def exported(base, trainable, folder, out):
    """The logits here with other values in all that is trained, and its export in PEFT."""
    from peft import PeftModel

    moved = {
        n: t + 0.05 * mx.random.normal(t.shape, key=mx.random.key(i)) * (t.size > 1)
        for i, (n, t) in enumerate(trainable.tensors().items())
    }
    trainable.load(moved, "test")
    logits = logits_here(base)
    pack = pack_of(trainable).save(out / "pack")
    trainable.detach()
    export_pack(pack, "peft", out / "out")
    return logits, PeftModel.from_pretrained(dense_in_torch(folder), str(out / "out")).eval()


@pytest.mark.parametrize("method", PEFT_OPTIONS)
def test_a_method_is_that_of_peft(checkpoint, method):
    base, trainable, arrays = here(checkpoint, method=method)
    model = in_peft(checkpoint, **PEFT_OPTIONS[method])
    theirs = named_as_here(model)
    check_same_shapes(arrays, theirs)
    if method in ("pissa", "olora"):  # factors of either sign
        for path, place in trainable.places.items():
            a, b = (theirs[f"{path}.lora_{x}"][0].detach().numpy() for x in "ab")
            product = place.lora.lora_a[place.first] @ place.lora.lora_b[place.first]
            np.testing.assert_allclose(np.array(product).T, b @ a, atol=1e-4)
    np.testing.assert_allclose(logits_here(base), logits_in(model), atol=1e-4)
    check_gradients(base, arrays, model)


@pytest.mark.parametrize("method", PEFT_OPTIONS)
def test_an_export_of_a_method_has_the_same_logits_in_peft(checkpoint, method, tmp_path):
    base, trainable, _ = here(checkpoint, method=method)
    expected, model = exported(base, trainable, checkpoint, tmp_path)
    np.testing.assert_allclose(logits_in(model), expected, atol=1e-4)


def test_rslora_has_the_scale_of_peft(checkpoint):
    model = in_peft(checkpoint, use_rslora=True)
    scaling = (getattr(m, "scaling", None) for m in model.modules())
    scales = {each["default"] for each in scaling if isinstance(each, dict)}
    _, trainable, _ = here(checkpoint, rslora=True)
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
    return tied_checkpoint if "tied" in request.param else checkpoint, *PLACES[request.param]


def test_embeddings_and_saved_modules_are_those_of_peft(place):
    folder, targets, saved = place
    base, _, arrays = here(*place)
    tied = base.config["tie_word_embeddings"]
    model = in_peft(folder, targets, modules_to_save=list(saved) or None, ensure_weight_tying=tied)
    theirs = named_as_here(model)
    check_same_shapes(arrays, theirs)

    for name, (parameter, turn) in theirs.items():  # how each begins: zero, random, the base's own
        owner, key = arrays[name]
        if name == "model.embed_tokens.lora_b":
            if tied:  # PEFT begins it as A of the head, which has the same memory
                continue
            stds = turn(parameter).std().item(), owner[key].square().mean().sqrt().item()
            assert stds == (pytest.approx(1, abs=0.15), pytest.approx(1, abs=0.15))
        elif "embed_tokens" in name or ".lora_" not in name or name.endswith("lora_b"):
            np.testing.assert_allclose(np.array(owner[key]), turn(parameter).detach(), atol=1e-6)

    np.testing.assert_allclose(logits_here(base), logits_in(model), atol=1e-4)
    check_gradients(base, arrays, model)


def test_exports_of_embeddings_and_saved_modules_open_in_peft(place, tmp_path):
    folder, *_ = place
    base, trainable, _ = here(*place)
    if base.config["tie_word_embeddings"]:
        with raises("unsupported", None, "also the head"):
            exported(base, trainable, folder, tmp_path)
        return

    expected, model = exported(base, trainable, folder, tmp_path)
    np.testing.assert_allclose(logits_in(model), expected, atol=1e-4)
    model.save_pretrained(tmp_path / "theirs")  # and what PEFT writes opens here
    import_adapter(tmp_path / "theirs", tmp_path / "back", folder)
    base = load_base(folder)
    with base.applied(Pack.open(tmp_path / "back")):
        np.testing.assert_allclose(logits_here(base), expected, atol=1e-4)
    np.testing.assert_allclose(logits_in(model.merge_and_unload()), expected, atol=1e-4)
