"""A trainer for graphs of layers that users write."""
