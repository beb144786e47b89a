"""Compared with Transformers' generate and with attention on whole keys and values."""
