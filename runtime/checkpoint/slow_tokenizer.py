"""Makes a tokenizer.json of a SentencePiece tokenizer.model, once, beside it.

transformers converts, in a process of its own: `python -m runtime.checkpoint.slow_tokenizer FOLDER`. Because a class
that does not suit the model is converted into a tokenizer that splits otherwise, texts are split by both. A text that
begins with a space loses one, as in transformers.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from runtime.errors import ModelError

FAST, SLOW = "tokenizer.json", "tokenizer.model"
SAMPLES: Final = (
    "The quick brown fox, aged 31, jumps over 1,024 lazy dogs.",
    "def f(x):\n    return {'a': x ** 2}  # naïve",
    "Grüße aus 東京 \N{SLIGHTLY SMILING FACE}",
)


def make_tokenizer_json(folder: Path) -> None:
    """Raises ModelError."""
    command = [sys.executable, "-m", "runtime.checkpoint.slow_tokenizer", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if run.returncode:
        problem = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        raise ModelError(str(folder), f"{FAST} is missing and cannot be made of {SLOW}: {problem}")


def main(folder: Path) -> None:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        sys.exit("it takes sentencepiece: pip install sentencepiece")
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    pieces = SentencePieceProcessor(model_file=str(folder / SLOW))
    for text in SAMPLES:
        if made.encode(text, add_special_tokens=False).ids != pieces.encode(text):
            sys.exit(f"transformers' tokenizer splits {text!r} otherwise; is tokenizer_class right?")
    unfinished = folder / f".{FAST}.{os.getpid()}"
    made.save(str(unfinished))
    unfinished.replace(folder / FAST)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
