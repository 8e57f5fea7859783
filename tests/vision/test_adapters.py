"""Packs on language models that take images, opened by mlx-vlm and PEFT; gradients are theirs."""

from functools import cache

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_packs import LoRAConfig, TrainConfig, load_base, train_pack
from mlx_packs.adapters.attach import attach
from mlx_packs.bases.families import VISION_FAMILIES, path_from, path_in
from mlx_packs.bases.turns import IMAGE_MARK, encode_conversation, render_conversation
from mlx_packs.bases.writer import quantize
from mlx_packs.convert.interop import export_pack, import_adapter
from mlx_packs.convert.merge import merge_pack
from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.token_store import Example
from mlx_packs.packs.pack import Pack
from mlx_packs.runtime import mx
from mlx_packs.vision.pictures import ImageSource
from tests.helpers.errors import raises
from tests.helpers.rows import chat
from tests.helpers.variants import nightly_except
from tests.vision.inputs import chats, inputs_of_mlx_vlm, inputs_of_transformers, picture
from tests.vision.test_models import MECHANISMS, loss_and_gradients
from tests.vision.test_runs import TRAIN

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:At least one mel filter"),  # of Gemma 4's processor of sound
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),  # PEFT's use
]

FAMILIES = list(VISION_FAMILIES)
# In mlx-vlm every token of Gemma 3 sees all others, and mlx-vlm fails to freeze Gemma 4's tower of
# sound, so that it opens no adapter on that.
IN_MLX_VLM = [family for family in FAMILIES if family not in ("gemma3", "gemma4")]
# Of the largest logit; the states of Gemma 4 are large.
ROUNDING = {"gemma4": 5e-4}
TARGETS = 6
PICTURE = (0, 84, 112)


@pytest.fixture(scope="module")
def trained(folder_of, tmp_path_factory):
    """Trains a pack on each family once; returns the folders of its base and of the pack."""

    @cache
    def of(family):
        folder, base = tmp_path_factory.mktemp(family), folder_of(family)
        data = chats(folder / "data")
        train = TrainConfig(**(TRAIN | {"learning_rate": 0.05}))
        train_pack(base, data, LoRAConfig(rank=2), train, folder / "pack", progress=False)
        return base, folder / "pack"

    return of


def conversation() -> list[dict]:
    question, answer = chat(f"{IMAGE_MARK} What is it?", "It is that.")["messages"]
    return [{**question, "images": [ImageSource(picture(*PICTURE))]}, answer]


def as_in_mlx_vlm(base, processor) -> tuple[mx.array, mx.array, dict]:
    text = render_conversation(base.tokenizer, conversation())
    return inputs_of_mlx_vlm(base, processor, text, [picture(*PICTURE)])


def loss_and_gradients_here(base, pack) -> tuple[float, dict[str, mx.array]]:
    """The loss of the conversation with a pack, and the gradients of its tensors, by their names."""
    opened = Pack.open(pack)
    attached = attach(base, specs=opened.specs)
    attached.load(opened.load_tensors(), "pack")
    ids = np.array(encode_conversation(base.tokenizer, conversation()), np.int32)
    example = Example(ids, np.arange(len(ids)) >= len(ids) - TARGETS, "x")
    base.model.train()

    loss, gradients = loss_and_gradients(base.model, TokenCollate(1, 512)([example], [0]))
    base.model.update(tree_unflatten(list(gradients.items())))
    return loss, attached.tensors()


@pytest.mark.parametrize("family", nightly_except(IN_MLX_VLM, *MECHANISMS, often_is=()))
def test_mlx_vlm_opens_a_pack_with_the_same_loss_and_gradients(family, trained, tmp_path):
    from mlx_vlm.utils import load

    folder, pack = trained(family)
    base = load_base(folder)
    exported = tmp_path / "adapter"
    export_pack(Pack.open(pack), "mlx-lm", exported)

    loss, ours = loss_and_gradients_here(base, pack)

    model, processor = load(str(folder), adapter_path=str(exported))
    tokens, pixels, others = as_in_mlx_vlm(base, processor)

    def their_loss(model) -> mx.array:
        embedded = model.get_input_embeddings(tokens, pixels, mask=None, **others)
        named = {k: v for k, v in embedded.to_dict().items() if v is not None}
        logits = model.language_model(tokens, **named).logits[0]
        return nn.losses.cross_entropy(logits[:-1], tokens[0, 1:])[-TARGETS:].sum()

    value, theirs = nn.value_and_grad(model, their_loss)(model)
    assert loss == pytest.approx(value.item(), rel=1e-5)
    theirs = {
        path_from(name, family, "mlx-vlm"): gradient for name, gradient in tree_flatten(theirs)
    }
    largest = max(mx.abs(gradient).max().item() for gradient in theirs.values())
    assert set(ours) == set(theirs)
    for name, gradient in theirs.items():
        assert mx.abs(ours[name] - gradient).max().item() <= 1e-5 * largest, name


