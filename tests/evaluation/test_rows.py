"""Rows that are evaluated, or compared after a merge, are read as the pack was trained on them."""

import json
from types import SimpleNamespace

import pytest

from mlx_packs import Pack
from mlx_packs.config.data import DataConfig
from mlx_packs.convert.fidelity import FidelityMeter
from mlx_packs.data.in_memory import source_of
from mlx_packs.display import QUIET, Display
from mlx_packs.evaluation.rows import columns_of, comparison_data, evaluation_rows
from tests.helpers.errors import raises
from tests.helpers.packs import edit_manifest
from tests.helpers.preferences import preference
from tests.helpers.rows import CHATS, write_rows

OWN = {"prompt_feature": "question", "completion_feature": "answer"}


def test_rows_are_those_of_any_place(tmp_path):
    row = {"question": "Where?", "answer": "There."}
    folder = write_rows(tmp_path, train=[row] * 2, test=[row] * 2)
    for data in (source_of([row] * 2), str(folder / "test.jsonl"), str(folder)):
        rows = evaluation_rows(DataConfig(data=data, **OWN), "test")
        assert [r.value for r in rows] == [row] * 2
        assert [r.where.rpartition("/")[2] for r in rows][-1] in ("rows[1]", "test.jsonl:2")


def test_rows_with_other_names_are_named_with_the_names_of_the_pack(tmp_path):
    row = {"prompt": "Where?", "completion": "There."}
    folder = write_rows(tmp_path, train=[row] * 2, test=[row])
    with raises("data", None, "train.jsonl:1", "{question, answer}"):
        evaluation_rows(DataConfig(data=str(folder), **OWN), "test")


@pytest.mark.parametrize("pixels", [{"max_pixels": 0}, {"max_pixels": 784}, {}])
def test_images_are_as_large_as_in_training_but_not_of_the_network(pixels):
    pack = SimpleNamespace(_part=lambda name: {"allow_urls": True, **pixels})
    columns = columns_of(pack, "somewhere")
    expected = pixels.get("max_pixels", DataConfig.max_pixels)
    assert (columns.max_pixels, columns.allow_urls) == (expected, False)
    columns = columns_of(pack, "somewhere", max_pixels=0, allow_urls=True)
    assert (columns.max_pixels, columns.allow_urls) == (0, True)


def test_packs_data_has_the_settings_of_images(here, run):
    write_rows(here / "d", train=CHATS, valid=CHATS)
    code, _, err = run("data", "d", "--max-pixels", "0", "--allow-urls", "--samples", "0")
    assert code == 0, err
    assert run("data", "d", "--max-pixels", "-1")[0] == 2


def chosen(pack: Pack, data=None) -> tuple[str, str]:
    columns, compared_on = comparison_data(pack, [pack], data)
    return columns.data, compared_on


@pytest.fixture
def pack(trained_copy) -> Pack:
    """A pack that was trained on the folder ``d``, which is here."""
    return Pack.open("o")


def test_data_is_as_named_or_of_the_pack_found_by_its_name_or_its_run(pack):
    assert chosen(pack, "d/valid.jsonl") == ("d/valid.jsonl", "valid.jsonl")
    assert chosen(pack) == ("d", "d, which o was trained on")

    data = pack.path.absolute().with_name("d").rename("moved")
    config = pack.path.with_name("o-run") / "config.json"
    run = json.loads(config.read_text())
    run["recipe"]["data"] = str(data.absolute())
    config.write_text(json.dumps(run))
    assert chosen(pack) == (str(data.absolute()), "moved, which o was trained on")


def test_a_line_says_that_the_data_has_gone_or_changed(pack):
    folder = pack.path.with_name("d")
    for file in folder.iterdir():
        file.write_text(file.read_text().replace("i", "y"))
    for place in (folder, folder.with_name("e")):
        folder = folder.rename(place)
        assert chosen(pack)[0] == "tiny"
        assert "bundled examples: the data of o (d) is not here" in chosen(pack)[1]


def test_a_pack_of_bundled_data_or_of_rows_in_memory_is_compared_on_it(pack):
    edit_manifest(pack.path, lambda manifest: manifest["recipe"].update(data="tiny"))
    assert chosen(Pack.open("o"))[0] == "tiny"
    pack.examples = source_of([{"prompt": "a", "completion": "b"}] * 3)
    data, compared_on = chosen(pack)
    assert data is pack.examples and compared_on == "rows-in-memory, which o was trained on"


def test_a_sum_is_compared_on_the_data_of_a_part_that_is_here(pack):
    gone = Pack({**pack.manifest, "recipe": {**pack.manifest["recipe"], "data": "gone"}})
    columns, compared_on = comparison_data(gone, [gone, pack], None)
    assert (columns.data, compared_on) == ("d", "d, which o was trained on")


def test_preferences_are_compared_by_their_chosen_completions(pack, shared_tiny):
    columns = columns_of(pack, source_of([preference(i) for i in range(3)]))
    meter = FidelityMeter(shared_tiny, pack, columns, 8, Display(QUIET))
    assert sum(len(batch.examples) for batch in meter.batches) == 3
