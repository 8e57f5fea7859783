"""The computation on a batch: forward passes, losses, sequence packing, cached frozen activations."""
