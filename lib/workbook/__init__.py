"""The machinery: which chapters there are, whose code runs, stubs, checks and the command line."""
