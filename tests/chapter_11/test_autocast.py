"""Autocast, graded beside ``torch.autocast``: on the CPU live, for CUDA with tensors that only claim to be there."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lib.given.kernels.autocast import PRODUCTS, REDUCTIONS
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded
from tests.inputs import randn

amp = graded("amp")

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CASTS = "eq-amp-5"
PREDICTS = "eq-amp-5; ex-amp-autocast-dtypes uses ex-amp-miniautocast: if that does not pass, fix it first"


class ToyModel(nn.Module):
    """The assignment's model."""

    def __init__(self, n_in: int = 6, n_out: int = 3):
        super().__init__()
        self.fc1 = nn.Linear(n_in, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, n_out, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x))))


class Residual(nn.Module):
    """Layers and plain operations mixed: a product by hand, a softmax, sums of two dtypes."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.dropout = nn.Embedding(7, 8), nn.LayerNorm(8), nn.Dropout(0.5)
        self.mix, self.gelu, self.soft, self.out = nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1), nn.Linear(8, 7)
        self.never, self.identity = nn.Linear(2, 2), nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = self.identity(x @ x.transpose(-2, -1))
        x = x + self.soft(scores) @ self.gelu(self.mix(self.norm(x)))
        return self.out(self.dropout(x))


def image_model() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
    return nn.Sequential(nn.Sequential(*layers[:3]), *layers[3:], nn.LogSoftmax(-1))


def observed(model: nn.Module, x: Tensor, region) -> dict[str, torch.dtype]:
    """What the hooks of the modules without submodules see."""
    found: dict[str, torch.dtype] = {}
    names = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    handles = [m.register_forward_hook(lambda _, __, out, n=n: found.update({n: out.dtype})) for n, m in names]
    with region, torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return {name: found[name] for name, _ in names if name in found}


@contextmanager
def cuda_autocast(dtype: torch.dtype):
    """CUDA's real autocast, over tensors without numbers that claim to be on a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


# ---- MiniAutocast ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_MiniAutocast_by_hand(dtype):
    case(f"a product, a softmax of it, a sum of it, a ReLU of it, and a sum of two dtypes, in {str(dtype)[6:]}")
    x, w = randn(2, 3), randn(3, 4, seed=1)
    with amp.MiniAutocast(dtype):
        product = x @ w
        found = [product, product.softmax(-1), product.sum(), product.relu(), product + x[:, :1]]
    expected = [dtype, SINGLE, SINGLE, dtype, SINGLE]
    expect_equal([value.dtype for value in found], expected, name="dtypes", read=CASTS)
    expect_close(product, x.to(dtype) @ w.to(dtype), name="x @ w", read=CASTS)
    expect_close(found[1], product.float().softmax(-1), name="softmax", read=CASTS)
    expect_equal((x @ w).dtype, SINGLE, name="dtype of a product after the region", read=CASTS)


EINSUM = "bij,bjk->bik"
RUNS = {
    "matmul": lambda x, w: torch.matmul(x, w),
    "x @ w": lambda x, w: x @ w,
    "Tensor.matmul": lambda x, w: x.matmul(w),
    "bmm": lambda x, w: torch.bmm(x, w),
    "mm": lambda x, w: x[0].mm(w[0]),
    "addmm": lambda x, w: torch.addmm(x[0], w[0], w[1]),
    "linear": lambda x, w: functional.linear(x, w[0], bias=w[0, 0]),
    "einsum": lambda x, w: torch.einsum(EINSUM, x, w),
    "einsum of a list": lambda x, w: torch.einsum(EINSUM, [x, w]),
    "scaled_dot_product_attention": lambda x, w: functional.scaled_dot_product_attention(x, w, value=w),
    "conv1d": lambda x, w: functional.conv1d(x, w),
    "conv2d": lambda x, w: functional.conv2d(x[None], weight=w[:, :, :, None]),
    "softmax": lambda x, w: (x @ w).softmax(-1),
    "F.softmax": lambda x, w: functional.softmax(x @ w, dim=-1),
    "log_softmax": lambda x, w: torch.log_softmax(x @ w, -1),
    "layer_norm": lambda x, w: functional.layer_norm(x @ w, (4,), weight=w[0, 0], bias=w[0, 1]),
    "sum": lambda x, w: (x @ w).sum(-1),
    "cross_entropy": lambda x, w: functional.cross_entropy((x @ w)[0], torch.tensor([0, 1, 2, 3])),
    "mse_loss": lambda x, w: functional.mse_loss(x @ w, x),
    "norm": lambda x, w: (x @ w).norm(),
    "exp": lambda x, w: (x @ w).exp(),
    "power": lambda x, w: (x @ w) ** 2,
    "gelu": lambda x, w: functional.gelu(x @ w),
    "mean": lambda x, w: (x @ w).mean(),
    "add": lambda x, w: x @ w + x,
    "cat": lambda x, w: torch.cat([x @ w, x]),
    "integers": lambda x, w: torch.arange(4).sum(),
}
FAKE = (
    "matmul",
    "x @ w",
    "Tensor.matmul",
    "bmm",
    "einsum",
    "einsum of a list",
    "softmax",
    "F.softmax",
    "log_softmax",
    "sum",
    *("mse_loss", "norm", "exp", "power", "gelu", "mean", "add", "cat"),  # indexing and convolutions need a real GPU
)


