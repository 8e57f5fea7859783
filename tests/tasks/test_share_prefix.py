"""Runs whose batches are trees learn what runs on rows learn, in less time."""

import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

import mlx_packs as mp
from mlx_packs import LoRAConfig, TrainConfig, runtime, train_pack
from mlx_packs.adapters.attach import check_bare
from mlx_packs.adapters.lora import Attached
from mlx_packs.data import sharing
from mlx_packs.data import trees as trees_of
from mlx_packs.data.groups import GroupPlan
from mlx_packs.data.sampler import Sampler
from mlx_packs.data.trees import TreeCollate
from mlx_packs.display import NORMAL, Display
from mlx_packs.objectives.causal_lm import CausalLM
from mlx_packs.runtime import mx
from mlx_packs.tasks import shared_prefix
from tests.data.test_groups import documents as documents_of
from tests.helpers.bases import dense_tiny
from tests.helpers.errors import raises
from tests.helpers.families import family_base
from tests.helpers.models import base_of
from tests.helpers.rows import write_rows

SYSTEM = "You turn reminders into JSON with the keys task, day and time, and nothing else at all."
SETTINGS = {
    "iters": 6,
    "batch_size": 4,
    "max_seq_length": 96,
    "matmul_path": "dense",
    "learning_rate": 2e-3,
    "lr_schedule": "constant",
    "steps_per_report": 1,
    "steps_per_eval": 3,
    "save_every": 3,
    "share_prefix": "off",
}
LORA = LoRAConfig(rank=4)
UNSCORED = {"val_batches": 0, "test_batches": 1}
SLOW = pytest.mark.slow


def chat(number: int) -> dict:
    words = " ".join(f"thing {i}" for i in range(number % 4 + 1))
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{number} times {words}"},
            {"role": "assistant", "content": f"It is {number * 7}."},
        ]
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = [chat(i) for i in range(20)]
    return write_rows(tmp_path_factory.mktemp("data") / "d", train=rows[:16], valid=rows[16:])


def trained(data, folder, lora=LORA, **changes):
    own = changes.keys() & {"method", "matmul_path"}  # what alters the base, or how it computes
    base = "tiny" if own else dense_tiny()
    return train_pack(base, data, lora, TrainConfig(**SETTINGS | changes), folder)


def losses_of(run) -> list[float]:
    return [line["loss"] for line in run.curve if "loss" in line]


@pytest.fixture(scope="module")
def on_trees(data, tmp_path_factory):
    """A finished run on trees; tests only read it."""
    return trained(data, tmp_path_factory.mktemp("on") / "trees", share_prefix="on")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"micro_batches": 2, "grad_accumulation_steps": 2}, marks=SLOW),
        pytest.param({"batch_size": 1, "grad_accumulation_steps": 4, "iters": 8}, marks=SLOW),
        pytest.param({"packing": True, "batch_size": 2}, marks=SLOW),
        pytest.param(
            {"packing": True, "batch_size": 2, "micro_batches": 2, "grad_accumulation_steps": 2},
            marks=SLOW,
        ),
        pytest.param({"recompute": "block", "matmul_path": "transient"}, marks=SLOW),
        pytest.param({"loss_on": "all", "method": "full"}, marks=SLOW),
    ],
    ids=str,
)
def test_a_run_on_trees_learns_what_one_on_rows_learns(data, on_trees, tmp_path, changes):
    lora = None if "method" in changes else LORA
    rows, trees = trained(data, tmp_path / "rows", lora, **changes), on_trees
    if changes:
        trees = trained(data, tmp_path / "trees", lora, share_prefix="on", **changes)
    np.testing.assert_allclose(losses_of(trees), losses_of(rows), rtol=2e-5)
    assert trees.report["ppl_before"] == pytest.approx(rows.report["ppl_before"], rel=1e-5)
    assert trees.report["ppl_after"] == pytest.approx(rows.report["ppl_after"], rel=1e-4)
    for name, tensor in rows.pack.tensors.items():
        # AdamW turns rounding of the smallest gradients into whole steps of a few entries
        off = mx.linalg.norm(trees.pack.tensors[name] - tensor)
        assert off.item() < 1e-3 * mx.linalg.norm(tensor).item(), name
    shared = trees.report["shared_prefix"]
    assert shared["tokens"] >= 24 and 0.25 < shared["saved"] < 0.75
    assert rows.report["shared_prefix"] is None


