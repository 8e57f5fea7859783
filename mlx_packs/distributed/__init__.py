"""Several ranks that train one pack: what they exchange, and how they end together."""
