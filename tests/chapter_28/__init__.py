"""Compared with peft's LoRA layers and verl's estimates of a divergence, both recorded, dense layers with W + s B A,
`torch.nn.functional.cross_entropy`, `FlopCounterMode`, `scaled_dot_product_attention`, the quantiles that make NF4,
one process on the whole batch, and exact expectations over three outcomes."""
