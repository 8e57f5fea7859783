"""Bases whose transformer blocks stay on disk, and are read whenever they are computed."""
