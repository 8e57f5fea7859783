"""A base whose blocks are split over several machines (``--pipeline``)."""
