"""Language models that take images, against mlx-vlm and transformers on the same batches."""

import json
import shutil
from dataclasses import replace

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_packs.adapters.attach import attach
from mlx_packs.bases import files
from mlx_packs.bases.families import VISION_FAMILIES
from mlx_packs.bases.turns import IMAGE_MARK, encode_conversation, render_conversation
from mlx_packs.config.lora import LoRAConfig
from mlx_packs.config.sampling import Sampling
from mlx_packs.cpu.profile import CPU
from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.dataset import Tree
from mlx_packs.data.sampler import Packed
from mlx_packs.data.token_store import Example
from mlx_packs.data.trees import planted
from mlx_packs.inference.generate import chat_prompt, responses, seeing_no_images
from mlx_packs.memory.read import read_headers
from mlx_packs.objectives.causal_lm import split_head, target_loss
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.ops.profile import forced_profile
from mlx_packs.packs.base import Base, load_base
from mlx_packs.runtime import mx
from mlx_packs.vision.images import for_step
from mlx_packs.vision.pictures import ImageSource
from tests.helpers.errors import raises
from tests.helpers.interpreter import run_python
from tests.helpers.variants import nightly_except
from tests.helpers.vision_bases import write_vision_base
from tests.vision.inputs import inputs_of_mlx_vlm, inputs_of_transformers, picture

pytestmark = pytest.mark.interop

MECHANISMS = ["smolvlm", "qwen3_vl", "gemma3"]  # one row of tokens, positions by axis, other masks
ROUNDING = 5e-5  # of a gradient
LOGITS = {"gemma4": 1e-4}  # whose states are large; others 1e-5
ANSWER = 6  # targets of an example: its last tokens
SIZES = [(84, 112), (56, 56), (56, 84), (84, 112)]


def question(text: str, *numbers: int) -> dict:
    """A message whose images come at the marks of its text."""
    images = [ImageSource(picture(number, *SIZES[number])) for number in numbers]
    return {"role": "user", "content": text, "images": images}


def tokens_of(base: Base, text: str, *numbers: int, answer: str = "It is that.") -> np.ndarray:
    messages = [question(text, *numbers), {"role": "assistant", "content": answer}]
    return np.array(encode_conversation(base.tokenizer, messages), np.int32)


def examples_of(base: Base) -> list[Example]:
    """Two pairs of rows that begin with the same image; one of them has another one at its end."""
    texts = [
        (f"Look at {IMAGE_MARK} and say one", [0]),
        (f"Look at {IMAGE_MARK} and say two things", [0]),
        (f"Look at {IMAGE_MARK} then at {IMAGE_MARK}", [1, 2]),
        (f"Look at {IMAGE_MARK} then four or five", [1]),
    ]
    examples = []
    for text, numbers in texts:
        tokens = tokens_of(base, text, *numbers)
        target = np.arange(len(tokens)) >= len(tokens) - ANSWER
        examples.append(Example(tokens, target, "x"))
    return examples


def as_text(examples: list[Example]) -> list[Example]:
    """The same lengths and targets without images."""
    return [replace(e, tokens=np.where(e.tokens < 0, 7, e.tokens)) for e in examples]


def with_adapters(base: Base) -> nn.Module:
    attach(base, LoRAConfig(rank=2))
    mx.random.seed(1)

    def drawn(parameter: mx.array) -> mx.array:
        return 0.1 * mx.random.normal(parameter.shape)

    base.model.update(tree_map(drawn, base.model.trainable_parameters()))
    return base.model.train()


def loss_and_gradients(model: nn.Module, batch) -> tuple[float, dict[str, mx.array]]:
    head = split_head(model)
    inputs = arrays_of(batch)

    def loss() -> mx.array:
        return target_loss(model, head, inputs, batch.layout)[0][: batch.targets].sum()

    value, gradients = nn.value_and_grad(model, loss)()
    mx.eval(value, gradients)
    return value.item(), dict(tree_flatten(gradients))


