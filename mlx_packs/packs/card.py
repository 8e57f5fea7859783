"""The manifest for readers: the model card, and lines about results and phases."""

import html
import json
import re
from collections.abc import Mapping, Sequence

from ..adapters.spec import leaf_names, ranks_of
from ..bases.files import TINY
from ..bases.readers import is_local_model, names_file
from ..config.choices import METRICS, package_of
from ..report.facts import progress_series, samples_of, stored_curve, thinned
from ..report.recipe import recipe_sections
from ..terminal import printable_text, with_error
from .adapter_config import adapter_config
from .manifest import (
    HUB_ID,
    architecture_facts,
    has_score_head,
    pack_facts,
    replaced_of,
    specs_of,
    task_of,
)

_MANY = 1e9  # of a perplexity, whose digits say nothing then
_COMMON = 0.1  # share of an answer from which a constant answer is worth a comparison


def model_card(manifest: dict, name: str) -> str:
    base = manifest["base"]
    specs = specs_of(manifest)
    what = f"rank {', '.join(map(str, ranks_of(specs)))} on {', '.join(leaf_names(specs))}"
    full = _full_tensors(manifest)

    if not specs:
        what = full
    elif replaced_of(manifest):
        what += f", {full}"

    kind = "pack"
    if described := pack_facts(manifest).described:
        kind = f"pack that is {described} (`--task {task_of(manifest)}`)"
    if specs:
        kind = f"LoRA {kind}"

    lines = [
        "",
        f"# {name}",
        "",
        f"A {kind} for `{base['id']}` ({base['model_type']}, {base['num_layers']} blocks), {what}.",
        "",
    ]

    result = manifest.get("eval") or {}
    change = format_change(result)
    if perplexities := _perplexities(result):
        ratio = result["ppl_after"] / result["ppl_before"] - 1
        before, after = perplexities
        change = f"perplexity: {before} before, {after} with the pack ({ratio:+.0%})"

    if change:
        examples = f"{result.get('rows', '?')} examples of `{result.get('split', '?')}`"
        lines += [f"Held-out {change}, on {examples}.", ""]

    if answers := result.get("answers"):
        lines += [f"Right answers: {format_answers(answers)}.", ""]

    if phases := manifest.get("phases"):
        lines += ["Trained in phases:", "", *(f"- {line}" for line in phase_lines(phases)), ""]

    lines += [f"{line}\n" for line in graph_lines(manifest.get("objective") or {})]
    lines += ["```", card_command(manifest), "```", ""]
    samples = len(lines)
    lines += [*_card_curve(manifest), *_card_recipe(manifest)]
    lines += [f"Base fingerprint: `{base['fingerprint']}`"]

    if license := manifest.get("license"):
        lines += ["", f"Licence: {license}"]

    lines += _card_data(manifest.get("data") or {})
    lines = [line.replace("<", "&lt;") for line in lines]  # no name or value is a tag
    lines[samples:samples] = _card_samples(manifest)
    return printable_text("\n".join([*_card_metadata(manifest), *lines]) + "\n")


def _full_tensors(manifest: dict) -> str:
    """How many tensors of the base are stored in full, and the head that is none of them."""
    scores = has_score_head(manifest)
    count = len(replaced_of(manifest)) - scores
    parts = []
    if count:
        parts.append(f"{count} of its tensors fine-tuned in full")
    if scores:
        parts.append("and a score head beside")
    return ", ".join(parts)


def _card_metadata(manifest: dict) -> list[str]:
    """The YAML that the Hub reads; a base is named there only if it is a hub id."""
    base = manifest["base"]["id"]
    is_lora = bool(manifest["adapters"]["modules"])
    lines = ["---", "library_name: mlx"]

    if license := manifest.get("license"):
        lines.append(f"license: {json.dumps(license)}")

    if re.fullmatch(HUB_ID, base, re.ASCII):
        lines.append(f"base_model: {json.dumps(base)}")
        lines.append(f"base_model_relation: {'adapter' if is_lora else 'finetune'}")

    task = "image-text-to-text" if _has_images(manifest) else architecture_facts(manifest).hub_task
    task = pack_facts(manifest).hub or task
    lines.append(f"pipeline_tag: {task}")

    tags = ["mlx", "mlx-packs"]
    if is_lora:
        tags.insert(1, "lora")
    return [*lines, f"tags: [{', '.join(tags)}]", "---"]


