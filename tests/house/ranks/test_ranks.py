"""The warm ranks: what they give, how each failure is told, and that nothing is left behind."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from lib.ranks import MAX_RANKS, RankFailure, milestone, mpi_launch, noise, pool
from lib.ranks.deadlock import RankView
from lib.ranks.failure import _state
from lib.ranks.places import innermost, is_user_file
from tests.house.ranks import ranks_mpi_programs as mpi_programs
from tests.house.ranks import ranks_programs as programs

ROOT = Path(__file__).resolve().parents[3]
mpi = pytest.mark.skipif(sys.platform == "win32", reason="no MPI wheel for Windows: use WSL")


def line_of(text: str, module=programs) -> str:
    """``tests/house/ranks/ranks_programs.py:N`` of the one line that holds ``text``."""
    lines = Path(module.__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if text in line]
    return f"{Path(module.__file__).relative_to(ROOT)}:{number}"


def failure(backend, function, *args, **options) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        pool(backend).run(function, *args, **options)
    print(caught.value.message)
    assert caught.value.message == str(caught.value)
    return caught.value


@pytest.fixture(autouse=True)
def no_rank_is_left():
    """After each test, however its run ended, the keeper of the gloo ranks has no process under it."""
    yield
    handle = pool("gloo")._handle
    assert handle is None or psutil.Process(handle.process.pid).children(recursive=True) == []


@pytest.fixture
def impatient(monkeypatch):
    """Call a deadlock one sooner than the two seconds of real use, which `test_gloo_different_calls` waits for."""
    monkeypatch.setattr("lib.ranks.watch.SETTLED_S", 0.3)


# ---- what a run gives ----


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_gloo_values(n_ranks):
    result = pool("gloo").run(programs.sum_of_ranks, 5, n_ranks=n_ranks)
    expected = float(sum(range(n_ranks)))
    assert [value.tolist() for value in result.values] == [[expected] * 5] * n_ranks
    assert result.mismatch() == ""
    for rank, ledger in enumerate(result.ledgers):
        (record,) = ledger.records
        assert (ledger.rank, record.op, record.seq, record.n_bytes, record.dtype) == (
            rank,
            "all_reduce",
            1,
            20,
            "float32",
        )
        assert (record.group_size, record.is_async, record.where) == (
            n_ranks,
            False,
            line_of("    dist.all_reduce(x)  # sum"),
        )


@mpi
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_mpi_values(n_ranks):
    result = pool("mpi").run(mpi_programs.sum_of_ranks, 5, n_ranks=n_ranks)
    total = float(sum(range(n_ranks)))
    assert [value[0].tolist() for value in result.values] == [[total] * 5] * n_ranks
    assert [value[1] for value in result.values] == [list(range(n_ranks))] * n_ranks
    assert [ledger.count("allreduce", "allgather") for ledger in result.ledgers] == [2] * n_ranks
    assert result.ledgers[0].records[0].n_bytes == 40


@pytest.mark.parametrize("n_ranks", [0, MAX_RANKS + 1])
def test_number_of_ranks(n_ranks):
    with pytest.raises(ValueError, match=f"n_ranks is {n_ranks}"):
        pool("gloo").run(programs.sum_of_ranks, n_ranks=n_ranks)


def test_unknown_backend():
    with pytest.raises(ValueError, match="nccl"):
        pool("nccl")


def test_function_without_a_name():
    with pytest.raises(ValueError, match="top level of a module"):
        pool("gloo").run(lambda rank, size: rank)


def test_gloo_ragged_arguments():
    result = pool("gloo").run(programs.ragged, [3, 0, 5], n_ranks=3)
    assert [len(x) for x, _ in result.values] == [3, 0, 5]
    assert all(sizes == [3, 0, 5] for _, sizes in result.values)


def test_gloo_environment_and_output(capsys):
    pools = pool("gloo")
    assert pools.run(programs.environment, "WORKBOOK_TRY", env={"WORKBOOK_TRY": "only:ddp"}).values == ["only:ddp"] * 2
    assert pools.run(programs.environment, "WORKBOOK_TRY").values == [None] * 2
    result = pools.run(programs.speak, n_ranks=2)
    assert [sorted(text.splitlines()) for text in result.outputs] == [
        ["I am 0", "from below"],
        ["I am 1", "from below"],
    ]
    assert "[rank 1] I am 1" in capsys.readouterr().out


def test_gloo_ledger_of_every_call():
    ledgers = pool("gloo").run(programs.every_call, n_ranks=3).ledgers
    ops = "broadcast reduce all_gather gather scatter reduce_scatter_tensor all_to_all_single barrier all_gather_object"
    assert [record.op for record in ledgers[2].records] == [*ops.split(), "isend", "irecv"]
    assert [record.op for record in ledgers[0].records] == [*ops.split(), "send", "isend", "irecv", "all_reduce"]
    first = {record.op: record for record in ledgers[0].records}
    assert (first["scatter"].n_bytes, first["reduce_scatter_tensor"].n_bytes, first["barrier"].n_bytes) == (48, 48, 0)
    assert (first["all_to_all_single"].n_bytes, first["all_to_all_single"].dtype) == (48, "float64")
    assert (first["send"].to, first["irecv"].source, first["reduce"].root) == (1, 2, 1)
    assert (first["all_reduce"].group, first["all_reduce"].group_size) == ((0, 1), 2)
    assert (first["isend"].is_async, first["send"].is_async) == (True, False)
    assert [ledger.n_messages for ledger in ledgers] == [2, 1, 1]
    second = {record.op: record for record in ledgers[1].records}
    assert [second[op].sends for op in ("broadcast", "recv", "gather")] == [False, False, True]
    assert "all_to_all_single #1" in str(ledgers[0])
    assert line_of("dist.barrier()  # all calls") in str(ledgers[0])


def test_gloo_async_begins_before_a_mark():
    result = pool("gloo").run(programs.overlap, n_ranks=2)
    for (grad, completed), ledger in zip(result.values, result.ledgers, strict=True):
        assert grad.tolist() == [2.0] * 3
        assert completed
        assert [record.op for record in ledger.before("backward ends")] == ["all_reduce"]
        assert ledger.records[0].is_async
        assert [m.name for m in ledger.milestones] == ["backward ends"]
    with pytest.raises(ValueError, match="no milestone 'forward ends'"):
        result.ledgers[0].before("forward ends")


def test_mark_outside_a_rank_does_nothing():
    milestone("nowhere")


@mpi
def test_mpi_ledger_and_communicators():
    result = pool("mpi").run(mpi_programs.messages, n_ranks=3)
    assert [value[:2] for value in result.values] == [(2, 2), (1, 1), (2, 2)]
    assert all(value[3] for value in result.values)
    zero, one, two = result.ledgers
    assert [record.op for record in zero.records][:5] == ["Send", "send", "Sendrecv", "Isend", "Irecv"]
    assert (zero.count("Send"), zero.count("Isend"), one.count("recv"), two.count("recv")) == (2, 1, 2, 0)
    assert zero.n_messages == 4
    assert (zero.records[0].n_bytes, zero.records[0].dtype, zero.records[0].to) == (16, "float32", 1)
    assert zero.records[-1].group == (0, 2)
    assert result.mismatch() == ""


@mpi
def test_mpi_world_is_the_tasks_own():
    assert pool("mpi").run(mpi_programs.world, n_ranks=3).values == [(3, True, 3)] * 3


def test_gloo_sees_an_edited_file(tmp_path, monkeypatch):
    _sees_an_edited_file("gloo", "rank, world_size", tmp_path, monkeypatch)


@mpi
def test_mpi_sees_an_edited_file(tmp_path, monkeypatch):
    _sees_an_edited_file("mpi", "comm", tmp_path, monkeypatch)


def _sees_an_edited_file(backend, parameters, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"edited_{backend}"
    file = tmp_path / f"{name}.py"
    file.write_text(f"def answer({parameters}):\n    return 1\n")
    module = __import__(name)
    assert pool(backend).run(module.answer).values == [1, 1]
    file.write_text(f"def answer({parameters}):\n    return 'another'\n")
    assert pool(backend).run(module.answer).values == ["another", "another"]
    sys.modules.pop(name)


def test_gloo_function_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from lib.ranks import pool\n"
        "def where(rank, world_size):\n    return rank, __name__ == '__main__'\n"
        "if __name__ == '__main__':\n    print(pool('gloo').run(where, n_ranks=2).values)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, cwd=ROOT, env=with_root()
    )
    assert done.stdout == "[(0, False), (1, False)]\n", done.stderr


def with_root() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


# ---- how a run fails ----


def test_gloo_rank_raises():
    found = failure("gloo", programs.raise_on, 2, n_ranks=4)
    where = line_of('raise ValueError(f"odd thing on {rank}")')
    assert (found.kind, found.rank) == ("raised", 2)
    assert isinstance(found.error, ValueError)
    assert found.message.startswith(f"rank 2 raised ValueError: odd thing on 2, at {where}\n")
    assert "in raise_on  raise ValueError" in found.message
    assert "site-packages" not in found.message
    assert found.ledgers[2].count("all_reduce") == 1
    assert [state.rank for state in found.per_rank] == [0, 1, 2, 3]


@pytest.mark.parametrize(("backend", "chapter"), [("gloo", 10), pytest.param("mpi", 9, marks=mpi)])
def test_not_written_yet(backend, chapter):
    function = programs.not_started if backend == "gloo" else mpi_programs.not_started
    found = failure(backend, function, n_ranks=4)
    assert isinstance(found.error, NotImplementedError)
    assert str(found.error) == f"Exercise {chapter}.{2 if chapter == 10 else 1}: write me"
    assert "(so did rank" in found.message  # a rank that had not begun yet is not waited for


def test_gloo_what_cannot_be_pickled():
    found = failure("gloo", programs.raise_unpicklable)
    assert found.error is None
    assert "Unpicklable: 1 and 2" in found.message
    assert "returned a function, which cannot be sent back" in failure("gloo", programs.return_unpicklable).message


def test_gloo_rank_exits():
    found = failure("gloo", programs.exit_on, 1, n_ranks=3)
    assert (found.kind, found.rank, found.error) == ("died", 1, None)
    assert found.message.startswith("rank 1 died (exit status 7)")


def test_gloo_rank_is_killed():
    found = failure("gloo", programs.killed_on, 1, n_ranks=3)
    assert found.message.startswith(
        "rank 1 died (signal 9, SIGKILL) after all_reduce #1 at tests/house/ranks/ranks_programs"
    )
    found = failure("gloo", programs.killed_within, 1)
    where = line_of("dist.all_reduce(torch.ones(2))  # the alarm")
    assert found.message.startswith(f"rank 1 died (signal 14, SIGALRM) in all_reduce #1 at {where}")


def test_gloo_rank_crashes():
    found = failure("gloo", programs.crash_on, 1)
    assert found.message.startswith(f"rank 1 died (signal 11, SIGSEGV) at {line_of('ctypes.string_at(0)')}")


def test_gloo_rank_returns_early():
    began = time.monotonic()
    found = failure("gloo", programs.returns_early, 3, n_ranks=4, time_limit_s=60)
    assert time.monotonic() - began < 60
    assert found.kind == "deadlock"
    assert "ranks 0, 1 and 2 wait in all_reduce #1, for" in found.message
    assert "rank 3 has returned and never reached all_reduce #1" in found.message


def test_gloo_rank_sleeps():
    found = failure("gloo", programs.sleeps, 3, n_ranks=4, time_limit_s=1)
    assert found.kind == "time"
    assert (
        f"rank 3 is still computing at {line_of('time.sleep(60)  # never arrives')} and never reached" in found.message
    )
    assert "ranks 0, 1 and 2 wait in all_reduce #1" in found.message


def test_gloo_different_calls():
    found = failure("gloo", programs.different_calls, time_limit_s=60)
    assert found.kind == "deadlock"
    assert found.message.startswith("rank 0 waits in all_reduce #2, rank 1 in broadcast #1, for ")
    assert f"  rank 0  {line_of('dist.all_reduce(x)  # differs')}  dist.all_reduce(x)  # differs\n" in found.message
    assert "rank 0 calls all_reduce of 4 float32 (" in found.message
    assert "rank 1 broadcast of 4 float32 with root 0 (" in found.message


def test_gloo_crossed_groups(impatient):
    found = failure("gloo", programs.crossed_groups, time_limit_s=60)
    assert "rank 0 waits in all_reduce #1 on group '1', rank 1 in all_reduce #1 on group '0'" in found.message


def test_gloo_different_sizes():
    found = failure("gloo", programs.different_sizes)
    assert found.kind == "deadlock"
    assert found.message.startswith("rank 0 calls all_reduce of 4 float32 (")
    assert "rank 1 all_reduce of 5 float32 (" in found.message


def test_gloo_different_roots(impatient):
    found = failure("gloo", programs.different_roots, time_limit_s=60)
    assert "rank 0 calls broadcast of 4 float32 with root 0" in found.message


def test_gloo_disagreement_that_nobody_noticed():
    result = pool("gloo").run(programs.unnoticed, n_ranks=2)
    assert result.mismatch().startswith("rank 0 calls all_reduce of 4 float32 (")
    assert "rank 1 all_reduce of 4 int32 (" in result.mismatch()


def test_gloo_receive_from_each_other(impatient):
    found = failure("gloo", programs.receive_from_each_other, time_limit_s=60)
    assert found.message.startswith("rank 0 waits in recv #1 from rank 1, rank 1 in recv #1 from rank 0, for ")


def test_gloo_wait_of_an_async_call():
    found = failure("gloo", programs.async_never_matched, time_limit_s=60)
    assert found.message.startswith("rank 0 waits in all_reduce #1, for ")
    assert line_of("work.wait()  # for nothing") in found.message


@pytest.mark.parametrize(("loop", "text"), [(programs.loop, "all(iter("), (programs.loop_in_c, "re.match(")])
def test_gloo_endless_loop(loop, text):
    found = failure("gloo", loop, 1, n_ranks=3, time_limit_s=1)
    where = line_of(text)
    assert found.kind == "time"
    assert found.message.startswith("ranks 0 and 2 wait in barrier #1, for ")
    assert f" s; rank 1 is still computing at {where} and never reached barrier #1" in found.message
    assert f"  rank 1  {where}  {text}" in found.message
    assert "(the limit is 1 s)" in found.message


def test_gloo_slow_but_right():
    assert pool("gloo").run(programs.sleep_a_while, 2.5, n_ranks=2, time_limit_s=30).values == [0, 1]


def test_gloo_children_of_ranks_are_ended():
    pool("gloo").run(programs.start_children, n_ranks=2)


def test_gloo_every_rank_raises_one_after_the_other():
    """None that raises while the others are asked where they are is said not to have begun."""
    found = failure("gloo", programs.raise_on_all, n_ranks=3)
    assert "rank 0 raised ValueError: on all of them, at " in found.message
    assert "(so did ranks 1 and 2)" in found.message
    assert "has not begun" not in found.message


def test_gloo_rank_that_is_between_two_calls():
    found = failure("gloo", programs.raise_beside_work, n_ranks=3)
    where = line_of("time.sleep(5)  # at work")
    assert f"  rank 1  {where}  time.sleep(5)  # at work  is at work, after all_reduce #1\n" in found.message


def test_gloo_receive_of_more_than_there_is_room_for():
    found = failure("gloo", programs.receive_too_much, n_ranks=3)
    assert (found.kind, found.rank) == ("died", 1)
    where = line_of("dist.recv(torch.empty(6), 0)")
    assert f"in recv #1 from rank 0 at {where}: rank 0 sends 12 float32 (" in found.message
    assert f"rank 1 receives into 6 float32 ({where})\n" in found.message
    assert f"\n  rank 1  {where}  dist.recv(torch.empty(6), 0)  died (signal 6, SIGABRT in recv" in found.message


def test_a_rank_that_raised_without_a_word_is_not_said_to_have_not_begun(tmp_path):
    view = RankView(1, tmp_path / "journal", 0.0, phase="raised")
    state = _state(view, None, tmp_path / "stack")
    assert str(state) == "  rank 1  raised an exception, too"
    assert str(_state(RankView(1, tmp_path / "journal", 0.0), None, tmp_path / "stack")) == "  rank 1  has not begun"


def test_what_libraries_print_is_left_out():
    stack = "/venv/lib/libmpi.so.12(+0x4627a1) [0x7ff275e627a1]\n/bin/python(_start+0x21) [0x562956a5b081]\n"
    assertion = "Assertion failed in file /src/typerep_yaksa_pack.c at line 326: element_size < 0\n"
    logged = "[rank0]:E1121 10:00:00.1 7 torch/_subclasses/fake_tensor.py:1] failed while attempting to run meta\n"
    aborted = (
        "Abort(609824142) on node 3 (rank 3 in comm 496): Fatal error in internal_Allreduce_c: Oh, error stack:\n"
        "internal_Allreduce_c(342).....: MPI_Allreduce_c(sendbuf=0x5610f48e90e0) failed\nMPIR_Wait(745).: \n"
    )
    enforced = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what(): "
        " [enforce fail at pair.cc:455] a <= b. 48 vs 24\n"
    )
    profiled = "USDT:2026-11-22 17:34:31 10770:10770 SyncActivityProfilerHandler.cpp:52] profiler_start\n"
    assert noise.meaningful(assertion + stack + logged + aborted + enforced + profiled + "mine: 3\n") == ["mine: 3"]
    assert noise.cause(assertion + stack).startswith("the message is not a whole number")
    assert noise.cause("mine\n" + aborted) == "Oh"
    assert noise.cause(enforced) == "a <= b. 48 vs 24"
    assert noise.cause("mine") == ""
    assert noise.brief("Message truncated, error stack:\nMPIR_Wait(745): ") == "Message truncated"
    assert noise.shown_lines("a\nb\nc\nd\n", 2) == ["a", "b", "… 2 lines more (pytest -s shows them all)"]


def test_failure_can_be_sent():
    found = failure("gloo", programs.raise_on, 0)
    again = pickle.loads(pickle.dumps(found))
    assert (again.message, again.kind, again.rank, again.per_rank) == (
        found.message,
        found.kind,
        found.rank,
        found.per_rank,
    )


# ---- the same, with MPI ----


@mpi
@pytest.mark.parametrize(("program", "call"), [("both_receive", "Recv"), ("wait_for_nothing", "Irecv")])
def test_mpi_deadlock(program, call, impatient):
    found = failure("mpi", getattr(mpi_programs, program), time_limit_s=60)
    assert found.kind == "deadlock"
    start = f"rank 0 waits in {call} #1 from rank 1, rank 1 in {call} #1 from rank 0, for "
    assert found.message.startswith(start)
    assert pool("mpi").run(mpi_programs.sum_of_ranks, 1, n_ranks=2).mismatch() == ""


@mpi
def test_mpi_rank_raises():
    found = failure("mpi", mpi_programs.raise_on, 1, n_ranks=4)
    assert isinstance(found.error, ValueError)
    assert found.message.startswith(
        "rank 1 raised ValueError: odd thing on 1, at tests/house/ranks/ranks_mpi_programs.py:"
    )


@mpi
@pytest.mark.parametrize(("program", "how"), [("killed_on", "signal 9, SIGKILL"), ("exit_on", "exit status 7")])
def test_mpi_rank_dies(program, how):
    found = failure("mpi", getattr(mpi_programs, program), 1, n_ranks=3)
    assert (found.kind, found.rank) == ("died", 1)
    assert found.message.startswith(f"rank 1 died ({how})")


@mpi
def test_mpi_receive_into_another_type():
    found = failure("mpi", mpi_programs.receive_another_type, n_ranks=3)
    where = line_of("comm.Recv(inbox, source=0)  # too wide", mpi_programs)
    assert (found.kind, found.rank) == ("died", 1)
    first, *rows = found.message.splitlines()
    assert f"in Recv #1 from rank 0 at {where}: rank 0 sends 3 float32 (" in first
    assert first.endswith(f"rank 1 receives into 3 float64 ({where})")
    assert rows[1].startswith(f"  rank 1  {where}  comm.Recv(inbox, source=0)  # too wide  died (exit status 1")
    assert len(rows) == 3


@mpi
def test_mpi_receive_of_too_much():
    found = failure("mpi", mpi_programs.receive_too_much)
    assert "truncated" in found.message
    assert "rank 0 sends 12 float64 (" in found.message
    assert "rank 1 receives into 6 float64 (" in found.message
    assert "internal_Recv" not in found.message
    assert "Comm.pyx" not in found.message


@mpi
def test_mpi_ranks_that_all_raised_are_used_again():
    before = pool("mpi").run(mpi_programs.pid, n_ranks=3).values
    assert "(so did ranks 1 and 2)" in failure("mpi", mpi_programs.raise_on_all, n_ranks=3).message
    assert pool("mpi").run(mpi_programs.pid, n_ranks=3).values == before
    failure("mpi", mpi_programs.raise_on, 1, n_ranks=3)  # the others are left in a barrier
    assert pool("mpi").run(mpi_programs.pid, n_ranks=3).values != before


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=mpi)])
def test_ready_twice(backend):
    pool(backend).ready()
    pool(backend).ready()


@mpi
def test_mpi_rank_returns_early():
    found = failure("mpi", mpi_programs.returns_early, 1, n_ranks=3, time_limit_s=60)
    assert "rank 1 has returned and never reached Bcast #1" in found.message


@mpi
def test_mpi_endless_loop():
    found = failure("mpi", mpi_programs.loop, 1, n_ranks=2, time_limit_s=1)
    assert found.kind == "time"
    assert f"rank 1 is still computing at {line_of('all(iter(', mpi_programs)}" in found.message


@mpi
def test_mpi_message_that_nobody_takes():
    result = pool("mpi").run(mpi_programs.untaken)
    assert result.mismatch() == "rank 0 sent rank 1 1 message, and rank 1 received 0"
    assert pool("mpi").run(mpi_programs.sum_of_ranks, 1, n_ranks=2).mismatch() == ""


# ---- processes ----


def test_gloo_forked_child_shares_the_pool():
    """As a check in a process of its own does; also one that is killed while its ranks run."""
    pool("gloo").run(programs.sum_of_ranks)
    keepers = {p.pid for p in psutil.Process().children()}
    for function, limit_s in ((programs.sum_of_ranks, 10.0), (programs.loop_alone, 60.0)):
        pid = os.fork()
        if pid == 0:
            try:
                pool("gloo").run(function, time_limit_s=limit_s)
            finally:
                os._exit(0)
        if function is programs.loop_alone:
            time.sleep(1)
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert pool("gloo").run(programs.sum_of_ranks).values[0].tolist() == [1.0] * 3
    assert {p.pid for p in psutil.Process().children()} == keepers


@mpi
def test_mpi_forked_child_shares_the_pool(impatient):
    """Also one that fails, upon which the next to ask gets new ranks."""
    pool("mpi").run(mpi_programs.sum_of_ranks, 1)
    for function, status in ((mpi_programs.world, 0), (mpi_programs.both_receive, 1)):
        pid = os.fork()
        if pid == 0:
            try:
                pool("mpi").run(function, n_ranks=2)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
        assert pool("mpi").run(mpi_programs.world, n_ranks=3).values == [(3, True, 3)] * 3


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=mpi)])
def test_killed_parent_leaves_nothing(backend, tmp_path):
    function, programs = ("loop_alone", "ranks_programs") if backend == "gloo" else ("loop, 0", "ranks_mpi_programs")
    code = (
        f"from lib.ranks import pool; from tests.house.ranks import {programs} as p\n"
        f"pool({backend!r}).run(p.{function}, n_ranks=2, time_limit_s=60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**with_root(), "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 60
    looping = 2 if backend == "gloo" else 1
    while sum(seconds_of(p) > 0.3 for p in of(process)[1:]) < looping and time.monotonic() < deadline:
        time.sleep(0.1)
    family = of(process)
    assert len(family) >= 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert list(tmp_path.glob("ranks-*")) == []


def of(process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def seconds_of(process: psutil.Process) -> float:
    """What it has computed; nothing if it is gone, as what libraries start for a moment is."""
    try:
        return process.cpu_times().user
    except psutil.Error:
        return 0.0


def test_close_leaves_nothing():
    other = type(pool("gloo"))("gloo")
    other.run(programs.sum_of_ranks)
    keeper, folder = other._handle.process.pid, other._handle.folder
    other.close()
    assert not psutil.pid_exists(keeper)
    assert not folder.exists()
    other.run(programs.sum_of_ranks)
    other.close()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("lib.ranks.handle.shutil.which", lambda name: None)
    monkeypatch.setattr("lib.ranks.handle.Path.exists", lambda path: False)
    other = type(pool("mpi"))("mpi")
    with pytest.raises(RankFailure, match="no mpiexec beside") as caught:
        other.run(mpi_programs.world)
    assert caught.value.kind == "missing"


@mpi
@pytest.mark.time_limit(60)
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("exec sleep 600", r"the ranks did not start within 4\.5 s"),
        ("exit 142", r"the ranks ended while they were started \(status 36352\)"),
    ],
    ids=["do-not-come", "end"],
)
@pytest.mark.parametrize("n_lost", [1, 2])
def test_mpi_ranks_that_do_not_start_get_a_second_start(tmp_path, monkeypatch, n_lost, loss, message):
    launcher, starts = tmp_path / "mpiexec", tmp_path / "starts"
    lost = f'echo start >> "{starts}"; [ "$(wc -l < "{starts}")" -gt {n_lost} ] || {loss}'
    launcher.write_text(f'#!/bin/sh\n{lost}\nexec "{mpi_launch.mpiexec()}" "$@"\n')
    launcher.chmod(0o700)
    monkeypatch.setattr("lib.ranks.handle.mpi_launch.mpiexec", lambda: str(launcher))
    monkeypatch.setattr("lib.ranks.handle.START_LIMIT_S", 20.0 if n_lost == 1 else 3.0)
    other = type(pool("mpi"))("mpi")
    try:
        if n_lost == 1:
            assert other.run(mpi_programs.world, n_ranks=2).values == [(2, True, 2)] * 2
        else:
            with pytest.raises(RankFailure, match=message):
                other.run(mpi_programs.world, n_ranks=2)
        assert len(starts.read_text().split()) == 2
        keeper = psutil.Process(other._handle.process.pid)
        assert not [child for child in keeper.children(True) if child.name() == "sleep"]
    finally:
        other.close()


@pytest.mark.parametrize(
    ("file", "is_users"),
    [("lib/moe.py", True), ("tests/chapter_19/test_moe.py", True), ("lib/workbook/grading/expect.py", False),
     ("lib/ranks/rank.py", False)],
)  # fmt: skip
def test_the_lines_that_a_report_shows_are_the_user_s(file, is_users):
    assert is_user_file(str(ROOT / file)) == is_users


@pytest.mark.parametrize(
    ("lines", "chosen"),
    [
        (["tests/chapter_12/test_fsdp.py:546", "lib/fsdp.py:90", "lib/demos/fsdp.py:7"], "lib/fsdp.py:90"),
        (["lib/given/parallel/sharding.py:29", "lib/fsdp.py:90"], "lib/fsdp.py:90"),
        (["tests/chapter_12/test_fsdp.py:546", "tests/chapter_12/test_fsdp.py:9"], "tests/chapter_12/test_fsdp.py:546"),
        ([], ""),
    ],
)
def test_where_a_rank_is_shown_is_the_learner_s_line_where_a_check_stands_between(lines, chosen):
    assert innermost(lines) == chosen


def test_default_thread_count_of_a_rank_is_one():
    assert pool("gloo").run(programs.threads).values == [1, 1]
    assert torch.get_num_threads() >= 1


@pytest.mark.parametrize(("backend", "program"), [("gloo", programs.listening), ("mpi", mpi_programs.listening)])
def test_ranks_listen_on_the_loopback_interface_only(backend, program):
    found = {address for addresses in pool(backend).run(program, n_ranks=2).values for address in addresses}
    assert found <= {"127.0.0.1", "::1"}
