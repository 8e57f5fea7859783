"""What is computed on a batch: forwards, losses, sequence packing, cached frozen activations."""
