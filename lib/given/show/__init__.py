"""What the chapters show: figures, coloured tokens, profiles, progress."""