@pytest.mark.parametrize("name", RUNS)
def test_MiniAutocast_with_the_cpus_rules_equals_torchs(name):
    case(f"{name} of float32 tensors [4, 4, 4], bfloat16, device_type='cpu'")
    x, w = randn(4, 4, 4), randn(4, 4, 4, seed=1)
    with torch.autocast("cpu", dtype=BRAIN):
        expected = RUNS[name](x, w)
    with amp.MiniAutocast(BRAIN, device_type="cpu"):
        answer = RUNS[name](x, w)
    expect_close(answer, expected, read=CASTS)


def test_MiniAutocast_has_the_dtypes_of_cuda():
    for name in FAKE:
        case(f"{name} of float32 tensors [4, 4, 4], float16")
        with cuda_autocast(HALF):
            fake = [torch.empty(4, 4, 4, device="cuda") for _ in range(2)]
            expected = RUNS[name](*fake).dtype
        with amp.MiniAutocast(HALF):
            answer = RUNS[name](randn(4, 4, 4), randn(4, 4, 4, seed=1))
        expect_equal(answer.dtype, expected, name="dtype", read=CASTS)


def test_MiniAutocast_takes_every_name_of_the_lists():
    case("a product of the list by position and by name of the argument, and float64, which is never cast")
    x, w = randn(3, 3), randn(3, 3, seed=1)
    with amp.MiniAutocast(BRAIN):
        expect_equal(torch.mm(input=x, mat2=w).dtype, BRAIN, name="dtype of mm(input=, mat2=)", read=CASTS)
        expect_equal((x.double() @ w.double()).dtype, torch.float64, name="dtype of a float64 product", read=CASTS)
        expect_equal(x.double().softmax(-1).dtype, torch.float64, name="dtype of a float64 softmax", read=CASTS)
        masked = functional.scaled_dot_product_attention(
            x[None], x[None], x[None], attn_mask=torch.ones(3, 3).tril().bool()
        )
        expect_equal(masked.dtype, BRAIN, name="dtype of attention with a boolean mask", read=CASTS)
        expect_equal(torch.softmax(x, -1, dtype=torch.float64).dtype, torch.float64, name="softmax(dtype=float64)")


def test_MiniAutocast_keeps_parameters_and_gradients_in_float32():
    case("the assignment's model: linear, ReLU, LayerNorm, linear, cross-entropy; float16")
    torch.manual_seed(0)
    model = ToyModel()
    with amp.MiniAutocast(HALF):
        hidden = model.fc1(randn(4, 6))
        logits = model.fc2(model.ln(model.relu(hidden)))
        loss = functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0]))
    loss.backward()
    dtypes = [hidden.dtype, logits.dtype, loss.dtype]
    expect_equal(dtypes, [HALF, HALF, SINGLE], name="dtypes of hidden, logits, loss", read=CASTS)
    expect_equal({p.dtype for p in model.parameters()}, {SINGLE}, name="dtypes of the parameters", read=CASTS)
    expect_equal({p.grad.dtype for p in model.parameters()}, {SINGLE}, name="dtypes of the gradients", read=CASTS)


