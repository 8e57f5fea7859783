"""Twenty steps equal PEFT's under transformers' own Trainer: losses, rates, norms and adapters.

Both start from the same weights (the bundled base, dense), the same adapters and the same rows in
the same order. There it is `Trainer` that clips, accumulates, warms up and decays.
"""

from pathlib import Path

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.data.encoding import Example
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from tests.helpers.bases import dense_tiny
from tests.helpers.checkpoints import logits, write_files
from tests.helpers.steps import lm_stepper, make_batch

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]
UPDATES, ROWS = 20, 4  # rows of a batch
RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj", "down_proj")
OURS = {  # TrainConfig, by the names of transformers' TrainingArguments
    "learning_rate": "learning_rate",
    "lr_scheduler_type": "lr_schedule",
    "warmup_steps": "warmup_steps",
    "gradient_accumulation_steps": "grad_accumulation_steps",
    "max_grad_norm": "max_grad_norm",
    "weight_decay": "weight_decay",
}


@pytest.fixture(scope="module")
def dense_base(tmp_path_factory) -> Path:
    """The bundled Qwen3 as transformers reads it: dense, in float32."""
    for name in ("torch", "transformers", "peft"):
        pytest.importorskip(name)

    base = dense_tiny()
    weights = dict(tree_flatten(base.model.parameters()))
    config = {k: v for k, v in base.config.items() if not k.startswith("quantization")}
    return write_files(tmp_path_factory.mktemp("dense") / "qwen3", weights, config)


def examples(count: int) -> list[Example]:
    """Rows of 12 to 40 tokens whose first third is no target."""
    random = np.random.default_rng(3)
    rows = []
    for length in random.integers(12, 40, count):
        target = np.arange(length) >= length // 3
        rows.append(Example(random.integers(5, 4000, length).astype(np.int32), target, "x"))
    return rows


def trained_here(folder: Path, settings: dict, rows: list[Example], start: dict | None = None):
    """First adapters, then losses, rates and norms of every update, and the last adapters."""
    accumulate = settings.get("gradient_accumulation_steps", 1)
    ours = {OURS.get(key, key): value for key, value in settings.items()}
    config = TrainConfig(iters=UPDATES * accumulate, **ours)

    base = load_base(folder)
    attached = attach(base, LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=TARGETS))
    if start is not None:
        attached.load({name: mx.array(value) for name, value in start.items()}, "test")
    first = {name: np.array(tensor) for name, tensor in attached.tensors().items()}

    base.model.train()
    optimizer = make_optimizer(config)
    optimizer.init(base.model.trainable_parameters())
    stepper = lm_stepper(base.model, optimizer, config.max_grad_norm)

    lines = []
    total = 0.0
    count = 0
    for number in range(1, config.iters + 1):
        batch = make_batch(rows, range((number - 1) * ROWS, number * ROWS), ROWS, 64)
        last = number % accumulate == 0
        loss, norm = stepper(batch, last, accumulate == 1)
        total += loss * batch.targets
        count += batch.targets
        if last:
            lines.append((total / count, optimizer.learning_rate.item(), norm))
            total = 0.0
            count = 0

    final = {name: np.array(tensor) for name, tensor in attached.tensors().items()}
    return first, np.array(lines), final


