"""Sweeps: many runs of one recipe with other values of some settings, and a leaderboard."""