def turns_of(number: int, system: bool) -> list[dict]:
    """A chat of three answers, as a row for each of them."""
    first = [{"role": "system", "content": SYSTEM}] if system else []
    turns = []
    for turn in range(3):
        user = {"role": "user", "content": f"{number} times {turn + number % 3}"}
        turns += [user, {"role": "assistant", "content": f"It is {number * turn}."}]
    return [{"messages": first + turns[:stop]} for stop in (2, 4, 6)]


@pytest.mark.parametrize("system", [False, pytest.param(True, marks=SLOW)])
def test_rows_that_begin_others_are_merged_into_them(tmp_path, capsys, system):
    """A batch has all rows, so that runs with and without merging train on the same ones."""
    chats = [turns_of(i, system) for i in range(6)]
    train = [row for i in (2, 0, 1) for rows in chats[:4] for row in rows[i : i + 1]]
    data = write_rows(
        tmp_path / "d", train=train, valid=[row for rows in chats[4:] for row in rows]
    )
    settings = {"loss_on": "assistant", "iters": 2, "max_seq_length": 192}

    rows = trained(data, tmp_path / "rows", batch_size=12, **settings)
    capsys.readouterr()
    merged = trained(data, tmp_path / "on", batch_size=4, share_prefix="auto", **settings)
    assert "8 of 12 examples begin others and are merged into them: " in capsys.readouterr().err
    np.testing.assert_allclose(losses_of(merged), losses_of(rows), rtol=2e-5)
    for name in ("ppl_before", "ppl_before_se"):
        assert merged.report[name] == pytest.approx(rows.report[name], rel=1e-5)
    assert merged.report["ppl_after"] == pytest.approx(rows.report["ppl_after"], rel=1e-4)
    for name, tensor in rows.pack.tensors.items():
        off = mx.linalg.norm(merged.pack.tensors[name] - tensor)
        assert off.item() < 1e-3 * mx.linalg.norm(tensor).item(), name

    shared = merged.report["shared_prefix"]
    assert shared["merged"] == 8 and 0.3 < shared["saved"] < 0.9
    assert (shared["tokens"] >= 24) == system
    assert merged.pack.manifest["data"]["rows"] == {"train": 12, "valid": 6}


def test_auto_leaves_apart_what_saves_too_little(tmp_path):
    """One row of 17 begins another."""
    rows = [row for i in range(16) for row in turns_of(i, False)[2:]]
    data = write_rows(tmp_path / "d", train=[*rows, *turns_of(3, False)[:1]], valid=rows[:2])
    run = trained(data, tmp_path / "auto", share_prefix="auto", iters=1, **UNSCORED)
    assert run.report["shared_prefix"] is None
    run = trained(data, tmp_path / "on", share_prefix="on", iters=1, **UNSCORED)
    assert run.report["shared_prefix"]["merged"] == 1


DOCUMENTS = [
    " ".join(f"On day {day} the {name} rose by {3 * day + shift}." for day in range(6))
    for shift, name in enumerate(("river", "price", "tide"))
]


