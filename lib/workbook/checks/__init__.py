"""The pytest plugin: collect, run in a child, report."""
