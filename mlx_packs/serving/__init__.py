"""Many packs over one base, served over HTTP."""
