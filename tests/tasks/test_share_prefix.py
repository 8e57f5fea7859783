"""Batches that are trees: which are, what is said of it, and that runs on them learn the same."""

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import initialize_rope

import mlx_packs as mp
from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.adapters.attach import check_bare
from mlx_packs.data import sharing
from mlx_packs.data.dataset import Tree
from mlx_packs.display import NORMAL, Display
from mlx_packs.evaluation import perplexity
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.tasks import tokens as token_tasks
from tests.helpers import rows
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.families import family_base
from tests.helpers.models import base_of
from tests.helpers.preferences import preference, rated
from tests.helpers.rows import write_rows
from tests.helpers.steps import assert_same, moved
from tests.helpers.tasks import SHORT, EncodedTask
from tests.helpers.variants import slow_except
from tests.tasks.test_grpo import shorter

SYSTEM = "You turn reminders into JSON with the keys task, day and time, and nothing else at all."
SETTINGS = SHORT | {"iters": 4, "batch_size": 4, "max_seq_length": 256, "learning_rate": 2e-3}
SETTINGS |= {"share_prefix": "off"}
LORA = LoRAConfig(rank=4)
DROPS = LoRAConfig(rank=4, dropout=0.1)


def chat(number: int) -> dict:
    words = " ".join(f"thing {i}" for i in range(number % 4 + 1))
    turns = rows.chat(f"{number} times {words}", f"It is {number * 7}.")["messages"]
    return {"messages": [{"role": "system", "content": SYSTEM}, *turns]}


def question(number: int) -> dict:
    """One of eight questions on each of three documents."""
    name, day = ("river", "price", "tide")[number % 3], number // 3
    document = " ".join(f"On day {i} the {name} rose by {3 * i + number % 3}." for i in range(6))
    return {"prompt": f"{document} Day {day}?", "completion": f"It is day {day}."}


