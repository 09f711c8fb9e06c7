"""Triton kernels run in Triton's interpreter where there is no GPU; it has to be told before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
