# SPDX-License-Identifier: Apache-2.0
"""Profiles vLLM's KV cache and CUDA graphs without a change to vLLM."""

import os

__version__ = "0.1.0"

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder that holds this package: with it on its path, any Python finds profilemate."""
