"""The other parts of a fast transformer: norms, MLP, GELU, loss, float8 and grouped products."""