def _has_images(manifest: Mapping) -> bool:
    data = manifest.get("data") or {}
    return bool(data.get("images"))


def _card_data(data: Mapping) -> list[str]:
    """Name and fingerprints of the training data, no example of it."""
    prints = data.get("fingerprint")
    if not isinstance(prints, dict) or not prints:
        return []

    rows = data.get("rows") or {}
    lines = ["", f"Data `{data.get('source', '?')}`, by fingerprint:", ""]

    for split, value in prints.items():
        count = f", {rows[split]:,} examples" if split in rows else ""
        lines.append(f"- {split}{count}: `{value}`")
    return lines


def _card_samples(manifest: Mapping) -> list[str]:
    lines = []
    for sample in samples_of(manifest.get("samples")):
        parts = {"Prompt": sample.prompt, "Expected": sample.wanted}
        parts |= {"Base model": sample.before, "With the pack": sample.after}

        for name, content in parts.items():
            if content:
                lines += [f"{name}:", "", f"<pre>{html.escape(content, quote=False)}</pre>", ""]

    if not lines:
        return []
    return ["## Sample", "", *lines]


def _card_curve(manifest: Mapping) -> list[str]:
    curve = stored_curve(manifest)
    names = progress_series(curve)
    training, valid = (dict(thinned(curve.get(name, []), 10)) for name in names)
    batches = sorted({*training, *valid})
    if len(batches) < 2:
        return []

    rows = [
        f"| {batch:,.0f} | {_decimals(training.get(batch))} | {_decimals(valid.get(batch))} |"
        for batch in batches
    ]
    measure = names[0]
    heads = [f"| batch | training {measure} | validation {measure} |", "|---:|---:|---:|"]
    return [f"## {measure.capitalize()}", "", *heads, *rows, ""]


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _card_recipe(manifest: Mapping) -> list[str]:
    rows = [
        f"| {name} | {_cell(value)} |"
        for _, settings in recipe_sections(manifest.get("recipe") or {})
        for name, value, differs in settings
        if differs
    ]

    if not rows:
        return []
    note = "Settings that differ from the defaults; `pack.json` has all of them."
    return ["## Recipe", "", note, "", "| setting | value |", "|---|---|", *rows, ""]


def _cell(value: str) -> str:
    """Code in a cell of a table; a text of several lines becomes one."""
    shown = " ".join(value.split()).replace("`", "'").replace("|", "\\|")
    return f"`{shown}`" if shown else ""


def _perplexities(result: Mapping) -> list[str]:
    whens = ("before", "after")
    if any(result.get(f"ppl_{when}") is None for when in whens):
        return []
    return [format_perplexity(result[f"ppl_{w}"], result.get(f"ppl_{w}_se")) for w in whens]


def graph_lines(objective: Mapping) -> list[str]:
    """A line about the graph that was trained, where it was a proxy of the base."""
    graph = objective.get("graph")
    stack = objective.get("stack")
    if graph is None or stack is None:
        return []

    own = ""
    before = objective.get("ppl_before")
    after = objective.get("ppl_after")
    if before is not None and after is not None:
        own = f"; its own PPL {before:.2f} → {after:.2f}"

    shown = ", ".join(stack) or "no projection"
    if len(stack) > 3:
        shown = f"{len(stack)} projections ({stack[0]} … {stack[-1]})"

    return [
        f"Trained by {graph} over {shown} and the head "
        f"{objective.get('head')}{own}: {objective.get('note')}."
    ]


