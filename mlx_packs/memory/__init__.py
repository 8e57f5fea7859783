"""Peak estimates, recommendations, and the choice of the matmul path."""
