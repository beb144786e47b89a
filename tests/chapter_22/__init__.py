"""Compared with known laws, `scipy.optimize.least_squares` and `minimize_scalar`, the published constants of
Chinchilla, exact noise scales, and training at several widths.
"""
