# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, KV cache manager and block pool, without a model, a GPU or an engine.

This runs in processes of its own, never in an engine that is profiled.
"""
