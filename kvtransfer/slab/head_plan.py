"""Which KV heads the ranks of a prefill worker send to which ranks of a decode worker. Pure; both ends compute it.

A worker of n ranks holds a model's h KV heads in n slabs: h/n heads in each slab or, with more ranks than heads, every
head in n/h slabs. The first rank that holds a head sends it to every rank that wants it.
"""

from dataclasses import dataclass

SIZES = (1, 2, 4, 8)  # of a worker, in ranks


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a worker of `size` ranks."""

    rank: int = 0
    size: int = 1

    def heads(self, num_kv_heads: int) -> range:
        """The model's heads that the rank's slab holds, in this order."""
        first = self.rank * num_kv_heads // self.size
        return range(first, first + heads_per_rank(self.size, num_kv_heads))

    def sends(self, num_kv_heads: int) -> bool:
        """Whether the rank sends; False: a lower rank holds the same heads."""
        return self.rank == 0 or Shard(self.rank - 1, self.size).heads(num_kv_heads) != self.heads(num_kv_heads)


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Target:
    """A place for heads: a rank of the receiver, and heads of that rank's slab."""

    rank: int
    heads: range


@dataclass(frozen=True, slots=True)
class Part:
    """Heads that a rank sends together, and every place where they belong."""

    heads: range  # of the sender's slab
    targets: tuple[Target, ...]  # several where the receiver holds a head in several ranks


def fits(size: int, num_kv_heads: int) -> bool:
    """Whether a worker of `size` ranks can hold a model of `num_kv_heads`."""
    return size in SIZES and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def heads_per_rank(size: int, num_kv_heads: int) -> int:
    return max(1, num_kv_heads // size)


def sending_ranks(size: int, num_kv_heads: int) -> tuple[int, ...]:
    """The ranks of a prefill worker that have something to send; rank 0 is always among them."""
    return tuple(rank for rank in range(size) if Shard(rank, size).sends(num_kv_heads))


def parts(sender: Shard, receiver_size: int, num_kv_heads: int) -> tuple[Part, ...]:
    """What one rank sends, in the order of its heads: every head that it holds, once, or nothing.

    Invariant: no receiving rank is in two parts, because the heads that two ranks have in common are one range.
    """
    if not sender.sends(num_kv_heads):
        return ()
    ours = sender.heads(num_kv_heads)
    targets: dict[range, list[Target]] = {}
    for rank in range(receiver_size):
        theirs = Shard(rank, receiver_size).heads(num_kv_heads)
        common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        if common:
            targets.setdefault(common, []).append(Target(rank, _within(common, theirs)))
    return tuple(Part(_within(common, ours), tuple(wanted)) for common, wanted in targets.items())


def _within(heads: range, slab: range) -> range:
    return range(heads.start - slab.start, heads.stop - slab.start)
