"""Base and packs side by side: figures, tables, gates."""

import csv
import json
import math
import shutil
from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load

from mlx_packs import evaluate, evaluate_batch, load_base, weighted_sum
from mlx_packs.data.batches import evaluation_batches
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.evaluation import compare as comparison
from mlx_packs.evaluation import throughput as speed
from mlx_packs.evaluation.perplexity import Difference, ExampleScores, Scorer
from mlx_packs.gates import evaluate_gates, failures, gate_limits
from mlx_packs.nn.images import FIRST_IMAGE
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.errors import check, raises
from tests.helpers.models import base_of
from tests.helpers.packs import edit_manifest, random_pack
from tests.helpers.rows import chat, write_rows

ROWS = [
    chat("What is one?", "It is one and one, and no more than that, said the man."),
    chat("Who?", "The king."),
    chat("Where did they go?", "They went up into the mountain, and came down again."),
]
SHORT = {"sequence_length": 48, "max_tokens": 2, "rounds": 1}
QUICK = "--model model --data rows --sequence-length 48 --max-tokens 3 --rounds 1".split()


@pytest.fixture(scope="module")
def packs_folder(tmp_path_factory) -> Path:
    """A folder with a base ``model``, ``rows`` and three packs, ``a`` and ``b`` of one shape."""
    folder = tmp_path_factory.mktemp("made")
    base = load_base(write_checkpoint(folder / "model"))
    for name, seed, rank in (("a", 0, 2), ("b", 1, 2), ("c", 2, 64)):
        random_pack(base, seed, rank).save(folder / name)
    write_rows(folder / "rows", train=ROWS[:1], test=ROWS)
    return folder


@pytest.fixture(scope="module")
def base(packs_folder) -> Base:
    """The base, loaded once; tests leave it as it was."""
    return load_base(packs_folder / "model")


@pytest.fixture
def packs_here(packs_folder, tmp_path, monkeypatch) -> Path:
    """A copy of the folder, where the test runs."""
    shutil.copytree(packs_folder, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def stock_perplexity(model: Path, adapter: Path | None) -> float:
    """By mlx-lm's own loader, forward and loss, row by row."""
    model, tokenizer = load(str(model), adapter_path=adapter and str(adapter))
    total, count = 0.0, 0
    for row in ROWS:
        tokens = tokenizer.apply_chat_template(row["messages"])
        start = len(tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True))
        end = len(tokens) - 1  # the newline after the end of the turn is not learned
        logits = model(mx.array([tokens[:-1]]))[0]
        nll = nn.losses.cross_entropy(logits, mx.array(tokens[1:]))[start - 1 : end - 1]
        total, count = total + nll.sum().item(), count + nll.size
    return math.exp(total / count)


def test_eval_batch_on_base_and_three_packs(packs_here, run):
    """JSON and CSV; perplexities are those of stock mlx-lm on the same rows."""
    packs = ("a", "b", "--pack", "c", "--batch-size", "1,3")
    code, out, err = run("eval-batch", *packs, *QUICK, "--csv", "out.csv", "--json")
    assert code == 0, err

    compared = json.loads(out)["results"]
    assert [(f["name"], f["batch_size"]) for f in compared] == [
        (name, size) for name in ("base", "a", "b", "c") for size in (1, 3)
    ]

    wanted = {name: stock_perplexity("model", Path(name)) for name in "abc"}
    wanted["base"] = stock_perplexity("model", None)
    for one in compared:
        for key in "ppl_se prompt_tps decode_tps first_token_ms peak_gb accuracy".split():
            assert one[key] >= 0 and math.isfinite(one[key]), key
        assert one["rows"] == 3
        assert one["ppl"] == pytest.approx(wanted[one["name"]], rel=1e-3)
        assert one["ppl_ratio"] == pytest.approx(one["ppl"] / compared[0]["ppl"], rel=1e-6)

    sizes = {f["name"]: f["pack_mb"] for f in compared}
    assert sizes["base"] == 0 < sizes["a"] < 0.1 < sizes["c"]

    with open("out.csv") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["ppl"]) for line in lines] == [f["ppl"] for f in compared]
    assert [line["name"] for line in lines] == [f["name"] for f in compared]


