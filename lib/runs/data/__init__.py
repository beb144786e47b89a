"""Corpora and pictures that a run reads."""
