"""What trains on a base, and which adapters a pack has: specs, methods, tensors."""
