"""Compared with Transformers' `ViTForImageClassification`, timm's `VisionTransformer` where it is installed, and
PyTorch's `F.unfold` and `nn.TransformerEncoderLayer`.
"""