def trained_there(folder: Path, settings: dict, rows: list[Example], start: dict, out: Path):
    """The same of PEFT's adapters under `transformers.Trainer`."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def collated(parts: list[dict]) -> dict:
        width = max(len(part["tokens"]) for part in parts)
        padded = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        arrays = {key: np.full((len(parts), width), pad) for key, pad in padded.items()}
        for row, part in enumerate(parts):
            tokens, target = part["tokens"], part["target"]
            arrays["input_ids"][row, : len(tokens)] = tokens
            arrays["attention_mask"][row, : len(tokens)] = 1
            arrays["labels"][row, : len(tokens)] = np.where(target, tokens, -100)
        return {key: torch.tensor(value) for key, value in arrays.items()}

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), lora_dropout=0.0)
    model = get_peft_model(model, lora)
    adapters = by_our_names(model)
    assert set(adapters) == set(start)
    for name, parameter in adapters.items():
        parameter.data = torch.tensor(np.ascontiguousarray(start[name].T))

    arguments = transformers.TrainingArguments(
        output_dir=str(out),
        max_steps=UPDATES,
        per_device_train_batch_size=ROWS,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        **settings,
    )

    data = [{"tokens": row.tokens, "target": row.target} for row in rows]
    trainer = InOrder(model, arguments, train_dataset=data, data_collator=collated)
    trainer.train()

    keys = ("loss", "learning_rate", "grad_norm")
    lines = [[line[key] for key in keys] for line in trainer.state.log_history if "loss" in line]
    final = {name: parameter.detach().numpy().T for name, parameter in adapters.items()}
    return np.array(lines), final


def by_our_names(model) -> dict:
    """PEFT's parameters by mlx-lm's names of the same adapters."""
    return {
        name.removeprefix("base_model.model.")
        .replace(".lora_A.default.weight", ".lora_a")
        .replace(".lora_B.default.weight", ".lora_b"): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }


PLAIN = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "weight_decay": 0.0}
CLIPPED = {**PLAIN, "max_grad_norm": 1.0}
CASES = {
    "adamw": {**PLAIN, "max_grad_norm": 0.0},
    "decay": {**PLAIN, "max_grad_norm": 0.0, "weight_decay": 0.5},
    "clipping": {**PLAIN, "max_grad_norm": 0.1},
    "cosine with warm-up": {**CLIPPED, "lr_scheduler_type": "cosine", "warmup_steps": 5},
    "linear with warm-up": {**CLIPPED, "lr_scheduler_type": "linear", "warmup_steps": 3},
    "accumulation": {**CLIPPED, "gradient_accumulation_steps": 3},
}


def test_the_dense_base_is_the_bundled_one(dense_base):
    np.testing.assert_allclose(
        logits(load_base(dense_base)), logits(load_base(tiny_checkpoint())), atol=1e-4
    )


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_equal_those_of_peft(dense_base, tmp_path, case):
    settings = CASES[case]
    rows = examples(UPDATES * ROWS * settings.get("gradient_accumulation_steps", 1))
    start, here, adapters = trained_here(dense_base, settings, rows)
    there, expected = trained_there(dense_base, settings, rows, start, tmp_path)
    assert len(here) == len(there) == UPDATES
    np.testing.assert_allclose(here[:, 0], there[:, 0], atol=1e-4)
    np.testing.assert_allclose(here[:, 1], there[:, 1], rtol=1e-5, atol=1e-10)
    np.testing.assert_allclose(here[:, 2], there[:, 2], rtol=1e-3)
    assert_near(adapters, expected, 1e-3)


def assert_near(adapters: dict, expected: dict, share: float) -> None:
    """No number differs by more than a share of the largest of its kind, A or B."""
    for kind in ("lora_a", "lora_b"):
        names = [name for name in expected if name.endswith(kind)]
        largest = max(np.abs(expected[name]).max() for name in names)
        difference = max(np.abs(adapters[name] - expected[name]).max() for name in names)
        assert difference < share * largest, (kind, difference / largest)


def test_without_bias_correction_they_do_not(dense_base, tmp_path):
    rows = examples(UPDATES * ROWS)
    settings = CASES["adamw"]
    start, _, corrected = trained_here(dense_base, settings, rows)
    _, here, adapters = trained_here(
        dense_base, {**settings, "bias_correction": False}, rows, start
    )
    there, expected = trained_there(dense_base, settings, rows, start, tmp_path)
    assert abs(here[0, 0] - there[0, 0]) < 1e-4 and np.abs(here[:, 0] - there[:, 0]).max() > 0.01
    with pytest.raises(AssertionError):
        assert_near(adapters, expected, 1e-3)
    assert_near(corrected, expected, 1e-3)


def test_8_bit_adamw_stays_near_adamw_of_peft(dense_base, tmp_path):
    """Its moments are rounded to 8 bits, so that the tolerance is that of the rounding."""
    rows, settings = examples(UPDATES * ROWS), CASES["adamw"]
    start, here, adapters = trained_here(dense_base, {**settings, "optimizer": "adamw_8bit"}, rows)
    there, expected = trained_there(dense_base, settings, rows, start, tmp_path)
    np.testing.assert_allclose(here[:, 0], there[:, 0], atol=0.02)
    assert_near(adapters, expected, 0.15)
