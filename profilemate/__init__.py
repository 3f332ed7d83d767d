# SPDX-License-Identifier: Apache-2.0
"""Profiles vLLM's KV cache and CUDA graphs without a change to vLLM."""

import os

__version__ = "0.1.0"

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder that holds this package: with it on its path, any Python finds profilemate."""


def load_ipython_extension(shell: object) -> None:
    """What IPython calls at ``%load_ext profilemate``. Nothing else does."""
    from importlib import import_module

    # By its name: what records imports this package, and must not import the analyzer.
    import_module("analysis.notebook").load(shell)
