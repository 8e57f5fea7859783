"""The examples that a merged or combined pack is compared on, where none are named."""

import json

import pytest

from mlx_packs import Pack
from mlx_packs.convert.fidelity import FidelityMeter
from mlx_packs.data.in_memory import source_of
from mlx_packs.display import QUIET, Display
from mlx_packs.evaluation.rows import columns_of, comparison_data
from tests.helpers.packs import edit_manifest
from tests.helpers.preferences import preference


def chosen(pack: Pack, data=None) -> tuple[str, str]:
    columns, compared_on = comparison_data(pack, [pack], data)
    return columns.data, compared_on


@pytest.fixture
def pack(trained_copy) -> Pack:
    """A pack that was trained on the folder ``d``, which is here."""
    return Pack.open("o")


def test_the_data_of_the_pack_is_found_by_its_name_and_by_its_run(pack, monkeypatch):
    assert chosen(pack) == ("d", "d, which o was trained on")

    data = pack.path.absolute().with_name("d").rename("moved")
    config = pack.path.with_name("o-run") / "config.json"
    run = json.loads(config.read_text())
    run["recipe"]["data"] = str(data.absolute())
    config.write_text(json.dumps(run))
    assert chosen(pack) == (str(data.absolute()), "moved, which o was trained on")


def test_examples_that_are_named_come_first(pack):
    assert chosen(pack, "d/valid.jsonl") == ("d/valid.jsonl", "valid.jsonl")
    assert chosen(pack, "tiny") == ("tiny", "tiny")


def test_a_line_says_that_the_data_has_gone_or_changed(pack):
    folder = pack.path.with_name("d")
    for file in folder.iterdir():
        file.write_text(file.read_text().replace("i", "y"))
    for place in (folder, folder.with_name("e")):
        folder = folder.rename(place)
        data, compared_on = chosen(pack)
        assert data == "tiny"
        assert compared_on.startswith("the bundled examples: the data of o (d) is not here")


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
