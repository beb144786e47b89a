"""Wrong answers to chapter 9's exercises, each with the misconception behind it."""

from lib.workbook.grading import edits


def world(comm):
    """All ranks, whatever communicator was given."""
    from mpi4py import MPI  # which starts MPI

    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > comm.size else comm


edits("""
# scatter_scale_average
halves are cut to whole numbers, as in the C program: 19, 36, 64, 21
- part * factor => float(int(part * factor))
that is the sum: it is not divided by the number of ranks
- total / n_ranks => total
the numbers are divided by the factor, where they should be multiplied by it
- part * factor => part / factor
the factor is ignored
- part * factor => part
only rank 0 has the mean: a reduce returns None on the other ranks, and nothing was broadcast
- comm.bcast(total / n_ranks if is_root else None, root=0) => total / n_ranks if is_root else None
every rank takes its number from its own `values`; only rank 0 has them
+ return comm.allreduce(values[comm.rank] * factor) / comm.size
rank 0 computes everything and broadcasts the result; the other ranks do no work
- comm.scatter(parts, root=0) => comm.bcast(parts[0] if is_root else None, root=0)
- comm.reduce(part * factor, root=0) => sum(value * factor for value in parts)
there is a barrier before a collective, which waits by itself for what it needs
- total: Any =
+ comm.Barrier()
+ total =
- return comm.bcast
+ comm.Barrier()
+ return comm.bcast
only rank 0 raises, and the others wait in a scatter for ever
- parts = [ValueError(f"{len(parts)} values for {n_ranks} ranks: expected one for each")] * n_ranks
+ raise ValueError(f"{len(parts)} values for {n_ranks} ranks: expected one for each")
messages go through MPI.COMM_WORLD, which has all ranks, but `comm` may have only some of them
+ comm = world(comm)
  n_ranks, is_root =

# tree_broadcast
the tree always begins at rank 0; `root` is ignored
+ root = 0
  place, reach =
the root sends to all others one after the other: R - 1 rounds, in which the others are idle
- place < reach and place + reach < n_ranks => place == 0
- reach <= place < 2 * reach => place == reach
- reach *= 2 => reach += 1
each rank passes the array to the next: a chain of R - 1 rounds, not a tree
- place < reach and place + reach < n_ranks => place == reach - 1
- place + reach + root => reach + root
- reach <= place < 2 * reach => place == reach
- place - reach + root => reach - 1 + root
- reach *= 2 => reach += 1
ranks beyond the last power of two get nothing: 3 ranks need two rounds, just as 4 do
- while reach < n_ranks => while 2 * reach <= n_ranks
the message arrives in a new array, and the caller's array keeps its old numbers
+ array = array if place == 0 else np.array(array)
  buffer =
the array is filled, but not returned
- return array =>
that is MPI's own broadcast; build the tree from messages
- buffer = np.asarray(array, order="C")
+ buffer = np.array(array, order="C")
+ comm.Bcast(buffer, root)
+ reach = n_ranks
a strided array is sent as if it were contiguous, or raises an error
- np.asarray(array, order="C") => array if array.flags.c_contiguous else array.ravel(order="K")
- if buffer is not array and place != 0:
-     array[...] = buffer
+
a contiguous array is sent as it lies in memory, whether rows or columns come first, but ranks may differ in that
- np.asarray(array, order="C") => array if array.flags.forc else np.asarray(array, order="C")
the root's array is written to as well, but it may be read-only
- np.asarray(array, order="C") => np.array(array, order="C")
- and place != 0 =>
the inbox is `np.empty(n)`, which is float64 whatever the array's dtype is
- np.asarray(array, order="C") => np.empty(array.shape) if place else np.array(array, order="C")
a root that is no rank wraps around to one that is, instead of raising
+ root %= n_ranks
  if not 0 <= root
a place sends to place + 2^k even where there is none: the modulo wraps it around to a rank that never receives it
- place < reach and place + reach < n_ranks => place < reach
places are not turned into ranks: (place + root) mod R is missing its mod R
- (place + reach + root) % n_ranks => place + reach + root
- (place - reach + root) % n_ranks => place - reach + root
an Isend was never waited for: the send may not be complete when the function returns
- comm.Send(buffer, => comm.Isend(buffer,
the array is pickled (lower-case send), which copies it twice and makes it longer
- comm.Send(buffer, => comm.send(buffer,
- comm.Recv(buffer, source=(place - reach + root) % n_ranks)
+ buffer[...] = comm.recv(source=(place - reach + root) % n_ranks)
MPI needs contiguous memory, but the array is sent with whatever strides it has
- np.asarray(array, order="C") => array
messages go through MPI.COMM_WORLD, which has all ranks, but `comm` may have only some of them
+ comm = world(comm)
  n_ranks = comm.Get_size()

# ring_all_reduce
there is no all-gather: each rank has one complete chunk, and partial sums in the others
- comm.Sendrecv(mine, dest=right, recvbuf=theirs, source=left) =>
each chunk is one rank's own: the first phase replaces where it should add, or the all-gather begins with chunk r, where
after the first phase rank r has chunk r + 1 summed
- chunks[(rank - step + 1) % n_ranks], chunks[(rank - step) % n_ranks]
+ chunks[(rank - step) % n_ranks], chunks[(rank - step - 1) % n_ranks]
the inbox is `np.empty(n)`, which is float64 whatever the array's dtype is
- np.empty_like(chunks[0]) => np.empty(chunks[0].size)
that is the mean, where the sum is expected
- return total => return total / n_ranks
the argument is overwritten; the sum should be a new array
- return total
+ array[...] = total
+ return array
every rank waits in Send before any rank receives: a large Send blocks until its message is received
- comm.Sendrecv(mine, dest=right, recvbuf=received, source=left)
+ comm.Send(mine, dest=right)
+ comm.Recv(received, source=left)
- comm.Sendrecv(mine, dest=right, recvbuf=theirs, source=left)
+ comm.Send(mine, dest=right)
+ comm.Recv(theirs, source=left)
the whole array goes around the ring instead of its chunks: R - 1 messages, each R times too long
+ passing, inbox = total.copy(), np.empty_like(total)
+ for _ in range(n_ranks - 1):
+     comm.Sendrecv(passing, dest=right, recvbuf=inbox, source=left)
+     passing = inbox.copy()
+     total += passing
+ return total
  chunks = np
every rank sends everything to rank 0, which adds it and sends it back: that is no ring
+ if rank > 0:
+     comm.Send(total, dest=0)
+     comm.Recv(total, source=0)
+     return total
+ inbox = np.empty_like(total)
+ for other in range(1, n_ranks):
+     comm.Recv(inbox, source=other)
+     total += inbox
+ for other in range(1, n_ranks):
+     comm.Send(total, dest=other)
+ return total
  chunks = np
that is MPI's own Allreduce; build the ring from messages
+ comm.Allreduce(total.copy(), total)
+ return total
  chunks = np
the last n mod R numbers are not summed: chunks need not be equally long
- np.array_split(total.reshape(-1), n_ranks) => np.split(total.reshape(-1)[: total.size // n_ranks * n_ranks], n_ranks)
all chunks but the last have ceil(n / R) numbers: lengths may differ by at most one
- chunks = np.array_split(total.reshape(-1), n_ranks)
+ longest = -(-total.size // n_ranks)
+ chunks = [total.reshape(-1)[i * longest : (i + 1) * longest] for i in range(n_ranks)]
the ring runs the other way: each rank sends to its left neighbour
- right, left = (rank + 1) % n_ranks, (rank - 1) % n_ranks
+ right, left = (rank - 1) % n_ranks, (rank + 1) % n_ranks
+ rank = -rank % n_ranks
the result is flat, or has another dtype
- return total => return total.reshape(-1)
chunks are pickled (lower-case sendrecv), which copies them twice and makes them longer
- comm.Sendrecv(mine, dest=right, recvbuf=received, source=left)
+ received = comm.sendrecv(mine, dest=right, source=left)
- comm.Sendrecv(mine, dest=right, recvbuf=theirs, source=left)
+ theirs[...] = comm.sendrecv(mine, dest=right, source=left)
an Isend was never waited for: the send may not be complete when the function returns
- comm.Sendrecv(mine, dest=right, recvbuf=received, source=left)
+ comm.Isend(mine, dest=right)
+ comm.Recv(received, source=left)
- comm.Sendrecv(mine, dest=right, recvbuf=theirs, source=left)
+ comm.Isend(mine, dest=right)
+ comm.Recv(theirs, source=left)
left and right are exchanged, but not in the chunks' numbers, which are those of a ring to the right
- right, left = (rank + 1) % n_ranks, (rank - 1) % n_ranks
+ right, left = (rank - 1) % n_ranks, (rank + 1) % n_ranks
the reduce-scatter has R - 2 steps, and a sum of R ranks takes R - 1
- range(n_ranks - 1):
-     mine, theirs = chunks[(rank - step) % n_ranks], chunks[(rank - step - 1) % n_ranks]
+ range(n_ranks - 2):
+     mine, theirs = chunks[(rank - step) % n_ranks], chunks[(rank - step - 1) % n_ranks]
the all-gather has R - 2 steps, and a chunk needs R - 1 to reach all ranks
- range(n_ranks - 1):
-     mine, theirs = chunks[(rank - step + 1) % n_ranks], chunks[(rank - step) % n_ranks]
+ range(n_ranks - 2):
+     mine, theirs = chunks[(rank - step + 1) % n_ranks], chunks[(rank - step) % n_ranks]
both phases have R - 2 steps, and each needs R - 1
- range(n_ranks - 1):
-     mine, theirs = chunks[(rank - step) % n_ranks], chunks[(rank - step - 1) % n_ranks]
+ range(n_ranks - 2):
+     mine, theirs = chunks[(rank - step) % n_ranks], chunks[(rank - step - 1) % n_ranks]
- range(n_ranks - 1):
-     mine, theirs = chunks[(rank - step + 1) % n_ranks], chunks[(rank - step) % n_ranks]
+ range(n_ranks - 2):
+     mine, theirs = chunks[(rank - step + 1) % n_ranks], chunks[(rank - step) % n_ranks]
the reduce-scatter has R steps: in the last one too many, a rank adds what was already summed
- range(n_ranks - 1):
-     mine, theirs = chunks[(rank - step) % n_ranks], chunks[(rank - step - 1) % n_ranks]
+ range(n_ranks):
+     mine, theirs = chunks[(rank - step) % n_ranks], chunks[(rank - step - 1) % n_ranks]
the all-gather has R steps; R - 1 are enough, and a single rank has nobody to send to
- range(n_ranks - 1):
-     mine, theirs = chunks[(rank - step + 1) % n_ranks], chunks[(rank - step) % n_ranks]
+ range(n_ranks):
+     mine, theirs = chunks[(rank - step + 1) % n_ranks], chunks[(rank - step) % n_ranks]
what arrives is taken for chunk r - s + 1; the left neighbour sends its own, chunk (r - 1) - s
- chunks[(rank - step - 1) % n_ranks] => chunks[(rank - step + 1) % n_ranks]
without order="C" the copy keeps columns first, so `reshape(-1)` copies it, and the chunks are no views of it
- np.array(array, order="C") => np.array(array)
messages go through MPI.COMM_WORLD, which has all ranks, but `comm` may have only some of them
+ comm = world(comm)
  rank, n_ranks =

# all_reduce_seconds
only the way to the root is counted; the sum has to come back too
- n_messages * ( => n_messages / 2 * (
the logarithm is not rounded up: 7 ranks need 3 rounds
- (n_ranks - 1).bit_length() => float(np.log2(n_ranks))
the logarithm is rounded down: 7 ranks need 3 rounds, not 2
- (n_ranks - 1).bit_length() => int(np.log2(n_ranks))
the logarithm is natural, but a tree doubles in each round, so the base is 2
- (n_ranks - 1).bit_length() => int(np.ceil(np.log(n_ranks)))
the ring's messages have the whole array, where each should have an R-th of it
- n_bytes / n_ranks => n_bytes
the ring's latency is counted once, where each of its 2 (R - 1) messages has it
+ if algorithm == "ring":
+     return latency_s + n_messages * message_bytes / bandwidth
  return n_messages
the ring's messages are an (R - 1)-th of the array; there are R chunks
- n_bytes / n_ranks => n_bytes / max(n_ranks - 1, 1)
a chunk's bytes are rounded down
- n_bytes / n_ranks => n_bytes // n_ranks
fewer than one rank gives a number instead of a ValueError
- raise ValueError(f"n_ranks is {n_ranks}, expected at least 1") => return 0.0
the naive algorithm's factor 2 is missing: the sum has to come back too
- (2 * (n_ranks - 1), n_bytes), => (n_ranks - 1, n_bytes),
the tree's factor 2 is missing: it goes up once and down once
- 2 * n_rounds => n_rounds
the ring's factor 2 is missing: it has two phases, each of R - 1 steps
- 2 * (n_ranks - 1), n_bytes / n_ranks => n_ranks - 1, n_bytes / n_ranks
an unknown algorithm is taken for the ring or returns None, instead of raising
- raise ValueError(f"no algorithm {algorithm!r}: expected one of {', '.join(costs)}") => algorithm = "ring"
one rank takes 0 s before the algorithm's name is looked at
  n_rounds = (n_ranks - 1).bit_length()
+ if n_ranks == 1:
+     return 0.0

# average_gradients_mpi
gradients are summed and not divided by the number of ranks
- total.div_(comm.Get_size()) => total
it divides twice: before the sum and after it
- total.div_(comm.Get_size()) => total.div_(comm.Get_size() ** 2)
there is one Allreduce for each parameter, where one buffer holds them all
- comm.Allreduce(flat.numpy(), total.numpy())
+ for part, sums in zip(parts, total.split([part.numel() for part in parts]), strict=True):
+     comm.Allreduce(part.numpy(), sums.numpy())
a rank whose own gradient is None keeps None, where it should get the mean like all others
- p.grad = grad if p.grad is None else p.grad =>
None counts as zeros, and the mean of nothing but zeros is zeros, not None
- grads = [
+ used = [comm.allreduce(p.grad is not None) for p in parameters]
+ grads = [
- for p, grad, mean in zip(parameters, grads, means, strict=True):
+ for p, grad, mean, n_used in zip(parameters, grads, means, used, strict=True):
- p.grad = grad if p.grad is None else p.grad => p.grad = grad if n_used else None
the buffer holds more than the gradients: None needs no flag, it counts as zeros
- *parts] => *parts, torch.tensor([float(p.grad is not None) for p in parameters], dtype=dtype)]
- split([p.numel() for p in parameters]) => split([*(p.numel() for p in parameters), len(parameters)])[:-1]
the buffer is always float64: twice the bytes, though no parameter is float64
- dtype = torch.float32 => dtype = torch.float64
a rank leaves out parameters without a gradient, so buffers differ in length between ranks
- if p.requires_grad => if p.grad is not None
the sum is divided by the number of ranks that have a gradient, not by R
- grads = [
+ used = [comm.allreduce(p.grad is not None) for p in parameters]
+ grads = [
- total.div_(comm.Get_size()) => total
- for p, grad, mean in zip(parameters, grads, means, strict=True):
+ for p, grad, mean, n_used in zip(parameters, grads, means, used, strict=True):
- mean.view(p.shape) => mean.view(p.shape) / max(n_used, 1)
the buffer is always float32, and float64 gradients lose digits
- dtype = torch.promote_types(dtype, p.dtype) => pass
float16 gradients are added in float16, where a sum overflows before it is divided
- total.div_(comm.Get_size()) => total
- mean.view(p.shape) => mean.view(p.shape).to(p.dtype) / comm.Get_size()
each gradient becomes a new tensor, and other references to the old one don't see the mean
- grad.copy_(mean.view(p.shape))
- p.grad = grad if p.grad is None else p.grad
+ p.grad = mean.view(p.shape).to(p)
parameters are averaged, not their gradients
- torch.zeros_like(p) if p.grad is None else p.grad.detach() => p.detach()
- p.grad = grad if p.grad is None else p.grad =>
gradients are pickled (lower-case allreduce), where a buffer should be sent as it is
- comm.Allreduce(flat.numpy(), total.numpy()) => total = torch.from_numpy(comm.allreduce(flat.numpy()))
rank 0 alone gets the mean (a Reduce), and the ranks drift apart
- comm.Allreduce(flat.numpy(), total.numpy()) => comm.Reduce(flat.numpy(), total.numpy())
- mean.view(p.shape) => mean.view(p.shape) if comm.Get_rank() == 0 else grad
one rank returns at once, so its gradients that are None never become zeros
+ if comm.Get_size() == 1:
+     return
  parameters = [
there is one Allreduce for each dtype, where one buffer holds them all
- comm.Allreduce(flat.numpy(), total.numpy())
+ kinds = torch.cat([torch.full([p.numel()], p.dtype.itemsize + p.dtype.is_signed) for p in [flat[:0], *parameters]])
+ for kind in kinds.unique():
+     sums = torch.empty_like(flat[kinds == kind])
+     comm.Allreduce(flat[kinds == kind].numpy(), sums.numpy())
+     total[kinds == kind] = sums
a tied parameter is in the buffer twice
- for p in module.parameters() if => for _, p in module.named_parameters(remove_duplicate=False) if
frozen parameters get a gradient too
- if p.requires_grad =>
the mean is added to the old gradient, which it should replace
- grad.copy_(mean.view(p.shape)) => grad.add_(mean.view(p.shape))
the sum is divided by 4, whatever the number of ranks
- comm.Get_size() => 4
the buffer has the first parameter's dtype, where float64 anywhere needs float64
- torch.promote_types(dtype, p.dtype) => torch.promote_types(torch.float32, parameters[0].dtype)
a gradient that is None becomes float32 zeros, whatever the parameter's dtype
- torch.zeros_like(p) if => torch.zeros(p.shape) if
messages go through MPI.COMM_WORLD, which has all ranks, but `comm` may have only some of them
+ comm = world(comm)
  parameters = [
""")
