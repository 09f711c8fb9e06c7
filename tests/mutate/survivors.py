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
_NO_CHANGE = "setting a coverage to what it is changes nothing"
_WHOLE_HASHES = "lengths are multiples of HASH_BYTES"
_EQUAL_HALVES = "of two halves of one length either may keep the number: as many hashes are given another one"
_REASON = 'return cast("pb.PlacementReason", self._codes.item(0, index))'
_KEYS = "the dict is an ordered set: its values are not read"
_COLUMN = "blocks = np.zeros(len(self._roster.names) + 1, dtype=np.int32)  # the last one is NOBODY's"
_PACKED = 'packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)'
_CLIMBING = "climbing = np.frombuffer(sequences, dtype=HASH)[::-1].tobytes()  # leaves last, the order of edges"
_EIGHT_BYTES = "items of any type of 8 bytes are turned around alike"
EQUIVALENT: Final[dict[str, dict[tuple[str, str], str]]] = {
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
    "router/index/match.py": {
        (
            _COLUMN,
            _COLUMN.replace("+ 1", "+ 2"),
        ): "NOBODY's number is -1: its slot is the last one, and one before is unused",
        (_PACKED, _PACKED.replace("+ 7", "+ 8")): "`count` leaves out what a last byte without bits says",
        ("found.flags.writeable = False", "found.flags.writeable = None"): "numpy takes None for False",
    },
    "router/index/radix_tree.py": {
        (
            "edge, position, length = self._edges.root, 0, 0",
            "edge, position, length = self._edges.root, 0, 1",
        ): "without a child the match ends in the root, which has no blocks",
        (_CLIMBING, _CLIMBING.replace("HASH", "None")): _EIGHT_BYTES,
        (_CLIMBING, _CLIMBING.replace("dtype=HASH", "")): _EIGHT_BYTES,
        (
            "if edge.sequences.startswith(last, covered - HASH_BYTES):",
            "if edge.sequences.startswith(last, covered + HASH_BYTES):",
        ): "each block of the run is then found by itself, which takes longer",
        (
            "had_all = edge.full >> bit & 1",
            "had_all = edge.full >> bit | 1",
        ): "who does not cover all of an edge covers nothing below: looking there only takes time",
        (
            "self._held_bytes.append(0)",
            "self._held_bytes.append(1)",
        ): "one byte is no block, and blocks are what is told",
        ("touched[edge] = None", 'touched[edge] = ""'): _KEYS,
        ("touched[child] = None", 'touched[child] = ""'): _KEYS,
    },
    "router/placement/candidates.py": {
        (_REASON, _REASON.replace('"pb.PlacementReason"', "None")): "a cast does nothing when it runs",
        (_REASON, _REASON.replace("0, index", "index")): "reasons are the first row, which begins the flat array",
    },
    "router/placement/expected_prefixes.py": {
        (
            'self._root = _Node(None, b"")',
            "self._root = _Node(None, None)",
        ): "the root has no blocks, and nothing asks for them",
        ("self._waiting[expectation] = None", 'self._waiting[expectation] = ""'): _KEYS,
    },
    "router/placement/placement.py": {
        (
            "can_ship=False,",
            "can_ship=True,",
        ): "it says whether somebody else takes the prompt, and a prefill worker runs each prompt itself",
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
