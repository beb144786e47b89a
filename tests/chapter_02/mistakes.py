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
an odd head width is not refused, although it cannot be cut into pairs
+ return reference.rope_frequencies(head_dim - head_dim % 2, theta, device)
the device asked for is ignored
+ return reference.rope_frequencies(head_dim, theta)
the power binds tighter than the product: theta ** -2 * i / D is theta ** -2, times i / D
- 1.0 / theta**exponents => theta**-2 * exponents / 2
the exponents were divided with //, which makes all of them 0
- / head_dim => // head_dim
the exponents count single features, 0, 1, 2, …, where each pair begins at every second one
- torch.arange(0, head_dim, 2, => torch.arange(0, head_dim,
multiplied by 2 pi: the frequencies are radians per position already, not turns
- 1.0 / theta**exponents => 2 * math.pi / theta**exponents

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
every pair turns by the first pair's angle, as if all frequencies were 1
- rope_frequencies(head_dim, theta) => rope_frequencies(head_dim, 1.0)
the frequencies grow instead of falling: mend rope_frequencies first
+ return reference.rotation_matrix(position, head_dim, 1 / theta)
the frequencies have the exponent -i/D, not -2i/D: mend rope_frequencies first
+ return reference.rotation_matrix(position, head_dim, theta**0.5)
theta does not reach the frequencies: it is not passed on, or rope_frequencies ignores it
- rope_frequencies(head_dim, theta) => rope_frequencies(head_dim)
an odd head width is not refused, although it cannot be cut into pairs
- rope_frequencies(head_dim, theta) => rope_frequencies(head_dim - head_dim % 2, theta)
the blocks are stacked: block_diag(*blocks) puts them along the diagonal of one matrix
- torch.block_diag(*blocks) => torch.stack(blocks)
the position multiplies the cosine and the sine: it belongs inside, to the angle
- math.cos(position * frequency), math.sin(position * frequency)
+ position * math.cos(frequency), position * math.sin(frequency)
the loop counts features, but the frequencies count pairs: feature i belongs to pair i // 2
+ out, frequencies = torch.zeros(head_dim, head_dim), reference.rope_frequencies(head_dim, theta)
+ for i in range(0, head_dim, 2):
+     c, s = (position * frequencies[i]).cos(), (position * frequencies[i]).sin()
+     out[i : i + 2, i : i + 2] = torch.tensor([[c, -s], [s, c]])
+ return out
the frequencies have the exponent -2i/(D/2), not -2i/D: mend rope_frequencies first
+ return reference.rotation_matrix(position, head_dim, theta**2)
the last frequency is exactly 1/theta, where it should be a little larger: mend rope_frequencies first
+ return reference.rotation_matrix(position, head_dim, theta ** (head_dim / max(1, head_dim - 2)))

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
theta does not reach the frequencies: it is not passed on, or rope_frequencies ignores it
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
positions and frequencies were multiplied in float16, which cannot tell 2049 from 2048
- dtype=torch.float64 => dtype=torch.float16
- .double()) => .half()).float()
no device means the CPU here: it should mean PyTorch's default device
- torch.get_default_device() if device is None => "cpu" if device is None
exp(angle) was taken instead of exp(1j * angle): the numbers grow, and do not turn
- torch.polar(torch.ones_like(angles), angles) => torch.exp(angles)
cosine and sine are stacked as two real numbers: complex or view_as_complex makes one number of them
- torch.polar(torch.ones_like(angles), angles).to(device, torch.complex64)
+ torch.stack([angles.cos(), angles.sin()], dim=-1).to(device, torch.float32)
every number is in the table twice: one for each pair is enough, not one for each feature
- to(device, torch.complex64) => to(device, torch.complex64).repeat_interleave(2, dim=1)
the table has an axis for the heads, which apply_rope adds
- to(device, torch.complex64) => to(device, torch.complex64)[:, None]
each row is the one before times exp(1j * frequency): in float32, the rounding errors add up
- return torch.polar(torch.ones_like(angles), angles).to(device, torch.complex64)
+ table = torch.polar(torch.ones_like(angles), angles)[1:2].to(torch.complex64)
+ return torch.cat([torch.ones_like(table), table.expand(context_len - 1, -1).cumprod(0)])[:context_len].to(device)
an odd head width is not refused, although it cannot be cut into pairs
- rope_frequencies(head_dim, theta => rope_frequencies(head_dim - head_dim % 2, theta
the frequencies have the exponent -2i/(D/2), not -2i/D: mend rope_frequencies first
+ return reference.precompute_rope(head_dim, context_len, theta**2, device)
the last frequency is exactly 1/theta, where it should be a little larger: mend rope_frequencies first
+ return reference.precompute_rope(head_dim, context_len, theta ** (head_dim / max(1, head_dim - 2)), device)
cosines and sines are returned as a pair of tables: one table of complex numbers holds both
- return torch.polar(torch.ones_like(angles), angles).to(device, torch.complex64)
+ return angles.cos().to(device, torch.float32), angles.sin().to(device, torch.float32)

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
- tuple(rope.shape) != (t, half) => False
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
view_as_complex needs both numbers of a pair side by side in memory, which the strides of x do not give:
call contiguous() first
- real, imaginary = rearrange(x.float(), "b t h (i two) -> two b t h i", two=2)
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
+ rotated = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rope[:, None, :]
x was changed in place: where x is float32 already, float() is x itself, and *= writes into it
- real, imaginary = rearrange(x.float(), "b t h (i two) -> two b t h i", two=2)
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
+ rotated = torch.view_as_complex(x.detach().float().unflatten(-1, (-1, 2)))
+ rotated *= rope[:, None, :]
T was read from x.shape[2], which is the number of heads: x is [B, T, H, D]
- x.shape[1], => x.shape[2],
only the number of rows is checked: a table of one pair still broadcasts
- if tuple(rope.shape) != (t, half): => if len(rope) != t:
only the width of the table is checked: a table of one row still broadcasts
- if tuple(rope.shape) != (t, half): => if rope.shape[1] != half:
a longer table is cut to its first rows: it must be refused, because they may be other positions
- if tuple(rope.shape) != (t, half): => if len(rope) < t or rope.shape[1] != half:
- rope[:, None, :] => rope[:t, None, :]
cosines and sines were rounded to the dtype of x before the product
- rope[:, None, :] => torch.complex(rope.real.to(x.dtype).float(), rope.imag.to(x.dtype).float())[:, None, :]
cosine and sine are laid out for neighbours, but x was turned by halves, as in rotate_half
- real, imaginary = rearrange(x.float(), "b t h (i two) -> two b t h i", two=2)
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
- return rearrange(torch.view_as_real(rotated), "b t h i two -> b t h (i two)").to(x.dtype)
+ low, high = x.float().chunk(2, dim=-1)
+ cos, sin = (part.repeat_interleave(2, dim=-1)[:, None] for part in (rope.real, rope.imag))
+ return (x.float() * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)
pair and member are still two axes: flatten them into one
- rearrange(torch.view_as_real(rotated), "b t h i two -> b t h (i two)") => torch.view_as_real(rotated)
only the real parts are returned: view_as_real gives both numbers of each pair
- rearrange(torch.view_as_real(rotated), "b t h i two -> b t h (i two)") => rotated.real
no product with the sine is subtracted: the first of a pair is real * cos - imaginary * sin
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
+ cos, sin = rope.real[:, None], rope.imag[:, None]
+ rotated = torch.complex(real * cos + imaginary * sin, real * sin + imaginary * cos)
a minus stands in both sums: the second of a pair is real * sin + imaginary * cos
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
+ cos, sin = rope.real[:, None], rope.imag[:, None]
+ rotated = torch.complex(real * cos - imaginary * sin, real * sin - imaginary * cos)
x is overwritten, and the second output of a pair uses the first after that
- real, imaginary = rearrange(x.float(), "b t h (i two) -> two b t h i", two=2)
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
- return rearrange(torch.view_as_real(rotated), "b t h i two -> b t h (i two)").to(x.dtype)
+ out, cos, sin = x.detach().float(), rope.real[:, None], rope.imag[:, None]
+ out[..., 0::2] = out[..., 0::2] * cos - out[..., 1::2] * sin
+ out[..., 1::2] = out[..., 0::2] * sin + out[..., 1::2] * cos
+ return out.to(x.dtype)
x was not turned into float32 first: there are no complex numbers of two bfloat16
- real, imaginary = rearrange(x.float(), "b t h (i two) -> two b t h i", two=2)
- rotated = torch.complex(real, imaginary) * rope[:, None, :]
+ rotated = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * rope[:, None, :]
float64 comes back as float32: the result has the dtype of x
- .to(x.dtype) => .to(x.dtype if x.dtype != torch.float64 else torch.float32)
and stands where or is needed: a table is refused only if both of its sizes are wrong
- if tuple(rope.shape) != (t, half): => if len(rope) != t and rope.shape[1] != half:

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
the second rows come before the first: the two members of each pair are exchanged
+ return rearrange(weight.unflatten(0, (n_heads, -1, 2)).flip(2), "h i two c -> (h two i) c")
n_heads was taken for the width of a head
- h=n_heads => h=len(weight) // n_heads
the result is float32 whatever the dtype of weight
- rearrange(weight, => rearrange(weight.float(),
after transpose the rows are no longer in order in memory: reshape copies them, view cannot
+ return weight.view(n_heads, -1, 2, weight.shape[1]).transpose(1, 2).view(weight.shape)

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
the columns were reordered, where the rows are the features of the queries
+ half = (weight.shape[1] + 1) // 2
+ order = [column for i in range(half) for column in (i, i + half) if column < weight.shape[1]]
+ return weight[:, order]
n_heads was taken for the width of a head
- h=n_heads => h=len(weight) // n_heads
the result is float32 whatever the dtype of weight
- rearrange(weight, => rearrange(weight.float(),
after transpose the rows are no longer in order in memory: reshape copies them, view cannot
+ return weight.view(n_heads, 2, -1, weight.shape[1]).transpose(1, 2).view(weight.shape)

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
an empty context divides by zero: divide by the longer of the two lengths
- trained_len / max(context_len, trained_len) => min(1, trained_len / context_len)
a context that fits is returned as whole numbers: the positions are float32 in either case
- torch.arange(context_len, dtype=torch.float32) * scale
+ torch.arange(context_len) if context_len <= trained_len else torch.arange(context_len) * scale
linspace includes its end: the last position must stay below trained_len
+ if context_len <= trained_len:
+     return torch.arange(context_len).float()
+ return torch.linspace(0, trained_len, context_len)
positions begin again at 0 after the trained length: squeeze them instead
+ return (torch.arange(context_len) % trained_len).float()
only the positions beyond the trained length are scaled: all of them take the same factor
- torch.arange(context_len, dtype=torch.float32) * scale
+ torch.cat([torch.arange(context_len).float()[:trained_len], torch.arange(context_len).float()[trained_len:] * scale])
positions start at 1: the first one is 0
- torch.arange(context_len, dtype=torch.float32) => torch.arange(1, context_len + 1, dtype=torch.float32)
the scale was cut to a whole number by //
- trained_len / max => trained_len // max
context_len // trained_len cuts the factor to a whole number
- trained_len / max(context_len, trained_len) => 1 / max(1, context_len // trained_len)
""")
