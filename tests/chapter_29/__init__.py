"""Compared with verl's losses, advantages, weights and aggregations, whose values are recorded, whole matrices and
autograd in float64, Python's `fractions`, PyTorch's clipping, `generate_many`, the model's own second pass, and for
ranks one process."""
