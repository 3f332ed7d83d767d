# SPDX-License-Identifier: Apache-2.0
"""Profiles vLLM's KV cache and CUDA graphs without a change to vLLM."""

__version__ = "0.1.0"
