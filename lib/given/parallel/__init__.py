"""Given parts of parallel programs."""
