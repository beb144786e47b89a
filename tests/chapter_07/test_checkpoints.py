"""Checkpoints, graded: what they hold, what they refuse, and what is left when saving is cut short."""

import io
import os
import pickle
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded

training = graded("training")

SAVE, LOAD = (
    "the contract of exercise 7.8",
    "the contract of exercise 7.9; it reads what 7.8 wrote: if 7.8 does not pass, mend it first",
)


class Run:
    """A small training run whose every step draws from three sources of random numbers."""

    def __init__(self, seed: int = 0):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2))
        groups = [{"params": list(self.model[0].parameters())}, {"params": list(self.model[2].parameters()), "lr": 0.1}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.step = 0

    def train(self, n_steps: int) -> list[float]:
        losses = []
        for _ in range(n_steps):
            shift = random.random() + float(np.random.standard_normal())
            loss = functional.mse_loss(self.model(torch.randn(4, 3)), torch.full((4, 2), shift))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def resume(target, seed: int = 99) -> Run:
    """A run in a process that knows nothing of the first: other weights, other random numbers, another place."""
    run = Run(seed)
    run.train(1)
    state = training.load_checkpoint(target, run.model, run.optimizer)
    run.schedule.load_state_dict(state["schedule"])
    run.step = state["step"]
    return run


def check_resumes_bit_for_bit(target, rewind, exercise: str) -> None:
    case("3 steps with dropout, saved, loaded in a run with other weights and random numbers, 4 more; beside 7 steps")
    whole = Run()
    expected = whole.train(7)
    broken = Run()
    broken.train(3)
    training.save_checkpoint(target, broken.model, broken.optimizer, 3, schedule=broken.schedule.state_dict())
    rewind()
    resumed = resume(target)
    expect_equal(resumed.step, 3, name="step", read=exercise)
    expect_equal(resumed.train(4), expected[3:], name="losses of steps 3 to 6", read=exercise)
    expect_close(resumed.weights(), whole.weights(), atol=0, rtol=0, name="weights", read=exercise)


# ---- 7.8 save_checkpoint ---------------------------------------------------------------------------------------------


def save(target, step: int, model=None, **state) -> Run:
    run = Run(step)
    training.save_checkpoint(target, model or run.model, run.optimizer, step, **state)
    return run


def step_in(path) -> int:
    run = Run(50)
    return training.load_checkpoint(path, run.model, run.optimizer)["step"]


def test_save_checkpoint_writes_where_it_is_told(tmp_path):
    case("a str, a Path, an open file and a BytesIO; then what is in the folder")
    save(str(tmp_path / "a.pt"), 1)
    save(tmp_path / "b.pt", 2)
    with open(tmp_path / "c.pt", "wb") as file:
        save(file, 3)
        expect_true(not file.closed, "the open file was closed: it is the caller's", read=f"{SAVE}, under Args")
    buffer = io.BytesIO()
    save(buffer, 4)
    buffer.seek(0)
    found = [step_in(tmp_path / f"{name}.pt") for name in "abc"] + [step_in(buffer)]
    expect_equal(found, [1, 2, 3, 4], name="steps", read=f"{SAVE}, under Args")
    there = sorted(path.name for path in tmp_path.iterdir())
    expect_equal(there, ["a.pt", "b.pt", "c.pt"], name="files", read=f"{SAVE}, under Returns")


def test_save_checkpoint_keeps_all_that_a_run_needs(tmp_path):
    check_resumes_bit_for_bit(tmp_path / "run.pt", lambda: None, SAVE)


def test_save_checkpoint_keeps_the_extra_state():
    case("extra state of every plain kind, with names that the checkpoint may use itself")
    tensor = torch.arange(3, dtype=torch.int16)
    state = {
        "random": 1,
        "rng": "a",
        "state": [1, (2, None)],
        "extra": {"a": {1: 2.5}},
        "torch": True,
        "tensor": tensor,
    }
    buffer, run = io.BytesIO(), Run()
    training.save_checkpoint(buffer, run.model, run.optimizer, 5, **state)
    buffer.seek(0)
    found = training.load_checkpoint(buffer, run.model, run.optimizer)
    expect_close(found.pop("tensor", None), tensor, name="tensor", read=f"{SAVE}, under Args")
    del state["tensor"]
    expect_equal(found, {"step": 5, **state}, name="what is loaded", read=f"{SAVE}, under Args")


def test_save_checkpoint_changes_nothing():
    case("weights, and the random numbers of PyTorch, Python and NumPy, before and after")
    run = Run()
    run.train(2)
    before = (run.weights(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    training.save_checkpoint(io.BytesIO(), run.model, run.optimizer, 2)
    after = (run.weights(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    expect_close(after[0], before[0], atol=0, rtol=0, name="weights", read=SAVE)
    same = torch.equal(after[1], before[1]) and after[2:] == before[2:]
    expect_true(same, "saving drew from the random numbers", read=SAVE)


def test_save_checkpoint_refuses_what_could_not_be_loaded(tmp_path):
    case("the extra state `sampler` is an object of a class; before, there is a checkpoint of step 1")
    save(tmp_path / "run.pt", 1)
    with expect_raises(TypeError, "sampler", read=f"{SAVE}, under Raises"):
        save(tmp_path / "run.pt", 2, sampler=Path("x"))
    expect_equal(step_in(tmp_path / "run.pt"), 1, name="step in the file", read=f"{SAVE}, under Raises")


class Log:
    """Notes in which order files reach the disk and their place."""

    def __init__(self, monkeypatch):
        self.calls: list = []
        monkeypatch.setattr(os, "fsync", self._wrap("fsync", os.fsync))
        for name in ("replace", "rename"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name, real):
        def call(*args, **kwargs):
            self.calls.append((name, args))
            return real(*args, **kwargs)

        return call


def test_save_checkpoint_moves_a_whole_file_into_place(tmp_path, monkeypatch):
    case("a checkpoint over an old one: the calls of os.fsync and os.replace")
    path = tmp_path / "run.pt"
    save(path, 1)
    log = Log(monkeypatch)
    save(path, 2)
    names = ["move" if name in ("replace", "rename") else name for name, _ in log.calls]
    read = f"{SAVE}, under Returns"
    expect_true("move" in names, "nothing was moved into place: the old file was written over", answer=names, read=read)
    expect_true(
        "fsync" in names[: names.index("move")],
        "it is moved into place before os.fsync: after a power cut the name may stand for an empty file",
        read=read,
    )
    source = Path(log.calls[names.index("move")][1][0])
    expect_equal(str(source.parent), str(tmp_path), name="the folder of what is moved", read=read)


def fail_half_way(error: BaseException | None):
    """A ``torch.save`` that writes the first half and then fails, or kills its process."""
    real = torch.save

    def half(contents, target, *args, **kwargs):
        whole = io.BytesIO()
        real(contents, whole, *args, **kwargs)
        data = whole.getvalue()
        if isinstance(target, io.BytesIO):  # not the checkpoint
            target.write(data)
            return
        file = open(target, "wb") if isinstance(target, str | os.PathLike) else target  # noqa: SIM115
        file.write(data[: len(data) // 2])
        file.flush()
        if error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise error

    return half


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
def test_save_checkpoint_that_fails_leaves_the_old_one(tmp_path, monkeypatch, error):
    case(f"a checkpoint of step 1; saving step 2 fails half-way with {type(error).__name__}")
    path = tmp_path / "run.pt"
    save(path, 1)
    old = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail_half_way(error))
        try:
            save(path, 2)
            raised = False
        except type(error):
            raised = True
    expect_true(raised, "the failure was swallowed: a run should hear of it", read=SAVE)
    expect_true(path.exists() and path.read_bytes() == old, "the old checkpoint is gone or changed", read=SAVE)
    there = [p.name for p in tmp_path.iterdir()]
    expect_equal(there, ["run.pt"], name="files left", read=f"{SAVE}, under Returns")


def in_a_child_that_dies(do) -> bool:
    """Run it in a forked process; whether that was killed."""
    child = os.fork()
    if child == 0:
        try:
            do()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_save_checkpoint_that_is_killed_leaves_the_old_one(tmp_path):
    case("a checkpoint of step 1; SIGKILL when half of step 2 is written; then step 3 is saved")
    path = tmp_path / "run.pt"
    save(path, 1)
    old = path.read_bytes()

    def killed():
        torch.save = fail_half_way(None)
        save(path, 2)

    in_a_child_that_dies(killed)
    expect_true(path.exists() and path.read_bytes() == old, "the old checkpoint is gone or changed", read=SAVE)
    save(path, 3)
    expect_equal(step_in(path), 3, name="step in the file", read=SAVE)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_save_checkpoint_can_be_killed_at_any_moment(tmp_path):
    case("a checkpoint of step 1; saving step 2 is killed at 16 moments from its first call to its last")
    path, run, moments = tmp_path / "run.pt", Run(2), [0]

    def count(frame, event, argument):
        moments[0] += 1

    sys.setprofile(count)
    try:
        training.save_checkpoint(tmp_path / "count.pt", run.model, run.optimizer, 2)
    finally:
        sys.setprofile(None)
    for k in range(16):
        left = [max(1, round(moments[0] * (k + 1) / 16) - 2)]

        def kill(frame, event, argument, left=left):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def killed(kill=kill):
            sys.setprofile(kill)
            training.save_checkpoint(path, run.model, run.optimizer, 2)

        save(path, 1)
        in_a_child_that_dies(killed)
        try:
            step = step_in(path)
        except Exception as error:
            step = f"unreadable: {type(error).__name__}"
        expect_true(
            step in (1, 2), f"killed at moment {k + 1} of 16, the file holds {step!r}, neither step 1 nor 2", read=SAVE
        )


# ---- 7.9 load_checkpoint ---------------------------------------------------------------------------------------------


def test_load_checkpoint_gives_back_step_and_state(tmp_path):
    case("step=7, epoch=2, losses=[1.5, 0.5], data={'position': 64}")
    state = {"epoch": 2, "losses": [1.5, 0.5], "data": {"position": 64}}
    run = save(tmp_path / "run.pt", 7, **state)
    found = training.load_checkpoint(tmp_path / "run.pt", run.model, run.optimizer)
    expect_equal(found, {"step": 7, **state}, name="what is loaded", read=f"{LOAD}")


@pytest.mark.parametrize("kind", ["path", "str", "file", "buffer"])
def test_load_checkpoint_resumes_bit_for_bit(tmp_path, kind):
    path, buffer = tmp_path / "run.pt", io.BytesIO()
    if kind in ("path", "str"):
        check_resumes_bit_for_bit(path if kind == "path" else str(path), lambda: None, LOAD)
    elif kind == "buffer":
        check_resumes_bit_for_bit(buffer, lambda: buffer.seek(0), LOAD)
    else:
        with open(path, "w+b") as file:
            check_resumes_bit_for_bit(file, lambda: file.seek(0), LOAD)


def test_load_checkpoint_restores_each_random_number(tmp_path):
    case("two numbers each of torch.rand, random.gauss and numpy.random.standard_normal after loading")
    run = Run()
    random.gauss(0, 1), np.random.standard_normal()  # both keep the second of a pair for later
    training.save_checkpoint(tmp_path / "run.pt", run.model, run.optimizer, 0)
    sources = {
        "torch": lambda: torch.rand(()).item(),
        "random": lambda: random.gauss(0, 1),
        "numpy": lambda: float(np.random.standard_normal()),
    }
    expected = {name: [draw(), draw()] for name, draw in sources.items()}
    training.load_checkpoint(tmp_path / "run.pt", run.model, run.optimizer)
    found = {name: [draw(), draw()] for name, draw in sources.items()}
    expect_equal(found, expected, name="drawn", read=LOAD)


def test_load_checkpoint_fills_the_tensors_that_are_there(tmp_path):
    case("the model's parameters before and after: the same objects, which the optimizer holds; rates of the file")
    saved = Run(1)
    saved.train(3)
    training.save_checkpoint(tmp_path / "run.pt", saved.model, saved.optimizer, 3)
    run = Run(2)
    pointers = [p.data_ptr() for p in run.model.parameters()]
    training.load_checkpoint(tmp_path / "run.pt", run.model, run.optimizer)
    expect_equal([p.data_ptr() for p in run.model.parameters()] == pointers, True, name="loaded in place", read=LOAD)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    expect_equal(rates, [group["lr"] for group in saved.optimizer.param_groups], name="learning rates", read=LOAD)
    moments = [run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()]
    expected = [saved.optimizer.state[p]["exp_avg"] for p in saved.model.parameters()]
    expect_close(moments, expected, atol=0, rtol=0, name="exp_avg", read=LOAD)


RAN: list[str] = []


class Evil:
    """What a pickle may do to whoever opens it."""

    def __reduce__(self):
        return RAN.append, ("run",)


def test_load_checkpoint_runs_nothing_from_the_file(tmp_path):
    case("a file whose pickle calls a function when it is opened")
    RAN.clear()
    torch.save({"model": Evil(), "optimizer": {}, "step": 1}, tmp_path / "evil.pt")
    run = Run()
    with expect_raises(pickle.UnpicklingError, read=f"{LOAD}; weights_only=True"):
        training.load_checkpoint(tmp_path / "evil.pt", run.model, run.optimizer)
    expect_equal(RAN, [], name="what the file could run", read=LOAD)


def test_load_checkpoint_needs_a_file_and_the_same_model(tmp_path):
    run = Run()
    case("no such file")
    with expect_raises(FileNotFoundError, "none.pt", read=LOAD):
        training.load_checkpoint(tmp_path / "none.pt", run.model, run.optimizer)
    case("a file that ends half-way")
    save(tmp_path / "run.pt", 1)
    data = (tmp_path / "run.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(data[: len(data) // 2])
    with expect_raises(Exception, read=LOAD):
        training.load_checkpoint(tmp_path / "half.pt", run.model, run.optimizer)
    case("a model of another width")
    with expect_raises(RuntimeError, "weight", read=LOAD):
        training.load_checkpoint(tmp_path / "run.pt", nn.Sequential(nn.Linear(4, 5)), run.optimizer)


@pytest.mark.gpu
def test_load_checkpoint_on_a_gpu(tmp_path):
    case("a model and its optimizer on the GPU; the next random numbers of the GPU")
    model = nn.Linear(3, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3, device="cuda")).sum().backward()
    optimizer.step()
    training.save_checkpoint(tmp_path / "run.pt", model, optimizer, 1)
    expected = torch.rand(3, device="cuda").tolist()
    training.load_checkpoint(tmp_path / "run.pt", model, optimizer)
    expect_equal(torch.rand(3, device="cuda").tolist(), expected, name="random numbers", read=LOAD)
    expect_equal(optimizer.state[model.weight]["exp_avg"].device.type, "cuda", name="device of the state", read=LOAD)
