"""What a pack's manifest and a run's report say to people: lines, rows, the card, and a page."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..adapters.spec import ranks_of
from ..bases.files import TINY, quantization_name, short_fingerprint
from ..bases.readers import is_local_model, names_file
from ..config.choices import METRICS, Number, package_of
from ..display import clock, size
from ..gates import gates_text
from ..report.facts import (
    MetricChange,
    Page,
    Points,
    changes_of,
    format_number,
    loss_name,
    name_alone,
    number,
    rate_name,
    recipe_sections,
    samples_of,
    stored_curve,
    text,
    unit_of,
)
from ..report.page import render_fragment
from ..terminal import printable_text, with_error
from .adapter_config import adapter_config
from .manifest import HUB_ID, architecture_facts, pack_facts, replaced_of, specs_of, task_of

_COMMON = 0.1  # share of an answer from which a constant answer is worth a comparison
_SHOWN_TENSORS = 4


def pack_rows(manifest: Mapping) -> list[tuple[str, str]]:
    """What a manifest says of its pack, by a label of at most seven characters."""
    base = manifest["base"]
    result = _mapping(manifest, "eval")
    rows = [
        (
            "base",
            f"{base['id']} · {base['model_type']} · {base['num_layers']} blocks · "
            f"{quantization_name(base['quantization'])} · fingerprint "
            f"{short_fingerprint(base['fingerprint'])}",
        ),
        *_adapter_rows(manifest),
        ("licence", text(manifest.get("license"))),
        ("data", _data_text(manifest)),
    ]

    for split, value in _mapping(manifest.get("data") or {}, "fingerprint").items():
        rows.append(("data", f"{text(split, 40)} has the fingerprint {text(value)}"))
    rows += [("graph", line) for line in graph_lines(_mapping(manifest, "objective"))]

    if change := format_change(result):
        held_out = f"{result.get('rows', '?')} {result.get('split', '?')} examples"
        rows.append(("eval", f"held-out {change} on {held_out}"))
    if answers := result.get("answers"):
        rows.append(("answers", format_answers(answers)))

    rows += [("phase", line) for line in phase_lines(manifest.get("phases") or ())]
    rows.append(("gates", gates_text(_mapping(manifest, "gates")).removeprefix(" · ")))
    measured = _mapping(manifest, "measured")
    versions = [f"{text(k, 40)} {text(v)}" for k, v in _mapping(manifest, "versions").items()]
    rows.append(("made", " · ".join(filter(None, (text(measured.get("created")), *versions)))))
    return [(label, value) for label, value in rows if value]


def _adapter_rows(manifest: Mapping) -> list[tuple[str, str]]:
    adapters = manifest["adapters"]
    specs = specs_of(manifest)
    full = replaced_of(manifest)
    count = f"{adapters['parameters']:,} parameters ({adapters.get('dtype') or 'float32'})"
    shown = ", ".join([*full][:_SHOWN_TENSORS])
    if len(full) > _SHOWN_TENSORS:
        shown += f" and {len(full) - _SHOWN_TENSORS} more"

    if not specs:
        return [("full", f"{count} in {len(full)} tensors of the base, stored in full: {shown}")]
    scales = sorted({round(s.scale, 4) for spec in specs.values() for s in spec.slices})
    lora = (
        f"rank {', '.join(map(str, ranks_of(specs)))} · scale {', '.join(map(str, scales))} · "
        f"{count} on {len(specs)} projections in {len(adapters['groups'])} groups"
    )
    return [("lora", lora), ("full", shown and f"{len(full)} tensors stored in full: {shown}")]


def _data_text(manifest: Mapping) -> str:
    """The training data, and what was learned of it; empty if nothing is recorded."""
    data = manifest.get("data") or {}
    objective = _mapping(manifest, "objective")
    if not data:
        return ""

    counts = " / ".join(f"{n:,} {text(split)}" for split, n in (data.get("rows") or {}).items())
    examples = f"{counts or '?'} examples"
    if count := data.get("images"):
        examples += f" with {count:,} images"

    learned = pack_facts(manifest).learned or f"loss on {objective.get('loss_on') or '?'}"
    if loss := objective.get("loss"):
        learned += f", loss {loss}"
    if classifier := manifest.get("classifier"):
        learned = classifier["problem_type"].replace("_", " ")
        if labels := classifier.get("labels"):
            learned += f" of {len(labels)} labels"
    return f"{name_alone(data.get('source'))} · {examples} · {learned}"


def graph_lines(objective: Mapping) -> list[str]:
    """A line about the graph that was trained, where it was a proxy of the base."""
    graph = objective.get("graph")
    stack = objective.get("stack")
    if graph is None or stack is None:
        return []

    change = changes_of(objective).get("ppl")
    ends = f"; its own PPL {' → '.join(change.texts)}" if change else ""
    shown = ", ".join(stack) or "no projection"
    if len(stack) > 3:
        shown = f"{len(stack)} projections ({stack[0]} … {stack[-1]})"

    head = f"{objective.get('head')}{ends}: {objective.get('note')}"
    return [f"Trained by {graph} over {shown} and the head {head}."]


def format_change(result: Mapping) -> str:
    """The numbers that lead a result, before and after; empty without any."""
    changes = changes_of(result)
    names = [name for name in ("ppl", *METRICS) if name in changes]
    if "ppl" in names:
        names = ["ppl"]
    shown = [f"{changes[n].number.label} {' → '.join(changes[n].texts)}" for n in names]
    return ", ".join(shown) + (format_commonest(result) if shown else "")


def format_commonest(result: Mapping) -> str:
    """What a constant answer would reach, beside an accuracy; empty for results without labels."""
    share = result.get("commonest_share")
    return "" if share is None else f" (commonest label {share:.4f})"


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
        return "packs generate . --prompt ..."

    if _has_images(manifest):
        return f"packs generate . --model {base} --image FILE --prompt ..."

    quantize = (manifest.get("recipe") or {}).get("quantize") or "none"
    is_file = is_local_model(base) or names_file(base)
    if quantize == "none" and not is_file and adapter_config(manifest):
        program = package_of(manifest["base"]["model_type"]).replace("-", "_")
        return f"{program}.generate --model {base} --adapter-path . --prompt ..."
    return f"packs generate . --model {base} --prompt ..."


def _has_images(manifest: Mapping) -> bool:
    return bool((manifest.get("data") or {}).get("images"))


def model_card(manifest: dict, name: str) -> str:
    kind = "pack"
    if described := pack_facts(manifest).described:
        kind = f"pack that is {described} (`--task {task_of(manifest)}`)"
    if manifest["adapters"]["modules"]:
        kind = f"LoRA {kind}"

    # without the time: two runs that are alike write the same card
    rows = pack_rows(manifest | {"measured": {}})
    lines = [
        "",
        f"# {name}",
        "",
        f"A {kind} for `{manifest['base']['id']}`.",
        "",
        *(f"- {label}: {value}" for label, value in rows),
        *("", "```", card_command(manifest), "```", ""),
    ]
    samples = len(lines)
    lines += _card_recipe(manifest)
    lines = [line.replace("<", "&lt;") for line in lines]  # no name or value is a tag
    lines[samples:samples] = _card_samples(manifest)
    return printable_text("\n".join([*_card_metadata(manifest), *lines]) + "\n")


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


def manifest_facts(manifest: Mapping, title: str) -> Page:
    """The page of a pack, without its run and without its tensors."""
    measured = _mapping(manifest, "measured")
    result = _mapping(manifest, "eval")
    changes = all_changes(result)

    figures = figures_of(changes, measured)
    if files := manifest.get("files"):
        figures.append(("Size", size(sum(facts["bytes"] for facts in files.values()))))

    base = manifest["base"]
    named = {**manifest, "base": {**base, "id": name_alone(base["id"])}}
    command = re.sub(r"^(packs \w+) \.", lambda m: f"{m[1]} {title}", card_command(named))
    command = text(command, 400)
    rows = [(label, text(value, 400)) for label, value in pack_rows(named)]

    return Page(
        title=text(title),
        base=" · ".join(value for _, value in rows[:2]),
        figures=figures,
        changes=changes,
        held_out=held_out_line(result),
        curve=stored_curve(manifest),
        unit=unit_of(measured),
        loss_name=loss_name(task_of(manifest)),
        best=number(_mapping(manifest, "end").get("best_batch")),
        samples=samples_of(manifest.get("samples")),
        memory_gb=memory_of(measured),
        recipe=recipe_sections(manifest.get("recipe") or {}),
        rows=[row for row in rows[2:] if row[0] != "eval"],
        command=command,
    )


def notebook_html(manifest: Mapping, title: str, curve: Mapping[str, Points] | None = None) -> str:
    """Name, results and loss curve of a pack; a given curve takes precedence."""
    facts = manifest_facts(manifest, title)
    return render_fragment(replace(facts, curve=curve or facts.curve))


def report_html(report: Mapping, title: str) -> str:
    return render_fragment(Page(title=title, figures=figures_of(all_changes(report), report)))


def all_changes(result: Mapping) -> list[MetricChange]:
    """Every number before and after, the share of right answers first."""
    changes = [*changes_of(result).values()]
    if answers := _mapping(result, "answers"):
        ends = [_mapping(answers, end) for end in ("before", "after")]
        before, after, *errors = (number(end.get(key)) for key in ("share", "se") for end in ends)
        if before is not None and after is not None:
            title = f"Right answers ({text(answers.get('metric'), 40)}), %"
            shares = (None if v is None else 100 * v for v in (before, after, *errors))
            changes.insert(0, MetricChange(Number(title, title, digits=1), *shares))
    return changes


def held_out_line(result: Mapping) -> str:
    """How many examples of which split the metrics are of, and what ± means."""
    rows = number(result.get("rows"))
    if rows is None:
        return ""

    line = f"On {rows:,.0f} examples of {text(result.get('split')) or 'the held-out split'}"
    targets = number(result.get("targets"))
    if targets is not None:
        line += f", {targets:,.0f} supervised tokens"
    line += "."
    if (share := number(result.get("commonest_share"))) is not None:
        line += f" The commonest label has {share:.1%} of them."
    if any(key.endswith("_after_se") for key in result):
        line += " ± is the standard error."
    return line


def figures_of(changes: Sequence[MetricChange], measured: Mapping) -> list[tuple[str, str]]:
    """The first number before and after, and the time and speed of a run, by their titles."""
    figures = []
    if changes:
        first = changes[0]
        ends = (format_number(v, None, first.number.digits) for v in (first.before, first.after))
        figures.append((first.title, " → ".join(ends)))

    if (seconds := number(measured.get("train_s"))) is not None:
        figures.append(("Training time", clock(seconds)))

    for unit in ("tokens", "pairs"):
        if (rate := number(measured.get(f"{unit}_per_s"))) is not None:
            figures.append((rate_name(unit), f"{rate:,.0f}"))
    return figures


def memory_of(measured: Mapping) -> list[tuple[str, float]]:
    names = {
        "plan_peak_gb": "planned",
        "peak_gb": "measured (MLX)",
        "process_peak_gb": "whole process",
    }
    amounts = {name: number(measured.get(key)) for key, name in names.items()}
    return [(name, amount) for name, amount in amounts.items() if amount is not None and amount > 0]


def _mapping(values: Mapping, key: str) -> Mapping:
    part = values.get(key)
    return part if isinstance(part, Mapping) else {}
