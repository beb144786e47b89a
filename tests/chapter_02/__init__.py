"""Compared with the rotation in Transformers' `modeling_llama`, and the paper's explicit matrices."""
