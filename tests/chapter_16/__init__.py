"""Compared with `torch.optim.SGD` and its Nesterov momentum, the tensors that `saved_tensors_hooks` sees, and every
layout there is.
"""
