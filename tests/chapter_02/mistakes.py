"""Plausible wrong answers of chapter 2, and the misconception behind each."""

from lib.workbook.grading import edits

edits("""
# rope_frequencies
the exponent is -i/D: it counts pairs, where -2i/D counts their first features
- 1.0 / theta**exponents => 1.0 / theta ** (exponents / 2)
theta is raised to a positive power: the later pairs turn faster instead of slower
- 1.0 / theta**exponents => theta**exponents
pairs count from 1, as in the paper, but with the formula that counts from 0
- torch.arange(0, head_dim, 2, => torch.arange(2, head_dim + 2, 2,
the exponent is -2i/(D/2): it is divided by the number of pairs, not by D
- / head_dim => / (head_dim // 2)
the last frequency is exactly 1/theta: linspace includes its end, but -2i/D stops before -1
- torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
+ torch.linspace(0, 1, head_dim // 2, device=device)
one frequency for every feature, where each pair of features shares one
- 1.0 / theta**exponents => (1.0 / theta**exponents).repeat_interleave(2)
the frequencies fall in equal steps, where each is the one before times a constant
- 1.0 / theta**exponents => 1 - (1 - 1 / theta) * exponents
theta is ignored: the base is always 10,000
+ return reference.rope_frequencies(head_dim, device=device)
an odd head width is silently rounded down
+ return reference.rope_frequencies(head_dim - head_dim % 2, theta, device)
the device asked for is ignored
+ return reference.rope_frequencies(head_dim, theta)

# rotation_matrix
it turns the wrong way: the minus sign stands below the diagonal instead of above it
- [[cos, -sin], [sin, cos]] => [[cos, sin], [-sin, cos]]
the blocks overlap: pair i begins at row 2i, not at row i
+ out = torch.zeros(head_dim, head_dim)
+ for i, frequency in enumerate(reference.rope_frequencies(head_dim, theta).tolist()):
+     c, s = math.cos(position * frequency), math.sin(position * frequency)
+     out[i : i + 2, i : i + 2] = torch.tensor([[c, -s], [s, c]])
+ return out
sine and cosine exchanged
- [[cos, -sin], [sin, cos]] => [[sin, -cos], [cos, sin]]
both sines have the same sign: that is a reflection and not a rotation
- [[cos, -sin], [sin, cos]] => [[cos, sin], [sin, -cos]]
the pairs are (i, i + D/2), where the contract asks for neighbours (2i, 2i + 1)
+ order = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
+ return reference.rotation_matrix(position, head_dim, theta)[order][:, order]
positions start at 1: every angle is one position too far
+ return reference.rotation_matrix(position + 1, head_dim, theta)
every pair turns by the first pair's angle: the frequencies are not used
- rope_frequencies(head_dim, theta) => rope_frequencies(head_dim, 1.0)
the frequencies grow instead of falling: mend rope_frequencies first
+ return reference.rotation_matrix(position, head_dim, 1 / theta)
the frequencies have the exponent -i/D, not -2i/D: mend rope_frequencies first
+ return reference.rotation_matrix(position, head_dim, theta**0.5)

# precompute_rope
positions start at 1: the first token must not be turned at all
+ return reference.precompute_rope(head_dim, context_len + 1, theta, device)[1:]
the arguments of polar are exchanged: the modulus comes first, then the angle
- torch.ones_like(angles), angles => angles, torch.ones_like(angles)
the table holds the angles themselves, not the complex numbers of modulus 1 with those angles
- torch.polar(torch.ones_like(angles), angles) => angles
sine and cosine exchanged: the real part should be the cosine
+ table = reference.precompute_rope(head_dim, context_len, theta, "cpu")
+ return torch.complex(table.imag, table.real).to(device)
the sign of the angle is wrong: the table turns backwards
+ return reference.precompute_rope(head_dim, context_len, theta, device).conj().resolve_conj()
positions and frequencies were multiplied in bfloat16, which cannot tell 257 from 256
- dtype=torch.float64 => dtype=torch.bfloat16
- .double()) => .bfloat16()).float()
the table is transposed: positions are its rows, pairs its columns
- to(device, torch.complex64) => to(device, torch.complex64).T
the table holds complex128, where complex64 is asked for
- to(device, torch.complex64) => to(device, torch.complex128)
theta is not passed on to the frequencies
+ return reference.precompute_rope(head_dim, context_len, device=device)
the device asked for is ignored
+ return reference.precompute_rope(head_dim, context_len, theta)
the table is made on PyTorch's default device and then moved to the one asked for
- dtype=torch.float64, device="cpu" => dtype=torch.float32
- theta, device="cpu").double() => theta)
the frequencies grow instead of falling: mend rope_frequencies first
+ return reference.precompute_rope(head_dim, context_len, 1 / theta, device)
the frequencies have the exponent -i/D, not -2i/D: mend rope_frequencies first
+ return reference.precompute_rope(head_dim, context_len, theta**0.5, device)

# apply_rope
sine and cosine exchanged
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
+ rotated = torch.complex(real, imaginary) * torch.complex(rope.imag, rope.real)[:, None, :]
the pairs are (i, i + D/2), as in Transformers, where the contract asks for neighbours (2i, 2i + 1)
- b t h (i two) -> two => b t h (two i) -> two
- -> b t h (i two) => -> b t h (two i)
neighbours were paired, but the result holds all real parts first and then all imaginary ones
- -> b t h (i two) => -> b t h (two i)
it turns the wrong way: by minus the angle
- rope[:, None, :] => rope[:, None, :].conj()
the odd feature of a pair was taken as the real part: it is the imaginary one
- torch.complex(real, imaginary) => torch.complex(imaginary, real)
the table runs along the heads instead of the positions
- rope[:, None, :] => rope[torch.arange(x.shape[2]) % len(rope)]
every position was turned by the row after its own
+ rope = rope * rope[1:2] / rope[0:1] if len(rope) > 1 else rope
  rotated =
the second output uses the first after it was overwritten: keep both old values of a pair
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
+ cos, sin = rope.real[:, None], rope.imag[:, None]
+ first = real * cos - imaginary * sin
+ rotated = torch.complex(first, first * sin + imaginary * cos)
the result is left in float32 instead of going back to the dtype of x
- .to(x.dtype) =>
the arithmetic was done in the dtype of x instead of in float32
- real, imaginary = rearrange(x.float(), "b t h (i two) -> two b t h i", two=2)
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
- return rearrange(torch.view_as_real(rotated), "b t h i two -> b t h (i two)").to(x.dtype)
+ even, odd = x[..., 0::2], x[..., 1::2]
+ cos, sin = (part[:, None].to(x.dtype) for part in (rope.real, rope.imag))
+ return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
the table has no axis for the heads, so its positions were broadcast over the heads
- tuple(rope.shape) != (t, half) => False
- rope[:, None, :] => rope
x was changed in place
+ out = reference.apply_rope(x, rope)
+ x.data.copy_(out)
+ return out
the shape of the table is not checked: one row serves every position
- if tuple(rope.shape) != (t, half):
-     raise ValueError(f"x {list(x.shape)} needs a rope of [{t}, {half:g}] (T, D/2), got {list(rope.shape)}")
+ rope = rope[: x.shape[1]]
the result is cut off from the graph
- x.float() => x.detach().float()
positions are turned one by one in a loop
- real, imaginary = rearrange(x.float(), "b t h (i two) -> two b t h i", two=2)
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
- return rearrange(torch.view_as_real(rotated), "b t h i two -> b t h (i two)").to(x.dtype)
+ return torch.cat([reference.apply_rope(x[:, m : m + 1], rope[m : m + 1]) for m in range(x.shape[1])], dim=1)
a matrix of D x D is built for each position, where D/2 complex products are enough
- real, imaginary = rearrange(x.float(), "b t h (i two) -> two b t h i", two=2)
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
- return rearrange(torch.view_as_real(rotated), "b t h i two -> b t h (i two)").to(x.dtype)
+ turns = torch.stack([rope.real, -rope.imag, rope.imag, rope.real], -1).unflatten(-1, (2, 2))
+ matrices = torch.stack([torch.block_diag(*blocks) for blocks in turns])
+ return torch.einsum("tij,bthj->bthi", matrices, x.float()).to(x.dtype)

# interleaved_to_half
the two layouts exchanged: that is half_to_interleaved
- (h i two) c -> (h two i) c => (h two i) c -> (h i two) c
rows were moved across heads: each head keeps its own D rows
- h=n_heads => h=1
the columns were reordered, where the rows are the features of the queries
+ return torch.cat([weight[:, 0::2], weight[:, 1::2]], dim=1)
the rows are unchanged: a reshape alone moves nothing
+ return weight.reshape(n_heads, 2, -1, weight.shape[1]).reshape(weight.shape)
weight was reordered in place
+ return weight.copy_(reference.interleaved_to_half(weight, n_heads).clone())

# half_to_interleaved
the two layouts exchanged: that is interleaved_to_half
- (h two i) c -> (h i two) c => (h i two) c -> (h two i) c
rows were moved across heads: each head keeps its own D rows
- h=n_heads => h=1
the rows are unchanged: a reshape alone moves nothing
+ return weight.reshape(n_heads, -1, 2, weight.shape[1]).reshape(weight.shape)
the second half comes before the first: the two members of each pair are exchanged
+ return rearrange(weight.unflatten(0, (n_heads, 2, -1)).flip(1), "h two i c -> (h i two) c")
weight was reordered in place
+ return weight.copy_(reference.half_to_interleaved(weight, n_heads).clone())

# interpolate_positions
positions are multiplied by context / trained instead of divided: they leave the range
- * scale => / scale
a context that fits is stretched too, so a short text looks like nothing seen in training
- max(context_len, trained_len) => context_len
positions are cut off at the trained length instead of squeezed
+ return torch.arange(context_len).float().clamp(max=trained_len - 1)
positions were rounded to whole numbers, so that neighbours share one
- torch.arange(context_len, dtype=torch.float32) * scale
+ (torch.arange(context_len, dtype=torch.float32) * scale).floor()
the last position lands on the last trained one: the scale is (trained - 1) / (context - 1)
+ if context_len <= trained_len:
+     return torch.arange(context_len).float()
+ return torch.linspace(0, trained_len - 1, context_len)
""")
