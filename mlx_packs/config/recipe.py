"""Recipes of runs and packs that an older version wrote, by the names of today."""

from collections.abc import Mapping

from ..errors import did_you_mean

# Keys of a recipe, a manifest's `measured` and a report, as older versions spelled them.
RENAMED_KEYS = {
    "base_path": "matmul_path",
    "base_path_ms": "matmul_path_ms",
    "base_paths_at_work": "matmul_paths",
    "cache_prefix": "cache_frozen",
}


def current_keys(values: Mapping) -> dict:
    """Mapping of a file that an older version wrote, with today's name for every key."""
    return {RENAMED_KEYS.get(key, key): value for key, value in values.items()}


def unknown_key_hint(key: str, valid: list[str]) -> str:
    """Sentence that names what to write instead of an unknown key."""
    if key in RENAMED_KEYS:
        return f"It is called '{RENAMED_KEYS[key]}' now."
    return did_you_mean(key, valid)