def questions_on(document: str, numbers: range) -> list[dict]:
    """Rows that begin with a document."""
    rows = [(f"{document} Day {n}?", f"It is day {n} times {n % 4 + 1}.") for n in numbers]
    return [{"prompt": prompt, "completion": completion} for prompt, completion in rows]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Five questions on each document."""
    train = [row for each in DOCUMENTS for row in questions_on(each, range(5))]
    valid = [row for each in DOCUMENTS for row in questions_on(each, range(5, 8))]
    order = np.random.default_rng(0).permutation(len(train))
    folder = tmp_path_factory.mktemp("data") / "g"
    return write_rows(folder, train=[train[i] for i in order], valid=valid)


@SLOW
@pytest.mark.parametrize("changes", [{}, {"micro_batches": 4, "recompute": "block"}], ids=str)
def test_examples_of_many_documents_are_put_together(documents, tmp_path, capsys, changes):
    """Both runs have all examples in a batch: blocks of five and an empty row, and an empty block."""
    settings = {"iters": 3, "max_seq_length": 256, "test_batches": -1, **changes}
    rows = trained(documents, tmp_path / "rows", batch_size=15, **settings)
    capsys.readouterr()
    trees = trained(documents, tmp_path / "on", batch_size=24, share_prefix="on", **settings)
    assert "each of 3 groups, which are put together: computed once" in capsys.readouterr().err
    np.testing.assert_allclose(losses_of(trees), losses_of(rows), rtol=2e-5)
    for name in ("ppl_before", "ppl_before_se"):
        assert trees.report[name] == pytest.approx(rows.report[name], rel=1e-5)
    assert trees.report["ppl_after"] == pytest.approx(rows.report["ppl_after"], rel=1e-4)
    for name, tensor in rows.pack.tensors.items():
        off = mx.linalg.norm(trees.pack.tensors[name] - tensor)
        assert off.item() < 1e-3 * mx.linalg.norm(tensor).item(), name
    shared = trees.report["shared_prefix"]
    assert shared["groups"] == 3 and shared["tokens"] > 40 and shared["saved"] > 0.3


@pytest.mark.slow
def test_a_resumed_run_on_groups_equals_an_unbroken_one_to_the_bit(documents, tmp_path):
    """Three batches are in the second epoch."""
    changes = {"max_seq_length": 256, "share_prefix": "on", "batch_size": 8}
    whole = trained(documents, tmp_path / "a", **changes)
    assert whole.report["shared_prefix"]["groups"] == 3
    trained(documents, tmp_path / "b", iters=3, **changes)
    train = TrainConfig(**SETTINGS | changes)
    resumed = train_pack(dense_tiny(), documents, LORA, train, tmp_path / "b", resume=True)
    for name, tensor in whole.pack.tensors.items():
        assert mx.array_equal(tensor, resumed.pack.tensors[name]).item(), name


def test_groups_are_for_what_they_spare_beyond_the_beginning_of_all():
    train = TrainConfig(share_prefix="on", batch_size=8)
    for instruction, document, is_grouped in ((64, 0, False), (64, 8, False), (64, 64, True)):
        examples = documents_of([8] * 4, document, instruction=instruction)
        drawn = np.arange(len(examples))
        trees = sharing.plan_trees(train, LORA, examples, drawn)
        assert trees.prefix == 64
        plan = sharing.plan_groups(train, examples, drawn, trees)
        assert isinstance(plan, GroupPlan) == is_grouped
        assert is_grouped or plan is trees


def test_the_passes_of_a_batch_are_those_of_its_tree():
    """64 inputs are common to all rows, or to those of each of two documents."""
    lora, rows = LORA, 8 * 79
    grouped, other = base_of("qwen3").model, base_of("gemma3_text").model
    for changes, instruction, document in (({}, 64, 0), ({}, 0, 64), ({"micro_batches": 2}, 64, 0)):
        train = TrainConfig(share_prefix="on", batch_size=8, **changes)
        examples = documents_of([8] * 4, document, instruction=instruction)
        chosen = np.arange(len(examples))
        trees = sharing.plan_trees(train, lora, examples, chosen)
        trees = sharing.plan_groups(train, examples, chosen, trees)
        passes = shared_prefix.passes_of(other, trees, examples, rows)
        assert sum(passes) == pytest.approx(rows * (1 - trees.saved(examples)), abs=1)
        prefixes = {False: 64, True: 128}[isinstance(trees, GroupPlan)]
        assert passes[0] == pytest.approx(prefixes, rel=0.15) or len(passes) == 1
        assert len(passes) == (1 if changes else 2)
        assert shared_prefix.passes_of(grouped, trees, examples, rows) == (sum(passes),)
    assert shared_prefix.passes_of(other, None, examples, rows) == (rows,)


def test_auto_leaves_the_order_of_examples(documents, tmp_path):
    settings = {"iters": 1, "max_seq_length": 256, "batch_size": 3, **UNSCORED}
    rows = trained(documents, tmp_path / "rows", **settings)
    auto = trained(documents, tmp_path / "auto", share_prefix="auto", **settings)
    assert losses_of(auto) == losses_of(rows) and auto.report["shared_prefix"] is None


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    rows = [{"prompt": f"{i}?", "completion": f"It is {i * 7}."} for i in range(20)]
    return write_rows(tmp_path_factory.mktemp("data") / "n", train=rows[:16], valid=rows[16:])


def in_phases(first, second, folder, **changes):
    """A run of a batch on each of two data sets."""
    phases = [mp.Phase(name, data=str(d), iters=1) for name, d in (("a", first), ("b", second))]
    settings = {name: value for name, value in SETTINGS.items() if name != "iters"}
    settings |= {"share_prefix": "on", **UNSCORED, **changes}
    train = TrainConfig(**settings, phases=tuple(phases))
    return train_pack(dense_tiny(), None, LORA, train, folder)


def test_a_phase_shares_what_its_own_examples_begin_with(data, plain, tmp_path):
    run = in_phases(plain, data, tmp_path / "p")
    assert run.report["shared_prefix"]["tokens"] >= 24
    assert "groups" not in run.report["shared_prefix"]


def test_a_phase_that_shares_nothing_leaves_the_checks_of_others(
    data, plain, tmp_path, monkeypatch
):
    reasons = iter([None, "its gradient is off by 2"])
    monkeypatch.setattr(shared_prefix, "why_not_shared", lambda *_: next(reasons))
    with raises("unsupported", "share_prefix", "off by 2"):
        in_phases(data, plain, tmp_path / "p")


def preference(number: int) -> dict:
    prompt = f"{SYSTEM} What are {number} times {' '.join(map(str, range(number % 5 + 1)))}?"
    chosen, rejected = f"It is {number * 7}.", f"I do not know what {number} is."
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.fixture(scope="module")
def preferences(tmp_path_factory):
    rows = [preference(i) for i in range(24)]
    return write_rows(tmp_path_factory.mktemp("data") / "p", train=rows[:16], valid=rows[16:])


@pytest.fixture(scope="module")
def rated(tmp_path_factory):
    rows = [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if i % 2 else "rejected"],
            "label": bool(i % 2),
        }
        for i, row in enumerate(map(preference, range(24)))
    ]
    return write_rows(tmp_path_factory.mktemp("data") / "r", train=rows[:16], valid=rows[16:])


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("dpo", {"micro_batches": 2, "grad_accumulation_steps": 2}),
        ("dpo", {}),
        ("orpo", {}),
        ("kto", {}),
        ("reward", {}),
    ],
)
@SLOW
def test_both_completions_of_a_prompt_share_it(preferences, rated, tmp_path, task, changes):
    data = rated if task == "kto" else preferences
    settings = {"task": task, "iters": 4, **changes}
    rows = trained(data, tmp_path / "rows", **settings)
    trees = trained(data, tmp_path / "trees", share_prefix="on", **settings)
    np.testing.assert_allclose(losses_of(trees), losses_of(rows), rtol=1e-4)
    for name in ("preference_accuracy_after", "reward_margin_after"):
        assert trees.report[name] == pytest.approx(rows.report[name], rel=1e-3, abs=1e-5)
    assert 0.2 < trees.report["shared_prefix"]["saved"] < 0.9


def test_prompts_behind_one_system_prompt_are_a_second_level(tmp_path, capsys):
    """The gradients of a batch go through prompts to what is before all of them."""
    rows = []
    for number in range(10):
        words = " ".join(f"{number + i} and" for i in range(8))
        system, user = {"role": "system", "content": SYSTEM}, {"role": "user", "content": words}
        answers = {"chosen": f"It is {number}.", "rejected": f"It was {number + 1} once."}
        rows.append({"prompt": [system, user], **answers})
    data = write_rows(tmp_path / "d", train=rows[:8], valid=rows[8:])

    settings = {"task": "dpo", "iters": 2, "batch_size": 2, "max_seq_length": 256, **UNSCORED}
    ordinary = trained(data, tmp_path / "rows", **settings)
    capsys.readouterr()
    trees = trained(data, tmp_path / "trees", share_prefix="on", **settings)
    np.testing.assert_allclose(losses_of(trees), losses_of(ordinary), rtol=1e-4)
    shared = trees.report["shared_prefix"]
    assert 16 <= shared["root"] <= shared["tokens"] - 16
    assert f"{shared['root']} of them every example" in capsys.readouterr().err


@pytest.mark.parametrize("beta", [0.0, 0.05])
@SLOW
def test_the_completions_that_are_generated_share_their_prompt(
    preferences, tmp_path, beta, monkeypatch, capsys
):
    """The first losses are equal; later ones would need the very same samples."""
    planted = []
    tree = TreeCollate.tree
    monkeypatch.setattr(
        TreeCollate,
        "tree",
        lambda self, batch, prefix: planted.append(prefix) or tree(self, batch, prefix),
    )
    settings = {"task": "grpo", "iters": 2, "batch_size": 2, "num_generations": 4, "beta": beta}
    settings |= {"max_completion_length": 12, "val_batches": 0}

    def run(name: str, **changes):
        train = TrainConfig(**SETTINGS | settings | changes)
        reward = lambda completions, **_: [-len(text) / 20 for text in completions]  # noqa: E731
        return train_pack(dense_tiny(), preferences, LORA, train, tmp_path / name, reward=reward)

    rows, trees = run("rows"), run("trees", share_prefix="on")
    assert min(planted) >= 16
    np.testing.assert_allclose(losses_of(trees), losses_of(rows), rtol=1e-3, atol=1e-6)
    norms = [[line["grad_norm"] for line in each.curve if "loss" in line] for each in (rows, trees)]
    np.testing.assert_allclose(*norms, rtol=1e-3)

    shared = trees.report["shared_prefix"]
    assert rows.report["shared_prefix"] is None
    assert shared["tokens"] >= 16 and 0.3 < shared["saved"] < 0.75
    said = (
        f"begin the 4 completions of a prompt: computed once, {shared['saved']:.0%} of all inputs"
    )
    assert capsys.readouterr().err.count(said) == 1
    assert trees.report["plan_peak_gb"] < 0.95 * rows.report["plan_peak_gb"]


def test_a_resumed_run_on_trees_equals_an_unbroken_one_to_the_bit(data, on_trees, tmp_path):
    changes = {"share_prefix": "on", **UNSCORED}
    trained(data, tmp_path / "b", iters=3, **changes)
    train = TrainConfig(**SETTINGS | changes)
    resumed = train_pack(dense_tiny(), data, LORA, train, tmp_path / "b", resume=True)
    for name, tensor in on_trees.pack.tensors.items():
        assert mx.array_equal(tensor, resumed.pack.tensors[name]).item(), name


@pytest.mark.parametrize(
    ("lora", "changes", "shares"),
    [
        (LORA, {}, True),
        (LoRAConfig(rank=4, dropout=0.1), {}, False),
        (LoRAConfig(rank=4, num_layers=2), {}, False),
        (LoRAConfig(rank=4, num_layers=2), {"cache_frozen": "off"}, True),
        (LORA, {"neftune_noise_alpha": 5.0}, False),
        (LORA, {"packing": True}, True),
        (LORA, {"batch_size": 1}, False),
    ],
    ids=str,
)
def test_auto_shares_a_prefix_where_that_changes_nothing_but_the_time(
    data, tmp_path, lora, changes, shares
):
    run = trained(data, tmp_path / "p", lora, share_prefix="auto", iters=1, **UNSCORED, **changes)
    assert bool(run.report["shared_prefix"]) == shares


def test_what_examples_have_in_common_is_searched_for_once(data, tmp_path, monkeypatch):
    """Of training examples, of those of validations, and of those that scores are of."""
    searched = []
    common_inputs = trees_of.common_inputs

    def counted(examples):
        searched.append(1)
        return common_inputs(examples)

    monkeypatch.setattr(trees_of, "common_inputs", counted)
    trained(data, tmp_path / "p", share_prefix="on", steps_per_eval=1, iters=2)
    assert len(searched) == 3


@pytest.mark.parametrize("objective", ["transformer", "projection-stack"])
def test_auto_shares_nothing_with_the_projection_stack(objective):
    train = TrainConfig(share_prefix="auto", objective=objective)
    assert sharing.may_share(train, LORA) == (objective == "transformer")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_update_computes_its_prefix_once_unless_something_is_drawn(
    data, tmp_path, dropout, monkeypatch
):
    """Two batches of two pieces: the prefix is passed twice for each of two updates, or never."""
    passed = []
    keep = CausalLM.keep_prefixes
    monkeypatch.setattr(
        CausalLM,
        "keep_prefixes",
        lambda self, prefix: passed.append(prefix.shape) or keep(self, prefix),
    )
    settings = {"micro_batches": 2, "grad_accumulation_steps": 2, "iters": 4, **UNSCORED}
    trained(
        data, tmp_path / "p", LoRAConfig(rank=4, dropout=dropout), share_prefix="on", **settings
    )
    assert len(passed) == (0 if dropout else 4)
    assert len(set(passed)) <= 1


def test_what_is_trained_changes_between_updates_alone(data, tmp_path, monkeypatch):
    """As the rounding of --for-merge, which would change a prefix that is computed once."""
    progress = []
    monkeypatch.setattr(Attached, "at", lambda self, share: progress.append(share))
    few = {"batch_size": 1, "grad_accumulation_steps": 2, "iters": 6}
    trained(data, tmp_path / "p", **few, **UNSCORED)
    assert progress == [0, 2 / 6, 4 / 6]


def test_packed_examples_of_other_attention_are_computed_whole(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shared_prefix, "attends_in_groups", lambda model: False)
    with raises("unsupported", "share_prefix", "not computed example by example"):
        trained(data, tmp_path / "on", share_prefix="on", packing=True)
    few = {"iters": 1, **UNSCORED}
    run = trained(data, tmp_path / "auto", share_prefix="auto", packing=True, **few)
    assert "every row of a qwen3 model: with --packing its attention" in capsys.readouterr().err
    assert run.report["shared_prefix"] is None


@pytest.mark.parametrize("aligned", [True, False])
def test_packed_batches_that_would_each_be_compiled_are_no_trees(monkeypatch, capsys, aligned):
    """On a GPU they are where they have their spans in common."""
    monkeypatch.setattr(runtime, "COMPILES", True)
    train = TrainConfig(share_prefix="auto", packing=True)
    sampler = Sampler(np.array([40, 50]), 1, 64, packing=True, aligned=aligned)
    base = base_of("qwen3")
    assert shared_prefix.computes_trees(train, base, Display(NORMAL), sampler) == aligned
    assert ("would each be compiled" in capsys.readouterr().err) != aligned


def test_without_a_common_beginning_nothing_is_shared(tmp_path, capsys):
    rows = [{"text": f"{i} is the number of this text, which is long enough."} for i in range(8)]
    data = write_rows(tmp_path / "d", train=rows, valid=rows[:2])
    run = trained(data, tmp_path / "p", share_prefix="on", iters=1, **UNSCORED)
    assert run.report["shared_prefix"] is None
    assert "fewer than 16 tokens are common: none is shared" in capsys.readouterr().err


def test_what_is_drawn_at_random_is_shared_and_said(data, tmp_path, capsys):
    lora = LoRAConfig(rank=4, dropout=0.1)
    trained(data, tmp_path / "p", lora, share_prefix="on", iters=1, **UNSCORED)
    assert "share what is drawn at random for these" in capsys.readouterr().err


def test_a_model_that_computes_trees_otherwise_gets_rows(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shared_prefix, "why_not_shared", lambda *_: "its loss is off by 1")
    with raises("unsupported", "share_prefix", "a qwen3 model", "its loss is off by 1"):
        trained(data, tmp_path / "on", share_prefix="on")
    run = trained(data, tmp_path / "auto", share_prefix="auto", iters=1, **UNSCORED)
    assert "in every row of a qwen3 model: its loss is off by 1" in capsys.readouterr().err
    assert run.report["shared_prefix"] is None


@pytest.mark.parametrize(
    ("recompute", "shares"), [("auto", False), ("block", False), ("selective", True)]
)
def test_auto_leaves_a_model_whose_recomputed_blocks_read_keys_of_others(recompute, shares, capsys):
    base = family_base("afm7")
    train = TrainConfig(share_prefix="auto", recompute=recompute)
    assert shared_prefix.computes_trees(train, base, Display(NORMAL)) == shares
    assert ("model: with --recompute block it" in capsys.readouterr().err) != shares
    check_bare(base)
    on = TrainConfig(share_prefix="on", recompute=recompute)
    assert shared_prefix.computes_trees(on, base, Display(NORMAL)), "checked as it is trained"


def test_rope_that_depends_on_the_length_of_a_row_is_left_in_rows(capsys):
    """Only beyond the context of 256 that the model was trained with."""
    base = base_of("qwen3")
    scaling = {"type": "dynamic", "factor": 2.0}
    for block in base.model.layers:
        block.self_attn.rope = initialize_rope(32, 1e4, False, scaling, 256)
    for length, shares in ((200, True), (300, False)):
        train = TrainConfig(share_prefix="auto", max_seq_length=length)
        assert shared_prefix.computes_trees(train, base, Display(NORMAL)) == shares
    assert "its DynamicNTKScalingRoPE depends on the length" in capsys.readouterr().err
    with raises("unsupported", "share_prefix", "depends on the length of a row"):
        train = TrainConfig(share_prefix="on", max_seq_length=300)
        shared_prefix.computes_trees(train, base, Display(NORMAL))


@pytest.mark.parametrize("task", ["lm", "dpo", "reward"])
def test_a_model_whose_trees_have_other_gradients_is_refused(
    data, preferences, tmp_path, monkeypatch, task
):
    """As Apple's foundation model, if its blocks are computed again."""
    reasons = iter([None, "its gradient is off by 2"])  # of the base, and of what is trained
    monkeypatch.setattr(shared_prefix, "why_not_shared", lambda *_: next(reasons))
    own = data if task == "lm" else preferences
    with raises("unsupported", "share_prefix", "off by 2", "--share-prefix off"):
        trained(own, tmp_path / "p", share_prefix="auto", task=task)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("packing", True, {"task": "dpo"}),
        ("cache_frozen", "on", {}),
        ("pipeline", True, {}),
    ],
)
def test_what_does_not_go_with_trees_is_named(name, value, others):
    with raises("conflict", name, "--share-prefix on"):
        TrainConfig(share_prefix="on", **{name: value}, **others)
    TrainConfig(share_prefix="auto", **{name: value}, **others)
