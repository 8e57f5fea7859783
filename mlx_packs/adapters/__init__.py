"""Trainable parameters of a base and the adapters of a pack: specs, methods, tensors."""
