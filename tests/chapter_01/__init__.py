"""Compared with `tiktoken.Encoding` built from the same ranks, Hugging Face's `tokenizers.Tokenizer`, and PyTorch's
`functional.embedding`."""
