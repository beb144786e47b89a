"""The race of AdamW and Muon, at a size for a CPU."""

import argparse

import pytest
import torch

from lib.bench import optimizers
from lib.given.data.record import load

WORDS = "--device cpu --tiny --steps 2 --batch 1 --length 16 --seeds 2 --eval-every 1 --eval-batches 1 --rounds 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the record of both parts, measured one after the other, and the race's trainings."""
    folder, text = tmp_path_factory.mktemp("race"), torch.arange(4000).to(torch.uint8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizers, "read_text", lambda n_bytes: (text, text[:500]))
        patched.setattr(optimizers, "RATES", {"adamw": (1e-3, 1e-2), "stacked_muon": (1e-3, 1e-2)})
        optimizers.main(["speeds", *WORDS.split(), "--folder", str(folder)])
        run_race(folder)
        yield folder


def run_race(folder, *more):
    optimizers.main(["race", *WORDS.split(), "--folder", str(folder), "--units", str(folder / "units"), *more])


@pytest.mark.time_limit(120)
def test_both_optimizers_race_to_adamws_loss(folder):
    found = load("optimizers", folder)["results"]
    assert set(found["speeds"]["step_s"]) == {"adamw", "stacked_muon", "muon", "torch_muon"}, (
        "the part that was measured before is kept"
    )
    race = found["race"]
    assert all(
        len(curves) == 2 and [point["step"] for point in curves[0]] == [1, 2] for curves in race["curves"].values()
    )
    assert race["goal"] == pytest.approx(sum(curve[-1]["loss"] for curve in race["curves"]["adamw"]) / 2)
    assert race["best_rate"]["stacked_muon"] == min(
        (1e-3, 1e-2), key=lambda lr: race["tuning"]["stacked_muon"][str(lr)]
    )


@pytest.mark.time_limit(120)
def test_a_race_goes_on_with_what_is_missing_also_beside_another_process(folder):
    lost, kept = (folder / "units" / f"adamw-{lr}-0.json" for lr in ("0.001", "0.01"))
    before, stays = load("optimizers", folder)["results"]["race"]["tuning"], kept.stat().st_mtime_ns
    lost.unlink()
    with optimizers.claimed(lost) as is_mine, optimizers.claimed(lost) as is_also_mine:
        assert (is_mine, is_also_mine) == (True, False)
        unit = {"kind": "adamw", "lr": 1e-3, "seed": 0}
        assert not optimizers.train_one([unit], pytest.fail, {}, folder / "units")
    run_race(folder)
    assert load("optimizers", folder)["results"]["race"]["tuning"] == before
    assert kept.stat().st_mtime_ns == stays
    with pytest.raises(ValueError, match="adamw"):
        run_race(folder, "--steps", "1")


def test_other_seeds_follow_when_all_rates_are_done(monkeypatch):
    monkeypatch.setattr(optimizers, "RATES", {"adamw": (1.0, 2.0), "muon": (3.0,)})
    assert optimizers.wanted({}, 3) == [("adamw", 1.0, 0), ("adamw", 2.0, 0), ("muon", 3.0, 0)]
    done = {("adamw", lr, 0): [{"loss": loss}] for lr, loss in ((1.0, float("nan")), (2.0, 5.0))}
    assert optimizers.wanted(done, 3) == [("muon", 3.0, 0), ("adamw", 2.0, 1), ("adamw", 2.0, 2)]
    done["adamw", 2.0, 0] = done["adamw", 1.0, 0]
    with pytest.raises(ValueError, match="adamw stayed finite"):
        optimizers.wanted(done, 3)


def test_a_training_ends_at_a_loss_that_is_not_finite(monkeypatch):
    losses = iter([2.0, float("inf"), 1.0])
    training = object.__new__(optimizers.Training)
    training.o, training.lr = argparse.Namespace(eval_every=1, device="cpu"), 1.0
    monkeypatch.setattr(optimizers.Training, "step", lambda self, lr: None)
    monkeypatch.setattr(optimizers.Training, "held_out_loss", lambda self: next(losses))
    assert [point["loss"] for point in training.run(3)] == [2.0, float("inf")]


def test_the_prediction_is_of_the_products_over_those_of_a_step():
    o = argparse.Namespace(tiny=False, length=1024, batch=16)
    found = optimizers.prediction(o)
    layer = sum(5 * (4 * 768**2 * long + 2 * 768**3) for long in (2304, 768, 3072, 3072))
    assert found["newton_schulz_flops"] == 12 * layer
    assert found["share_of_flops"] == pytest.approx(12 * layer / (6 * found["n_parameters"] * 16_384))


def test_a_goal_is_reached_between_two_evaluations():
    curve = [{"step": n, "seconds": 2.0 * n, "loss": loss} for n, loss in ((10, 3.0), (20, 2.0), (30, 1.8))]
    assert optimizers.reached(curve, 2.5) == {"step": 15.0, "seconds": 30.0}
    assert optimizers.reached(curve, 3.5) == {"step": 10, "seconds": 20.0}
    assert optimizers.reached(curve, 1.0) is None
