"""Methods that are kept while evidence supports them; the core only knows their names."""
