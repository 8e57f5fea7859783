"""A pack that learns from rated answers: its folder, its rows, its candidates, its versions."""
