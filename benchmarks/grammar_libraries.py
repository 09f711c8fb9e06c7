"""llguidance, which follows grammars here, beside xgrammar: how long compiling and a mask take, and who is right.

    pip install --target FOLDER --no-deps xgrammar apache-tvm-ffi
    python -m benchmarks.grammar_libraries --xgrammar FOLDER [--tokenizer FILE] [--schemas 200] [--json FILE]
                                           [--suite FOLDER]

Vocabularies: that of `--tokenizer` (a tokenizer.json), and a made-up one of 152,000 tokens (all bytes, then random
strings of 2 to 8 letters, spaces and JSON's signs). Random schemas from a seed; of each two instances, and three with
one value changed, judged by jsonschema. A library is right when it lets the valid ones pass to their end and no others.
`--suite`: a folder of the JSON-Schema-Test-Suite, such as tests/draft2020-12; its schemas and instances are measured
as well, with its own word for which are valid. jsonschema's source distribution has it in json/tests.
Each library runs in a process of its own, so that its memory can be told.
"""

import argparse
import copy
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tokenizers

from benchmarks.machine import describe
from tests.baton.random_schemas import instance_of, random_schema
from tests.baton.schema_judge import is_valid

SYNTHETIC = 152_000
Case = tuple[dict[str, Any], list[tuple[Any, bool]]]
"""A schema, and instances of which each is valid or not."""
LIBRARIES = ("llguidance", "xgrammar")


def synthetic_tokens(seed: int = 0) -> list[bytes]:
    source, found = random.Random(seed), dict.fromkeys(bytes([byte]) for byte in range(256))
    signs = b'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789    _-.,:;"{}[]()\n\xc3\xa4\xc3\xbc'
    while len(found) < SYNTHETIC - 1:
        found[bytes(source.choices(signs, k=source.randint(2, 8)))] = None
    return [*found, b"<end>"]


def tokens_of(path: Path | None) -> tuple[list[bytes], int]:
    """(the bytes of each token, the end's id)"""
    if path is None:
        tokens = synthetic_tokens()
        return tokens, len(tokens) - 1
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    to_byte = {char: byte for byte, char in _byte_chars().items()}
    tokens = []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.id_to_token(token_id)
        plain = all(char in to_byte for char in text)
        tokens.append(bytes(to_byte[char] for char in text) if plain else text.encode())
    end = tokenizer.token_to_id("<|im_end|>")
    return tokens, int(end)


