"""Operations of the training path; each module starts with its reference in plain MLX."""