def test_MiniAutocast_gives_torchs_gradients():
    case("embedding, product, softmax, residual sum; bfloat16, device_type='cpu': loss and every gradient")
    torch.manual_seed(0)
    ours = Residual().eval()
    theirs, ids = copy.deepcopy(ours), torch.tensor([[0, 3, 2], [1, 6, 5]])
    with amp.MiniAutocast(BRAIN, "cpu"):
        loss = functional.cross_entropy(ours(ids).flatten(0, 1), ids.flatten())
    with torch.autocast("cpu", dtype=BRAIN):
        expected = functional.cross_entropy(theirs(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    expected.backward()
    expect_close(loss.detach(), expected.detach(), name="loss", read=CASTS)
    grads = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (ours, theirs)]
    expect_close(*grads, atol=1e-3, rtol=2e-2, name="gradients", read=CASTS)


def test_MiniAutocast_nests():
    case("bfloat16 around float16 around float32, and out again; also after an error inside")
    x = randn(2, 2)
    with amp.MiniAutocast(BRAIN):
        found = [(x @ x).dtype]
        with amp.MiniAutocast(HALF):
            found.append((x @ x).dtype)
            with amp.MiniAutocast(SINGLE):
                found.append((x.half() @ x).dtype)
            found.append((x @ x).dtype)
        try:
            x @ randn(3, 3)
        except RuntimeError:
            found.append((x @ x).dtype)
    found.append((x @ x).dtype)
    expect_equal(found, [BRAIN, HALF, SINGLE, HALF, BRAIN, SINGLE], name="dtypes", read="the contract")
    case("a region with the CPU's rules inside one with CUDA's, whose list alone has softmax: it runs unchanged")
    with amp.MiniAutocast(BRAIN), amp.MiniAutocast(HALF, "cpu"):
        narrow = x.half().softmax(-1)
    expect_equal(narrow.dtype, HALF, name="dtype of the softmax of a float16 tensor", read="the contract")


def test_MiniAutocast_leaves_its_inputs():
    case("x float32: its values and dtype after a product and a softmax")
    x = randn(3, 3)
    before = x.clone()
    with amp.MiniAutocast(HALF):
        _ = (x @ x).softmax(-1)
    expect_close(x, before, atol=0, rtol=0, name="x afterwards")


def test_MiniAutocast_refuses_other_dtypes():
    case("int8, float64; device_type 'tpu'")
    for dtype in (torch.int8, torch.float64):
        with expect_raises(ValueError, str(dtype), read="the contract, under Raises"):
            amp.MiniAutocast(dtype)
    with expect_raises(ValueError, "tpu", read="the contract, under Raises"):
        amp.MiniAutocast(HALF, "tpu")
    expect_true(PRODUCTS.isdisjoint(REDUCTIONS["cuda"] | REDUCTIONS["cpu"]), "the given lists share a name")


# ---- autocast_dtypes -------------------------------------------------------------------------------------------------


def test_autocast_dtypes_by_hand():
    case("embedding, linear, GELU, LayerNorm, linear on the meta device, float16: CUDA's rules")
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 3))
        found = amp.autocast_dtypes(model, torch.zeros(4, dtype=torch.int64), HALF)
    expect_equal(found, {"0": SINGLE, "1": HALF, "2": HALF, "3": SINGLE, "4": HALF}, read=PREDICTS)


def test_autocast_dtypes_of_the_assignment():
    case("the assignment's model without numbers, on the meta device, float16: CUDA's rules")
    with torch.device("meta"):
        model, x = ToyModel(), torch.empty(4, 6)
    expected = {"fc1": HALF, "ln": SINGLE, "fc2": HALF, "relu": HALF}
    expect_equal(amp.autocast_dtypes(model, x, HALF), expected, read=PREDICTS)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_autocast_dtypes_equals_torchs_on_the_cpu(dtype):
    torch.manual_seed(0)
    models = {
        "the assignment's": (ToyModel(), randn(4, 6)),
        "embedding and attention by hand": (Residual(), torch.tensor([[0, 3, 2], [1, 6, 5]])),
        "convolutions": (image_model(), randn(2, 1, 6, 6)),
        "one layer": (nn.Linear(3, 2), randn(2, 3)),
        "float64": (nn.Linear(3, 2).double(), randn(2, 3).double()),
    }
    for name, (model, x) in models.items():
        case(f"{name} model on the CPU, {str(dtype)[6:]}")
        expected = observed(copy.deepcopy(model), x, torch.autocast("cpu", dtype=dtype))
        expect_equal(amp.autocast_dtypes(model, x, dtype), expected, read=PREDICTS)


def test_autocast_dtypes_equals_torchs_on_cuda():
    case("the assignment's model, float16, beside CUDA's autocast")
    with cuda_autocast(HALF):
        x, wide, narrow = (torch.empty(shape, device="cuda") for shape in ((4, 6), (10, 6), (3, 10)))
        hidden = functional.linear(x, wide)
        bent = functional.relu(hidden)
        normed = functional.layer_norm(bent, (10,))
        layers = {"fc1": hidden, "ln": normed, "fc2": functional.linear(normed, narrow), "relu": bent}
        expected = {name: output.dtype for name, output in layers.items()}
    with torch.device("meta"):
        found = amp.autocast_dtypes(ToyModel(), torch.empty(4, 6), HALF)
    expect_equal(found, expected, read=PREDICTS)


