"""What ``lib.runs.reinforce`` is made of: tasks with checkers, rollouts, updates, and the loop around them."""
