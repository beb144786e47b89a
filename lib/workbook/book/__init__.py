"""What the book consists of: its catalog, the stubs, whose code runs, the back matter."""