def test_eval_batch_prints_tables(packs_here, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    long = shutil.copytree("a", "a-pack-with-a-name-that-is-longer-than-a-column-of-the-table")
    code, out, _ = run("eval-batch", long, *QUICK, "--batch-size", 1, "--max-pack-mb", 9)
    tables = [line for line in out.splitlines() if line.startswith(("base ", "a-pack"))]
    assert code == 0 and len(tables) == 4 and max(map(len, tables)) <= 60
    assert "±" in tables[0] and "gates   ok" in out and "\x1b" not in out


def test_eval_batch_failing_gate_exits_with_1_and_is_named(packs_here, run):
    packs = ("--pack", "a", "--pack", "c", "--batch-size", "1,2")
    limits = ("--max-pack-mb", 0.1, "--min-tps-ratio", 1000, "--max-ppl-ratio", 50)
    code, out, err = run("eval-batch", *packs, *QUICK, *limits, "--json")
    assert code == 1

    compared = {(f["name"], f["batch_size"]): f for f in json.loads(out)["results"]}
    gates = compared["c", 1]["gates"]
    assert {name: gate["passed"] for name, gate in gates.items()} == {
        "max_pack_mb": False,
        "min_tps_ratio": False,
        "max_ppl_ratio": True,
    }
    assert gates["max_pack_mb"]["limit"] == 0.1 < gates["max_pack_mb"]["value"]
    assert gates["max_ppl_ratio"]["value"] == compared["c", 1]["ppl_ratio"]
    assert compared["base", 1]["gates"] == {}

    lines = [line for line in err.splitlines() if line.startswith("packs: gate")]
    assert sum("--max-pack-mb failed (c)" in line and " > 0.1" in line for line in lines) == 1
    assert sum("--min-tps-ratio failed (a, batch 2)" in line for line in lines) == 1
    assert len(lines) == 5  # the size of c, and the speed of two packs at two batch sizes


def test_evaluate_batch_gives_the_perplexities_of_evaluate(packs_folder, base):
    packs, rows = [packs_folder / "a", packs_folder / "c"], packs_folder / "rows"
    compared = evaluate_batch(base, packs, rows, batch_sizes=[2], **SHORT)
    for one, pack in zip(compared[1:], packs, strict=True):
        report = evaluate(base, pack, rows)
        assert one.ppl == pytest.approx(report.pack.ppl, rel=1e-5)
        assert one.accuracy == report.pack.accuracy
        assert one.ppl_ratio_se == pytest.approx(report.difference.ppl_ratio_se, rel=1e-3)
    assert base.active is None


def test_difference_is_paired_by_row():
    """Against the ratio estimator written out."""
    base = ExampleScores(np.array([10.0, 2.0, 6.0]), np.array([5, 2, 3]), np.array([1, 0, 2]))
    pack = ExampleScores(np.array([9.0, 1.5, 5.9]), base.targets, base.hits)
    difference = Difference.between(base, pack)

    d, n = np.array([-1.0, -0.5, -0.1]), base.targets
    mean = d.sum() / 10
    assert difference.nll == pytest.approx(mean)
    assert difference.nll_se == pytest.approx(
        math.sqrt(3 / 2 * sum((x - mean * k) ** 2 for x, k in zip(d, n, strict=True))) / 10
    )

    assert difference.ppl_ratio == pytest.approx(pack.score.ppl / base.score.ppl)
    assert difference.ppl_ratio_se == pytest.approx(difference.ppl_ratio * difference.nll_se)
    assert difference.nll_se < base.score.ppl_se / base.score.ppl

    one = ExampleScores(base.nll[:1], n[:1], base.hits[:1])
    assert Difference.between(one, one).nll_se is None


def test_row_scores_stand_in_the_order_of_the_data():
    base = base_of("qwen3")
    rows = [Example(np.arange(1, n, dtype=np.int32), np.arange(n - 1) > 0, "") for n in (9, 4, 7)]
    scorer = Scorer(base.model, split_head(base.model))
    batched = scorer.examples(evaluation_batches(Examples(rows, "text", "all"), 2, 32))
    assert batched.targets.tolist() == [7, 2, 5]
    for i, row in enumerate(rows):
        alone = scorer.examples(evaluation_batches(Examples([row], "text", "all"), 1, 32))
        assert batched.nll[i] == pytest.approx(alone.nll[0], rel=1e-5)


def test_throughput_warms_up_alternates_and_pairs_the_ratio(packs_here, base, monkeypatch):
    """The machine slows down by half from round to round; the ratio of each round does not."""
    pack = comparison.as_pack("a")
    order, rounds = [], []

    def timed(base, prompts, max_tokens):
        order.append("base" if base.active is None else "pack")
        pace = 2.0 ** -((len(order) - 1) // 2)
        rounds.append(pace)
        decode_tps = (100 if order[-1] == "base" else 80) * pace
        return speed.Speed(3, 6 * pace, decode_tps, 1e3 / pace, 1.0, 0.5)

    monkeypatch.setattr(speed, "time_generation", timed)
    speeds = speed.measure_throughput(base, [None, pack], [[1, 2]] * 3, 4, rounds=3)
    assert order == ["pack", "base", "base", "pack", "pack", "base", "base", "pack"]
    assert speeds[1].tps_ratio == pytest.approx(0.8) and speeds[0].tps_ratio == 1
    assert speeds[0].decode_tps == 100 * rounds[4] and speeds[1].decode_tps == 80 * rounds[4]
    assert speeds[0].prompt_tps == 6 * rounds[4] and speeds[0].batch_size == 3


def test_prompts_are_cut_from_the_rows_one_behind_the_other():
    with_image = [np.array([1, FIRST_IMAGE, FIRST_IMAGE - 1, 2, 3]), np.array([4, 5])]
    assert speed.cut_prompts(with_image, 3, 2) == [[1, 2], [3, 4], [5, 1]]


def test_packs_have_names_of_the_hub_and_never_the_bases(packs_here):
    for folder in ("base", "x/n", "y/n", "o--p/" + "a" * 40):
        shutil.copytree("a", folder)
    pin = {"repo": "o/p", "revision": "v2", "commit": "a" * 40}
    (packs_here / "o--p" / ("a" * 40) / "hub.json").write_text(json.dumps(pin))
    pulled = comparison.as_pack("o--p/" + "a" * 40)
    total, again = (weighted_sum([(comparison.as_pack("x/n"), 0.5)]) for _ in range(2))
    names = [name for name, _ in comparison.named_packs([pulled, "x/n", "y/n", total])]
    assert names == ["o/p@v2", "x/n", "y/n", "0.5 n"]
    with raises("conflict", "pack", "0.5 n"):
        comparison.named_packs([total, again])
    for packs in (["base"], {"base": "a"}):
        with raises("conflict", "pack", "'base'"):
            comparison.named_packs(packs)


def test_a_gate_passes_at_its_limit_and_fails_nan():
    limits = gate_limits(max_ppl_ratio=1.0, min_tps_ratio=0.9, max_pack_mb=2.0)
    values = {"max_ppl_ratio": math.nan, "min_tps_ratio": 0.8999, "max_pack_mb": 2.0}
    assert failures(evaluate_gates(limits, values), "x") == [
        "gate --max-ppl-ratio failed (x): nan > 1",
        "gate --min-tps-ratio failed (x): 0.8999 < 0.9",
    ]


@pytest.mark.parametrize(
    ("args", "code", "flag", "names"),
    [
        (("--pack", "a", "--batch-size", "2,2"), "invalid", "batch_size", "2,2"),
        (("--pack", "a", "--pack", "rows/../a"), "conflict", "pack", "rows/../a"),
        (("--pack", "a", "--sequence-length", "1"), "invalid", "sequence_length", "1"),
        (("--sequence-length", "100000"), "invalid", "sequence_length", "--max-tokens 32"),
        (("--pack", "a", "--max-tokens", "1"), "invalid", "max_tokens", "1"),
        (("--pack", "a", "--max-ppl-ratio", "0"), "invalid", "max_ppl_ratio", "0"),
        (("--pack", "a", "--csv", "rows"), "unwritable", "csv", "rows"),
        (("--data", "empty.jsonl"), "data", None, "empty.jsonl"),
        (("--pack", "a", "--split", "train2"), "data", "split", "train2"),
        (("--pack", "stranger"), "mismatch", None, "ffffffffffff"),
    ],
)
def test_eval_batch_rejects_in_one_line(packs_here, run, args, code, flag, names, monkeypatch):
    monkeypatch.delattr(comparison, "_score_all")  # before anything is scored
    Path("empty.jsonl").write_text("")
    shutil.copytree("a", "stranger")
    edit_manifest(Path("stranger"), lambda m: m["base"].update(fingerprint="f" * 64))
    status, out, err = run("eval-batch", "--model", "model", "--data", "rows", *args)
    lines = [line for line in err.splitlines() if line.startswith("packs: ")]
    assert (status, out, len(lines)) == (2, "", 1), err
    check(run.error, code, flag, names)


def test_eval_and_generate_take_a_weighted_sum(packs_here, base, run):
    both = ("--model", "model", "--pack", "a=0.7", "--pack", "c=0.3")
    code, out, err = run("eval", *both, "--data", "rows", "--json")
    assert code == 0, err
    report = evaluate(base, comparison.as_pack({"a": 0.7, "c": 0.3}), "rows")
    assert json.loads(out)["pack"]["ppl"] == pytest.approx(report.pack.ppl, rel=1e-6)
    assert json.loads(out)["difference"]["nll_se"] > 0
    _, out, _ = run("eval", *both, "--data", "rows")
    assert "ratio" in out and "±" in out.splitlines()[2] and "paired" in out
    code, out, err = run("generate", *both, "--prompt", "Who?", "--max-tokens", 3, "--json")
    assert code == 0 and json.loads(out)["pack"] == "a=0.7 + c=0.3", err
    assert run("eval", "--data", "rows")[0] == 2
    check(run.error, "invalid", "pack")
