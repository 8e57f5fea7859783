"""A fresh Python interpreter."""

import os
import subprocess
import sys


def run_python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter; its standard output."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
