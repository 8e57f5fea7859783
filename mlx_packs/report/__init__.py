"""A page and a notebook's view of a run or a pack; what they show is in `facts`."""
