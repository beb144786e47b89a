"""What `lib.runs.evaluate` asks of a model, task kind by task kind, and the box in which generated programs run."""
