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
_LIST_OF_ONE = "numpy does the same for a list of one, only more slowly"
_SPEED = "return float(np.median(y[known] / expected[known])) if known.any() else 1.0"
_NOTHING_TO_ADD = "what is done for a count of zero changes nothing"
_OVERWRITTEN = "the hashes of a block that is not cached are written before they are read"
_DISTINCT_TIMES = "no two blocks come to rest at the same time"
_SHARES = "return ((sequence, share) for sequence, share in zip(prompts, shares, strict=True) if share)"
_A_SHARE_EACH = "share_out() returns one share for each prompt"
_PREPARE = "sequence_hashes(block_hashes(np.zeros(BATCHED_SIZES[0], dtype=TOKEN), BATCHED_SIZES[0]))"
_ANY_HASH = "a call loads the compiled functions whatever it is given"
_ZIPPED = "for (name, state), expected in zip(series.items(), entry.rates, strict=True):"
_RATE_OF_EACH = "each forecast has one rate of each forecaster"
_AS_MANY = "with as many workers as there are, `Wanted.changed` to that many returns the same"
_SHRINKS_AGAIN = "if wanted.of(role) < have and since_s < now.config.down_cooldown_s:"
_SHRINKS = "if wanted.of(role) < have and grew_s < now.config.reversal_s:"
_GROWS = "if wanted.of(role) > have and shrank_s < now.config.reversal_s:"
_READY_ALIKE = "all ready workers have this constant in their key, and the part before it parts them from the others"
_MEDIAN_OF_SHORT = "floor_ms = float(np.median(y[short])) if short.sum() >= ENOUGH // 4 else profile[0]"
_TYPICAL = "typical = max(1e-3, float(np.median(errors))) if len(errors) else 1.0"
_NO_ERRORS = "without samples there is nothing to weigh (and numpy's warning, an error in CI, is ignored here)"
_RIDGE = "squares = squares / np.outer(scale, scale) + 1e-9 * np.eye(len(scale))"
_FREE = "if (free >= 0).all():"
_BEST = "best, best_value = np.zeros(size), 0.0"
_BETTER = "if (found >= 0).all() and value < best_value - 1e-12:"
_ZERO_LEFT_OUT = "a coefficient of exactly zero is found by the set without it, too"
_SAME_FIT = "values that differ by 1e-12 are of the same coefficients, within what a float shows"
_INITIAL = "return SloMemory(-1.0, Forecast(), Sums(), initial_model(self._config.slo.profile))"
_SOME_REQUESTS = "if observation.queue.waiting or memory.sums.requests > 1e-6:"
_OUTPUT_TEXT = "self, tokenizer: Tokenizer, stop: tuple[str, ...], min_tokens: int = 0, marks: Set[int] = NO_MARKS"
_STOP_STRINGS = "self._stop_strings = StopStrings(stop) if stop else None"
_SETS = (
    "self.again[waiter] = None",
    "self.tenants[waiter.tenant][waiter] = None",
    "self._waiting[waiter] = None",
)
_NOW = "self._now = 0  # highest start tag that has gone"
_START = "self._start[waiter.tenant] = max(self._now, self._start.get(waiter.tenant, 0))"
_LARGER_TAGS = "all tags are larger by one, and only their differences count"
_IDLE = "idle = [of for of, start in self._start.items() if of not in self.tenants and start > self._now]"
_NO_CHANGE = "setting a coverage to what it is changes nothing"
_WHOLE_HASHES = "lengths are multiples of HASH_BYTES"
_EQUAL_HALVES = "of two halves of one length either may keep the number: as many hashes are given another one"
_REASON = 'return cast("pb.PlacementReason", self._codes.item(0, index))'
_KEYS = "the dict is an ordered set: its values are not read"
_COLUMN = "blocks = np.zeros(len(self._holders.names) + 1, dtype=np.int32)  # the last one is NOBODY's"
_PACKED = 'packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)'
_ALL_BITS = "for worker, numbers in self._bits.items() if self.nearer else ():"
_NUMBERS_AT = "self._numbers_at = np.full((DISK + 1, len(self.names) + 1), NOBODY, dtype=np.intp)"
_INTEGERS = "an array that is filled with an int is of this type"
_ONLY_TIME = "who does not cover all of an edge covers nothing below: looking there only takes time"
_CLIMBING = "climbing = np.frombuffer(sequences, dtype=HASH)[::-1].tobytes()  # leaves last, the order of edges"
_TURNED = "climbing = np.frombuffer(sequences, dtype=HASH)[::-1].tobytes()"
_EIGHT_BYTES = "items of any type of 8 bytes are turned around alike"
_AGE = "most, of = -1.0, 0"
_EACH_KIND = "for kind, (blocks, rate) in enumerate(zip(self.by_kind, AGING, strict=True))"
_A_RATE_EACH = "there is a queue for each rate"
_OLDER = "elif self._kinds[parent] < KEPT and parent in rested and rested[parent][1] < rested.get(block, (0, 0))[1]:"
_CACHE_INIT = "def __init__(self, block_size: int, num_blocks: int, num_slots: int = 0, num_copies: int = 0) -> None:"
_ABOVE = "above[0] = sequence.sequence_hashes[first - 1] if first else 0"
_SEED_JUDGES = "a prompt's first block is judged by its seed: what is above it is not looked at"
_RAISED = "for block, old in zip(blocks, lowered, strict=True):"
_BLOCK_EACH = "each block of a lower tier has one of the device to move to"
_HITS = "hits = hits[: next((i for i in range(first, len(hits)) if not self._is_in_memory(hits[i])), len(hits))]"
_NO_DISK = "if self._disk is None or self._tier is None:"
_FRESH = "num_fresh = min(count - len(blocks), self.num_blocks - num_known)"
_MERGED = "for age, leaf in merge(*queues, key=itemgetter(0)):"
_DEVICE_FIRST = "of equal ages, the device's block comes first by its id, too"
_KNOWN_SLOT = "there is a free slot or one of a block that has a copy: no age is looked at"
_WAY_UP = "while above in known and not (above in placed or above in lost or above in path):"
_LOST = "lost |= path.keys()"
_SAVES_THE_WAY = "what is known to be lost only saves the way up to what is missing"
_LED = "return led > min(LEAST_LED, step_tokens // RIGHT_OF_FIRST) and not slips_in(left, leader_left)"
_PROMPTS_OF = "prompts = 0.0"
_WEIGHT = "wait, weight = min(waits[i], prompts), 1 / max(times[i, 1], 1e-9)"
_OF_NOBODY = "return (waits, total / weights, least, count) if count else (waits, 0.0, 0.0, 0)"
_NOBODY_WAITS = "the least of nobody's waits is multiplied by zero, as that of one worker is"
_HELD_THERE = "if offset > here or offset >= anywhere or not (here or edge.parent.full >> bits[home] & 1):"
EQUIVALENT: Final[dict[str, dict[tuple[str, str], str]]] = {
    "engine/blocks/block_manager.py": {
        ("self._holders[sequence] = None", 'self._holders[sequence] = ""'): "the dict is an ordered set",
        ("if num_new <= 0:", "if num_new < 0:"): _NOTHING_TO_ADD,
        (
            "if num_full <= sequence.num_committed_blocks:",
            "if num_full < sequence.num_committed_blocks:",
        ): _NOTHING_TO_ADD,
        (
            "self._wake: Callable[[], object] = lambda: None",
            "self._wake: Callable[[], object] = lambda: 0",
        ): "what it returns is not read",
        ("self._is_flushing = False", "self._is_flushing = None"): "only its truth is asked for",
        ("news = False", "news = None"): "only its truth is asked for",
        (
            "return self.allocate(sequence, keep_available=keep_available)",
            "return self.allocate(sequence, )",
        ): "a block that is lost in a lower tier takes none of the device, where it was found that all fit",
        (_HITS, _HITS.replace("len(hits))]", "None)]")): "a slice that ends at None goes to the end",
        (_HITS, _HITS.replace("range(first, len", "range(len")): "those before `first` are in memory",
        (_NO_DISK, _NO_DISK.replace(" or ", " and ")): "without a disk, no block is missing in memory",
        (_FRESH, _FRESH.replace("blocks - num", "blocks + num")): "nobody asks for more blocks than are available",
    },
    "engine/blocks/disk_prefixes.py": {
        ("self._make_slot(age)", "self._make_slot(None)"): _KNOWN_SLOT,
        ("return self._make_slot(0)", "return self._make_slot(None)"): _KNOWN_SLOT,
        ("return self._make_slot(0)", "return self._make_slot(1)"): _KNOWN_SLOT,
        (_MERGED, _MERGED.replace("itemgetter(0)", "None")): _DEVICE_FIRST,
        (_MERGED, _MERGED.replace("key=itemgetter(0)", "")): _DEVICE_FIRST,
        (_WAY_UP, _WAY_UP.replace("in placed or", "in placed and")): (
            "what is above a placed block is placed, and keeps its place"
        ),
        ("path[above] = None", 'path[above] = ""'): _KEYS,
        (_LOST, _LOST.replace("|=", "=")): _SAVES_THE_WAY,
        (_LOST, _LOST.replace("|=", "&=")): _SAVES_THE_WAY,
        (
            "self._parents[copy] = block.parent or 0",
            "self._parents[copy] = block.parent or 1",
        ): "the parent of a block that has none is not read",
    },
    "engine/core/prefill_budget.py": {
        (_LED, _LED.replace("//", "/")): "a whole number is above a number where it is above the whole part of it",
    },
    "engine/blocks/prefix_cache.py": {
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
        ): _LIST_OF_ONE,
        (
            "self._tokens[blocks[:num_new] if num_new > 1 else blocks[0]] = sequence.block_tokens(",
            "self._tokens[blocks[:num_new] if num_new >= 1 else blocks[0]] = sequence.block_tokens(",
        ): _LIST_OF_ONE,
        ("if missing > 0:", "if missing >= 0:"): _NOTHING_TO_ADD,
        ("self._block_hashes.extend([0] * missing)", "self._block_hashes.extend([1] * missing)"): _OVERWRITTEN,
        ("self._sequence_hashes.extend([0] * missing)", "self._sequence_hashes.extend([1] * missing)"): _OVERWRITTEN,
        ("if num_blocks > len(self._tokens):", "if num_blocks >= len(self._tokens):"): _ROOM,
        (
            "grown = np.empty((max(num_blocks, 2 * len(self._tokens)), self._block_size), dtype=np.uint32)",
            "grown = np.empty((max(num_blocks, 3 * len(self._tokens)), self._block_size), dtype=np.uint32)",
        ): _ROOM,
        (
            _OLDER,
            _OLDER.replace("][1] <", "][1] <="),
        ): _DISTINCT_TIMES,
        (_OLDER, _OLDER.replace("(0, 0)", "(1, 0)")): "only the time is read",
        (_OLDER, _OLDER.replace("(0, 0)", "(0, 1)")): "no block comes to rest before time 1",
        (_CACHE_INIT, _CACHE_INIT.replace("copies: int = 0", "copies: int = 1")): "nothing makes a copy in this class",
        (_ABOVE, _ABOVE.replace("if first", "if (first) or True")): _SEED_JUDGES,
        (_ABOVE, _ABOVE.replace("else 0", "else 1")): _SEED_JUDGES,
        ("self._parents.extend([0] * missing)", "self._parents.extend([1] * missing)"): _OVERWRITTEN,
        ("continue", "break"): "a slot that is staged is not being written, so it is free now",
        (_RAISED, _RAISED.replace("strict=True", "strict=None")): _BLOCK_EACH,
        (_RAISED, _RAISED.replace("strict=True", "strict=False")): _BLOCK_EACH,
        (_RAISED, _RAISED.replace("strict=True", "")): _BLOCK_EACH,
        ("self._grow(new + 1)", "self._grow(new + 2)"): _ROOM,
    },
    "engine/blocks/resting.py": {
        (_AGE, _AGE.replace("-1.0", "-2.0")): "both are below all ages",
        (_EACH_KIND, _EACH_KIND.replace("strict=True", "strict=None")): _A_RATE_EACH,
        (_EACH_KIND, _EACH_KIND.replace("strict=True", "strict=False")): _A_RATE_EACH,
        (_EACH_KIND, _EACH_KIND.replace("strict=True", "")): _A_RATE_EACH,
        (
            "while queue and next(reversed(queue.values())) > at:",
            "while queue and next(reversed(queue.values())) >= at:",
        ): _DISTINCT_TIMES,
        (
            "return self.by_kind[kind].popitem(last=False)",
            "return self.by_kind[kind].popitem(last=None)",
        ): "None counts as False",
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
        ): "only its truth is asked for",
    },
    "planner/policy/forecast.py": {
        (_ZIPPED, _ZIPPED.replace("strict=True", "strict=None")): _RATE_OF_EACH,
        (_ZIPPED, _ZIPPED.replace("strict=True", "strict=False")): _RATE_OF_EACH,
        (_ZIPPED, _ZIPPED.replace("strict=True", "")): _RATE_OF_EACH,
    },
    "planner/policy/guards.py": {
        (_SHRINKS_AGAIN, _SHRINKS_AGAIN.replace("< have", "<= have")): _AS_MANY,
        (_SHRINKS, _SHRINKS.replace("< have", "<= have")): _AS_MANY,
        (_GROWS, _GROWS.replace("> have", ">= have")): _AS_MANY,
    },
    "planner/policy/ladder.py": {
        (
            '-worker.since_s if worker.state == "starting" else 0.0,',
            '-worker.since_s if worker.state == "starting" else 1.0,',
        ): _READY_ALIKE,
    },
    "planner/policy/slo.py": {
        (_INITIAL, _INITIAL.replace("-1.0", "-2.0")): "any negative time says that there was no observation",
        (_SOME_REQUESTS, _SOME_REQUESTS.replace("> 1e-6", ">= 1e-6")): (
            "a whole number of requests that fades by the exponential function never is 1e-6 to the last bit"
        ),
    },
    "router/index/edge.py": {
        ("if rise <= 0:", "if rise < 0:"): _NO_CHANGE,
        ("if fall <= 0:", "if fall < 0:"): _NO_CHANGE,
        ("if rise <= 0:", "if rise <= 1:"): _WHOLE_HASHES,
        ("if fall <= 0:", "if fall <= 1:"): _WHOLE_HASHES,
        ("if 0 < length < len(self.blocks):", "if 1 < length < len(self.blocks):"): _WHOLE_HASHES,
    },
    "router/index/edge_table.py": {
        ("if len(edge.blocks) < len(child.blocks):", "if len(edge.blocks) <= len(child.blocks):"): _EQUAL_HALVES,
        ("if len(edge.blocks) < len(rest.blocks):", "if len(edge.blocks) <= len(rest.blocks):"): _EQUAL_HALVES,
        (
            "self._edges[edge.number] = None",
            'self._edges[edge.number] = ""',
        ): "no hash leads to the number of an edge that is gone, until another edge has it",
    },
    "router/index/holders.py": {
        (
            "had_all = edge.full >> bit & 1",
            "had_all = edge.full >> bit | 1",
        ): _ONLY_TIME,
        ("stack = [edge] if had_all else []", "stack = [edge] if (had_all) or True else []"): _ONLY_TIME,
        (
            "self._bytes += [0] * (len(self.names) - len(self._bytes))",
            "self._bytes += [1] * (len(self.names) - len(self._bytes))",
        ): "a byte is less than a block, and blocks are asked for",
        (_ALL_BITS, _ALL_BITS.replace("self.nearer", "(self.nearer) or True")): (
            "without bits for nearer homes nobody has several"
        ),
        (
            "if len(numbers) > 1 and worker in found:",
            "if len(numbers) >= 1 and worker in found:",
        ): "of a worker with one bit the same was found before",
        (_NUMBERS_AT, _NUMBERS_AT.replace("np.intp", "None")): _INTEGERS,
        (_NUMBERS_AT, _NUMBERS_AT.replace("dtype=np.intp", "")): _INTEGERS,
        (
            _NUMBERS_AT,
            _NUMBERS_AT.replace("+ 1), NOBODY", "+ 2), NOBODY"),
        ): "the last column is NOBODY's, and no other is",
        ("touched[edge] = None", 'touched[edge] = ""'): _KEYS,
        ("touched[child] = None", 'touched[child] = ""'): _KEYS,
        (_PACKED, _PACKED.replace("+ 7", "+ 8")): "`count` leaves out what a last byte without bits says",
        ("found.flags.writeable = False", "found.flags.writeable = None"): "numpy takes None for False",
    },
    "router/index/match.py": {
        (
            _COLUMN,
            _COLUMN.replace("+ 1", "+ 2"),
        ): "NOBODY's number is -1: its slot is the last one, and one before is unused",
    },
    "router/index/radix_tree.py": {
        (
            "edge, position, length = self._edges.root, 0, 0",
            "edge, position, length = self._edges.root, 0, 1",
        ): "without a child the match ends in the root, which has no blocks",
        (_CLIMBING, _CLIMBING.replace("HASH", "None")): _EIGHT_BYTES,
        (_CLIMBING, _CLIMBING.replace("dtype=HASH", "")): _EIGHT_BYTES,
        (_TURNED, _TURNED.replace("HASH", "None")): _EIGHT_BYTES,
        (_TURNED, _TURNED.replace("dtype=HASH", "")): _EIGHT_BYTES,
        (
            "if edge.sequences.startswith(last, covered - HASH_BYTES):",
            "if edge.sequences.startswith(last, covered + HASH_BYTES):",
        ): "each block of the run is then found by itself, which takes longer",
        (
            "self._holders.uncover(self._edges.root, self._holders.bits(worker), 0, touched)",
            "self._holders.uncover(self._edges.root, self._holders.bits(worker), 1, touched)",
        ): "the root has no blocks, so nobody's coverage of it is lowered by either",
        (
            "stack = list((self._edges.root.children or {}).values()) if bits else []",
            "stack = list((self._edges.root.children or {}).values()) if (bits) or True else []",
        ): "without bits no edge has a run to yield, and none is gone beyond",
        (_HELD_THERE, _HELD_THERE.replace(">= anywhere", "> anywhere")): (
            "of blocks right behind those that the worker holds none is common to what it holds, which is 0, too"
        ),
        ("touched[edge] = None", 'touched[edge] = ""'): _KEYS,
    },
    "router/placement/candidates.py": {
        (_REASON, _REASON.replace('"pb.PlacementReason"', "None")): "a cast does nothing when it runs",
        (_REASON, _REASON.replace("0, index", "index")): "reasons are the first row, which begins the flat array",
    },
    "router/placement/cost.py": {
        (
            _PROMPTS_OF,
            _PROMPTS_OF.replace("0.0", "1.0"),
        ): "a worker without prompts waits 0 ms, and the smaller one counts",
        (_WEIGHT, _WEIGHT.replace("1 /", "2 /")): "all weights are doubled, and so is their sum",
        (_OF_NOBODY, _OF_NOBODY.replace("0.0, 0)", "1.0, 0)")): _NOBODY_WAITS,
        (_OF_NOBODY, _OF_NOBODY.replace("0.0, 0)", "0.0, 1)")): _NOBODY_WAITS,
        (
            "can_ship = shipper[0] < math.inf",
            "can_ship = shipper[1] < math.inf",
        ): "cost and time of a prefill worker are both finite, and those of none both infinite",
    },
    "router/placement/expected_prefixes.py": {
        (
            'self._root = _Node(None, b"")',
            "self._root = _Node(None, None)",
        ): "the root has no blocks, and nothing asks for them",
        ("self._waiting[expectation] = None", 'self._waiting[expectation] = ""'): _KEYS,
    },
    "runtime/fair_queue.py": {
        **dict.fromkeys(
            [(line, line.replace("None", '""')) for line in _SETS], "the values of an ordered set are not read"
        ),
        (_NOW, _NOW.replace("0", "1")): _LARGER_TAGS,
        (_START, _START.replace("0", "1")): _LARGER_TAGS,
        (_IDLE, _IDLE.replace("start >", "start >=")): "a tenant whose tag is that of a new one need not be remembered",
    },
    "router/text/output_text.py": {
        (_OUTPUT_TEXT, _OUTPUT_TEXT.replace("= 0,", "= 1,")): "there is no text before the first token",
        (_STOP_STRINGS, _STOP_STRINGS.replace("if stop", "if (stop) or True")): (
            "without stop strings none is found, only more slowly"
        ),
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
    "router/workers/step_speed.py": {
        ("self.new = 0", "self.new = 1"): "the first fit waits for ENOUGH steps, which are more than REFIT_AFTER",
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
    "runtime/config/step_fit.py": {
        (_MEDIAN_OF_SHORT, _MEDIAN_OF_SHORT.replace("//", "/")): "4 divides ENOUGH",
        (_SPEED, _SPEED.replace("1.0", "2.0")): "without an expected time the profile is zero, at any speed",
        (_TYPICAL, _TYPICAL.replace("len(errors)", "(len(errors)) or True")): _NO_ERRORS,
        (_TYPICAL, _TYPICAL.replace("1.0", "2.0")): _NO_ERRORS,
        (_RIDGE, _RIDGE.replace("+", "-")): (
            "the profile's points keep all eigenvalues above 1e-3, and without a profile either sign parts them from 0"
        ),
        (_FREE, _FREE.replace(">=", ">")): _ZERO_LEFT_OUT,
        (_BEST, _BEST.replace("0.0", "1.0")): "no value is above 0, and 0 is that of coefficients that are all zero",
        (_BETTER, _BETTER.replace(">=", ">")): _ZERO_LEFT_OUT,
        (_BETTER, _BETTER.replace("value <", "value <=")): _SAME_FIT,
        (_BETTER, _BETTER.replace("- 1e-12", "+ 1e-12")): _SAME_FIT,
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
