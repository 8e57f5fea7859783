"""The divergence from a cached teacher beside TRL's: of the whole vocabulary, with a tail."""

import numpy as np
import pytest

from mlx_packs.objectives.distillation import Distillation, target_losses
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from mlx_packs.tasks.teacher import most_likely
from tests.helpers.bases import saved_base
from tests.helpers.rows import chat, write_rows
from tests.helpers.steps import examples_of, make_batch
from tests.helpers.tasks import EncodedTask
from tests.tasks.test_distill import LORA, base_with, settings

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]
VOCABULARY = 128
BETAS = {"forward-kl": 0.0, "reverse-kl": 1.0, "jsd": 0.3}  # TRL's, of each loss


def jsd_loss():
    pytest.importorskip("torch")
    pytest.importorskip("trl")
    try:
        from trl.experimental.gkd import GKDTrainer
    except ImportError:
        from trl import GKDTrainer
    return GKDTrainer.generalized_jsd_loss


@pytest.mark.parametrize("loss", BETAS)
def test_loss_and_gradient_are_those_of_trl(loss):
    theirs = jsd_loss()
    import torch

    batch = make_batch(examples_of((9, 14, 5)), (0, 1, 2), 4, 16)
    shape = (*batch.inputs["tokens"].shape, VOCABULARY)
    student, teacher = (np.random.default_rng(i).normal(0, 3, shape) for i in (0, 1))
    student = student.astype(np.float32)
    teacher = teacher.astype(np.float32)

    positions = batch.inputs["positions"]
    of_targets = mx.array(teacher.reshape(-1, VOCABULARY)[positions])
    top = most_likely(of_targets, VOCABULARY)
    inputs = arrays_of(batch.having(**{f"teacher_{n}": value for n, value in top.items()}))
    distillation = Distillation(loss, 0.3)
    is_target = inputs["owners"] >= 0

    def total(logits):
        losses = target_losses(lambda tokens: logits, None, inputs, (), distillation)
        return (losses.divergence * is_target).sum()

    value, gradient = mx.value_and_grad(total)(mx.array(student))

    labels = torch.full((shape[0] * shape[1],), -100)
    labels[positions[: batch.targets]] = 1
    logits = torch.tensor(student.reshape(-1, VOCABULARY), requires_grad=True)
    expected = theirs(
        logits,
        torch.tensor(teacher.reshape(-1, VOCABULARY)),
        labels,
        beta=BETAS[loss],
        reduction="sum",
    )
    expected.backward()

    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = logits.grad.numpy().reshape(shape)
    assert np.abs(np.array(gradient) - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("loss", ["forward-kl", "reverse-kl"])
def test_other_tokens_are_the_tail_of_trl(loss):
    torch = pytest.importorskip("torch")
    pytest.importorskip("trl")
    from trl.experimental.sdpo.loss_utils import add_tail_bucket

    student, teacher = (np.random.default_rng(i).normal(0, 3, (9, VOCABULARY)) for i in (0, 1))
    student = student.astype(np.float32)
    top = most_likely(mx.array(teacher.astype(np.float32)), 8)
    at = mx.arange(9)
    inputs = {f"teacher_{name}": value for name, value in top.items()}
    inputs |= {"tokens": at[None], "positions": at, "targets": at}
    ours = target_losses(lambda _: mx.array(student), None, inputs, (), Distillation(loss), False)

    tokens = torch.tensor(np.array(top["tokens"]).astype(np.int64))
    q = torch.log_softmax(torch.tensor(student), -1).gather(-1, tokens)
    p = torch.log_softmax(torch.tensor(teacher), -1).gather(-1, tokens).float()
    p, q = add_tail_bucket(p), add_tail_bucket(q)
    if loss == "reverse-kl":
        p, q = q, p
    expected = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert np.allclose(np.array(ours.divergence), expected.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", BETAS)
def test_a_batch_that_the_student_generated_has_the_loss_of_trl(tmp_path, loss):
    theirs = jsd_loss()
    import torch

    rows = [chat(f"Say {i} twice.", f"{i}, {i}.") for i in range(8)]
    data = write_rows(tmp_path / "d", train=rows[:6], valid=rows[6:])
    teacher = saved_base(base_with(1), tmp_path / "t")
    train = settings(
        teacher=teacher,
        teacher_top_k=4096,
        on_policy=1.0,
        max_completion_length=6,
        loss=loss,
        jsd_beta=0.3 if loss == "jsd" else 0.5,
    )
    task = EncodedTask(base_with(2), data, train, LORA)
    objective = task.bind()
    made = objective.prepare(next(task.data[0].train.batches()))
    total, count = objective.loss(arrays_of(made))

    inputs = mx.array(made.inputs["tokens"])
    positions = made.inputs["positions"][made.inputs["owners"] >= 0]
    logits = [
        torch.tensor(np.array(model(inputs).astype(mx.float32)).reshape(-1, 4096)[positions])
        for model in (task.trainable.model, load_base(teacher).model)
    ]
    expected = theirs(*logits, beta=BETAS[loss], reduction="batchmean")
    assert (total / count).item() == pytest.approx(expected.item(), rel=1e-4)
