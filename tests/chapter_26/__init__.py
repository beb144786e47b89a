"""Compared with `blake2b` and NumPy's generator by the formulas, all pairs by brute force, scikit-learn's
`LogisticRegression`, `torch.optim.AdamW` in float64, and chapter 7's `TokenBatches` on the joined row."""
