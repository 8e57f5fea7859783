"""Text from a base, with whatever pack is on it."""
