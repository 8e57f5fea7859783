"""`packs studio`: a local page that shows the runs of a folder."""
