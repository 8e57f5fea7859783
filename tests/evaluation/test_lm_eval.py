"""Tasks of lm-evaluation-harness: the language model that it is given, and the results."""

import json
import sys
from types import ModuleType, SimpleNamespace

import mlx.nn as nn
import pytest

from mlx_packs import evaluate, evaluate_tasks
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


ASKED = [("In the beginning God", " created the heaven"), ("He", " was a")]


def alone(base, context: str, continuation: str) -> float:
    """The log-likelihood by one forward of the model."""
    start = len(base.tokenizer.encode(context))
    tokens = base.tokenizer.encode(context + continuation)
    scores = nn.log_softmax(base.model(mx.array([tokens[:-1]]))[0], axis=-1)
    return sum(scores[i, tokens[i + 1]].item() for i in range(start - 1, len(tokens) - 1))


def test_without_lm_eval_the_message_says_how_to_get_it(small_base, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with raises("dependency", None, "lm_eval", "`pip install 'mlx-packs[lm-eval]'`"):
        evaluate_tasks(small_base, None, ["arc_easy"])


@pytest.fixture
def stand_in(monkeypatch):
    """lm_eval's interface as far as it is used, with one task of two questions."""
    names = ("lm_eval", "lm_eval.tasks", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    package, tasks, api, model, registry = map(ModuleType, names)

    class TaskManager:
        def __init__(self, include_path=None):
            self.include_path = include_path

        def match_tasks(self, names):
            return [name for name in names if name == "known"]

    class LM:
        """What mlx-lm's class is of."""

    def simple_evaluate(model, tasks, **options):
        print("bootstrapping for stddev: known")  # as the harness does
        scored = model.loglikelihood([SimpleNamespace(args=pair) for pair in ASKED])
        ask = [SimpleNamespace(args=("He was a", {"until": ["."], "max_gen_toks": 4}))]
        nll = -sum(value for value, _ in scored)
        return {
            "results": {"known": {"nll,none": nll, "answer,none": model.generate_until(ask)[0]}}
        }

    tasks.TaskManager, model.LM = TaskManager, LM
    package.simple_evaluate = simple_evaluate
    registry.register_model = lambda *_: lambda model: model
    for module in (package, tasks, api, model, registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    yield
    sys.modules.pop("mlx_lm.evaluate", None)


def test_evaluate_tasks_scores_base_and_pack(small_base, stand_in):
    pack = random_pack(small_base, 0)
    figures = evaluate_tasks(small_base, pack, ["known"])["known"]["nll"]
    assert small_base.active is None
    own = {"base": -sum(alone(small_base, *pair) for pair in ASKED)}
    with small_base.applied(pack):
        own["pack"] = -sum(alone(small_base, *pair) for pair in ASKED)
    assert figures == pytest.approx(own, rel=1e-4)
    assert own["pack"] != pytest.approx(own["base"], rel=1e-4)


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


@pytest.mark.interop
def test_harness_runs_tasks_of_a_folder_with_a_pack(shared_tiny, tmp_path, monkeypatch):
    """The real lm_eval."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    for name, kind in (("choose", CHOICE), ("answer", ANSWER)):
        head = TASK.format(name=name, rows=tmp_path / "rows.jsonl")
        (tmp_path / f"{name}.yaml").write_text(head + kind)
    pack = random_pack(shared_tiny, 0).save(tmp_path / "p")
    figures = evaluate_tasks(shared_tiny, pack, ["choose", "answer"], task_path=tmp_path, limit=3)
    assert {"base", "pack", "base_se", "pack_se"} <= set(figures["choose"]["acc"])
    assert "exact_match" in figures["answer"]