def begun(row: dict) -> dict:
    return {**row, "prompt": f"{SYSTEM} {row['prompt']}"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of rows by the name of what they have in common."""
    data = {
        "system": [chat(i) for i in range(20)],
        "documents": [question(i) for i in range(24)],
        "nothing": [{"text": f"{i} is the number of this text."} for i in range(20)],
        "prompts": [begun(preference(i)) for i in range(20)],
        "rated": [begun(rated(i)) for i in range(20)],
    }
    held_out = {"documents": 9}

    folder = tmp_path_factory.mktemp("data")
    folders = {}
    for name, each in data.items():
        count = len(each) - held_out.get(name, 4)
        folders[name] = write_rows(folder / name, train=each[:count], valid=each[count:])
    return folders


def encoded(data, lora=LORA, reward=None, **changes) -> EncodedTask:
    return EncodedTask(small_base(), data, TrainConfig(**SETTINGS | changes), lora, reward)


def first_step(task: EncodedTask) -> tuple:
    """The first batch of a task, its loss and gradients, and the score of held-out examples.

    Adapters are not zero, and the same each time.
    """
    objective = task.bind()
    moved(task.trainable)

    (own,) = task.data
    batch = objective.prepare(next(own.train.batches()))
    inputs = arrays_of(batch)
    model = task.trainable.model
    model.train()
    step = nn.value_and_grad(model, lambda: objective.loss(inputs, batch.layout)[0])
    loss, gradients = step()
    score = dict(tree_flatten(vars(objective.score(own.held_out))))
    known = {name: value for name, value in score.items() if value is not None}
    return batch, loss.item(), dict(tree_flatten(gradients)), known


@pytest.mark.parametrize(
    ("name", "changes", "on_trees"),
    [
        ("system", {}, {}),
        ("documents", {"batch_size": 15}, {"batch_size": 24}),  # all examples in both
        ("prompts", {"task": "dpo"}, {}),
        *slow_except([("rated", {"task": "kto"}, {})]),
    ],
)
def test_a_tree_has_the_loss_and_gradients_of_its_rows(data, name, changes, on_trees):
    _, loss, gradients, score = first_step(encoded(data[name], **changes))
    task = encoded(data[name], **changes | on_trees | {"share_prefix": "on"})
    tree, *actual = first_step(task)
    assert isinstance(tree.layout, Tree)
    assert actual[0] == pytest.approx(loss, rel=1e-5)
    assert_same(actual[1], gradients)
    assert actual[2] == pytest.approx(score, rel=1e-4, abs=1e-5)

    shared = task.task.shared_report(task.data[0])
    assert shared["tokens"] >= 16 and 0.2 < shared["saved"] < 0.9
    assert f"computed once, {shared['saved']:.0%} of all inputs saved" in task.lines
    assert shared.get("groups") == {"documents": 3}.get(name)
    if "task" in changes:  # prompts begin alike, too
        assert shared["root"] >= 16
        assert f"{shared['root']} of them to every example" in task.lines


def test_the_completions_that_are_generated_share_their_prompt(data):
    settings = {"task": "grpo", "beta": 0.05, "batch_size": 2, "max_completion_length": 12}
    settings |= {"num_generations": 4}
    task = encoded(data["prompts"], reward=shorter, **settings)
    rows = first_step(task)
    sharing_task = encoded(data["prompts"], reward=shorter, share_prefix="on", **settings)
    tree = first_step(sharing_task)
    assert "prefix" in tree[0].inputs
    assert tree[1] == pytest.approx(rows[1], rel=1e-5, abs=1e-5)
    assert_same(tree[2], rows[2])
    assert tree[3] == rows[3]

    assert "common to the 4 completions of a prompt: computed once, " in sharing_task.lines
    ((whole,), targets), (passes, same) = (
        each.task.typical_rows(each.data[0]) for each in (task, sharing_task)
    )
    assert sum(passes) < 0.8 * whole and targets == same


@pytest.mark.parametrize(
    ("name", "lora", "changes", "shares"),
    [
        ("system", LORA, {}, True),
        ("system", LORA, {"packing": True}, False),
        ("system", LORA, {"batch_size": 1}, False),
        ("system", DROPS, {}, False),
        ("system", LORA, {"neftune_noise_alpha": 5.0}, False),
        ("system", LoRAConfig(rank=4, num_layers=1), {}, False),
        ("system", LoRAConfig(rank=4, num_layers=1), {"cache_frozen": "off"}, True),
        ("documents", LORA, {}, False),  # it would change the order of examples
    ],
    ids=str,
)
def test_auto_shares_a_prefix_where_that_changes_nothing_but_the_time(
    data, name, lora, changes, shares
):
    task = encoded(data[name], lora, share_prefix="auto", **changes).task
    assert bool(task.trees) == shares
    projections = TrainConfig(share_prefix="auto", objective="projection-stack")
    assert not sharing.may_share(projections, lora)


def in_phases(first, second) -> EncodedTask:
    """A phase of a batch on each of two data sets."""
    phases = tuple(mp.Phase(n, data=str(d), iters=1) for n, d in (("a", first), ("b", second)))
    own = {name: value for name, value in SETTINGS.items() if name != "iters"}
    train = TrainConfig(**own | {"share_prefix": "on"}, phases=phases)
    return EncodedTask(small_base(), None, train, LORA)


def test_a_phase_shares_what_its_own_examples_begin_with(data):
    trees = in_phases(data["nothing"], data["system"]).task.trees
    assert set(trees) == {"b"} and trees["b"].prefix >= 24


@pytest.mark.parametrize("task", ["lm", "dpo", "grpo"])
def test_a_model_whose_trees_have_other_gradients_is_refused(data, monkeypatch, task):
    """As Apple's foundation model, if its blocks are computed again; whatever the last phase is."""
    reasons = iter([None, "its gradient is off by 2"])  # of the base, and of what is trained
    for module in (perplexity, token_tasks):
        monkeypatch.setattr(module, "why_not_shared", lambda *_: next(reasons))
    if task == "lm":
        own = in_phases(data["system"], data["nothing"])
    else:
        reward = shorter if task == "grpo" else None
        own = encoded(data["prompts"], LORA, reward, share_prefix="auto", task=task)
    with raises("unsupported", "share_prefix", "off by 2", "--share-prefix off"):
        own.bind()


def test_a_model_that_computes_trees_otherwise_gets_rows(data, monkeypatch):
    reason = "its loss is off by 1"
    monkeypatch.setattr(perplexity, "why_not_shared", lambda *_: reason)
    with raises("unsupported", "share_prefix", "a qwen3 model", reason):
        encoded(data["system"], share_prefix="on")
    own = encoded(data["system"], share_prefix="auto")
    assert "every row of a qwen3 model: " in own.lines and reason in own.lines
    assert not own.task.trees


def test_what_is_shared_is_said(data):
    own = encoded(data["nothing"], share_prefix="on")
    assert "fewer than 16 tokens are common: none is shared" in own.lines and not own.task.trees
    assert own.task.shared_report(own.data[0]) is None
    drawn = encoded(data["system"], DROPS, share_prefix="on")
    assert "share what is drawn at random for these" in drawn.lines and drawn.task.trees


@pytest.mark.parametrize(
    ("recompute", "shares"), [("auto", False), ("block", False), ("selective", True)]
)
def test_auto_leaves_a_model_whose_recomputed_blocks_read_keys_of_others(recompute, shares, capsys):
    base = family_base("afm7")
    train = TrainConfig(share_prefix="auto", recompute=recompute)
    assert token_tasks.computes_trees(train, base, Display(NORMAL)) == shares
    assert ("model: with --recompute block it" in capsys.readouterr().err) != shares
    check_bare(base)
    on = TrainConfig(share_prefix="on", recompute=recompute)
    assert token_tasks.computes_trees(on, base, Display(NORMAL)), "checked as it is trained"


def test_rope_that_depends_on_the_length_of_a_row_is_left_in_rows(capsys):
    """Only beyond the context of 256 that the model was trained with."""
    base = base_of("qwen3")
    scaling = {"type": "dynamic", "factor": 2.0}
    for block in base.model.layers:
        block.self_attn.rope = initialize_rope(32, 1e4, False, scaling, 256)
    for length, shares in ((200, True), (300, False)):
        train = TrainConfig(share_prefix="auto", max_seq_length=length)
        assert token_tasks.computes_trees(train, base, Display(NORMAL)) == shares
    assert "its DynamicNTKScalingRoPE depends on the length" in capsys.readouterr().err
    with raises("unsupported", "share_prefix", "depends on the length of a row"):
        train = TrainConfig(share_prefix="on", max_seq_length=300)
        token_tasks.computes_trees(train, base, Display(NORMAL))
