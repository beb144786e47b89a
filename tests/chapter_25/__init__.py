"""Compared with `torch.optim.Muon` and `torch.optim.Adafactor`, the singular value decomposition,
`FlopCounterMode`, chapter 7's AdamW, Transformers' GPT-2 and Llama, and for ranks Muon on the whole matrices."""
