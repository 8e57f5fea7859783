"""`packs eval` and `packs eval-tasks`: a base model and a pack on the same examples."""

from typing import TYPE_CHECKING

import click

from ..config.data import COLUMN_SETTINGS, DataConfig
from ..display import Display
from ..errors import PackError
from . import options
from .options import option
from .output import print_report

if TYPE_CHECKING:
    from ..packs.pack import Pack

_AS_TRAINED = "as the pack was trained"
_BUNDLED = DataConfig.data


@click.command("eval")
@click.argument("pack", required=False, type=click.Path())
@options.model_of_pack
@options.packs(
    "Pack and its weight; the deltas of several packs are added up. Repeatable.", "PACK=WEIGHT"
)
@options.data(default=None, default_text="tiny, for packs that were trained on it")
@options.split
@options.setting("batch_size", default=4, type=click.IntRange(1))
@options.setting("max_seq_length", _AS_TRAINED, type=click.IntRange(2))
@options.add(*(options.setting(name, _AS_TRAINED) for name in COLUMN_SETTINGS))
@options.template_kwargs("Variables of the chat template.")
@options.loss_on
@options.metric
@options.setting("share_prefix", default="auto")
@options.limit
@options.execution
def evaluate(
    pack: str | None,
    packs: tuple[str, ...],
    model: str | None,
    data: str | None,
    trust_remote_code: bool,
    **settings,
) -> None:
    """Compare perplexity and accuracy with and without a pack.

    The pack of an encoder is evaluated by correlation with scores, retrieval or triplet accuracy,
    depending on the examples, a reward model by preference accuracy and reward margin. Base model
    and pack see the same examples, and each result has its standard error. The ratio is paired
    by example, so its error is smaller. With --metric, the share of right answers is reported
    too, with greedy decoding. To evaluate the weighted sum of several packs, pass --pack
    PACK=WEIGHT for each.
    """
    from ..evaluation.evaluate import evaluate
    from ..evaluation.rows import columns_of
    from ..packs.base import load_base_for

    texts = list(packs)
    if pack:
        texts.insert(0, pack)
    opened = options.one_pack(texts)
    if opened is None:
        text = "is required. To add several packs up, pass --pack a=0.7 --pack b=0.3."
        raise PackError(f"PACK: {text}", flag="pack")

    data = _data_of(data, opened)
    columns = {name: settings.pop(name) for name in (*COLUMN_SETTINGS, "template_kwargs")}
    columns = {name: column for name, column in columns.items() if column}

    report = evaluate(
        load_base_for(opened, options.base_of(model, opened), trust_remote_code),
        opened,
        data,
        columns=columns_of(opened, data, **columns),
        **settings,
    )
    print_report(report.to_json(), report.lines())


def _data_of(data: str | None, pack: "Pack") -> str:
    """Return the examples; a pack of other data cannot be evaluated on the bundled ones."""
    trained = pack._part("recipe").get("data", _BUNDLED)
    if data is not None:
        return data
    if trained != _BUNDLED:
        raise PackError(
            f"--data: {pack.name} was trained on {trained}. Name the examples to evaluate on "
            "(a folder with valid.jsonl or test.jsonl, or a file).",
            flag="data",
        )
    return _BUNDLED


@click.command()
@click.argument("packs", nargs=-1, metavar="[PACK[=WEIGHT]]...", type=click.Path())
@options.model_of_pack
@option(
    "--tasks", required=True, metavar="NAMES", help="Names of lm_eval tasks, separated by commas."
)
@option(
    "--num-fewshot",
    type=click.IntRange(0),
    help="Number of solved examples before each question.",
    default_text="the task's",
)
@option(
    "--limit",
    type=click.IntRange(1),
    help="Number of examples to evaluate of each task.",
    default_text="all",
)
@options.setting("batch_size", default=8, type=click.IntRange(1))
@option("--task-path", metavar="DIR", help="Folder with custom tasks in YAML.")
@option("--chat", is_flag=True, help="Put each question into the chat template of the base model.")
@options.matmul_path()
@options.execution
def eval_tasks(
    packs: tuple[str, ...], model: str | None, tasks: str, trust_remote_code: bool, **settings
) -> None:
    """Run tasks of lm-evaluation-harness with and without packs.

    Install the harness with pip install 'mlx-packs[lm-eval]'; it downloads its data from the Hub.
    Several packs are evaluated as one: the sum of their deltas, each times its WEIGHT.
    """
    from ..evaluation.lm_eval import evaluate_tasks
    from ..packs.base import load_base_for

    pack = options.one_pack(packs)
    model = options.base_of(model, pack)
    with Display().working("base", f"loading {model}"):
        base = load_base_for(pack, model, trust_remote_code)
    report = evaluate_tasks(base, pack, options.names(tasks), **settings)
    print_report(report, _task_lines(report))


def _task_lines(report: dict) -> list[str]:
    lines = []
    for task, metrics in report.items():
        for metric, values in metrics.items():
            results = " → ".join(
                _with_error(values[name], values.get(f"{name}_se"))
                for name in ("base", "pack")
                if name in values
            )
            lines.append(f"{task} · {metric}  {results}")
    return lines


def _with_error(value: float, se: float | None) -> str:
    text = f"{value:.4f}"
    if isinstance(se, float):
        text += f" ± {se:.4f}"
    return text
