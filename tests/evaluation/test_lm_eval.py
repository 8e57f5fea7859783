"""Tasks of lm-evaluation-harness: the language model that it is given, and the results."""

import json
import sys
from types import ModuleType, SimpleNamespace

import mlx.nn as nn
import pytest

from mlx_packs import evaluate, evaluate_tasks
from mlx_packs.evaluation.lm_eval import _until, language_model, log_likelihoods
from mlx_packs.evaluation.perplexity import Scorer
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ANSWER = """output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
QUESTIONS = [
    {"question": "In the beginning God created the", "choices": [" heaven", " list"], "answer": 0},
    {"question": "The lord of", "choices": [" the house", " zebra table"], "answer": 0},
    {"question": "He was a", "choices": [" quux", " good man"], "answer": 1},
]


def alone(base, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """By one forward of the model."""
    tokens = [*context, *continuation]
    scores = nn.log_softmax(base.model(mx.array([tokens[:-1]]))[0], axis=-1)[len(context) - 1 :]
    value = sum(scores[i, token].item() for i, token in enumerate(continuation))
    return value, mx.argmax(scores, axis=-1).tolist() == continuation


def test_log_likelihoods_are_those_of_each_pair_alone(small_base):
    encode = small_base.tokenizer.encode
    pairs = [(encode("In the beginning God"), encode(" created the heaven"))]
    pairs += [(encode("He"), encode(" was a")), ([5], [9]), (encode("And the"), [7, 8, 9, 10, 11])]
    context = encode("The house of the")
    greedy = mx.argmax(small_base.model(mx.array([context]))[0, -1]).item()
    pairs.append((context, [greedy]))
    scores = log_likelihoods(Scorer(small_base.model, split_head(small_base.model)), pairs, 2, 64)
    for pair, (value, is_greedy) in zip(pairs, scores, strict=True):
        wanted, most = alone(small_base, *pair)
        assert value == pytest.approx(wanted, rel=1e-4) and is_greedy is most
    assert scores[-1][1] and not all(is_greedy for _, is_greedy in scores)

    context = list(range(1, 60))  # of which the last tokens count
    scorer = Scorer(small_base.model, split_head(small_base.model))
    (whole,) = log_likelihoods(scorer, [(context, [7, 8])], 1, 16)
    assert whole[0] == pytest.approx(alone(small_base, context[-14:], [7, 8])[0], rel=1e-4)


def test_until_ends_at_the_first_stop():
    assert _until("It is one. And", [".", "is"]) == "It "
    assert _until("It is", "x") == "It is" and _until("It", []) == "It"


def test_without_lm_eval_the_message_says_how_to_get_it(small_base, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with raises("dependency", None, "lm_eval", "`pip install 'mlx-packs[lm-eval]'`"):
        evaluate_tasks(small_base, None, ["arc_easy"])


@pytest.fixture
def stand_in(monkeypatch):
    """lm_eval's interface as far as it is used, with one task of two questions."""
    names = ("lm_eval", "lm_eval.tasks", "lm_eval.api", "lm_eval.api.model", "lm_eval.utils")
    package, tasks, api, model, utils = map(ModuleType, names)

    class TaskManager:
        def __init__(self, include_path=None):
            self.include_path = include_path

        def match_tasks(self, names):
            return [name for name in names if name == "known"]

    class TemplateLM:
        prefix_token_id = 0

    def simple_evaluate(model, tasks, **options):
        print("bootstrapping for stddev: known")  # as the harness does
        requests = [((), [5, 6], [7]), ((), [8], [9, 10])]
        scored = model._loglikelihood_tokens(requests)
        ask = [SimpleNamespace(args=("He was a", {"until": ["."], "max_gen_toks": 4}))]
        nll = -sum(value for value, _ in scored)
        return {
            "results": {"known": {"nll,none": nll, "answer,none": model.generate_until(ask)[0]}}
        }

    tasks.TaskManager, model.TemplateLM = TaskManager, TemplateLM
    package.simple_evaluate = simple_evaluate
    utils.get_rolling_token_windows = lambda token_list, **_: [(token_list[:1], token_list[1:])]
    utils.make_disjoint_window = lambda window: window
    for module in (package, tasks, api, model, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_evaluate_tasks_scores_base_and_pack(small_base, stand_in):
    pack = random_pack(small_base, 0)
    figures = evaluate_tasks(small_base, pack, ["known"])["known"]["nll"]
    assert figures["base"] == pytest.approx(
        -alone(small_base, [5, 6], [7])[0] - alone(small_base, [8], [9, 10])[0], rel=1e-4
    )
    assert figures["pack"] != pytest.approx(figures["base"], rel=1e-4) and small_base.active is None
    with small_base.applied(pack):
        rolled = language_model(small_base).loglikelihood_rolling(
            [SimpleNamespace(args=("He was",))]
        )
        tokens = small_base.tokenizer.encode("He was", add_special_tokens=False)
        assert rolled[0] == pytest.approx(alone(small_base, tokens[:1], tokens[1:])[0], rel=1e-4)


def test_questions_are_put_into_the_chat_template_of_the_pack(small_base, stand_in, monkeypatch):
    pack = random_pack(small_base, 0)
    pack.manifest["recipe"] = {
        "chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    }
    prompts = []

    def evaluated(model, **options):
        prompts.append(model.apply_chat_template([{"role": "user", "content": "a"}]))
        return {"results": {"known": {"nll,none": 1.0}}}

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", evaluated)
    evaluate_tasks(small_base, pack, ["known"], chat=True)
    assert prompts == ["[a]["] * 2  # of the base model alone, too; an answer begins with [


@pytest.mark.parametrize(
    ("how", "code", "flag", "names"),
    [
        ({"tasks": ["unknown"]}, "unknown", "tasks", "unknown"),
        ({"tasks": ["known"], "limit": 0}, "invalid", "limit", "0"),
        ({"tasks": ["known"], "task_path": "nowhere"}, "not-found", "task_path", "nowhere"),
    ],
)
def test_evaluate_tasks_names_what_is_wrong(small_base, stand_in, how, code, flag, names):
    with raises(code, flag, names):
        evaluate_tasks(small_base, None, **how)


def test_eval_tasks_prints_json_alone_on_stdout(small_folder, stand_in, run):
    code, out, err = run("eval-tasks", "--model", small_folder, "--tasks", "known", "--json")
    assert (code, set(json.loads(out)["known"])) == (0, {"nll"}) and "bootstrapping" in err


def test_a_base_that_carries_a_pack_is_not_taken_for_the_base(small_base, stand_in):
    with small_base.applied(random_pack(small_base, 0)):
        with raises("conflict", None, small_base.name):
            evaluate_tasks(small_base, None, ["known"])
        with raises("conflict", None, small_base.name):
            evaluate(small_base, None, limit=1)


def test_sampled_answers_are_rejected(small_base, stand_in):
    ask = SimpleNamespace(args=("He", {"do_sample": True, "temperature": 0.7}))
    with raises("unsupported", None, "lm_eval"):
        language_model(small_base).generate_until([ask])


@pytest.mark.interop
def test_harness_with_a_pack_agrees_with_mlx_lm(shared_tiny, tmp_path, monkeypatch):
    """The real lm_eval on tasks of a folder; likelihoods are those of mlx-lm's own adapter."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    for name, kind in (("choose", CHOICE), ("answer", ANSWER)):
        head = TASK.format(name=name, rows=tmp_path / "rows.jsonl")
        (tmp_path / f"{name}.yaml").write_text(head + kind)
    pack = random_pack(shared_tiny, 0).save(tmp_path / "p")
    figures = evaluate_tasks(shared_tiny, pack, ["choose", "answer"], task_path=tmp_path, limit=3)
    assert {"base", "pack", "base_se", "pack_se"} <= set(figures["choose"]["acc"])
    assert "exact_match" in figures["answer"]

    from mlx_lm.evaluate import MLXLM

    theirs = MLXLM.__new__(MLXLM)
    theirs._model, theirs.tokenizer = shared_tiny.model, shared_tiny.tokenizer
    theirs._max_tokens, theirs.use_chat_template = None, True
    asked = [
        SimpleNamespace(args=(q["question"], choice), arguments=(q["question"], choice))
        for q in QUESTIONS
        for choice in q["choices"]
    ]
    with shared_tiny.applied(pack):
        ours = language_model(shared_tiny).loglikelihood(asked)
        wanted = theirs.loglikelihood(asked)
    for (value, greedy), (their_value, their_greedy) in zip(ours, wanted, strict=True):
        assert value == pytest.approx(their_value, rel=1e-4) and greedy == bool(their_greedy)
