"""Runs at full size: programs for machines with accelerators."""
