"""The computation on a batch: forward pass, losses, packing, prefixes, frozen activations."""
