"""What makes large operations fast on a CPU; `runtime` and `ops.profile` load it by name."""
