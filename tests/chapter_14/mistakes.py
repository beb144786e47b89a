"""What goes wrong when people write kernels."""

from lib.workbook.grading import edits

edits("""
# vector_add
the store has no mask: the last program writes beyond the end of the tensor
@@ vector_add_kernel
- total, mask=inside => total
the loads have no mask: the last program reads beyond the end of x and y
@@ vector_add_kernel
- tl.load(x + index, mask=inside) + tl.load(y + index, mask=inside) => tl.load(x + index) + tl.load(y + index)
the mask says <= n instead of < n: one element too many
@@ vector_add_kernel
- index < n => index <= n
the number of programs is rounded down, so that the ragged end is never computed
- triton.cdiv(x.numel(), block) => x.numel() // block
program i starts at element i instead of i * BLOCK
@@ vector_add_kernel
- .to(tl.int64) * BLOCK =>
a single program does everything: its block is as long as the tensor
- block = 64 if INTERPRETED else 2048 => block = triton.next_power_of_2(max(x.numel(), 1))
- (triton.cdiv(x.numel(), block),) => (1,)
PyTorch computes the sum, and no kernel is launched
- out = torch.empty_like(x) => return x + y
the sum is written over x
- out = torch.empty_like(x) => out = x
the result is made on PyTorch's default device: it needs device=x.device
- torch.empty_like(x) => torch.empty(x.shape, dtype=x.dtype)

# weighted_sum
only the first block of columns is summed: the loop over the width is missing
@@ weighted_sum_kernel
- range(0, width, BLOCK) => range(0, tl.minimum(width, BLOCK), BLOCK)
each block of columns replaces the sum of those before it instead of adding to it
@@ weighted_sum_kernel
- total += tl.sum => total = tl.sum
only the first block of columns gets a gradient: the loop over the width is missing
@@ weighted_sum_backward_kernel
- range(0, width, BLOCK) => range(0, tl.minimum(width, BLOCK), BLOCK)
only the first 512 columns are summed, as many as a block has: a wider row needs the loop
@@ weighted_sum_kernel
- range(0, width, BLOCK) => range(0, tl.minimum(width, BLOCK), BLOCK)
@@ WeightedSum
- 16 if INTERPRETED else 512 => 512
only the last block of columns is kept, where a row is wider than 512: add to the sum
@@ weighted_sum_kernel
- total += tl.sum => total = tl.sum
@@ WeightedSum
- 16 if INTERPRETED else 512 => 512
the sum is kept in the dtype of x, where float16 cannot count beyond 2048
@@ weighted_sum_kernel
- tl.zeros([ROWS], tl.float32) => tl.zeros([ROWS], tl.float32).to(out.dtype.element_ty)
- mask=inside, other=0.0).to(tl.float32) => mask=inside, other=0.0)
- mask=columns < width, other=0.0).to(tl.float32) => mask=columns < width, other=0.0)
- axis=1) => axis=1).to(total.dtype)
the last program stores all of its rows, even those that do not exist: the store needs a mask
@@ weighted_sum_kernel
- , mask=rows < n_rows =>
x is loaded without a mask: the last tile reads beyond its end
@@ weighted_sum_kernel
- , mask=inside, other=0.0 =>
the weight's gradient is the sum of x: the factor with the output's gradient is missing
@@ weighted_sum_backward_kernel
- tile * g[:, None] => tile
the gradient of x is just the output's gradient: the factor weight is missing
@@ weighted_sum_backward_kernel
- g[:, None] * w[None, :] => g[:, None] * (w * 0.0 + 1.0)[None, :]
the weight's gradient is the first program's part only: the parts are not added
@@ WeightedSum
- partial.sum(0) => partial[:1].sum(0)
the kernel assumes that the output's gradient is contiguous, but out.sum() gives an expanded one
@@ WeightedSum
- grad.contiguous() => grad
the kernel assumes that the weight is contiguous, but it may be every second number of a vector
- weight.contiguous() => weight
masked places are loaded without other=0.0: Triton leaves them undefined, and they enter the sum
@@ weighted_sum_kernel
- mask=inside, other=0.0 => mask=inside
all programs add to one row of `partial` with atomics, in an order that changes from run to run
@@ weighted_sum_backward_kernel
- + tl.program_id(0).to(tl.int64) * width =>
- tl.store(mine => tl.atomic_add(mine
@@ WeightedSum
- x.new_empty(n_programs, width => x.new_zeros(1, width
the kernel is called outside of autograd, so no gradient flows back
+ return reference.weighted_sum(x.detach(), weight.detach())
`first_derivative_only` is missing on `backward`: a second derivative silently lacks terms
@@ WeightedSum
- @first_derivative_only =>
x and weight are attributes of ctx: `first_derivative_only` knows only what `save_for_backward` keeps
@@ WeightedSum
- ctx.save_for_backward(x, weight) => ctx.saved = x, weight
- ctx.saved_tensors => ctx.saved
PyTorch computes the sums, and no kernel is launched
- rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
+ return (x.float() * weight.float()).sum(-1).to(x.dtype)
the result is made on PyTorch's default device: it needs device=x.device
@@ WeightedSum
- x.new_empty(n_rows) => torch.empty(n_rows, dtype=x.dtype)
`view` cannot flatten an x whose rows don't lie one after another: `reshape` copies where it must
- x.reshape(x.shape[:-1].numel() => x.view(x.shape[:-1].numel()

# softmax_rows
the row's largest score is not subtracted, so that exp overflows
@@ softmax_kernel
- tl.where(largest == -float("inf"), 0.0, largest) => 0.0
masked places are loaded as 0 and count as scores; they have to be -inf
@@ softmax_kernel
- other=-float("inf") => other=0.0
masked places are loaded as a very negative number, which counts among scores that are smaller: it has to be -inf
@@ softmax_kernel
- other=-float("inf") => other=-1e9
the number that is subtracted is never below 0, so that all exponentials of very negative scores are 0
@@ softmax_kernel
- tl.max(scores, axis=0) => tl.maximum(tl.max(scores, axis=0), 0.0)
the row is loaded without a mask: the load reaches into the next row, and for the last row beyond the end
@@ softmax_kernel
- , mask=columns < width, other=-float("inf") =>
a row that is all -inf gives NaN, because -inf is subtracted from -inf
@@ softmax_kernel
- tl.where(largest == -float("inf"), 0.0, largest) => largest
- tl.where(total == 0.0, 1.0, total) => total
the row is loaded again for each step, although one load is enough
@@ softmax_kernel
+ scores = tl.load(x + row * row_stride + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
  weights = tl.exp
exponentials and their sum are computed in the dtype of x instead of in float32
@@ softmax_kernel
- other=-float("inf")).to(tl.float32) => other=-float("inf"))
- tl.exp(scores - tl.where(largest == -float("inf"), 0.0, largest))
+ tl.exp((scores - tl.where(largest == -float("inf"), 0.0, largest)).to(scores.dtype))
- tl.sum(weights, axis=0) => tl.sum(weights, axis=0).to(weights.dtype)
the exponentials are rounded to the dtype of x before they are added and divided
@@ softmax_kernel
- tl.exp(scores - tl.where(largest == -float("inf"), 0.0, largest))
+ tl.exp(scores - tl.where(largest == -float("inf"), 0.0, largest)).to(x.dtype.element_ty).to(tl.float32)
the exponentials are not divided by their sum
@@ softmax_kernel
- weights / tl.where(total == 0.0, 1.0, total) => weights
the kernel assumes that rows begin `width` elements apart, but x.stride(0) says how far
- x.stride(0) => x.shape[-1]
the kernel steps through the result with x's row stride, but the result is contiguous
@@ softmax_kernel
- out + row * width => out + row * row_stride
PyTorch computes it, and no kernel is launched
- out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
+ return torch.softmax(x.float(), -1).nan_to_num(0.0).to(x.dtype)
the result is made on PyTorch's default device: it needs device=x.device
- , device=x.device =>

# matmul
the tiles are computed row by row, so every program reads another column of tiles of b
@@ matmul_kernel
- (first + inside_group % height) => (program // n_tiles)
- inside_group // height => program % n_tiles
the last group is assumed to be full, but it has only the remaining rows of tiles
@@ matmul_kernel
- tl.minimum(tl.cdiv(M, TILE_M) - first, GROUP) => GROUP
the last step along K has no mask: it reads into the next row, or beyond the end
@@ matmul_kernel
- (k < K)[None, :] => (k >= 0)[None, :]
- (k < K)[:, None] => (k >= 0)[:, None]
a is loaded without a mask along its rows, or along K: the last tile or step reads beyond its end
@@ matmul_kernel
- (rows < M)[:, None] & (k < K)[None, :] => (k < K)[None, :]
the columns of b are loaded without a mask: the last tile reads into the next row, or beyond the end
@@ matmul_kernel
- (k < K)[:, None] & (columns < N)[None, :] => (k < K)[:, None]
b is loaded without a mask along K: the last step reads beyond the last row
@@ matmul_kernel
- (k < K)[:, None] & (columns < N)[None, :] => (k >= 0)[:, None] & (columns < N)[None, :]
the running sum is rounded to the dtype of the result after each step
@@ matmul_kernel
  total, input_precision="ieee")
+ total = total.to(out.dtype.element_ty).to(tl.float32)
only the first step along K is done: the loop is missing
@@ matmul_kernel
- range(0, K, TILE_K) => range(0, tl.minimum(K, TILE_K), TILE_K)
each step along K replaces the sum instead of adding to it
@@ matmul_kernel
- right, total, input_precision => right, input_precision
tl.dot without input_precision="ieee": a GPU rounds float32 factors to TF32, with 10 bits of mantissa
@@ matmul_kernel
- , input_precision="ieee" =>
masked places are loaded without other=0.0: Triton leaves them undefined, and those along K enter the sum
@@ matmul_kernel
- mask=b_inside, other=0.0 => mask=b_inside
b's two strides are exchanged, which reads b transposed
- *b.stride() => *b.stride()[::-1]
the strides are those of contiguous matrices, although a.stride() says otherwise
- *a.stride(), *b.stride() => a.shape[-1], 1, b.shape[-1], 1
the result is made on PyTorch's default device: it needs device=a.device
- a.new_empty(a.shape[0], b.shape[1]) => torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
a and b are copied to make them contiguous, which costs a pass over both
+ a, b = a.contiguous(), b.contiguous()
  tiles = matmul_tiles(a.dtype)
PyTorch multiplies, and no kernel is launched
- tiles = matmul_tiles(a.dtype) => return (a.float() @ b.float()).to(a.dtype)

# rms_norm
the sum of squares is divided by BLOCK, which counts the masked places too, instead of by the width
@@ rms_norm_kernel
- / width => / BLOCK
eps is added to the root instead of under it
@@ rms_norm_kernel
- tl.sqrt(tl.sum(v * v, axis=0) / width + eps) => (tl.sqrt(tl.sum(v * v, axis=0) / width) + eps)
the mean is subtracted, as in layer norm
@@ rms_norm_kernel
+ v = tl.where(inside, v - tl.sum(v, axis=0) / width, 0.0)
  w = tl.load
rounded to the dtype of x before the product with the weight, as Meta's code does, and then once more
@@ rms_norm_kernel
- v * scale * w => (v * scale).to(out.dtype.element_ty).to(tl.float32) * w
x is loaded a second time for the product, although it is still in registers
@@ rms_norm_kernel
+ v = tl.load(x + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
  tl.store
divided by the mean square: the root is missing
@@ rms_norm_kernel
- tl.sqrt =>
the squares are computed in the dtype of x, and overflow in float16
@@ rms_norm_kernel
- v * v => (v.to(x.dtype.element_ty) * v.to(x.dtype.element_ty)).to(tl.float32)
the kernel assumes that rows begin `width` elements apart, but the stride says how far
- rows.stride(0) => x.shape[-1]
x is loaded without a mask: the load reaches into the next row, and for the last row beyond the end
@@ rms_norm_kernel
- x + row * row_stride + columns, mask=inside, other=0.0 => x + row * row_stride + columns
columns of stride 0, in an expanded x, are treated as contiguous
- rows.stride(1) == 1 => rows.stride(1) <= 1
the argument eps is not passed on: the kernel always adds 1e-5
+ return _rms_norm(x, weight, 1e-5, 0)
the kernel assumes that the weight is contiguous, but it may be every second number of a vector
- weight.contiguous() => weight
masked places are loaded without other=0.0: Triton leaves them undefined, and they are squared and summed
@@ rms_norm_kernel
- columns, mask=inside, other=0.0).to(tl.float32)
- w =
+ columns, mask=inside).to(tl.float32)
+ w =
PyTorch computes it, and no kernel is launched
- out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
+ wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
+ return (wide * weight.float()).to(x.dtype).contiguous()
`view` cannot flatten an x whose rows don't lie one after another: `reshape` copies where it must
- x.reshape(x.shape[:-1].numel() => x.view(x.shape[:-1].numel()
the result is made on PyTorch's default device: it needs device=x.device
- , device=x.device =>
no kernel is launched: the result is an empty tensor that nobody fills
- if x.numel():
+ out.fill_(torch.nan)
+ if False:
""")
