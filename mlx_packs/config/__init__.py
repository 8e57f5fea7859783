"""Run configuration: settings with their metadata, parsing, recipes of other tools. No MLX."""
