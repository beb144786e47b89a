"""Sizes and names of the models, and of the machines that run them."""