def _byte_chars() -> dict[int, str]:
    """The characters that byte-level BPE (GPT-2) writes for bytes."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + at) for at, byte in enumerate(others)}


class Llguidance:
    def __init__(self, tokens: list[bytes], end: int) -> None:
        import llguidance

        ids = ids_of(tokens)

        class Wrapped:
            eos_token_id, bos_token_id, special_token_ids = end, None, [end]

            def __init__(self) -> None:
                self.tokens = tokens

            def __call__(self, text: bytes | str) -> list[int]:
                return _split(text.encode() if isinstance(text, str) else text, ids)  # a forced text has these tokens

        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wrapped()), n_vocab=len(tokens))
        self._words = np.zeros(-(-len(tokens) // 32), dtype=np.int32)
        self._end = np.zeros_like(self._words)
        self._end.view(np.uint32)[end // 32] = 1 << end % 32

    def compile(self, schema: dict[str, Any]) -> Any:
        grammar = self._library.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}"}
        )
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def matcher(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def mask(self, matcher: Any) -> np.ndarray:
        if matcher.is_stopped() and not matcher.is_error():
            return self._end
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return self._words

    def accept(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.consume_token(token_id))


class Xgrammar:
    def __init__(self, tokens: list[bytes], end: int) -> None:
        import xgrammar

        self._library = xgrammar
        info = xgrammar.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=[end])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._words = xgrammar.allocate_token_bitmask(1, len(tokens))

    def compile(self, schema: dict[str, Any]) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=16)

    def matcher(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def mask(self, matcher: Any) -> np.ndarray:
        matcher.fill_next_token_bitmask(self._words)
        return np.asarray(self._words[0])

    def accept(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.accept_token(token_id))


def follows(library: Any, compiled: Any, token_ids: list[int], end: int, times_us: list[float]) -> bool:
    matcher = library.matcher(compiled)
    for token_id in [*token_ids, end]:
        started = time.perf_counter()
        words = library.mask(matcher)
        times_us.append((time.perf_counter() - started) * 1e6)
        if not int(words[token_id // 32]) >> token_id % 32 & 1:
            return False
        if token_id != end and not library.accept(matcher, token_id):
            return False
    return True


def mutated(source: random.Random, instance: Any) -> Any:
    """One value is replaced, left out or added."""
    changed = copy.deepcopy(instance)
    if isinstance(changed, dict) and changed and source.random() < 0.8:
        name = source.choice(list(changed))
        if source.random() < 0.3:
            del changed[name]
        else:
            changed[name] = mutated(source, changed[name])
        return changed
    if isinstance(changed, list) and changed and source.random() < 0.8:
        at = source.randrange(len(changed))
        changed[at] = mutated(source, changed[at])
        return changed
    return source.choice([None, True, 4711, -0.5, "something else that is long", [], {}])


def random_cases(schemas: int) -> Iterator[Case]:
    source = random.Random(19)
    for _ in range(schemas):
        schema = random_schema(source)
        instances = [instance_of(source, schema) for _ in range(2)]
        instances += [mutated(source, instances[0]) for _ in range(3)]
        yield schema, [(instance, is_valid(schema, instance)) for instance in instances]


def suite_cases(folder: Path) -> Iterator[Case]:
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text()):
            schema = case["schema"]
            schema = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
            yield schema, [(test["data"], test["valid"]) for test in case["tests"]]


def measure(name: str, tokenizer: Path | None, cases: Iterable[Case]) -> dict[str, Any]:
    tokens, end = tokens_of(tokenizer)
    ids = ids_of(tokens)
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    library = (Llguidance if name == "llguidance" else Xgrammar)(tokens, end)
    vocabulary_ms = (time.perf_counter() - started) * 1e3
    compile_ms: list[float] = []
    times_us: list[float] = []
    kept, counts = [], {"schemas": 0, "refused": 0, "valid": 0, "valid passed": 0, "invalid": 0, "invalid passed": 0}
    for schema, instances in cases:
        counts["schemas"] += 1
        started = time.perf_counter()
        try:
            compiled = library.compile(schema)
        except Exception:  # each library has its own
            counts["refused"] += 1
            continue
        compile_ms.append((time.perf_counter() - started) * 1e3)
        kept.append(compiled)
        for instance, valid in instances:
            text = json.dumps(instance, ensure_ascii=False, separators=(", ", ": ")).encode()
            kind = "valid" if valid else "invalid"
            counts[kind] += 1
            counts[f"{kind} passed"] += follows(library, compiled, _split(text, ids), end, times_us)
    grown = psutil.Process().memory_info().rss - before
    return {
        "library": name,
        "vocabulary": len(tokens),
        "vocabulary ms": round(vocabulary_ms, 1),
        "compile ms p50": round(float(np.percentile(compile_ms, 50)), 2),
        "compile ms p99": round(float(np.percentile(compile_ms, 99)), 2),
        "mask us p50": round(float(np.percentile(times_us, 50)), 1),
        "mask us p99": round(float(np.percentile(times_us, 99)), 1),
        "masks": len(times_us),
        "MiB more with all kept": round(grown / (1 << 20), 1),
        **counts,
    }


def ids_of(tokens: list[bytes]) -> dict[bytes, int]:
    return {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}


def _split(text: bytes, ids: dict[bytes, int]) -> list[int]:
    """The longest token first."""
    found, at = [], 0
    while at < len(text):
        size = next(size for size in range(16, 0, -1) if text[at : at + size] in ids)
        found.append(ids[text[at : at + size]])
        at += len(text[at : at + size])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xgrammar", type=Path, help="the folder that it was installed into")
    parser.add_argument("--tokenizer", type=Path, help="a byte-level tokenizer.json")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--suite", type=Path, help="a folder of the JSON-Schema-Test-Suite")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=LIBRARIES, help="measure this library, here, with --tokenizer or without")
    arguments = parser.parse_args()
    if arguments.only:
        if arguments.xgrammar:
            sys.path.append(str(arguments.xgrammar))
        cases = suite_cases(arguments.suite) if arguments.suite else random_cases(arguments.schemas)
        print(json.dumps(measure(arguments.only, arguments.tokenizer, cases)))
        return
    rows = []
    vocabularies = [arguments.tokenizer, None] if arguments.tokenizer else [None]
    libraries = LIBRARIES if arguments.xgrammar else LIBRARIES[:1]
    for suite in [None, arguments.suite] if arguments.suite else [None]:
        for tokenizer, library in itertools.product(vocabularies, libraries):
            command = [sys.executable, "-m", "benchmarks.grammar_libraries", "--only", library]
            command += ["--schemas", str(arguments.schemas)]
            command += ["--xgrammar", str(arguments.xgrammar)] if library == "xgrammar" else []
            command += ["--tokenizer", str(tokenizer)] if tokenizer else []
            command += ["--suite", str(suite)] if suite else []
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append({"cases": "test suite" if suite else "random", **json.loads(said.splitlines()[-1])})
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
