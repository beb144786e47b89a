"""Compared with `math.comb` and exact fractions, SciPy's `binomtest`, NumPy, single calls of the model in float64,
the windows of lm-evaluation-harness, all subsets of a few samples, and simulated questions."""
