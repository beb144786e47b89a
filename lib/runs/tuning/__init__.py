"""Fine-tuning: conversations as rows of tokens, what is trained of a model, and the folder that comes out."""
