"""The page of a run, a pack or several seeds: self-contained, escaped, small, on honest axes."""

import json
from html.parser import HTMLParser

import pytest

from mlx_packs.config.choices import NUMBERS, Number
from mlx_packs.config.recipe import Recipe
from mlx_packs.packs.facts import manifest_facts
from mlx_packs.packs.pack import Pack
from mlx_packs.report import seeds
from mlx_packs.report.facts import (
    MetricChange,
    Page,
    SampleTexts,
    curve_of,
    extremes,
    name_alone,
    recipe_sections,
    samples_of,
    thinned,
)
from mlx_packs.report.page import chart, render, render_fragment, ticks
from mlx_packs.report.seeds import SeedFacts, SeedsFacts, rows_of
from mlx_packs.terminal import printable_text
from tests.helpers.packs import BASE, EVAL, write_pack

HOSTILE = (
    "</title></style><script>alert(1)</script><img src=x onerror=y>\"'\x1b]0;o\x07\u202e\ud800"
)
LINES = [{"batch": n, "loss": 4 - n / 50, "learning_rate": 1e-3} for n in range(10, 101, 10)]


class Elements(HTMLParser):
    """Names of all elements, attributes and their values, and the text, of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names, self.attributes, self.words = set(), [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words += data


def hostile_facts() -> Page:
    """Facts with a hostile text wherever one can be."""
    recipe = {"model": HOSTILE, "data": HOSTILE, "optimizer": HOSTILE, "rank_pattern": {HOSTILE: 1}}

    return Page(
        title=HOSTILE,
        status=HOSTILE,
        base=HOSTILE,
        figures=[(HOSTILE, HOSTILE)],
        changes=[MetricChange(Number(HOSTILE, HOSTILE), 2.0, 1.0)],
        held_out=HOSTILE,
        curve=curve_of(LINES),
        unit=HOSTILE,
        best=50,
        samples=[SampleTexts(HOSTILE, HOSTILE, HOSTILE, HOSTILE)],
        memory_gb=[(HOSTILE, 1.0)],
        recipe=recipe_sections(recipe),
        rows=[(HOSTILE, HOSTILE)],
        command=HOSTILE,
    )


def hostile_seeds() -> SeedsFacts:
    sections = [(HOSTILE, [(HOSTILE, HOSTILE, True)])]
    number = Number(HOSTILE, HOSTILE)
    of_each = [
        SeedFacts(*[HOSTILE] * 3, curve_of(LINES), {HOSTILE: v}, [MetricChange(number, 1.0, v)])
        for v in (1.0, 2.0)
    ]
    return SeedsFacts(HOSTILE, of_each, HOSTILE, HOSTILE, recipe=sections)


@pytest.mark.parametrize(
    ("draw", "facts"),
    [(render, hostile_facts), (render_fragment, hostile_facts), (seeds.render, hostile_seeds)],
)
def test_no_text_becomes_markup_or_steers_and_nothing_is_loaded(draw, facts):
    page = draw(facts())
    shown = Elements(page)
    assert not {"script", "img", "iframe", "object", "link", "base", "video"} & shown.names
    names = {name for name, _ in shown.attributes}
    assert not names & {"src", "srcset"} and not [name for name in names if name.startswith("on")]
    assert printable_text(page) == page and "<script>" in shown.words
    assert "url(" not in page and "@import" not in page


def test_a_page_may_load_nothing():
    shown = Elements(render(hostile_facts()))
    policies = [value for name, value in shown.attributes if name == "content"]
    assert "default-src 'none'; style-src 'unsafe-inline'" in policies
    assert "href" not in [name for name, _ in shown.attributes]


def test_a_page_of_a_long_run_stays_below_a_megabyte():
    lines = [{"batch": n, "loss": 1 / n, "valid_loss": 2 / n} for n in range(1, 20_000)]
    text = "word " * 10_000
    sample = {key: text for key in ("prompt", "wanted", "before", "after")}

    facts = Page(
        title="long",
        curve=curve_of(lines),
        samples=samples_of([sample] * 100),
        recipe=recipe_sections({"model": text, "target_modules": [text] * 1000}),
    )

    assert 100_000 < len(render(facts).encode()) < 1_000_000


def test_a_page_shows_what_there_is_and_no_more():
    page = Elements(render(Page(title="bare"))).words
    assert "No curve" in page
    for heading in ("Held-out", "Sample", "Memory", "Recipe", "Pack"):
        assert heading not in page
    facts = Page(title="x", samples=[SampleTexts("ask me", "wanted one", "", "said after")])
    page = Elements(render(facts)).words
    for text in ("ask me", "wanted one", "(nothing)", "said after"):
        assert text in page


def test_ticks_are_round_and_of_batches_whole():
    for low, high, expected in (
        (3.55, 4.6, [3.6, 3.8, 4.0, 4.2, 4.4, 4.6]),
        (10, 120, [20, 40, 60, 80, 100, 120]),
        (2, 2, [2]),
        (-3e-4, 2e-4, [-3e-4, -2e-4, -1e-4, 0, 1e-4, 2e-4]),
    ):
        assert ticks(low, high, 5) == pytest.approx(expected)
    drawn = chart({("loss", "train"): [(2, 4.0), (6, 2.0)]}, "loss", (1000, 200))
    assert [label for _, label in drawn.x_ticks] == ["2", "3", "4", "5", "6"]


def test_a_chart_maps_values_to_its_box():
    drawn = chart({("loss", "train"): [(0, 4.0), (100, 2.0)]}, "loss", (400, 200))
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in drawn.lines[0].path.split())
    assert (x0, x1) == (drawn.left, drawn.right)
    assert drawn.top < y0 < y1 < drawn.bottom
    values = {float(label): at for at, label in drawn.y_ticks}
    low, high = sorted(values)[0], sorted(values)[-1]
    scale = (values[low] - values[high]) / (high - low)
    assert y1 - y0 == pytest.approx(2 * scale, abs=0.5)
    assert chart({("loss", "train"): [(1, 1.0)]}, "loss", (400, 200)) is None


def test_a_thinned_curve_keeps_its_mean_and_its_end():
    series = [(float(n), float(n % 7)) for n in range(1, 10_002)]
    thin = thinned(series, 500)
    assert len(thin) <= 500 and thin[-1] == series[-1]
    assert sum(y for _, y in thin) / len(thin) == pytest.approx(3, abs=0.1)


def test_thinning_keeps_the_lowest_and_the_highest():
    points = [(float(x), float(x % 7)) for x in range(100_000)]
    points[50_000] = (50_000.0, -90.0)
    points[77_777] = (77_777.0, 90.0)
    shown = extremes(points, 2000)
    assert len(shown) <= 2000 and shown == sorted(shown) and set(shown) <= set(points)
    assert {points[50_000], points[77_777]} <= set(shown)
    assert extremes(points[:2000], 2000) == points[:2000]


def test_a_path_is_shown_by_its_last_part():
    paths = {
        "/home/bob/secret/notes": "notes",
        "~/data/x.jsonl": "x.jsonl",
        "../up/d": "d",
        "C:\\Users\\bob\\d": "d",
        "a/b/c": "c",
        "mlx-community/Qwen3-4B-Instruct-2507-4bit": "mlx-community/Qwen3-4B-Instruct-2507-4bit",
        "tiny": "tiny",
    }
    assert {path: name_alone(path) for path in paths} == paths
    home = "/home/bob/secret/notes"
    page = render(Page(title="t", recipe=recipe_sections({"model": home, "data": [home, home]})))
    assert "notes" in page and home not in page


def test_settings_that_differ_from_the_defaults_are_known():
    sections = dict(recipe_sections({"data": "d", "rank": 16, "batch_size": 64, "dropout": 0.0}))
    assert ("rank", "16", False) in sections["Adapter"]
    assert ("batch-size", "64", True) in sections["Optimization"]
    recipe = Recipe().to_json()
    assert recipe_sections(recipe) == recipe_sections(json.loads(json.dumps(recipe)))
    assert all(value for _, settings in recipe_sections(recipe) for _, value, _ in settings)


def test_a_manifest_alone_gives_a_page(tmp_path):
    curve = {"loss": [[1, 3.0], [2, 2.5]], "valid_loss": [["x", 1]]}
    pack = write_pack(
        tmp_path / "p",
        base=BASE | {"id": "/home/bob/models/m"},
        eval={**EVAL, "ppl_before_se": 1.0, "ppl_after_se": 0.5},
        measured={"train_s": 75.2, "peak_gb": 1.5, "plan_peak_gb": 2.0, "curve": curve},
        samples=[{"prompt": "p?", "wanted": "w", "before": "b", "after": "a"}],
        data={"source": "/home/bob/d", "rows": {"train": 3}},
        recipe={"data": "/home/bob/d", "learning_rate": 1e-3},
    )

    facts = manifest_facts(Pack.open(pack.path).manifest, "p")
    assert facts.changes == [MetricChange(NUMBERS["ppl"], 10.0, 5.0, 1.0, 0.5)]
    assert dict(facts.figures)["Training time"] == "1:15"
    assert facts.memory_gb == [("planned", 2.0), ("measured (MLX)", 1.5)]
    assert facts.curve == {"loss": [(1.0, 3.0), (2.0, 2.5)]}

    page = render(facts)
    assert "bob" not in page and "polyline" in page and "10.00 ± 1.00" in page
    assert "10.00 → 5.00" in pack._repr_html_() and "<svg" in pack._repr_html_()


@pytest.mark.parametrize(
    ("values", "mean", "first"),
    [
        ([1200.0, 1300.0], "1,250 ± 50", "1,200"),
        ([1e-8, 3e-8], "2e-08 ± 1e-08", "1e-08"),
        ([-1.0, 1.0], "0 ± 1", "-1"),
        ([26.90993, 26.90993], "26.91", "26.91"),
    ],
)
def test_a_mean_of_seeds_has_its_error_and_all_have_its_number(values, mean, first):
    (row,) = rows_of([{"x": values[0], "a": 2.0}, {"x": values[1], "b": 3.0}])
    assert (row.name, row.mean, row.values[0]) == ("x", mean, first)


def test_a_page_of_seeds_has_the_mean_of_those_with_a_result_and_of_their_curves():
    def seed(name: str, loss: float) -> SeedFacts:
        changes = [MetricChange(NUMBERS["ppl"], 8.0, loss)]
        link = f"{name}-run/report.html"
        return SeedFacts(name, "done", link, curve_of(LINES), {"loss": loss}, changes)

    done = [seed(f"seed-{i}", loss) for i, loss in enumerate((1.0, 2.0, 6.0))]
    unfinished = SeedFacts("seed-3", "Not finished", "", {"loss": [(10.0, 9.0)]})
    shown = Elements(seeds.render(SeedsFacts("three", [*done, unfinished])))
    assert "Perplexity (lower is better)" in shown.words and shown.words.count("3 ± 1.5") == 2
    assert "Not finished" in shown.words
    assert [v for k, v in shown.attributes if k == "href"] == [each.link for each in done]
    assert "±" not in Elements(seeds.render(SeedsFacts("one", [done[0], unfinished]))).words

    curves = [[(1.0, 1.0), (2.0, 3.0)], [(1.0, 3.0), (2.0, 3.0), (3.0, 9.0)]]
    assert seeds._mean(curves) == [(1.0, 2.0), (2.0, 3.0)]


def test_a_page_has_its_curve_as_a_table():
    curve = {"loss": [(10.0, 1.1), (20.0, 1.05)], "valid_loss": [(20.0, 1.5)]}
    page = render(Page(title="t", curve=curve))
    assert "<td>10</td><td>1.1</td><td>–</td>" in page
    assert "<td>20</td><td>1.05</td><td>1.5</td>" in page
