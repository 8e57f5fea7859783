"""One task a file."""