@pytest.mark.gpu
def test_autocast_dtypes_equals_torchs_on_a_gpu():
    case("three models on the GPU, float16 and bfloat16")
    models = [(ToyModel(), randn(4, 6)), (Residual(), torch.tensor([[0, 3, 2]])), (image_model(), randn(2, 1, 6, 6))]
    for model, x in models:
        model, x = model.cuda(), x.cuda()
        for dtype in (HALF, BRAIN):
            expected = observed(model, x, torch.autocast("cuda", dtype=dtype))
            expect_equal(amp.autocast_dtypes(model, x, dtype), expected, read=PREDICTS)


def test_autocast_dtypes_leaves_the_model_as_it_was():
    case("a model in training mode, its last layer in eval mode; the first has gradients of 1 and a hook")
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Dropout(0.5).eval())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, read = model[0], "the contract, under Args: model"
    for p in first.parameters():
        p.grad = torch.ones_like(p)
    first.register_forward_hook(lambda module, inputs, output: None)
    torch.manual_seed(3)
    amp.autocast_dtypes(model, randn(2, 1, 5, 5), BRAIN)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    expect_close(dict(model.state_dict()), before, atol=0, rtol=0, name="state_dict", read=read)
    expect_close(drawn, torch.rand(2), atol=0, rtol=0, name="the next random numbers", read=read)
    grads = [None if p.grad is None else p.grad.unique().tolist() for p in model.parameters()]
    expect_equal(grads, [[1.0], [1.0], None, None], name="values in each parameter's gradient", read=read)
    hooks = [len(m._forward_hooks) for m in model]
    expect_equal(hooks, [1, 0, 0, 0], name="number of forward hooks of each layer", read=read)
    modes = [model.training, *(m.training for m in model)]
    expect_equal(modes, [True] * 4 + [False], name="training, of the model and of each layer", read=read)


def test_autocast_dtypes_are_in_the_models_order():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.a = nn.LayerNorm(3), nn.Linear(3, 3)

        def forward(self, x):
            return self.b(self.a(x))

    case("b is defined before a, and forward is b(a(x)): the names are b, a; on the CPU, bfloat16")
    found = amp.autocast_dtypes(Backwards(), randn(2, 3), BRAIN)
    expect_equal(found, {"b": BRAIN, "a": BRAIN}, read=PREDICTS)
    expect_equal(list(found), ["b", "a"], name="names", read="the contract, under Returns")


def test_autocast_dtypes_of_outputs_in_tuples():
    class Pair(nn.Module):
        def forward(self, x):
            return x @ x, x

    case("a layer that returns (product, input), alone and after a LayerNorm")
    pair, norm = Pair(), nn.LayerNorm(3)
    with torch.device("meta"):
        model = nn.Sequential(Pair())
        found = amp.autocast_dtypes(model, torch.empty(3, 3), HALF)
    expect_equal(found, {"0": HALF}, read=PREDICTS)
    expect_equal(amp.autocast_dtypes(nn.Sequential(norm, pair), randn(3, 3), BRAIN), {"0": SINGLE, "1": BRAIN})

    class Listed(nn.Module):
        def forward(self, x):
            return [x @ x, x]

    case("a layer that returns [product, input]")
    expect_equal(amp.autocast_dtypes(Listed(), randn(3, 3), BRAIN), {"": BRAIN}, read="the contract, under Returns")


def test_autocast_dtypes_of_a_layer_that_is_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.linear = nn.ReLU(), nn.Linear(3, 3)

        def forward(self, x):
            return self.relu(self.linear(self.relu(x)))

    case("a ReLU of float32 numbers, then of a product, in bfloat16 on the CPU: the last call counts")
    found = amp.autocast_dtypes(Twice(), randn(2, 3), BRAIN)
    expect_equal(found, {"relu": BRAIN, "linear": BRAIN}, read="the contract, under Returns")


def test_autocast_dtypes_removes_its_hooks_after_an_error():
    case("a model that does not fit its input")
    model = nn.Sequential(nn.Linear(3, 2))
    with expect_raises(RuntimeError):
        amp.autocast_dtypes(model, randn(2, 5), BRAIN)
    hooks = [name for name, m in model.named_modules() if m._forward_hooks]
    read = "the contract, under Args: model"
    expect_equal(hooks, [], name="modules with a forward hook left in them", read=read)
