"""Sizes of the models, names of their weights, and data sheets of the machines that run them."""
