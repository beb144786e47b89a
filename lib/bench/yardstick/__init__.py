"""Vision transformers on several GPUs beside timm's: whole steps, what a step loses,
and the parts that only they use.
"""
