"""`packs eval` and `packs eval-tasks`: a base and a pack on the same examples."""

import click

from ..config.schema import COLUMN_SETTINGS
from ..display import Display
from ..errors import PackError
from . import options
from .options import option
from .output import print_report

_AS_TRAINED = "as the pack was trained"


@click.command("eval")
@click.argument("pack", required=False)
@options.model
@options.packs("Pack with a weight, repeatable: the deltas add up.", metavar="PACK=WEIGHT")
@options.data()
@options.split
@options.setting("batch_size", default=4, type=click.IntRange(1))
@options.setting("max_seq_length", _AS_TRAINED, type=click.IntRange(2))
@options.add(*(options.setting(name, _AS_TRAINED) for name in COLUMN_SETTINGS))
@options.loss_on
@options.limit
@options.execution
def evaluate(
    pack: str | None,
    packs: tuple[str, ...],
    model: str,
    data: str,
    trust_remote_code: bool,
    **settings,
) -> None:
    """Evaluate a base and a pack: perplexity and token accuracy.

    For the pack of an encoder: correlation with scores, retrieval, or triplet accuracy, depending
    on the examples. Both are evaluated on the same examples, with standard errors; that of the
    ratio is paired by example and therefore smaller. PACK may be PACK=WEIGHT, and several with
    --pack are evaluated as one, their deltas added up.
    """
    from ..evaluation.evaluate import evaluate
    from ..evaluation.rows import columns_of
    from ..packs.base import load_base_for

    opened = options.one_pack([*([pack] if pack else []), *packs])
    if opened is None:
        raise PackError(
            "PACK: is required, or packs to add up: --pack a=0.7 --pack b=0.3.", flag="pack"
        )
    columns = {name: settings.pop(name) for name in COLUMN_SETTINGS}
    columns = {name: column for name, column in columns.items() if column is not None}
    report = evaluate(
        load_base_for(opened, model, trust_remote_code),
        opened,
        data,
        columns=columns_of(opened, data, **columns),
        **settings,
    )
    print_report(report.to_json(), report.lines())


@click.command()
@click.argument("packs", nargs=-1, metavar="[PACK[=WEIGHT]]...")
@options.model
@option("--tasks", required=True, metavar="NAMES", help="Tasks of lm_eval, separated by commas.")
@option(
    "--num-fewshot",
    type=click.IntRange(0),
    metavar="N",
    help="Solved examples before each question.",
    default_text="as the task has it",
)
@option(
    "--limit",
    type=click.IntRange(1),
    metavar="N",
    help="Examples of each task.",
    default_text="all",
)
@options.setting("batch_size", default=8, type=click.IntRange(1))
@option("--task-path", metavar="DIR", help="Folder with tasks of your own (YAML).")
@option("--chat", is_flag=True, help="Put questions into the base's chat template.")
@options.matmul_path("quantized", "transient", "dense")
@options.execution
def eval_tasks(
    packs: tuple[str, ...],
    model: str,
    tasks: str,
    trust_remote_code: bool,
    **settings,
) -> None:
    """Evaluate a base and a pack on tasks of lm-evaluation-harness.

    Needs pip install 'mlx-packs[lm-eval]'. The harness gets its data from the Hub. Several packs
    are evaluated as one, their deltas added up with their weights.
    """
    from ..evaluation.lm_eval import evaluate_tasks
    from ..packs.base import load_base_for

    pack = options.one_pack(packs)
    with Display().working("base", f"loading {model}"):
        base = load_base_for(pack, model, trust_remote_code)
    report = evaluate_tasks(base, pack, options.names(tasks), **settings)
    print_report(report, _task_lines(report))


def _task_lines(report: dict) -> list[str]:
    """Return a line for each task and metric."""
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
    return f"{value:.4f}" + (f" ± {se:.4f}" if isinstance(se, float) else "")
