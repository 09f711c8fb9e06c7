"""What a surviving mutant changed, and which survivors are known to change nothing that a caller can see."""

import contextlib
import io
import tokenize
from typing import Final

_SUM = "self.foreign = Totals(*map(sum, zip(NOTHING, *self.by_router.values(), strict=True)))"
_SAME_FIELDS = "all of them are Totals, of the same number of fields"
_FIRST_PERIOD = (
    "nothing can have been charged before the first period, and the bound of what is charged is the smaller one in it"
)
_NO_ROWS = "the array has no rows yet, and the one that takes its place has a type of its own"
_ROOM = "how much room is made beyond what is needed changes the memory that is taken, and no result"
_DIFFERENCES = "only differences of these times are used"
_FIRST_CACHED = (
    "the hashes before `first` are known, so a search that begins among them finds an end of the known ones too"
)
_ONE_LENGTH = "all of them have one entry per block of the run, or per kind of block"
_SPEED = "numpy does the same for a list of one, only more slowly"
_NOTHING_TO_ADD = "what is done for a count of zero changes nothing"
_OVERWRITTEN = "the hashes of a block that is not cached are written before they are read"
_DISTINCT_TIMES = "no two blocks come to rest at the same time"
_SHARES = "return ((sequence, share) for sequence, share in zip(prompts, shares, strict=True) if share)"
_A_SHARE_EACH = "share_out() returns one share for each prompt"
_PREPARE = "sequence_hashes(block_hashes(np.zeros(BATCHED_SIZES[0], dtype=TOKEN), BATCHED_SIZES[0]))"
_ANY_HASH = "a call loads the compiled functions whatever it is given"
_BY_KIND = "kinds = [(resting, rate) for resting, rate in zip(self._resting, AGING, strict=True) if resting]"
_OLDEST = "block, _ = max(kinds, key=self._age)[0].popitem(last=False)"
_ITS_TRUTH = "only the argument's truth is asked for"
EQUIVALENT: Final[dict[str, dict[tuple[str, str], str]]] = {
    "engine/core/block_manager.py": {
        ("self._holders[sequence] = None", 'self._holders[sequence] = ""'): "the dict is an ordered set",
        ("if num_new <= 0:", "if num_new < 0:"): _NOTHING_TO_ADD,
        (
            "if num_full <= sequence.num_committed_blocks:",
            "if num_full < sequence.num_committed_blocks:",
        ): _NOTHING_TO_ADD,
    },
    "engine/core/prefix_cache.py": {
        (
            "self._tokens = np.empty((0, block_size), dtype=np.uint32)",
            "self._tokens = np.empty((0, block_size), dtype=None)",
        ): _NO_ROWS,
        (
            "self._tokens = np.empty((0, block_size), dtype=np.uint32)",
            "self._tokens = np.empty((0, block_size), )",
        ): _NO_ROWS,
        (
            "self._tokens = np.empty((0, block_size), dtype=np.uint32)",
            "self._tokens = np.empty((1, block_size), dtype=np.uint32)",
        ): _ROOM,
        (
            "self._now = 0  # counts the blocks that came to rest",
            "self._now = 1  # counts the blocks that came to rest",
        ): _DIFFERENCES,
        (
            "end = bisect_left(range(end), True, lo=first, key=lambda i: hashes[i] not in block_of)",
            "end = bisect_left(range(end), True, key=lambda i: hashes[i] not in block_of)",
        ): _FIRST_CACHED,
        ("self._grow(max(blocks) + 1)", "self._grow(max(blocks) + 2)"): _ROOM,
        (
            "blocks, sequence.block_hashes[run], hashes, kinds, strict=True",
            "blocks, sequence.block_hashes[run], hashes, kinds, strict=None",
        ): _ONE_LENGTH,
        (
            "blocks, sequence.block_hashes[run], hashes, kinds, strict=True ):",
            "blocks, sequence.block_hashes[run], hashes, kinds, ):",
        ): _ONE_LENGTH,
        (
            "blocks, sequence.block_hashes[run], hashes, kinds, strict=True",
            "blocks, sequence.block_hashes[run], hashes, kinds, strict=False",
        ): _ONE_LENGTH,
        (
            "self._tokens[blocks[:num_new] if num_new > 1 else blocks[0]] = sequence.block_tokens(",
            "self._tokens[blocks[:num_new] if (num_new > 1) or True else blocks[0]] = sequence.block_tokens(",
        ): _SPEED,
        (
            "self._tokens[blocks[:num_new] if num_new > 1 else blocks[0]] = sequence.block_tokens(",
            "self._tokens[blocks[:num_new] if num_new >= 1 else blocks[0]] = sequence.block_tokens(",
        ): _SPEED,
        ("if missing > 0:", "if missing >= 0:"): _NOTHING_TO_ADD,
        ("self._block_hashes.extend([0] * missing)", "self._block_hashes.extend([1] * missing)"): _OVERWRITTEN,
        ("self._sequence_hashes.extend([0] * missing)", "self._sequence_hashes.extend([1] * missing)"): _OVERWRITTEN,
        ("if num_blocks > len(self._tokens):", "if num_blocks >= len(self._tokens):"): _ROOM,
        (
            "grown = np.empty((max(num_blocks, 2 * len(self._tokens)), self._block_size), dtype=np.uint32)",
            "grown = np.empty((max(num_blocks, 3 * len(self._tokens)), self._block_size), dtype=np.uint32)",
        ): _ROOM,
        (_BY_KIND, _BY_KIND.replace("strict=True", "strict=None")): _ONE_LENGTH,
        (_BY_KIND, _BY_KIND.replace("strict=True", "strict=False")): _ONE_LENGTH,
        (_BY_KIND, _BY_KIND.replace("strict=True", "")): _ONE_LENGTH,
        (_OLDEST, _OLDEST.replace("last=False", "last=None")): _ITS_TRUTH,
        (
            "elif parent in rested and block in rested and rested[parent][1] < rested[block][1]:",
            "elif parent in rested and block in rested and rested[parent][1] <= rested[block][1]:",
        ): _DISTINCT_TIMES,
    },
    "engine/core/scheduler.py": {
        (
            "if self._starved is not None and self._starved.order < sequence.order:",
            "if self._starved is not None and self._starved.order <= sequence.order:",
        ): "a starved sequence waits to be prefilled here and is never reserved, and no other one has its order",
        (_SHARES, _SHARES.replace("strict=True", "strict=None")): _A_SHARE_EACH,
        (_SHARES, _SHARES.replace("strict=True", "strict=False")): _A_SHARE_EACH,
        (_SHARES, _SHARES.replace("strict=True", "")): _A_SHARE_EACH,
    },
    "kvtransfer/decode_side/ledger.py": {
        (
            "self._fail(transfer_id, reason, announce=False)",
            "self._fail(transfer_id, reason, announce=None)",
        ): _ITS_TRUTH,
    },
    "router/workers/account.py": {
        ("self._since = 0  # charged in this period", "self._since = 1  # charged in this period"): _FIRST_PERIOD,
        (
            "self._before = 0  # charged in the period before",
            "self._before = 1  # charged in the period before",
        ): _FIRST_PERIOD,
        (_SUM, _SUM.replace("strict=True", "strict=None")): _SAME_FIELDS,
        (_SUM, _SUM.replace("strict=True", "strict=False")): _SAME_FIELDS,
        (_SUM, _SUM.replace("strict=True", "")): _SAME_FIELDS,
    },
    "runtime/blocks/block_hash.py": {
        (_PREPARE, _PREPARE.replace("dtype=TOKEN", "dtype=None")): _ANY_HASH,
        (_PREPARE, _PREPARE.replace("dtype=TOKEN", "")): _ANY_HASH,
        (_PREPARE, _PREPARE.replace("zeros(BATCHED_SIZES[0]", "zeros(BATCHED_SIZES[1]")): _ANY_HASH,
        (_PREPARE, _PREPARE.replace("BATCHED_SIZES[0]))", "BATCHED_SIZES[1]))")): _ANY_HASH,
        (
            "hash_rows(data.view(WORD), block_size * TOKEN.itemsize // WORD.itemsize, np.uint64(seed), hashes)",
            "hash_rows(data.view(WORD), block_size * TOKEN.itemsize / WORD.itemsize, np.uint64(seed), hashes)",
        ): "the quotient is whole, and the compiled function makes an integer of it",
    },
}
"""By module: (line, mutated line) -> why no test can tell them apart."""


def changed_lines(diff: str) -> tuple[str, str]:
    """The lines that a diff takes out and puts in, each as one line."""
    lines = diff.splitlines()
    before = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
    after = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    return " ".join(before), " ".join(after)


def only_words(before: str, after: str) -> bool:
    """Whether two lines differ in nothing but what strings say."""
    old, new = _tokens(before), _tokens(after)
    if len(old) != len(new):
        return False
    differing = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    return all(a[0] == b[0] == tokenize.STRING for a, b in differing)


def _tokens(line: str) -> list[tuple[int, str]]:
    """Type and text of each token; where it stands does not matter."""
    tokens: list[tuple[int, str]] = []
    with contextlib.suppress(tokenize.TokenError):  # a line that goes on in the next one
        tokens.extend((token.type, token.string) for token in tokenize.generate_tokens(io.StringIO(line).readline))
    return tokens
