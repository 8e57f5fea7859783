"""`packs eval-tasks` as a command; what it does is `harness.evaluate_tasks`."""

import json

import click

from ..display import Display
from ..evaluation.lm_eval import evaluate_tasks
from ..packs.base import load_base_for
from ..packs.weighted_sum import open_weighted, weighted_sum
from . import options


@click.command("eval-tasks")
@click.argument("packs", nargs=-1, metavar="[PACK[=W]]...")
@click.option("--model", default="tiny", metavar="M", help="Base: folder, hub id or 'tiny'. [tiny]")
@click.option("--tasks", required=True, metavar="NAMES", help="As lm_eval calls them, by comma.")
@click.option("--num-fewshot", type=click.IntRange(0), help="Examples before each. [the task's]")
@click.option("--limit", type=click.IntRange(1), help="At most so many questions of a task.")
@click.option("--batch-size", default=8, show_default=True, type=click.IntRange(1))
@click.option("--task-path", metavar="DIR", help="Folder with tasks of your own (YAML).")
@click.option("--chat", is_flag=True, help="Put questions into the base's chat template.")
@click.option(
    "--matmul-path",
    default="quantized",
    show_default=True,
    type=click.Choice(["quantized", "transient", "dense"]),
)
@options.trust_remote_code()
@options.backend
@click.option("--json", "as_json", is_flag=True, help="Print the results.")
def command(packs, model, tasks, trust_remote_code, as_json, **how):
    """Tasks of lm-evaluation-harness, base and pack.

    Needs pip install 'mlx-packs[lm-eval]'. The harness gets its data from the hub. Several packs
    are taken as one, their deltas added up with their weights.
    """
    pack = weighted_sum([open_weighted(text) for text in packs]) if packs else None
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with Display().working("base", f"loading {model}"):
        base = load_base_for(pack, model, trust_remote_code)
    found = evaluate_tasks(base, pack, names, **how)
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def _lines(found: dict) -> list[str]:
    """A line for each task and metric."""
    lines = []
    for task, metrics in found.items():
        for metric, values in metrics.items():
            sides = " → ".join(
                _shown(values[side], values.get(f"{side}_se"))
                for side in ("base", "pack")
                if side in values
            )
            lines.append(f"{task} · {metric}  {sides}")
    return lines


def _shown(value: float, se: float | None) -> str:
    return f"{value:.4f}" + (f" ± {se:.4f}" if isinstance(se, float) else "")
