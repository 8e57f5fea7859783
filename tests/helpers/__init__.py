"""What several test modules share: models, rows, checkpoints, a hub, emulated backends."""