@pytest.mark.parametrize("family", nightly_except(FAMILIES, *MECHANISMS, often_is=()))
def test_peft_opens_a_pack_with_the_same_logits_and_gradients(family, trained, tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    folder, pack = trained(family)
    base = load_base(folder)
    exported = tmp_path / "adapter"
    export_pack(Pack.open(pack), "peft", exported)

    plain = logits_of(base)
    with base.applied(pack):
        ours = logits_of(base)
        tokens = encode_conversation(base.tokenizer, conversation())
    assert np.abs(ours - plain).max() > 1e-2

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(exported), is_trainable=True).eval()
    image = base.tokenizer._images.token
    ids = [[image if token < 0 else token for token in tokens]]
    inputs = inputs_of_transformers(base, ids, [picture(*PICTURE)])
    logits = model(**inputs).logits
    theirs = logits.detach().numpy()
    allowed = ROUNDING.get(family, 1e-4)
    assert np.abs(ours - theirs).max() <= allowed * np.abs(theirs).max()

    loss = torch.nn.functional.cross_entropy(
        logits[0, -TARGETS - 1 : -1], inputs["input_ids"][0, -TARGETS:], reduction="sum"
    )
    loss.backward()
    value, gradients = loss_and_gradients_here(base, pack)
    assert value == pytest.approx(loss.item(), rel=1e-4)
    parameters = dict(model.named_parameters())
    largest = max(mx.abs(gradient).max().item() for gradient in gradients.values())
    for name, gradient in gradients.items():
        path, _, leaf = name.rpartition(".")
        there = f"base_model.model.{path_in(path, family, 'transformers')}.{leaf[:-1]}{leaf[-1].upper()}"
        expected = parameters[f"{there}.default.weight"].grad.numpy().T
        assert np.abs(np.array(gradient) - expected).max() <= allowed * largest, name


@pytest.mark.parametrize("form", ["mlx-lm", "peft"])
@pytest.mark.parametrize("family", nightly_except(FAMILIES, *MECHANISMS, often_is=()))
def test_an_exported_pack_comes_back_bit_identically(family, form, trained, tmp_path):
    folder, pack = trained(family)
    export_pack(Pack.open(pack), form, tmp_path / "adapter")
    again = import_adapter(tmp_path / "adapter", tmp_path / "again", folder)
    ours = Pack.open(pack).load_tensors()
    theirs = Pack.open(tmp_path / "again").load_tensors()
    assert set(ours) == set(theirs) and again
    for name, tensor in ours.items():
        assert np.array_equal(np.array(tensor), np.array(theirs[name])), name


def logits_of(base) -> np.ndarray:
    tokens = encode_conversation(base.tokenizer, conversation())
    return np.array(base.model(mx.array([tokens])))


def logits_here(folder, pack=None) -> np.ndarray:
    base = load_base(folder)
    if pack is not None:
        base.attach(pack)
    return logits_of(base)


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "mistral3"])
def test_quantized_and_merged_bases_keep_their_towers(family, trained, tmp_path):
    from mlx_vlm.convert import convert
    from mlx_vlm.utils import load

    folder, pack = trained(family)
    merge_pack(pack, folder, tmp_path / "merged")
    whole = logits_here(folder, pack)
    assert np.abs(logits_here(tmp_path / "merged") - whole).max() <= 1e-4 * np.abs(whole).max()

    quantized = tmp_path / "quantized"
    with raises("unsupported", "model", "python -m mlx_vlm.convert -q"):
        quantize(tmp_path / "merged", quantized)
    if family == "qwen3_vl":
        with raises("unsupported", "requantize", "its vision tower would be lost"):
            merge_pack(pack, folder, tmp_path / "nf4", "nf4", max_drift=9.0, progress=False)
    convert(str(folder), str(quantized), quantize=True, q_group_size=32, q_bits=8)
    model, processor = load(str(quantized))
    tokens, pixels, others = as_in_mlx_vlm(load_base(quantized), processor)
    theirs = np.array(model(tokens, pixels, mask=None, **others).logits)
    assert np.abs(logits_here(quantized) - theirs).max() <= 1e-4 * np.abs(theirs).max()