def check_equal(model: nn.Module, batch, expected: tuple[float, dict[str, mx.array]]) -> None:
    value, gradients = loss_and_gradients(model, batch)
    assert value == pytest.approx(expected[0], rel=1e-5)
    largest = max(mx.abs(gradient).max().item() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        assert mx.abs(gradients[name] - gradient).max().item() <= ROUNDING * largest, name


@pytest.mark.filterwarnings("ignore:At least one mel filter")  # of Gemma 4's processor of sound
@pytest.mark.parametrize("family", nightly_except(VISION_FAMILIES, *MECHANISMS, often_is=()))
def test_logits_are_those_of_mlx_vlm_and_of_transformers(family, folder_of):
    import torch
    from mlx_vlm.utils import load
    from transformers import AutoModelForImageTextToText

    folder = folder_of(family)
    base = load_base(folder)
    messages = [question(f"Look {IMAGE_MARK} and {IMAGE_MARK} what?", 0, 3)]
    tokens = encode_conversation(base.tokenizer, messages, add_generation_prompt=True)
    batch = for_step({"tokens": np.array([tokens], np.int32)})
    ours = np.array(base.model(mx.array(batch["tokens"])))
    assert np.array_equal(ours, np.array(base.model(mx.array([tokens]))))  # of a prompt, the same

    text = render_conversation(base.tokenizer, messages, add_generation_prompt=True)
    model, processor = load(str(folder))
    pictures = [picture(number, *SIZES[number]) for number in (0, 3)]
    tokens, pixels, others = inputs_of_mlx_vlm(base, processor, text, pictures)
    allowed = LOGITS.get(family, 1e-5)
    if family != "gemma3":  # of which mlx-vlm has other masks: every token sees all others
        of_mlx_vlm = model(tokens, pixels, mask=None, **others).logits
        assert ours == pytest.approx(np.array(of_mlx_vlm), abs=allowed)

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        of_torch = model(**inputs_of_transformers(base, tokens, pictures)).logits.numpy()
    assert ours == pytest.approx(of_torch, abs=max(1e-4, 2 * allowed))


@pytest.mark.parametrize("family", MECHANISMS)
def test_batches_of_any_layout_equal_rows_alone(family, folder_of):
    base = load_base(folder_of(family))
    model = with_adapters(base)
    examples = examples_of(base)

    alone = [loss_and_gradients(model, TokenCollate(1, 512)(examples, [i])) for i in range(4)]
    expected = (
        sum(value for value, _ in alone),
        tree_map(lambda *each: sum(each), *(gradients for _, gradients in alone)),
    )
    rows = TokenCollate(4, 512)(examples, [0, 1, 2, 3])
    check_equal(model, rows, expected)

    lengths = [len(example.tokens) - 1 for example in examples]
    for spans in (None, (tuple(lengths),)):
        order = Packed([np.arange(4)], spans)
        check_equal(model, TokenCollate(1, sum(lengths))(examples, order), expected)

    common = [_common(examples[0], examples[1]), _common(examples[2], examples[3])]
    root = _common(examples[0], examples[2])
    trees = [Tree(2, min(common)), Tree(2, min(common), root=root)]
    for tree in trees:
        check_equal(model, planted(rows, tree), expected)
    with forced_profile(replace(CPU, tree_inputs=1)):  # which takes a pass for each level
        for tree in trees:
            check_equal(model, planted(rows, tree), expected)


def _common(one: Example, other: Example) -> int:
    length = min(len(one.tokens), len(other.tokens)) - 1
    return int(np.argmax(one.tokens[:length] != other.tokens[:length]))


def test_a_projector_gets_no_adapters(folder_of):
    with raises("unsupported", "target_modules", "is frozen"):
        attach(load_base(folder_of("smolvlm")), LoRAConfig(target_modules=("projector",)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles with g++ on CPUs")
@pytest.mark.parametrize("family", nightly_except(MECHANISMS))
def test_steps_are_the_same_compiled_and_uncompiled(family, folder_of):
    """Rows and trees with images and without take turns, as on a GPU, where steps are compiled."""
    code = f"""
import numpy as np
import mlx.optimizers as optimizers
from mlx_packs import load_base, runtime
from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.dataset import Tree
from mlx_packs.data.trees import planted
from mlx_packs.objectives.causal_lm import CausalLM, split_head
from mlx_packs.runtime import mx
from mlx_packs.training.step import Stepper
from tests.vision.test_models import as_text, examples_of, with_adapters

def losses(compiles):
    runtime.COMPILES = compiles
    (mx.enable_compile if compiles else mx.disable_compile)()
    base = load_base({str(folder_of(family))!r})
    model = with_adapters(base)
    images = examples_of(base)
    text = as_text(images)
    optimizer = optimizers.SGD(learning_rate=0.3)
    optimizer.init(model.trainable_parameters())
    stepper = Stepper(model, CausalLM(model, split_head(model)).loss, optimizer, 1.0)
    two, four, tree = TokenCollate(2, 512), TokenCollate(4, 512), Tree(2, 16)
    batches = [two(text, [0, 1]), two(images, [0, 1]), two(images, [2, 3]), two(text, [2, 3])]
    batches += [planted(four(each, range(4)), tree) for each in (images, text)]
    return [stepper(batch, True, True)[0] for batch in batches], stepper.traces

plain, none = losses(False)
compiled, several = losses(True)
print(float(np.abs(np.array(plain) / compiled - 1).max()), none, several)
"""
    difference, none, several = run_python(code).split()
    assert float(difference) < 1e-5 and none == "0" and 2 <= int(several) <= 6


def test_a_llava_whose_file_lacks_the_sizes_of_its_text_has_those_of_transformers(
    tmp_path, monkeypatch
):
    from transformers import LlamaConfig

    published = LlamaConfig().to_dict()
    assert all(published[name] == size for name, size in files._LLAVA_TEXT.items())

    whole = write_vision_base("llava", tmp_path / "whole")
    sparse = shutil.copytree(whole, tmp_path / "sparse")
    config = json.loads((whole / "config.json").read_text())
    text = config["text_config"]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: text.pop(name) for name in names}
    config["vocab_size"] = text["vocab_size"]
    (sparse / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(files, "_LLAVA_TEXT", sizes)
    tokens = mx.arange(8)[None]
    one, other = (load_base(folder).model(tokens) for folder in (whole, sparse))
    assert mx.array_equal(one, other)
    assert read_headers(sparse).config["text_config"] == text | sizes


def test_penalties_see_the_token_of_the_vocabulary(folder_of):
    """As transformers has it; MLX would read and write beside the logits."""
    base = load_base(folder_of("smolvlm"))
    prompt = chat_prompt(base, [question(f"{IMAGE_MARK} What?", 2)])
    assert min(prompt) < 0
    seen = []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    for call in seeing_no_images(base, [process]):
        call(mx.array(prompt), mx.zeros((1, base.vocab_size)))
    token = base.tokenizer._images.token
    assert seen == [[token if each < 0 else each for each in prompt]]

    sampling = Sampling(max_tokens=4, temperature=0.0, repetition_penalty=1.5)
    scores = [mx.abs(each.logprobs).max().item() for each in responses(base, prompt, sampling)]
    assert np.isfinite(scores).all()


def test_a_prompt_that_ends_with_an_image_is_rejected(folder_of):
    """The last token is read alone, where no image is looked for."""
    base = load_base(folder_of("smolvlm"))
    prompt = chat_prompt(base, [question(f"What? {IMAGE_MARK}", 2)])
    end = max(i for i, token in enumerate(prompt) if token < 0) + 1
    for more in (0, 1):
        with raises("data"):
            next(responses(base, prompt[: end + more]))
    next(responses(base, prompt[: end + 2]))
