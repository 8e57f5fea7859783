"""Images for language models that have a vision tower: pictures, features, and their tokens."""
