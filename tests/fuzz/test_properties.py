"""Properties of what reads and prints strangers' text, over inputs that hypothesis draws."""

import json

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_packs.config.fields import read_settings
from mlx_packs.config.recipe import resolve
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.data.rows import read_rows
from mlx_packs.errors import PackError, printable
from mlx_packs.files import is_hub_id
from mlx_packs.packs.hub import split_name

settings.register_profile(
    "fuzz",
    derandomize=True,
    database=None,
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("fuzz")

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(
    sorted({*vars(TrainConfig()), *vars(LoRAConfig()), "lora_parameters", "phases"})
)


def reads(function, *args) -> object:
    """What a reader returns; None if it rejects its input in one line."""
    try:
        return function(*args)
    except PackError as error:
        assert "\n" not in printable(error.message)
        return None


@settings(max_examples=20)  # which take half a second to draw
@given(st.lists(st.dictionaries(st.text(max_size=8), JSON, max_size=3), min_size=1, max_size=3))
def test_rows_are_read_as_they_are_written(tmp_path, values):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    rows = read_rows(file)
    assert json.dumps([row.value for row in rows]) == json.dumps(values)


@given(st.dictionaries(NAMES | st.text(max_size=8), JSON, max_size=3))
def test_a_recipe_of_any_values_is_complete_or_an_error(values):
    recipe = reads(resolve, values)
    if recipe is not None:
        assert resolve(recipe.to_json()) == recipe


@given(NAMES, st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans())
def test_yaml_and_json_files_mean_the_same(tmp_path, name, value):
    files = tmp_path / "c.yaml", tmp_path / "c.json"
    files[0].write_text(yaml.safe_dump({name: value}))
    files[1].write_text(json.dumps({name: value}))
    assert read_settings(files[0]) == read_settings(files[1])


@given(st.from_regex(r"[\w.@/-]{0,30}", fullmatch=True) | st.text(max_size=30))
def test_a_name_of_the_hub_never_leads_outside(name):
    if (result := reads(split_name, name)) is not None:
        repo, revision = result
        assert is_hub_id(repo) and ".." not in repo + revision and not revision.startswith("/")
