"""The parts of the server: the model and its text, the thread that takes its steps, and the HTTP interface."""
