"""The page of several seeds: numbers with their errors, curves with their mean, escaped text."""

from dataclasses import replace

import pytest

from mlx_packs.config.choices import NUMBERS, Number
from mlx_packs.report import seeds as report
from mlx_packs.report.facts import MetricChange, curve_of
from mlx_packs.report.seeds import SeedFacts, SeedsFacts, render, rows_of
from mlx_packs.terminal import printable_text
from tests.report.test_page import HOSTILE, LINES, Elements

LOSSES = (1.0, 2.0, 6.0)


def seed(name: str, loss: float, **facts) -> SeedFacts:
    changes = [MetricChange(NUMBERS["ppl"], 8.0, loss)]
    return SeedFacts(name, "done", "", curve_of(LINES), {"loss": loss}, changes, **facts)


THREE = SeedsFacts("three", [seed(f"seed-{i}", loss) for i, loss in enumerate(LOSSES)])


@pytest.mark.parametrize(
    ("values", "mean", "first"),
    [
        ([1.0, 2.0, 6.0], "3 ± 1.5", "1"),
        ([1200.0, 1300.0], "1,250 ± 50", "1,200"),
        ([1e-8, 3e-8], "2e-08 ± 1e-08", "1e-08"),
        ([-1.0, 1.0], "0 ± 1", "-1"),
        ([26.90993, 26.90993], "26.91", "26.91"),
        ([0.0, 0.0], "0", "0"),
    ],
)
def test_a_mean_has_its_error(values, mean, first):
    (row,) = rows_of([{"x": value} for value in values])
    assert (row.mean, row.values[0]) == (mean, first)


def test_numbers_that_not_all_seeds_have_are_no_row():
    assert [row.name for row in rows_of([{"a": 1.0, "b": 2.0}, {"b": 3.0, "c": 1.0}])] == ["b"]


def test_a_page_has_means_values_and_links():
    linked = [replace(each, link=f"{each.name}-run/report.html") for each in THREE.seeds]
    page = render(replace(THREE, seeds=linked))
    shown = Elements(page)
    assert "Perplexity (lower is better)" in shown.words and page.count("3 ± 1.5") == 2
    assert [v for k, v in shown.attributes if k == "href"] == [each.link for each in linked]
    assert "finished" not in shown.words


def test_a_mean_is_of_the_seeds_with_a_result():
    unfinished = SeedFacts("seed-3", "Not finished", "", {"loss": [(10.0, 9.0)]})
    shown = Elements(render(replace(THREE, seeds=[*THREE.seeds, unfinished]))).words
    assert "3 ± 1.5" in shown and "Not finished" in shown

    one = Elements(render(replace(THREE, seeds=[THREE.seeds[0], unfinished]))).words
    assert "±" not in one


def test_curves_have_a_mean_where_all_have_a_value():
    curves = [[(1.0, 1.0), (2.0, 3.0)], [(1.0, 3.0), (2.0, 3.0), (3.0, 9.0)]]
    assert report._mean(curves) == [(1.0, 2.0), (2.0, 3.0)]
    assert report._mean(curves[:1]) == []


def test_no_text_becomes_markup_or_steers():
    recipe = [(HOSTILE, [(HOSTILE, HOSTILE, True)])]
    number = Number(HOSTILE, HOSTILE)
    texts, curve = [HOSTILE] * 3, curve_of(LINES)
    seeds = [
        SeedFacts(*texts, curve, {HOSTILE: value}, [MetricChange(number, 1.0, value)])
        for value in (1.0, 2.0)
    ]
    page = render(SeedsFacts(HOSTILE, seeds, HOSTILE, HOSTILE, recipe=recipe))
    shown = Elements(page)
    assert not {"script", "img", "iframe", "object", "link"} & shown.names
    assert not [name for name, _ in shown.attributes if name.startswith("on") or name == "src"]
    assert printable_text(page) == page and "<script>" in shown.words