def format_change(result: Mapping) -> str:
    """Perplexity or metrics of embeddings before and after; empty without any."""
    if perplexities := _perplexities(result):
        return f"PPL {' → '.join(perplexities)}"

    names = [n for n in METRICS if f"{n}_before" in result and f"{n}_after" in result]
    before, after = (
        ", ".join(
            f"{METRICS[n].described} "
            + with_error(result[f"{n}_{when}"], result.get(f"{n}_{when}_se"), ".4f")
            for n in names
        )
        for when in ("before", "after")
    )
    return f"{before} → {after}{format_commonest(result)}" if names else ""


def format_commonest(result: Mapping) -> str:
    """What a constant answer would reach, beside an accuracy; empty for results without labels."""
    if (share := result.get("commonest_share")) is None:
        return ""
    text = f" (commonest label {share:.4f}"
    if only := result.get("predicts_only"):
        text += f"; predicts only '{only}'"
    return f"{text})"


def format_perplexity(ppl: float, se: float | None, digits: int = 2) -> str:
    return with_error(ppl, se, ".3g" if ppl >= _MANY else f".{digits}f")


def format_answers(answers: Mapping, examples: str = "examples") -> str:
    """The share of right answers: ``exact 0.0 % → 97.5 ± 1.1 % of 200 examples``.

    ``answers`` has metric, rows, and accuracies ``before`` and ``after`` (None without a pack).
    """
    scores = [score for when in ("before", "after") if (score := answers[when])]
    shares = [f"{with_error(100 * s['share'], 100 * s['se'] or None, '.1f')} %" for s in scores]
    text = f"{answers['metric']} {' → '.join(shares)} of {answers['rows']:,} {examples}"
    valid = [f"{100 * v:.1f} %" for score in scores if (v := score.get("valid")) is not None]
    if valid:
        text += f" (valid JSON {' → '.join(valid)})"
    share = answers.get("commonest_share") or 0
    if share >= _COMMON and share * answers["rows"] > 1:
        text += f" (commonest answer {100 * share:.1f} %)"
    if only := scores[-1].get("only"):
        text += f" (answers only '{only:.60}')"
    return text


def answer_line(answers: Mapping, examples: str = "examples") -> str:
    """Return an `AnswerReport` in JSON as a line for people; ``examples`` is what was asked."""
    metric, rest = format_answers(answers, examples).split(" ", 1)
    return f"{metric:<7} {rest}"


def mistake_lines(mistakes: Sequence[tuple[str, str, int]]) -> list[str]:
    """Return the line of the most frequent mistakes; none without any."""
    if not mistakes:
        return []
    pairs = [f"{right} → {given} ({n})" for right, given, n in mistakes[:3]]
    return [f"wrong   most often {' · '.join(pairs)}"]


def phase_lines(phases: Sequence[Mapping]) -> list[str]:
    lines = []
    for phase in phases:
        before = phase["before"]
        after = phase["after"]
        names = sorted(set(before) & set(after), key=lambda name: (name != phase["name"], name))
        changes = [f"{n} {before[n]['ppl']:.2f} → {after[n]['ppl']:.2f}" for n in names]

        replayed = f", {phase['replay']:.0%} replayed" if phase["replay"] else ""
        lines.append(
            f"{phase['name']}: {phase['steps']:,} updates on {phase['data']}{replayed} · held-out "
            f"PPL of {' · '.join(changes) or '?'}"
        )

    return lines


def card_command(manifest: dict) -> str:
    """A command that loads the pack: stock mlx-lm's, where it loads the same."""
    base = manifest["base"]["id"]

    if not architecture_facts(manifest).in_mlx_lm:
        return f"packs merge . --model {base} --out merged  # a folder of sentence-transformers"
    if command := pack_facts(manifest).command:
        return command.format(base=base)
    if base == TINY:
        return "packs generate --pack . --prompt ..."

    if _has_images(manifest):
        return f"packs generate --model {base} --pack . --image FILE --prompt ..."

    quantize = (manifest.get("recipe") or {}).get("quantize") or "none"
    is_file = is_local_model(base) or names_file(base)
    if quantize == "none" and not is_file and adapter_config(manifest):
        program = package_of(manifest["base"]["model_type"]).replace("-", "_")
        return f"{program}.generate --model {base} --adapter-path . --prompt ..."
    return f"packs generate --model {base} --pack . --prompt ..."
