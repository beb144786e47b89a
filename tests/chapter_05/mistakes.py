"""Wrong answers to chapter 5's exercises, each with the misconception behind it."""

from lib.workbook.grading import edits

edits("""
# patchify_unfold
the patches are the columns: F.unfold returns [B, ch*P*P, N], and its last two axes must be exchanged
- .transpose(1, 2) =>
the axes were reshaped instead of exchanged, so the numbers are in the wrong patches
- .transpose(1, 2) => .reshape(len(images), -1, images.shape[1] * patch * patch)
inside of a patch the channels come last; the contract puts all of channel 0 first
- .transpose(1, 2) => .unflatten(1, (images.shape[1], -1)).permute(0, 3, 2, 1).flatten(2)
the window slides by one pixel; its stride should be the side of a patch
- , stride=patch =>
the sides are not checked, and F.unfold silently drops rows and columns that don't fill a patch
- _check_sides(images.shape[2], images.shape[3], patch) =>
only the width is checked, and F.unfold silently drops rows that don't fill a patch
- _check_sides(images.shape[2] => _check_sides(images.shape[3]
only the height is checked, and F.unfold silently drops columns that don't fill a patch
- images.shape[3], patch) => images.shape[2], patch)
the patches are detached from the graph
- F.unfold(images => F.unfold(images.detach()

# patchify_einops
inside of a patch the channels come last; the contract puts all of channel 0 first
- (ch p1 p2) => (p1 p2 ch)
the patches run down the columns; the contract numbers them row by row
- (row column) => (column row)
the offset inside of the patch comes before the patch's row, (p h) instead of (h p), so each patch takes pixels from all
over the image
- (row p1) (column p2) => (p1 row) (p2 column)
each patch is transposed: its rows are the image's columns
- (ch p1 p2) => (ch p2 p1)
a view alone cuts the image into strips of consecutive pixels, not into squares
- rearrange(images, "b ch (row p1) (column p2) -> b (row column) (ch p1 p2)", p1=patch, p2=patch)
+ images.reshape(len(images), -1, images.shape[1] * patch * patch)
rows and columns that don't fill a patch are dropped; a ValueError should be raised
- _check_sides(images.shape[2], images.shape[3], patch)
+ images = images[:, :, : images.shape[2] // patch * patch, : images.shape[3] // patch * patch]

# unpatchify
the channel is read as the last axis of each patch; it is the first
- (ch p1 p2) => (p1 p2 ch)
the patches are reshaped to an image, and their numbers never move to their places
- rearrange(patches, pattern, row=rows, p1=patch, p2=patch) => patches.reshape(len(patches), -1, height, width)
the patches are placed down the columns; they are numbered row by row
- (row column) => (column row)
the offset inside of the patch comes before the patch's row, (p h) instead of (h p), so the pixels of a patch are spread
over the image
- (row p1) (column p2) => (p1 row) (p2 column)
the number of patches is not checked, so the image gets the wrong width
- patches.shape[1] != rows * columns => False

# conv_from_linear
the channel is read as the last axis; in a patch it is the first
- (ch p1 p2) => (p1 p2 ch)
rows and columns of each kernel are exchanged
- -> c ch p1 p2 => -> c ch p2 p1
output and input channels are exchanged: that is the kernel of a transposed convolution
- -> c ch p1 p2 => -> ch c p1 p2
the kernel is mirrored, as in the mathematical definition; PyTorch's conv2d does not mirror it
- p1=patch) => p1=patch).flip(2, 3)
the weight was transposed; its rows already are the output channels, and only the axis ch*P*P must be split
+ return weight.T.reshape(len(weight), channels, patch, patch)

# ImageEmbeddings
the class token is not expanded to the batch: it has a batch of 1 and the patches have B
- self.cls_token.expand(len(images), -1, -1) => self.cls_token
the class token comes after the patches; it should be row 0
- self.cls_token.expand(len(images), -1, -1), patches => patches, self.cls_token.expand(len(images), -1, -1)
the positions were added before the class token was put in front, so it has none
- patches] => patches + self.pos_embed[:, 1:]]
- tokens + self.pos_embed => tokens
the first N positions went to the patches, but row 0 belongs to the class token
- patches] => patches + self.pos_embed[:, :-1]]
- tokens + self.pos_embed => tokens
no positions were added
- tokens + self.pos_embed => tokens
the patches run down the columns first
- (row column) => (column row)
the class token is a buffer instead of a parameter, so it is never learned
- self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim))
+ self.register_buffer("cls_token", torch.zeros(1, 1, config.dim))
the positions start with a standard deviation of 1; the contract says 0.02
- 0.02 * =>
images of a wrong shape raise no error
- list(images.shape[1:]) != wanted => False
only the number of patches is compared with the config's, not the sides
- list(images.shape[1:]) != wanted
+ [images.shape[1], images.shape[2] * images.shape[3]] != [wanted[0], wanted[1] * wanted[2]]
the class token is missing
- self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim)) =>
the positions are missing
- self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + config.n_patches, config.dim)) =>

# EncoderAttention
there is a causal mask; a picture has no future, so a patch may look at every patch
- q, k, v) => q, k, v, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())
the projections have no bias, as in Llama; ViT's have one
- config.dim, config.dim => config.dim, config.dim, bias=False
there is one head of the whole width: the features were not split into heads
- config.n_heads => 1
the scores are not divided by the square root of the head's width
- scaled_dot_product_attention(q, k, v) => (q @ k.transpose(-2, -1)).softmax(-1) @ v
the output projection wo is missing
- return self.wo => return
the heads were merged without first moving their axis next to the features
- merge_heads(scaled_dot_product_attention(q, k, v)) => scaled_dot_product_attention(q, k, v).reshape(x.shape)

# MLP
the activation is ReLU instead of GELU
- F.gelu(self.fc1(x), approximate=self.approximate) => F.relu(self.fc1(x))
it is always the exact GELU, whatever the config says
- , approximate=self.approximate =>
it is always GELU's tanh approximation, whatever the config says
- approximate=self.approximate => approximate="tanh"
the two forms of GELU are exchanged
- "tanh" if config.gelu == "tanh" else "none" => "none" if config.gelu == "tanh" else "tanh"
the activation is SiLU, as in Llama, instead of GELU
- F.gelu(self.fc1(x), approximate=self.approximate) => F.silu(self.fc1(x))
there is a second GELU after fc2
- self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))
+ F.gelu(self.fc2(F.gelu(self.fc1(x), approximate=self.approximate)), approximate=self.approximate)
x is added inside of the MLP; the block adds the residual
- return self => return x + self
the hidden width is four times dim instead of the config's hidden_dim
- config.dim, config.hidden_dim => config.dim, 4 * config.dim
- config.hidden_dim, config.dim => 4 * config.dim, config.dim

# ViTBlock
that is post-norm: the norms come after the additions, as in the first transformer
@@ forward
+ x = self.norm1(x + self.attn(x))
+ return self.norm2(x + self.mlp(x))
attention and MLP read the same input; the MLP must read the sum that includes attention's output
@@ forward
+ return x + self.attn(self.norm1(x)) + self.mlp(self.norm2(x))
the second residual is missing
- return x + self => return self
the residual is the normalised x; it must be x itself
- x = x + => x = self.norm1(x) +
- return x + => return self.norm2(x) +
norm1 is used twice and norm2 never
- self.norm2(x) => self.norm1(x)
`x += ...` changes the caller's tensor, and backward needs it as it was
- x = x + => x +=
the norms use PyTorch's default epsilon of 1e-5 instead of the config's eps
- self.norm1 = nn.LayerNorm(config.dim, eps=config.eps) => self.norm1 = nn.LayerNorm(config.dim)
- self.norm2 = nn.LayerNorm(config.dim, eps=config.eps) => self.norm2 = nn.LayerNorm(config.dim)

# VisionTransformer
the last norm is missing
- x = self.norm(x) =>
the mean includes the class token; it should be over the N patches only
- x[:, 1:].mean => x.mean
the class token is used whatever the config's pooling says
- x[:, 0] if self.config.pooling == "token" else x[:, 1:].mean(dim=1) => x[:, 0]
the last token is used as the class token, which is the first
- x[:, 0] => x[:, -1]
the mean is taken before the norm, as timm does; the contract takes it after
- x = self.norm(x) =>
- x[:, 0] if self.config.pooling == "token" else x[:, 1:].mean(dim=1)
+ self.norm(x[:, 0] if self.config.pooling == "token" else x[:, 1:].mean(dim=1))
the last norm uses PyTorch's default epsilon of 1e-5 instead of the config's eps
- , eps=config.eps =>
all layers share one block: [block] * L repeats the same module
- ViTBlock(config) for _ in range(config.n_layers) => [ViTBlock(config)] * config.n_layers
the logits went through a softmax; cross-entropy applies it itself
- .mean(dim=1)) => .mean(dim=1)).softmax(-1)
no block is registered, so neither the optimizer nor state_dict knows about them: `self.blocks` is a plain list, or
missing
- nn.ModuleList(ViTBlock(config) for _ in range(config.n_layers)) => [ViTBlock(config) for _ in range(config.n_layers)]
there is one block too few: the config asks for n_layers of them
- range(config.n_layers) => range(config.n_layers - 1)

# count_parameters
the count is C too small: the class token, or its row among the 1 + N positions, is missing
- 1 + config.n_patches => config.n_patches
the biases of the linear layers are not counted
- (config.patch_dim + 1) * C => config.patch_dim * C
- 4 * (C + 1) * C + (C + 1) * F_ + (F_ + 1) * C => 4 * C * C + 2 * C * F_
- (C + 1) * config.n_classes => C * config.n_classes
the last norm is not counted
- block + 2 * C => block
the head is not counted
- + (C + 1) * config.n_classes =>
a norm has a weight and a bias; only one was counted
- 2 * 2 * C => 2 * C
- block + 2 * C => block + C
the hidden width is taken to be 4 times dim, which is wrong for g/14 and G/14
- config.hidden_dim => 4 * config.dim
a model was built just to count its parameters
+ return sum(p.numel() for p in VisionTransformer(config).parameters())
the number is right, but it is a float and should be an int
- C, F_ = config.dim => C, F_ = float(config.dim)

# convert_hf_state_dict
queries and keys are exchanged
- hf_names(config)
+ {
+     ours.replace("wq", "w?").replace("wk", "wq").replace("w?", "wk"): theirs
+     for ours, theirs in hf_names(config).items()
+ }
the linear weights were transposed; both models store [out, in]
- state_dict[theirs] for => state_dict[theirs].T if state_dict[theirs].ndim == 2 else state_dict[theirs] for
it stops at the first wrong tensor instead of listing all of them
+ problems = problems[:1]
  if problems:
only names are compared, not shapes
- list(state_dict[theirs].shape) != wanted[ours] => False
extra tensors are dropped silently
- [f"{name} is extra" for name in sorted(state_dict.keys() - set(names.values()))] => []
norm1 and norm2 are exchanged: layernorm_after comes after attention, so before the MLP
- hf_names(config)
+ {
+     ours.replace("norm1", "norm?").replace("norm2", "norm1").replace("norm?", "norm2"): theirs
+     for ours, theirs in hf_names(config).items()
+ }
version 4's names are not renamed: see modern_hf_names
- modern_hf_names(state_dict) => state_dict

# convert_timm_state_dict
every third row was taken: the rows of all queries come first, then all keys, then all values
- split.pop(fused).chunk(3) => split.pop(fused).unflatten(0, (-1, 3)).unbind(1)
qkv is split head by head, as in GPT-NeoX; in timm the rows of all queries come first
- split.pop(fused).chunk(3) => split.pop(fused).unflatten(0, (config.n_heads, 3, -1)).transpose(0, 1).flatten(1, 2)
keys are taken for queries: the order in qkv is queries, keys, values
- zip("qkv" => zip("kqv"
the fused tensors were popped from the caller's dict
- dict(state_dict) => state_dict
it stops at the first wrong tensor instead of listing all of them
+ problems = problems[:1]
  if problems:
a qkv that cannot be cut into three stops the conversion; one error should name everything that is wrong
- strict=False => strict=True

# resize_positions
the interpolation is bilinear; the contract says bicubic
- mode="bicubic" => mode="bilinear"
the interpolation aligned the corners (align_corners=True)
- align_corners=False => align_corners=True
the class token was interpolated too: all 1 + N rows were resized as one line
+ line, length = pos_embed.transpose(1, 2)[:, :, None], 1 + new_grid[0] * new_grid[1]
+ return F.interpolate(line, (1, length), mode="bicubic")[:, :, 0].transpose(1, 2)
  grid =
the class token's position is missing
- dim=1) => dim=1)[:, 1:]
the class token's position was put last
- dim=1) => dim=1).roll(-1, dims=1)
rows and columns of the grid are exchanged
- (row column) c -> => (column row) c ->
antialiasing is on, as in timm; it gives different numbers
- align_corners=False => antialias=True
the number of positions is not compared with the grid
- n != rows * columns => False
a grid that keeps its size is returned before the number of positions is compared with it
- n != rows * columns => n != rows * columns and tuple(old_grid) != tuple(new_grid)
the factor new / old is passed instead of the size, and rounding loses a row: 11 * (15 / 11) is less than 15
- size=tuple(new_grid) => scale_factor=(new_grid[0] / rows, new_grid[1] / columns)
""")
