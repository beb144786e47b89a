"""Parts of parallel programs that the book gives and does not grade."""
