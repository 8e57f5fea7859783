"""What a training step costs on an Apple GPU, predicted from the graph that MLX lays out for it.

`libmlx` makes MLX's CPU build lay out the graph of a Metal build, `lazy_graph` reads it from MLX's
memory, `capture` does both in a process of its own, `costs` gives bytes, operations and dispatches
of each primitive, `seconds` turns them into seconds, `step` sums them over a whole model, and
`epoch` over the batches of one pass over data.
"""
